"""Work of other shapes than one message of a ticket at a time, through real programs: batches, messages without a
ticket, no master at all."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.hands import Keys, pairs
from tests.process.crew import KEYS, Crew, out_of_order, overlaps
from tests.process.machine import ROOT, environ_for, until
from usher import Link

pytestmark = pytest.mark.process

_HANDLERS = '''
import asyncio
from usher.deploy.demo.handlers import record
from usher.common.base.errors import PartialFailure
from usher import batch


@batch(most=20, wait_s=0.02)
def handle(messages):
    """Fails as a whole for one that says so; says which one failed where that is known."""
    assert len({message.ticket for message in messages}) == len(messages) <= 20, "one of each ticket"
    if any(message.fields.get("say") == "poison" for message in messages):
        raise ValueError("poison")
    failed = {}
    for message in messages:
        if message.fields.get("say") == "fail once" and message.attempt == 1:
            failed[message] = ValueError("once")
        else:
            assert (message.ticket_id == "") is (message.fields.get("ticket_id") is None)
            record(message)
    if failed:
        raise PartialFailure(failed)


@batch(most=20, wait_s=0.02, per_ticket=5)
async def handle_async(messages):
    await asyncio.sleep(0.001)
    return handle_one_by_one(messages)


def handle_one_by_one(messages):
    failed = {}
    for message in messages:
        if message.ticket in {other.ticket for other in failed}:
            continue  # it comes again, behind the failed one
        if message.fields.get("say") == "poison" or (message.fields.get("say") == "fail once" and message.attempt == 1):
            failed[message] = message.fields["say"]
        else:
            record(message)
    return failed
'''
_READER = """
import os
import sys
from usher.common.readers.loop import LoopOptions, MessageReadingLoop


def handle(message):
    if message.body == b"abort":
        with open(sys.argv[2], "a") as starts:
            starts.write(f"{message.id} {message.attempt}\\n")
        os.abort()


options = LoopOptions(block_s=0.2, idle_s=1.0, claim_every_s=0.2, max_attempts=2, threads=2, batch=5, queue=10)
with MessageReadingLoop(sys.argv[1], "payments", "billing", handle, options) as loop:
    loop.wait(60)
"""
FILES = {"shapes.py": _HANDLERS, "reader.py": _READER}


def send(link: Link, *messages: dict[str, str]) -> list[str]:
    commands = [
        ("XADD", KEYS.stream, "*", *(part for pair in message.items() for part in pair)) for message in messages
    ]
    return [bytes(reply).decode() for reply in link.pipeline(commands)]


@pytest.mark.parametrize("handler", ["handle", pytest.param("handle_async", marks=pytest.mark.slow)])
def test_batches_of_messages_over_two_processes_one_of_which_is_killed(folder: Path, link: Link, handler: str) -> None:
    """Two processes get work (that is how CPU-bound handlers scale), and what the killed one had goes on."""
    with Crew(folder, link.url, USHER_RETRY_SECONDS="0.05", USHER_MAX_ATTEMPTS="3") as crew:
        crew.start(1, ["c1", "c2"], f"shapes:{handler}", USHER_CAPACITY="100", USHER_DEMO_WORK_MS="1")
        alone = send(link, *({"ticket_id": f"alone {n}", "text": str(n)} for n in range(300)))
        shared = send(link, *({"ticket_id": f"T{n % 30}", "text": str(n)} for n in range(300)))
        [poison] = send(link, {"ticket_id": "P", "say": "poison"})
        failing = send(
            link, {"ticket_id": "F", "say": "fail once"}, {"ticket_id": "T1", "say": "fail once"}, {"ticket_id": "T1"}
        )
        crew.until(lambda: {run.consumer for run in crew.executions()} == {"c1", "c2"}, 30, "both processes work")
        crew.kill_worker("c1")
        later = send(link, *({"ticket_id": f"later {n}", "text": str(n)} for n in range(100)))
        crew.wait_until_handled([*alone, *shared, *failing, *later], within_s=60)
        crew.wait_until_settled(link, within_s=30)
        executions = crew.executions()
    [letter] = [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]
    assert (letter[b"usher-id"].decode(), letter[b"usher-ticket"], letter[b"usher-reason"]) == (
        poison,
        b"P",
        b"attempts_exhausted",
    )
    assert out_of_order(executions) == []
    assert overlaps(executions, crew.cut_off_ns) == []
    assert len({run.pid for run in executions}) >= 2
    done = Counter(run.stream_id for run in executions if run.end_ns is not None)
    assert sum(done.values()) - len(done) <= 150, (
        "only what the killed process had and had not acknowledged comes again"
    )


def test_one_message_that_kills_readers_is_given_up_and_its_neighbours_are_handled(folder: Path, link: Link) -> None:
    """A plain consumer group without a master: usher.common.readers.loop, killed by a handler again and again."""
    keys = Keys("payments", "billing")
    bodies = [b"fine"] * 12 + [b"abort"] + [b"fine"] * 12
    ids = [
        bytes(reply).decode() for reply in link.pipeline([("XADD", keys.stream, "*", "body", body) for body in bodies])
    ]
    starts = folder / "starts"
    command = [sys.executable, str(folder / "reader.py"), link.url, str(starts)]
    readers: list[subprocess.Popen[bytes]] = []

    def is_over() -> bool:
        if not readers or readers[-1].poll() is not None:
            readers.append(
                subprocess.Popen(
                    command, env=environ_for(folder, PYTHONPATH=str(ROOT)), cwd=folder, stderr=subprocess.DEVNULL
                )
            )
        found = link.call("XINFO", "GROUPS", keys.stream)
        return (
            bool(found) and link.call("XLEN", keys.dead) == 1 and link.call("XPENDING", keys.stream, keys.group)[0] == 0
        )

    try:
        until(is_over, 60, "all is handled or given up")
    finally:
        for reader in readers:
            reader.kill()
            reader.wait(10)
    [letter] = [pairs(fields) for _, fields in link.call("XRANGE", keys.dead, "-", "+")]
    assert (letter[b"usher-id"].decode(), letter[b"usher-reason"], letter[b"usher-attempts"]) == (
        ids[12],
        b"attempts_exhausted",
        b"4",
    )
    assert starts.read_text().splitlines() == [f"{ids[12]} {attempt}" for attempt in (1, 1, 2, 3, 4)], (
        "the first one was in no record; of the others two may have ended well, and are not charged"
    )
    assert pairs(link.call("XINFO", "GROUPS", keys.stream)[0])[b"last-delivered-id"] == ids[-1].encode()
    assert link.call("EXISTS", keys.attempts) == 0
