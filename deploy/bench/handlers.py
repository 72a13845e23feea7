"""Handlers of `usher bench`, and the times they note."""

from __future__ import annotations

import array
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Folder that ``timed`` writes to; `usher bench latency` sets it.
FOLDER_VARIABLE = "USHER_BENCH_FOLDER"
#: Field with the time at which the message was due to be sent, in ns since the epoch (an open loop: a late sender hides
#: nothing).
DUE_FIELD = "due_ns"

#: Prefix of tickets whose messages are not measured: while those come, the master begins to lead and everything runs a
#: first time.
WARM = b"warm"

_waits = array.array("q")
_FLUSH = 64


def noop(_message: Any) -> None:
    """Do nothing."""


def timed(message: Any) -> None:
    """Note the time from the message's due time to the start of its handler; every ``_FLUSH`` messages to the file of
    this process."""
    if message.ticket.startswith(WARM):
        return
    note_wait(int(message.fields[DUE_FIELD]))


def note_wait(due_ns: int) -> None:
    _waits.append(time.time_ns() - due_ns)
    if len(_waits) >= _FLUSH:
        _write()


def _write() -> None:
    global _waits
    waits, _waits = _waits, array.array("q")
    with (Path(os.environ[FOLDER_VARIABLE]) / str(os.getpid())).open("ab") as file:
        waits.tofile(file)


def read_waits(folder: Path, seen: Mapping[str, int] | None = None) -> list[int]:
    waits = array.array("q")
    for path in folder.iterdir():
        new = path.read_bytes()[(seen or {}).get(path.name, 0) :]
        waits.frombytes(new[: len(new) - len(new) % waits.itemsize])
    return waits.tolist()
