"""A handler that hangs: its process is ended, the attempt counted, the message given up in the end; its ticket and all
others go on."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from tests.hands import pairs
from tests.process.crew import KEYS, Crew, out_of_order, overlaps, repeated
from tests.process.machine import until
from tests.topologies import figures
from usher import Link

pytestmark = pytest.mark.process

_LIMIT_S, _ATTEMPTS = 1.0, 3
_HANDLERS = '''
import asyncio
import time
from usher.deploy.demo.handlers import record


def handle(message):
    """Hangs for good on messages that say so; the first time only on those that say once."""
    wanted = message.fields.get("hang")
    if wanted == "always" or (wanted == "once" and message.attempt == 1):
        started(message)
        while True:
            time.sleep(60)
    record(message)


async def handle_async(message):
    if message.fields.get("hang") == "always":
        started(message)
        await asyncio.sleep(3600)
    record(message)


from usher.deploy.demo.handlers import started
'''
FILES = {"hanging.py": _HANDLERS}


def send(link: Link, ticket: str, **fields: str) -> str:
    flat = [part for pair in fields.items() for part in pair]
    return bytes(link.call("XADD", KEYS.stream, "*", "ticket_id", ticket, *flat)).decode()


def limits(**more: str) -> dict[str, str]:
    return {
        "USHER_HANDLER_SECONDS": str(_LIMIT_S),
        "USHER_MAX_ATTEMPTS": str(_ATTEMPTS),
        "USHER_DEMO_WORK_MS": "1",
        **more,
    }


@pytest.mark.parametrize("handler", ["handle", pytest.param("handle_async", marks=pytest.mark.slow)])
def test_a_hanging_handler_ends_in_a_dead_letter_and_nothing_else_stops_for_long(
    folder: Path, link: Link, handler: str
) -> None:
    with Crew(folder, link.url, **limits()) as crew:
        crew.start(1, ["c1"], f"hanging:{handler}")
        first_pid = crew.worker_of("c1")
        before = [send(link, "T"), send(link, "other")]
        crew.wait_until_handled(before, within_s=10)
        began = time.monotonic()
        hangs = send(link, "T", hang="always")
        behind = send(link, "T")
        others = []
        while not crew.events("handler_stuck") or len(others) < 100:  # other tickets come all the time
            others.append(send(link, f"U{len(others) % 7}"))
            time.sleep(0.02)
        crew.wait_until_handled([*others, behind], within_s=40)
        took_s = time.monotonic() - began
        crew.wait_until_settled(link)

        [letter] = [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]
        assert (letter[b"usher-id"].decode(), letter[b"usher-ticket"], letter[b"usher-attempts"]) == (
            hangs,
            b"T",
            b"%d" % _ATTEMPTS,
        )
        assert (letter[b"usher-reason"], letter[b"usher-error"][:24]) == (
            b"attempts_exhausted",
            b"it ran past its deadline",
        )
        executions = crew.executions()
        tries = [run for run in executions if run.stream_id == hangs]
        assert [run.attempt for run in tries] == list(range(1, _ATTEMPTS + 1)), (
            "each start is counted, over the ends of processes"
        )
        assert len({run.pid for run in tries}) == _ATTEMPTS, "every time another process"
        assert first_pid not in {run.pid for run in executions if run.stream_id == behind}
        assert [event["attempt"] for event in crew.events("handler_stuck")] == list(range(1, _ATTEMPTS + 1))
        assert link.call("HGETALL", KEYS.attempts) == [], "neighbours are not charged, and what is over is forgotten"
        assert out_of_order(executions) == []
        assert overlaps(executions, crew.cut_off_ns) == []
        assert {run.attempt for run in executions if run.stream_id != hangs} == {1}
        pauses = [later.start_ns - earlier.start_ns for earlier, later in itertools.pairwise(executions)]
        figures(
            letter_after_s=took_s,
            repeated=len(repeated(executions)) - 1,
            longest_pause_s=max(pauses) / 1e9,
            limit_s=_LIMIT_S,
        )


def test_while_one_consumer_is_ended_the_other_goes_on_and_a_second_attempt_that_ends_is_a_success(
    folder: Path, link: Link
) -> None:
    with Crew(folder, link.url, **limits()) as crew:
        crew.start(1, ["c1", "c2"], "hanging:handle")
        hangs, behind = send(link, "T", hang="once"), send(link, "T")
        until(lambda: any(run.stream_id == hangs for run in crew.executions()), 10, "it has started")
        others = []
        until_s = time.monotonic() + 3 * _LIMIT_S
        while time.monotonic() < until_s:
            others.append(send(link, f"U{len(others) % 50}"))
            time.sleep(0.01)
        crew.wait_until_handled([hangs, behind, *others], within_s=20)
        crew.wait_until_settled(link)
        executions = crew.executions()
        assert [run.attempt for run in executions if run.stream_id == hangs] == [1, 2]
        assert link.call("XLEN", KEYS.dead) == 0
        assert link.call("HGETALL", KEYS.attempts) == []
        assert out_of_order(executions) == []
        assert overlaps(executions, crew.cut_off_ns) == []
        ended = next(run for run in executions if run.stream_id == hangs)
        starts = [run.start_ns for run in executions if run.consumer != ended.consumer]
        pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
        figures(pause_of_the_other_s=max(pauses) / 1e9, repeated=len(repeated(executions)) - 1)
        assert max(pauses) / 1e9 < 1, "the other consumer noticed nothing"
