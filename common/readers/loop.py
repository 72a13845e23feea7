"""Messages without a ticket, read by the members of a plain consumer group. No master, no order.

``MessageReadingLoop`` is a reliable stream that only needs to be configured and run::

    def handle(message):
        message.fields, message.body, message.uid, message.attempt

    MessageReadingLoop(url, "payments", "billing", handle, LoopOptions(threads=4)).run()

A handler that returns is done; one that raises is tried again with growing pauses; ``RetryLater`` and ``GiveUp`` steer
that; after ``max_attempts`` failures a message becomes a dead letter. When a process dies, its messages are taken over
after ``idle_s``; these run one at a time, each start noted before, so that the one that kills processes ends as a dead
letter, and its neighbours do not. A delivery is never counted as an attempt.

``ReliableStream`` is the set of steps that survive a crash, which the loop repeats. Keys are those of
``usher.common.protocol.keys`` for this stream and group, and a dead letter looks like any other of Usher's. Do not let
a master read the same group: it would take these readers for strangers. A reader owns an entry as long as the pending
list says so, and every step asks that. There is no fence: a reader that was paused for longer than the idle time may
still be in a handler while another reader has the message. Make effects idempotent by ``message.uid``.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import queue
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from usher.common.base.backoff import backoff_s
from usher.common.base.callables import check_done, unawaitable_reason
from usher.common.base.clock import CHANCE, now_s
from usher.common.base.errors import GiveUp, GroupMissing, RedisTrouble, ReplyUnknown, RetryLater, UsherError, readable
from usher.common.base.log import ERROR, WARNING, event
from usher.common.base.text import format_error
from usher.common.observability.metrics import DeadLetterNotifier, Reader, of_this_program
from usher.common.protocol.attempts import NEVER, decode
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import EntryView
from usher.common.protocol.stream_id import ZERO, GroupPosition, Span, before, rank
from usher.common.redis.client import Arg, CommandRefused, Link
from usher.common.redis.replies import TicketStream, pairs, parse_own, span_of
from usher.common.runtime.fork_guard import ForkGuard
from usher.common.runtime.service import Health, Service, ServiceEnded, judge
from usher.common.runtime.settings import CommonSettings
from usher.common.runtime.signals import UntilSignal

#: The names in the group under which entries wait that a reader gave back; for the second one it was not known whether
#: they are safe. No reader uses these names.
RETURNED, SUSPECT = "returned", "suspect"
#: Idle time in ms of entries that were given back: longer than any reader's least idle time.
_AT_ONCE_MS = 30 * 86_400_000


class StreamMessage(EntryView):
    """A message as a handler of a reading loop sees it. ``attempt`` is 1 for the first start."""

    __slots__ = ("attempt", "failures", "first_ms", "is_suspect", "last_ms")

    def __init__(self, stream_id: bytes, flat: list[bytes] | None, failures: int = 0, is_suspect: bool = False) -> None:
        super().__init__(stream_id, flat)
        self.failures = failures  # of former readers too
        # Counted up at each start. Starts of former readers that asked for a later call are not known.
        self.attempt = failures
        self.is_suspect = is_suspect  # its former reader died with it, and may have died of it
        self.first_ms = self.last_ms = 0

    def __repr__(self) -> str:
        return f"<StreamMessage {self.id}, attempt {self.attempt}>"


class Claimed(NamedTuple):
    """The result of a search for idle entries. ``cursor`` goes into the next search; ``gone`` are ids without bodies,
    which are dead letters now."""

    cursor: bytes
    messages: list[StreamMessage]
    gone: list[bytes]


def reader_name(prefix: str = "") -> str:
    """Make a name for one start of a reader, a new one each time: a late acknowledgement of a former start must not
    look like ours."""
    return f"{prefix or socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class ReliableStream:
    """A reader of a stream's group, over a link of the caller's thread. Every method raises what ``Link.call`` raises.

    ``reader`` must be used by only one start of one process (``reader_name``).
    """

    def __init__(self, link: Link, stream: str, group: str, reader: str) -> None:
        self._link = link
        self._keys = Keys(stream, group)
        self._log_keys = LogKeys(stream)
        self._plain = TicketStream(link, self._keys)
        self.reader = reader

    def ensure_group(self, seen: bytes = ZERO) -> bytes | None:
        """Make the group if it is missing; return the id after which it then reads, None if it was there.

        A new group begins with the oldest entry. A lost group goes on where it was, as far as that was saved or is
        known to this reader (``seen``: the highest id that it was given): pending entries come again.
        """
        start = goes_on_at(self._plain.saved_position(), seen, span_of(self._link, self._keys.stream))
        return start if self._plain.create_group(start) else None

    def save_position(self) -> None:
        """Note the position of the group, for ``ensure_group`` after its loss, and for trimmers until then. First the
        id up to which it has read, then what was pending: an entry read in between is above the first and may be
        missing in the second."""
        delivered = self._plain.last_delivered()
        summary = self._link.call("XPENDING", self._keys.stream, self._keys.group)
        oldest = summary[1] or b""
        self._link.call("HSET", self._log_keys.groups, self._keys.group, min(delivered, oldest or delivered, key=rank))
        self._link.call("HSET", self._keys.position, "delivered", delivered, "oldest_pending", oldest)

    def read_new(self, count: int, block_ms: int | None) -> list[StreamMessage]:
        """Read up to ``count`` new messages; waits up to ``block_ms`` for the first one, and returns none after that.
        None does not wait.

        After ReplyUnknown some may be pending for this reader unseen: ``read_pending`` brings them.
        """
        keys = self._keys
        block = () if block_ms is None else ("BLOCK", block_ms)
        command = ("XREADGROUP", "GROUP", keys.group, self.reader, "COUNT", count, *block, "STREAMS", keys.stream, ">")
        return [StreamMessage(*entry) for entry in parse_own(self._link.call(*command, block_s=(block_ms or 0) / 1000))]

    def read_pending(self, count: int, exclude: Collection[bytes] = ()) -> list[StreamMessage]:
        """Read up to ``count`` messages that are pending for this reader, oldest first, without those of ``exclude``.
        Never waits.

        The bodies are read from the stream: reading them from the pending list would count as a delivery.
        """
        if not (ids := self.pending(exclude)[:count]):
            return []
        commands: list[Sequence[Arg]] = [("XRANGE", self._keys.stream, entry_id, entry_id) for entry_id in ids]
        *bodies, charged = self._link.all_of([*commands, ("HMGET", self._keys.attempts, *ids)])
        return [
            StreamMessage(entry_id, reply[0][1] if reply else None, _failures(entry_id, count or b"0"))
            for entry_id, reply, count in zip(ids, bodies, charged, strict=True)
        ]

    def pending(self, exclude: Collection[bytes] = ()) -> list[bytes]:
        return [entry_id for entry_id in self._plain.pending_of(self.reader) if entry_id not in exclude]

    def claim_idle(self, count: int, min_idle_ms: int, cursor: bytes = ZERO) -> Claimed:
        """Take over up to ``count`` entries (fewer where they are large) that were idle for at least ``min_idle_ms``:
        their reader died, or gave them back.

        Begin with ``cursor`` 0-0 and go on with the one of the answer. A dead reader's message is suspect: it is
        unknown whether it had been started, so its attempts are not charged; let it run alone, with ``charge`` before.
        """
        keys = self._keys
        args = (keys.group, self.reader, min_idle_ms, cursor, count)
        script_keys = (keys.stream, keys.dead, keys.attempts, keys.letters)
        cursor, taken, gone = self._link.run("stream_claim", script_keys, args)
        messages = [
            StreamMessage(
                taken[at],
                taken[at + 1],
                _failures(taken[at], taken[at + 3]),
                taken[at + 2] not in (RETURNED.encode(), self.reader.encode()),
            )
            for at in range(0, len(taken), 4)
        ]
        return Claimed(cursor, messages, gone)

    def acknowledge(self, ids: Sequence[bytes], remove: bool = False) -> list[bytes]:
        """Acknowledge these as done. Returns those that were this reader's: the others have another reader now, or were
        done before.

        With ``remove`` the entries leave the stream too, unless another group or a log consumer reads it.
        """
        return self._own("ack", [(one,) for one in ids], remove=remove)[0]

    def move_to_dead_letters(
        self,
        messages: Sequence[StreamMessage],
        reason: str,
        errors: Mapping[bytes, str] | None = None,
        remove: bool = True,
    ) -> list[bytes]:
        """Give these up: each becomes a dead letter with ``reason`` and the error of its id, and leaves group and
        stream, in one step. A message with too many fields for a letter stays in the stream.

        Returns the ids for which letters were written; the others are not, or no longer, this reader's.
        """
        errors = errors or {}
        each = [
            (one.stream_id, reason, errors.get(one.stream_id, ""), one.attempt, one.first_ms, one.last_ms)
            for one in messages
        ]
        return self._own("bury", each, remove=remove)[0]

    def charge(self, attempts: Mapping[bytes, int]) -> list[bytes]:
        return self._own("charge", [*attempts.items()])[1]

    def touch(self, ids: Iterable[bytes]) -> list[bytes]:
        """Mark these as being worked on: not idle. Returns ids that are no longer this reader's."""
        return self._own("pass", [(one,) for one in ids], self.reader)[1]

    def give_back(self, ids: Iterable[bytes], suspect: bool = False) -> list[bytes]:
        """Give these back: other readers may take them at once; a suspect stays one. Returns ids that were not this
        reader's."""
        return self._own("pass", [(one,) for one in ids], SUSPECT if suspect else RETURNED, _AT_ONCE_MS)[1]

    def _own(
        self, what: str, each: Sequence[tuple[Any, ...]], to: str = "", idle_ms: int = 0, remove: bool = False
    ) -> tuple[list[bytes], list[bytes]]:
        """Do this to entries, named first in each tuple. Return the ids of this reader's, and the others."""
        keys, of_log, replies = self._keys, self._log_keys, list[int]()
        script_keys = (keys.stream, keys.dead, keys.attempts, of_log.checkpoints, of_log.groups, keys.letters)
        head = (keys.group, self.reader, what, "1" if remove else to, idle_ms)
        while len(replies) < len(each):  # a call does not bury all where they are large
            replies += self._link.run("stream_own", script_keys, (*head, *chain.from_iterable(each[len(replies) :])))
        told = [(one[0], is_own) for one, is_own in zip(each, replies, strict=True)]
        return [one for one, is_own in told if is_own], [one for one, is_own in told if not is_own]

    def leave(self) -> bool:
        """Take this reader's name out of the group; False while something is pending for it."""
        return bool(self._link.run("stream_leave", (self._keys.stream,), (self._keys.group, self.reader)))

    def forget_readers(self, idle_ms: int) -> int:
        """Take names out of the group that have done nothing for ``idle_ms`` and have nothing pending; returns their
        number. A living reader comes back by itself."""
        rows = map(pairs, self._link.call("XINFO", "CONSUMERS", self._keys.stream, self._keys.group))
        idle = [
            row[b"name"]
            for row in rows
            if not row[b"pending"] and row[b"idle"] >= idle_ms and row[b"name"] != self.reader.encode()
        ]
        return int(self._link.run("stream_leave", (self._keys.stream,), (self._keys.group, *idle))) if idle else 0


def goes_on_at(saved: GroupPosition | None, seen: bytes, span: Span | None) -> bytes:
    """Return the id after which a group that is made (again) reads. Pure: from the saved position, the highest id this
    reader was given, and the ids in the stream.

    >>> goes_on_at(GroupPosition(b"9-0", b"5-0"), b"9-0", Span(b"1-0", b"9-0"))
    b'4-18446744073709551615'
    """
    if span is None or rank(span.last_generated) < rank(seen):
        return ZERO  # another stream: its ids begin again
    if saved is None:
        return ZERO  # what other readers had is unknown: better again than never
    reached = (
        saved.delivered
        if saved.oldest_pending is None
        else min(saved.delivered, before(saved.oldest_pending), key=rank)
    )
    return reached if rank(reached) <= rank(span.last_generated) else ZERO


def _failures(entry_id: bytes, noted: bytes) -> int:
    """Read the noted number of failures, also as consumers note it that may have had the group before; an unreadable
    note stops no message."""
    if decode(noted) is NEVER:
        event("attempts_unreadable", level=ERROR, count=1, first=entry_id)
    return decode(noted).failures


__all__ = ["LoopOptions", "MessageReadingLoop", "StreamMessage"]


#: Is called with the message; what it returns is ignored, unless it shows that nothing of the handler ran.
Handle = Callable[[StreamMessage], Any]
_PLAIN = "a reading loop takes plain functions that do the work themselves: no `async def`, no generator, no class"
#: Seconds within which `run` notices a signal: its handler must not wake a wait that it may have interrupted with the
#: lock in hand.
_LOOK_S = 0.5
#: Share of the idle time after a touch in which nothing starts: it is left for the clock's drift and for delays on the
#: way.
_FRESH_PART = 0.8
#: Messages given to the runners before they have room: so none of them waits for the desk.
_AHEAD = 64
#: Starts of a suspect beyond its attempts.
_IN_DOUBT = 2
#: Most messages of one call.
_AT_ONCE = 500
_SAVE_POSITION_S = 1.0
_POLL_S = 0.02
#: Longest wait of a stop for what is given back to others.
_LEAVE_S = 15.0
_NOT_STARTED = UsherError("others may have it by now, or something else comes first")
_UNSEEN = "its process ended before the end of its last start was stored"


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


class StreamReader(Service):
    """Reads new messages while there is room, and looks for idle ones."""

    name = "stream-read"
    waits_on_link = True

    def __init__(self, link: Link, stream: ReliableStream, options: LoopOptions, desk: StreamDesk) -> None:
        super().__init__()
        self._link, self._stream, self._options, self._desk = link, stream, options, desk
        self._seen = ZERO  # the highest id that it was given
        self._has_group = False
        self._unsure = False  # a reply of a read was lost: something may be pending for us unseen
        self.unsure_of_claim = False  # and it may have been a dead reader's
        self._cursor = ZERO
        self._claim_s = 0.0
        self._position_s = 0.0
        self._position_is_old = False
        self.stalls_after_s = 10.0 + options.block_s

    def run_once(self) -> float:
        try:
            return self._turn()
        except GroupMissing as missing:
            if self._has_group:
                event("group_lost", level=ERROR, why=str(missing))
            self._has_group = False
            self._ensure_group()
            return 0.0

    def _ensure_group(self) -> None:
        start = self._stream.ensure_group(self._seen)
        if start is not None:
            event("group_created", reads_after=start)
            self._seen = start
        self._has_group = True

    def _turn(self) -> float:
        if not self._has_group:
            self._ensure_group()
        options, now = self._options, now_s()
        if now >= self._position_s:
            self._position_s = now + _SAVE_POSITION_S
            self._save_position()
        if not (count := min(options.batch, self._desk.room)):
            return _POLL_S
        claims = now >= self._claim_s and not self._unsure
        try:
            if claims:
                self._claim(count)
            elif self._unsure:
                self._read_unseen(count)
            else:
                wait_s = min(options.block_s, max(0.0, self._claim_s - now), self.stalls_after_s / 2)
                found = self._stream.read_new(count, max(1, int(wait_s * 1000)))
                if found:
                    self._seen = max(self._seen, found[-1].stream_id, key=rank)
                    self._desk.bring(found, "read")
        except ReplyUnknown:
            self._unsure, self.unsure_of_claim = True, self.unsure_of_claim or claims
            raise
        return 0.0

    def _read_unseen(self, count: int) -> None:
        found = self._stream.read_pending(count, self._desk.held_ids)
        for message in found:
            message.is_suspect = self.unsure_of_claim
        if len(found) < count:
            self._unsure = self.unsure_of_claim = False
        self._desk.bring(found)

    def _claim(self, count: int) -> None:
        idle_s = self._options.idle_s
        claimed = self._stream.claim_idle(count, int(idle_s * 1000), self._cursor)
        self._cursor = claimed.cursor
        if claimed.gone:
            event("pending_entries_deleted", level=WARNING, count=len(claimed.gone), first=claimed.gone[0])
        for entry_id in claimed.gone:
            self._desk.ring(entry_id, "body_gone")
        if claimed.messages:
            suspects = sum(message.is_suspect for message in claimed.messages)
            event("messages_claimed", count=len(claimed.messages), suspects=suspects)
            self._desk.bring(claimed.messages, "claimed")
        if claimed.cursor == ZERO:
            self._claim_s = now_s() + self._options.claim_every_s
            self._stream.forget_readers(int(max(60.0, 10 * idle_s) * 1000))

    def _save_position(self) -> None:
        try:
            self._stream.save_position()
            self._position_is_old = False
        except GroupMissing:
            raise
        except (RedisTrouble, CommandRefused) as trouble:  # for example full memory; reading goes on
            if not self._position_is_old:
                event("position_not_saved", level=WARNING, why=str(trouble))
            self._position_is_old = True


class StreamDesk(Service):
    """Holds the messages: waiting, running, or waiting for another attempt. It gives them to the runners, writes what
    became of them, and touches those it holds; what Redis has not answered is written again, since the steps answer a
    repeat with "not yours". Nothing starts when the last touch is too old: other readers may have taken over.

    A suspect (its former reader died with it) runs alone: nothing else runs beside it, and nothing starts before Redis
    has its outcome. So a message that kills its process is charged for that, and no neighbour is.
    """

    name = "stream-write"
    reader: StreamReader

    def __init__(self, link: Link, stream: ReliableStream, options: LoopOptions, bell: DeadLetterNotifier) -> None:
        super().__init__()
        self._link, self.stream, self._options, self._bell = link, stream, options, bell
        self.counts: dict[str, float] = dict.fromkeys(_COUNTS, 0)
        #: From the reader, which brings no more before the desk has taken them: messages, and what counts them.
        self._came: tuple[list[StreamMessage], str] | None = None
        #: To the runners (None: end), and from them: what the handler raised, and for how long it ran.
        self.given: queue.SimpleQueue[StreamMessage | None] = queue.SimpleQueue()
        self.over: deque[tuple[StreamMessage, BaseException | None, float]] = deque()
        self._held: dict[bytes, StreamMessage] = {}
        self._ready: deque[StreamMessage] = deque()
        self._suspects: deque[StreamMessage] = deque()
        self._due: list[tuple[float, int, StreamMessage]] = []
        self._order = itertools.count()
        self._running: set[bytes] = set()
        self._alone: bytes | None = None  # the suspect that runs, or has ended and is not written yet
        self._done: list[bytes] = []
        self._given_up: deque[tuple[StreamMessage, str, str]] = deque()
        self._charges: dict[bytes, int] = {}
        self._touched_s, self._touch_s, self._flush_s = now_s(), 0.0, 0.0
        self.closed = False
        self.left = "its thread has not ended"  # what went wrong as it left the group

    @property
    def room(self) -> int:
        return 0 if self.closed or self._came else max(0, self._options.queue - len(self._held))

    @property
    def held_ids(self) -> set[bytes]:
        return {*list(self._held)}

    @property
    def running(self) -> int:
        return max(0, len(self._running) - self.given.qsize())

    def may_start(self, message: StreamMessage) -> bool:
        is_fresh = now_s() < self._touched_s + self._options.idle_s * _FRESH_PART
        is_turn = message.is_suspect or not self._suspects
        return is_fresh and is_turn and not self.closed and message.stream_id in self._held

    @property
    def is_flushed(self) -> bool:
        return not (self._came or self._running or self.over or self._done or self._given_up or self._charges)

    def bring(self, messages: list[StreamMessage], counted: str = "") -> None:
        """Take messages that came, except those that are held already. Called by the reader, when there is room."""
        if messages:
            self._came = messages, counted
            self.wake()

    def ring(self, entry_id: bytes, reason: str, error: str = "", attempts: int = 0) -> None:
        self.counts["dead_letters"] += 1
        self._bell.ring(b"", entry_id, reason, error_type=error.partition(":")[0], attempts=attempts)

    def run_once(self) -> float:
        if self._came is not None:
            messages, counted = self._came
            for message in messages:
                if message.stream_id not in self._held:
                    self._held[message.stream_id] = message
                    self._queue(message)
                    if counted:
                        self.counts[counted] += 1
            self._came = None
            self.reader.wake()
        while self.over:
            self._ended(*self.over.popleft())
        try:
            if now_s() >= self._touch_s:
                self._touch()
            if now_s() >= self._flush_s or self.stopping:
                self._flush()
                self._flush_s = now_s() + self._options.flush_s
        finally:
            self._start()
        next_s = self._flush_s if self._done or self._given_up or self._charges else self._touch_s
        return max(0.0, min(1.0, min(next_s, self._due[0][0] if self._due else math.inf) - now_s()))

    def on_end(self) -> None:
        """Give waiting messages back, and leave the group. The readers that claim idle entries do what fails here."""
        try:
            quiet = [*self._ready, *self._suspects, *(message for _, _, message in self._due)]
            for is_suspect in (False, True):
                ids = [message.stream_id for message in quiet if message.is_suspect is is_suspect]
                self.stream.give_back(ids, is_suspect)
            # Entries of a read that the stop broke off were not seen here.
            unseen = self.stream.pending({*self._held, *self._running})
            self.stream.give_back(unseen, self.reader.unsure_of_claim or self.reader.alive)
            if not self._running:
                self.stream.leave()
            self.left = "none"
        except (RedisTrouble, CommandRefused) as trouble:
            self.left = str(trouble)
        super().on_end()

    def _queue(self, message: StreamMessage) -> None:
        (self._suspects if message.is_suspect else self._ready).append(message)

    def _start(self) -> None:
        while self._due and self._due[0][0] <= now_s():
            self._queue(heapq.heappop(self._due)[2])
        options = self._options
        while len(self._running) < options.threads + _AHEAD and (waiting := self._suspects or self._ready):
            message = waiting[0]
            if self._alone is not None or (self._suspects and self._running) or not self.may_start(message):
                return
            # A suspect's last start was noted ahead as one that fails, and may have returned, or not have happened.
            is_used_up = message.failures >= options.max_attempts + _IN_DOUBT * message.is_suspect
            if message.body_is_gone or is_used_up:
                waiting.popleft()
                if message.body_is_gone:
                    self._give_up(message, "body_gone", "")
                else:
                    self._give_up(message, "attempts_exhausted", _UNSEEN)
                continue
            if message.is_suspect and self.stream.charge({message.stream_id: message.failures + 1}):
                self._drop([message.stream_id])  # another reader has it
                continue
            waiting.popleft()
            self._alone = message.stream_id if message.is_suspect else None
            self._running.add(message.stream_id)
            self.given.put(message)

    def _ended(self, message: StreamMessage, problem: BaseException | None, seconds: float) -> None:
        self._running.discard(message.stream_id)
        if problem is _NOT_STARTED:
            self._alone = None
            if message.stream_id in self._held:
                self._queue(message)
            return
        if problem is None:
            self.counts["handler_seconds"] += seconds
            self._done.append(message.stream_id)
            return
        options = self._options
        was_suspect, message.is_suspect = message.is_suspect, False
        self.counts["failed"] += 1
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
            wait_s = backoff_s(message.failures, options.retry_s, options.retry_cap_s, CHANCE)
        if was_suspect or not isinstance(problem, RetryLater):
            self._charges[message.stream_id] = message.failures  # a suspect's start was noted as one that fails
        about: dict[str, Any] = {"id": message.id, "attempt": message.attempt, "error": error[:500]}
        event("handler_failed", level=WARNING, **about, retry_in_s=wait_s)
        self._alone = None
        if message.stream_id in self._held:
            heapq.heappush(self._due, (now_s() + wait_s, next(self._order), message))

    def _give_up(self, message: StreamMessage, reason: str, error: str) -> None:
        event("message_given_up", level=ERROR, id=message.id, attempt=message.attempt, error=error[:500], reason=reason)
        self._given_up.append((message, reason, error))

    def _flush(self) -> None:
        stream, counts = self.stream, self.counts
        try:
            if self._charges:
                stream.charge(self._charges)
                self._charges = {}
            while ids := self._done[:_AT_ONCE]:
                mine = stream.acknowledge(ids, self._options.remove)
                del self._done[:_AT_ONCE]
                counts["done"] += len(mine)
                counts["stale"] += len(ids) - len(mine)
                self._drop(ids)
            while self._given_up:
                message, reason, error = self._given_up[0]
                if stream.move_to_dead_letters([message], reason, {message.stream_id: error}):
                    self.ring(message.stream_id, reason, error, message.attempt)
                self._given_up.popleft()
                self._drop([message.stream_id])
        except GroupMissing:
            # No entry of it is pending: what comes again is judged again.
            self._drop([*self._done, *(message.stream_id for message, _, _ in self._given_up)])
            self._done, self._given_up, self._charges = [], deque(), {}
            raise

    def _touch(self) -> None:
        sent_s = now_s()
        try:
            others = self.stream.touch(self.held_ids)
        except GroupMissing:
            others = []  # the reader makes it again; meanwhile no reader can take over
        waiting = {*self._done, *(message.stream_id for message, _, _ in self._given_up)}
        if lost := [entry_id for entry_id in others if entry_id not in waiting]:
            event("messages_taken_over", level=WARNING, count=len(lost), first=lost[0])
            self._drop(lost)
        self._touched_s, self._touch_s = sent_s, sent_s + self._options.idle_s / 3

    def _drop(self, ids: Iterable[bytes]) -> None:
        """Drop messages that Redis has as done, or that another reader has: none of them starts here any more. A
        running handler runs on."""
        gone = {*ids}
        for entry_id in gone:
            self._held.pop(entry_id, None)
        self._ready = deque(message for message in self._ready if message.stream_id not in gone)
        self._suspects = deque(message for message in self._suspects if message.stream_id not in gone)
        self._due = [item for item in self._due if item[2].stream_id not in gone]
        heapq.heapify(self._due)
        if self._alone in gone and self._alone not in self._running:
            self._alone = None


class StreamRunner(Service):
    """A slot: runs one handler at a time, for as long as the handler takes."""

    stalls_after_s = math.inf

    def __init__(self, number: int, handle: Handle, desk: StreamDesk) -> None:
        super().__init__()
        self.name = f"work-{number}"
        self._handle = handle
        self._desk = desk

    def run_once(self) -> float:
        if (message := self._desk.given.get()) is None:
            raise ServiceEnded
        problem: BaseException | None = _NOT_STARTED
        began_s = now_s()
        if self._desk.may_start(message):
            message.attempt += 1
            message.last_ms = time.time_ns() // 1_000_000
            message.first_ms = message.first_ms or message.last_ms
            problem = None
            try:
                with ForkGuard():
                    check_done(copy_context().run(self._handle, message), TypeError, _PLAIN)
            except BaseException as raised:
                # sys.exit() in a handler must not end this thread while it holds the message.
                problem = readable(raised)
        self._desk.over.append((message, problem, now_s() - began_s))
        self._desk.wake()
        return 0.0

    def interrupt(self) -> None:
        self._desk.given.put(None)


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
        if kind := unawaitable_reason(handle):
            raise TypeError(f"this handler is {kind}: {_PLAIN}")
        options = options or LoopOptions()
        self.reader_name = reader_name(name)
        self._prefix, self._made_in = name, os.getpid()
        self._streams: list[ReliableStream] = []
        self._options = options
        self.labels = {"stream": stream, "group": group}
        to = CommonSettings(dead_letter_webhook=options.webhook, webhook_secret=options.webhook_secret)
        self._bell = DeadLetterNotifier(of_this_program(), to, self.reader_name, Keys(stream, group))
        self._over = threading.Event()

        def part(role: str) -> tuple[Link, ReliableStream, LoopOptions]:
            link = Link(url, f"reader:{self.reader_name}:{role}")
            self._streams.append(ReliableStream(link, stream, group, self.reader_name))
            return link, self._streams[-1], options

        self._desk = StreamDesk(*part("write"), self._bell)
        self._reader = self._desk.reader = StreamReader(*part("read"), self._desk)
        self._runners = [StreamRunner(number, handle, self._desk) for number in range(options.threads)]
        self.show()

    def start(self) -> None:
        if os.getpid() != self._made_in:  # forked since: siblings must not take its messages for theirs
            self.reader_name = reader_name(self._prefix)
            for stream in self._streams:
                stream.reader = self.reader_name
        for service in self.services:
            service.start()
        event("reading_loop_started", reader=self.reader_name)

    def stop(self) -> None:
        """Start nothing more, let running handlers finish (up to ``grace_s``), acknowledge them, and give the rest
        back: other readers take it at once.

        A message that still runs after that stays pending and is taken over when idle. Never raises; may be called
        twice.
        """
        if self._over.is_set():
            return
        self._over.set()
        desk, until_s = self._desk, now_s() + self._options.grace_s
        desk.closed = True
        self._reader.stop()
        while now_s() < until_s and not (self._reader.join(0) and desk.is_flushed):
            time.sleep(_POLL_S)
        for service in self.services:
            service.stop()
        for service in self.services:
            service.join(_LEAVE_S if service is desk else max(_POLL_S, min(1.0, until_s - now_s())))
        event("reading_loop_stopped", reader=self.reader_name, still_running=desk.running, trouble=desk.left)

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._over.wait(timeout_s)

    def run(self) -> None:
        """Read until ``stop`` is called, or Ctrl-C or SIGTERM reaches the main thread, which ends as ``stop`` does; the
        next signal does not wait for handlers. A signal that the program handles itself stays its own."""
        with UntilSignal() as until, self:
            while not (until.came or self.wait(_LOOK_S)):
                pass

    def health(self) -> Health:
        return judge(self.services, now_s())

    def metrics(self) -> dict[str, float]:
        return {**self._desk.counts, "held": len(self._desk.held_ids), "running": self._desk.running}

    @property
    def services(self) -> list[Service]:
        return [self._reader, self._desk, *self._runners, *self._bell.services]
