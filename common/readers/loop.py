"""MessageReadingLoop: a reliable stream that only needs to be configured and run.

::

    def handle(message):
        message.fields, message.body, message.uid, message.attempt

    MessageReadingLoop(url, "payments", "billing", handle, LoopOptions(threads=4)).run()

It reads until Ctrl-C or SIGTERM; ``with MessageReadingLoop(...):`` reads beside the program's other work.

Handlers are plain functions: ``async def`` and generators are refused. A handler that returns is done; one that raises
is tried again with growing pauses; ``RetryLater`` and ``GiveUp`` steer that. After ``max_attempts`` failures a message
becomes a dead letter. All loops on the same stream and group share its messages. When a process dies, its messages are
taken over after ``idle_s``; these run one at a time, each start noted before, so that the one message that kills
processes ends as a dead letter (two starts later than one that raises: they may have ended well), and its neighbours do
not. (Its first start, in the process that died, is not known to have happened, and does not count.) A delivery is never
counted as an attempt.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from usher.common.base.backoff import backoff_s
from usher.common.base.callables import unawaitable_reason, unfinished_kind
from usher.common.base.clock import now_s
from usher.common.base.errors import GiveUp, RedisTrouble, RetryLater, readable
from usher.common.base.log import event
from usher.common.base.text import format_error
from usher.common.readers.board import ReadingBoard
from usher.common.readers.reliable_stream import ReliableStream, StreamMessage, reader_name
from usher.common.readers.services import LoopOptions, Shared, StreamReader, StreamWriter
from usher.common.redis.client import CommandRefused, Link
from usher.common.runtime.clock_steps import look_for_steps
from usher.common.runtime.fork_guard import ForkGuard
from usher.common.runtime.health import Health, judge
from usher.common.runtime.service import Service
from usher.common.runtime.signals import UntilSignal

__all__ = ["LoopOptions", "MessageReadingLoop", "StreamMessage"]

log = logging.getLogger(__name__)

Handle = Callable[[StreamMessage], Any]
_PLAIN = "a reading loop takes plain functions that do the work themselves: no `async def`, no generator, no class"
_POLL_S = 0.02
#: Seconds within which `run` notices a signal: its handler must not wake a wait that it may have interrupted with the
#: lock in hand.
_LOOK_S = 0.5
#: Share of the idle time after a touch in which nothing starts: it is left for the clock's drift and for delays on the
#: way.
_FRESH_PART = 0.8
#: Starts of a suspect beyond its attempts.
_IN_DOUBT = 2


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
            reason = "body_gone" if message.body_is_gone else "attempts_exhausted"
            self._give_up(
                message,
                reason,
                "" if message.body_is_gone else "its process ended before the end of its last start was stored",
            )
            return 0.0
        message.attempt += 1
        message.last_ms = time.time_ns() // 1_000_000
        message.first_ms = message.first_ms or message.last_ms
        if message.is_suspect and not self._noted(message):
            return 0.0
        began_s = now_s()
        try:
            with ForkGuard():
                _check_ran(self._handle(message))
        except BaseException as problem:
            # sys.exit() in a handler must not end this thread while it holds the message.
            self._failed(message, readable(problem))
        else:
            self._shared.metrics.handler_s += now_s() - began_s
            self._writer.done(message)  # first: when nothing runs any more, all that ended must be seen to be written
            board.ended(message)
        return 0.0

    def _noted(self, message: StreamMessage) -> bool:
        """Write a suspect's start down before it happens. Returns False when it must not happen now."""
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
        self._shared.metrics.failed += 1
        error = format_error(problem)
        message.failures += not isinstance(problem, RetryLater)
        if isinstance(problem, GiveUp) or (
            message.failures >= options.max_attempts and not isinstance(problem, RetryLater)
        ):
            self._give_up(message, "gave_up" if isinstance(problem, GiveUp) else "attempts_exhausted", error)
            return
        if isinstance(problem, RetryLater):
            wait_s = max(0.0, float(problem.after_s))
        else:
            wait_s = backoff_s(message.failures, options.retry_s, options.retry_cap_s, self._rng)
        if was_suspect or not isinstance(problem, RetryLater):
            self._writer.charge(message)  # a suspect's start was noted as one that fails
        event(
            log,
            "handler_failed",
            level=logging.WARNING,
            id=message.id,
            attempt=message.attempt,
            error=error[:500],
            retry_in_s=wait_s,
        )
        self._shared.board.again(message, now_s() + wait_s)

    def _give_up(self, message: StreamMessage, reason: str, error: str) -> None:
        event(
            log,
            "message_given_up",
            level=logging.ERROR,
            id=message.id,
            attempt=message.attempt,
            reason=reason,
            error=error[:500],
        )
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


class MessageReadingLoop:
    """Reads a stream as a member of a group, and calls ``handle`` with every message, on ``options.threads`` threads.

    ``url`` of Redis as USHER_REDIS_URL takes it. Begin it with ``with`` or ``start``; ``stop`` ends it for good.
    ``name`` is the beginning of its name in the group. Raises ValueError for a URL that cannot be parsed, TypeError for
    a handler that a call does not run.
    """

    def __init__(
        self, url: str, stream: str, group: str, handle: Handle, options: LoopOptions | None = None, name: str = ""
    ) -> None:
        _check_plain(handle)
        options = options or LoopOptions()
        self.reader_name = reader_name(name)
        self._prefix, self._made_in = name, os.getpid()
        self._streams: list[ReliableStream] = []
        self._options = options
        self._shared = Shared(options, ReadingBoard(options.queue, options.idle_s * _FRESH_PART))
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

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin reading. Returns at once; while Redis cannot be reached, connecting is tried again and again."""
        if os.getpid() != self._made_in:  # forked since: siblings must not take its messages for theirs
            self.reader_name = reader_name(self._prefix)
            for stream in self._streams:
                stream.reader = self.reader_name
        for service in self._services:
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
        for service in self._services:
            service.stop()
        for service in self._services:
            service.join(max(_POLL_S, min(1.0, until_s - now_s())))
        left = self._leave()
        for link in (self._note_link, self._end_link):
            link.close()
        event(log, "reading_loop_stopped", reader=self.reader_name, still_running=board.running, trouble=left or "none")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until ``stop`` is called; return True when it was."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- what is known ---------------------------------------------------------------------------

    def health(self) -> Health:
        return judge(self._services, now_s())

    def metrics(self) -> dict[str, float]:
        """Return counts since the start, and the numbers of held and running messages."""
        return {**vars(self._shared.metrics), "held": self._shared.board.held, "running": self._shared.board.running}

    # ---- inside ----------------------------------------------------------------------------------

    @property
    def _services(self) -> list[Service]:
        return [self._reader, self._writer, *self._runners]

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
