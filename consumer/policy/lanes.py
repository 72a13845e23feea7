"""Lanes: per ticket, messages in id order, one in flight; different tickets side by side. Pure; the caller holds one
lock over a board.

The states of a lane, and the methods that change them::

    (none) ---add---> ready ---take---> running ---release---> ready or (none), as something is queued or not
                                           |
                                           +---retry----> waiting     the ticket waits for its retry, the slot not
                                           +---hold-----> held        an acknowledgement or a dead letter comes first
                                           +---isolate--> suspect     its first message runs in a child process
                                                                      (quarantine.py)
    waiting ----wake_due-------> ready
    held -------resume---------> ready or (none)
    held -------wait-----------> waiting
    ready ------close_unstarted> (none)       the leader wants the ticket for another consumer
    suspect ----take_suspect---> running

    requeue: the runner gives back messages that it did not end, and goes on running the lane
    forget, drop_quiet: the ticket, or its queued messages, are not ours any more

The ids that a board holds (``held_ids``) are those that were handed over and are not yet acknowledged, whatever the
state of their lane, not only those of *held* lanes; a second hand-over of one is ignored. Under a closed fence nothing
more of a ticket is ours: messages that come under it are passed over.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from usher.common.protocol.stream_id import rank


class HasId(Protocol):
    @property
    def stream_id(self) -> bytes: ...
    @property
    def fence(self) -> int: ...


M = TypeVar("M", bound=HasId)


class Lane(Generic[M]):
    """The queue of one ticket's messages. ``queue`` belongs to the runner of the lane; other threads may only append to
    it, or put messages into ``early``."""

    __slots__ = ("apart", "busy", "early", "forgotten", "last", "queue", "settled", "ticket")

    def __init__(self, ticket: bytes) -> None:
        self.ticket = ticket
        self.queue: deque[M] = deque()
        self.early: list[M] = []  # ids below queued ones (given back, or parked long): merged before the next start
        self.last = b""  # the highest id ever queued
        self.settled = b"0-0"  # and that when the ticket began, after it had settled
        # While the lane runs: a message under this fence, or a lower one, has lost its ticket to another owner.
        self.forgotten = 0
        self.busy = False  # in one of the states above, and in one place only
        self.apart = False  # it runs in a child process

    def merge_early(self) -> None:
        merged = sorted([*self.queue, *self.early], key=lambda message: rank(message.stream_id))
        self.early.clear()
        self.queue.clear()
        self.queue.extend(merged)


class LaneBoard(Generic[M]):
    def __init__(self) -> None:
        self.lanes: dict[bytes, Lane[M]] = {}
        self.ready: deque[Lane[M]] = deque()
        self._suspects: deque[Lane[M]] = deque()
        self.held_ids: set[bytes] = set()
        self.given_up: set[bytes] = set()  # those of them that an operator has given up
        self.waiting: list[tuple[float, int, Lane[M]]] = []  # heap by due time
        self._order = 0
        self.running = 0
        self.running_apart = 0
        self._closed_fences: dict[bytes, tuple[int, bool]] = {}  # ticket -> fence, and whether Redis has confirmed it

    def unknown(self, ids: Iterable[bytes]) -> list[bytes]:
        held = self.held_ids
        return [entry_id for entry_id in ids if entry_id not in held]

    def is_ending(self, ticket: bytes, ids: Iterable[bytes]) -> bool:
        """Return whether the board holds one of the ids and it is not queued: it runs, or has ended and Redis has not
        confirmed that yet."""
        held = self.held_ids.intersection(ids)
        lane = self.lanes.get(ticket) if held else None
        return bool(
            held.difference(message.stream_id for message in (*lane.queue, *lane.early)) if lane is not None else held
        )

    def add(self, ticket: bytes, messages: Sequence[M]) -> None:
        """Queue messages of one ticket, in id order. Lower ids go before queued messages, but never before one that
        runs."""
        if ticket in self._closed_fences:
            limit = self._closed_fences[ticket][0]
            messages = [message for message in messages if message.fence > limit]
        if not messages:
            return
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
            self.ready.append(lane)

    def take(self) -> Lane[M] | None:
        if not self.ready:
            return None
        self.running += 1
        lane = self.ready.popleft()
        lane.forgotten = 0  # it concerns only messages that run while their ticket is forgotten
        return lane

    @property
    def has_suspects(self) -> bool:
        return bool(self._suspects)

    def take_suspect(self) -> Lane[M] | None:
        if not self._suspects:
            return None
        self.running_apart += 1
        lane = self._suspects.popleft()
        lane.apart, lane.forgotten = True, 0
        return lane

    def release(self, lane: Lane[M]) -> None:
        if lane.queue or lane.early or lane.apart:
            self.hold(lane)
            self.resume(lane)
        else:  # the usual case, at the least cost
            self.running -= 1
            lane.forgotten, lane.busy = 0, False
            if self.lanes.get(lane.ticket) is lane:
                del self.lanes[lane.ticket]

    def hold(self, lane: Lane[M]) -> None:
        """Take the lane from its runner; none of its messages starts before ``resume``."""
        if lane.apart:
            lane.apart = False
            self.running_apart -= 1
        else:
            self.running -= 1

    def resume(self, lane: Lane[M]) -> None:
        """Let a lane go on that nobody runs: a held one, when the write that it waited for has happened."""
        lane.forgotten = 0
        if lane.queue or lane.early:
            self.ready.append(lane)
        else:
            lane.busy = False
            if self.lanes.get(lane.ticket) is lane:
                del self.lanes[lane.ticket]

    def retry(self, lane: Lane[M], message: M, due_s: float) -> None:
        """Take the lane from its runner; ``message`` is first in it again, and the lane is ready at ``due_s``. If the
        ticket was forgotten while the message ran, the message is dropped."""
        self.hold(lane)
        self.wait(lane, message, due_s)

    def wait(self, lane: Lane[M], message: M, due_s: float) -> None:
        """Do the same for a lane that is held. What an operator has given up meanwhile does not wait."""
        if self._requeue_first(lane, message):
            self._order += 1
            due_s = 0.0 if message.stream_id in self.given_up else due_s
            heapq.heappush(self.waiting, (due_s, self._order, lane))

    def requeue(self, lane: Lane[M], messages: Sequence[M]) -> None:
        """Put messages that the runner took and did not end back at the front of the lane, in their order. If the
        ticket was forgotten while they ran, they are dropped."""
        self.done([message.stream_id for message in messages if message.fence <= lane.forgotten])
        lane.queue.extendleft(message for message in reversed(messages) if message.fence > lane.forgotten)

    def isolate(self, lane: Lane[M], message: M) -> None:
        """Take the lane from its runner, which has not started ``message``: it is first in the lane again, and runs in
        a child process."""
        self.hold(lane)
        if self._requeue_first(lane, message):
            self._suspects.append(lane)

    def wake_due(self, now_s: float) -> float | None:
        """Make waiting lanes ready whose time has come. Return when the next one is due, or None."""
        while self.waiting and self.waiting[0][0] <= now_s:
            self.ready.append(heapq.heappop(self.waiting)[2])
        return self.next_due_s()

    def hasten(self, ticket: bytes, entry_id: bytes) -> bool:
        """Make the ticket's lane ready now if it waits to start this message again. Return whether it did. For people:
        it looks through all waiting lanes."""
        lane = self.lanes.get(ticket)
        found = [item for item in self.waiting if item[2] is lane]
        if lane is None or not found or not lane.queue or lane.queue[0].stream_id != entry_id:
            return False  # it may wait with nothing queued, because its ticket was forgotten
        self.waiting.remove(found[0])
        heapq.heapify(self.waiting)
        self.ready.append(lane)
        return True

    def let_go(self, tickets: Collection[bytes]) -> None:
        self.waiting = [
            (0.0 if lane.ticket in tickets else due_s, number, lane) for due_s, number, lane in self.waiting
        ]
        heapq.heapify(self.waiting)

    def next_due_s(self) -> float | None:
        return self.waiting[0][0] if self.waiting else None

    def done(self, ids: Iterable[bytes]) -> None:
        self.held_ids.difference_update(ids)
        self.given_up &= self.held_ids

    def over(self, ticket: bytes, ids: Iterable[bytes]) -> list[bytes]:
        """Return those of these ids, which were handed over here, that are over; none of a ticket that goes back."""
        return [] if ticket in self._closed_fences else self.unknown(ids)

    def forget(self, ticket: bytes, fence: int) -> list[bytes]:
        """Drop messages of the ticket that came under ``fence`` or a lower one, because another owner got the ticket
        after it, and return their ids.

        Messages under a later fence are ours: the ticket has come back. A lane that runs stays in its place until it
        ends, so that it cannot run twice at once.
        """
        dropped: list[bytes] = []
        lane = self.lanes.get(ticket)
        if lane is None:
            return dropped
        lane.forgotten = max(lane.forgotten, fence)
        for queue in (lane.queue, lane.early):
            for message in (*queue,):
                if message.fence <= fence:
                    with contextlib.suppress(ValueError):  # its runner took it at this moment
                        queue.remove(message)
                        dropped.append(message.stream_id)
        self.done(dropped)
        return dropped

    def close_fence(self, ticket: bytes, fence: int, given_up: bytes) -> list[bytes]:
        """Drop messages of the ticket that came under ``fence``, pass over those that the inbox still names under it,
        and return their ids, ``given_up`` among them. The lane is held."""
        self.done([given_up])
        self._closed_fences[ticket] = (fence, False)
        return [given_up, *self.forget(ticket, fence)]

    def close_unstarted(
        self, recalled: Iterable[tuple[bytes, int, Sequence[bytes]]]
    ) -> list[tuple[bytes, int, list[bytes]]]:
        """Close the fences of those tickets of which nothing was started under them, drop their lanes, and return
        them, with their ids. ``recalled``: tickets, fences, and the ids that their records named when the leader
        wanted them back.

        Whatever was started of a ticket is among the ids that its record had when it was recalled, because all that was
        handed over before is in the lanes: what ended stays a held id until its acknowledgement is answered.
        """
        unstarted = {lane.ticket: lane for lane in self.ready}
        closed = [
            (ticket, fence, [message.stream_id for message in (*lane.queue, *lane.early)])
            for ticket, fence, ids in recalled
            if (lane := unstarted.get(ticket)) is not None
            and {message.fence for message in (*lane.queue, *lane.early)} == {fence}
            and not self.is_ending(ticket, ids)
        ]
        if closed:
            self._closed_fences.update((ticket, (fence, False)) for ticket, fence, _ in closed)
            self.drop_quiet(ticket for ticket, _, _ in closed)
        return closed

    def confirm_closed(self, ticket: bytes, fence: int) -> None:
        if self._closed_fences.get(ticket) == (fence, False):
            self._closed_fences[ticket] = (fence, True)

    def closed_fences(self) -> list[tuple[bytes, int]]:
        """Return the (ticket, fence) pairs for which the inbox gets nothing more. Once all that it has now was read,
        call ``forget_closed`` with them."""
        return [(ticket, fence) for ticket, (fence, is_sure) in self._closed_fences.items() if is_sure]

    def forget_closed(self, fences: Iterable[tuple[bytes, int]]) -> None:
        for ticket, fence in fences:
            if self._closed_fences.get(ticket) == (fence, True):
                del self._closed_fences[ticket]

    def quiet(self) -> dict[bytes, tuple[int, list[bytes], float | None]]:
        """Return each ticket that has something queued and does not run: its fence, its ids in order, and when it is
        due, if it waits. For a drain; waiting lanes count as quiet."""
        held: dict[bytes, float | None] = {lane.ticket: None for lane in (*self.ready, *self._suspects)}
        held |= {lane.ticket: due_s for due_s, _, lane in self.waiting}
        found = {}
        for ticket, due_s in held.items():
            lane = self.lanes[ticket]
            if lane.early:
                lane.merge_early()
            if lane.queue:
                fence = max(message.fence for message in lane.queue)
                found[ticket] = fence, [message.stream_id for message in lane.queue], due_s
        return found

    def look(self, ticket: bytes) -> tuple[list[M], float | None, bool]:
        """Return a ticket's queued messages in order, when the first of them is due again (None: it does not wait), and
        whether it runs, or is to run, in a child process. For people: it looks through all waiting lanes."""
        lane = self.lanes.get(ticket)
        if lane is None:
            return [], None, False
        queued = sorted((*lane.queue, *lane.early), key=lambda message: rank(message.stream_id))
        due_s = next((due_s for due_s, _, waiting in self.waiting if waiting is lane), None)
        return queued, due_s, lane.apart or any(other is lane for other in self._suspects)

    def drop_quiet(self, tickets: Iterable[bytes]) -> None:
        gone = set(tickets)
        for queue in (self.ready, self._suspects):
            kept = [lane for lane in queue if lane.ticket not in gone]
            queue.clear()
            queue.extend(kept)
        self.waiting = [item for item in self.waiting if item[2].ticket not in gone]
        heapq.heapify(self.waiting)
        for ticket in gone:
            self._empty(self.lanes.pop(ticket))

    def _empty(self, lane: Lane[M]) -> None:
        self.done([message.stream_id for message in (*lane.queue, *lane.early)])
        lane.queue.clear()
        lane.early.clear()

    def _requeue_first(self, lane: Lane[M], message: M) -> bool:
        """Put ``message`` first in the lane again. Return False when another owner has the ticket: the message is
        dropped, and the lane ends its run."""
        if message.fence <= lane.forgotten:
            self.done([message.stream_id])
            self.resume(lane)
            return False
        lane.queue.appendleft(message)
        return True
