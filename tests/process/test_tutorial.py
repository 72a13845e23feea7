"""docs/start.md, the tutorial, as it stands: its files are written, its commands run, and what it shows comes."""

from __future__ import annotations

import os
import re
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.machine import ROOT, UsherUp, environ_for, until
from tests.process.test_init_deploy import copy_of_the_checkout

pytestmark = pytest.mark.process

_TUTORIAL = (ROOT / "docs" / "start.md").read_text()


def _blocks() -> Iterator[tuple[str, str]]:
    """Yield the first line of each block, and its text."""
    yield from re.findall(r"^```(\w[\w ]*)\n(.*?)^```$", _TUTORIAL, re.MULTILINE | re.DOTALL)


def _steps(folder: Path, bash: list[str], environ: dict[str, str], skip: str) -> None:
    """Take the tutorial's steps. ``text`` is told by the command before it, ``text background`` by ``usher up``; a command
    that is ``eventually`` right is repeated until it is."""
    blocks = [(kind, text) for kind, text in _blocks() if skip not in text]
    running: UsherUp | None = None
    told = ""

    def do(commands: str) -> str:
        done = subprocess.run(
            [*bash, commands], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=400
        )
        assert done.returncode == 0, commands + done.stdout + done.stderr
        return done.stdout

    def shows(lines: list[str], text: str) -> bool:
        return all(any(want in line for line in lines) for want in text.splitlines())

    try:
        for at, (kind, text) in enumerate(blocks):
            if kind == "python":
                (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text)
            elif kind == "sh background":
                running = UsherUp(folder, *text.split()[2:], PATH=environ["PATH"])
                running.__enter__()
                environ |= {"USHER_STATE_DIR": str(running.state), "USHER_PORT": str(running.port)}
            elif kind == "sh eventually":
                wanted = blocks[at + 1][1]
                until(lambda: shows(do(text).splitlines(), wanted), 60, wanted)  # noqa: B023
            elif kind == "sh":
                told = do(text)
            elif kind == "text background":
                assert running is not None
                until(lambda: shows(running.lines, text), 60, text)  # noqa: B023
            elif blocks[at - 1][0] == "sh":
                assert shows(told.splitlines(), text), told
        assert running is not None
        assert running.end() == 130
        handled = [line.partition("ticket 42: ")[2] for line in running.lines if "ticket 42: " in line]
        assert handled == ["3 x pen", "1 x ink", "1 x paper", "1 x glue"]
    finally:
        if running is not None:
            running.__exit__()


@pytest.mark.slow
def test_the_tutorial_does_what_it_says(folder: Path) -> None:
    """All of it but the installation."""
    _steps(folder, ["bash", "-c"], environ_for(folder, USHER_STATE_DIR=str(folder / "state")), skip="pip install")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_begins_with_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its installation too, in a virtual environment that has nothing else."""
    copy_of_the_checkout(folder / "usher")
    shop = folder / "shop"
    shop.mkdir()
    path = f"{shop / '.venv' / 'bin'}:/usr/bin:/bin"
    ours = ("USHER_", "PYTHON", "PYTEST", "VIRTUAL_ENV")  # settings of pip are taken
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    venv.create(shop / ".venv", with_pip=True)  # with this Python; the tutorial's line finds it there
    monkeypatch.setattr("tests.process.machine.USHER", [str(shop / ".venv" / "bin" / "usher")])
    environ |= environ_for(folder, PATH=path)
    _steps(shop, ["bash", "-c"], environ, skip="nothing is skipped")
