"""The private names of pyspark that Usher uses: there, and of the same meaning. tests/audit begins and ends sessions
with them."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("pyspark")

from pyspark import SparkContext

from usher.master.audit import spark


def test_the_names_are_there_and_nothing_runs() -> None:
    assert {"_gateway", "_jvm", "_ensure_initialized"} <= vars(SparkContext).keys()
    assert inspect.signature(SparkContext._ensure_initialized).bind()


def test_where_no_java_runs_none_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)  # another test of this process may have left a session
    spark.end_java()


def test_the_java_of_a_gateway_is_ended_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    class Gateway:
        """A gateway to a Java that somebody else has started, which has no ``proc``."""

        def shutdown(self) -> None:
            ended.append(self)

    gateway = Gateway()
    monkeypatch.setattr(SparkContext, "_gateway", gateway)
    monkeypatch.setattr(SparkContext, "_jvm", gateway)
    spark.end_java()
    assert ended == [gateway]
    assert SparkContext._gateway is None
    assert SparkContext._jvm is None
