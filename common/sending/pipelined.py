"""Add messages to a ticket stream: pipelined, in order, and without hiding what is unknown.

A batch is one round trip. A lost answer may have been a yes, so nothing is ever sent a second time here: the caller
learns what was certainly accepted and what is unknown.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from usher.common.base.errors import MessageUndecodable, NotNow, ReplyUnknown, UsherError
from usher.common.protocol.keys import LogKeys
from usher.common.protocol.message import DUE_FIELD, key_bytes
from usher.common.redis.client import CommandRefused, Link
from usher.common.sending.producer import Outgoing, Producer

#: Messages per round trip; more is no faster, and fewer leave less in doubt when the reply is lost.
BATCH = 500
_LONGEST_NAP_S = 0.1
_SHORTEST_NAP_S = 0.001


class SendingStopped(UsherError):
    """Redis did not take all messages. ``Sender.accepted`` and ``Sender.unknown`` tell how many."""


@dataclass
class Sender:
    """Adds messages to ``stream`` over one connection. ``accepted`` ones were certainly added; of ``unknown`` ones it
    is not known.

    With ``dedup_s`` all must have a uid: a batch whose answer was lost is sent again, and what had arrived before is
    not added again, but ``repeated``. Else nothing is ever sent a second time.
    """

    link: Link
    stream: str
    ticket_field: str
    dedup_s: float = 0.0
    accepted: int = 0
    unknown: int = 0
    repeated: int = 0
    due_ms: Callable[[], int | None] = lambda: None  # for the next batch, if it is for later
    last_due_ms: int | None = None  # of the last batch

    def __post_init__(self) -> None:
        self._producer = Producer(self.link, self.stream, self.ticket_field, self.dedup_s)

    def send(self, batch: Sequence[Outgoing]) -> list[bytes]:
        """Add the messages in order; return their stream ids, with ``dedup_s`` those of first sends included.

        Raises SendingStopped when a message was refused (later ones of the batch may have been added; they count),
        NotNow when Redis could not be reached: none was added, or with ``dedup_s`` not at the last trial.
        """
        self.unknown = len(batch)
        self.last_due_ms = self.due_ms()
        try:
            ids = self._recognised(batch) if self.dedup_s else self._once(batch)
        except ReplyUnknown as lost:
            raise SendingStopped(str(lost)) from lost
        except NotNow:
            self.unknown = self.unknown if self.dedup_s else 0
            raise
        self.unknown = 0
        return ids

    def _once(self, batch: Sequence[Outgoing]) -> list[bytes]:
        due = [] if self.last_due_ms is None else [DUE_FIELD, b"%d" % self.last_due_ms]
        stream, field = LogKeys(self.stream).delayed if due else self.stream, self.ticket_field.encode()
        replies = self.link.pipeline([("XADD", stream, "*", *_flat(field, one), *due) for one in batch])
        ids = [reply for reply in replies if isinstance(reply, bytes)]
        self.accepted += len(ids)
        if len(ids) < len(replies):
            self.unknown = 0
            first = next(index for index, reply in enumerate(replies) if not isinstance(reply, bytes))
            raise SendingStopped(f"message {self.accepted - len(ids) + first + 1} was refused: {replies[first]}")
        return ids

    def _recognised(self, batch: Sequence[Outgoing]) -> list[bytes]:
        try:
            sent = self._producer.send_many(batch, self.last_due_ms)
        except (ValueError, MessageUndecodable) as wrong:
            self.unknown = 0  # checked before anything was sent
            raise SendingStopped(str(wrong)) from wrong
        except CommandRefused as refused:
            raise SendingStopped(str(refused)) from refused
        known = sum(one.repeated for one in sent)
        self.repeated += known
        self.accepted += len(sent) - known
        return [one.id.encode() for one in sent]


def _flat(field: bytes, message: Outgoing) -> list[bytes]:
    """Return the fields of an entry. Bytes of a source that are not UTF-8 go out as they came in."""
    pairs = ((field, message.ticket_id), *message.fields.items())
    return [key_bytes("a field", part) for pair in pairs for part in pair]


def batches(messages: Iterable[Outgoing], size: int = BATCH) -> Iterator[list[Outgoing]]:
    source = iter(messages)
    while batch := list(itertools.islice(source, size)):
        yield batch


def paced(
    messages: Iterable[Outgoing],
    rate: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[Outgoing]]:
    """Yield the messages in batches on an open-loop schedule of ``rate`` per second: message i is due at i / rate,
    however slow Redis is.

    A late sender catches up in full batches instead of stretching the schedule (which would hide the delay it is meant
    to cause).
    """
    source = iter(messages)
    started, taken = clock(), 0
    due = 1
    while batch := list(itertools.islice(source, min(due, BATCH))):
        taken += len(batch)
        yield batch
        while (due := int((clock() - started) * rate) + 1 - taken) < 1:
            sleep(min(_LONGEST_NAP_S, max(_SHORTEST_NAP_S, started + taken / rate - clock())))
