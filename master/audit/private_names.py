"""Private names of pyspark: the only module that uses them, with a test that fails when one changes or goes."""

from __future__ import annotations

import contextlib


def connect_to_submitted_java() -> None:
    """Connect to the Java that spark-submit has started: from then on a ``SparkConf`` has the options of
    spark-submit."""
    from pyspark import SparkContext

    SparkContext._ensure_initialized()


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
