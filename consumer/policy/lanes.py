"""Lanes: per ticket, messages in id order, one in flight; different tickets side by side. Pure; the caller holds one lock over a board.

What a lane is doing::

    ready ---take---> running ---release---> ready       something waits
                         |                   (forgotten) nothing waits
                         +--hold until t---> waiting      a retry: the ticket waits, the slot does not
                         +--hold-----------> held         an acknowledgement or a dead letter must be in Redis first

The ids a board holds are those that were handed over and are not yet acknowledged; a second hand-over of one is ignored.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from common.stream_id import rank


class HasId(Protocol):
    """A message, as far as lanes care."""

    @property
    def stream_id(self) -> bytes: ...


M = TypeVar("M", bound=HasId)


class Lane(Generic[M]):
    """One ticket's queue. ``queue`` belongs to whoever runs the lane; others may only append to it, or put into ``early``."""

    __slots__ = ("busy", "early", "forgotten", "last", "queue", "ticket")

    def __init__(self, ticket: bytes) -> None:
        self.ticket = ticket
        self.queue: deque[M] = deque()
        self.early: list[M] = []  # ids below ones already queued (released late, moved): merged before the next start
        self.last = -1  # rank of the last message queued
        self.forgotten = False  # while it runs: what runs is not its ticket's owner any more
        self.busy = False  # ready, running, waiting or held: it is in one place only

    def merge_early(self) -> None:
        """Put late arrivals with lower ids to their places."""
        merged = sorted([*self.queue, *self.early], key=lambda message: rank(message.stream_id))
        self.early.clear()
        self.queue.clear()
        self.queue.extend(merged)


class LaneBoard(Generic[M]):
    """All lanes of a consumer."""

    def __init__(self) -> None:
        self.lanes: dict[bytes, Lane[M]] = {}
        self.ready: deque[Lane[M]] = deque()
        self.held_ids: set[bytes] = set()
        self._waiting: list[tuple[float, int, Lane[M]]] = []  # heap by due time
        self._order = 0
        self.running = 0

    def unknown(self, ids: Iterable[bytes]) -> list[bytes]:
        """Those of the ids that the board does not hold yet."""
        held = self.held_ids
        return [entry_id for entry_id in ids if entry_id not in held]

    def add(self, ticket: bytes, messages: Sequence[M]) -> None:
        """Messages of one ticket, in id order. Those below what is queued go before it, but never before what runs."""
        lane = self.lanes.get(ticket)
        if lane is None:
            lane = self.lanes[ticket] = Lane(ticket)
        first = rank(messages[0].stream_id)
        if first > lane.last:
            lane.queue.extend(messages)
            lane.last = rank(messages[-1].stream_id) if len(messages) > 1 else first
        else:
            lane.early.extend(messages)
            lane.last = max(lane.last, rank(messages[-1].stream_id))
        self.held_ids.update([message.stream_id for message in messages])
        if not lane.busy:
            lane.busy = True
            self.ready.append(lane)

    def take(self) -> Lane[M] | None:
        """A lane to run, or None."""
        if not self.ready:
            return None
        self.running += 1
        lane = self.ready.popleft()
        lane.forgotten = False  # only what runs while its ticket is forgotten is another's
        return lane

    def release(self, lane: Lane[M]) -> None:
        """Its runner is done with it for now."""
        self.running -= 1
        self._settle(lane)

    def hold(self, lane: Lane[M]) -> None:
        """Its runner is done with it; nothing of it starts before ``let_go``."""
        self.running -= 1

    def let_go(self, lane: Lane[M]) -> None:
        """What a held lane waited for has happened."""
        self._settle(lane)

    def retry(self, lane: Lane[M], message: M, due_s: float) -> None:
        """Its runner is done with it; ``message`` is first in it again, and it is ready at ``due_s``. If the ticket was forgotten while
        the message ran, the message is dropped."""
        if lane.forgotten:
            self.done([message.stream_id])
            self.release(lane)
        else:
            lane.queue.appendleft(message)
            self.hold_until(lane, due_s)

    def put_back(self, lane: Lane[M], messages: Sequence[M]) -> None:
        """Its runner took these and did not end them: they come first in it again, in their order. If the ticket was forgotten while they
        ran, they are dropped."""
        if lane.forgotten:
            self.done([message.stream_id for message in messages])
        else:
            lane.queue.extendleft(reversed(messages))

    def hold_until(self, lane: Lane[M], due_s: float) -> None:
        """Its runner is done with it; it is ready again at ``due_s``."""
        self.running -= 1
        self._order += 1
        heapq.heappush(self._waiting, (due_s, self._order, lane))

    def wake_due(self, now_s: float) -> float | None:
        """Make lanes ready whose time has come. Returns when the next one is due, or None."""
        while self._waiting and self._waiting[0][0] <= now_s:
            self.ready.append(heapq.heappop(self._waiting)[2])
        return self._waiting[0][0] if self._waiting else None

    def done(self, ids: Iterable[bytes]) -> None:
        """Redis has the acknowledgement (or the dead letter): the ids are forgotten."""
        self.held_ids.difference_update(ids)

    def forget(self, ticket: bytes) -> None:
        """Another owner has the ticket: nothing queued of it starts here. A lane that runs stays in its place until it ends, so that the
        ticket, should it come back to us, cannot run twice at once."""
        lane = self.lanes.get(ticket)
        if lane is not None:
            lane.forgotten = True
            self._empty(lane)

    def quiet(self) -> dict[bytes, list[bytes]]:
        """Per ticket that does not run: its queued ids in order. For a drain; retries that wait count as quiet."""
        held = {lane.ticket for lane in self.ready} | {lane.ticket for _, _, lane in self._waiting}
        found = {}
        for ticket in held:
            lane = self.lanes[ticket]
            if lane.early:
                lane.merge_early()
            found[ticket] = [message.stream_id for message in lane.queue]
        return found

    def drop_quiet(self, tickets: Iterable[bytes]) -> None:
        """These tickets were given back."""
        gone = set(tickets)
        self.ready = deque(lane for lane in self.ready if lane.ticket not in gone)
        self._waiting = [item for item in self._waiting if item[2].ticket not in gone]
        heapq.heapify(self._waiting)
        for ticket in gone:
            self._empty(self.lanes.pop(ticket))

    def _empty(self, lane: Lane[M]) -> None:
        self.done([message.stream_id for message in (*lane.queue, *lane.early)])
        lane.queue.clear()
        lane.early.clear()

    def _settle(self, lane: Lane[M]) -> None:
        lane.forgotten = False
        if lane.queue or lane.early:
            self.ready.append(lane)
        else:
            lane.busy = False
            if self.lanes.get(lane.ticket) is lane:
                del self.lanes[lane.ticket]
