"""The engines that execute the checks: Spark, or DuckDB in this process, without Java.

The checks are written once, with the names of PySpark's DataFrames: ``from usher.master.audit.engine import F, Window,
Observation``. Spark executes them unless ``use`` names a session of another engine (``frames``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from usher.common.base.errors import UsherError

if TYPE_CHECKING:
    from usher.master.audit.engine.formats import Format

#: Names of engines; ``auto`` chooses by the size of what is audited.
ENGINES = ("auto", "local", "spark")


class EngineFailed(UsherError):
    """The engine could not execute a query."""


_chosen: ContextVar[Any] = ContextVar("engine", default=None)


def _engine() -> Any:
    if (engine := _chosen.get()) is not None:
        return engine
    import pyspark.sql
    import pyspark.sql.functions  # pyspark.sql has it from here on

    return pyspark.sql


class _Of:
    """A name of the chosen engine, looked up when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(_engine(), self._name), attribute)

    def __call__(self) -> Any:
        return getattr(_engine(), self._name)()


F, Window, Observation = map(_Of, ("functions", "Window", "Observation"))


@contextlib.contextmanager
def use(session: Any) -> Iterator[None]:
    """Let the engine of ``session`` execute the checks. Raises EngineFailed when it cannot."""
    token = _chosen.set(getattr(session, "engine", None))
    try:
        yield
    except Exception as failed:
        if _is_of_spark(failed):
            raise EngineFailed(_cause(failed)) from failed
        raise
    finally:
        _chosen.reset(token)


def _is_of_spark(failed: Exception) -> bool:
    """Return whether Spark raised it, without importing it: that takes a second."""
    errors = sys.modules.get("pyspark.errors")
    return errors is not None and isinstance(failed, errors.PySparkException)


def _cause(failed: Any) -> str:
    """Return the line with the cause of a failure, out of a stack of Java and Python."""
    lines = [line.strip() for line in (failed.getMessage() or "").splitlines() if line.strip()]
    told = [line for line in lines if "Interrupted:" in line or "UsherError" in line]
    return (told[-1].split("Interrupted: ")[-1] if told else lines[0] if lines else type(failed).__name__)[:500]


def name_of(session: Any) -> str:
    """Return the name of a session's engine."""
    return "local" if hasattr(session, "engine") else "spark"


def register(session: Any, *formats: Format) -> None:
    """Make formats known to a session."""
    if name_of(session) == "local":
        session.sources |= {one.name: one for one in formats}
        return
    from usher.master.audit.engine.spark import data_source

    for one in formats:
        session.dataSource.register(data_source(one))


def on_disk(frame: Any) -> Any:
    """Keep the rows of a frame, which are used several times: memory must not grow with them."""
    if name_of(frame.sparkSession) == "local":
        return frame.persist()
    from pyspark import StorageLevel

    return frame.persist(StorageLevel.DISK_ONLY)
