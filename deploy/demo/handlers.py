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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from usher.common.base.log import event

if TYPE_CHECKING:
    from usher.consumer.handlers.message import Message

_SUFFIX = ".records"


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
        path = folder / f"{consumer}.{self.pid}{_SUFFIX}"
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


@dataclass
class _Tail:
    """The position up to which a file has been read, and its executions by serial."""

    consumer: str
    pid: int
    offset: int = 0
    executions: dict[int, Execution] = field(default_factory=dict)


class RecordReader:
    """Reads the files of a folder while they grow. ``poll`` takes in what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, _Tail] = {}
        self.ended = 0  # executions that have ended
        self.started = 0

    def poll(self) -> None:
        for path in sorted(self._folder.glob("*" + _SUFFIX)):
            if path not in self._tails:
                consumer, _, pid = path.name.removesuffix(_SUFFIX).rpartition(".")
                self._tails[path] = _Tail(consumer, int(pid))
            self._read(path, self._tails[path])

    def executions(self) -> Iterator[Execution]:
        return itertools.chain.from_iterable(tail.executions.values() for tail in self._tails.values())

    def pids(self) -> dict[str, int]:
        latest: dict[str, tuple[int, int]] = {}
        for tail in self._tails.values():
            if tail.executions:
                newest = max(execution.start_ns for execution in tail.executions.values())
                latest[tail.consumer] = max(latest.get(tail.consumer, (0, 0)), (newest, tail.pid))
        return {consumer: pid for consumer, (_, pid) in latest.items()}

    def _read(self, path: Path, tail: _Tail) -> None:
        with path.open("rb") as file:
            file.seek(tail.offset)
            grown = file.read()
        whole, newline, _ = grown.rpartition(b"\n")
        if not newline:
            return  # the line is still being written; it is read when complete
        tail.offset += len(whole) + 1
        for line in whole.decode("ascii").split("\n"):
            if line.startswith("S"):
                _, serial, stream_id, fence, attempt, start_ns, ticket = line.split(" ", 6)
                known = ticket.encode("ascii").decode("unicode_escape")
                tail.executions[int(serial)] = Execution(
                    tail.consumer, tail.pid, stream_id, known, int(fence), int(attempt), int(start_ns)
                )
                self.started += 1
            else:
                _, serial, end_ns = line.split(" ")
                tail.executions[int(serial)].end_ns = int(end_ns)
                self.ended += 1


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
