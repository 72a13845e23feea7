"""Delayed messages through real programs: each comes when it is due, once, whoever is killed meanwhile."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.hands import LogKeys
from tests.process.crew import KEYS, Crew, ids_in, out_of_order, overlaps
from usher import Link, Producer

pytestmark = pytest.mark.process

_MESSAGES, _TICKETS = 300, 40


def test_what_is_due_while_masters_are_killed_comes_once_and_in_order(
    tmp_path: Path, redis_url: str, link: Link
) -> None:
    rng = random.Random(1)
    with Crew(tmp_path, redis_url) as crew:
        crew.start(2, ["a", "b"])
        producer = Producer(link, KEYS.stream)
        began_ms = producer.ms_from_now(0)
        due = {str(number): producer.ms_from_now(rng.uniform(0.5, 6.0)) for number in range(_MESSAGES)}
        for number, due_ms in due.items():
            producer.send(f"T{int(number) % _TICKETS}", {"number": number}, due_ms=due_ms)
        killed = 0
        while time.time_ns() // 1_000_000 < began_ms + 6_000:
            crew.kill_worker(rng.choice(["master-1", "master-2", "a"]))
            killed += 1
            time.sleep(1.2)
        crew.until(lambda: link.call("XLEN", LogKeys(KEYS.stream).delayed) == 0, 20, "all were sent")
        crew.wait_until_settled(link)
        crew.wait_until_handled(ids_in(link), 20)
        executions = crew.executions()
    entries = {
        entry_id: dict(zip(flat[::2], flat[1::2], strict=True))
        for entry_id, flat in link.call("XRANGE", KEYS.stream, "-", "+")
    }
    assert sorted(int(fields[b"number"]) for fields in entries.values()) == list(range(_MESSAGES)), "each was sent once"
    early = [
        entry_id for entry_id, fields in entries.items() if int(entry_id.partition(b"-")[0]) < int(fields[b"due_ms"])
    ]
    assert not early
    assert not out_of_order(executions)
    assert not overlaps(executions, crew.cut_off_ns)
    assert killed >= 3
