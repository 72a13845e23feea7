"""The notes of a handler of ``python -m benchmarks compare``, the same for all peers: (ticket, number in the ticket,
start, end) of every execution.

Each process writes into a mapped file of its own, so a note costs no system call and outlives a killed process. Also
imported by the workers of the peers, in their own virtual environments: standard library only, and Python 3.11.
"""

from __future__ import annotations

import array
import itertools
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.rig.findings import Note

#: Variable that names the folder of the job to every process that works on it.
FOLDER_VARIABLE = "USHER_BENCH_JOB"
_NOTE = struct.Struct("=IIqq")
_STARTED = struct.Struct("=q")
_STARTED_AT = 8


@dataclass(frozen=True)
class PeerJob:
    """The job of one peer."""

    folder: str
    url: str  # of the server: Redis, RabbitMQ or NATS
    messages: int
    payload: int  # bytes
    processes: int
    concurrency: int  # messages that each of them may have in hand at a time
    place: int = 0  # of this process among them

    @classmethod
    def load(cls, folder: Path, place: int = 0) -> PeerJob:
        return replace(cls(**json.loads((folder / "job.json").read_text("utf-8"))), place=place)

    def save(self, tickets: list[int]) -> None:
        """Write it, and the ticket of each message, to its folder."""
        folder = Path(self.folder)
        (folder / "notes").mkdir()
        (folder / "tickets").write_bytes(array.array("I", tickets).tobytes())
        (folder / "job.json").write_text(json.dumps(asdict(self)), "utf-8")

    def workload(self) -> Iterator[tuple[int, int]]:
        """Yield (ticket, number in the ticket) of every message, in the order in which they are sent."""
        tickets = array.array("I")
        tickets.frombytes((Path(self.folder) / "tickets").read_bytes())
        counts: dict[int, int] = {}
        for ticket in tickets:
            counts[ticket] = number = counts.get(ticket, 0) + 1
            yield ticket, number

    @property
    def body(self) -> str:
        return "x" * self.payload

    @property
    def room(self) -> int:
        """Return the number of notes that a process has room for: even if it handled everything twice."""
        return 2 * self.messages + 1000


class _Recorder:
    def __init__(self, job: PeerJob) -> None:
        self._room = job.room
        self._slots = itertools.count()  # threads share it
        with (Path(job.folder) / "notes" / str(os.getpid())).open("w+b") as file:
            file.truncate(self._room * _NOTE.size)  # sparse
            self._map = mmap.mmap(file.fileno(), 0)

    def note(self, ticket: int, number: int, start_ns: int) -> None:
        slot = next(self._slots)
        if slot < self._room:
            _NOTE.pack_into(self._map, slot * _NOTE.size, ticket, number, start_ns, time.monotonic_ns())


_recorder: _Recorder | None = None
_opening = threading.Lock()


def record(ticket: int, number: int) -> None:
    """Do the whole work of the handler."""
    start_ns = time.monotonic_ns()
    (_recorder or _open()).note(ticket, number, start_ns)


def _open() -> _Recorder:
    global _recorder
    with _opening:
        if _recorder is None:
            os.register_at_fork(after_in_child=_forget)
            _recorder = _Recorder(PeerJob.load(Path(os.environ[FOLDER_VARIABLE])))
        return _recorder


def _forget() -> None:
    """Make a fork write into a file of its own."""
    global _recorder, _opening
    _recorder, _opening = None, threading.Lock()


def count_notes(folder: Path) -> int:
    """Return about how many notes there are (threads may leave the last few slots open for a moment), without reading
    them all."""
    return sum(_filled(path) for path in (folder / "notes").iterdir())


def _filled(path: Path) -> int:
    low, high = 0, path.stat().st_size // _NOTE.size
    with path.open("rb", buffering=0) as file:
        while low < high:
            middle = (low + high) // 2
            if _STARTED.unpack(os.pread(file.fileno(), _STARTED.size, middle * _NOTE.size + _STARTED_AT))[0]:
                low = middle + 1
            else:
                high = middle
    return low


def read_notes(folder: Path) -> list[Note]:
    """Return the notes of all processes."""
    noted: list[Note] = []
    for path in (folder / "notes").iterdir():
        with path.open("rb") as file:
            data = file.read((_filled(path) + 1000) * _NOTE.size)
        noted += (
            note
            for note in map(Note._make, _NOTE.iter_unpack(data[: len(data) - len(data) % _NOTE.size]))
            if note.start_ns
        )
    return noted
