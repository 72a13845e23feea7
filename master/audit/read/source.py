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
``redis_attempts``   attempts of a message that failed or ran in a crash                             one per stream
``redis_consumers``  a name in the group, and whether it is alive                                    one per stream
===================  ==============================================================================  =================

Options: ``url`` (as USHER_REDIS_URL), ``stream`` (default ``ticket_stream``; several, comma separated), ``group``,
``ticket_field`` (a work stream, ``usher:{<group>}``, has its own), ``partitions`` (parts per stream; 0 chooses),
``first`` and ``last`` (ids, for ``redis_stream`` and ``redis_runs``).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from usher.common.base.clock import wall_ms
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SCOPED_TICKET_FIELD, is_work_stream
from usher.common.redis.endpoints import near
from usher.common.runtime.settings import CommonSettings
from usher.master.audit.read import columns, pages, reading
from usher.master.audit.read.bulk import BulkReader
from usher.master.audit.read.snapshot import members

_DEFAULTS = {name: field.default for name, field in CommonSettings.model_fields.items()}


class IdRange(InputPartition):
    """A range of ids of one stream, both ends included."""

    def __init__(self, stream: str, first: bytes = b"-", last: bytes = b"+") -> None:
        super().__init__((stream, first, last))
        self.stream, self.first, self.last = stream, first, last


class _Reader(DataSourceReader):
    """The part common to all readers. It travels to the executors, so it holds options only."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = {name.lower(): value for name, value in options.items()}
        if "url" not in self.options:
            raise ValueError('name the Redis: .option("url", "redis://host:6379")')

    def streams(self) -> list[str]:
        return [name.strip() for name in self.option("stream", _DEFAULTS["ticket_stream"]).split(",") if name.strip()]

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
                yield from self.batches(reader, part)
        finally:
            gc.enable()

    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError


class _PendingReader(_Reader):
    def partitions(self) -> list[IdRange]:
        parts = []
        for stream in self.streams():
            with self.connect(stream) as reader:
                spans = reading.pending_parts(reader, self.keys(stream), self._everything, self.number("partitions"))
            parts += [IdRange(stream, *span) for span in spans]
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
    def partitions(self) -> list[IdRange]:
        parts = []
        for stream in self.streams():
            with self.connect(stream) as reader:
                first, last = self.option("first", "-").encode(), self.option("last", "+").encode()
                spans = reading.stream_parts(reader, self.option("key", stream), first, last, self.number("partitions"))
            parts += [IdRange(stream, *span) for span in spans]
        return parts or [IdRange("")]

    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        raw, field = self.option("raw") == "true", self.ticket_field(part.stream)
        for rows in reader.entries(self.option("key", part.stream), part.first, part.last):
            yield columns.stream_batch(part.stream, rows, [reading.ticket_in(row[1], field) for row in rows], raw)


class _RunsReader(_Reader):
    def partitions(self) -> list[IdRange]:
        parts = []
        for stream in self.streams():
            with self.connect(stream) as reader:
                first, last = self.option("first", "-").encode(), self.option("last", "+").encode()
                spans = reading.stream_parts(
                    reader, self.keys(stream).runs, first, last, self.number("partitions"), reading.PART_RECORDS
                )
            parts += [IdRange(stream, *span) for span in spans]
        return parts or [IdRange("")]

    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        for page in reading.run_columns(reader, self.keys(part.stream).runs, (part.first, part.last)):
            yield columns.run_batch(part.stream, page)


class _TicketsReader(_Reader):
    def batches(self, reader: BulkReader, part: IdRange) -> Iterator[pa.RecordBatch]:
        for page in reading.index_columns(reader, self.keys(part.stream).tickets):
            yield columns.index_batch(part.stream, page)


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
    RedisAttempts,
    RedisConsumers,
)


def register(spark: SparkSession) -> None:
    """Make the formats known to a session."""
    for source in SOURCES:
        spark.dataSource.register(source)
