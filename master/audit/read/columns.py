"""Schemas of the data sources, and Arrow batches from plain columns.

Stream ids come three times: ``id`` as Redis writes it (exact, for joins), and as two numbers ``ms`` and ``seq`` (for
order and time). A number beyond 2**63-1, which only a hostile producer sends, becomes 2**63-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from usher.common.protocol.attempts import decode
from usher.master.audit.read.pages import PendingColumns
from usher.master.audit.read.reading import InboxColumns, IndexColumns, RunColumns

_MOST = 2**63 - 1
#: The latest moment of a record: a later one is none of Redis' clock, and could not be told in microseconds.
_LATEST_MS = 1 << 52
_FIELDS = pa.map_(pa.string(), pa.string())

PENDING = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("group", pa.string()),
        pa.field("id", pa.string()),
        pa.field("ms", pa.int64()),
        pa.field("seq", pa.int64()),
        pa.field("consumer", pa.string()),  # owner; null: the entry is not pending (option entries=all)
        pa.field("idle_ms", pa.int64()),
        pa.field("deliveries", pa.int64()),
        pa.field("age_ms", pa.int64()),  # since the entry was added, by its id
        pa.field("ticket", pa.string()),  # null: none, or an unfit one
        pa.field("in_stream", pa.bool_()),  # false: the body is gone
    ]
)
STREAM = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("id", pa.string()),
        pa.field("ms", pa.int64()),
        pa.field("seq", pa.int64()),
        pa.field("ticket", pa.string()),
        # Of fields with one name the first; bytes that are not UTF-8 become a replacement character.
        pa.field("fields", _FIELDS),
        pa.field("raw", pa.list_(pa.binary())),  # names and values exactly as they are; null unless option raw=true
    ]
)
RUNS = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("record", pa.string()),  # id of the record in the run log
        pa.field("record_ms", pa.int64()),
        pa.field("consumer", pa.string()),
        pa.field("ticket", pa.string()),
        pa.field("id", pa.string()),  # null: the record cannot be read
        pa.field("ms", pa.int64()),
        pa.field("seq", pa.int64()),
        pa.field("fence", pa.int64()),
        pa.field("attempt", pa.int64()),
        pa.field("start_us", pa.int64()),
        pa.field("end_us", pa.int64()),
        pa.field("outcome", pa.string()),
    ]
)
TICKETS = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("ticket", pa.string()),
        pa.field("owner", pa.string()),  # null: the record cannot be read
        pa.field("fence", pa.int64()),
        pa.field("id", pa.string()),
        pa.field("in_order", pa.bool_()),  # the ids of its record are, each once
    ]
)
INBOXES = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("owner", pa.string()),
        pa.field("since", pa.int64()),  # what was handed over under a higher fencing token is there; null: not known
        pa.field("ticket", pa.string()),
        pa.field("fence", pa.int64()),
        pa.field("id", pa.string()),  # null: there is no inbox
    ]
)
ATTEMPTS = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("id", pa.string()),
        pa.field("attempts", pa.int64()),  # starts
        pa.field("failures", pa.int64()),  # charged starts among them
    ]
)
CONSUMERS = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("name", pa.string()),
        pa.field("pending", pa.int64()),
        pa.field("oldest_idle_ms", pa.int64()),
        pa.field("idle_ms", pa.int64()),
        pa.field("lives", pa.bool_()),  # it has a lease
        pa.field("in_group", pa.bool_()),  # false: only an inbox is left of it
    ]
)


_SQL = {
    pa.string(): "string",
    pa.int64(): "bigint",
    pa.bool_(): "boolean",
    _FIELDS: "map<string,string>",
    pa.list_(pa.binary()): "array<binary>",
}


def ddl(schema: pa.Schema) -> str:
    """Return the schema as Spark SQL writes it."""
    return ", ".join(f"`{field.name}` {_SQL[field.type]}" for field in schema)


def utf8_array(values: Sequence[bytes | None] | pa.Array) -> pa.Array:
    """Return an array of UTF-8 texts; other bytes become replacement characters."""
    raw = values if isinstance(values, pa.Array) else pa.array(values, pa.binary())
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(
            [None if value is None else value.decode(errors="replace") for value in raw.to_pylist()], pa.string()
        )


def numbers(ids: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return milliseconds and sequence of ids (texts, null allowed)."""
    try:
        parts = pc.split_pattern(ids, "-", max_splits=1)
        return pc.list_element(parts, 0).cast(pa.int64()), pc.list_element(parts, 1).cast(pa.int64())
    except pa.ArrowInvalid:
        pairs = [(None, None) if value is None else _capped(value) for value in ids.to_pylist()]
        return pa.array([ms for ms, _ in pairs], pa.int64()), pa.array([seq for _, seq in pairs], pa.int64())


def _capped(stream_id: str) -> tuple[int | None, int | None]:
    ms, _, seq = stream_id.partition("-")
    if not (ms.isdecimal() and (seq or "0").isdecimal()):
        return None, None
    return min(int(ms), _MOST), min(int(seq or 0), _MOST)


def whole(values: Sequence[Any]) -> pa.Array:
    """Return an array of whole numbers; one that does not fit into 64 bits becomes the largest one."""
    try:
        return pa.array(values, pa.int64())
    except (OverflowError, pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([min(value, _MOST) if type(value) is int else None for value in values], pa.int64())


def _constant(value: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value), count)


def pending_batch(stream: str, group: str, now_ms: int, part: PendingColumns) -> pa.RecordBatch:
    count = len(part.ids)
    ids = utf8_array(part.ids)
    ms, seq = numbers(ids)
    age = pc.subtract(pa.scalar(now_ms, pa.int64()), ms)
    columns = [
        _constant(stream, count),
        _constant(group, count),
        ids,
        ms,
        seq,
        utf8_array(part.consumers),
        part.idle_ms,
        part.deliveries,
    ]
    return pa.RecordBatch.from_arrays([*columns, age, utf8_array(part.tickets), part.in_stream], schema=PENDING)


def stream_batch(stream: str, rows: Sequence[Any], tickets: Sequence[bytes | None], raw: bool) -> pa.RecordBatch:
    """Return a batch of entries. ``rows``: [id, [name, value, ...]] as Redis sends them."""
    ids = utf8_array([row[0] for row in rows])
    fields = [_mapped(row[1]) for row in rows]
    exact = [row[1] for row in rows] if raw else [None] * len(rows)
    arrays = [
        _constant(stream, len(rows)),
        ids,
        *numbers(ids),
        utf8_array(tickets),
        pa.array(fields, _FIELDS),
        pa.array(exact, pa.list_(pa.binary())),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=STREAM)


def _mapped(flat: Sequence[bytes]) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for at in range(0, len(flat), 2):
        found.setdefault(flat[at].decode(errors="replace"), flat[at + 1].decode(errors="replace"))
    return list(found.items())


def run_batch(stream: str, part: RunColumns) -> pa.RecordBatch:
    records = utf8_array(part.records)
    ids = pa.array(part.ids, pa.string())
    noted = pc.min_element_wise(numbers(records)[0], pa.scalar(_LATEST_MS, pa.int64()))
    arrays = [_constant(stream, len(part.records)), records, noted, pa.array(part.consumers, pa.string())]
    arrays += [pa.array(part.tickets, pa.string()), ids, *numbers(ids)]
    arrays += [whole(column) for column in (part.fences, part.attempts, part.starts, part.ends)]
    return pa.RecordBatch.from_arrays([*arrays, pa.array(part.outcomes, pa.string())], schema=RUNS)


def index_batch(stream: str, part: IndexColumns) -> pa.RecordBatch:
    arrays = [
        _constant(stream, len(part.tickets)),
        utf8_array(part.tickets),
        utf8_array(part.owners),
        whole(part.fences),
        utf8_array(part.ids),
        pa.array(part.in_order, pa.bool_()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=TICKETS)


def inbox_batch(stream: str, owner: str, part: InboxColumns) -> pa.RecordBatch:
    count = len(part.ids)
    arrays = [_constant(stream, count), _constant(owner, count), whole([part.since] * count), utf8_array(part.tickets)]
    return pa.RecordBatch.from_arrays([*arrays, whole(part.fences), utf8_array(part.ids)], schema=INBOXES)


def attempts_batch(stream: str, rows: Sequence[tuple[bytes, bytes]]) -> pa.RecordBatch:
    known = [decode(stored) for _, stored in rows]
    counts = [
        pa.array([one.starts for one in known], pa.int64()),
        pa.array([one.failures for one in known], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(
        [_constant(stream, len(rows)), utf8_array([i for i, _ in rows]), *counts], schema=ATTEMPTS
    )
