"""Lanes: per ticket, messages in id order, one in flight; different tickets side by side. The reader, the runners and
the acker share them.

The states of a lane, and the methods that change them::

    (none) ---add---> ready ---take---> running ---release---> ready or (none), as something is queued or not
                                           |
                                           +---retry----> waiting     the ticket waits for its retry, the slot not
                                           +---hold-----> held        an acknowledgement or a dead letter comes first
                                           +---isolate--> suspect     its first message runs in a child process
                                                                      (quarantine.py)
    waiting ----wake_due-------> ready
    held -------resume---------> ready or (none)
    ready ------close_unstarted> (none)       the leader wants the ticket for another consumer
    suspect ----next_suspect---> running

    requeue: the runner gives back messages that it did not end, and goes on running the lane
    forget, close_quiet: the ticket, or its queued messages, are not ours any more

The ids that are held (``held_ids``) are those that were handed over and are not yet acknowledged, whatever the state of
their lane, not only those of *held* lanes; a second hand-over of one is ignored. Under a closed fence nothing more of a
ticket is ours: messages that come under it are passed over.

Waking a thread costs more than a short handler takes, and two threads that both compute only fight for the interpreter.
So while handlers are short (``SHORT_S``), one runner takes lane after lane, and one more thread watches it: if the
runner has not ended a lane within ``_WATCH_S`` (a handler blocks after all), the watcher runs the next lane itself and
another thread watches. When handlers are not short, every ready lane wakes a thread.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from usher.common.base.clock import now_s
from usher.common.protocol.marks import NO_FIELDS, Mark, MarkFields
from usher.common.protocol.stream_id import rank
from usher.consumer.handlers.message import Message


class Lane:
    """The queue of one ticket's messages. ``queue`` belongs to the runner of the lane; other threads may only append to
    it, or put messages into ``early``."""

    __slots__ = ("apart", "busy", "early", "forgotten", "last", "queue", "settled", "ticket")

    def __init__(self, ticket: bytes) -> None:
        self.ticket = ticket
        self.queue: deque[Message] = deque()
        # Ids below queued ones (given back, or parked long): merged before the next start.
        self.early: list[Message] = []
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


_MOST_IN_ROW = 7
#: How urgent a lane is (the lower the more), and its turn among the equally urgent.
_Place = tuple[int, float]


class FairLanes(deque[Lane]):
    """Queue of ready lanes, in place of a plain one. ``mark_of``: returns the mark of a message of this ticket.
    ``weights``: of tenants; all others have 1. ``ranks``: whether messages have priorities."""

    def __init__(
        self, mark_of: Callable[[bytes, Message], Mark], weights: Mapping[bytes, float], ranks: bool = True
    ) -> None:
        super().__init__()
        self._mark_of = mark_of
        self._weights, self._ranks = weights, ranks
        self._places: dict[bytes, _Place] = {}  # by ticket
        self._turns: dict[bytes, float] = {}  # the last turn of each tenant that may have one to come
        self._turn = 0.0  # the turn that was had last
        self._in_row = 0

    def append(self, lane: Lane) -> None:
        """Add a lane at its place: its tenant's next turn, behind those that are as urgent and have it too."""
        messages = (*lane.queue, *lane.early) if self._ranks else (lane.early or lane.queue)
        marks = [self._mark_of(lane.ticket, one) for one in (messages if self._ranks else (messages[-1],))]
        tenant = marks[-1].tenant
        turn = self._turns[tenant] = max(self._turn, self._turns.get(tenant, 0.0)) + 1 / self._weights.get(tenant, 1.0)
        place = self._places[lane.ticket] = (-max((mark.priority for mark in marks), default=0), turn)
        self.insert(bisect_right(self, place, key=lambda one: self._places[one.ticket]), lane)

    def popleft(self) -> Lane:
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

    def remove(self, lane: Lane) -> None:
        super().remove(lane)
        del self._places[lane.ticket]

    def got_more(self, lane: Lane) -> None:
        """Give a lane that got messages another place, if it is ready and what it got is more urgent."""
        place = self._places.get(lane.ticket) if self._ranks else None
        if place and any(-self._mark_of(lane.ticket, one).priority < place[0] for one in (*lane.queue, *lane.early)):
            self.remove(lane)
            self.append(lane)


#: A lane whose runner is done with it for now, how many of its messages ended, and in how many seconds. A plain tuple,
#: because one is made for each lane that ran.
Ended = tuple[Lane, int, float]

SHORT_S = 0.0005
_WATCH_S = 0.002
#: Weight of the newest lane in the moving average of a handler's time.
_NEWEST = 0.2


class Lanes:
    """All lanes of a consumer. What makes a lane ready, or a runner wait, takes ``lock``; for all else, at the end, the
    caller holds it."""

    def __init__(self, marks: MarkFields = NO_FIELDS, weights: Mapping[bytes, float] | None = None) -> None:
        """Make lanes without messages. ``marks``: fields that tell the tenants and priorities of messages, if they are
        to have turns by them; ``weights``: of tenants."""
        self.by_ticket: dict[bytes, Lane] = {}
        self.ready: deque[Lane] = deque()
        self._fair: FairLanes | None = None
        if not marks.is_empty:
            self.ready = self._fair = FairLanes(
                lambda ticket, message: marks.of(message.stream_id, ticket, message.flat),
                weights or {},
                bool(marks.priority),
            )
        self._suspects: deque[Lane] = deque()
        self.held_ids: set[bytes] = set()
        self.given_up: set[bytes] = set()  # those of them that an operator has given up
        self.waiting: list[tuple[float, int, Lane]] = []  # heap by due time
        self._order = 0
        self.in_slots = self.in_children = 0  # lanes that run, in this process and in child processes
        self._closed_fences: dict[bytes, tuple[int, bool]] = {}  # ticket -> fence, and whether Redis has confirmed it
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._suspected = threading.Condition(self.lock)
        self._mean_s = 0.0
        self._idle = 0  # threads that wait for a lane
        self._ended = 0
        self._watched = False
        self._paused = False
        #: Called without waiting, when the ticket gets more, or nothing more starts.
        self.awaited: dict[Callable[[], None], bytes] = {}
        self.on_retry: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None  # for a runner that cannot wait here (an event loop)

    # ---- reader and acker --------------------------------------------------------------------------------------------

    def add(self, parts: Iterable[tuple[bytes, Sequence[Message]]]) -> None:
        with self._changed:
            for ticket, messages in parts:
                self._queue(ticket, messages)
                for wake in [one for one, of in [*self.awaited.items()] if of == ticket] if self.awaited else ():
                    wake()
                if self._fair is not None and ticket in self.by_ticket:
                    self._fair.got_more(self.by_ticket[ticket])
            self._wake(len(self.ready))
        self.on_ready()

    def closed_fences(self) -> list[tuple[bytes, int]]:
        """Return the (ticket, fence) pairs for which the inbox gets nothing more. Once all that it has now was read,
        call ``forget_closed`` with them."""
        with self.lock:
            return [(ticket, fence) for ticket, (fence, is_sure) in self._closed_fences.items() if is_sure]

    def forget_closed(self, fences: Iterable[tuple[bytes, int]]) -> None:
        with self.lock:
            for ticket, fence in fences:
                if self._closed_fences.get(ticket) == (fence, True):
                    del self._closed_fences[ticket]

    def resume(self, *lanes: Lane, here: bool = False) -> None:
        """Let lanes go on that nobody runs: held ones, when the write that they waited for has happened. ``here``: this
        thread takes a lane next, so that one needs nobody else."""
        with self._changed:
            for lane in lanes:
                self._resume(lane)
            self._wake(len(self.ready) - here)
        self.on_ready()

    def hasten(self, ticket: bytes, entry_id: bytes) -> bool:
        """Make the ticket's lane ready now if it waits to start this message again. Return whether it did. For people:
        it looks through all waiting lanes."""
        with self.lock:
            lane = self.by_ticket.get(ticket)
            waits = lane is not None and any(item[2] is lane for item in self.waiting)
            if lane is None or not waits or not lane.queue or lane.queue[0].stream_id != entry_id:
                return False  # it may wait with nothing queued, because its ticket was forgotten
        self.let_go((ticket,))
        return True

    def let_go(self, tickets: Collection[bytes]) -> None:
        with self._changed:
            self.waiting = [
                (0.0 if lane.ticket in tickets else due_s, number, lane) for due_s, number, lane in self.waiting
            ]
            heapq.heapify(self.waiting)
            self._changed.notify_all()
        self.on_ready()

    # ---- runners -----------------------------------------------------------------------------------------------------

    def next_lane(self, timeout_s: float, ended: Ended | None = None) -> Lane | None:
        """Return a lane to run; None after ``timeout_s`` or a pause. ``ended``: the lane that this runner had, in place
        of a call of ``release``."""
        with self.lock:
            if ended is not None:
                self._end(*ended)
            # As ``_wait_for_lane`` would find it: this runs for every lane.
            if self.ready and not (self.waiting or self._paused or (self.in_slots and self._mean_s < SHORT_S)):
                return self._take() if self._idle else self.take()
            return self._wait_for_lane(now_s() + timeout_s)

    def take_now(self) -> Lane | None:
        """Return a lane to run if one is ready. For an event loop, which must not wait here."""
        with self.lock:
            self.wake_due(now_s())
            return None if self._paused else self.take()

    def next_due_s(self) -> float | None:
        """Return when the next waiting lane is due; a time in the past while a lane is due and not taken yet. None: no
        lane waits."""
        with self.lock:
            return self.waiting[0][0] if self.waiting else None

    def release(self, lane: Lane, messages: int = 0, seconds: float = 0.0) -> None:
        """Take the lane from its runner, which ended ``messages`` messages in ``seconds``."""
        with self.lock:
            self._end(lane, messages, seconds)

    def hold(self, lane: Lane, ran_s: float | None = None) -> None:
        """Take the lane from its runner; none of its messages starts before ``resume``. ``ran_s``: how long its last
        message ran, if it did."""
        with self.lock:
            self._hold(lane, ran_s)

    def retry(self, lane: Lane, message: Message, due_s: float, ran_s: float | None = None) -> None:
        """Take the lane from its runner; ``message`` is first in it again, and the lane is ready at ``due_s``; at once
        if an operator has given it up meanwhile. If the ticket was forgotten while it ran, it is dropped."""
        with self._changed:
            self._hold(lane, ran_s)
            if self._requeue_first(lane, message):
                self._order += 1
                due_s = 0.0 if message.stream_id in self.given_up else due_s
                heapq.heappush(self.waiting, (due_s, self._order, lane))
            self._changed.notify()  # one thread must wait for just that long
        self.on_ready()
        self.on_retry()

    def isolate(self, lane: Lane, message: Message) -> None:
        """Take the lane from its runner, which did not start ``message``: it comes first in the lane again, and runs in
        a child process."""
        with self.lock:
            self._hold(lane)
            if self._requeue_first(lane, message):
                self._suspects.append(lane)
            self._suspected.notify()

    def next_suspect(self, timeout_s: float) -> Lane | None:
        """Return a lane whose first message is to run in a child process; None after ``timeout_s`` or a pause."""
        with self._suspected:
            if not (self._paused or self._suspects):
                self._suspected.wait(timeout_s)
            if self._paused or not self._suspects:
                return None
            self.in_children += 1
            lane = self._suspects.popleft()
            lane.apart, lane.forgotten = True, 0
            return lane

    def wake_suspects(self) -> None:
        with self._suspected:
            self._suspected.notify_all()

    # ---- drain -------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        with self._changed:
            self._paused = True
            for wake in [*self.awaited]:
                wake()
            self._changed.notify_all()
            self._suspected.notify_all()
        self.on_ready()

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def has_idle(self) -> bool:
        """Return whether a thread waits for a lane: a glance, without the lock."""
        return self._idle > 0

    @property
    def keeps_up(self) -> bool:
        """Return whether new messages are run at once: handlers are short, and no lane waits for a runner. A glance."""
        return self._is_short() and not self.ready

    @property
    def running(self) -> int:
        return self.in_slots + self.in_children

    def load(self) -> tuple[int, int]:
        return len(self.by_ticket), len(self.held_ids)

    # ---- inside, under the lock --------------------------------------------------------------------------------------

    def _wake(self, ready: int) -> None:
        """Wake the threads needed for so many ready lanes; while handlers are short, one that runs and one that
        watches."""
        if ready > 0 and self._idle:
            needed = (self.in_slots == 0) + (not self._watched) if self._is_short() else ready
            if needed:
                self._changed.notify(min(needed, ready))

    def _is_short(self) -> bool:
        return self._mean_s < SHORT_S

    def _take(self) -> Lane | None:
        lane = self.take()
        self._wake(1 if self.ready else 0)  # the next runner, or the watcher
        return lane

    def _wait_for_lane(self, until_s: float) -> Lane | None:
        while True:
            now = now_s()
            due_s = self.wake_due(now)
            if self._paused or now >= until_s:
                return None
            if self.ready and (self.in_slots == 0 or not self._is_short()):
                return self._take()
            if self.ready and not self._watched:
                if self._runner_is_stuck() and self.ready:
                    return self._take()
                continue  # other lanes may be due by now, and other threads to be woken
            self._idle += 1
            self._changed.wait(max(0.0, min(until_s, due_s if due_s is not None else until_s) - now))
            self._idle -= 1

    def _runner_is_stuck(self) -> bool:
        ended = self._ended
        self._watched = True
        self._idle += 1
        self._changed.wait_for(lambda: self._paused or self._ended != ended, _WATCH_S)
        self._idle -= 1
        self._watched = False
        return self._ended == ended and not self._paused

    def _end(self, lane: Lane, messages: int, seconds: float) -> None:
        if messages:
            self._mean_s += _NEWEST * (seconds / messages - self._mean_s)
        if lane.queue or lane.early or lane.apart:
            self._hold(lane)
            self._resume(lane)
        else:  # the usual case, at the least cost
            self._ended += 1
            self.in_slots -= 1
            lane.forgotten, lane.busy = 0, False
            if self.by_ticket.get(lane.ticket) is lane:
                del self.by_ticket[lane.ticket]

    def _hold(self, lane: Lane, ran_s: float | None = None) -> None:
        self._ended += 1
        if ran_s is not None:
            self._mean_s += _NEWEST * (ran_s - self._mean_s)
        if lane.apart:
            lane.apart = False
            self.in_children -= 1
        else:
            self.in_slots -= 1

    def _resume(self, lane: Lane) -> None:
        lane.forgotten = 0
        if lane.queue or lane.early:
            self.ready.append(lane)
        else:
            lane.busy = False
            if self.by_ticket.get(lane.ticket) is lane:
                del self.by_ticket[lane.ticket]

    def _queue(self, ticket: bytes, messages: Sequence[Message]) -> None:
        """Queue messages of one ticket, in id order. Lower ids go before queued messages, but never before one that
        runs."""
        if ticket in self._closed_fences:
            limit = self._closed_fences[ticket][0]
            messages = [message for message in messages if message.fence > limit]
        if not messages:
            return
        last = messages[-1].stream_id
        lane = self.by_ticket.get(ticket)
        if lane is None:
            lane = self.by_ticket[ticket] = Lane(ticket)
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

    def _requeue_first(self, lane: Lane, message: Message) -> bool:
        """Put ``message`` first in the lane again. Return False when another owner has the ticket: the message is
        dropped, and the lane ends its run."""
        if message.fence <= lane.forgotten:
            self.done([message.stream_id])
            self._resume(lane)
            return False
        lane.queue.appendleft(message)
        return True

    def _is_ending(self, ticket: bytes, ids: Iterable[bytes]) -> bool:
        """Return whether one of the ids is held and not queued: it runs, or has ended and Redis has not
        confirmed that yet."""
        held = self.held_ids.intersection(ids)
        lane = self.by_ticket.get(ticket) if held else None
        return bool(
            held.difference(message.stream_id for message in (*lane.queue, *lane.early)) if lane is not None else held
        )

    # ---- whoever holds the lock --------------------------------------------------------------------------------------

    def take(self) -> Lane | None:
        if not self.ready:
            return None
        self.in_slots += 1
        lane = self.ready.popleft()
        lane.forgotten = 0  # it concerns only messages that run while their ticket is forgotten
        return lane

    def wake_due(self, now_s: float) -> float | None:
        """Make waiting lanes ready whose time has come. Return when the next one is due, or None."""
        while self.waiting and self.waiting[0][0] <= now_s:
            self.ready.append(heapq.heappop(self.waiting)[2])
        return self.waiting[0][0] if self.waiting else None

    def unknown(self, ids: Iterable[bytes]) -> list[bytes]:
        held = self.held_ids
        return [entry_id for entry_id in ids if entry_id not in held]

    def requeue(self, lane: Lane, messages: Sequence[Message]) -> None:
        """Put messages that the runner took and did not end back at the front of the lane, in their order. If the
        ticket was forgotten while they ran, they are dropped."""
        self.done([message.stream_id for message in messages if message.fence <= lane.forgotten])
        lane.queue.extendleft(message for message in reversed(messages) if message.fence > lane.forgotten)

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
        lane = self.by_ticket.get(ticket)
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
            and not self._is_ending(ticket, ids)
        ]
        self._close({ticket: fence for ticket, fence, _ in closed})
        return closed

    def confirm_closed(self, ticket: bytes, fence: int) -> None:
        if self._closed_fences.get(ticket) == (fence, False):
            self._closed_fences[ticket] = (fence, True)

    def close_quiet(self) -> list[tuple[bytes, int, list[bytes], float | None]]:
        """Close the fence of each ticket that has something queued and does not run, drop its lane, and return it with
        its ids in order, and when it is due, if it waits. For a drain; waiting lanes count as quiet."""
        held: dict[bytes, float | None] = {lane.ticket: None for lane in (*self.ready, *self._suspects)}
        held |= {lane.ticket: due_s for due_s, _, lane in self.waiting}
        closed = []
        for ticket, due_s in held.items():
            lane = self.by_ticket[ticket]
            if lane.early:
                lane.merge_early()
            if lane.queue:
                fence = max(message.fence for message in lane.queue)
                closed.append((ticket, fence, [message.stream_id for message in lane.queue], due_s))
        self._close({ticket: fence for ticket, fence, *_ in closed})
        return closed

    def _close(self, fences: Mapping[bytes, int]) -> None:
        if fences:
            self._closed_fences.update((ticket, (fence, False)) for ticket, fence in fences.items())
            self._drop(fences)

    def look(self, ticket: bytes) -> tuple[list[Message], float | None, bool]:
        """Return a ticket's queued messages in order, when the first of them is due again (None: it does not wait), and
        whether it runs, or is to run, in a child process. For people: it looks through all waiting lanes."""
        lane = self.by_ticket.get(ticket)
        if lane is None:
            return [], None, False
        queued = sorted((*lane.queue, *lane.early), key=lambda message: rank(message.stream_id))
        due_s = next((due_s for due_s, _, waiting in self.waiting if waiting is lane), None)
        return queued, due_s, lane.apart or any(other is lane for other in self._suspects)

    def _drop(self, gone: Collection[bytes]) -> None:
        for queue in (self.ready, self._suspects):
            for lane in [lane for lane in queue if lane.ticket in gone]:
                queue.remove(lane)
        self.waiting = [item for item in self.waiting if item[2].ticket not in gone]
        heapq.heapify(self.waiting)
        for ticket in gone:
            lane = self.by_ticket.pop(ticket)
            self.done([message.stream_id for message in (*lane.queue, *lane.early)])
            lane.queue.clear()
            lane.early.clear()
