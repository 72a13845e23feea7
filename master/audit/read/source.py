"""The formats of Usher's Redis. Register them once per session, then read them as any other format::

    from usher.master.audit.read import source
    source.register(spark)
    spark.read.format("redis_pending").option("url", "redis://localhost:6379").load().groupBy("consumer").count().show()

===================  ==============================================================================  =================
format               rows (schema: ``columns``)                                                      parts
===================  ==============================================================================  =================
``redis_pending``    a pending entry, with its ticket from the stream; ``entries=all``: also         ranges of ids
                     entries that were read and are over
``redis_stream``     an entry with its fields; ``key=...`` reads another stream; ``raw=true``: the   ranges of ids
                     exact bytes
``redis_runs``       an execution of the run log                                                     ranges of records
``redis_tickets``    an id in the tickets index, with owner and fence                                one per stream
``redis_inboxes``    an id that an inbox hands over to its owner, with ticket and fence              one per stream
``redis_attempts``   attempts of a message that failed or ran in a crash                             one per stream
``redis_consumers``  a name in the group, and whether it is alive                                    one per stream
===================  ==============================================================================  =================

Options: ``url`` (as USHER_REDIS_URL), ``stream`` (default ``ticket_stream``; several, comma separated), ``group``,
``ticket_field`` (a work stream, ``usher:{<group>}``, has its own), ``partitions`` (parts per stream; 0 chooses),
``first`` and ``last`` (ids, for ``redis_stream`` and ``redis_runs``).

Filters that Spark pushes down, and what is spared: ``stream = ...``: the other streams are not read; ``ticket = ...``:
of the index one field is asked for, of the others only its rows leave the Python worker; ``id = ...`` and comparisons
of ``ms`` (``redis_pending``, ``redis_stream``) or ``record_ms`` (``redis_runs``): Redis reads that range of ids.

In this process (``engine/frames``) the same readers are used, but nothing is pushed down.

``spark.readStream`` takes ``redis_runs`` and ``redis_stream`` (``key=...`` for dead letters): what is new since the
last micro-batch, read in the driver, from behind ``first`` on.
"""

from __future__ import annotations

import abc
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from usher.common.base.clock import wall_ms
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SCOPED_TICKET_FIELD, is_work_stream
from usher.common.protocol.stream_id import is_id, rank
from usher.common.redis.endpoints import near
from usher.common.redis.replies import pairs
from usher.common.runtime.settings import CommonSettings
from usher.master.audit import engine
from usher.master.audit.engine.formats import Format, FormatReader, LogReader
from usher.master.audit.read import columns, pages, reading
from usher.master.audit.read.bulk import PAGE, BulkReader
from usher.master.audit.read.snapshot import members

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The largest part of an id; and how late a moment is pushed down (later ones are cut off: ``columns``).
_MOST, _LATEST_MS = (1 << 64) - 1, 1 << 52
_DEFAULTS = {name: field.default for name, field in CommonSettings.model_fields.items()}


class IdRange(NamedTuple):
    """A range of ids of one stream, both ends included."""

    stream: str
    first: bytes = b"-"
    last: bytes = b"+"


class _Reader(FormatReader):
    """The part common to all readers. ``time``: the column that is the first half of the ids by which ranges are read,
    "" without ranges."""

    time = ""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = {name.lower(): value for name, value in options.items()}
        if "url" not in self.options:
            raise ValueError('name the Redis: .option("url", "redis://host:6379")')
        self.equal: dict[str, Any] = {}  # column -> the value that is asked for
        self.least_ms, self.most_ms = 0, _MOST

    def heed(self, kind: str, column: str, value: Any) -> None:
        if kind == "EqualTo":
            self.equal[column] = value
        if column == self.time and isinstance(value, int) and 0 <= value < _LATEST_MS:
            if kind in ("EqualTo", "GreaterThan", "GreaterThanOrEqual"):
                self.least_ms = max(self.least_ms, value)
            if kind in ("EqualTo", "LessThan", "LessThanOrEqual"):
                self.most_ms = min(self.most_ms, value)

    def streams(self) -> list[str]:
        named = self.option("stream", _DEFAULTS["ticket_stream"]).split(",")
        return [name.strip() for name in named if name.strip() == self.equal.get("stream", name.strip()) != ""]

    def span(self) -> tuple[bytes, bytes] | None:
        """Return the ids between which to read, both included, by options and filters; None: no id can be there."""
        wanted = self.equal.get("id") if self.time == "ms" else None
        if wanted is not None and not is_id(wanted):
            return None
        ids = [wanted.encode()] if wanted else []
        first = max([self.option("first", "-").encode(), b"%d-0" % self.least_ms, *ids], key=_place)
        last = min([self.option("last", "+").encode(), b"%d" % self.most_ms, *ids], key=_end)
        return (first, last) if _place(first) <= _end(last) else None

    def option(self, name: str, default: str = "") -> str:
        return self.options.get(name, default)

    def number(self, name: str) -> int:
        return int(self.option(name, "0"))

    def keys(self, stream: str) -> Keys:
        return Keys(stream, self.option("group", _DEFAULTS["group"]))

    def ticket_field(self, stream: str) -> bytes:
        """Return the ticket field of a stream; a work stream has its own, also where it is named by hand beside
        others."""
        if is_work_stream(stream, self.option("group", _DEFAULTS["group"])):
            return SCOPED_TICKET_FIELD
        return self.option("ticket_field", _DEFAULTS["ticket_field"]).encode()

    def connect(self, stream: str) -> BulkReader:
        return BulkReader(near(self.options["url"], stream))

    def partitions(self) -> list[IdRange]:
        """Return one part per stream, unless a source can cut further."""
        return [IdRange(stream) for stream in self.streams()] or [IdRange("")]

    def read(self, part: IdRange) -> Iterator[pa.RecordBatch]:
        if not part.stream:
            return
        # Millions of small lists, none of them in a cycle: a search for cycles would cost as much as the reading.
        gc.disable()
        try:
            with self.connect(part.stream) as reader:
                for batch in self.batches(reader, part):
                    wanted = self.equal.get("ticket") if "ticket" in batch.schema.names else None
                    yield batch if wanted is None else batch.filter(pc.equal(batch["ticket"], wanted))
        finally:
            gc.enable()

    @abc.abstractmethod
    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range."""


class _PendingReader(_Reader):
    time = "ms"

    def partitions(self) -> list[IdRange]:
        parts: list[IdRange] = []
        if (whole := self.span()) is None:
            return [IdRange("")]
        for stream in self.streams():
            with self.connect(stream) as reader:
                spans = reading.pending_parts(reader, self.keys(stream), self._everything, self.number("partitions"))
            parts += [IdRange(stream, *span) for span in _within(spans, whole)]
        return parts or [IdRange("")]

    @property
    def _everything(self) -> bool:
        return self.option("entries", "pending") == "all"

    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        keys, now_ms = self.keys(part.stream), wall_ms()
        with self.connect(part.stream) as entries:
            for page in pages.pending_columns(
                reader, entries, keys, self.ticket_field(part.stream), (part.first, part.last), self._everything
            ):
                yield columns.pending_batch(part.stream, keys.group, now_ms, page)


class _StreamReader(_Reader, LogReader):
    time = "ms"
    per_part = reading.PART_ENTRIES

    def key(self, stream: str) -> str:
        return self.option("key", stream)

    def partitions(self) -> list[IdRange]:
        parts: list[IdRange] = []
        if (whole := self.span()) is None:
            return [IdRange("")]
        for stream in self.streams():
            with self.connect(stream) as reader:
                number = self.number("partitions")
                spans = reading.stream_parts(reader, self.key(stream), whole, number, self.per_part)
            parts += [IdRange(stream, *span) for span in spans]
        return parts or [IdRange("")]

    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        raw, field = self.option("raw") == "true", self.ticket_field(part.stream)
        for rows in reader.entries(self.key(part.stream), part.first, part.last):
            yield columns.stream_batch(part.stream, rows, [reading.ticket_in(row[1], field) for row in rows], raw)

    def begin(self) -> dict[str, str]:
        return dict.fromkeys(self.streams(), self.option("first", "0-0"))

    def end(self, begin: dict[str, str]) -> dict[str, str]:
        end = {}
        for stream, last in begin.items():
            with self.connect(stream) as reader:
                rows = reader.ask("XRANGE", self.key(stream), f"({last}", "+", "COUNT", PAGE)
            end[stream] = rows[-1][0].decode() if rows else last
        return end

    def between(self, begin: dict[str, str], end: dict[str, str]) -> Iterator[pa.RecordBatch]:
        for stream, last in end.items():
            if last != begin.get(stream):
                yield from self.read(IdRange(stream, f"({begin[stream]}".encode(), last.encode()))


class _RunsReader(_StreamReader):
    time = "record_ms"
    per_part = reading.PART_RECORDS

    def key(self, stream: str) -> str:
        return self.keys(stream).runs

    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        for page in reading.run_columns(reader, self.keys(part.stream).runs, (part.first, part.last)):
            yield columns.run_batch(part.stream, page)


class _TicketsReader(_Reader):
    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        wanted = self.equal.get("ticket")
        if wanted and "\ufffd" in wanted:  # other bytes may read as this
            wanted = None
        for page in reading.index_columns(reader, self.keys(part.stream).tickets, wanted):
            yield columns.index_batch(part.stream, page)


class _InboxesReader(_Reader):
    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        keys = self.keys(part.stream)
        for row in map(pairs, reader.ask("XINFO", "CONSUMERS", keys.stream, keys.group)):
            if ":" in (name := row[b"name"].decode(errors="replace")):
                yield columns.inbox_batch(part.stream, name, reading.inbox_columns(reader, keys.inbox(name)))


class _AttemptsReader(_Reader):
    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        for flat in reader.hash_pages(self.keys(part.stream).attempts):
            yield columns.attempts_batch(part.stream, list(zip(flat[::2], flat[1::2], strict=True)))


class _ConsumersReader(_Reader):
    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        rows = [
            {name: getattr(member, name) for name in columns.CONSUMERS.names}
            for member in members(reader, self.keys(part.stream))
        ]
        yield pa.RecordBatch.from_pylist(rows, schema=columns.CONSUMERS)


def _place(first: bytes) -> int:
    """Return the rank of the id from which a range begins."""
    return 0 if first == b"-" else rank(first if b"-" in first else first + b"-0")


def _end(last: bytes) -> int:
    """Return the rank of the id with which a range ends."""
    return rank(b"%d-%d" % (_MOST, _MOST) if last == b"+" else last if b"-" in last else b"%b-%d" % (last, _MOST))


def _within(spans: list[tuple[bytes, bytes]], whole: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Return what of these ranges lies in ``whole``."""
    first, last = whole
    cut = [(max(one, first, key=_place), min(other, last, key=_end)) for one, other in spans]
    return [(one, other) for one, other in cut if _place(one) <= _end(other)]


def _format(name: str, arrow: pa.Schema, reads: type[_Reader]) -> Format:
    return Format(name, arrow, columns.ddl(arrow), reads)


FORMATS = (
    _format("redis_pending", columns.PENDING, _PendingReader),
    _format("redis_stream", columns.STREAM, _StreamReader),
    _format("redis_runs", columns.RUNS, _RunsReader),
    _format("redis_tickets", columns.TICKETS, _TicketsReader),
    _format("redis_inboxes", columns.INBOXES, _InboxesReader),
    _format("redis_attempts", columns.ATTEMPTS, _AttemptsReader),
    _format("redis_consumers", columns.CONSUMERS, _ConsumersReader),
)


def register(spark: SparkSession) -> None:
    """Make the formats known to a session, and let it push filters down to them."""
    if engine.name_of(spark) == "spark":
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    engine.register(spark, *FORMATS)
