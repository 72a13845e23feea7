"""Processes that die early, one after another: they are started again at once, and say so."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.process.crew import KEYS, Crew, out_of_order
from tests.topologies import figures
from usher import Link

pytestmark = pytest.mark.process

_MESSAGES, _TICKETS, _EVERY = 800, 100, 40
#: Seconds by which 20 messages that end their process may hold up the other 780, all in all, on a machine of our own.
_MOST_HELD_UP_S = 6.0
_HANDLERS = """
import os
from usher.deploy.demo.handlers import record


def handle(message):
    if message.fields["ends"]:
        os._exit(3)  # a code that gunicorn takes for a worker that cannot start
    record(message)
"""
FILES = {"ending.py": _HANDLERS}


def _seconds_for(crew: Crew, link: Link, ends: int) -> float:
    """Send 800 messages, of which so many end their process; return when all others were handled."""
    crew.forget_the_past()
    began_s = time.monotonic()
    ending = range(_EVERY // 2, _EVERY * ends, _EVERY)
    commands = []
    for number in range(_MESSAGES):
        ticket = f"T{(number + number // _TICKETS) % _TICKETS}"
        end = "now" if number in ending else ""
        commands.append(("XADD", KEYS.stream, "*", "ticket_id", ticket, "ends", end))
    ids = [reply.decode() for reply in link.pipeline(commands)]
    crew.wait_until_handled([entry_id for number, entry_id in enumerate(ids) if number not in ending], 100)
    return time.monotonic() - began_s


def test_twenty_messages_that_end_their_process_hold_up_nobody_for_long(folder: Path, link: Link) -> None:
    with Crew(folder, link.url, USHER_DEMO_WORK_MS="50", USHER_LEASE_SECONDS="20", USHER_MAX_ATTEMPTS="2") as crew:
        crew.start(1, ["c1", "c2"], "ending:handle")
        without_s, with_s = _seconds_for(crew, link, 0), _seconds_for(crew, link, 20)
        shared_by = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        again = crew.events("worker_started_again")
        figures(without_s=without_s, with_s=with_s, started_again=len(again), shared_by=shared_by)
        assert with_s < without_s + _MOST_HELD_UP_S * shared_by
        assert [event["in_s"] for event in again] == [0.0] * len(again), "all at once"
        assert len(again) >= 5, "each is logged"
        assert out_of_order(crew.executions()) == []
        crew.wait_until_settled(link, within_s=60)
        assert link.call("XLEN", KEYS.dead) == 20
