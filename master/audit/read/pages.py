"""Pending lists and streams as Arrow columns, page by page.

Order of reading matters on a running system. Within one window of ids the pending list is read *before* the entries:
what was acknowledged before the first look has its record in the run log, which is read last of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from usher.common.protocol.keys import Keys
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.stream_id import rank
from usher.master.audit.read.bulk import PAGE, BulkReader
from usher.master.audit.read.reading import ticket_in
from usher.master.audit.read.replies import EntryPage, PendingPage, entry_page, pending_page

#: Reading a stretch of the stream that is longer than this many times the pending entries in it costs more than asking
#: one by one.
_SPARSE = 3
_TEXT, _NUMBER = pa.binary(), pa.int64()


class PendingColumns(NamedTuple):
    """Equally long columns. Of an entry that is not pending (any more) consumer, idle and deliveries are null.
    ``in_stream`` False: its body is gone. ``tickets``: null where it has none or an unfit one."""

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
    """The pending entries of a range with what the stream has of them, page by page in id order; with ``everything``
    also the entries that are not pending."""
    first, last = span
    start = first
    for page in _pending_pages(pending, keys, first, last):
        highest = page.ids[-1].as_py()
        if everything:
            found = _joined(list(_entry_pages(entries, keys.stream, ticket_field, start, highest)))
            start = b"(" + highest
        else:
            found = _bodies_of(entries, keys.stream, ticket_field, page.ids)
        if found.ids.equals(page.ids):  # the usual case in a busy stream: all that lies in between is pending
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
    """The next page is asked for before this one is given out, so that Redis works while we do."""
    reader.send_for_bytes("XPENDING", keys.stream, keys.group, start, last, PAGE)
    while True:
        taken = reader.take_bytes()
        page = pending_page(taken)
        if page is None:
            columns = list(zip(*reader.decoded(taken), strict=True)) or [(), (), (), ()]
            page = PendingPage(*map(pa.array, columns, (_TEXT, _TEXT, _NUMBER, _NUMBER)))
        full = len(page.ids) >= PAGE
        if full:
            reader.send_for_bytes("XPENDING", keys.stream, keys.group, b"(" + page.ids[-1].as_py(), last, PAGE)
        if len(page.ids):
            yield page
        if not full:
            return


def _entry_pages(reader: BulkReader, stream: str, field: bytes, start: bytes, last: bytes) -> Iterator[EntryPage]:
    """Every entry of a range, and its ticket."""
    while True:
        count, before = reader.page_size, reader.bytes_read
        reader.send_for_bytes("XRANGE", stream, start, last, "COUNT", count)
        taken = reader.take_bytes()
        page = entry_page(taken, field)
        if page is None:
            page = _entry_page_of(reader.decoded(taken), field)
        if not len(page.ids):
            return
        reader.weigh(len(page.ids), reader.bytes_read - before)
        yield EntryPage(page.ids, _fit(page.tickets))
        reached = page.ids[-1].as_py()
        if len(page.ids) < count or reached == last:
            return
        start = b"(" + reached


def _bodies_of(reader: BulkReader, stream: str, field: bytes, ids: pa.Array) -> EntryPage:
    """Those of ``ids`` (ascending) that are in the stream, and maybe others; read as a range while that is the cheaper
    way."""
    lowest, highest = ids[0].as_py(), ids[-1].as_py()
    pages, count = [], 0
    for page in _entry_pages(reader, stream, field, lowest, highest):
        pages.append(page)
        count += len(page.ids)
        reached = page.ids[-1].as_py()
        if count > _SPARSE * len(ids) and reached != highest:
            left = [entry_id for entry_id in ids.to_pylist() if rank(entry_id) > rank(reached)]
            rows = [row for row in reader.bodies(stream, left) if row is not None]
            found = _entry_page_of(rows, field)
            pages.append(EntryPage(found.ids, _fit(found.tickets)))
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
    """[id, [name, value, ...]] each, as columns."""
    return EntryPage(
        pa.array([row[0] for row in rows], _TEXT), pa.array([ticket_in(row[1], field) for row in rows], _TEXT)
    )


def _fit(tickets: pa.Array) -> pa.Array:
    """Tickets as the scripts take them: not empty, and not too long."""
    lengths = pc.binary_length(tickets)
    return pc.if_else(
        pc.and_(pc.greater(lengths, 0), pc.less_equal(lengths, LONGEST_TICKET)), tickets, pa.scalar(None, _TEXT)
    )
