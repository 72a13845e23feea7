"""Data sources of Usher's Redis for PySpark: ``redis_pending``, ``redis_stream`` and ``redis_runs`` (docs/audit.md)::

from usher.master.audit import source
source.register(spark)
spark.read.format("redis_pending").option("url", "redis://localhost:6379").load().groupBy("consumer").count().show()
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
    ReadLimit,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadMaxRows

from usher.common.protocol.stream_id import from_rank, is_id, rank
from usher.common.redis.endpoints import near
from usher.common.sending.producer import Outgoing, Producer
from usher.master.audit import batches
from usher.master.audit.batches import BulkReader, Span
from usher.master.audit.settings import AuditChoices

_MOST, _LATEST_MS = (1 << 64) - 1, 1 << 52  # the largest part of an id; how late a moment is pushed down
_MAX_RECORDS, _SENT = 10_000, 500  # what one micro-batch reads of a stream, and what is sent at once
PART_ENTRIES, PART_RECORDS, _MOST_PARTS = 100_000, 400, 256  # of a range of pending list or stream, of the run log
_ENDS = ("XRANGE", "-", "+"), ("XREVRANGE", "+", "-")


class _Reader(DataSourceReader):
    """``time``: the column that is the first half of the ids by which ranges are read."""

    time, per_part = "ms", PART_ENTRIES

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options, self.plan = options, _plan(options)
        self.equal: dict[str, Any] = {}  # column -> the value that is asked for
        self.least_ms, self.most_ms = 0, _MOST

    def connect(self, stream: str) -> BulkReader:
        return BulkReader(near(self.plan.redis_url, stream))

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        return [one for one in filters if not self._heeds(one)]

    def _heeds(self, one: Any) -> bool:
        kind, column, value = type(one).__name__, ".".join(getattr(one, "attribute", ())), getattr(one, "value", None)
        if kind == "EqualTo" and column in (("stream", "id") if self.time == "ms" else ("stream",)):
            return self.equal.setdefault(column, value) == value
        if column != self.time or not isinstance(value, int) or not 0 <= value < _LATEST_MS:
            return False
        if kind in ("EqualTo", "GreaterThan", "GreaterThanOrEqual"):
            self.least_ms = max(self.least_ms, value + (kind == "GreaterThan"))
        if kind in ("EqualTo", "LessThan", "LessThanOrEqual"):
            self.most_ms = min(self.most_ms, value - (kind == "LessThan"))
        return kind in ("EqualTo", "GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual")

    def span(self) -> tuple[int, int]:
        """Return the first and the last id to read, as numbers; the last is lower, or 0, where no id can be there."""
        least, most, wanted = self.least_ms << 64, (self.most_ms << 64) + _MOST, self.equal.get("id")
        if wanted is None:
            return least, most
        one = rank(wanted.encode()) if is_id(wanted) else 0
        return max(least, one), min(most, one)

    def key(self, stream: str) -> str:
        return self.options.get("key", stream)

    def whole(self, reader: BulkReader, stream: str) -> Span | None:
        """Return the first and the last id that there is."""
        head, tail = (reader.call(name, self.key(stream), *ends, "COUNT", 1) for name, *ends in _ENDS)
        return (head[0][0], tail[0][0]) if head and tail else None

    def parts(self, stream: str, lo: int, hi: int) -> list[InputPartition]:
        """Return parts of equal spans of time between two ids; they are many, for traffic comes in bursts."""
        with self.connect(stream) as reader:
            whole = self.whole(reader, stream) if lo <= hi else None
            lo, hi = (max(lo, rank(whole[0])), min(hi, rank(whole[1]))) if whole else (1, 0)
            if lo > hi:
                return []
            fits = max(1, min(_MOST_PARTS, -(-reader.call("XLEN", self.key(stream)) // self.per_part)))
        number = int(self.options.get("partitions", "0")) or fits
        edges = [*sorted({lo + (hi - lo + 1) * at // number for at in range(number)}), hi + 1]
        return [InputPartition((stream, from_rank(at), from_rank(end - 1))) for at, end in itertools.pairwise(edges)]

    def partitions(self) -> list[InputPartition]:
        asked = [one for one in self.plan.streams if self.equal.get("stream", one) == one]
        parts = [part for stream in asked for part in self.parts(stream, *self.span())]
        return parts or [InputPartition(("", *batches.ALL))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        stream, first, last = partition.value
        if stream:
            with self.connect(stream) as reader:
                yield from self.rows(reader, stream, (first, last))

    def rows(self, reader: BulkReader, stream: str, span: Span) -> Iterator[pa.RecordBatch]:
        raw, field = self.options.get("raw") == "true", self.plan.field(stream)
        return batches.stream(reader, stream, self.key(stream), field, span, raw)


class _PendingReader(_Reader):
    def whole(self, reader: BulkReader, stream: str) -> Span | None:
        return batches.pending_span(reader, self.plan.keys(stream), self.options.get("entries", "pending") == "all")

    def rows(self, reader: BulkReader, stream: str, span: Span) -> Iterator[pa.RecordBatch]:
        everything = self.options.get("entries", "pending") == "all"
        return batches.pending(reader, self.plan.keys(stream), self.plan.field(stream), everything, span)


class _RunsReader(_Reader):
    time, per_part = "record_ms", PART_RECORDS

    def key(self, stream: str) -> str:
        return self.plan.keys(stream).runs

    def rows(self, reader: BulkReader, stream: str, span: Span) -> Iterator[pa.RecordBatch]:
        return batches.runs(reader, stream, self.key(stream), span)


class _StreamReader(DataSourceStreamReader):
    """What is new since the last micro-batch. Offsets are ids by stream."""

    def __init__(self, of: _Reader) -> None:
        self.of = of

    def initialOffset(self) -> dict[str, str]:
        return dict.fromkeys(self.of.plan.streams, self.of.options.get("first", "0-0"))

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(int(self.of.options.get("maxRecords", str(_MAX_RECORDS))))

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:
        end = {}
        for stream, after in start.items():
            ask = ("XRANGE", f"({after}", "+", limit.max_rows) if isinstance(limit, ReadMaxRows) else None
            command, first, last, count = ask or ("XREVRANGE", "+", f"({after}", 1)
            with self.of.connect(stream) as reader:
                rows = reader.call(command, self.of.key(stream), first, last, "COUNT", count)
            end[stream] = rows[-1][0].decode() if rows else after
        return end

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> list[InputPartition]:
        spans = {one: (rank(start[one].encode()) + 1, rank(last.encode())) for one, last in end.items()}
        return [part for stream, span in spans.items() for part in self.of.parts(stream, *span)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.of.read(partition)


class _Writer(DataSourceArrowWriter):
    """Send rows as messages, each task in the order of its rows; what was sent is sent, whatever comes of the job."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options, self.plan = options, _plan(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        [stream] = self.plan.streams
        url, field = near(self.plan.redis_url, stream), self.plan.field(stream).decode()
        producer = Producer(url, stream, field, dedup_s=float(self.options.get("dedup", "0")))
        with contextlib.closing(producer):
            for batch in iterator:
                rows = batch.to_pylist(maps_as_pydicts="strict")
                for at in range(0, len(rows), _SENT):
                    producer.send_many(Outgoing(row["ticket"], row["fields"]) for row in rows[at : at + _SENT])
        return WriterCommitMessage()


def _plan(options: Mapping[str, str]) -> AuditChoices:
    if "url" not in options:
        raise ValueError('name the Redis: .option("url", "redis://host:6379")')
    given = {name: options[name] for name in ("group", "ticket_field") if name in options}
    return AuditChoices(redis_url=options["url"], chosen_streams=options.get("stream", ""), **given)


def _source(named: str, arrow: pa.Schema, reads: type[_Reader]) -> type[DataSource]:
    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return named

        def schema(self) -> Any:
            return from_arrow_schema(arrow)

        def reader(self, schema: Any) -> DataSourceReader:
            return reads(self.options)

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            if named == "redis_pending":
                raise ValueError("a pending list is no log; readStream takes redis_runs and redis_stream")
            return _StreamReader(reads(self.options))

        def writer(self, schema: Any, overwrite: bool) -> Any:
            if named != "redis_stream" or overwrite or not {"ticket", "fields"} <= set(schema.names):
                raise ValueError("only redis_stream is written to, with mode append and the columns ticket and fields")
            return _Writer(self.options)

    return Source


_SOURCES: dict[str, tuple[pa.Schema, type[_Reader]]] = {
    "redis_pending": (batches.PENDING, _PendingReader),
    "redis_stream": (batches.STREAM, _Reader),
    "redis_runs": (batches.RUNS, _RunsReader),
}


def register(spark: Any) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for name, about in _SOURCES.items():
        spark.dataSource.register(_source(name, *about))
