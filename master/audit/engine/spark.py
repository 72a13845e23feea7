"""Formats as data sources of Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    Filter,
    InputPartition,
    SimpleDataSourceStreamReader,
)

from usher.master.audit.engine.formats import Format, FormatReader, LogReader


class _SparkReader(DataSourceReader):
    def __init__(self, reader: FormatReader) -> None:
        self.of = reader

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        """Note what need not be read. Spark applies all filters again."""
        for one in filters:
            column, value = ".".join(getattr(one, "attribute", ())), getattr(one, "value", None)
            self.of.heed(type(one).__name__, column, value)
        return filters

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(part) for part in self.of.partitions()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.of.read(partition.value)


class _LogTail(SimpleDataSourceStreamReader):
    """The new rows of a log since the last micro-batch, read in the driver."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader

    def initialOffset(self) -> dict[str, str]:
        return self._reader.begin()

    def read(self, start: dict[str, str]) -> tuple[Iterator[tuple[Any, ...]], dict[str, str]]:
        end = self._reader.end(start)
        return iter([*self.readBetweenOffsets(start, end)]), end  # Spark copies it

    def readBetweenOffsets(self, start: dict[str, str], end: dict[str, str]) -> Iterator[tuple[Any, ...]]:
        for batch in self._reader.between(start, end):
            yield from zip(*(column.to_pylist(maps_as_pydicts="strict") for column in batch.columns), strict=True)


def data_source(of: Format) -> type[DataSource]:
    """Return a format as Spark registers it."""

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return of.name

        def schema(self) -> str:
            return of.ddl

        def reader(self, schema: Any) -> DataSourceReader:
            return _SparkReader(of.reads(dict(self.options)))

        def simpleStreamReader(self, schema: Any) -> SimpleDataSourceStreamReader:
            reader = of.reads(dict(self.options))
            if not isinstance(reader, LogReader):
                raise ValueError(f"{of.name} is no log; readStream takes redis_runs and redis_stream")
            return _LogTail(reader)

    return Source
