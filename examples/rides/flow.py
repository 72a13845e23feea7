"""Run the rides once: the API in this process, streamer and consumers as processes that are killed and come back, then
a verdict."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.rides.faults import FaultNotes
from examples.rides.source import Counted, Source
from usher.common.base.errors import UsherError
from usher.common.redis.client import Link
from usher.common.redis.replies import span_of

CONSUMERS = ("totals-1", "totals-2")
_PATIENCE_S = 60.0
_POLL_S = 0.05
_STOP_S = 15.0


class RidesFailed(UsherError):
    """The run did not come to an end."""


@dataclass(frozen=True)
class RidesVerdict:
    """The outcome. ``clean``: every consumer has every ride of the source table exactly once, and reports the same
    total."""

    sent: int
    distance: int
    rolled_back: int
    double_sent_batches: int
    crashes: int
    kills: int
    consumers: tuple[Counted, ...]
    seconds: float

    @property
    def clean(self) -> bool:
        right = {"rides": self.sent, "distance": self.distance}
        return all(
            (one.rides, one.distance, one.lost, one.duplicates, one.told) == (self.sent, self.distance, 0, 0, right)
            for one in self.consumers
        )

    def document(self) -> dict[str, Any]:
        """Return the document for --json."""
        return {
            "sent": self.sent,
            "handled": min(one.rides for one in self.consumers),
            "lost": sum(one.lost for one in self.consumers),
            "duplicates": sum(one.duplicates for one in self.consumers),
            "distance": self.distance,
            "rolled_back": self.rolled_back,
            "double_sent_batches": self.double_sent_batches,
            "crashes": self.crashes,
            "kills": self.kills,
            "consumers": [
                {"name": one.name, "rides": one.rides, "distance": one.distance, "told": one.told}
                for one in self.consumers
            ],
            "seconds": round(self.seconds, 2),
            "clean": self.clean,
        }


class Programs:
    """Processes that are started again when they end; ``with`` ends them."""

    def __init__(self, commands: Mapping[str, Sequence[str]], environ: Mapping[str, str], logs: Path) -> None:
        self._commands = commands
        self._environ = dict(environ)
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Programs:
        for name in self._commands:
            self._start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._running.values():
            program.terminate()
        for program in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_STOP_S)
            if program.poll() is None:
                program.kill()
                program.wait()

    def look(self) -> None:
        """Start again programs that have ended. Raises RidesFailed when a program cannot start."""
        for name, program in list(self._running.items()):
            code = program.poll()
            if code == 2:
                raise RidesFailed(
                    f"{name} does not start; its"
                    f" log:\n{(self._logs / f'{name}.log').read_text(errors='replace')[-2000:]}"
                )
            if code is not None:
                self._start(name)

    def kill(self, name: str) -> None:
        self._running[name].send_signal(signal.SIGKILL)

    def _start(self, name: str) -> None:
        with (self._logs / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                list(self._commands[name]),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def run(
    source: Source,
    link: Link,
    stream: str,
    programs: Programs,
    folder: Path,
    rides: int,
    seed: int,
    check: Callable[[], None],
) -> RidesVerdict:
    """Insert ``rides`` rides, kill everything once half-way, and wait until every consumer has stored the last entry.

    ``check`` is called all the time and may raise.
    """
    began_s, rng = time.monotonic(), random.Random(seed)
    victims = ["streamer", *CONSUMERS]
    kills = 0
    with programs:
        for number in range(1, rides + 1):
            source.add_ride(number, rng)
            if number % 20 == 0:
                check()
                programs.look()
            if (
                victims
                and number >= rides // 2
                and span_of(link, stream) is not None
                and all(source.checkpoint(one, stream) for one in CONSUMERS)
            ):
                programs.kill(victims.pop())
                kills += 1
        while victims:  # they were slow to start
            _wait(
                lambda: all(source.checkpoint(one, stream) for one in CONSUMERS),
                programs,
                check,
                "the consumers have not begun",
            )
            programs.kill(victims.pop())
            kills += 1
        _wait(lambda: not source.staged(), programs, check, "rows are still staged")
        _wait(lambda: _all_stored(source, link, stream), programs, check, "the consumers are not done")
    seconds = time.monotonic() - began_s
    sent, distance = source.totals()
    counts = {name: FaultNotes(folder, name).count for name in ("streamer", *CONSUMERS)}
    return RidesVerdict(
        sent=sent,
        distance=distance,
        rolled_back=source.rolled_back,
        double_sent_batches=counts["streamer"],
        crashes=sum(counts[name] for name in CONSUMERS),
        kills=kills,
        consumers=tuple(source.counted(name, stream) for name in CONSUMERS),
        seconds=seconds,
    )


def _all_stored(source: Source, link: Link, stream: str) -> bool:
    span = span_of(link, stream)
    return span is not None and all(source.checkpoint(name, stream) == span.last_generated for name in CONSUMERS)


def _wait(done: Callable[[], bool], programs: Programs, check: Callable[[], None], problem: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not done():
        check()
        programs.look()
        if time.monotonic() > deadline_s:
            raise RidesFailed(f"{problem} after {_PATIENCE_S:.0f} s")
        time.sleep(_POLL_S)
