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

import itertools
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from usher.common.base.log import event

if TYPE_CHECKING:
    from usher.consumer.handlers.message import Message

SUFFIX = ".records"


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


class RecordFile:
    """The records of one process; its methods may be called by many threads at once."""

    def __init__(self, folder: Path, consumer: str) -> None:
        self.pid = os.getpid()
        path = folder / f"{consumer}.{self.pid}{SUFFIX}"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._serials = itertools.count()  # next() on it is one step of the interpreter

    def started(self, message: Message) -> int:
        start_ns = time.monotonic_ns()
        serial = next(self._serials)
        ticket = message.ticket_id.encode("unicode_escape").decode("ascii")
        line = f"S {serial} {message.id} {message.fence} {message.attempt} {start_ns} {ticket}\n"
        os.write(self._descriptor, line.encode("ascii"))
        return serial

    def ended(self, serial: int) -> None:
        os.write(self._descriptor, f"E {serial} {time.monotonic_ns()}\n".encode("ascii"))


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


log = logging.getLogger(__name__)

#: Environment of the demo's consumers; `usher demo` sets it.
FOLDER_VARIABLE = "USHER_DEMO_FOLDER"
WORK_VARIABLE = "USHER_DEMO_WORK_MS"
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


def record(message: Message) -> None:
    """Write down that the message starts, work for a moment, write down that it ended."""
    file, work_s = _Setup.get()
    serial = file.started(message)
    time.sleep(work_s)
    file.ended(serial)


class _Setup:
    """The file of this process and the time to work, made at the first message: an import does nothing."""

    _lock = threading.Lock()
    _made: tuple[RecordFile, float] | None = None  # guarded by _lock

    @classmethod
    def get(cls) -> tuple[RecordFile, float]:
        with cls._lock:
            # A forked child has its parent's object and must not share its serials.
            if cls._made is None or cls._made[0].pid != os.getpid():
                environ = os.environ
                file = RecordFile(Path(environ[FOLDER_VARIABLE]), environ["USHER_CONSUMER_NAME"])
                cls._made = (file, float(environ.get(WORK_VARIABLE, "1")) / 1000)
            return cls._made
