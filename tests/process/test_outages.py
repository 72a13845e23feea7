"""A dependency of a handler is away for longer than its attempts last: nothing is given up, everybody is told, and
work goes on at once when it is back."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.process.crew import KEYS, Crew, out_of_order
from tests.process.machine import USHER
from tests.topologies import figures
from usher import Link

pytestmark = [pytest.mark.process, pytest.mark.slow]

_AWAY_S = 8.0
FILES = {
    "pays.py": """
from pathlib import Path
from usher.deploy.demo.handlers import record

def handle(message):
    if message.fields["tenant"] == "a" and Path(__file__).with_name("away").exists():
        raise ConnectionRefusedError("no bank")
    record(message)
"""
}


def _usher(crew: Crew, *words: str) -> str:
    done = subprocess.run(
        [*USHER, *words], env=crew._environ, cwd=crew._home, capture_output=True, text=True, check=False, timeout=100
    )
    return done.stdout


def test_an_outage_of_one_tenant_gives_nothing_up_and_is_over_as_soon_as_it_is(folder: Path, link: Link) -> None:
    with Crew(folder, link.url, USHER_MAX_ATTEMPTS="3", USHER_RETRY_SECONDS="0.1") as crew:
        crew.start(1, ["c1"], "pays:handle")
        (folder / "away").touch()
        until_s, sent, others = time.monotonic() + _AWAY_S, list[str](), list[str]()
        while time.monotonic() < until_s:
            for tenant, ids in (("a", sent), ("b", others)):
                ticket = f"{tenant}{len(ids) % 5}"
                fields = ("ticket_id", ticket, "tenant", tenant)
                ids.append(link.call("XADD", KEYS.stream, "*", *fields).decode())
            time.sleep(0.05)
        told = _usher(crew, "stuck")
        crew.wait_until_handled(others, within_s=5)
        assert "5 tickets waiting for a try that succeeds, uncharged: ConnectionRefusedError in pays.py:7" in told
        explained = _usher(crew, "tickets", "explain", "a1")
        assert "5 tickets fail alike since" in explained
        (folder / "away").unlink()
        back_ns = time.monotonic_ns()
        crew.wait_until_handled(sent, within_s=10)
        runs = [run for run in crew.executions() if run.stream_id in sent]
        resumed_s = (min(run.start_ns for run in runs) - back_ns) / 1e9
        figures(resumed_s=resumed_s)
        assert 0 < resumed_s < 2.0
        assert link.call("XLEN", KEYS.dead) == 0
        assert not out_of_order(crew.executions())
        assert "tickets_fail_alike" in crew.log()
        assert "tickets_go_on" in crew.log()
