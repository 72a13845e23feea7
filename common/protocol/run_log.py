"""The run log: start and end of every execution, one record per batch that was written.

A record is one JSON object of columns, so that a batch of 1,000 costs one encoding. Columns, all of the same length:
``ids``, ``tickets``, ``fences``, ``attempts``, ``start_us``, ``end_us`` (microseconds since the epoch, on the
consumer's clock); ``consumer`` is the incarnation. The column ``outcomes`` is present if not all are ``done`` (ack.lua
adds it if it refuses some); an execution that ended with its process is ``crashed``, and its end is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import orjson

DONE, FAILED, RETRY_LATER, GAVE_UP, CRASHED, STALE = "done", "failed", "retry_later", "gave_up", "crashed", "stale"


class RunRecord(NamedTuple):
    """An execution. ``outcome``: done, failed (its handler raised), retry_later, gave_up, crashed (it ended with its
    process), stale (its handler returned, and its acknowledgement was refused: another owner had the ticket by then,
    and handles the message too)."""

    consumer: str
    ticket: str
    id: str
    fence: int
    attempt: int
    start_us: int
    end_us: int
    outcome: str = DONE


class Executed(Protocol):
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


def encode(consumer: str, executed: Iterable[Executed], outcomes: Sequence[str] = ()) -> bytes:
    """Encode these executions as one record. ``outcomes``: one for each; if empty, all are done."""
    columns = [(e.stream_id.decode(), e.ticket.decode(), e.fence, e.attempt, e.start_us, e.end_us) for e in executed]
    ids, tickets, fences, attempts, starts, ends = zip(*columns, strict=True)
    record = {
        "consumer": consumer,
        "ids": ids,
        "tickets": tickets,
        "fences": fences,
        "attempts": attempts,
        "start_us": starts,
        "end_us": ends,
    }
    if outcomes:
        record["outcomes"] = outcomes
    return orjson.dumps(record)


def decode(record: bytes) -> Iterator[RunRecord]:
    columns = orjson.loads(record)
    names = ("ids", "tickets", "fences", "attempts", "start_us", "end_us")
    outcomes = columns.get("outcomes") or [DONE] * len(columns["ids"])
    for entry_id, ticket, fence, attempt, start_us, end_us, outcome in zip(
        *(columns[name] for name in names), outcomes, strict=True
    ):
        yield RunRecord(columns["consumer"], ticket, entry_id, fence, attempt, start_us, end_us, outcome)
