"""Ready lanes of which the most urgent is first. Pure.

A lane is as urgent as the most urgent of its messages, which run in their order. Of ``_MOST_IN_ROW`` + 1 lanes at least
one is the one that waits longest among the least urgent, so that a stream of urgent messages stops no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from usher.consumer.policy.lanes import HasId, Lane

M = TypeVar("M", bound=HasId)
_MOST_IN_ROW = 7


class UrgentLanes(deque[Lane[M]]):
    """Queue of ready lanes, in place of a plain one. ``priority_of``: returns the priority of a message."""

    def __init__(self, priority_of: Callable[[M], int]) -> None:
        super().__init__()
        self._priority_of = priority_of
        self._in_row = 0

    def append(self, lane: Lane[M]) -> None:
        """Add a lane behind those that are as urgent."""
        priority = self._priority(lane)
        if not priority or not self:
            super().append(lane)
            return
        at = next((at for at, other in enumerate(self) if self._priority(other) < priority), len(self))
        self.insert(at, lane)

    def popleft(self) -> Lane[M]:
        lane = super().popleft()
        priority = self._priority(lane)
        self._in_row = self._in_row + 1 if priority else 0
        if self._in_row <= _MOST_IN_ROW or not self:
            return lane
        self._in_row = 0
        lowest = self._priority(self[-1])
        at = next(at for at, other in enumerate(self) if self._priority(other) <= lowest)
        if lowest >= priority:
            return lane
        patient = self[at]
        del self[at]
        self.appendleft(lane)
        return patient

    def sort(self) -> None:
        """Sort the lanes anew: some of them got messages."""
        lanes = sorted(self, key=self._priority, reverse=True)  # equals stay in their order
        self.clear()
        self.extend(lanes)

    def _priority(self, lane: Lane[M]) -> int:
        return max(map(self._priority_of, (*lane.queue, *lane.early)), default=0)
