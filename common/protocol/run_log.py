"""The run log: start and end of every execution, one record per batch that was written.

A record is one JSON object of columns, so that a batch of 1,000 costs one encoding. Columns, all of the same length:
``ids``, ``tickets``, ``fences``, ``attempts``, ``start_us``, ``end_us`` (microseconds since the epoch, on the
consumer's clock); ``consumer`` is the incarnation, ``handler`` its USHER_HANDLER. The column ``outcomes`` is present if
not all are ``done`` (ack.lua adds it if it refuses some); an execution that ended with its process is ``crashed``, and
its end is 0. ``into`` is there if runs absorbed messages: for each of these the id of the run, for others "".
``interrupted`` is there if somebody interrupted one: true or false for each.
Where messages have tenants, ``tenant`` is a column of places in the list ``tenants``; where they have
priorities, ``priority`` is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from usher.common.protocol.marks import NO_FIELDS, MarkFields

DONE, FAILED, RETRY_LATER, GAVE_UP, CRASHED = "done", "failed", "retry_later", "gave_up", "crashed"
#: Of a message that another's run had absorbed: it is done, and began and ended with the end of that run.
MERGED = "merged"
FAILURES = frozenset({FAILED, GAVE_UP, CRASHED})


class RunRecord(NamedTuple):
    """An execution. ``outcome``: done, merged (the run of ``into`` absorbed it), failed (its handler raised),
    retry_later, gave_up, or crashed (it ended with its process). ``error``: what anybody may see of it, where it is
    kept with its message."""

    consumer: str
    ticket: str
    id: str
    fence: int
    attempt: int
    start_us: int
    end_us: int
    outcome: str = DONE
    error: str = ""
    into: str = ""
    interrupted: bool = False


_NONE: Mapping[bytes, bytes] = {}


def encode(
    consumer: str,
    executed: Sequence[Any],
    outcomes: Sequence[str] = (),
    handler: str = "",
    fields: MarkFields = NO_FIELDS,
    into: Mapping[bytes, bytes] = _NONE,
) -> bytes:
    """Encode these executions (messages as they ended, or ``Finished``) as one record. ``outcomes``: one for each; if
    empty, all are done. ``handler``: the one that ran them; ``fields``: in which its messages have tenants and
    priorities. ``into``: ids of runs by those of what they absorbed."""
    record: dict[str, Any] = {
        "consumer": consumer,
        "ids": orjson.Fragment(b'["%b"]' % b'","'.join([e.stream_id for e in executed])),
        "tickets": [e.ticket.decode() for e in executed],
        "fences": [e.fence for e in executed],
        "attempts": [e.attempt for e in executed],
        "start_us": [e.start_us for e in executed],
        "end_us": [e.end_us for e in executed],
    }
    if outcomes:
        record["outcomes"] = outcomes
    if into:
        record["into"] = [into.get(e.stream_id, b"").decode() for e in executed]
    if any(marked := [e.interrupted for e in executed]):
        record["interrupted"] = marked
    if handler:
        record["handler"] = handler
    if not fields.is_empty:
        marks = [fields.of(e.stream_id, e.ticket, e.flat) for e in executed]
        places = {tenant: at for at, tenant in enumerate(dict.fromkeys(mark.tenant for mark in marks))}
        if fields.tenant:
            record["tenants"] = [tenant.decode(errors="replace") for tenant in places]
            record["tenant"] = [places[mark.tenant] for mark in marks]
        if fields.priority:
            record["priority"] = [mark.priority for mark in marks]
    return orjson.dumps(record)


def decode(record: bytes) -> Iterator[RunRecord]:
    columns = orjson.loads(record)
    names = ("ids", "tickets", "fences", "attempts", "start_us", "end_us")
    outcomes = columns.get("outcomes") or [DONE] * len(columns["ids"])
    runs = columns.get("into") or [""] * len(columns["ids"])
    marks = columns.get("interrupted") or [False] * len(columns["ids"])
    for entry_id, ticket, fence, attempt, start_us, end_us, outcome, into, mark in zip(
        *(columns[name] for name in names), outcomes, runs, marks, strict=True
    ):
        times = fence, attempt, start_us, end_us
        yield RunRecord(columns["consumer"], ticket, entry_id, *times, MERGED if into else outcome, "", into, mark)


def encode_kept(consumer: str, run: Any, outcome: str, error: str = "") -> bytes:
    """Encode an execution as a line that is kept with its message, while that is unfinished, and in its dead letter."""
    return orjson.dumps((consumer, run.fence, run.attempt, run.start_us, run.end_us, outcome, error))


def decode_kept(lines: bytes, ticket: str, entry_id: str) -> list[RunRecord]:
    """Parse such lines.

    >>> [(one.consumer, one.end_us) for one in decode_kept(b'["c:1",9,1,5,7,"x","E"]' + b"\\nnot one", "T", "1-0")]
    [('c:1', 7)]
    """
    found = []
    for line in lines.split(b"\n"):
        with contextlib.suppress(ValueError, TypeError):  # somebody else wrote it
            consumer, *others = row = orjson.loads(line)
            if [*map(type, row)] == [str, int, int, int, int, str, str]:
                found.append(RunRecord(consumer, ticket, entry_id, *others))
    return found
