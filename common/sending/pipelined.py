"""Add many messages to a ticket stream, in order and in batches, and tell what was certainly accepted and what is
unknown: a lost answer may have been a yes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from usher.common.base.errors import MessageUndecodable, NotNow, ReplyUnknown, UsherError
from usher.common.redis.client import CommandRefused, Link
from usher.common.sending.producer import BATCH, Outgoing, Producer

#: Seconds for which a message that has a uid is sent again; and of the naps between batches.
_PATIENCE_S, _LONGEST_NAP_S, _SHORTEST_NAP_S = 10.0, 0.1, 0.001


class SendingStopped(UsherError):
    """Redis did not take all messages. ``Sender.accepted`` and ``Sender.unknown`` tell how many."""


@dataclass
class Sender:
    """Adds messages to ``stream`` over one connection. ``accepted`` messages were certainly added; of ``unknown`` ones
    it is not known. With ``dedup_s`` all have a uid: a batch whose answer was lost is sent again, and messages that had
    arrived (``repeated``) are not added again."""

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
        given = (self.link, self.stream, self.ticket_field, self.dedup_s)
        self._producer = Producer(*given, patience_s=_PATIENCE_S if self.dedup_s else 0.0)

    def send(self, batch: Sequence[Outgoing]) -> list[str]:
        """Add the messages in order; return their ids, those of first sends included. Raises SendingStopped, and NotNow
        when the last trial did not happen."""
        self.unknown = len(batch)
        self.last_due_ms = self.due_ms()
        try:
            sent = self._producer.send_many(batch, self.last_due_ms)
        except (ValueError, MessageUndecodable) as wrong:
            self.unknown = 0  # checked before anything was sent
            raise SendingStopped(str(wrong)) from wrong
        except (ReplyUnknown, CommandRefused) as trouble:
            raise SendingStopped(str(trouble)) from trouble
        except NotNow:
            self.unknown = len(batch) if len(batch) > 1 else 0  # several are perhaps more than one round trip
            raise
        self.unknown = 0
        known = sum(one.repeated for one in sent)
        self.repeated += known
        self.accepted += len(sent) - known
        return [one.id for one in sent]


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
    """Yield the messages in batches: message i is due at i / rate, however late the former ones were."""
    source = iter(messages)
    started, taken = clock(), 0
    due = 1
    while batch := list(itertools.islice(source, min(due, BATCH))):
        taken += len(batch)
        yield batch
        while (due := int((clock() - started) * rate) + 1 - taken) < 1:
            sleep(min(_LONGEST_NAP_S, max(_SHORTEST_NAP_S, started + taken / rate - clock())))
