"""A reliable stream: messages without a ticket, read by the members of a plain consumer group. No master, no order.

``ReliableStream`` is the set of steps that survive a crash; ``usher.common.readers.loop.MessageReadingLoop`` repeats
them, and is all that most programs need. Keys are those of ``usher.common.protocol.keys`` for this stream and group,
and a dead letter looks like any other of Usher's. Do not let a master read the same group: it would take these readers
for strangers.

A reader owns an entry as long as the pending list says so, and every step asks that. There is no fence: a reader that
was paused for longer than the idle time may still be in a handler while another reader has the message. Make effects
idempotent by ``message.uid``.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from usher.common.base.log import event
from usher.common.protocol.attempts import NEVER, decode
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import EntryView
from usher.common.protocol.stream_id import ZERO, GroupPosition, Span, before, rank
from usher.common.redis.client import Arg, Link
from usher.common.redis.replies import TicketStream, pairs, parse_own
from usher.common.redis.scripts import ScriptRunner

log = logging.getLogger(__name__)

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
        self._scripts = ScriptRunner(link)
        self._keys = Keys(stream, group)
        self._log_keys = LogKeys(stream)
        self._plain = TicketStream(link, self._keys)
        self.reader = reader

    def ensure_group(self, seen: bytes = ZERO) -> bytes | None:
        """Make the group if it is missing; return the id after which it then reads, None if it was there.

        A new group begins with the oldest entry. A lost group goes on where it was, as far as that was saved or is
        known to this reader (``seen``: the highest id that it was given): pending entries come again.
        """
        start = goes_on_at(self._plain.saved_position(), seen, self._plain.span())
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
        return self._with_bodies(list(itertools.islice(self._unseen(exclude), count)))

    def pending(self, exclude: Collection[bytes] = ()) -> list[bytes]:
        return list(self._unseen(exclude))

    def _unseen(self, known: Collection[bytes]) -> Iterator[bytes]:
        return (entry_id for entry_id in self._plain.pending_of(self.reader) if entry_id not in known)

    def _with_bodies(self, ids: Sequence[bytes]) -> list[StreamMessage]:
        if not ids:
            return []
        commands: list[Sequence[Arg]] = [("XRANGE", self._keys.stream, entry_id, entry_id) for entry_id in ids]
        *bodies, charged = self._link.all_of([*commands, ("HMGET", self._keys.attempts, *ids)])
        return [
            StreamMessage(entry_id, reply[0][1] if reply else None, _failures(entry_id, count or b"0"))
            for entry_id, reply, count in zip(ids, bodies, charged, strict=True)
        ]

    def claim_idle(self, count: int, min_idle_ms: int, cursor: bytes = ZERO) -> Claimed:
        """Take over up to ``count`` entries (fewer where they are large) that were idle for at least ``min_idle_ms``:
        their reader died, or gave them back.

        Begin with ``cursor`` 0-0 and go on with the one of the answer. A dead reader's message is suspect: it is
        unknown whether it had been started, so its attempts are not charged; let it run alone, with ``charge`` before.
        """
        keys = self._keys
        args = (keys.group, self.reader, min_idle_ms, cursor, count)
        script_keys = (keys.stream, keys.dead, keys.attempts, keys.letters)
        cursor, taken, gone = self._scripts.run("stream_claim", script_keys, args)
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
            replies += self._scripts.run("stream_own", script_keys, (*head, *chain.from_iterable(each[len(replies) :])))
        told = [(one[0], is_own) for one, is_own in zip(each, replies, strict=True)]
        return [one for one, is_own in told if is_own], [one for one, is_own in told if not is_own]

    def leave(self) -> bool:
        """Take this reader's name out of the group; False while something is pending for it."""
        return bool(self._scripts.run("stream_leave", (self._keys.stream,), (self._keys.group, self.reader)))

    def forget_readers(self, idle_ms: int) -> int:
        """Take names out of the group that have done nothing for ``idle_ms`` and have nothing pending; returns their
        number. A living reader comes back by itself."""
        rows = map(pairs, self._link.call("XINFO", "CONSUMERS", self._keys.stream, self._keys.group))
        idle = [
            row[b"name"]
            for row in rows
            if not row[b"pending"] and row[b"idle"] >= idle_ms and row[b"name"] != self.reader.encode()
        ]
        return int(self._scripts.run("stream_leave", (self._keys.stream,), (self._keys.group, *idle))) if idle else 0


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
        event(log, "attempts_unreadable", level=logging.ERROR, count=1, first=entry_id)
    return decode(noted).failures
