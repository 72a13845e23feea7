"""Execute the SQL of the checks: Spark, or DuckDB in this process. The text is the same; what differs is here: how a
table is made of files, how one is kept, and a function that DuckDB writes differently.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from usher.common.base.errors import RedisTrouble, StartRefused, UsherError
from usher.common.base.extras import how_to_install
from usher.common.redis.client import CommandRefused
from usher.master.audit.findings import CHECKS, LOOKED_AT, Example, table

_COLUMNS = "check_name, stream, id, ticket, owner, detail"
_NUMBERED = ", ".join(f"try_cast(split_part(id, '-', {part}) AS BIGINT)" for part in (1, 2))
#: The findings of several checks: of each check and stream how many, and the first by name.
_FOUND = f"""\
SELECT {_COLUMNS}, total FROM (
  SELECT *, count(*) OVER (PARTITION BY check_name, stream) AS total,
         row_number() OVER (PARTITION BY check_name, stream ORDER BY {_NUMBERED}, id, owner, ticket, detail) AS place
    FROM ({{checks}}) f) p
 WHERE place <= {LOOKED_AT} ORDER BY check_name, stream, place"""
_CHECK = """\
SELECT '{name}' AS check_name, stream, coalesce(id, '') AS id, coalesce(ticket, '') AS ticket,
       coalesce(owner, '') AS owner, coalesce(detail, '') AS detail FROM (
{select}) c"""
#: What stands before a moment in a detail, and where the microseconds of a calendar end.
_MOMENT, _LAST_US = re.compile("\x01(-?[0-9]+)"), 253_402_300_799_999_999
Found = dict[tuple[str, str], tuple[int, list[Example]]]


class NotShared(UsherError):
    """Where the checks run there are other files than here."""


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors that end a run, with those of the engines that this process has loaded."""
    known = {"duckdb": "Error", "pyspark.errors": "PySparkException", "py4j.protocol": "Py4JJavaError"}
    loaded = (getattr(sys.modules[module], name) for module, name in known.items() if module in sys.modules)
    return RedisTrouble, CommandRefused, NotShared, OSError, *loaded


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Let what ends a run refuse it: ``what`` was not done."""
    try:
        yield
    except _failures() as trouble:
        raise StartRefused(f"{what}: {first_cause(trouble)}") from trouble


class Engine:
    """DuckDB in this process."""

    name = "local"
    small = True

    def __init__(self, connection: Any) -> None:
        self._sql = connection
        self._kinds: dict[str, str] = {}
        as_spark = (
            "CREATE MACRO get_json_object(x, path) AS CASE WHEN json_valid(x) THEN json_extract_string(x, path) END"
        )
        connection.execute(as_spark)

    def _make(self, kind: str, name: str, select: str) -> None:
        if (before := self._kinds.get(name)) not in (None, kind):
            self._sql.execute(f"DROP {before} {name}")
        self._kinds[name] = kind
        self._sql.execute(f"CREATE OR REPLACE {kind} {name} AS {select}")

    def files(self, name: str, files: Sequence[Path], schema: pa.Schema, rows: int | None = None) -> None:
        """Make a table of Parquet files; without any it is empty. ``rows``: how many they must have, of an archive,
        which is read where the rows are wanted. Raises NotShared when it has others there."""
        if not files:
            self.arrow(name, schema.empty_table())
            return
        columns = ", ".join(f'"{one}"' for one in schema.names)
        named = f"read_parquet([{quoted(map(str, files))}], hive_partitioning = false)"
        self._make("VIEW", name, f"SELECT {columns} FROM {named}")
        self.expect(name, rows)

    def keep(self, name: str, select: str) -> None:
        self._make("TABLE", name, select)

    def view(self, name: str, select: str) -> None:
        self._make("VIEW", name, select)

    def rows(self, select: str) -> list[tuple[Any, ...]]:
        return list(self._sql.execute(select).fetchall())

    def arrow(self, name: str, rows: pa.Table) -> None:
        self._sql.register("given_rows", rows)
        self._make("TABLE", name, "SELECT * FROM given_rows")
        self._sql.unregister("given_rows")

    def write(self, select: str, file: Path) -> None:
        """Write a Parquet file, which this process sees, wherever the rows are."""
        self._sql.execute(f"COPY ({select}) TO {quoted([str(file)])} (FORMAT parquet, COMPRESSION zstd)")

    def expect(self, name: str, rows: int | None) -> None:
        if rows is None:
            return
        why = "is its folder shared with all of Spark's executors?"
        try:
            [(there,)] = self.rows(f"SELECT count(*) FROM {name}")
        except _failures() as failed:
            told = first_cause(failed)
            raise NotShared(f"where the checks run the archive cannot be read: {why} {told}") from failed
        if there != rows:
            raise NotShared(
                f"where the checks run the archive has {there:,} rows of {name}, and its commits have {rows:,}: {why}"
            )

    def derive(self, *names: str) -> None:
        for name in names:
            (self.view if name == "timed" else self.keep)(name, table(name))

    def found(self, names: Iterable[str]) -> Found:
        """Return what these checks find: (check, stream) -> how many, and the first of them."""
        checks = "\nUNION ALL ".join(_CHECK.format(name=name, select=CHECKS[name].select) for name in names)
        found: Found = {}
        for check, *about, detail, total in self.rows(_FOUND.format(checks=checks)):
            example = Example._make((*about, _MOMENT.sub(_at_utc, detail)))
            found.setdefault((check, example.stream), (total, []))[1].append(example)
        return found


def _at_utc(found: re.Match[str]) -> str:
    us = int(found[1])
    return f"{datetime.fromtimestamp(0, UTC) + timedelta(microseconds=us):%F %T.%f}" if 0 <= us <= _LAST_US else str(us)


class SparkEngine(Engine):
    """``is_far``: executors are on other machines, so they see no file of this one; ``small``: all tables fit into this
    process, and are given to Spark in one part, so that nothing is shuffled."""

    name = "spark"

    def __init__(self, spark: Any, is_far: bool = False, small: bool = False) -> None:
        self.spark, self.is_far, self.small = spark, is_far, small
        # It fails on unions of what was checkpointed ("key not found: above_us#53L"), and planning costs less without.
        spark.conf.set("spark.sql.constraintPropagation.enabled", "false")

    def files(self, name: str, files: Sequence[Path], schema: pa.Schema, rows: int | None = None) -> None:
        if not files or self.small or (self.is_far and rows is None):
            tables = (pq.ParquetFile(one).read(schema.names).cast(schema) for one in files)
            self.arrow(name, pa.concat_tables([schema.empty_table(), *tables]))
            return
        from pyspark.sql.pandas.types import from_arrow_schema

        read = self.spark.read.schema(from_arrow_schema(schema))
        read.parquet(*(f"file://{file}" for file in files)).createOrReplaceTempView(name)
        self.expect(name, rows)

    def keep(self, name: str, select: str) -> None:
        # A checkpoint, not a cache: the plans of the checks stay short, which costs less than what they read.
        frame = self.spark.sql(select)
        if self.small:
            self.arrow(name, frame.toArrow())
        else:
            frame.localCheckpoint(eager=True).createOrReplaceTempView(name)

    def read(self, name: str, source: str, options: Mapping[str, str]) -> None:
        from usher.master.audit.source import register

        register(self.spark)
        frame = self.spark.read.format(source).options(**options).load()
        frame.localCheckpoint(eager=True).createOrReplaceTempView(name)

    def view(self, name: str, select: str) -> None:
        self.spark.sql(select).createOrReplaceTempView(name)

    def rows(self, select: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.spark.sql(select).collect()]

    def arrow(self, name: str, rows: pa.Table) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema  # Spark Connect infers none of an empty table

        frame = self.spark.createDataFrame(rows, from_arrow_schema(rows.schema))
        (frame.coalesce(1) if self.small else frame).createOrReplaceTempView(name)

    def write(self, select: str, file: Path) -> None:
        pq.write_table(self.spark.sql(select).toArrow(), file)


def first_cause(failed: Exception) -> str:
    """Return the first cause, as its last line of that kind; py4j's own first line only names the call."""
    lines = [type(failed).__name__]
    with contextlib.suppress(Exception):  # py4j asks Java for the text, which may have ended
        lines = str(failed).strip().splitlines() or lines
    causes = [line for line in lines if line.startswith("Caused by: ")]
    told = causes[-1:] or [line for line in lines[1:2] if line.startswith(": ")] or lines
    return told[0].removeprefix("Caused by").removeprefix(": ")[:500]


@contextlib.contextmanager
def own_folder(place: Path) -> Iterator[Path]:
    """Yield a folder of this run's own: the first ``1``, ``2`` ... in ``place`` that no other run has, without what a
    killed one has left; what Java and Spark say of it lies beside it. Raises StartRefused."""
    with contextlib.ExitStack() as opened:
        for number in itertools.count(1):
            folder = place / str(number)
            with refusing(f"USHER_AUDIT_DIR: the folder {folder} cannot be used"), contextlib.suppress(BlockingIOError):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                log = opened.enter_context(folder.with_suffix(".log").open("ab"))
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                log.truncate(0)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(mode=0o700)
                break
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextlib.contextmanager
def local_engine(folder: Path, memory_mib: int) -> Iterator[Engine]:
    """Yield the engine in this process; ``folder`` is for what does not fit into memory. Raises StartRefused."""
    try:
        import duckdb
    except ImportError as missing:
        raise StartRefused(
            f"this audit needs {missing.name or 'DuckDB'}, which is not installed: {how_to_install('audit')}"
        ) from missing
    with contextlib.closing(duckdb.connect()) as connection:
        connection.execute(
            f"SET memory_limit = '{memory_mib}MiB'; SET temp_directory = {quoted([str(folder)])}; SET threads = 2;"
            " SET preserve_insertion_order = false; SET TimeZone = 'UTC'"
        )
        yield Engine(connection)


def quoted(texts: Iterable[str]) -> str:
    """Return texts as SQL has them, one behind another; NULL without any."""
    return ", ".join("'" + one.replace("'", "''") + "'" for one in texts) or "NULL"


def few(schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=schema)
