"""Measure the master's throughput while very many consumers are registered, of which a few do the work."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from benchmarks.rig.system import Rig
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import GROUP, STREAM, BenchFailed, seconds_for, zipf_tickets

_SEED = 1
_PATIENCE_S = 120.0
_HANDLER = "usher.deploy.bench.handlers:noop"
_LEASE_S = 5.0
_MASTER = {"USHER_LEADER_LEASE_SECONDS": str(_LEASE_S)}


def measure_simulated(
    registered: int, messages: int, tickets: int, consumers: int, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once: the same messages without and with ``registered`` consumers beside the working ones, all there before
    the clock starts.

    The others are simulated by one process (``benchmarks.programs.simulated_consumers``); its CPU time is reported
    apart, because here it takes it from the measured programs.
    """
    alone = _run(0, messages, tickets, consumers, durable, environ)
    crowd = _run(registered, messages, tickets, consumers, durable, environ)
    return {
        "registered": registered,
        "messages": messages,
        "tickets": tickets,
        "consumers": consumers,
        "appendonly": durable,
        "messages_per_second": round(messages / crowd["seconds"], 1),
        "floor_per_second": round(messages / alone["seconds"], 1),
        "ratio": round(alone["seconds"] / crowd["seconds"], 4),
        "floor_cpu_seconds": alone["cpu_seconds"],
        **crowd,
    }


def _run(
    registered: int, messages: int, tickets: int, consumers: int, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    with Rig(durable, environ) as rig:
        rig.stream.create_group(b"0-0")
        rig.hold()
        (url,) = rig.begin(1, 0, _HANDLER, _MASTER)
        with SimulatedConsumers(rig, url, registered) as crowd:
            busy = crowd.keep_busy()
            rig.begin_consumers(consumers, _HANDLER, {"USHER_RUN_LOG_LENGTH": "1000"})
            rig.wait_until_registered()
            last_id = rig.fill(zipf_tickets(messages, tickets, _SEED), b"x" * 100)
            before = crowd.cpu()
            seconds, cpu = seconds_for(rig, last_id, busy, registered)
            cpu |= {"crowd": round(crowd.cpu() - before, 2)} if registered else {}
            return {
                "seconds": round(seconds, 3),
                "cpu_seconds": cpu,
                "rss_mib": rig.memory(),
                "redis": rig.redis_version(),
            }


class SimulatedConsumers:
    """The simulated consumers, as a context: they are registered inside the block, and leave at its end."""

    def __init__(self, rig: Rig, master_url: str, count: int) -> None:
        self._rig = rig
        self._count = count
        self._told: dict[str, int] = {}  # the process' last line
        words = [
            sys.executable,
            "-m",
            "benchmarks.programs.simulated_consumers",
            rig.url,
            STREAM,
            GROUP,
            master_url,
            str(count),
        ]
        self._process = (
            subprocess.Popen(words, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, bufsize=0) if count else None
        )

    def __enter__(self) -> SimulatedConsumers:
        if self._count:
            self._wait_for("ready", self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def keep_busy(self) -> bytes:
        """Give each of them its message, and have each asked for its health: a master that has led for a while has its
        connection to every consumer. No master leads afterwards. Returns the last id of these messages."""
        if not self._count:
            return b"0-0"
        last_id = self._rig.fill([b"busy-%d" % number for number in range(self._count)], b"")
        self._rig.release()
        self._wait_for("held", self._count)
        self._wait_for("asked", self._count)
        self._rig.hold()
        time.sleep(_LEASE_S / 3 + 1)  # the master notices when it extends its lease
        return last_id

    def cpu(self) -> float:
        return machine.cpu_seconds(self._process.pid) if self._process is not None else 0.0

    def _wait_for(self, name: str, count: int) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        deadline_s = time.monotonic() + _PATIENCE_S
        while self._told.get(name, 0) < count:
            if not select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise BenchFailed(f"{count} consumers were not {name} in {_PATIENCE_S:.0f} s; last: {self._told}")
            if not (line := process.stdout.readline()):
                raise BenchFailed("the process of the many consumers ended; its words are above")
            self._told = orjson.loads(line)
