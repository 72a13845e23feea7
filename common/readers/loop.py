"""MessageReadingLoop: a reliable stream that only needs to be configured and run.

::

    def handle(message):
        message.fields, message.body, message.uid, message.attempt

    MessageReadingLoop(url, "payments", "billing", handle, LoopOptions(threads=4)).run()

A handler that returns is done; one that raises is tried again with growing pauses; ``RetryLater`` and ``GiveUp`` steer
that; after ``max_attempts`` failures a message becomes a dead letter. When a process dies, its messages are taken over
after ``idle_s``; these run one at a time, each start noted before, so that the one that kills processes ends as a dead
letter, and its neighbours do not. A delivery is never counted as an attempt.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from usher.common.base.backoff import backoff_s
from usher.common.base.callables import unawaitable_reason, unfinished_kind
from usher.common.base.clock import now_s
from usher.common.base.errors import GiveUp, GroupMissing, RedisTrouble, ReplyUnknown, RetryLater, readable
from usher.common.base.log import event
from usher.common.base.text import format_error
from usher.common.observability.metrics import Reader, of_this_program
from usher.common.observability.webhook import DeadLetterNotifier
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.readers.reliable_stream import ReliableStream, StreamMessage, reader_name
from usher.common.redis.client import CommandRefused, Link
from usher.common.runtime.clock_steps import look_for_steps
from usher.common.runtime.fork_guard import ForkGuard
from usher.common.runtime.service import Health, Service, judge
from usher.common.runtime.settings import CommonSettings
from usher.common.runtime.signals import UntilSignal

__all__ = ["LoopOptions", "MessageReadingLoop", "StreamMessage"]

log = logging.getLogger(__name__)

#: Is called with the message; what it returns is ignored, unless it shows that nothing of the handler ran.
Handle = Callable[[StreamMessage], Any]
_PLAIN = "a reading loop takes plain functions that do the work themselves: no `async def`, no generator, no class"
#: Seconds within which `run` notices a signal: its handler must not wake a wait that it may have interrupted with the
#: lock in hand.
_LOOK_S = 0.5
#: Share of the idle time after a touch in which nothing starts: it is left for the clock's drift and for delays on the
#: way.
_FRESH_PART = 0.8
#: Starts of a suspect beyond its attempts.
_IN_DOUBT = 2
#: Most messages of one call.
_AT_ONCE = 500
_SAVE_POSITION_S = 1.0
_POLL_S = 0.02


@dataclass(frozen=True)
class LoopOptions:
    batch: int = 100  # messages of one read
    block_s: float = 2.0  # longest wait for new messages
    threads: int = 8  # handlers at the same time
    queue: int = 1000  # messages held at most, running ones included
    flush_s: float = 0.005  # longest wait before finished messages are acknowledged
    max_attempts: int = 5  # failures of a message before it becomes a dead letter
    retry_s: float = 0.2  # wait before the second attempt; doubles with each further one
    retry_cap_s: float = 60.0
    idle_s: float = 60.0  # entries that were not touched for so long are taken over
    claim_every_s: float = 5.0  # pause between two searches for them
    # acknowledged entries leave the stream too (unless another group reads it); dead letters always do, if complete
    remove: bool = False
    grace_s: float = 20.0  # at a stop: time for running handlers to finish
    webhook: str = ""  # URL that gets the dead letters; see USHER_DEAD_LETTER_WEBHOOK, USHER_WEBHOOK_SECRET
    webhook_secret: str = ""

    def __post_init__(self) -> None:
        least = dict.fromkeys(("batch", "threads", "queue", "max_attempts"), 1.0)
        least |= dict.fromkeys(("idle_s", "claim_every_s"), 0.001)
        least |= dict.fromkeys(("block_s", "flush_s", "retry_s", "retry_cap_s", "grace_s"), 0.0)
        if wrong := [name for name, value in least.items() if not value <= getattr(self, name) < math.inf]:
            raise ValueError(f"LoopOptions: out of range: {', '.join(wrong)}")


#: What a loop counts, in sums since it was made, and now.
_COUNTS = {
    "read": "Messages read.",
    "claimed": "Messages taken over from other readers.",
    "done": "Messages that are done.",
    "failed": "Runs of handlers that failed.",
    "dead_letters": "Messages given up.",
    "stale": "Messages that were done here when another reader had them.",
    "handler_seconds": "Seconds of all handlers that returned.",
}
_COUNTS_NOW = {"held": "Messages held.", "running": "Handlers that run."}


class ReadingBoard:
    """The messages that a loop holds, shared by its threads: waiting, running, waiting for another attempt. One lock;
    it makes no calls. ``most``: most messages held. Nothing starts when the last touch is older than ``fresh_s``
    seconds: other readers may have taken over.

    A suspect (its former reader died with it) runs alone: nothing else runs beside it, and nothing starts before Redis
    has its outcome. So a message that kills its process is charged for that, and no neighbour is.
    """

    def __init__(self, most: int, fresh_s: float) -> None:
        self._most = most
        self._fresh_s = fresh_s
        self._changed = threading.Condition()
        self._held: dict[bytes, StreamMessage] = {}
        self._ready: deque[StreamMessage] = deque()
        self._suspects: deque[StreamMessage] = deque()
        self._due: list[tuple[float, int, StreamMessage]] = []
        self._order = 0
        self._running: set[bytes] = set()
        self._alone: bytes | None = None  # the suspect that runs, or has ended and is not written yet
        self._closed = False
        self._touched_s = now_s()

    @property
    def room(self) -> int:
        return 0 if self._closed else max(0, self._most - len(self._held))

    def add(self, messages: Iterable[StreamMessage]) -> int:
        """Take messages that came, except those that are held already. Returns the number taken."""
        with self._changed:
            fresh = [message for message in messages if message.stream_id not in self._held]
            for message in fresh:
                self._held[message.stream_id] = message
                self._queue(message)
            self._changed.notify(len(fresh))
            return len(fresh)

    def held_ids(self) -> list[bytes]:
        with self._changed:
            return list(self._held)

    def known_ids(self) -> set[bytes]:
        with self._changed:
            return {*self._held, *self._running}

    def drop(self, ids: Iterable[bytes]) -> None:
        """Drop messages that Redis has as done, or that another reader has: none of them starts here any more. A
        running handler runs on."""
        with self._changed:
            gone = {entry_id for entry_id in ids if self._held.pop(entry_id, None) is not None}
            if gone:
                self._ready = deque(message for message in self._ready if message.stream_id not in gone)
                self._suspects = deque(message for message in self._suspects if message.stream_id not in gone)
                self._due = [item for item in self._due if item[2].stream_id not in gone]
                heapq.heapify(self._due)
            if self._alone in gone and self._alone not in self._running:
                self._alone = None
                self._changed.notify_all()

    def touched(self, at_s: float) -> None:
        with self._changed:
            self._touched_s = at_s
            self._changed.notify_all()

    def take(self, timeout_s: float) -> StreamMessage | None:
        until_s = now_s() + timeout_s
        with self._changed:
            while not self._closed:
                now = now_s()
                while self._due and self._due[0][0] <= now:
                    self._queue(heapq.heappop(self._due)[2])
                message = self._next() if now < self._touched_s + self._fresh_s else None
                if message is not None:
                    self._running.add(message.stream_id)
                    return message
                if now >= until_s:
                    return None
                self._changed.wait(min(until_s, self._due[0][0] if self._due else until_s) - now)
            return None

    def _queue(self, message: StreamMessage) -> None:
        (self._suspects if message.is_suspect else self._ready).append(message)

    def _next(self) -> StreamMessage | None:
        if self._alone is not None:
            return None
        if self._suspects:
            if self._running:
                return None  # nothing new starts until it can run alone
            suspect = self._suspects.popleft()
            self._alone = suspect.stream_id
            return suspect
        return self._ready.popleft() if self._ready else None

    def ended(self, message: StreamMessage) -> None:
        with self._changed:
            self._running.discard(message.stream_id)
            if message.stream_id == self._alone and message.stream_id not in self._held:
                self._alone = None
                self._changed.notify_all()
            elif self._suspects and not self._running:
                self._changed.notify()

    def again(self, message: StreamMessage, due_s: float) -> None:
        """Note that it no longer runs, and is ready again at ``due_s``, unless it was dropped meanwhile."""
        with self._changed:
            self._running.discard(message.stream_id)
            if message.stream_id == self._alone:
                self._alone = None
            if message.stream_id in self._held:
                self._order += 1
                heapq.heappush(self._due, (due_s, self._order, message))
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def quiet(self) -> list[StreamMessage]:
        with self._changed:
            return [*self._ready, *self._suspects, *(message for _, _, message in self._due)]

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def held(self) -> int:
        return len(self._held)


@dataclass
class Shared:
    options: LoopOptions
    board: ReadingBoard
    bell: DeadLetterNotifier
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))  # written without a lock
    seen: bytes = ZERO  # the highest id that this loop was given

    def ring(self, entry_id: bytes, reason: str, error: str = "", attempts: int = 0) -> None:
        self.counts["dead_letters"] += 1
        self.bell.ring(b"", entry_id, reason, error.partition(":")[0], attempts)


class StreamReader(Service):
    """Reads new messages while there is room, and looks for idle ones."""

    name = "stream-read"

    def __init__(self, link: Link, stream: ReliableStream, shared: Shared) -> None:
        super().__init__()
        self._link = link
        self._stream = stream
        self._shared = shared
        self._has_group = False
        self._unsure = False  # a reply of a read was lost: something may be pending for us unseen
        self._unsure_of_claim = False  # and it may have been a dead reader's
        self._cursor = ZERO
        self._claim_s = 0.0
        self._position_s = 0.0
        self._position_is_old = False
        self.stalls_after_s = 10.0 + shared.options.block_s

    @property
    def has_claimed_unseen(self) -> bool:
        """Return True when entries that are pending for us unseen may be a dead reader's."""
        return self._unsure_of_claim or self.alive

    def run_once(self) -> float:
        try:
            return self._turn()
        except GroupMissing as missing:
            if self._has_group:
                event(log, "group_lost", level=logging.ERROR, why=str(missing))
            self._has_group = False
            self._ensure_group()
            return 0.0

    def _ensure_group(self) -> None:
        start = self._stream.ensure_group(self._shared.seen)
        if start is not None:
            event(log, "group_created", reads_after=start)
            self._shared.seen = start
        self._has_group = True

    def _turn(self) -> float:
        if not self._has_group:
            self._ensure_group()
        board, options, counts = self._shared.board, self._shared.options, self._shared.counts
        now = now_s()
        if now >= self._position_s:
            self._position_s = now + _SAVE_POSITION_S
            self._save_position()
        count = min(options.batch, board.room)
        if count and self._unsure:
            self._read_unseen(count)
            return 0.0
        if count and now >= self._claim_s:
            counts["claimed"] += self._claim(count)
            return 0.0
        if not count:
            return _POLL_S
        wait_s = min(options.block_s, max(0.0, self._claim_s - now), self.stalls_after_s / 2)
        try:
            found = self._stream.read_new(count, max(1, int(wait_s * 1000)))
        except ReplyUnknown:
            self._unsure = True
            raise
        counts["read"] += board.add(found)
        if found:
            self._shared.seen = max(self._shared.seen, found[-1].stream_id, key=rank)
        return 0.0

    def _read_unseen(self, count: int) -> None:
        found = self._stream.read_pending(count, set(self._shared.board.held_ids()))
        for message in found:
            message.is_suspect = self._unsure_of_claim
        self._shared.board.add(found)
        if len(found) < count:
            self._unsure = self._unsure_of_claim = False

    def _claim(self, count: int) -> int:
        options = self._shared.options
        try:
            claimed = self._stream.claim_idle(count, int(options.idle_s * 1000), self._cursor)
        except ReplyUnknown:
            self._unsure = self._unsure_of_claim = True
            raise
        self._cursor = claimed.cursor
        if claimed.cursor == ZERO:
            self._claim_s = now_s() + options.claim_every_s
            self._stream.forget_readers(int(max(60.0, 10 * options.idle_s) * 1000))
        if claimed.gone:
            event(log, "pending_entries_deleted", level=logging.WARNING, count=len(claimed.gone), first=claimed.gone[0])
        for entry_id in claimed.gone:
            self._shared.ring(entry_id, "body_gone")
        if claimed.messages:
            suspects = sum(message.is_suspect for message in claimed.messages)
            event(log, "messages_claimed", count=len(claimed.messages), suspects=suspects)
        return self._shared.board.add(claimed.messages)

    def _save_position(self) -> None:
        try:
            self._stream.save_position()
            self._position_is_old = False
        except GroupMissing:
            raise
        except (RedisTrouble, CommandRefused) as trouble:  # for example full memory; reading goes on
            if not self._position_is_old:
                event(log, "position_not_saved", level=logging.WARNING, why=str(trouble))
            self._position_is_old = True

    def interrupt(self) -> None:
        self._link.interrupt()


class StreamWriter(Service):
    """Writes the outcomes of messages, and touches the held ones. A batch is repeated until Redis has answered it."""

    name = "stream-write"

    def __init__(self, link: Link, stream: ReliableStream, shared: Shared) -> None:
        super().__init__()
        self._link = link
        self._stream = stream
        self._shared = shared
        self._done: deque[bytes] = deque()
        self._given_up: deque[tuple[StreamMessage, str, str]] = deque()
        self._charges: deque[tuple[bytes, int]] = deque()
        self._touch_s = 0.0

    def done(self, message: StreamMessage) -> None:
        self._done.append(message.stream_id)
        self.wake()

    def give_up(self, message: StreamMessage, reason: str, error: str) -> None:
        self._given_up.append((message, reason, error))
        self.wake()

    def charge(self, message: StreamMessage) -> None:
        self._charges.append((message.stream_id, message.failures))
        self.wake()

    @property
    def is_flushed(self) -> bool:
        return not (self._done or self._given_up or self._charges)

    def run_once(self) -> float:
        options, board = self._shared.options, self._shared.board
        if now_s() >= self._touch_s:
            self._touch()
        if self._done and len(self._done) < _AT_ONCE and not self.stopping:
            time.sleep(options.flush_s)
        self.flush()
        return min(1.0, max(0.0, self._touch_s - now_s())) if board.held else min(1.0, options.idle_s / 3)

    def flush(self) -> None:
        """Write all outcomes that are there now. Unanswered ones stay, and are written again: the steps answer a repeat
        with "not yours"."""
        stream, shared = self._stream, self._shared
        try:
            while self._charges:
                charges = list(itertools.islice(self._charges, _AT_ONCE))
                stream.charge(dict(charges))
                _forget(self._charges, len(charges))
            while self._done:
                ids = list(itertools.islice(self._done, _AT_ONCE))
                mine = stream.acknowledge(ids, shared.options.remove)
                _forget(self._done, len(ids))
                shared.counts["done"] += len(mine)
                shared.counts["stale"] += len(ids) - len(mine)
                shared.board.drop(ids)
            while self._given_up:
                message, reason, error = self._given_up[0]
                buried = stream.move_to_dead_letters([message], reason, {message.stream_id: error})
                if buried:
                    shared.ring(message.stream_id, reason, error, message.attempt)
                self._given_up.popleft()
                shared.board.drop([message.stream_id])
        except GroupMissing:
            # No entry of it is pending: what comes again is judged again.
            shared.board.drop([*self._done, *(message.stream_id for message, _, _ in self._given_up)])
            for queue in (self._done, self._given_up, self._charges):
                queue.clear()
            raise

    def _touch(self) -> None:
        sent_s = now_s()
        try:
            others = self._stream.touch(self._shared.board.held_ids())
        except GroupMissing:
            others = []  # the reader makes it again; meanwhile no reader can take over
        waiting = {*self._done, *(message.stream_id for message, _, _ in self._given_up)}
        lost = [entry_id for entry_id in others if entry_id not in waiting]
        if lost:
            event(log, "messages_taken_over", level=logging.WARNING, count=len(lost), first=lost[0])
            self._shared.board.drop(lost)
        self._shared.board.touched(sent_s)
        self._touch_s = sent_s + self._shared.options.idle_s / 3


def _forget(queue: deque[Any], count: int) -> None:
    for _ in range(count):
        queue.popleft()


class StreamRunner(Service):
    """A slot: runs one handler at a time, for as long as the handler takes."""

    stalls_after_s = math.inf

    def __init__(
        self, number: int, handle: Handle, shared: Shared, writer: StreamWriter, note: Callable[[StreamMessage], bool]
    ) -> None:
        super().__init__()
        self.name = f"work-{number}"
        self._handle = handle
        self._shared = shared
        self._writer = writer
        self._note = note
        self._rng = random.Random()

    def run_once(self) -> float:
        board, options = self._shared.board, self._shared.options
        message = board.take(1.0)
        if message is None:
            return 0.05 if self.stopping else 0.0
        # A suspect's last start was noted ahead as one that fails, and may have returned, or not have happened.
        most = options.max_attempts + _IN_DOUBT * message.is_suspect
        if message.body_is_gone or message.failures >= most:
            if message.body_is_gone:
                self._give_up(message, "body_gone", "")
            else:
                why = "its process ended before the end of its last start was stored"
                self._give_up(message, "attempts_exhausted", why)
            return 0.0
        message.attempt += 1
        message.last_ms = time.time_ns() // 1_000_000
        message.first_ms = message.first_ms or message.last_ms
        if message.is_suspect and not self._noted(message):
            return 0.0
        began_s = now_s()
        try:
            with ForkGuard():
                _check_ran(copy_context().run(self._handle, message))
        except BaseException as problem:
            # sys.exit() in a handler must not end this thread while it holds the message.
            self._failed(message, readable(problem))
        else:
            self._shared.counts["handler_seconds"] += now_s() - began_s
            self._writer.done(message)  # first: when nothing runs any more, all that ended must be seen to be written
            board.ended(message)
        return 0.0

    def _noted(self, message: StreamMessage) -> bool:
        board = self._shared.board
        try:
            if self._note(message):
                return True
            board.ended(message)
            board.drop([message.stream_id])
        except (RedisTrouble, CommandRefused) as trouble:
            message.attempt -= 1
            event(log, "attempt_not_recorded", level=logging.WARNING, id=message.id, why=str(trouble))
            board.again(message, now_s() + self._shared.options.retry_s)
        return False

    def _failed(self, message: StreamMessage, problem: BaseException) -> None:
        options = self._shared.options
        was_suspect, message.is_suspect = message.is_suspect, False
        self._shared.counts["failed"] += 1
        error = format_error(problem)
        message.failures += not isinstance(problem, RetryLater)
        if isinstance(problem, GiveUp):
            self._give_up(message, "gave_up", error)
            return
        if isinstance(problem, RetryLater):
            wait_s = max(0.0, float(problem.after_s))
        elif message.failures >= options.max_attempts:
            self._give_up(message, "attempts_exhausted", error)
            return
        else:
            wait_s = backoff_s(message.failures, options.retry_s, options.retry_cap_s, self._rng)
        if was_suspect or not isinstance(problem, RetryLater):
            self._writer.charge(message)  # a suspect's start was noted as one that fails
        about: dict[str, Any] = {"id": message.id, "attempt": message.attempt, "error": error[:500]}
        event(log, "handler_failed", level=logging.WARNING, **about, retry_in_s=wait_s)
        self._shared.board.again(message, now_s() + wait_s)

    def _give_up(self, message: StreamMessage, reason: str, error: str) -> None:
        about: dict[str, Any] = {"id": message.id, "attempt": message.attempt, "error": error[:500]}
        event(log, "message_given_up", level=logging.ERROR, **about, reason=reason)
        self._writer.give_up(message, reason, error)
        self._shared.board.ended(message)


def _check_ran(result: object) -> None:
    """Raise TypeError when a handler's return value shows that none of its code ran: its message would count as
    done."""
    if kind := unfinished_kind(result):
        raise TypeError(f"the handler returned {kind!r}, so nothing of the message was done: {_PLAIN}")


def _check_plain(handle: Handle) -> None:
    if kind := unawaitable_reason(handle):
        raise TypeError(f"this handler is {kind}: {_PLAIN}")


class MessageReadingLoop(Reader):
    """Reads a stream as a member of a group, and calls ``handle(message)`` with every message, on ``options.threads``
    threads.

    ``url`` of Redis as USHER_REDIS_URL takes it. Begin it with ``with`` or ``start``; ``stop`` ends it for good.
    ``name`` is the beginning of its name in the group. Raises ValueError for a URL that cannot be parsed, TypeError for
    a handler that a call does not run.
    """

    kind, told = "loop", _COUNTS | _COUNTS_NOW

    def __init__(
        self, url: str, stream: str, group: str, handle: Handle, options: LoopOptions | None = None, name: str = ""
    ) -> None:
        _check_plain(handle)
        options = options or LoopOptions()
        self.reader_name = reader_name(name)
        self._prefix, self._made_in = name, os.getpid()
        self._streams: list[ReliableStream] = []
        self._options = options
        self.labels = {"stream": stream, "group": group}
        to = CommonSettings(dead_letter_webhook=options.webhook, webhook_secret=options.webhook_secret)
        bell = DeadLetterNotifier(of_this_program(), to, self.reader_name, Keys(stream, group))
        self._shared = Shared(options, ReadingBoard(options.queue, options.idle_s * _FRESH_PART), bell)
        self._over = threading.Event()

        def part(role: str) -> tuple[Link, ReliableStream]:
            link = Link(url, f"reader:{self.reader_name}:{role}")
            self._streams.append(ReliableStream(link, stream, group, self.reader_name))
            return link, self._streams[-1]

        self._reader = StreamReader(*part("read"), self._shared)
        self._writer = StreamWriter(*part("write"), self._shared)
        self._note_link, note_stream = part("note")
        self._end_link, self._end_stream = part("end")

        def note(message: StreamMessage) -> bool:  # a suspect runs alone, so one thread at a time is here
            return not note_stream.charge({message.stream_id: message.failures + 1})

        self._runners = [
            StreamRunner(number, handle, self._shared, self._writer, note) for number in range(options.threads)
        ]
        self.show()

    def start(self) -> None:
        if os.getpid() != self._made_in:  # forked since: siblings must not take its messages for theirs
            self.reader_name = reader_name(self._prefix)
            for stream in self._streams:
                stream.reader = self.reader_name
        for service in self.services:
            service.start()
        event(log, "reading_loop_started", reader=self.reader_name)

    def stop(self) -> None:
        """Start nothing more, let running handlers finish (up to ``grace_s``), acknowledge them, and give the rest
        back: other readers take it at once.

        A message that still runs after that stays pending and is taken over when idle. Never raises; may be called
        twice.
        """
        if self._over.is_set():
            return
        self._over.set()
        board, until_s = self._shared.board, now_s() + self._options.grace_s
        board.close()
        self._reader.stop()
        while now_s() < until_s and (board.running or not self._reader.join(0) or not self._writer.is_flushed):
            time.sleep(_POLL_S)
        for service in self.services:
            service.stop()
        for service in self.services:
            service.join(max(_POLL_S, min(1.0, until_s - now_s())))
        left = self._leave()
        for link in (self._note_link, self._end_link):
            link.close()
        event(log, "reading_loop_stopped", reader=self.reader_name, still_running=board.running, trouble=left or "none")

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._over.wait(timeout_s)

    def run(self) -> None:
        """Read until ``stop`` is called, or Ctrl-C or SIGTERM reaches the main thread, which ends as ``stop`` does; the
        next signal does not wait for handlers. A signal that the program handles itself stays its own."""
        looking = look_for_steps()
        try:
            with UntilSignal() as until, self:
                while not (until.came or self.wait(_LOOK_S)):
                    pass
        finally:
            if looking is not None:
                looking.stop()

    def __enter__(self) -> MessageReadingLoop:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def health(self) -> Health:
        return judge(self.services, now_s())

    def metrics(self) -> dict[str, float]:
        return {**self._shared.counts, "held": self._shared.board.held, "running": self._shared.board.running}

    @property
    def services(self) -> list[Service]:
        return [self._reader, self._writer, *self._runners, *self._shared.bell.services]

    def _leave(self) -> str:
        """Give waiting messages back, and leave the group. Returns what went wrong; the readers that claim idle entries
        then do the rest."""
        try:
            board, stream = self._shared.board, self._end_stream
            quiet = board.quiet()
            for is_suspect in (False, True):
                stream.give_back(
                    [message.stream_id for message in quiet if message.is_suspect is is_suspect], is_suspect
                )
            # Entries of a read that the stop broke off were not seen here.
            stream.give_back(stream.pending(board.known_ids()), self._reader.has_claimed_unseen)
            if not board.running:
                stream.leave()
        except (RedisTrouble, CommandRefused) as trouble:
            return str(trouble)
        return ""
