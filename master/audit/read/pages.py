"""Pending lists and streams as Arrow columns, page by page.

Order of reading matters on a running system. Within one window of ids the pending list is read *before* the entries:
an entry acknowledged before the first look has its record in the run log, which is read last of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import rank
from usher.master.audit.read.bulk import PAGE, BulkReader
from usher.master.audit.read.reading import ticket_in

#: A range is read whole if it has at most this many entries per pending one; otherwise entries are read one by one.
_SPARSE = 3
_TEXT, _NUMBER = pa.binary(), pa.int64()


class PendingPage(NamedTuple):
    """Columns of pending entries, equally long, in id order."""

    ids: pa.Array
    consumers: pa.Array
    idle_ms: pa.Array
    deliveries: pa.Array


class EntryPage(NamedTuple):
    """Entries of a stream with their tickets, in id order; a ticket is null where there is none, or an unfit one."""

    ids: pa.Array
    tickets: pa.Array


class PendingColumns(NamedTuple):
    """Columns of entries, equally long. Of an entry that is not pending (any more) consumer, idle and deliveries are
    null. ``in_stream`` False: its body is gone. ``tickets``: null where it has none or an unfit one."""

    ids: pa.Array
    consumers: pa.Array
    idle_ms: pa.Array
    deliveries: pa.Array
    tickets: pa.Array
    in_stream: pa.Array


def pending_columns(
    pending: BulkReader,
    entries: BulkReader,
    keys: Keys,
    ticket_field: bytes,
    span: tuple[bytes, bytes],
    everything: bool,
) -> Iterator[PendingColumns]:
    """Yield the pending entries of a range with their entries in the stream, page by page in id order; with
    ``everything`` also the entries that are not pending."""
    first, last = span
    start = first
    for page in _pending_pages(pending, keys, first, last):
        highest = page.ids[-1].as_py()
        if everything:
            found = _joined(list(_entry_pages(entries, keys.stream, ticket_field, start, highest)))
            start = b"(" + highest
        else:
            found = _bodies_of(entries, keys.stream, ticket_field, page.ids)
        if found.ids.equals(page.ids):  # the usual case in a busy stream: all entries in between are pending
            yield PendingColumns(*page, found.tickets, pa.repeat(pa.scalar(True), len(page.ids)))
            continue
        place = pc.index_in(page.ids, value_set=found.ids)
        yield PendingColumns(*page, found.tickets.take(place), place.is_valid())
        if everything:
            over = pc.invert(pc.is_in(found.ids, value_set=page.ids))
            yield _settled(EntryPage(found.ids.filter(over), found.tickets.filter(over)))
    if everything:
        yield from map(_settled, _entry_pages(entries, keys.stream, ticket_field, start, last))


def _settled(found: EntryPage) -> PendingColumns:
    count = len(found.ids)
    consumers, numbers = pa.nulls(count, _TEXT), pa.nulls(count, _NUMBER)
    return PendingColumns(found.ids, consumers, numbers, numbers, found.tickets, pa.repeat(pa.scalar(True), count))


def _pending_pages(reader: BulkReader, keys: Keys, start: bytes, last: bytes) -> Iterator[PendingPage]:
    """Yield pages; the next one is asked for before this one is given out, so that Redis works while we do."""
    reader.send(("XPENDING", keys.stream, keys.group, start, last, PAGE))
    while True:
        rows = reader.take()
        full = len(rows) >= PAGE
        if full:
            reader.send(("XPENDING", keys.stream, keys.group, b"(" + rows[-1][0], last, PAGE))
        if rows:
            yield PendingPage(
                *(pa.array([row[at] for row in rows], kind) for at, kind in enumerate((_TEXT, _TEXT, _NUMBER, _NUMBER)))
            )
        if not full:
            return


def _entry_pages(reader: BulkReader, stream: str, field: bytes, start: bytes, last: bytes) -> Iterator[EntryPage]:
    """Yield every entry of a range, and its ticket."""
    return (_entry_page_of(rows, field) for rows in reader.entries(stream, start, last))


def _bodies_of(reader: BulkReader, stream: str, field: bytes, ids: pa.Array) -> EntryPage:
    """Return the entries of ``ids`` (ascending) that are in the stream, and maybe others; read as a range where that is
    cheaper."""
    lowest, highest = ids[0].as_py(), ids[-1].as_py()
    pages, count = [], 0
    for page in _entry_pages(reader, stream, field, lowest, highest):
        pages.append(page)
        count += len(page.ids)
        reached = page.ids[-1].as_py()
        if count > _SPARSE * len(ids) and reached != highest:
            left = [entry_id for entry_id in ids.to_pylist() if rank(entry_id) > rank(reached)]
            rows = [row for row in reader.bodies(stream, left) if row is not None]
            pages.append(_entry_page_of(rows, field))
            break
    return _joined(pages)


def _joined(pages: Sequence[EntryPage]) -> EntryPage:
    if len(pages) == 1:
        return pages[0]
    none = pa.array([], _TEXT)
    return EntryPage(
        pa.concat_arrays([none, *(page.ids for page in pages)]),
        pa.concat_arrays([none, *(page.tickets for page in pages)]),
    )


def _entry_page_of(rows: Sequence[Any], field: bytes) -> EntryPage:
    """Return rows of [id, [name, value, ...]] as columns."""
    return EntryPage(
        pa.array([row[0] for row in rows], _TEXT), pa.array([ticket_in(row[1], field) for row in rows], _TEXT)
    )
