"""Work that was handed over goes where there is room: consumers that start later take what others have not begun."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from tests.hands import ask
from tests.process.crew import KEYS, Crew
from usher import Link

pytestmark = pytest.mark.process

_SLOTS = 8
_HANDLER = """
import pathlib, time
from usher.deploy.demo.handlers import record


def handle(message):
    while not pathlib.Path(__file__).with_name("go").exists():
        time.sleep(0.05)
    record(message)
"""
FILES = {"until_told.py": _HANDLER}


def _takeable(crew: Crew) -> int:
    return int((ask(f"{crew.masters[0]}/api/lag").document or {"takeable": -1})["takeable"])


def test_three_that_join_take_all_that_the_first_one_has_and_cannot_run(folder: Path, link: Link) -> None:
    """All is handed over before they start, twice as many tickets as there are slots: nothing waits for them."""
    with Crew(folder, link.url, USHER_CONCURRENCY=str(_SLOTS)) as crew:
        crew.start(1, ["c1"], "until_told:handle")
        tickets = [f"T{number}" for number in range(2 * _SLOTS)]
        sent = [
            reply.decode() for reply in link.pipeline([("XADD", KEYS.stream, "*", "ticket_id", t) for t in tickets])
        ]
        crew.until(lambda: link.call("HLEN", KEYS.tickets) == len(tickets), 20, "all tickets are handed over")
        crew.until(lambda: _takeable(crew) == _SLOTS, 20, "an autoscaler is told what others could take")
        for name in ("c2", "c3", "c4"):
            crew.start_consumer(name, "until_told:handle")

        def of_others() -> int:
            return sum(not record.startswith(b"c1:") for record in link.call("HVALS", KEYS.tickets))

        crew.until(lambda: of_others() == _SLOTS, 40, "the others have what c1 had no slot for")

        def told() -> int:
            return sum(found["count"] for found in crew.events("tickets_recalled"))

        crew.until(lambda: told() == _SLOTS, 20, "it is told")  # at the leader's look, after they were given back
        crew.until(lambda: _takeable(crew) == 0, 20, "all that is left runs")
        (folder / "go").touch()
        crew.wait_until_handled(sent, within_s=30)
        crew.wait_until_settled(link)
        runs = crew.executions()
        assert len(runs) == len(sent), "nothing ran twice"
        by_consumer = collections.Counter(run.consumer for run in runs)
        assert by_consumer["c1"] == _SLOTS
