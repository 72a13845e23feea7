"""Measure the proof of a simulated history, step by step, with a prover that is killed now and then; and check that
each step was proven once, and everything that is wrong in the history told once."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.proof.history import STEP_MS, History, begun
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.deploy.bench.rig import BenchFailed, cpu_seconds, family, redis_version

_KEYS = Keys("bench_proof", "bench_group")


@dataclass(frozen=True)
class Scale:
    """The size of a simulation: ``executions`` in all, in ``steps`` of five minutes, and how (``history.History``);
    ``kills`` of the prover; ``engine``: what proves."""

    executions: int
    steps: int
    tickets: int
    hot: float
    faults: int
    kills: int
    engine: str


class _Prover:
    """A prover as a process, begun when it is asked. ``most_spilt``: the most bytes that DuckDB had in ``folder`` at
    once for want of memory."""

    def __init__(self, environ: Mapping[str, str], folder: Path, memory_mib: int) -> None:
        self._environ, self._folder, self._memory_mib, self.most_spilt = environ, folder, memory_mib, 0
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, what: str, kill_after_s: float | None = None) -> dict[str, Any] | None:
        """Return its answer, with what it cost, a start included; None when it was killed before it came."""
        cpu, began_s = cpu_seconds(self._process.pid) if self._process else 0.0, time.monotonic()
        process = self._begun()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(what.encode() + b"\n")
        process.stdin.flush()
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            self.end()
            return None
        answer = self._line(process)
        seconds = time.monotonic() - began_s
        return answer | {"seconds": seconds, "cpu_seconds": cpu_seconds(process.pid) - cpu}

    def _begun(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.proof", str(self._memory_mib)],
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self._line(self._process)
        return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        while not select.select([process.stdout], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):
                spilt = sum(file.stat().st_size for file in self._folder.glob("reading/*/*"))
                self.most_spilt = max(self.most_spilt, spilt)
        line = process.stdout.readline()
        if not line:
            raise BenchFailed("the prover has ended; its words are above")
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    def end(self) -> None:
        """Kill it, and its Java."""
        if self._process is not None:
            members = family(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for member in members:
                with contextlib.suppress(Exception):
                    member.kill()
            self._process.wait()
            for pipe in filter(None, (self._process.stdin, self._process.stdout)):
                with contextlib.suppress(OSError):
                    pipe.close()
            self._process = None


def _spilt_by_spark(log: Path) -> int:
    """Return the bytes that Spark wrote to disk for want of memory, as its log of events has them."""
    lines = (line for file in log.rglob("*") if file.is_file() for line in file.read_bytes().splitlines())
    ended = (orjson.loads(line) for line in lines if b'"SparkListenerTaskEnd"' in line and line.endswith(b"}"))
    return sum((one.get("Task Metrics") or {}).get("Disk Bytes Spilled", 0) for one in ended)


def measure(
    folder: Path, scale: Scale, cores: int, memory_mib: int, environ: Mapping[str, str], progress: Callable[[], object]
) -> dict[str, Any]:
    """Return the document of one history; ``progress`` is called after each step. Raises BenchFailed when a step was
    proven twice or not at all, or something was told wrongly."""
    dice = random.Random(scale.executions)
    killed_at = set(dice.sample(range(scale.steps), min(scale.kills, scale.steps)))
    with EmbeddedRedis(folder / "server", durable=False) as server:
        link = Link(server.url, "bench", timeout_s=120.0)
        prover = _Prover(_environ(environ, server.url, folder, scale.engine, cores), folder, memory_mib)
        archive = folder / "archive"
        begun(link, _KEYS)
        first_ms = time.time_ns() // 1_000_000 - scale.steps * STEP_MS  # it ends about now
        each = scale.executions // scale.steps
        history = History(_KEYS, archive, each, scale.tickets, scale.hot, scale.faults, first_ms)
        try:
            steps, made, usual_s = [], 0, 5.0
            for step in range(scale.steps):
                made += history.add(link, step)
                if step in killed_at:
                    prover.ask("step", dice.uniform(0, 1.2 * usual_s))
                answer = prover.ask("step")
                assert answer is not None
                if scale.engine == "local":
                    prover.end()
                _check(answer["total"] == made, f"step {step}: {answer['total']} of {made} executions are proven")
                _check(not answer["unproven"], f"step {step}: {answer['unproven']}")
                steps.append(answer | {"cold": scale.engine == "spark" and (step == 0 or step in killed_at)})
                usual_s = answer["seconds"]
                progress()
            told = {tuple(orjson.loads(line)) for line in (folder / "told").read_bytes().splitlines()}
            _check(sorted(told) == sorted(history.seeded), f"told {sorted(told)} of {sorted(history.seeded)}")
            whole = prover.ask("again")
            assert whole is not None
            _check(whole["total"] == made, f"the whole has {whole['total']} of {made} executions")
            _check(whole["standing"] == len(history.seeded), f"the whole has {whole['standing']} findings")
            prover.end()
            spilt_mib = round((prover.most_spilt + _spilt_by_spark(folder / "events")) / 2**20, 1)
            return _document(scale, steps, whole, made, len(told)) | {
                "spilt_mib": spilt_mib,
                "memory_mib": memory_mib,
                "redis": redis_version(link),
            }
        finally:
            prover.end()
            link.close()


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BenchFailed(otherwise)


def _environ(environ: Mapping[str, str], url: str, folder: Path, engine: str, cores: int) -> dict[str, str]:
    base = {name: value for name, value in environ.items() if not name.startswith("USHER_")}
    events = folder / "events"
    events.mkdir()
    told = f"spark.eventLog.enabled true\nspark.eventLog.compress false\nspark.eventLog.dir {events.as_uri()}\n"
    (folder / "spark-defaults.conf").write_text(told)
    return base | {
        "SPARK_CONF_DIR": str(folder),
        "USHER_REDIS_URL": url,
        "USHER_GROUP": _KEYS.group,
        "USHER_TICKET_STREAM": _KEYS.stream,
        "USHER_AUDIT_DIR": str(folder),
        "USHER_AUDIT_ENGINE": engine,
        "USHER_AUDIT_SPARK_MASTER": f"local[{cores}]",
    }


def _document(scale: Scale, steps: list[dict[str, Any]], whole: dict[str, Any], made: int, told: int) -> dict[str, Any]:
    warm = [one for one in steps if not one["cold"]]
    third = max(1, len(warm) // 3)
    costs = {
        name: {
            "first_third": round(statistics.median(one[name] for one in warm[:third]), 2),
            "last_third": round(statistics.median(one[name] for one in warm[-third:]), 2),
            "largest": round(max(one[name] for one in warm), 2),
            "whole": round(whole[name], 2),
        }
        for name in ("seconds", "cpu_seconds")
    }
    return {
        "executions": made,
        "steps": scale.steps,
        "tickets": scale.tickets,
        "hot": scale.hot,
        "kills": scale.kills,
        "engine": scale.engine,
        "findings": told,
        **costs,
    }
