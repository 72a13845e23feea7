"""The lanes, shared by the reader, the workers and the acker: the pure LaneBoard behind one lock, and the waking of
threads.

Waking a thread costs more than a short handler takes, and two threads that both compute only fight for the interpreter.
So while handlers are short (``SHORT_S``), one runner takes lane after lane, and one more thread watches it: if the
runner has not ended a lane within ``_WATCH_S`` (a handler blocks after all), the watcher runs the next lane itself and
another thread watches. When handlers are not short, every ready lane wakes a thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from usher.common.base.clock import now_s
from usher.common.protocol.marks import NO_FIELDS, Mark, MarkFields
from usher.consumer.handlers.message import Message
from usher.consumer.policy.lanes import HasId, Lane, LaneBoard

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


MessageLane = Lane[Message]
#: A lane whose runner is done with it for now, how many of its messages ended, and in how many seconds. A plain tuple,
#: because one is made for each lane that ran.
Ended = tuple[MessageLane, int, float]

SHORT_S = 0.0005
_WATCH_S = 0.002
#: Weight of the newest lane in the moving average of a handler's time.
_NEWEST = 0.2


class Lanes:
    """Thread-safe lanes. What makes a lane ready, or a runner wait, is a method here; for all else take ``lock``,
    and use ``board``: that wakes no thread."""

    def __init__(self, marks: MarkFields = NO_FIELDS, weights: Mapping[bytes, float] | None = None) -> None:
        """Make lanes without messages. ``marks``: fields that tell the tenants and priorities of messages, if they are
        to have turns by them; ``weights``: of tenants."""
        self.board: LaneBoard[Message] = LaneBoard()
        self._fair: FairLanes[Message] | None = None
        if not marks.is_empty:
            self.board.ready = self._fair = FairLanes(
                lambda ticket, message: marks.of(message.stream_id, ticket, message.flat),
                weights or {},
                bool(marks.priority),
            )
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
                self.board.add(ticket, messages)
                for wake in [one for one, of in [*self.awaited.items()] if of == ticket] if self.awaited else ():
                    wake()
                if self._fair is not None and ticket in self.board.lanes:
                    self._fair.got_more(self.board.lanes[ticket])
            self._wake(len(self.board.ready))
        self.on_ready()

    def resume(self, lanes: Iterable[MessageLane], here: bool = False) -> None:
        """Let held lanes go on. ``here``: this thread takes a lane next, so that one needs nobody else."""
        with self._changed:
            for lane in lanes:
                self.board.resume(lane)
            self._wake(len(self.board.ready) - here)
        self.on_ready()

    def hasten(self, ticket: bytes, entry_id: bytes) -> bool:
        with self._changed:
            is_due = self.board.hasten(ticket, entry_id)
            self._wake(len(self.board.ready))
        self.on_ready()
        return is_due

    def let_go(self, tickets: Collection[bytes]) -> None:
        with self._changed:
            self.board.let_go(tickets)
            self._changed.notify_all()
        self.on_ready()

    # ---- runners -----------------------------------------------------------------------------------------------------

    def next_lane(self, timeout_s: float, ended: Ended | None = None) -> MessageLane | None:
        """Return a lane to run; None after ``timeout_s`` or a pause. ``ended``: the lane that this runner had, in place
        of a call of ``release``."""
        with self.lock:
            board = self.board
            if ended is not None:
                self._end(*ended)
            # As ``_wait_for_lane`` would find it: this runs for every lane.
            if board.ready and not (board.waiting or self._paused or (board.running and self._mean_s < SHORT_S)):
                return self._take() if self._idle else board.take()
            return self._wait_for_lane(now_s() + timeout_s)

    def take_now(self) -> MessageLane | None:
        """Return a lane to run if one is ready. For an event loop, which must not wait here."""
        with self.lock:
            now = now_s()
            self.board.wake_due(now)
            return None if self._paused else self.board.take()

    def next_due_s(self) -> float | None:
        """Return when the next waiting lane is due; a time in the past while a lane is due and not taken yet. None: no
        lane waits."""
        with self.lock:
            return self.board.next_due_s()

    def release(self, lane: MessageLane, messages: int, seconds: float) -> None:
        """Take the lane from its runner, which ended ``messages`` messages in ``seconds``."""
        with self.lock:
            self._end(lane, messages, seconds)

    def hold(self, lane: MessageLane, ran_s: float | None = None) -> None:
        """Take the lane from its runner until ``resume``. ``ran_s``: how long its last message ran, if it did."""
        with self.lock:
            self._count(ran_s)
            self.board.hold(lane)

    def retry(self, lane: MessageLane, message: Message, due_s: float, ran_s: float | None = None) -> None:
        """Take the lane from its runner; ``message`` comes first in it again, and nothing of it starts before
        ``due_s``."""
        with self._changed:
            self._count(ran_s)
            self.board.retry(lane, message, due_s)
            self._changed.notify()  # one thread must wait for just that long
        self.on_ready()
        self.on_retry()

    def wait(self, lane: MessageLane, message: Message, due_s: float) -> None:
        with self._changed:
            self.board.wait(lane, message, due_s)
            self._changed.notify()
        self.on_ready()
        self.on_retry()

    def isolate(self, lane: MessageLane, message: Message) -> None:
        """Take the lane from its runner, which did not start ``message``: it comes first in the lane again, and runs in
        a child process."""
        with self.lock:
            self._ended += 1
            self.board.isolate(lane, message)
            self._suspected.notify()

    def next_suspect(self, timeout_s: float) -> MessageLane | None:
        """Return a lane whose first message is to run in a child process; None after ``timeout_s`` or a pause."""
        with self._suspected:
            if not (self._paused or self.board.has_suspects):
                self._suspected.wait(timeout_s)
            return None if self._paused else self.board.take_suspect()

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
    def has_ready(self) -> bool:
        """Return whether a lane waits for a runner: a glance, without the lock."""
        return bool(self.board.ready)

    @property
    def has_idle(self) -> bool:
        """Return whether a thread waits for a lane: a glance, without the lock."""
        return self._idle > 0

    @property
    def keeps_up(self) -> bool:
        """Return whether new messages are run at once: handlers are short, and no lane waits for a runner. A glance."""
        return self._is_short() and not self.board.ready

    @property
    def running(self) -> int:
        return self.board.running + self.board.running_apart

    def load(self) -> tuple[int, int]:
        return len(self.board.lanes), len(self.board.held_ids)

    # ---- inside, under the lock --------------------------------------------------------------------------------------

    def _wake(self, ready: int) -> None:
        """Wake the threads needed for so many ready lanes; while handlers are short, one that runs and one that
        watches."""
        if ready > 0 and self._idle:
            needed = (self.board.running == 0) + (not self._watched) if self._is_short() else ready
            if needed:
                self._changed.notify(min(needed, ready))

    def _is_short(self) -> bool:
        return self._mean_s < SHORT_S

    def _take(self) -> MessageLane | None:
        lane = self.board.take()
        self._wake(1 if self.board.ready else 0)  # the next runner, or the watcher
        return lane

    def _wait_for_lane(self, until_s: float) -> MessageLane | None:
        board = self.board
        while True:
            now = now_s()
            due_s = board.wake_due(now)
            if self._paused or now >= until_s:
                return None
            if board.ready and (board.running == 0 or not self._is_short()):
                return self._take()
            if board.ready and not self._watched:
                if self._runner_is_stuck() and board.ready:
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

    def _end(self, lane: MessageLane, messages: int, seconds: float) -> None:
        self._ended += 1
        if messages:
            self._mean_s += _NEWEST * (seconds / messages - self._mean_s)
        self.board.release(lane)

    def _count(self, ran_s: float | None) -> None:
        self._ended += 1
        if ran_s is not None:
            self._mean_s += _NEWEST * (ran_s - self._mean_s)
