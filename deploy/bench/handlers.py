"""Handlers of `usher bench`, the times they note, and the yardstick: a bare consumer."""

from __future__ import annotations

import array
import functools
import os
import struct
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis

#: Folder that ``timed`` writes to; `usher bench latency` sets it.
FOLDER_VARIABLE = "USHER_BENCH_FOLDER"
#: Field with the time at which the message was due to be sent, in ns since the epoch (an open loop: a late sender hides
#: nothing).
DUE_FIELD = "due_ns"

#: Prefix of tickets whose messages are not measured: while those come, the master begins to lead and everything runs a
#: first time.
WARM = b"warm"


def noop(_message: Any) -> None:
    """Do nothing."""


def timed(message: Any) -> None:
    """Note the time from the message's due time to the start of its handler."""
    if message.ticket.startswith(WARM):
        return
    note_wait(int(message.fields[DUE_FIELD]))


def note_wait(due_ns: int) -> None:
    os.write(_file(), struct.pack("q", time.time_ns() - due_ns))


@functools.cache
def _file() -> int:
    path = Path(os.environ[FOLDER_VARIABLE]) / str(os.getpid())
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def read_waits(folder: Path, seen: Mapping[str, int] | None = None) -> list[int]:
    waits = array.array("q")
    for path in folder.iterdir():
        new = path.read_bytes()[(seen or {}).get(path.name, 0) :]
        waits.frombytes(new[: len(new) - len(new) % waits.itemsize])
    return waits.tolist()


_COUNT, _BLOCK_MS = 500, 1000


def consume(url: str, stream: str, group: str, name: str, bench: Connection, lasts: bool) -> None:
    """Be a bare consumer, without order, leases or fences: plain redis-py (with hiredis) in its usual form.

    Say when it is connected, and begin when told to. Read and acknowledge until the stream is empty, and say how
    many there were; or (``lasts``) until told to end, and say how long each waited (ns from its due time)."""
    client = redis.Redis.from_url(url, protocol=2)
    client.ping()
    bench.send("connected")
    bench.recv()
    read = ("XREADGROUP", "GROUP", group, name, "COUNT", _COUNT, *(("BLOCK", _BLOCK_MS) if lasts else ()), "STREAMS")
    handled, waits = 0, list[int]()
    while not bench.poll():
        answer: Any = client.execute_command(*read, stream, ">")
        if not answer and not lasts:
            break
        for _, found in answer or ():
            if lasts:
                waits += [time.time_ns() - int(fields[DUE_FIELD.encode()]) for _, fields in found]
            client.execute_command("XACK", stream, group, *(entry_id for entry_id, _ in found))
            handled += len(found)
    bench.send(waits if lasts else handled)
