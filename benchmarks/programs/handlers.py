"""Handlers of the benchmarks that are not installed."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from pathlib import Path
from typing import Any

import orjson

from benchmarks.rig.recording import record
from usher import GiveUp, RetryLater
from usher.common.redis.client import SharedLink
from usher.deploy.bench.handlers import DUE_FIELD, note_wait, timed

#: The ticket of `python -m benchmarks hot`.
HOT_TICKET = b"HOT"
#: Prefixes of the tickets of `python -m benchmarks page` whose messages are tried again tomorrow, fail, or are given
#: up; and kinds of these.
WAITING, FAILING, GIVEN_UP, _KINDS = b"waiting", b"failing", b"given-up", 20
#: Field of the time until which ``recorded_unless_broken`` fails, in seconds since the epoch.
BROKEN_UNTIL = "broken_until"
#: Seconds that ``sleeping`` and ``sleeping_async`` take.
SLEEP_S = 0.01
#: Field with the folder of ``noted``.
NOTES = "notes"
#: Field with a folder, in which a file with a tenant's name, or ``all``, says that what they need is away.
AWAY = "away"


def recorded(message: Any) -> None:
    """Note the execution, as the handlers of the peers do."""
    record(int(message.ticket), int(message.fields["number"]))


def recorded_unless_broken(message: Any) -> None:
    """Note the execution, of one of several streams too, or fail until what the message needs is repaired."""
    if time.time() < float(message.fields[BROKEN_UNTIL]):
        raise RuntimeError("not repaired yet")
    record(int(message.ticket.rpartition(b"/")[2]), int(message.fields["number"]))


def noted(message: Any) -> None:
    """Work for a moment, and write down ticket, number, start and end, in a file of this process."""
    start_ns = time.monotonic_ns()
    time.sleep(0.002)
    line = f"{int(message.ticket)} {message.fields['number']} {start_ns} {time.monotonic_ns()}\n"
    os.write(_notes(message.fields[NOTES], os.getpid()), line.encode())


@functools.cache
def _notes(folder: str, pid: int) -> int:
    return os.open(Path(folder, f"notes-{pid}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def lasting(_message: Any) -> None:
    """Run for as long as the measure does."""
    time.sleep(3600)


def sleeping(_message: Any) -> None:
    """Wait, as for the answer of another service."""
    time.sleep(SLEEP_S)


async def sleeping_async(_message: Any) -> None:
    """Wait on an event loop, as for the answer of another service."""
    await asyncio.sleep(SLEEP_S)


def computing(_message: Any) -> None:
    """Compute for about a millisecond of the interpreter's time."""
    sum(number * number for number in range(33_000))


def taking_its_time(message: Any) -> None:
    """Wait for as long as the message says."""
    time.sleep(float(message.fields["seconds"]))


def needing(message: Any) -> None:
    """Take a millisecond, or find that what this tenant needs is away."""
    folder = Path(message.fields[AWAY])
    if (folder / "all").exists() or (folder / message.fields["tenant"]).exists():
        raise ConnectionRefusedError("connection refused")
    time.sleep(0.001)


def waiting(message: Any) -> None:
    """Do nothing, except for some tickets."""
    if message.ticket.startswith(WAITING):
        raise RetryLater(86_400)
    for begin, base in ((FAILING, ValueError), (GIVEN_UP, GiveUp)):
        if message.ticket.startswith(begin):
            number = int(message.ticket.rpartition(b"-")[2])
            raise type(f"{base.__name__}{number % _KINDS}", (base,), {})(f"no account {number}")


def timed_but_hot(message: Any) -> None:
    """Note the time like ``timed``; a message of the hot ticket takes a millisecond instead."""
    if message.ticket == HOT_TICKET:
        time.sleep(0.001)
    else:
        timed(message)


def timed_row(message: Any) -> None:
    """Note the time for a row of an outbox, whose due time is in its data."""
    note_wait(orjson.loads(message.fields["data"])[DUE_FIELD])


#: Field with a list at which the caller waits, and one with how many parts are told before the answer.
REPLY_TO, PARTS = "reply_to", "parts"


def answering(message: Any) -> str:
    """Answer who calls, or the list that is named behind the URL of its Redis; first so many parts, each the time."""
    for _ in range(int(message.fields.get(PARTS, 0))):
        message.progress(time.time())
        time.sleep(SLEEP_S)
    if (to := message.fields.get(REPLY_TO)) is not None:
        where, name = to.split()
        _replies(where).call("LPUSH", name, "answer")
    return "answer"


@functools.cache
def _replies(url: str) -> SharedLink:
    return SharedLink(url, "replies")
