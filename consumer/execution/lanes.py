"""The lanes, shared by the reader, the workers and the acker: one lock around the pure LaneBoard, and who is woken
when.

Waking a thread costs more than a short handler takes, and two threads that both compute only fight for the interpreter.
So while handlers are short (``_SHORT_S``), one runner takes lane after lane, and one more thread watches it: when the
runner has not ended a lane within ``_WATCH_S`` (a handler blocks after all), the watcher runs the next lane itself and
another one watches. When handlers are not short, every ready lane wakes a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from usher.common.base.clock import now_s
from usher.consumer.handlers.message import Message
from usher.consumer.policy.lanes import Lane, LaneBoard
from usher.consumer.policy.quarantine import Isolation

MessageLane = Lane[Message]
#: A lane whose runner is done with it for now; how many messages of it ended, in how many seconds. A plain tuple: there
#: is one of each lane.
Ended = tuple[MessageLane, int, float]

_SHORT_S = 0.0005
_WATCH_S = 0.002
#: Weight of the newest lane in the moving average of a handler's time.
_NEWEST = 0.2


class LaneKeeper:
    """Thread-safe lanes."""

    def __init__(self) -> None:
        self._board: LaneBoard[Message] = LaneBoard()
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._mean_s = 0.0
        self._idle = 0  # threads that wait for a lane
        self._ended = 0
        self._watched = False
        self._paused = False
        self._closed_fences: dict[bytes, tuple[int, bool]] = {}  # ticket -> fence, and whether Redis has said so
        self.on_ready: Callable[[], None] = lambda: None  # for a runner that cannot wait here (an event loop)

    # ---- reader and acker ----------------------------------------------------------------------------------------------------

    def unknown(self, ids: Iterable[bytes]) -> list[bytes]:
        with self.lock:
            return self._board.unknown(ids)

    def is_ending(self, ticket: bytes, ids: Iterable[bytes]) -> bool:
        """Whether one of the ids runs, or has ended and is not known to be acknowledged."""
        with self.lock:
            return self._board.is_ending(ticket, ids)

    def held_ids(self) -> set[bytes]:
        with self.lock:
            return set(self._board.held_ids)

    def add(self, parts: Iterable[tuple[bytes, Sequence[Message]]]) -> None:
        """Messages by ticket, each in id order."""
        with self._changed:
            for ticket, messages in parts:
                if ticket in self._closed_fences:
                    limit = self._closed_fences[ticket][0]
                    messages = [message for message in messages if message.fence > limit]
                if messages:
                    self._board.add(ticket, messages)
            self._wake(len(self._board.ready))
        self.on_ready()

    def done(self, ids: Iterable[bytes]) -> None:
        """Redis has these as done."""
        with self.lock:
            self._board.done(ids)

    def let_go(self, lanes: Iterable[MessageLane]) -> None:
        """What these held lanes waited for has happened."""
        with self._changed:
            for lane in lanes:
                self._board.let_go(lane)
            self._wake(len(self._board.ready))
        self.on_ready()

    def end_isolation(self, lane: MessageLane) -> None:
        """What this held lane waits for may never happen; it stays held, and the others go on."""
        with self._changed:
            self._board.end_isolation(lane)
            self._wake(len(self._board.ready))
        self.on_ready()

    def retry_held(self, lane: MessageLane, message: Message, due_s: float) -> None:
        """What this held lane waited for has happened; ``message`` comes first in it again, and nothing of it starts
        before ``due_s``."""
        with self._changed:
            self._board.retry_held(lane, message, due_s)
            self._changed.notify()  # somebody must wait for just that long
            self._wake(len(self._board.ready))
        self.on_ready()

    def forget(self, fences: Mapping[bytes, int]) -> None:
        """Others got these tickets after we had them under that fence. They may have come back since Redis said so:
        what is of a later fence stays."""
        with self.lock:
            for ticket, fence in fences.items():
                self._board.forget(ticket, fence)

    def close_fence(self, ticket: bytes, fence: int, given_up: bytes) -> None:
        """Nothing of the ticket that came under ``fence`` is ours any more, but for its lane, which is held: neither
        what is queued, nor what the inbox still names."""
        with self.lock:
            self._board.done([given_up])
            self._board.forget(ticket, fence)
            self._closed_fences[ticket] = (fence, False)

    def fence_is_closed(self, ticket: bytes, fence: int) -> None:
        """Redis hands nothing more of the ticket over under ``fence``."""
        with self.lock:
            if self._closed_fences.get(ticket) == (fence, False):
                self._closed_fences[ticket] = (fence, True)

    def closed_fences(self) -> list[tuple[bytes, int]]:
        """Those of which the inbox gets nothing more. Once all that it has now has been read, ``forget_closed``
        them."""
        if not self._closed_fences:
            return []
        with self.lock:
            return [(ticket, fence) for ticket, (fence, is_sure) in self._closed_fences.items() if is_sure]

    def forget_closed(self, fences: Iterable[tuple[bytes, int]]) -> None:
        with self.lock:
            for ticket, fence in fences:
                if self._closed_fences.get(ticket) == (fence, True):
                    del self._closed_fences[ticket]

    # ---- runners -------------------------------------------------------------------------------------------------------------

    def next_lane(self, timeout_s: float, ended: Ended | None = None) -> MessageLane | None:
        """A lane to run; None after ``timeout_s`` or a pause. ``ended``: the one that this runner had, which
        ``release`` need not hear of."""
        with self.lock:
            if ended is not None:
                self._end(*ended)
            board = self._board
            if board.ready and not board.waiting and not self._paused and self._may_run():
                return self._take()
            return self._wait_for_lane(now_s() + timeout_s)

    def take_now(self) -> MessageLane | None:
        """A lane to run if one is ready. For an event loop, which must not wait here."""
        with self.lock:
            now = now_s()
            self._board.wake_due(now)
            if not self._board.ready:
                self._board.let_in(now)
            return None if self._paused else self._board.take()

    def next_due_s(self) -> float | None:
        """When the next waiting lane is due, or was: it stays where it is, so that nobody counts on a look that was
        before."""
        with self.lock:
            return self._board.next_due_s()

    def release(self, lane: MessageLane, messages: int, seconds: float) -> None:
        """The runner ended ``messages`` of the lane in ``seconds``."""
        with self.lock:
            self._end(lane, messages, seconds)

    def hold(self, lane: MessageLane, ran_s: float | None = None) -> None:
        """Nothing more of it starts before ``let_go``. ``ran_s``: how long its last message ran, if it did."""
        with self.lock:
            self._count(ran_s)
            self._board.hold(lane)

    def retry(self, lane: MessageLane, message: Message, due_s: float, ran_s: float | None = None) -> None:
        """``message`` comes first in the lane again, and nothing of it starts before ``due_s``."""
        with self._changed:
            self._count(ran_s)
            self._board.retry(lane, message, due_s)
            self._changed.notify()  # somebody must wait for just that long
        self.on_ready()

    def put_back(self, lane: MessageLane, messages: Sequence[Message]) -> None:
        """The runner took these and did not end them: they come first in the lane again. It still runs the lane."""
        with self.lock:
            self._board.put_back(lane, messages)

    def set_apart(self, lane: MessageLane, message: Message, isolation: Isolation) -> None:
        """``message`` was not started: it comes first in the lane again, and runs only where nothing else than
        ``isolation`` allows does."""
        with self._changed:
            self._ended += 1
            self._board.set_apart(lane, message, isolation)
            self._changed.notify()
        self.on_ready()

    def merge_early(self, lane: MessageLane) -> None:
        with self.lock:
            lane.merge_early()

    # ---- drain ---------------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """No lane is given out any more."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()
        self.on_ready()

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def has_ready(self) -> bool:
        """Whether a lane waits for a runner. A glance."""
        return bool(self._board.ready)

    @property
    def keeps_up(self) -> bool:
        """Whether what comes is run at once: handlers are short, and no lane waits for a runner. A glance."""
        return self._is_short() and not self._board.ready

    @property
    def running(self) -> int:
        return self._board.running

    def quiet(self) -> dict[bytes, list[bytes]]:
        """Tickets that do not run, with their queued ids in order."""
        with self.lock:
            return self._board.quiet()

    def drop_quiet(self, tickets: Iterable[bytes]) -> None:
        with self.lock:
            self._board.drop_quiet(tickets)

    def look(self, ticket: bytes) -> tuple[list[Message], float | None, bool]:
        """See LaneBoard.look."""
        with self.lock:
            return self._board.look(ticket)

    def load(self) -> tuple[int, int]:
        """(tickets, messages) held."""
        with self.lock:
            return len(self._board.lanes), len(self._board.held_ids)

    # ---- inside, under the lock ----------------------------------------------------------------------------------------------

    def _wake(self, ready: int) -> None:
        """Wake those who are needed for so many ready lanes; where handlers are short that is one who runs and one who
        watches."""
        if ready and self._idle:
            needed = (self._board.running == 0) + (not self._watched) if self._is_short() else ready
            if needed:
                self._changed.notify(min(needed, ready))

    def _is_short(self) -> bool:
        return self._mean_s < _SHORT_S

    def _may_run(self) -> bool:
        return self._board.running == 0 or not self._is_short()

    def _take(self) -> MessageLane | None:
        lane = self._board.take()
        self._wake(1 if self._board.ready else 0)  # the next runner, or the watcher
        return lane

    def _wait_for_lane(self, until_s: float) -> MessageLane | None:
        board = self._board
        while True:
            now = now_s()
            due_s = board.wake_due(now)
            if self._paused or now >= until_s:
                return None
            if not board.ready:
                board.let_in(now)
            if board.ready and self._may_run():
                return self._take()
            if board.ready and not self._watched:
                if self._runner_is_stuck() and board.ready:
                    return self._take()
                continue  # what was due, and who was to be woken, may be others by now
            self._idle += 1
            self._changed.wait(max(0.0, min(until_s, due_s if due_s is not None else until_s) - now))
            self._idle -= 1

    def _runner_is_stuck(self) -> bool:
        """Watch the runner for a moment; False when it goes on well, or a pause came meanwhile."""
        ended = self._ended
        self._watched = True
        self._idle += 1
        self._changed.wait_for(lambda: self._paused or self._ended != ended, _WATCH_S)
        self._idle -= 1
        self._watched = False
        return self._ended == ended and not self._paused

    def _end(self, lane: MessageLane, messages: int, seconds: float) -> None:
        self._count(seconds / messages if messages else None)
        self._board.release(lane)

    def _count(self, ran_s: float | None) -> None:
        self._ended += 1
        if ran_s is not None:
            self._mean_s += _NEWEST * (ran_s - self._mean_s)
