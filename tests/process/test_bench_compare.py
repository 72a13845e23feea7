"""`python -m benchmarks compare`: the real command with what is always there, and the runner with peers that
misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.cli.compare import compare as command
from benchmarks.cli.comparison import run_comparison
from benchmarks.measure import compare
from benchmarks.measure.compare import Installed, Workload, find, run_peer
from benchmarks.peers.catalog import PEERS
from tests.hands import BenchFailed
from tests.process.machine import ROOT, environ_for, processes_of, until

pytestmark = pytest.mark.process

#: A peer's interpreter that is none: it answers as a worker does, starts a process, and then does what ``misdeed``
#: says.
_FAKE = """#!{python}
import os, subprocess, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from benchmarks.rig.recording import FOLDER_VARIABLE, PeerJob, record
messages = list(PeerJob.load(Path(os.environ[FOLDER_VARIABLE])).workload())
if "fill" in sys.argv:
    print("server 1", flush=True)
    sys.exit()
print("ready", flush=True)
sys.stdin.readline()
subprocess.Popen(["sleep", "300"])
{misdeed}
for message in messages:
    record(*message)
time.sleep(300)
"""


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Installed]:
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))

    def make(misdeed: str) -> Installed:
        path = folder / "python"
        path.write_text(_FAKE.format(python=sys.executable, root=str(ROOT), misdeed=misdeed))
        path.chmod(0o755)
        return Installed("1.0", str(path), "")

    return make


BENCHMARKS = [sys.executable, "-m", "benchmarks"]
_PEER = replace(PEERS["floor"], name="fake", processes=1)
_LITTLE = Workload(messages=100, tickets=5, payload=10, at_most_s=30)


def _run(installed: Installed, workload: Workload = _LITTLE) -> dict[str, Any]:
    return run_peer(_PEER, installed, workload, os.environ)


@pytest.mark.slow
def test_usher_and_the_floor_through_the_real_command(folder: Path) -> None:
    words = [
        "compare", "--messages", "1000", "--tickets", "50", "--runs", "1", "--json", "--peer", "floor", "--peer",
        "rabbitmq",
    ]  # fmt: skip
    words += ["--environments", str(folder / "none")]
    done = subprocess.run(
        [*BENCHMARKS, *words],
        env=environ_for(folder),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    rows = {row["name"]: row for row in json.loads(done.stdout)["peers"]}
    assert set(rows) == {"usher", "floor", "rabbitmq"}
    for name in ("usher", "floor"):
        (run,) = rows[name]["runs"]
        assert (run["handled"], run["lost"], run["doubled"]) == (1000, 0, 0)
        assert rows[name]["messages_per_second"] > 0
    assert rows["usher"]["cpu_us_per_message"] > 0
    assert (rows["usher"]["ratio"], rows["usher"]["out_of_order"], rows["usher"]["overlapping"]) == (1.0, 0, 0)
    assert "RabbitMQ" in done.stderr


def words_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.mark.slow
def test_ctrl_c_ends_all_that_was_started(folder: Path) -> None:
    words = [*BENCHMARKS, "compare", "--messages", "1000", "--runs", "50", "--peer", "floor"]
    running = subprocess.Popen(
        words,
        env=environ_for(folder),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell has what it starts in the background ignore Ctrl-C
    )
    until(
        lambda: any("benchmarks.peers" in words_of(process) for process in processes_of(folder)),
        100,
        "a peer's process",
    )
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert not processes_of(folder)
    assert not list(folder.glob("usher-bench-*"))


def test_the_runner_counts_what_a_peer_does_wrong(
    fake: Callable[[str], Installed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_STALLED_S", 1.0)
    sound = _run(fake(""))
    assert (sound["handled"], sound["lost"], sound["doubled"], sound["out_of_order"], sound["cut"]) == (
        100,
        0,
        0,
        0,
        "",
    )
    assert sound["server"] == "server 1"
    backwards = _run(fake("messages.reverse()"))
    assert backwards["out_of_order"] == 100 - 5  # all but the last one of each ticket
    twice = _run(fake("messages.append(messages[0])"))
    assert (twice["doubled"], twice["lost"]) == (1, 0)
    forgetful = _run(fake("messages.pop()"))
    assert (forgetful["lost"], forgetful["cut"]) == (1, "nothing came for 1 s")


def test_a_slow_peer_is_stopped_and_what_it_handled_is_counted(fake: Callable[[str], Installed]) -> None:
    result = _run(
        fake("for message in messages:\n    record(*message); time.sleep(0.1)"), replace(_LITTLE, at_most_s=1.0)
    )
    assert result["cut"] == "stopped after 1 s"
    assert 0 < result["handled"] < 100
    assert result["lost"] is None


@pytest.mark.parametrize(
    ("limit", "left_out"), [("_READY_WITHIN_S", 'print("ready", flush=True)'), ("_FIRST_WITHIN_S", "record(*message)")]
)
def test_a_peer_that_hangs_does_not_stop_the_others(
    fake: Callable[[str], Installed], monkeypatch: pytest.MonkeyPatch, limit: str, left_out: str
) -> None:
    monkeypatch.setattr(compare, limit, 2.0)
    installed = fake("")
    script = Path(installed.python)
    script.write_text(script.read_text().replace(left_out, "pass"))
    with pytest.raises(BenchFailed, match=r"in 2 s$"):
        _run(installed)


def test_a_peer_that_ends_is_a_row_with_its_last_words(
    fake: Callable[[str], Installed], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = fake("sys.exit('no such broker')")
    with pytest.raises(BenchFailed, match="exit code 1: no such broker"):
        _run(installed)
    monkeypatch.setattr(compare, "find", lambda *_: installed)
    monkeypatch.setattr(
        compare, "run_usher", lambda *_: run_peer(_PEER, fake(""), _LITTLE, os.environ) | {"messages_per_second": 10.0}
    )

    def run_failing(*words: Any) -> dict[str, Any]:
        fake("sys.exit('no such broker')")
        return run_peer(*words)

    monkeypatch.setattr(compare, "run_peer", run_failing)
    said: list[str] = []
    usher, failed = run_comparison([_PEER], None, _LITTLE, 2, os.environ, said.append)
    assert (usher["name"], len(usher["runs"]), usher["ratio"]) == ("usher", 2, 1.0)
    assert "no such broker" in failed["failed"]
    assert (failed["messages_per_second"], failed["runs"]) == (None, [])
    assert sum("failed" in line for line in said) == 1  # and it is not tried again


def test_what_is_not_installed_is_told_with_the_way_to_it(tmp_path: Path) -> None:
    missing = find(replace(_PEER, distribution="no-such-distribution"), tmp_path)
    assert missing == "no-such-distribution is not installed (--environments DIR --prepare does it)"


@pytest.mark.parametrize("peer", PEERS.values(), ids=list(PEERS))
def test_every_peer_says_what_it_promises_where_that_stands_and_how_it_is_run(peer: Any) -> None:
    assert peer.promise.endswith(".")
    assert peer.source.startswith("https://")
    assert peer.keeps
    assert peer.configuration
    assert peer.requires
    assert 0 < peer.share <= 1
    assert peer.name in next(option.help or "" for option in command.params if option.name == "names")  # type: ignore[attr-defined]
