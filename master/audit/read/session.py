"""The Spark session of an audit: local by default, on a cluster when set so, quiet, and with memory that does not grow
with the data.

Memory is bounded by the JVM's heap (``memory_mib``; sorts and shuffles that do not fit go to disk), off-heap buffers of
about the same order that do not depend on the number of entries, one Python worker per core with one page each, and in
the driver's Python only sums and at most a few thousand suspects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from usher.common.base.errors import StartRefused
from usher.common.base.extras import how_to_install
from usher.master.audit.read.java import java_home
from usher.master.audit.read.private_names import connect_to_submitted_java, end_java

#: Where Spark runs by default.
LOCAL = "local[*]"
#: Set by spark-submit: it has started Java.
_GATEWAY = "PYSPARK_GATEWAY_PORT"
HOW_TO_INSTALL = how_to_install("audit")
_QUIET = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p spark %c{1}: %m%n%ex{short}
logger.python.name = org.apache.spark.api.python
logger.python.level = off
logger.executor.name = org.apache.spark.executor
logger.executor.level = off
logger.scheduler.name = org.apache.spark.scheduler
logger.scheduler.level = off
"""


#: So many values a filter may name one by one, so that what has none of them is not read.
FEW_VALUES = 1000
#: What we would have, unless spark-defaults or spark-submit --conf say otherwise.
_PREFERRED = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.session.timeZone": "UTC",
    # kept frames go to disk; compressing them costs more than writing them
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    "spark.sql.parquet.pushdown.inFilterThreshold": str(FEW_VALUES),
}
_SMALL = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # Planned once: planned anew behind each shuffle, and written down anew for an interface that is not there, plans
    # take longer than the data.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.maxPlanStringLength": "1000",
}
_PARTITIONS = "spark.sql.shuffle.partitions"
#: Set in sessions that an audit has started.
_OURS = "spark.usher.ours"
#: Rows that one task sorts: what fits into the memory of a task of 1 GiB of heap; and rows that are too few to share.
PART_ROWS, _FEW_ROWS = 1_000_000, 500_000
_LEAST_PARTS, _MOST_PARTS = 16, 4096


@dataclass(frozen=True)
class SparkPlace:
    """The place where Spark runs. ``folder``: for spill files and the Java shim; ``py_files``: zips of our packages for
    executors elsewhere.

    ``small``: little data is expected. Most of a small audit's time would go into compiling code that runs once, so
    less of it is compiled.
    """

    master: str
    folder: Path
    memory_mib: int = 1024
    py_files: str = ""
    small: bool = False


@contextlib.contextmanager
def spark_session(place: SparkPlace, environ: MutableMapping[str, str]) -> Iterator[Any]:
    """Yield a SparkSession with our formats. A session that runs already (spark-submit, a notebook, tests) is used and
    left running.

    ``environ`` is the environment of this process: the JVM and the Python workers inherit it. Raises StartRefused.
    """
    try:
        import pyspark  # noqa: F401

        from usher.master.audit.read import source
    except ImportError as missing:
        raise StartRefused(
            f"the audit needs {missing.name or 'PySpark'}, which is not installed: {HOW_TO_INSTALL}"
        ) from missing
    try:
        place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as unusable:
        raise StartRefused(f"USHER_AUDIT_DIR: the folder {place.folder} cannot be used: {unusable}") from unusable
    running = _running()
    if running is not None:
        source.register(running)
        yield running
        return
    place = _as_submitted(place, environ)
    _prepare(place, environ)
    with _own_log(place.folder) as (file, spill):
        yield from _started(place, file, spill)


@contextlib.contextmanager
def local_session(folder: Path, memory_mib: int) -> Iterator[Any]:
    """Yield a session of the engine in this process, with our formats. Raises StartRefused."""
    try:
        from usher.master.audit.engine.frames import in_process
        from usher.master.audit.read import source
    except ImportError as missing:
        raise StartRefused(
            f"this audit needs {missing.name or 'DuckDB'}, which is not installed: {HOW_TO_INSTALL}"
        ) from missing
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        spill = tempfile.TemporaryDirectory(dir=folder)
    except OSError as unusable:
        raise StartRefused(f"USHER_AUDIT_DIR: the folder {folder} cannot be used: {unusable}") from unusable
    with spill as name, in_process(name, memory_mib) as session:
        source.register(session)
        yield session


def is_elsewhere(master: str, environ: Mapping[str, str]) -> bool:
    """Return True when a setting or spark-submit says where Spark runs."""
    return master != LOCAL or _GATEWAY in environ


def _started(place: SparkPlace, file: BinaryIO, spill: Path) -> Iterator[Any]:
    """Yield a started session, and leave no Java behind, however it ends."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from usher.master.audit.read import source

    log = file.name
    try:
        with _stderr_to(file), _no_java_left_by_a_start(), _interrupted_as_ever():
            spark = _builder(place, spill).getOrCreate()
    except (PySparkException, OSError) as failed:
        raise StartRefused(f"Spark does not start on {place.master} ({log}): {str(failed).splitlines()[0]}") from failed
    except Exception as failed:  # py4j's own errors, from a Java that ended: their text is a Java stack
        raise StartRefused(
            f"Spark does not start on {place.master} ({log}): {str(failed).strip().splitlines()[-1][:300]}"
        ) from failed
    try:
        spark.sparkContext.setLogLevel("OFF")
        for name, value in (_PREFERRED | (_SMALL if place.small else {})).items():
            _prefer(spark, name, value)
        spark.conf.set(_OURS, "true")
        source.register(spark)
        yield spark
    except (
        Py4JError,
        ConnectionError,
    ) as failed:  # Java was killed, or its disk is full: no finding, so not exit code 1
        raise StartRefused(
            f"Spark ended in the middle ({log}), so nothing can be said: {why_java_failed(failed)}"
        ) from failed
    finally:
        with contextlib.suppress(Py4JError, OSError):  # Java is gone
            spark.stop()
        end_java()


def fit(spark: Any, rows: int) -> None:
    """Let shuffles have partitions for ``rows``, in a session of ours, unless the user has said how many."""
    if spark.conf.get(_OURS, None) is not None:
        most = min(_MOST_PARTS, -(-rows // PART_ROWS))
        _prefer(spark, _PARTITIONS, str(2 if rows < _FEW_ROWS else max(_LEAST_PARTS, most)))


def _prefer(spark: Any, name: str, value: str) -> None:
    if not spark.sparkContext.getConf().contains(name):
        spark.conf.set(name, value)


def why_java_failed(failed: Exception) -> str:
    """Return the first cause, as its last line of that kind; py4j's own first line only names the call."""
    lines = str(failed).strip().splitlines() or [type(failed).__name__]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return (causes or [line.removeprefix(": ") for line in lines[1:2]] or lines)[-1][:300]


def _running() -> Any:
    """Return the session of this process, or None. ``getActiveSession`` would be that of a thread of the JVM, and which
    one serves ours may change."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkException:
        return None


@contextlib.contextmanager
def _own_log(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield ``spark.log``, or the first ``spark-2.log`` ... that no other audit writes to, emptied; and the folder for
    spill files, without those of an audit whose Java was killed. Locked as long as this process or its Java, which
    inherits the file, lives. Raises StartRefused."""
    for number in itertools.count(1):
        name = "" if number == 1 else f"-{number}"
        spill = folder / f"spill{name}"
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context((folder / f"spark{name}.log").open("ab"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(0)
                shutil.rmtree(spill, ignore_errors=True)
                spill.mkdir(exist_ok=True)
            except BlockingIOError:
                continue
            except OSError as unusable:
                raise StartRefused(f"USHER_AUDIT_DIR: the folder {folder} cannot be used: {unusable}") from unusable
            yield file, spill
            return


@contextlib.contextmanager
def _stderr_to(file: BinaryIO) -> Iterator[None]:
    """Let processes started in here write their stderr to ``file``, for all their life: Java and Spark begin with
    warnings that mean nothing."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def _no_java_left_by_a_start() -> Iterator[None]:
    """End a Java whose start breaks off (Ctrl-C): until it has reported its port, only pyspark knows its process, and
    it would live for ever."""
    before = _children()
    try:
        yield
    except BaseException:
        for child in _children() - before:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        raise


def _children() -> set[int]:
    """Return the processes that this thread has started."""
    try:
        return set(map(int, Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()))
    except OSError:  # a kernel without this file
        return set()


@contextlib.contextmanager
def _interrupted_as_ever() -> Iterator[None]:
    """Keep Ctrl-C as it was. pyspark's own handler asks Java to cancel its jobs, on the very connection that waits for
    an answer: that breaks it, with a page of stacks; to end Java ends its jobs too. And py4j logs an interruption as an
    error, which is meant for pyspark's shell."""
    kept = signal.getsignal(signal.SIGINT)
    if not logging.root.handlers:
        logging.root.addHandler(logging.NullHandler())
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, kept)


def _as_submitted(place: SparkPlace, environ: Mapping[str, str]) -> SparkPlace:
    """Keep spark-submit's ``--master``, unless a setting names another one: a builder's master would take
    precedence."""
    if _GATEWAY not in environ or place.master != LOCAL:
        return place
    from pyspark import SparkConf

    connect_to_submitted_java()
    return dataclasses.replace(place, master=SparkConf().get("spark.master", place.master) or place.master)


def _prepare(place: SparkPlace, environ: MutableMapping[str, str]) -> None:
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if _GATEWAY in environ:
        return
    if place.master.startswith("local"):
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    environ["JAVA_HOME"] = str(java_home(environ, place.folder / "java"))
    environ.setdefault("SPARK_LAUNCHER_OPTS", "-Xmx128m")


def _builder(place: SparkPlace, spill: Path) -> Any:
    from pyspark.sql import SparkSession

    quiet = spill / "log4j2.properties"
    quiet.write_text(_QUIET)
    # a path may have spaces
    java = f'-Dlog4j2.configurationFile={quiet.as_uri()} "-Djava.io.tmpdir={spill}" -XX:+UseParallelGC -XX:-UsePerfData'
    builder = SparkSession.builder.appName("usher audit").master(place.master)
    options = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": f"{place.memory_mib}m",
        "spark.driver.extraJavaOptions": java,
        "spark.local.dir": str(spill),
        "spark.sql.warehouse.dir": str(place.folder / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
    }
    if place.small:
        options["spark.driver.extraJavaOptions"] += " -XX:TieredStopAtLevel=1"
    if place.master.startswith("local"):
        options |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if place.py_files:
        options["spark.submit.pyFiles"] = place.py_files
    for name, value in options.items():
        builder = builder.config(name, value)
    return builder
