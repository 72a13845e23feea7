"""Handlers of the benchmarks that are not installed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson

from benchmarks.rig.recording import record
from usher import RetryLater
from usher.deploy.bench.handlers import DUE_FIELD, note_wait, timed

#: The ticket of `python -m benchmarks hot`.
HOT_TICKET = b"HOT"
#: What the tickets of `python -m benchmarks page` begin with that are tried again tomorrow.
WAITING = b"waiting"
#: How long ``sleeping`` and ``sleeping_async`` take.
SLEEP_S = 0.01


def recorded(message: Any) -> None:
    """Note the execution, as the handlers of the peers do."""
    record(int(message.ticket), int(message.fields["number"]))


def sleeping(_message: Any) -> None:
    """Wait, as for an answer of somebody else."""
    time.sleep(SLEEP_S)


async def sleeping_async(_message: Any) -> None:
    """The same on an event loop."""
    await asyncio.sleep(SLEEP_S)


def computing(_message: Any) -> None:
    """About a millisecond of work for the interpreter."""
    sum(number * number for number in range(33_000))


def waiting(message: Any) -> None:
    """Do nothing, but for some tickets."""
    if message.ticket.startswith(WAITING):
        raise RetryLater(86_400)


def timed_but_hot(message: Any) -> None:
    """As ``timed``; a message of the hot ticket takes a millisecond instead."""
    if message.ticket == HOT_TICKET:
        time.sleep(0.001)
    else:
        timed(message)


def timed_row(message: Any) -> None:
    """The same for a row of an outbox, whose time is in its data."""
    note_wait(orjson.loads(message.fields["data"])[DUE_FIELD])
