"""Run the rides once: the API in this process, streamer and consumers as processes that are killed and come back; every
second what the consumers have counted is reconciled with the source table; then a verdict."""

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

from examples.rides.faults import FaultNotes, RolledBack
from examples.rides.source import Counted, Source, create_app
from usher.common.base.errors import UsherError
from usher.common.redis.client import Link
from usher.common.redis.replies import span_of

CONSUMERS = ("totals-1", "totals-2")
_PATIENCE_S = 60.0
_POLL_S = 0.05
_STOP_S = 15.0
_RECONCILE_S = 1.0
_ROLLED_BACK, _AGAIN = 0.1, 0.1
_RIDERS = 40


class RidesFailed(UsherError):
    """The run did not come to an end."""


@dataclass(frozen=True)
class RidesVerdict:
    """The outcome. ``clean``: every consumer has every ride of the source table exactly once, reports the same total,
    and no reconciliation on the way found it wrong. ``sent_again``: requests that were sent once more although they had
    been answered."""

    sent: int
    distance: int
    rolled_back: int
    sent_again: int
    reconciled: int
    wrong: int
    double_sent_batches: int
    crashes: int
    kills: int
    consumers: tuple[Counted, ...]
    seconds: float

    @property
    def clean(self) -> bool:
        right = {"rides": self.sent, "distance": self.distance}
        return not self.wrong and all(
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
            "sent_again": self.sent_again,
            "reconciled": self.reconciled,
            "wrong": self.wrong,
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


class Riders:
    """Callers of the API. Each tenth call fails after all of its work, and is made again; after each tenth answer, as
    if it had been lost, too."""

    def __init__(self, source: Source, seed: int) -> None:
        self._rng = random.Random(seed)
        app = create_app(source, self._fail)
        app.logger.disabled = True
        self._client = app.test_client()
        self.rolled_back = self.sent_again = 0

    def _fail(self) -> None:
        if self._rng.random() < _ROLLED_BACK:
            raise RolledBack

    def ride(self, number: int) -> None:
        ride = {"rider": f"rider-{self._rng.randrange(_RIDERS)}", "distance": self._rng.randrange(1, 100_000)}
        while True:
            answer = self._client.post("/rides", json=ride, headers={"Idempotency-Key": f"ride-{number}"})
            if answer.status_code == 500:
                self.rolled_back += 1
            elif answer.status_code != 201:
                raise RidesFailed(f"the API answered {answer.status_code}: {answer.text[:200]}")
            elif self._rng.random() < _AGAIN:
                self.sent_again += 1
            else:
                return


class Reconciler:
    """Compares, every second, what the consumers have counted with the source table."""

    def __init__(self, source: Source, stream: str) -> None:
        self._source, self._stream = source, stream
        self._next_s = 0.0
        self.done = self.wrong = 0

    def look(self) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _RECONCILE_S
            self.done += 1
            self.wrong += sum(self._source.counted(name, self._stream).wrong for name in CONSUMERS)


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
    """Make ``rides`` rides, kill everything once half-way, and wait until every consumer has stored the last entry.

    ``check`` is called all the time and may raise.
    """
    began_s, riders, reconciler = time.monotonic(), Riders(source, seed), Reconciler(source, stream)
    victims = ["streamer", *CONSUMERS]
    kills = 0

    def look() -> None:
        check()
        programs.look()
        reconciler.look()

    def have_begun() -> bool:
        return all(source.checkpoint(one, stream) for one in CONSUMERS)

    with programs:
        for number in range(1, rides + 1):
            riders.ride(number)
            if number % 20 == 0:
                look()
            if victims and number >= rides // 2 and span_of(link, stream) is not None and have_begun():
                programs.kill(victims.pop())
                kills += 1
        while victims:  # they were slow to start
            _wait(have_begun, look, "the consumers have not begun")
            programs.kill(victims.pop())
            kills += 1
        _wait(lambda: not source.staged(), look, "rows are still staged")
        _wait(lambda: _all_stored(source, link, stream), look, "the consumers are not done")
    seconds = time.monotonic() - began_s
    sent, distance = source.totals()
    counts = {name: FaultNotes(folder, name).count for name in ("streamer", *CONSUMERS)}
    return RidesVerdict(
        sent=sent,
        distance=distance,
        rolled_back=riders.rolled_back,
        sent_again=riders.sent_again,
        reconciled=reconciler.done,
        wrong=reconciler.wrong,
        double_sent_batches=counts["streamer"],
        crashes=sum(counts[name] for name in CONSUMERS),
        kills=kills,
        consumers=tuple(source.counted(name, stream) for name in CONSUMERS),
        seconds=seconds,
    )


def _all_stored(source: Source, link: Link, stream: str) -> bool:
    span = span_of(link, stream)
    return span is not None and all(source.checkpoint(name, stream) == span.last_generated for name in CONSUMERS)


def _wait(done: Callable[[], bool], look: Callable[[], None], problem: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not done():
        look()
        if time.monotonic() > deadline_s:
            raise RidesFailed(f"{problem} after {_PATIENCE_S:.0f} s")
        time.sleep(_POLL_S)
