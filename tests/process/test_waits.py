"""A message whose handler asked to be called later is called then: not before, whoever was stopped or killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hands import is_waiting
from tests.process.crew import KEYS, Crew
from tests.topologies import figures
from usher import Link

pytestmark = pytest.mark.process

_WAIT_S = 15.0
#: Clocks of one machine may go apart by this much in that time.
_SLEW_S = 0.05
FILES = {
    "asks.py": f"""
import pathlib, time
from usher import RetryLater
from usher.deploy.demo.handlers import record

def handle(message):
    if message.fields.get("first") and message.attempt == 1:
        pathlib.Path(__file__).with_name("asked").write_text(str(time.monotonic_ns()))
        raise RetryLater({_WAIT_S})
    record(message)
"""
}


def _waits(link: Link) -> bool:
    record = link.call("HGET", KEYS.tickets, "T")
    return record is not None and is_waiting(record.partition(b" ")[0])


@pytest.mark.parametrize("end", [pytest.param("stopped", marks=pytest.mark.slow), "killed"])
def test_a_wait_outlives_its_consumer_and_its_leader(folder: Path, link: Link, end: str) -> None:
    with Crew(folder, link.url) as crew:
        crew.start(2, ["c1"], "asks:handle")
        sent = [
            link.call("XADD", KEYS.stream, "*", "ticket_id", "T", "first", first).decode() for first in ("yes", "", "")
        ]
        crew.until(lambda: _waits(link), 20, "the ticket waits, and nobody has it")
        leader = link.call("GET", KEYS.leader).decode().rpartition(" ")[2]
        if end == "stopped":
            assert crew.stop("c1") == 0
        else:
            crew.kill_both("c1")
        crew.kill_both(crew.master_at(leader))
        crew.start_consumer("c2", "asks:handle")
        crew.wait_until_handled(sent, within_s=_WAIT_S + 30)
        runs = crew.executions()
        assert [(run.stream_id, run.attempt) for run in runs] == [(sent[0], 2), (sent[1], 1), (sent[2], 1)]
        waited_s = (runs[0].start_ns - int((folder / "asked").read_text())) / 1e9
        figures(waited_s=waited_s, late_s=waited_s - _WAIT_S)
        assert waited_s >= _WAIT_S - _SLEW_S
        crew.wait_until_settled(link)
