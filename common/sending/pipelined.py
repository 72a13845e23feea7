"""Add messages to a ticket stream: pipelined, in order, and without hiding what is unknown.

A batch is one round trip. A lost answer may have been a yes, so nothing is ever sent a second time here: the caller
learns what was certainly accepted and what is unknown.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from usher.common.base.errors import MessageUndecodable, ReplyUnknown, UsherError
from usher.common.protocol.keys import LogKeys
from usher.common.protocol.message import DUE_FIELD
from usher.common.redis.client import CommandRefused, Link
from usher.common.sending.producer import Outgoing, Producer
from usher.common.sending.workload import NewMessage

#: Messages per round trip; more is no faster, and fewer leave less in doubt when the reply is lost.
BATCH = 500
_LONGEST_NAP_S = 0.1
_SHORTEST_NAP_S = 0.001


class SendingStopped(UsherError):
    """Redis did not take all messages. ``Sender.accepted`` and ``Sender.unknown`` tell how many."""


@dataclass
class Sender:
    """Adds messages to ``stream`` over one connection. ``accepted`` messages were certainly added; of ``unknown`` ones
    it is not known."""

    link: Link
    stream: str
    ticket_field: str
    accepted: int = 0
    unknown: int = 0
    due_ms: Callable[[], int | None] = lambda: None  # for the next batch, if it is for later
    last_due_ms: int | None = None  # of the last batch

    def send(self, batch: Sequence[NewMessage]) -> list[bytes]:
        """Add the messages in order; return their stream ids.

        Raises SendingStopped when a message was refused (later ones of the batch may have been added; they count),
        NotNow when Redis could not be reached (none was added).
        """
        self.unknown = len(batch)
        due_ms = self.last_due_ms = self.due_ms()
        stream = self.stream
        if due_ms is not None:
            stream, more = LogKeys(self.stream).delayed, {DUE_FIELD.decode(): str(due_ms)}
            batch = [NewMessage(message.ticket_id, message.fields | more) for message in batch]
        commands = [message.xadd(stream, self.ticket_field) for message in batch]
        try:
            replies = self.link.pipeline(commands)
        except ReplyUnknown as lost:
            raise SendingStopped(str(lost)) from lost
        except UsherError:
            self.unknown = 0
            raise
        self.unknown = 0
        ids = [reply for reply in replies if isinstance(reply, bytes)]
        self.accepted += len(ids)
        if len(ids) < len(replies):
            first = next(index for index, reply in enumerate(replies) if not isinstance(reply, bytes))
            raise SendingStopped(f"message {self.accepted - len(ids) + first + 1} was refused: {replies[first]}")
        return ids


@dataclass
class RecognisedSender(Sender):
    """A sender of messages that all have a uid: a batch whose answer was lost is sent again, and messages that arrived
    are not added again.

    ``repeated`` counts messages that had arrived before; they are not among ``accepted``.
    """

    dedup_s: float = 0.0
    repeated: int = 0

    def __post_init__(self) -> None:
        self._producer = Producer(self.link, self.stream, self.ticket_field, self.dedup_s)

    def send(self, batch: Sequence[NewMessage]) -> list[bytes]:
        """Add the messages; return ids in order, those of first sends included. Raises SendingStopped, and NotNow when
        the last trial did not happen."""
        self.unknown = len(batch)
        self.last_due_ms = self.due_ms()
        try:
            sent = self._producer.send_many(
                (Outgoing(message.ticket_id, message.fields) for message in batch), self.last_due_ms
            )
        except (ValueError, MessageUndecodable) as wrong:
            self.unknown = 0  # checked before anything was sent
            raise SendingStopped(str(wrong)) from wrong
        except (ReplyUnknown, CommandRefused) as trouble:
            raise SendingStopped(str(trouble)) from trouble
        self.unknown = 0
        known = sum(one.repeated is True for one in sent)
        self.repeated += known
        self.accepted += len(sent) - known
        return [one.id.encode() for one in sent]


def batches(messages: Iterable[NewMessage], size: int = BATCH) -> Iterator[list[NewMessage]]:
    source = iter(messages)
    while batch := list(itertools.islice(source, size)):
        yield batch


def paced(
    messages: Iterable[NewMessage],
    rate: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[NewMessage]]:
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
