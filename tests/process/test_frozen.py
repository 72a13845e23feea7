"""A handler that keeps the interpreter lock, or the event loop: its process stands still, with all that watches in it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from tests.process.crew import KEYS, Crew, out_of_order
from tests.process.test_deadline import send
from tests.topologies import figures
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs

pytestmark = pytest.mark.process

_ATTEMPTS = 3
_HANDLERS = """
import asyncio
import ctypes
import re
import time
from tests_started import started
from usher import batch
from usher.deploy.demo.handlers import record


def handle(message):
    if message.fields.get("freeze") == "sleep":
        started(message)
        ctypes.PyDLL(None).sleep(600)  # any C code that does not release the interpreter lock
    if message.fields.get("freeze") == "regex":
        started(message)
        re.match(r"(a+)+$", "a" * 64 + "b")
    record(message)


async def handle_async(message):
    if message.fields.get("freeze"):
        started(message)
        await asyncio.sleep(0.3)  # others have started before it, so their deadlines come first
        time.sleep(600)  # the event loop stands still, and the interpreter does not
    await asyncio.sleep(0.8)
    record(message)


@batch(most=10, wait_s=0.05)
def handle_batch(messages):
    for message in messages:
        handle(message)
"""
_STARTED = '''
def started(message):
    """Write the start down as the recording handler does; there is no end."""
    from usher.deploy.demo.handlers import _Setup
    file, _ = _Setup.get()
    file.started(message)
'''
FILES = {"freezing.py": _HANDLERS, "tests_started.py": _STARTED}


def _flow(crew: Crew, link: Link, until_dead: int = 1, within_s: float = 90.0) -> list[str]:
    """Send to other tickets all the time, until there are so many letters."""
    others: list[str] = []
    until_s = time.monotonic() + within_s
    while link.call("XLEN", KEYS.dead) < until_dead and time.monotonic() < until_s:
        others.append(send(link, f"U{len(others) % 20}"))
        time.sleep(0.05)
    return others


@pytest.mark.parametrize(("handler", "how"), [("handle", "sleep"), ("handle", "regex"), ("handle_batch", "sleep")])
def test_a_handler_that_freezes_its_process_becomes_a_letter_soon_and_others_go_on(
    folder: Path, link: Link, handler: str, how: str
) -> None:
    limits = {"USHER_HANDLER_SECONDS": "3", "USHER_MAX_ATTEMPTS": str(_ATTEMPTS), "USHER_DEMO_WORK_MS": "1"}
    with Crew(folder, link.url, **limits, USHER_LEASE_SECONDS="10") as crew:
        crew.start(1, ["c1", "c2"], f"freezing:{handler}")
        before = [send(link, f"U{number}") for number in range(20)]
        crew.wait_until_handled(before, within_s=20)
        began = time.monotonic()
        freezes, behind = send(link, "T", freeze=how), send(link, "T")
        others = _flow(crew, link)
        took_s = time.monotonic() - began
        crew.wait_until_handled([*others, behind], within_s=40)
        crew.wait_until_settled(link)
        [letter] = [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]
        assert (letter[b"usher-id"].decode(), letter[b"usher-attempts"]) == (freezes, b"%d" % _ATTEMPTS)
        executions = crew.executions()
        assert [run.attempt for run in executions if run.stream_id == freezes] == list(range(1, _ATTEMPTS + 1))
        ended = crew.events("worker_stood_still")
        assert ended, "and then it runs in a process of its own"
        assert all(f"{freezes} of ticket T" in one["running"] and one["did"] == "runs" for one in ended)
        assert link.call("HGETALL", KEYS.attempts) == [], "neighbours are not charged"
        assert out_of_order(executions) == []
        starts = [run.start_ns for run in executions if run.stream_id != freezes]
        gap_s = max(later - earlier for earlier, later in itertools.pairwise(starts)) / 1e9
        figures(letter_after_s=took_s, longest_gap_of_others_s=gap_s, starts=len(ended))


def test_of_an_event_loop_that_stands_still_only_what_keeps_it_is_charged(folder: Path, link: Link) -> None:
    limits = {"USHER_HANDLER_SECONDS": "1", "USHER_MAX_ATTEMPTS": str(_ATTEMPTS), "USHER_DEMO_WORK_MS": "1"}
    with Crew(folder, link.url, **limits, USHER_CONCURRENCY="64") as crew:
        crew.start(1, ["c1"], "freezing:handle_async")
        freezes = send(link, "T", freeze="yes")
        others = _flow(crew, link)
        crew.wait_until_handled(others, within_s=40)
        crew.wait_until_settled(link)
        [letter] = [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]
        assert (letter[b"usher-id"].decode(), letter[b"usher-attempts"]) == (freezes, b"%d" % _ATTEMPTS)
        assert {event["id"] for event in crew.events("handler_stuck")} == {freezes}
        assert link.call("HGETALL", KEYS.attempts) == []
