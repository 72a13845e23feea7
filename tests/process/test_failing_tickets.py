"""Tickets whose messages fail wait for their next attempt; nobody else waits with them, however many they are."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.hands import decode_attempts as decode
from tests.hands import pairs
from tests.process.crew import KEYS, Crew, out_of_order
from tests.topologies import figures
from usher import Link

pytestmark = pytest.mark.process

_SLOTS, _FAILING, _OTHERS, _TICKETS = 4, 40, 1500, 50
_HANDLERS = """
from usher.deploy.demo.handlers import record
from usher import handler


@handler(max_attempts=500, backoff_s=0.4, backoff_cap_s=1.0)
def handle(message):
    if "fail" in message.fields:
        raise ValueError("not today")
    record(message)
"""
FILES = {"failing.py": _HANDLERS}


def send_others(crew: Crew, link: Link) -> float:
    """Seconds until all messages of tickets that do not fail were handled."""
    began_s = time.monotonic()
    commands = [("XADD", KEYS.stream, "*", "ticket_id", f"U{number % _TICKETS}") for number in range(_OTHERS)]
    crew.wait_until_handled([reply.decode() for reply in link.pipeline(commands)], within_s=60)
    return time.monotonic() - began_s


def test_ten_times_more_failing_tickets_than_slots_slow_nobody_down_and_their_attempts_survive_the_process(
    folder: Path, link: Link
) -> None:
    environ = {"USHER_CONCURRENCY": str(_SLOTS), "USHER_DEMO_WORK_MS": "2", "USHER_MAX_ATTEMPTS": "1"}
    with Crew(folder, link.url, **environ) as crew:
        crew.start(1, ["c1"], "failing:handle")
        without_s = send_others(crew, link)
        failing = link.pipeline(
            [("XADD", KEYS.stream, "*", "ticket_id", f"F{number}", "fail", 1) for number in range(_FAILING)]
        )
        behind = link.pipeline([("XADD", KEYS.stream, "*", "ticket_id", f"F{number}") for number in range(_FAILING)])
        crew.until(lambda: len(crew.events("handler_failed")) >= 2 * _FAILING, 30, "all have failed twice")
        with_s = send_others(crew, link)
        assert not {entry_id.decode() for entry_id in behind} & crew.handled(), "their tickets wait"
        assert link.call("XLEN", KEYS.dead) == 0, "what the handler asks for stands above the setting"

        failed = len(crew.events("handler_failed"))
        crew.stop("c1")
        noted = {entry_id: decode(value) for entry_id, value in pairs(link.call("HGETALL", KEYS.attempts)).items()}
        assert set(noted) == set(failing)
        assert all(known.starts == known.failures >= 2 and known.crashes == 0 for known in noted.values())
        assert out_of_order(crew.executions()) == []
        lines = crew.events("handler_failed")
        assert all(line["attempt"] <= noted[line["id"].encode()].starts for line in lines)
        figures(
            others_alone_s=without_s,
            others_beside_failing_s=with_s,
            failing=_FAILING,
            slots=_SLOTS,
            failures_meanwhile=failed - 2 * _FAILING,
        )
