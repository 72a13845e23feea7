"""`usher bench`: a signal ends it, at any moment, with all that it has started."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.nightly import more
from tests.process.machine import REDIS, environ_for, kill_all_of, processes_of, until
from tests.process.test_demo import USHER

pytestmark = pytest.mark.process


def _has(folder: Path, *names: str) -> bool:
    for process in processes_of(folder):
        try:
            words = {process.name(), *process.cmdline()}
        except psutil.Error:
            continue
        if words & set(names):
            return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", [*more(REDIS, frozenset({"master"})), frozenset({"consumer"})])
def test_ended_at_any_moment_it_leaves_nothing_behind(folder: Path, moment: frozenset[str], number: int) -> None:
    """Its servers went on, for minutes or for good."""
    words = ["throughput", "--messages", "60000", "--runs", "5"]
    with subprocess.Popen(
        [*USHER, "bench", *words],
        env=environ_for(folder),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            until(lambda: _has(folder, *moment), 60, "a program that it starts")
            process.send_signal(number)
            assert process.wait(60) == 128 + number
            assert not processes_of(folder)
        finally:
            kill_all_of(folder)
