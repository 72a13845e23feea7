"""Redis as Arrow batches: pending lists with their entries, streams, run logs, dead letters, the index of tickets,
inboxes and attempts. Spark's data sources and the snapshot of an audit stand on this.

Stream ids come four times: ``id`` as Redis writes it (exact, for joins), ``ms`` and ``seq`` (up to 2**63-1), and
``nth``, one number in their order, up to the year 2109 and 2,097,151 entries of one millisecond.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from usher.common.base.clock import wall_ms
from usher.common.protocol.attempts import decode
from usher.common.protocol.keys import Keys
from usher.common.protocol.message import LONGEST_TICKET, UNREADABLE_DUE, ticket_value
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketStream, facts_of, first_of, pairs, parse_inbox, scanned

PAGE = 10_000  # entries of a page of the pending list: with fewer, round trips count; with more, memory (10 MB a page)
_BODY_PAGE_BYTES = 4 << 20  # of a page of bodies: the number of entries follows from the weight of the last ones
_LONGEST_SILENCE_S = 60.0
_MOST = 2**63 - 1
_LATEST_MS = 1 << 52  # a later moment is none of Redis' clock, and could not be told in microseconds
_MOST_NUMBER = 1 << 61  # the most that a number of a record may be: so that a few of them can be added
_MS_BITS, _SEQ_BITS = 42, 21
_IDS = re.compile(r"[0-9]{1,20}-[0-9]{1,20}(?:,[0-9]{1,20}-[0-9]{1,20})*")
_ID = re.compile("([0-9]+)(?:-([0-9]+))?")
#: As parse_record reads it (common/redis/replies.py), of text in which bytes that are none are replaced.
_RECORD = r"^[^\s\v\x{fffd}]+ (?:0|[1-9][0-9]{0,19})(?: [0-9]{1,20}-[0-9]{1,20})+$"
_SCANNED, _AGAIN, _TOGETHER = 5000, 200, 10  # fields of a HSCAN, tickets looked at again, batches of a group of rows
Span = tuple[bytes, bytes]
Fields = frozenset[bytes]
ALL: Span = b"-", b"+"
_TEXT, _NUMBER, _BYTES = pa.string(), pa.int64(), pa.binary()


def schema_of(texts: str, numbers: str = "", **others: pa.DataType) -> pa.Schema:
    kinds = dict.fromkeys(texts.split(), _TEXT) | dict.fromkeys(numbers.split(), _NUMBER) | others
    return pa.schema(list(kinds.items()))


#: ``consumer`` null: the entry is not pending; ``ticket`` null: none, or an unfit one; ``in_stream`` False: no body.
PENDING = schema_of("stream id consumer ticket", "ms seq nth idle_ms deliveries age_ms", in_stream=pa.bool_())
#: ``fields``: of one name the first, other bytes than UTF-8 replaced; ``raw``: names and values as they are, or null.
STREAM = schema_of("stream id ticket", "ms seq nth", fields=pa.map_(_TEXT, _TEXT), raw=pa.list_(_BYTES))
#: ``record``: its id in the run log, ``rec`` that as one number, ``n`` the place in it; ``id`` null: it cannot be read.
RUNS = schema_of(
    "stream record consumer ticket id outcome handler tenant",
    "record_ms rec n ms seq nth fence attempt start_us end_us priority",
)
LETTERS = schema_of("stream letter id ticket reason", "ms nth letter_ms")
#: A row for each id; ``id`` null: the record cannot be read. ``in_order``: the ids of its record are, each once.
TICKETS = schema_of("stream ticket owner id", "fence nth", in_order=pa.bool_())
#: ``since``: what was handed over under a higher fencing token is there, null: not known; ``id`` null: no inbox.
INBOXES = schema_of("stream owner id", "since")
ATTEMPTS = schema_of("stream id", "attempts failures")
AGAIN = {"entries": PENDING, "tickets": TICKETS, "attempts": ATTEMPTS}  # what is read again


class BulkReader(Link):
    """A link for large replies: ``with BulkReader(url) as reader``. Not for commands that change anything."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "usher:audit", _LONGEST_SILENCE_S)
        self._page = 500  # entries of the next page of bodies

    def __enter__(self) -> BulkReader:
        # Of thousands of new lists a page the garbage collector makes twice the cost.
        self._was_on = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._was_on:
            gc.enable()

    def pending_pages(self, keys: Keys, first: bytes, last: bytes) -> Iterator[list[list[Any]]]:
        while rows := self.call("XPENDING", keys.stream, keys.group, first, last, PAGE):
            yield rows
            first = b"(" + rows[-1][0]
            if len(rows) < PAGE:
                return

    def entries(self, stream: str, first: bytes, last: bytes) -> Iterator[list[list[Any]]]:
        """Yield pages of [id, [name, value, ...]] in id order; their length follows the weight of the entries."""
        while rows := self.call("XRANGE", stream, first, last, "COUNT", (count := self._page)):
            some = rows[:: len(rows) // 20 + 1]
            octets = sum(len(part) for _, flat in some for part in flat) // len(some)
            self._page = max(10, min(PAGE, _BODY_PAGE_BYTES // max(1, octets)))
            yield rows
            first = b"(" + rows[-1][0]
            if len(rows) < count or rows[-1][0] == last:
                return


def write(file: Path, schema: pa.Schema, rows: Iterator[pa.RecordBatch]) -> None:
    """Write a Parquet file that is read soon: some batches together, and not packed tightly."""
    with pq.ParquetWriter(file, schema, compression="lz4") as writer:
        while some := list(itertools.islice(rows, _TOGETHER)):
            writer.write_table(pa.Table.from_batches(some, schema))


def _batch(schema: pa.Schema, count: int, **columns: Any) -> pa.RecordBatch:
    arrays = []
    for field in schema:
        given = columns[field.name]
        if given is None or isinstance(given, str | int):
            arrays.append(pa.repeat(pa.scalar(given, field.type), count))
        elif isinstance(given, pa.Array):
            arrays.append(given)
        else:
            arrays.append(_texts(given) if field.type == _TEXT else pa.array(given, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _texts(values: Sequence[bytes | str | None]) -> pa.Array:
    raw = pa.array(values, _BYTES)
    try:
        return raw.cast(_TEXT)
    except pa.ArrowInvalid:
        return pa.array([None if one is None else one.decode(errors="replace") for one in raw.to_pylist()], _TEXT)


def _numbers(texts: pa.Array) -> pa.Array:
    try:
        return texts.cast(_NUMBER)
    except pa.ArrowInvalid:
        return pa.array([None if one is None else min(int(one), _MOST) for one in texts.to_pylist()], _NUMBER)


def _places(ids: pa.Array) -> dict[str, pa.Array]:
    try:
        parts = pc.split_pattern(ids, "-", max_splits=1)
        ms, seq = (pc.list_element(parts, at).cast(_NUMBER) for at in (0, 1))
    except pa.ArrowInvalid:  # too large, or of a letter of another program
        known = [_ID.fullmatch(one or "") for one in ids.to_pylist()]
        ms, seq = (_numbers(pa.array([one and (one[at] or "0") for one in known], _TEXT)) for at in (1, 2))
    high, low = (
        pc.if_else(pc.less(part, 1 << bits), part, (1 << bits) - 1) for part, bits in ((ms, _MS_BITS), (seq, _SEQ_BITS))
    )
    return {"ms": ms, "seq": seq, "nth": pc.add(pc.shift_left(high, _SEQ_BITS), low)}


def nth(stream_id: bytes) -> int:
    return int(_places(_texts([stream_id]))["nth"][0].as_py())


def _ticket(flat: Sequence[bytes], field: bytes) -> bytes | None:
    """Return the ticket id among names and values as the scripts read it; None: there is none, or an invalid one."""
    ticket = flat[1] if flat[0] == field else ticket_value(flat, field)
    return ticket if ticket and len(ticket) <= LONGEST_TICKET else None


def pending_span(reader: BulkReader, keys: Keys, everything: bool) -> Span | None:
    """Return the lowest and highest id to read: of what is pending, or of all that the group has read."""
    count, lowest, highest, _ = reader.call("XPENDING", keys.stream, keys.group)
    if not everything:
        return (lowest, highest) if count else None
    ends = [one for one in (lowest, first_of(facts_of(reader, keys.stream))) if one]
    if not ends:
        return None
    span = min(ends, key=rank), max(TicketStream(reader, keys).last_delivered(), highest or ZERO, key=rank)
    return span if rank(span[0]) <= rank(span[1]) else None


def pending(
    reader: BulkReader, keys: Keys, field: bytes | None, everything: bool = False, span: Span | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield pending entries with their tickets; ``everything``: all that was read; no ``field``: the list alone."""
    if not (span := span or pending_span(reader, keys, everything)):
        return
    (start, last), now_ms = span, pa.scalar(wall_ms(), _NUMBER)

    def batch(ids: pa.Array, tickets: pa.Array | None, at: pa.Array, in_stream: bool) -> pa.RecordBatch:
        """``at``: their places in this page of the pending list; null: not pending."""
        told = {name: column.take(at) for name, column in held.items()} | (place := _places(ids))
        told |= {"age_ms": pc.subtract(now_ms, place["ms"]), "in_stream": in_stream}
        return _batch(PENDING, len(ids), stream=keys.stream, id=ids, ticket=tickets, **told)

    with BulkReader(reader.url) as bodies:
        for rows in itertools.chain(reader.pending_pages(keys, start, last), [[]] if everything else ()):
            owned, consumer, idle_ms, deliveries = zip(*rows, strict=True) if rows else ((),) * 4
            held = {"consumer": _texts(consumer)}
            held |= {"idle_ms": pa.array(idle_ms, _NUMBER), "deliveries": pa.array(deliveries, _NUMBER)}
            ids, upto = _texts(owned), rows[-1][0] if rows else last
            there = [pa.array([], pa.int32())]
            for page in bodies.entries(keys.stream, start if everything else owned[0], upto) if field else ():
                found, tickets = (
                    _texts([row[0] for row in page]),
                    _texts([_ticket(row[1], field or b"") for row in page]),
                )
                there.append(at := pc.index_in(found, value_set=ids))
                if not everything:
                    found, tickets, at = (one.filter(pc.is_valid(at)) for one in (found, tickets, at))
                yield batch(found, tickets, at, True)
            every = pa.array(range(len(ids)), pa.int32())
            left = every.filter(pc.invert(pc.is_in(every, value_set=pa.concat_arrays(there))))
            yield batch(ids.take(left), None, left, False)
            start = b"(" + upto


def stream(
    reader: BulkReader, name: str, key: str, field: bytes, span: Span, raw: bool = False, only: Fields | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the entries of ``key``, which is the stream ``name`` or stands beside it; with ``only`` these fields."""
    for rows in reader.entries(key, *span):
        ids = _texts([row[0] for row in rows])
        yield _batch(
            STREAM,
            len(rows),
            stream=name,
            id=ids,
            ticket=[_ticket(row[1], field) for row in rows],
            fields=[_mapped(row[1], only) for row in rows],
            raw=[row[1] for row in rows] if raw else None,
            **_places(ids),
        )


def _mapped(flat: Sequence[bytes], only: frozenset[bytes] | None) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for at in (at for at in range(0, len(flat), 2) if only is None or flat[at] in only):
        found.setdefault(flat[at].decode(errors="replace"), flat[at + 1].decode(errors="replace"))
    return list(found.items())


def letters(reader: BulkReader, keys: Keys) -> Iterator[pa.RecordBatch]:
    """Yield the dead letters, without those of delayed messages, whose ids are others."""
    for page in reader.entries(keys.dead, *ALL):
        rows = [(letter, dict(_mapped(flat, None))) for letter, flat in page]
        rows = [(letter, fields) for letter, fields in rows if fields.get("usher-reason") != UNREADABLE_DUE]
        letter = _texts([letter for letter, _ in rows])
        told: dict[str, Any] = {"stream": keys.stream}
        told |= {name: [fields.get(f"usher-{name}") for _, fields in rows] for name in ("id", "ticket", "reason")}
        letter_ms = pc.min_element_wise(_places(letter)["ms"], pa.scalar(_LATEST_MS, _NUMBER))
        yield _batch(LETTERS, len(rows), letter=letter, letter_ms=letter_ms, **_places(_texts(told["id"])), **told)


def runs(reader: BulkReader, name: str, key: str, span: Span = ALL) -> Iterator[pa.RecordBatch]:
    """Yield executions of the run log ``key``, a page of records at a time; of an unreadable record one row."""
    for rows in reader.entries(key, *span):
        records: list[bytes] = []
        columns: list[list[Any]] = [[] for _ in _RUN]
        for record, fields in rows:
            try:
                given = _columns_of(fields[1])
            except (ValueError, KeyError, TypeError, IndexError):
                given = [[None]] * (len(_RUN) - 1)
            count = len(given[0])
            records.extend([record] * count)
            for column, values in zip(columns, (*given, range(count)), strict=True):
                column.extend(values)
        noted, ids = _texts(records), pa.array(columns[2], _TEXT)
        at, place = _places(noted), _places(ids)
        told = {name: pa.array(values, RUNS.field(name).type) for name, values in zip(_RUN, columns, strict=True)}
        record_ms = pc.min_element_wise(at["ms"], pa.scalar(_LATEST_MS, _NUMBER))
        yield _batch(RUNS, len(records), stream=name, record=noted, record_ms=record_ms, rec=at["nth"], **told, **place)


_RUN = (
    *("consumer", "ticket", "id", "fence", "attempt", "start_us", "end_us", "outcome", "handler", "tenant"),
    *("priority", "n"),
)


def _columns_of(record: bytes) -> list[list[Any]]:
    """Return the columns ``_RUN`` of a record, but for the last; without ``outcomes`` every execution was done."""
    given = orjson.loads(record)
    count, tenants, handler = len(given["ids"]), given.get("tenants"), given.get("handler")
    tickets, *columns = (given[name] for name in ("tickets", "ids", "fences", "attempts", "start_us", "end_us"))
    tickets = [ticket or f"\ufffd{one}" for ticket, one in zip(tickets, columns[0], strict=True)]
    columns = [[given["consumer"]] * count, tickets, *columns, given.get("outcomes") or ["done"] * count]
    columns += [
        [handler if isinstance(handler, str) else None] * count,
        [str(tenants[at]) for at in given["tenant"]] if tenants else [None] * count,
        [int(one) for one in given.get("priority") or [0] * count],
    ]
    if {len(column) for column in columns} != {count}:
        raise ValueError("the columns differ in length")
    kinds = (str, str, str, int, int, int, int, str)
    if any(not set(map(type, column)) <= {kind} for column, kind in zip(columns, kinds, strict=False)):
        raise ValueError("a value does not fit its column")
    if count and not _IDS.fullmatch(",".join(given["ids"])):
        raise ValueError("an id is none")
    if any(min(column, default=0) < 0 or max(column, default=0) > _MOST_NUMBER for column in columns[3:7]):
        raise ValueError("a number is none of a fencing token, an attempt or a time")
    return columns


def tickets(reader: BulkReader, keys: Keys) -> Iterator[pa.RecordBatch]:
    """Yield the index of tickets. A record may come twice while the index grows."""
    for flat in scanned(reader, keys.tickets, _SCANNED):
        yield from _records(keys, flat[::2], flat[1::2])


def _records(keys: Keys, tickets: Sequence[bytes], records: Sequence[bytes]) -> Iterator[pa.RecordBatch]:
    names, stored = _texts(tickets), _texts(records)
    is_one = pc.match_substring_regex(stored, _RECORD)
    others = names.filter(pc.invert(is_one))
    nothing = dict.fromkeys(("owner", "fence", "id", "nth"))
    yield _batch(TICKETS, len(others), stream=keys.stream, ticket=others, in_order=True, **nothing)
    parts = pc.split_pattern(stored.filter(is_one), " ")
    of, ids = pc.list_parent_indices(pc.list_slice(parts, 2)), pc.list_flatten(pc.list_slice(parts, 2))
    owner, fence = (pc.list_element(parts, at).take(of) for at in (0, 1))
    place = _places(ids)["nth"]
    falls = pc.and_(pc.equal(of[1:], of[:-1]), pc.less_equal(place[1:], place[:-1]))
    told = {"owner": owner, "fence": _numbers(fence), "ticket": names.filter(is_one).take(of), "nth": place}
    in_order = pc.invert(pc.is_in(of, of[1:].filter(falls)))
    yield _batch(TICKETS, len(ids), stream=keys.stream, id=ids, in_order=in_order, **told)


def again(
    link: Link, keys: Keys, ids_of: Mapping[bytes, Collection[str]], gone: Collection[str]
) -> tuple[Iterable[pa.RecordBatch], ...]:
    """Read the tables ``AGAIN`` of entries, each ticket at one moment. ``gone``: they are in the stream no more."""
    names, answers = (keys.stream, keys.tickets, keys.attempts), list[Any]()
    tickets = [(name, [*filter(None, ids)]) for name, ids in sorted(ids_of.items(), reverse=True)]
    asked: list[list[bytes | str]] = [[keys.group, name, *ids] for name, ids in tickets]
    for at in range(0, len(asked), _AGAIN):
        answers += link.run_each("look_again", names, asked[at : at + _AGAIN])
    entries, records, counts = dict[str, tuple[Any, ...]](), dict[bytes, bytes](), dict[bytes, bytes]()
    for (name, ids), (record, *rows) in zip(tickets, answers, strict=True):
        if record is not None:
            records[name] = record
        for one, (owner, idle_ms, deliveries, tried) in zip(ids, rows, strict=True):
            entries[one] = (None if name == b"\xff" + one.encode() else name, owner, idle_ms, deliveries)
            if tried is not None:
                counts[one.encode()] = tried
    ticket, *held = ([row[at] for row in entries.values()] for at in range(4))
    told = dict(zip(("consumer", "idle_ms", "deliveries"), held, strict=True)) | _places(_texts([*entries]))
    told |= {"id": [*entries], "in_stream": [one not in gone for one in entries], "age_ms": 0}
    pending = _batch(PENDING, len(entries), stream=keys.stream, ticket=ticket, **told)
    return [pending], _records(keys, [*records], [*records.values()]), [_attempts(keys, [*counts], [*counts.values()])]


def inboxes(reader: BulkReader, keys: Keys) -> Iterator[pa.RecordBatch]:
    for member in map(pairs, reader.call("XINFO", "CONSUMERS", keys.stream, keys.group)):
        if ":" not in (owner := member[b"name"].decode(errors="replace")):
            continue
        ids: list[bytes | None] = []
        since: int | None = None
        if reader.call("TYPE", keys.inbox(owner)) != b"stream":
            ids, since = [None], -1
        else:
            for page in reader.entries(keys.inbox(owner), *ALL):
                for one, fields in page:
                    if fields[0] == b"fence" and fields[1].isdigit() and since is None:
                        since = min(int(fields[1]), _MOST)
                    with contextlib.suppress(ValueError, IndexError):  # of another program; its reader waits at it
                        told = parse_inbox([[b"", [[one, fields]]]])
                        ids += [each for record in told for part in record.parts for each in part.ids]
        yield _batch(INBOXES, len(ids), stream=keys.stream, owner=owner, since=since, id=ids)


def attempts(reader: BulkReader, keys: Keys) -> Iterator[pa.RecordBatch]:
    for flat in scanned(reader, keys.attempts, _SCANNED):
        yield _attempts(keys, flat[::2], flat[1::2])


def _attempts(keys: Keys, ids: Sequence[bytes], stored: Sequence[bytes]) -> pa.RecordBatch:
    known = [decode(one) for one in stored]
    counts = {"attempts": [one.starts for one in known], "failures": [one.failures for one in known]}
    return _batch(ATTEMPTS, len(known), stream=keys.stream, id=ids, **counts)
