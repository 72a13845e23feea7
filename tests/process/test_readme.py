"""The commands of the README, in a fresh virtual environment that has nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

from tests.hands import free_port
from tests.process.machine import ROOT, environ_for, until
from tests.process.test_init_deploy import copy_of_the_checkout

pytestmark = [pytest.mark.process, pytest.mark.slow]


def _block(language: str, word: str) -> str:
    """The first block of code with this word in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if word in block)


@pytest.mark.timeout(900)
def test_what_the_readme_says_installs_the_demo_and_runs_a_handler_of_your_own(folder: Path) -> None:
    copy_of_the_checkout(folder / "usher")
    venv.create(folder / "venv", with_pip=True)
    path = f"{folder / 'venv' / 'bin'}:/usr/bin:/bin"
    clone, install = _block("sh", "usher demo").splitlines()
    assert clone.startswith("git clone") and clone.endswith("cd usher")
    ours = ("USHER_", "PYTHON", "PYTEST", "VIRTUAL_ENV")  # settings of pip are taken
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environ |= environ_for(folder, PATH=path)
    done = subprocess.run(
        ["bash", "-c", install], cwd=folder / "usher", env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

    run, send = (line.partition("#")[0].split() for line in _block("sh", "usher run").splitlines())
    (folder / "orders.py").write_text(_block("python", "def handle"))
    environ |= {"USHER_STATE_DIR": str(folder / "state"), "USHER_BIND": f"127.0.0.1:{free_port()}"}
    with (folder / "out").open("wb") as out, subprocess.Popen(run, cwd=folder, env=environ, stdout=out) as running:
        try:
            until(lambda: subprocess.run(send, cwd=folder, env=environ, check=False).returncode == 0, 60, "it is sent")
            until(lambda: "42 hello 1" in (folder / "out").read_text(), 60, "the handler has printed it")
        finally:
            running.terminate()
    assert running.returncode == 0
