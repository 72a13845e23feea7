"""A handler that keeps the interpreter lock, or the event loop: its process stands still, with all that watches in it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from tests.hands import free_port, pairs
from tests.outboxes import made_outbox
from tests.process.crew import KEYS, Crew, out_of_order
from tests.process.test_deadline import send
from tests.process.test_operations import leader
from tests.topologies import figures
from usher import Link

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
_STARTED = """
from usher.deploy.demo.handlers import started
"""
#: Python imports it at its start.
_FREEZER = """
import ctypes
import os
import threading
import time
from pathlib import Path


def freeze():
    while not Path(f"freeze-{os.getpid()}").exists():
        time.sleep(0.05)
    ctypes.PyDLL(None).sleep(600)


os.register_at_fork(after_in_child=lambda: threading.Thread(target=freeze, daemon=True).start())
"""
FILES = {"freezing.py": _HANDLERS, "tests_started.py": _STARTED, "sitecustomize.py": _FREEZER}


def _flow(crew: Crew, link: Link, until_dead: int = 1, within_s: float = 90.0) -> list[str]:
    """Send to other tickets all the time, until there are so many letters."""
    others: list[str] = []
    until_s = time.monotonic() + within_s
    while link.call("XLEN", KEYS.dead) < until_dead and time.monotonic() < until_s:
        others.append(send(link, f"U{len(others) % 20}"))
        time.sleep(0.05)
    return others


@pytest.mark.parametrize(
    ("handler", "how"),
    [
        pytest.param("handle", "sleep", marks=pytest.mark.slow),
        ("handle", "regex"),
        pytest.param("handle_batch", "sleep", marks=pytest.mark.slow),
    ],
)
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


def test_a_master_and_a_streamer_that_freeze_are_ended_by_their_arbiters_and_work_goes_on(
    folder: Path, link: Link
) -> None:
    """Something in them keeps the interpreter lock; the other master leads meanwhile, and the other streamer streams."""
    outbox = made_outbox(f"sqlite:///{folder / 'outbox.db'}")
    streams = {"USHER_OUTBOX_URL": outbox.url}
    with Crew(folder, link.url, PYTHONPATH=str(folder), **streams) as crew:
        crew.start(2, ["c1"], "freezing:handle")
        for name in ("streamer-1", "streamer-2"):
            crew.run(name, "streamer", "--outbox-bind", f"127.0.0.1:{free_port()}")
        crew.until(lambda: len(crew.events("listening", "streamer")) == 2, 30, "streamers listen")
        crew.until(lambda: crew.events("leader_elected", "streamer"), 20, "one of them streams")
        streams_now = next(name for name in ("streamer-1", "streamer-2") if crew.events("leader_elected", name))
        frozen = {name: crew.worker_of(name) for name in (crew.master_at(leader(link)), streams_now)}
        for pid in frozen.values():
            (folder / f"freeze-{pid}").touch()
        sent = [send(link, f"U{number}") for number in range(20)]
        outbox.stage_many(5)
        crew.wait_until_handled(sent, within_s=30)
        crew.until(lambda: outbox.store.waiting()[0] == 0, 30, "the other streamer goes on")
        for name, pid in frozen.items():
            crew.until(lambda name=name: crew.events("worker_stood_still", name), 40, "its arbiter ends it")
            [told] = crew.events("worker_stood_still", name)
            assert (told["pid"], told["did"], told["running"]) == (pid, "runs", [])
            crew.until(lambda name=name, pid=pid: crew.worker_of(name) != pid, 20, "there is another one")
        crew.until(crew.is_well, 20, "both masters are well")
    outbox.close()
