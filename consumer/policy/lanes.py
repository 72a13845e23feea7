"""Lanes: per ticket, messages in id order, one in flight; different tickets side by side. Pure; the caller holds one
lock over a board.

What a lane is doing::

    ready ---take---> running ---release---> ready       something waits
                         |                   (forgotten) nothing waits
                         +--hold until t---> waiting      a retry: the ticket waits, the slot does not
                         +--hold-----------> held         an acknowledgement or a dead letter must be in Redis first
                         +--set apart------> apart        its first message must not run beside just anything (quarantine.py)

A lane that was apart has its isolation from when it may be taken until it is ready again. For one that must be alone,
``ready`` is another queue meanwhile: empty while anything runs, then with that lane in it, then empty again. So whoever
looks for a ready lane need not know about any of this, and a board without suspects does nothing for it.

The ids a board holds are those that were handed over and are not yet acknowledged; a second hand-over of one is
ignored.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from usher.common.protocol.stream_id import rank
from usher.consumer.policy.quarantine import Isolation

#: How long nothing starts for the sake of a lane that wants to be alone; then the others have their turn, for a longer
#: time.
_PATIENCE_S, _REST_S = 30.0, 120.0
#: Where handlers take longer than that, patience grows with each vain wait, up to this.
_MOST_PATIENCE_S = 960.0


#: A member of an enum costs a look-up in Python 3.11, and lanes are made all the time.
_TOGETHER, _ALONE = Isolation.TOGETHER, Isolation.ALONE


class HasId(Protocol):
    """A message, as far as lanes care."""

    @property
    def stream_id(self) -> bytes: ...
    @property
    def fence(self) -> int: ...


M = TypeVar("M", bound=HasId)


class Lane(Generic[M]):
    """One ticket's queue. ``queue`` belongs to whoever runs the lane; others may only append to it, or put into
    ``early``."""

    __slots__ = ("busy", "early", "forgotten", "isolation", "last", "queue", "ticket")

    def __init__(self, ticket: bytes) -> None:
        self.ticket = ticket
        self.queue: deque[M] = deque()
        self.early: list[M] = []  # ids below ones already queued (released late, moved): merged before the next start
        self.last = b""  # the highest id ever queued
        self.forgotten = (
            0  # while it runs: what runs under this fence, or a lower one, is not its ticket's owner any more
        )
        self.busy = False  # ready, running, waiting, held or apart: it is in one place only
        self.isolation = _TOGETHER  # what it has now

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
        self._queue: deque[Lane[M]] = deque()
        self.ready = self._queue  # but for the time in which a lane is, or wants to be, alone
        self._apart: deque[tuple[Lane[M], Isolation]] = deque()
        self._isolated: Lane[M] | None = None  # the one that is not TOGETHER
        self._silent_since_s: float | None = (
            None  # nothing starts, because a lane wants to be alone and something still runs
        )
        self._patience_s = _PATIENCE_S
        self.held_ids: set[bytes] = set()
        self.waiting: list[tuple[float, int, Lane[M]]] = []  # heap by due time
        self._order = 0
        self.running = 0

    def unknown(self, ids: Iterable[bytes]) -> list[bytes]:
        """Those of the ids that the board does not hold yet."""
        held = self.held_ids
        return [entry_id for entry_id in ids if entry_id not in held]

    def is_ending(self, ticket: bytes, ids: Iterable[bytes]) -> bool:
        """Whether one of the ids is held and does not wait in its lane: it runs, or it has ended and Redis has not said
        yet that it has that."""
        held = self.held_ids.intersection(ids)
        lane = self.lanes.get(ticket) if held else None
        return bool(
            held.difference(message.stream_id for message in (*lane.queue, *lane.early)) if lane is not None else held
        )

    def add(self, ticket: bytes, messages: Sequence[M]) -> None:
        """Messages of one ticket, in id order. Those below what is queued go before it, but never before what runs."""
        last = messages[-1].stream_id
        lane = self.lanes.get(ticket)
        if lane is None:
            lane = self.lanes[ticket] = Lane(ticket)
            lane.queue.extend(messages)
            lane.last = last
        elif rank(messages[0].stream_id) > rank(lane.last):
            lane.queue.extend(messages)
            lane.last = last
        else:
            lane.early.extend(messages)
            lane.last = max(lane.last, last, key=rank)
        if len(messages) == 1:
            self.held_ids.add(last)
        else:
            self.held_ids.update([message.stream_id for message in messages])
        if not lane.busy:
            lane.busy = True
            self._queue.append(lane)

    def take(self) -> Lane[M] | None:
        """A lane to run, or None."""
        if not self.ready:
            return None
        self.running += 1
        lane = self.ready.popleft()
        lane.forgotten = 0  # only what runs while its ticket is forgotten is another's
        return lane

    def release(self, lane: Lane[M]) -> None:
        """Its runner is done with it for now."""
        self.running -= 1
        if lane.queue or lane.early or lane.isolation:
            self._settle(lane)
        else:  # the usual case, at its least
            lane.forgotten, lane.busy = 0, False
            if self.lanes.get(lane.ticket) is lane:
                del self.lanes[lane.ticket]

    def hold(self, lane: Lane[M]) -> None:
        """Its runner is done with it; nothing of it starts before ``let_go``."""
        self.running -= 1

    def let_go(self, lane: Lane[M]) -> None:
        """What a held lane waited for has happened."""
        self._settle(lane)

    def end_isolation(self, lane: Lane[M]) -> None:
        """Of a held lane: what it waits for may never happen, and must not keep the others waiting."""
        self._rejoin(lane)

    def retry(self, lane: Lane[M], message: M, due_s: float) -> None:
        """Its runner is done with it; ``message`` is first in it again, and it is ready at ``due_s``. If the ticket was
        forgotten while the message ran, the message is dropped."""
        self.running -= 1
        self.retry_held(lane, message, due_s)

    def retry_held(self, lane: Lane[M], message: M, due_s: float) -> None:
        """The same for a held lane: what it waited for has happened."""
        if self._put_back(lane, message):
            self._wait(lane, due_s)

    def put_back(self, lane: Lane[M], messages: Sequence[M]) -> None:
        """Its runner took these and did not end them: they come first in it again, in their order. If the ticket was
        forgotten while they ran, they are dropped."""
        self.done([message.stream_id for message in messages if message.fence <= lane.forgotten])
        lane.queue.extendleft(message for message in reversed(messages) if message.fence > lane.forgotten)

    def set_apart(self, lane: Lane[M], message: M, isolation: Isolation) -> None:
        """Its runner is done with it, without having started ``message``, which is first in it again and runs in
        ``isolation`` only."""
        self.running -= 1
        if self._put_back(lane, message):
            self._rejoin(lane)
            self._apart.append((lane, isolation))
            self._let_in()

    def let_in(self, now_s: float) -> None:
        """Make the first lane that was set apart ready, if its time has come. To be asked when nothing is ready: only
        then it can have."""
        self._let_in()
        if self.ready is self._queue or self._isolated is not None:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = now_s
        elif (
            now_s - self._silent_since_s > self._patience_s
        ):  # something runs that may never end; the others must not wait for that
            self._silent_since_s = None
            self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE_S)
            self.ready = self._queue
            for lane, _ in self._apart:
                self._wait(lane, now_s + _REST_S)
            self._apart.clear()

    def _let_in(self) -> None:
        if not self._apart or self._isolated is not None:
            return
        lane, isolation = self._apart[0]
        if isolation is _ALONE:
            if self.ready is self._queue:
                self.ready = deque()  # nothing more starts
            if self.running:
                return
        self._apart.popleft()
        self._isolated, lane.isolation = lane, isolation
        self._patience_s = _PATIENCE_S
        self.ready.append(lane)

    def wake_due(self, now_s: float) -> float | None:
        """Make lanes ready whose time has come. Returns when the next one is due, or None."""
        while self.waiting and self.waiting[0][0] <= now_s:
            self._queue.append(heapq.heappop(self.waiting)[2])
        return self.next_due_s()

    def next_due_s(self) -> float | None:
        """When the first of the lanes that wait is due."""
        return self.waiting[0][0] if self.waiting else None

    def done(self, ids: Iterable[bytes]) -> None:
        """Redis has the acknowledgement (or the dead letter): the ids are forgotten."""
        self.held_ids.difference_update(ids)

    def forget(self, ticket: bytes, fence: int) -> None:
        """Another owner got the ticket after ``fence``: nothing of it that came under that, or before, starts here any
        more. What came under a later one is ours: the ticket has come back. A lane that runs stays in its place until
        it ends, so that it cannot run twice at once."""
        lane = self.lanes.get(ticket)
        if lane is None:
            return
        lane.forgotten = max(lane.forgotten, fence)
        for queue in (lane.queue, lane.early):
            for message in (*queue,):
                if message.fence <= fence:
                    with contextlib.suppress(ValueError):  # its runner took it at this moment
                        queue.remove(message)
                        self.done([message.stream_id])

    def quiet(self) -> dict[bytes, list[bytes]]:
        """Per ticket that does not run: its queued ids in order. For a drain; retries that wait count as quiet."""
        held = {lane.ticket for lane in (*self._queue, *self.ready)}
        held |= {lane.ticket for _, _, lane in self.waiting} | {lane.ticket for lane, _ in self._apart}
        found = {}
        for ticket in held:
            lane = self.lanes[ticket]
            if lane.early:
                lane.merge_early()
            found[ticket] = [message.stream_id for message in lane.queue]
        return found

    def look(self, ticket: bytes) -> tuple[list[M], float | None, bool]:
        """A ticket's queued messages in order, when the first of them is due again (None: it does not wait for that),
        and whether it is to run apart. For people: it looks through all lanes that wait."""
        lane = self.lanes.get(ticket)
        if lane is None:
            return [], None, False
        queued = sorted((*lane.queue, *lane.early), key=lambda message: rank(message.stream_id))
        due_s = next((due_s for due_s, _, waiting in self.waiting if waiting is lane), None)
        return queued, due_s, lane.isolation is not _TOGETHER or any(other is lane for other, _ in self._apart)

    def drop_quiet(self, tickets: Iterable[bytes]) -> None:
        """These tickets were given back."""
        gone = set(tickets)
        for queue in (self._queue, self.ready):
            kept = [lane for lane in queue if lane.ticket not in gone]
            queue.clear()
            queue.extend(kept)
        self._apart = deque(item for item in self._apart if item[0].ticket not in gone)
        if self._isolated is None:
            self.ready = self._queue  # who wanted to be alone may be gone
        self.waiting = [item for item in self.waiting if item[2].ticket not in gone]
        heapq.heapify(self.waiting)
        for ticket in gone:
            lane = self.lanes.pop(ticket)
            self._empty(lane)
            self._rejoin(lane)
        self._let_in()

    def _empty(self, lane: Lane[M]) -> None:
        self.done([message.stream_id for message in (*lane.queue, *lane.early)])
        lane.queue.clear()
        lane.early.clear()

    def _put_back(self, lane: Lane[M], message: M) -> bool:
        """``message`` is first in the lane again. False: the ticket is another's, so it is dropped, and the lane is
        settled."""
        if message.fence <= lane.forgotten:
            self.done([message.stream_id])
            self._settle(lane)
            return False
        lane.queue.appendleft(message)
        return True

    def _wait(self, lane: Lane[M], due_s: float) -> None:
        self._order += 1
        heapq.heappush(self.waiting, (due_s, self._order, lane))
        self._rejoin(lane)

    def _rejoin(self, lane: Lane[M]) -> None:
        """The end of its isolation."""
        if lane.isolation:
            lane.isolation, self._isolated = _TOGETHER, None
            self.ready = self._queue
            self._let_in()

    def _settle(self, lane: Lane[M]) -> None:
        lane.forgotten = 0
        if lane.isolation:
            self._rejoin(lane)
        if lane.queue or lane.early:
            self._queue.append(lane)
        else:
            lane.busy = False
            if self.lanes.get(lane.ticket) is lane:
                del self.lanes[lane.ticket]
