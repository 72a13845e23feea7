"""Read Redis for the audit, as columns of plain values, in parts. Pending lists with their entries: ``pages``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from usher.common.protocol.keys import Keys
from usher.common.protocol.message import LONGEST_TICKET, ticket_value
from usher.common.protocol.stream_id import rank
from usher.common.redis.replies import HandOver, pairs, parse_inbox, parse_record
from usher.master.audit.read.bulk import BulkReader
from usher.master.audit.read.ranges import Probe, cut, points

#: Entries of a part of the pending list or of a stream; records of a part of the run log.
PART_ENTRIES, PART_RECORDS = 250_000, 400
_MOST_PARTS = 256
_PROBES_A_PART, _MOST_PROBES = 4, 256
_PENDING_PROBE, _ENTRY_PROBE = 100, 10
#: The most that a number of a record may be: so that a few of them can be added.
_MOST = 1 << 61
_IDS = re.compile(r"[0-9]{1,20}-[0-9]{1,20}(?:,[0-9]{1,20}-[0-9]{1,20})*")


class RunColumns(NamedTuple):
    """Columns of executions, equally long; an unreadable record has one row, with ``ids`` None."""

    records: list[bytes]
    consumers: list[str | None]
    tickets: list[str | None]
    ids: list[str | None]
    fences: list[int | None]
    attempts: list[int | None]
    starts: list[int | None]
    ends: list[int | None]
    outcomes: list[str | None]


class IndexColumns(NamedTuple):
    """Columns of the index, a row per id; an unreadable record has one row, with ``ids`` None. ``in_order``: the ids of
    its record are, each once."""

    tickets: list[bytes]
    owners: list[bytes | None]
    fences: list[int | None]
    ids: list[bytes | None]
    in_order: list[bool]


class InboxColumns(NamedTuple):
    """Columns of what an inbox hands over, a row per id. ``fences``: of the ticket; ``since``: what was handed over
    under a higher fencing token is in the inbox, None: not known. An incarnation without an inbox has one row, with
    ``ids`` None."""

    tickets: list[bytes | None]
    fences: list[int | None]
    ids: list[bytes | None]
    since: int | None


# ---- parts -----------------------------------------------------------------------------------------------------------


def pending_parts(reader: BulkReader, keys: Keys, everything: bool, parts: int = 0) -> list[tuple[bytes, bytes]]:
    """Return ranges of ids (both ends included) of about equal work. ``everything``: from the stream's first entry to
    the last one the group has read; else the pending ones."""
    count, lowest, highest, _ = reader.ask("XPENDING", keys.stream, keys.group)
    if everything:
        facts = next(
            row for row in map(pairs, reader.ask("XINFO", "GROUPS", keys.stream)) if row[b"name"] == keys.group.encode()
        )
        stream = pairs(reader.ask("XINFO", "STREAM", keys.stream))
        first = stream[b"first-entry"]
        ends = [entry_id for entry_id in (lowest, first[0] if first else None) if entry_id]
        if not ends:
            return []
        lowest, highest = (
            min(ends, key=rank),
            max((facts[b"last-delivered-id"], *([highest] if highest else [])), key=rank),
        )
        return _parts_of(reader, keys.stream, lowest, highest, parts or _number(stream[b"length"]))
    if not count:
        return []
    number = parts or _number(count)
    lo, hi = rank(lowest), rank(highest)
    probes = []
    for at in points(lo, hi, min(_MOST_PROBES, _PROBES_A_PART * number) if number > 1 else 1):
        rows = reader.ask("XPENDING", keys.stream, keys.group, _id(at), highest, _PENDING_PROBE)
        probes.append(Probe(at, len(rows), rank(rows[-1][0]) if rows else 0, len(rows) == _PENDING_PROBE))
    return [(_id(first), _id(last)) for first, last in cut(lo, hi, probes, number)]


def stream_parts(
    reader: BulkReader, stream: str, span: tuple[bytes, bytes], parts: int = 0, per_part: int = PART_ENTRIES
) -> list[tuple[bytes, bytes]]:
    """Return ranges of ids (both ends included) that cover the stream between those of ``span``."""
    first, last = span
    head = reader.ask("XRANGE", stream, first, last, "COUNT", 1)
    tail = reader.ask("XREVRANGE", stream, last, first, "COUNT", 1)
    if not head or not tail:
        return []
    length = reader.ask("XLEN", stream)
    return _parts_of(reader, stream, head[0][0], tail[0][0], parts or min(_MOST_PARTS, -(-length // per_part)))


def _parts_of(reader: BulkReader, stream: str, lowest: bytes, highest: bytes, number: int) -> list[tuple[bytes, bytes]]:
    lo, hi = rank(lowest), rank(highest)
    if hi < lo:
        return []
    probes = []
    for at in points(lo, hi, min(_MOST_PROBES, _PROBES_A_PART * number)) if number > 1 else []:
        rows = reader.ask("XRANGE", stream, _id(at), highest, "COUNT", _ENTRY_PROBE)
        probes.append(Probe(at, len(rows), rank(rows[-1][0]) if rows else 0, len(rows) == _ENTRY_PROBE))
    return [(_id(first), _id(last)) for first, last in cut(lo, hi, probes, number)]


def _number(entries: int) -> int:
    return max(1, min(_MOST_PARTS, -(-entries // PART_ENTRIES)))


def _id(value: int) -> bytes:
    return b"%d-%d" % (value >> 64, value & (1 << 64) - 1)


# ---- tickets ---------------------------------------------------------------------------------------------------------


def ticket_in(flat: Sequence[bytes], field: bytes) -> bytes | None:
    """Return the ticket id among names and values, as the scripts read it; None where there is none, or an invalid
    one."""
    ticket = ticket_value(flat, field)
    return ticket if ticket and len(ticket) <= LONGEST_TICKET else None


# ---- index, run log, members -----------------------------------------------------------------------------------------


def index_columns(reader: BulkReader, tickets: str, wanted: str | None = None) -> Iterator[IndexColumns]:
    """Yield the tickets index, or the ticket ``wanted`` of it, one row per id in processing."""
    for flat in reader.hash_pages(tickets) if wanted is None else _field(reader, tickets, wanted.encode()):
        columns = IndexColumns([], [], [], [], [])
        for at in range(0, len(flat), 2):
            try:
                owner, fence, ids = parse_record(flat[at + 1])
            except ValueError:
                _add(columns, flat[at], None, None, [None])
            else:
                _add(columns, flat[at], owner, fence, ids)
        yield columns


def _field(reader: BulkReader, key: str, name: bytes) -> Iterator[list[bytes]]:
    value = reader.ask("HGET", key, name)
    return iter([] if value is None else [[name, value]])


def is_ascending(ids: Sequence[bytes]) -> bool:
    """Return True when ids are in order, each once.

    >>> is_ascending([b"9-1", b"10-0"]), is_ascending([b"9-1", b"9-1"])
    (True, False)
    """
    ranks = [*map(rank, ids)]
    return all(one < other for one, other in itertools.pairwise(ranks))


def _add(
    columns: IndexColumns, ticket: bytes, owner: bytes | None, fence: int | None, ids: Sequence[bytes | None]
) -> None:
    columns.tickets.extend([ticket] * len(ids))
    columns.owners.extend([owner] * len(ids))
    columns.fences.extend([fence] * len(ids))
    columns.ids.extend(ids)
    columns.in_order.extend([len(ids) < 2 or is_ascending([one for one in ids if one])] * len(ids))


def inbox_columns(reader: BulkReader, inbox: str) -> InboxColumns:
    """Return what an inbox hands over, of records that can be read."""
    if reader.ask("TYPE", inbox) != b"stream":
        return InboxColumns([None], [None], [None], -1)
    found, since = InboxColumns([], [], [], None), None
    for rows in reader.entries(inbox, b"-", b"+"):
        drawn = [int(fields[1]) for _, fields in rows if fields[0] == b"fence" and fields[1].isdigit()]
        since = drawn[0] if drawn and since is None else since
        for part in (part for row in rows for part in _handed_over(row)):
            found.tickets.extend([part.ticket] * len(part.ids))
            found.fences.extend([part.fence] * len(part.ids))
            found.ids.extend(part.ids)
    return found._replace(since=since)


def _handed_over(row: list[Any]) -> Iterator[HandOver]:
    try:
        for record in parse_inbox([[b"", [row]]]):
            yield from record.parts
    except (ValueError, IndexError):  # written by another program; its reader waits at it
        return


def run_columns(reader: BulkReader, runs: str, span: tuple[bytes, bytes]) -> Iterator[RunColumns]:
    """Yield executions of the run log, a page of records at a time."""
    for rows in reader.entries(runs, *span):
        columns = RunColumns([], [], [], [], [], [], [], [], [])
        for record, fields in rows:
            try:
                given = _columns_of(fields[1])
            except (ValueError, KeyError, TypeError, IndexError):
                given = [[None]] * 8
            columns.records.extend([record] * len(given[0]))
            for at, values in enumerate(given, 1):
                column: list[Any] = columns[at]
                column.extend(values)
        yield columns


def _columns_of(record: bytes) -> list[list[Any]]:
    """Return the columns of a record in the order of ``RunColumns``. ``outcomes`` is left out of a record when every
    execution was done."""
    given = orjson.loads(record)
    count = len(given["ids"])
    columns = [given[name] for name in ("tickets", "ids", "fences", "attempts", "start_us", "end_us")]
    columns = [[given["consumer"]] * count, *columns, given.get("outcomes") or ["done"] * count]
    if any(len(column) != count for column in columns):
        raise ValueError("the columns differ in length")
    kinds = (str, str, str, int, int, int, int, str)
    if any(not set(map(type, column)) <= {kind} for column, kind in zip(columns, kinds, strict=True)):
        raise ValueError("a value does not fit its column")
    if count and not _IDS.fullmatch(",".join(given["ids"])):
        raise ValueError("an id is none")
    if any(min(column, default=0) < 0 or max(column, default=0) > _MOST for column in columns[3:7]):
        raise ValueError("a number is none of a fencing token, an attempt or a time")
    return columns
