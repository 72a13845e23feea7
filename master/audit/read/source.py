"""Spark data sources of Usher's Redis. Register them once per session, then read them as any other format::

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

``spark.readStream`` takes ``redis_runs`` and ``redis_stream`` (``key=...`` for dead letters): what is new since the
last micro-batch, read in the driver, from behind ``first`` on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    SimpleDataSourceStreamReader,
)

from usher.common.base.clock import wall_ms
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SCOPED_TICKET_FIELD, is_work_stream
from usher.common.protocol.stream_id import is_id, rank
from usher.common.redis.endpoints import near
from usher.common.redis.replies import pairs
from usher.common.runtime.settings import CommonSettings
from usher.master.audit.engine import name_of
from usher.master.audit.read import columns, pages, reading
from usher.master.audit.read.bulk import PAGE, BulkReader
from usher.master.audit.read.snapshot import members

#: The largest part of an id; and how late a moment is pushed down (later ones are cut off: ``columns``).
_MOST, _LATEST_MS = (1 << 64) - 1, 1 << 52
_DEFAULTS = {name: field.default for name, field in CommonSettings.model_fields.items()}


class IdRange(InputPartition):
    """A range of ids of one stream, both ends included."""

    def __init__(self, stream: str, first: bytes = b"-", last: bytes = b"+") -> None:
        super().__init__((stream, first, last))
        self.stream, self.first, self.last = stream, first, last


class _Reader(DataSourceReader):
    """The part common to all readers. It travels to the executors, so it holds options and filters only. ``time``: the
    column that is the first half of the ids by which ranges are read, "" without ranges."""

    time = ""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = {name.lower(): value for name, value in options.items()}
        if "url" not in self.options:
            raise ValueError('name the Redis: .option("url", "redis://host:6379")')
        self.equal: dict[str, Any] = {}  # column -> the value that is asked for
        self.least_ms, self.most_ms = 0, _MOST

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802
        """Note what need not be read. Spark applies all filters again."""
        for one in filters:
            name, value = ".".join(getattr(one, "attribute", ())), getattr(one, "value", None)
            if isinstance(one, EqualTo):
                self.equal[name] = value
            if name == self.time and isinstance(value, int) and 0 <= value < _LATEST_MS:
                if isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual):
                    self.least_ms = max(self.least_ms, value)
                if isinstance(one, EqualTo | LessThan | LessThanOrEqual):
                    self.most_ms = min(self.most_ms, value)
        return filters

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

    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError


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


class _StreamReader(_Reader):
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


class _LogTail(SimpleDataSourceStreamReader):
    """The new records of streams since the last micro-batch. An offset: the last id that was read, by stream."""

    def __init__(self, reader: _StreamReader) -> None:
        self._reader = reader

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        return dict.fromkeys(self._reader.streams(), self._reader.option("first", "0-0"))

    def read(self, start: dict[str, str]) -> tuple[Iterator[tuple[Any, ...]], dict[str, str]]:
        end = {}
        for stream, last in start.items():
            with self._reader.connect(stream) as reader:
                ids = reader.ask("XRANGE", self._reader.key(stream), f"({last}", "+", "COUNT", PAGE)
            end[stream] = ids[-1][0].decode() if ids else last
        return iter([*self.readBetweenOffsets(start, end)]), end  # Spark copies it

    def readBetweenOffsets(self, start: dict[str, str], end: dict[str, str]) -> Iterator[tuple[Any, ...]]:  # noqa: N802
        for stream, last in end.items():
            if last != start.get(stream):
                part = IdRange(stream, f"({start[stream]}".encode(), last.encode())
                for batch in self._reader.read(part):
                    yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class _RedisSource(DataSource):
    """A format: its name, its schema and its reader."""

    format = ""
    arrow: pa.Schema = pa.schema([])
    reads: type[_Reader] = _Reader

    @classmethod
    def name(cls) -> str:
        return cls.format

    def schema(self) -> str:
        return columns.ddl(self.arrow)

    def reader(self, schema: Any) -> DataSourceReader:
        return self.reads(dict(self.options))

    def simpleStreamReader(self, schema: Any) -> SimpleDataSourceStreamReader:  # noqa: N802
        reader = self.reads(dict(self.options))
        if not isinstance(reader, _StreamReader):
            raise ValueError(f"{self.format} is no log; readStream takes redis_runs and redis_stream")
        return _LogTail(reader)


class RedisPending(_RedisSource):
    """Pending entries."""

    format, arrow, reads = "redis_pending", columns.PENDING, _PendingReader


class RedisStream(_RedisSource):
    """Entries of a stream."""

    format, arrow, reads = "redis_stream", columns.STREAM, _StreamReader


class RedisRuns(_RedisSource):
    """Executions of the run log."""

    format, arrow, reads = "redis_runs", columns.RUNS, _RunsReader


class RedisTickets(_RedisSource):
    """Ids in the tickets index."""

    format, arrow, reads = "redis_tickets", columns.TICKETS, _TicketsReader


class RedisInboxes(_RedisSource):
    """Hand-overs in inboxes."""

    format, arrow, reads = "redis_inboxes", columns.INBOXES, _InboxesReader


class RedisAttempts(_RedisSource):
    """Attempts of messages."""

    format, arrow, reads = "redis_attempts", columns.ATTEMPTS, _AttemptsReader


class RedisConsumers(_RedisSource):
    """Names in the group."""

    format, arrow, reads = "redis_consumers", columns.CONSUMERS, _ConsumersReader


SOURCES: tuple[type[_RedisSource], ...] = (
    RedisPending,
    RedisStream,
    RedisRuns,
    RedisTickets,
    RedisInboxes,
    RedisAttempts,
    RedisConsumers,
)


def register(spark: SparkSession) -> None:
    """Make the formats known to a session, and let it push filters down to them."""
    if name_of(spark) == "spark":
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for source in SOURCES:
        spark.dataSource.register(source)
