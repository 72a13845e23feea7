"""Ready lanes where tenants or priorities are configured: the most urgent lane is first, and of equally urgent ones the
tenants have turns. Pure.

The leader decides how much of which tenant is here; in which order that runs, decides how long a tenant waits that was
quiet. A lane is as urgent as the most urgent of its messages, which run in their order. Of ``_MOST_IN_ROW`` + 1 lanes
at least one is of the least urgent, so that a stream of urgent messages stops no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from usher.common.protocol.marks import Mark
from usher.consumer.policy.lanes import HasId, Lane

M = TypeVar("M", bound=HasId)
_MOST_IN_ROW = 7
#: How urgent a lane is (the lower the more), and its turn among the equally urgent.
_Place = tuple[int, float]


class FairLanes(deque[Lane[M]]):
    """Queue of ready lanes, in place of a plain one. ``mark_of``: returns the mark of a message of this ticket.
    ``weights``: of tenants; all others have 1. ``ranks``: whether messages have priorities."""

    def __init__(self, mark_of: Callable[[bytes, M], Mark], weights: Mapping[bytes, float], ranks: bool = True) -> None:
        super().__init__()
        self._mark_of = mark_of
        self._weights, self._ranks = weights, ranks
        self._places: dict[bytes, _Place] = {}  # by ticket
        self._turns: dict[bytes, float] = {}  # the last turn of each tenant that may have one to come
        self._turn = 0.0  # the turn that was had last
        self._in_row = 0

    def append(self, lane: Lane[M]) -> None:
        """Add a lane at its place: its tenant's next turn, behind those that are as urgent and have it too."""
        messages = (*lane.queue, *lane.early) if self._ranks else (lane.early or lane.queue)
        marks = [self._mark_of(lane.ticket, one) for one in (messages if self._ranks else (messages[-1],))]
        tenant = marks[-1].tenant
        turn = self._turns[tenant] = max(self._turn, self._turns.get(tenant, 0.0)) + 1 / self._weights.get(tenant, 1.0)
        place = self._places[lane.ticket] = (-max((mark.priority for mark in marks), default=0), turn)
        at = len(self)
        while at and self._places[self[at - 1].ticket] > place:  # of a flood, the new one is the last
            at -= 1
        self.insert(at, lane)

    def popleft(self) -> Lane[M]:
        is_urgent = self._places[self[0].ticket][0] < self._places[self[-1].ticket][0]
        self._in_row = self._in_row + 1 if is_urgent else 0
        at = 0
        if self._in_row > _MOST_IN_ROW:
            self._in_row, least = 0, self._places[self[-1].ticket][0]
            at = next(at for at, lane in enumerate(self) if self._places[lane.ticket][0] == least)
        lane = self[at]
        del self[at]
        turn = self._places.pop(lane.ticket)[1]
        self._turn = max(self._turn, turn)
        if not self:
            self._turns.clear()
        return lane

    def clear(self) -> None:
        super().clear()
        self._places.clear()
        self._turns.clear()

    def extend(self, lanes: Iterable[Lane[M]]) -> None:
        for lane in lanes:
            self.append(lane)

    def got_more(self, lane: Lane[M]) -> None:
        """Give a lane that got messages another place, if it is ready and what it got is more urgent."""
        place = self._places.get(lane.ticket) if self._ranks else None
        if place and any(-self._mark_of(lane.ticket, one).priority < place[0] for one in (*lane.queue, *lane.early)):
            self.remove(lane)
            self.append(lane)
