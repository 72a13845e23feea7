"""The engines that execute the checks: Spark, or DuckDB in this process, without Java.

The checks are written once, with the names of PySpark's DataFrames: ``from usher.master.audit.engine import F, Window,
Observation``. Spark executes them unless ``use`` names a session of another engine (``frames``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from usher.common.base.errors import UsherError

#: Names of engines; ``auto`` chooses by the size of what is audited.
ENGINES = ("auto", "local", "spark")


class EngineFailed(UsherError):
    """The engine in this process could not execute a query."""


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
    """Let the engine of ``session`` execute the checks."""
    token = _chosen.set(getattr(session, "engine", None))
    try:
        yield
    finally:
        _chosen.reset(token)


def name_of(session: Any) -> str:
    """Return the name of a session's engine."""
    return "local" if hasattr(session, "engine") else "spark"
