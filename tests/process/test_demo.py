"""`usher demo`: the verdict is clean when all is well, and nothing is left behind whatever happens."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.process.machine import ROOT, USHER, environ_for, kill_all_of, processes_of, until

pytestmark = pytest.mark.process

REAL_INCIDENTS = ROOT.parent / "shared" / "data" / "incidents.csv.gz"


def demo(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*USHER, "demo", *words],
        env=environ_for(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def test_a_clean_run(folder: Path) -> None:
    done = demo(folder, "--messages", "3000", "--tickets", "300", "--consumers", "2", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    verdict = json.loads(done.stdout)
    assert (verdict["sent"], verdict["handled"]) == (3000, 3000)
    for nothing in (
        "lost",
        "duplicates",
        "order_violations",
        "overlaps",
        "dead_letters",
        "unexpected",
        "unacknowledged",
    ):
        assert verdict[nothing] == 0
    assert sum(share["handled"] for share in verdict["consumers"]) == 3000
    assert {share["name"] for share in verdict["consumers"]} <= {"consumer-1", "consumer-2"}
    assert verdict["messages_per_second"] > 0


@pytest.mark.slow
def test_a_consumer_killed_half_way_loses_nothing_and_keeps_the_order(folder: Path) -> None:
    done = demo(folder, "--messages", "4000", "--tickets", "300", "--kill", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    verdict = json.loads(done.stdout)
    assert verdict["handled"] == 4000
    assert verdict["lost"] == verdict["order_violations"] == verdict["overlaps"] == verdict["dead_letters"] == 0


@pytest.mark.slow
def test_people_get_a_table_and_one_line_of_verdict(folder: Path) -> None:
    done = demo(folder, "--messages", "200", "--consumers", "1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Verdict: clean" in done.stdout
    assert "consumer-1" in done.stdout


@pytest.mark.skipif(not REAL_INCIDENTS.exists(), reason="the real incident log is not here")
def test_real_incidents(folder: Path) -> None:
    done = demo(folder, "--csv", str(REAL_INCIDENTS), "--key", "number", "--messages", "5000", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout)["handled"] == 5000


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("moment", ["starting Redis", pytest.param("sending", marks=pytest.mark.slow)])
def test_stopped_at_any_moment_it_leaves_nothing_behind(folder: Path, moment: str, number: int, code: int) -> None:
    words = ["--messages", "20000", "--work-ms", "5"]
    with subprocess.Popen(
        [*USHER, "demo", *words], env=environ_for(folder), cwd=folder, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if moment in line:
                    break
            process.send_signal(number)
            assert process.wait(60) == code
            assert not processes_of(folder)
        finally:
            kill_all_of(folder)


def test_a_bad_csv_is_refused_before_anything_starts(folder: Path) -> None:
    path = folder / "in.csv"
    path.write_text("number,text\nI1,a\n,b\n")
    done = demo(folder, "--csv", str(path), "--key", "number")
    assert done.returncode == 2
    assert f"{path}:3: column 'number' is empty" in done.stderr
    assert "starting" not in done.stderr


@pytest.mark.slow
def test_settings_of_the_user_do_not_reach_the_demo(folder: Path) -> None:
    env = environ_for(
        folder,
        USHER_REDIS_URL="redis://127.0.0.1:1/0",
        USHER_TICKET_STREAM="precious",
        USHER_HANDLER="nowhere:f",
        USHER_NONSENSE="1",
    )
    done = subprocess.run(
        [*USHER, "demo", "--messages", "50", "--consumers", "1", "--json"],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    until(lambda: not processes_of(folder), 5, "all has ended")
