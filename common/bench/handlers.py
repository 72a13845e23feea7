"""Handlers of the benchmarks."""

from __future__ import annotations

import array
import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from common.bench.recording import record
from common.errors import RetryLater

#: Folder that ``timed`` writes to; `usher bench latency` sets it.
FOLDER_VARIABLE = "USHER_BENCH_FOLDER"
#: Field with the time at which the message was due to be sent, in ns since the epoch (an open loop: a late sender hides nothing).
DUE_FIELD = "due_ns"

#: The ticket of `usher bench hot`.
HOT_TICKET = b"HOT"
#: What the tickets of messages begin with that are not measured: while those come, the master begins to lead and all is done a first time.
WARM = b"warm"

#: What the tickets of `usher bench page` begin with that are tried again tomorrow.
WAITING = b"waiting"

#: How long ``sleeping`` and ``sleeping_async`` take.
SLEEP_S = 0.01

_waits = array.array("q")
_FLUSH = 64


def noop(_message: Any) -> None:
    """Do nothing."""


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


def timed(message: Any) -> None:
    """Note how long the message took from when it was due to the start of its handler; every ``_FLUSH`` messages to the file of this process."""
    if message.ticket.startswith(WARM):
        return
    _waits.append(time.time_ns() - int(message.fields[DUE_FIELD]))
    if len(_waits) >= _FLUSH:
        _write()


def timed_but_hot(message: Any) -> None:
    """As ``timed``; a message of the hot ticket takes a millisecond instead."""
    if message.ticket == HOT_TICKET:
        time.sleep(0.001)
    else:
        timed(message)


def timed_row(message: Any) -> None:
    """The same for a row of an outbox, whose time is in its data."""
    _waits.append(time.time_ns() - orjson.loads(message.fields["data"])[DUE_FIELD])
    if len(_waits) >= _FLUSH:
        _write()


def _write() -> None:
    global _waits
    waits, _waits = _waits, array.array("q")
    with (Path(os.environ[FOLDER_VARIABLE]) / str(os.getpid())).open("ab") as file:
        waits.tofile(file)


def read_waits(folder: Path, seen: Mapping[str, int] | None = None) -> list[int]:
    """All waits in ns, of all processes; of a file only what lies behind the bytes already ``seen``."""
    waits = array.array("q")
    for path in folder.iterdir():
        new = path.read_bytes()[(seen or {}).get(path.name, 0) :]
        waits.frombytes(new[: len(new) - len(new) % waits.itemsize])
    return waits.tolist()
