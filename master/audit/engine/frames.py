"""Frames and session of the engine in this process: PySpark's names, executed by DuckDB.

A frame is a query that is executed when its rows are asked for. A source is read then too, once, one part after the
other, into a table that DuckDB keeps in memory as far as it may, else on disk.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from usher.master.audit.engine import EngineFailed
from usher.master.audit.engine import columns as functions
from usher.master.audit.engine.columns import Column, Window, column, literal, quoted
from usher.master.audit.engine.formats import Format

__all__ = ["Observation", "Window", "functions", "in_process"]
_TYPES = {
    "string": "VARCHAR",
    "bigint": "BIGINT",
    "int": "INTEGER",
    "boolean": "BOOLEAN",
    "map<string,string>": "MAP(VARCHAR, VARCHAR)",
    "array<binary>": "BLOB[]",
}
_JOINS = {
    "inner": "JOIN",
    "left": "LEFT JOIN",
    "full_outer": "FULL JOIN",
    "left_semi": "SEMI JOIN",
    "left_anti": "ANTI JOIN",
}


class LocalRow(tuple[Any, ...]):
    """A row: values by place and by name."""

    names: tuple[str, ...]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.names.index(key) if isinstance(key, str) else key)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except ValueError:
            raise AttributeError(name) from None


def _row(names: Sequence[str], values: Sequence[Any]) -> LocalRow:
    row = LocalRow(_row(tuple(one), tuple(one.values())) if isinstance(one, dict) else one for one in values)
    row.names = tuple(names)
    return row


class LocalFrame:
    """A query and the names of its columns."""

    def __init__(self, session: LocalSession, sql: str, columns: Sequence[str]) -> None:
        self.sparkSession, self.sql, self.columns = session, sql, list(columns)
        self._table = ""

    def _selected(self, chosen: Sequence[Column], more: str = "") -> LocalFrame:
        shown = ", ".join(f"{one.sql} AS {quoted(one.name)}" for one in chosen)
        return LocalFrame(self.sparkSession, f"SELECT {shown} FROM ({self.sql}) t{more}", [one.name for one in chosen])

    def _same(self, more: str, what: str = "*") -> LocalFrame:
        return LocalFrame(self.sparkSession, f"SELECT {what} FROM ({self.sql}) t {more}", self.columns)

    def select(self, *chosen: Any) -> LocalFrame:
        return self._selected([column(one) for one in chosen])

    def filter(self, condition: Any) -> LocalFrame:
        return self._same(f"WHERE {condition if isinstance(condition, str) else condition.sql}")

    def withColumns(self, made: Mapping[str, Column]) -> LocalFrame:
        kept = [made[name].alias(name) if name in made else column(name) for name in self.columns]
        return self._selected([*kept, *(one.alias(name) for name, one in made.items() if name not in self.columns)])

    def withColumn(self, name: str, made: Column) -> LocalFrame:
        return self.withColumns({name: made})

    def withColumnsRenamed(self, names: Mapping[str, str]) -> LocalFrame:
        return self._selected([column(name).alias(names.get(name, name)) for name in self.columns])

    def drop(self, *names: str) -> LocalFrame:
        return self.select(*(name for name in self.columns if name not in names))

    def fillna(self, value: Any, names: Sequence[str]) -> LocalFrame:
        return self.withColumns({name: functions.coalesce(name, functions.lit(value)) for name in names})

    def distinct(self) -> LocalFrame:
        return self._same("", "DISTINCT *")

    def union(self, other: LocalFrame) -> LocalFrame:
        return LocalFrame(self.sparkSession, f"({self.sql}) UNION ALL ({other.sql})", self.columns)

    def unionByName(self, other: LocalFrame) -> LocalFrame:
        return self.union(other.select(*self.columns))

    def orderBy(self, *names: Any) -> LocalFrame:
        return self._same("ORDER BY " + ", ".join(column(one).sql for one in names))

    def limit(self, count: int) -> LocalFrame:
        return self._same(f"LIMIT {count}")

    def join(self, other: LocalFrame, on: str | Sequence[str], how: str = "inner") -> LocalFrame:
        keys = [on] if isinstance(on, str) else [*on]
        names = [*keys, *(name for name in self.columns if name not in keys)]
        if not how.startswith("left_"):
            names += [name for name in other.columns if name not in keys]
        shown, using = (", ".join(map(quoted, some)) for some in (names, keys))
        sql = f"SELECT {shown} FROM ({self.sql}) l {_JOINS[how]} ({other.sql}) r USING ({using})"
        return LocalFrame(self.sparkSession, sql, names)

    def groupBy(self, *keys: Any) -> _Grouped:
        return _Grouped(self, [column(key) for key in keys])

    def agg(self, *sums: Column) -> LocalFrame:
        return self.groupBy().agg(*sums)

    def observe(self, seen: Observation, *sums: Column) -> LocalFrame:
        seen.of = self.agg(*sums)
        return self

    # ---- execution -----------------------------------------------------------------------------------------------

    def collect(self) -> list[LocalRow]:
        return [_row(self.columns, values) for values in self.sparkSession.execute(self.sql).fetchall()]

    def count(self) -> int:
        return int(self.agg(functions.count("*")).collect()[0][0])

    def isEmpty(self) -> bool:
        return not self.limit(1).collect()

    def persist(self) -> LocalFrame:
        """Execute it, and keep its rows."""
        self._table = self.sparkSession.new_name()
        self.sparkSession.execute(f"CREATE TEMP TABLE {self._table} AS {self.sql}")
        self.sql = f"SELECT * FROM {self._table}"
        return self

    def unpersist(self) -> None:
        self.sparkSession.execute(f"DROP TABLE IF EXISTS {self._table}")

    def coalesce(self, _parts: int) -> LocalFrame:
        return self

    @property
    def write(self) -> _Writes:
        return _Writes(self)


class _Grouped:
    def __init__(self, frame: LocalFrame, keys: list[Column]) -> None:
        self._frame, self._keys = frame, keys

    def agg(self, *sums: Column) -> LocalFrame:
        places = ", ".join(str(at) for at in range(1, len(self._keys) + 1))
        return self._frame._selected([*self._keys, *sums], f" GROUP BY {places}" if places else "")

    def count(self) -> LocalFrame:
        return self.agg(functions.count("*").alias("count"))


class Observation:
    """Sums over a frame."""

    of: LocalFrame

    @property
    def get(self) -> dict[str, Any]:
        [row] = self.of.collect()
        return dict(zip(row.names, row, strict=True))


class _Writes:
    """``frame.write``: writes files to a folder that does not exist yet, by the values of a column, if one is named."""

    def __init__(self, frame: LocalFrame) -> None:
        self._frame, self._by = frame, ""

    def partitionBy(self, name: str) -> _Writes:
        self._by = name
        return self

    def parquet(self, folder: str) -> None:
        place = _path(folder)
        place.mkdir(parents=True)
        by = f", PARTITION_BY ({quoted(self._by)})" if self._by else ""
        target = place if by else place / "part-0.parquet"
        self._frame.sparkSession.execute(f"COPY ({self._frame.sql}) TO {literal(str(target))} (FORMAT PARQUET{by})")


def _path(place: str) -> Path:
    """Return a file or folder as it was named for Spark. Raises EngineFailed where DuckDB would take it for a
    pattern."""
    path = Path(place.removeprefix("file://"))
    if set("*?[") & set(str(path)):
        raise EngineFailed(f"the engine in this process reads no folder with * ? or [ in its name: {path}")
    return path


class _Reads:
    """``session.read``: names a source and its options, or files."""

    def __init__(self, session: LocalSession) -> None:
        self._session, self._options, self._schema = session, dict[str, str](), ""

    def schema(self, columns: str) -> _Reads:
        self._schema = columns
        return self

    def parquet(self, *places: str) -> LocalFrame:
        """Return the rows of files; the columns are those of ``schema``, or of the first file."""
        files = ", ".join(
            literal(str(place / "**" / "*.parquet" if place.is_dir() else place)) for place in map(_path, places)
        )
        source = f"read_parquet([{files}], hive_partitioning = false)"
        names = [name for name, _ in _columns(self._schema)]
        if not names:
            names = [row[0] for row in self._session.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()]
        return LocalFrame(self._session, f"SELECT {', '.join(map(quoted, names))} FROM {source}", names)

    def format(self, name: str) -> _Reads:
        self._name = name
        return self

    def options(self, **given: str) -> _Reads:
        self._options |= given
        return self

    def load(self) -> LocalFrame:
        source = self._session.sources[self._name]
        reader = source.reads(self._options)

        def batches() -> Iterator[pa.RecordBatch]:
            for part in reader.partitions():
                yield from reader.read(part)

        return self._session.lazily(source.arrow, batches)


class LocalSession:
    """A connection to a DuckDB of its own, with what the checks use of a SparkSession."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count()
        self._unread: dict[str, tuple[pa.Schema, Callable[[], Iterator[pa.RecordBatch]]]] = {}
        self.sources: dict[str, Format] = {}
        self.conf = dict[str, str]()
        self.engine = sys.modules[__name__]

    @property
    def read(self) -> _Reads:
        return _Reads(self)

    def new_name(self) -> str:
        return f"rows_{next(self._numbers):06d}"

    def lazily(self, schema: pa.Schema, batches: Callable[[], Iterator[pa.RecordBatch]]) -> LocalFrame:
        """Return a frame of rows that are read when they are first asked for."""
        name = self.new_name()
        self._unread[name] = schema, batches
        return LocalFrame(self, f"SELECT * FROM {name}", schema.names)

    def createDataFrame(self, rows: Sequence[Sequence[Any]], schema: str) -> LocalFrame:
        fields = _columns(schema)
        names = ", ".join(quoted(name) for name, _ in fields)
        values = ", ".join("(" + ", ".join(map(literal, row)) + ")" for row in rows or [[None] * len(fields)])
        shown = ", ".join(f"CAST({quoted(name)} AS {_TYPES[kind]}) AS {quoted(name)}" for name, kind in fields)
        none = "" if rows else " WHERE false"
        return LocalFrame(self, f"SELECT {shown} FROM (VALUES {values}) v({names}){none}", [name for name, _ in fields])

    def execute(self, sql: str) -> duckdb.DuckDBPyConnection:
        for name in [name for name in self._unread if name in sql]:
            self._fill(name, *self._unread.pop(name))
        try:
            return self._connection.execute(sql)
        except duckdb.Error as failed:
            raise EngineFailed(str(failed).splitlines()[0]) from failed

    def _fill(self, name: str, schema: pa.Schema, batches: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        begin = f"CREATE TEMP TABLE {name} AS"
        for batch in itertools.chain([pa.RecordBatch.from_pylist([], schema)], batches()):
            self._connection.register("being_read", batch)
            self.execute(f"{begin} SELECT * FROM being_read")
            begin = f"INSERT INTO {name}"


def _columns(schema: str) -> list[tuple[str, str]]:
    """Return (name, type) of the columns of a schema as Spark SQL writes it."""
    return re.findall(r"(?:^|, )`?(\w+)`? (\S+?)(?=, |$)", schema)


@contextlib.contextmanager
def in_process(folder: str, memory_mib: int) -> Iterator[LocalSession]:
    """Yield a session whose rows lie in memory up to ``memory_mib``, and beyond that in ``folder``."""
    with duckdb.connect(config={"memory_limit": f"{memory_mib}MiB", "temp_directory": folder}) as connection:
        connection.execute("SET default_null_order = 'nulls_first_on_asc_last_on_desc'")
        yield LocalSession(connection)
