"""The lanes, shared by the reader, the workers and the acker: one lock around the pure LaneBoard, and who is woken when.

Lanes run side by side, every ready one on a thread that it wakes, or one after another on one thread, which one more thread watches: when
the runner blocks after all, the watcher runs the next lane itself and another one watches. Which of both it is, policy/pace.py decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from common.clock import cpu_s, now_s
from consumer.context import Message
from consumer.policy.lanes import Lane, LaneBoard
from consumer.policy.pace import Moment, Pace
from consumer.policy.quarantine import Isolation

MessageLane = Lane[Message]
#: A lane whose runner is done with it for now; how many messages of it ended, in how many seconds. A plain tuple: there is one of each lane.
Ended = tuple[MessageLane, int, float]

#: Lanes that end between two looks at the clock, to ask whether they still should run side by side.
_BETWEEN_LOOKS = 32


class LaneKeeper:
    """Thread-safe lanes."""

    def __init__(self) -> None:
        self._board: LaneBoard[Message] = LaneBoard()
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._pace = Pace()
        self._idle = 0  # threads that wait for a lane
        self._ended = 0
        self._stuck: tuple[int, float] = (-1, 0.0)  # how many had ended when one was last seen to end, or a watcher took a lane; and when
        self._watched = False
        self._paused = False
        self._ended_fences: dict[bytes, tuple[int, bool]] = {}  # ticket -> fence, and whether Redis has said so
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
                if ticket in self._ended_fences:
                    limit = self._ended_fences[ticket][0]
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

    def retry_held(self, lane: MessageLane, message: Message, due_s: float) -> None:
        """What this held lane waited for has happened; ``message`` comes first in it again, and nothing of it starts before ``due_s``."""
        with self._changed:
            self._board.retry_held(lane, message, due_s)
            self._changed.notify()  # somebody must wait for just that long
            self._wake(len(self._board.ready))
        self.on_ready()

    def forget(self, tickets: Iterable[bytes]) -> None:
        """Others have these tickets."""
        with self.lock:
            for ticket in tickets:
                self._board.forget(ticket)

    def end(self, ticket: bytes, fence: int, given_up: bytes) -> None:
        """Nothing of the ticket that came under ``fence`` is ours any more, but for its lane, which is held: neither what is queued, nor what
        the inbox still names."""
        with self.lock:
            self._board.done([given_up])
            self._board.forget(ticket)
            self._ended_fences[ticket] = (fence, False)

    def ended(self, ticket: bytes, fence: int) -> None:
        """Redis hands nothing more of the ticket over under ``fence``."""
        with self.lock:
            if self._ended_fences.get(ticket) == (fence, False):
                self._ended_fences[ticket] = (fence, True)

    def ended_fences(self) -> list[tuple[bytes, int]]:
        """Those of which the inbox gets nothing more. Once all that it has now has been read, ``forget_ended`` them."""
        if not self._ended_fences:
            return []
        with self.lock:
            return [(ticket, fence) for ticket, (fence, is_sure) in self._ended_fences.items() if is_sure]

    def forget_ended(self, fences: Iterable[tuple[bytes, int]]) -> None:
        with self.lock:
            for ticket, fence in fences:
                if self._ended_fences.get(ticket) == (fence, True):
                    del self._ended_fences[ticket]

    # ---- runners -------------------------------------------------------------------------------------------------------------

    def next_lane(self, timeout_s: float, ended: Ended | None = None) -> MessageLane | None:
        """A lane to run; None after ``timeout_s`` or a pause. ``ended``: the one that this runner had, which ``release`` need not hear of."""
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
        """When the next waiting lane is due."""
        with self.lock:
            return self._board.wake_due(now_s())

    def release(self, lane: MessageLane, messages: int, seconds: float) -> None:
        """The runner ended ``messages`` of the lane in ``seconds``."""
        with self.lock:
            self._end(lane, messages, seconds)

    def hold(self, lane: MessageLane) -> None:
        """Nothing more of it starts before ``let_go``."""
        with self.lock:
            self._ended += 1
            self._board.hold(lane)

    def retry(self, lane: MessageLane, message: Message, due_s: float) -> None:
        """``message`` comes first in the lane again, and nothing of it starts before ``due_s``."""
        with self._changed:
            self._ended += 1
            self._board.retry(lane, message, due_s)
            self._changed.notify()  # somebody must wait for just that long
        self.on_ready()

    def put_back(self, lane: MessageLane, messages: Sequence[Message]) -> None:
        """The runner took these and did not end them: they come first in the lane again. It still runs the lane."""
        with self.lock:
            self._board.put_back(lane, messages)

    def set_apart(self, lane: MessageLane, message: Message, isolation: Isolation) -> None:
        """``message`` was not started: it comes first in the lane again, and runs only where nothing else than ``isolation`` allows does."""
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
        """Wake those who are needed for so many ready lanes; where they run one after another, that is one who runs and one who watches."""
        if ready and self._idle:
            needed = ready if self._pace.side_by_side else (self._board.running == 0) + (not self._watched)
            if needed:
                self._changed.notify(min(needed, ready))

    def _may_run(self) -> bool:
        return self._pace.side_by_side or self._board.running == 0

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
            if board.ready and (self._may_run() or self._watch()) and board.ready:
                return self._take()
            if not board.ready or self._watched:
                self._idle += 1
                self._changed.wait(max(0.0, min(until_s, due_s if due_s is not None else until_s) - now))
                self._idle -= 1

    def _watch(self) -> bool:
        """Watch the runner for a moment. Whether to run a lane beside it; False when somebody watches already, or a pause came meanwhile."""
        if self._watched:
            return False
        ended, began = self._ended, Moment(now_s(), cpu_s())
        self._watched = True
        self._changed.wait_for(lambda: self._paused, self._pace.watch_s)
        self._watched = False
        now = Moment(now_s(), cpu_s())
        if self._stuck[0] != self._ended:
            self._stuck = (self._ended, began.now_s)
        joins = self._pace.watched(began, now, self._ended == ended, now.now_s - self._stuck[1])
        if joins:
            self._stuck = (self._ended, now.now_s)
        return joins and not self._paused

    def _end(self, lane: MessageLane, messages: int, seconds: float) -> None:
        self._ended += 1
        pace = self._pace
        if messages:
            pace.note(messages, seconds)
        if pace.side_by_side and not self._ended % _BETWEEN_LOOKS:
            pace.look(Moment(now_s(), cpu_s()))
        self._board.release(lane)
