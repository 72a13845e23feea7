"""The run log: start and end of every execution, one record per acknowledged batch.

A record is one JSON object of columns, so that a batch of 1,000 costs one encoding. Columns, all of the same length: ``ids``, ``tickets``,
``fences``, ``attempts``, ``start_us``, ``end_us`` (microseconds since the epoch, on the consumer's clock); ``consumer`` is the incarnation.
A ticket is "" when the message has none (USHER_UNKEYED=spread): nothing is said of the order of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import orjson

from common.message import ticket_text


class Run(NamedTuple):
    """One execution that was acknowledged."""

    consumer: str
    ticket: str
    id: str
    fence: int
    attempt: int
    start_us: int
    end_us: int


class Executed(Protocol):
    """What a consumer knows of an execution."""

    @property
    def ticket(self) -> bytes: ...
    @property
    def stream_id(self) -> bytes: ...
    @property
    def fence(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def start_us(self) -> int: ...
    @property
    def end_us(self) -> int: ...


def encode(consumer: str, executed: Iterable[Executed]) -> bytes:
    """A record of these executions."""
    columns = [(e.stream_id.decode(), ticket_text(e.ticket), e.fence, e.attempt, e.start_us, e.end_us) for e in executed]
    ids, tickets, fences, attempts, starts, ends = zip(*columns, strict=True)
    return orjson.dumps(
        {"consumer": consumer, "ids": ids, "tickets": tickets, "fences": fences, "attempts": attempts, "start_us": starts, "end_us": ends}
    )


def decode(record: bytes) -> Iterator[Run]:
    """The executions of a record."""
    columns = orjson.loads(record)
    for entry_id, ticket, fence, attempt, start_us, end_us in zip(
        columns["ids"], columns["tickets"], columns["fences"], columns["attempts"], columns["start_us"], columns["end_us"], strict=True
    ):
        yield Run(columns["consumer"], ticket, entry_id, fence, attempt, start_us, end_us)
