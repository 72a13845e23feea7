"""Formats: readers of rows by a name, the same ones for each engine. None of them knows Spark."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa


class FormatReader(abc.ABC):
    """Reads the rows of a format, part by part. It travels to Spark's executors, so it holds options and filters
    only."""

    def heed(self, kind: str, column: str, value: Any) -> None:  # noqa: B027 - a format may take no filter
        """Note a filter (a class of ``pyspark.sql.datasource``, by name): what it leaves out need not be read; it is
        applied again."""

    def partitions(self) -> list[Any]:
        """Return the parts, which may be read side by side."""
        return [None]

    @abc.abstractmethod
    def read(self, part: Any) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part."""


class LogReader(FormatReader):
    """Reads a log, which grows at its end. A place: the last id that was read, by stream."""

    @abc.abstractmethod
    def begin(self) -> dict[str, str]:
        """Return the place before all."""

    @abc.abstractmethod
    def end(self, begin: dict[str, str]) -> dict[str, str]:
        """Return the place behind what is new after ``begin``, or behind the first part of it."""

    @abc.abstractmethod
    def between(self, begin: dict[str, str], end: dict[str, str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows after the one place up to the other."""


@dataclass(frozen=True)
class Format:
    """A name, the columns of its rows (``ddl``: as Spark writes them), and what reads them, made of options."""

    name: str
    arrow: pa.Schema
    ddl: str
    reads: Callable[[dict[str, str]], FormatReader]
