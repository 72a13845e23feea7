"""The demo handler's records: one file per process, one line when it starts a message and one when it ends it.

A line is one ``write`` to a file opened with O_APPEND: once it returned, the line is with the kernel and survives
``kill -9`` of the process. Nothing is buffered, because a buffer is exactly what a killed process loses.

============================================  =======================================
``S serial id fence attempt ns ticket``       execution ``serial`` of this process starts
``E serial ns``                               it has ended
============================================  =======================================

``ns`` is CLOCK_MONOTONIC, which all processes of a machine share. The file's name is ``<consumer>.<pid>.records``.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from usher.common.base.log import event

if TYPE_CHECKING:
    from usher.consumer.handlers.message import Message

SUFFIX = ".records"

log = logging.getLogger(__name__)

#: Environment of the demo's consumers; `usher demo` sets it.
FOLDER_VARIABLE = "USHER_DEMO_FOLDER"
WORK_VARIABLE = "USHER_DEMO_WORK_MS"


@dataclass(slots=True)
class Execution:
    """An execution of the handler on a message. Times in nanoseconds of CLOCK_MONOTONIC; ``end_ns`` None: it has not
    ended."""

    consumer: str
    pid: int
    stream_id: str
    ticket: str
    fence: int
    attempt: int
    start_ns: int
    end_ns: int | None = None


_serials = itertools.count()  # next() on it is one step of the interpreter


@functools.cache
def _file_of(pid: int) -> int:
    """Open the file of this process. A forked child has its parent's serials, and a file of its own."""
    path = Path(os.environ[FOLDER_VARIABLE]) / f"{os.environ['USHER_CONSUMER_NAME']}.{pid}{SUFFIX}"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def started(message: Message) -> int:
    """Write down that the message starts; return the serial of its execution."""
    start_ns, serial = time.monotonic_ns(), next(_serials)
    ticket = message.ticket_id.encode("unicode_escape").decode("ascii")
    line = f"S {serial} {message.id} {message.fence} {message.attempt} {start_ns} {ticket}\n"
    os.write(_file_of(os.getpid()), line.encode("ascii"))
    return serial


def record(message: Message) -> None:
    """Write down that the message starts, work for a moment, write down that it ended."""
    serial = started(message)
    time.sleep(float(os.environ.get(WORK_VARIABLE, "1")) / 1000)
    os.write(_file_of(os.getpid()), f"E {serial} {time.monotonic_ns()}\n".encode("ascii"))


def executions(folder: Path) -> list[Execution]:
    """Read the executions of all processes so far. A line that is not whole is still being written."""
    found: list[Execution] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        consumer, _, pid = path.name.removesuffix(SUFFIX).rpartition(".")
        own: dict[str, Execution] = {}
        for line in path.read_text("ascii").split("\n")[:-1]:
            kind, serial, rest = line.split(" ", 2)
            if kind == "E":
                own[serial].end_ns = int(rest)
                continue
            stream_id, fence, attempt, start_ns, ticket = rest.split(" ", 4)
            known = ticket.encode("ascii").decode("unicode_escape")
            own[serial] = Execution(consumer, int(pid), stream_id, known, int(fence), int(attempt), int(start_ns))
        found += own.values()
    return found


def count_ended(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\nE ") for path in folder.glob(f"*{SUFFIX}"))


_LONGEST_SHOWN = 60
_MOST_SHOWN = 6


def show(message: Message) -> None:
    facts: dict[str, Any] = {
        "ticket": message.ticket_id,
        "id": message.id,
        "fence": message.fence,
        "attempt": message.attempt,
    }
    for name, value in list(message.fields.items())[:_MOST_SHOWN]:
        facts[f"field_{name}"] = value if len(value) <= _LONGEST_SHOWN else value[:_LONGEST_SHOWN] + "..."
    event(log, "message_shown", **facts)
