"""Measure the gain of more slots and more processes: handlers that wait, against the most that their slots can do;
handlers that compute, in one process and in several."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.programs.handlers import SLEEP_S
from benchmarks.rig.program import BenchProcess
from benchmarks.rig.system import Rig
from usher.deploy.bench.rig import seconds_for

_TICKETS = 10_000
_SLOTS = Path(__file__).parents[1] / "programs" / "slots.py"
#: How long the yardstick runs, and what its answers are waited for beyond that.
_BARE_S, _PATIENCE_S = 2.0, 30.0
#: Handlers that wait: on a thread each, or all of a process on one event loop.
_WAITING = {"wait": "benchmarks.programs.handlers:sleeping", "await": "benchmarks.programs.handlers:sleeping_async"}


def waiting(
    handlers: str, messages: int, consumers: int, settings: Mapping[str, str], durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once with handlers that sleep, under these ``settings`` of consumers. The floor is the most that the slots of
    all consumers can do when none of them ever waits for a message; beside it the result of as many slots that only
    sleep (``benchmarks.programs.slots``): a sleep takes longer than requested."""
    slots = int(settings["USHER_CONCURRENCY"])
    run = _run(messages, consumers, settings, _WAITING[handlers], durable, environ)
    floor, bare = consumers * slots / SLEEP_S, _bare_per_second(handlers, consumers, slots, environ)
    return {
        "handlers": handlers,
        "slots": slots,
        **run,
        "floor_per_second": floor,
        "ratio": round(run["messages_per_second"] / floor, 4),
        "bare_per_second": round(bare, 1),
        "bare_ratio": round(run["messages_per_second"] / bare, 4),
    }


def _bare_per_second(handlers: str, processes: int, slots: int, environ: Mapping[str, str]) -> float:
    """Return the number of sleeps that end per second, in all processes together."""
    words = [sys.executable, str(_SLOTS), handlers, str(slots), str(_BARE_S), str(SLEEP_S)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bare = [
            stack.enter_context(BenchProcess(f"bare-{number}", words, Path(folder), environ))
            for number in range(processes)
        ]
        for program in bare:
            program.answer(_PATIENCE_S)  # it is ready
        for program in bare:
            program.tell()
        return sum(float(program.answer(_BARE_S + _PATIENCE_S)) for program in bare)


def computing(
    messages: int, processes: int, settings: Mapping[str, str], durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once with handlers that compute, in ``processes``, with one thread each: more would only share the
    interpreter. The floor is the result of one process with its share of the messages, so for as long, before and after
    it: the speed of a machine changes within seconds."""
    share = messages // processes
    before, together, after = (
        _run(
            count,
            number,
            {**settings, "USHER_CONCURRENCY": "1"},
            "benchmarks.programs.handlers:computing",
            durable,
            environ,
        )
        for count, number in ((share, 1), (messages, processes), (share, 1))
    )
    floor = round((before["messages_per_second"] + after["messages_per_second"]) / 2, 1)
    return {
        "handlers": "compute",
        **together,
        "floor_per_second": floor,
        "ratio": round(together["messages_per_second"] / floor, 4),
    }


def _run(
    messages: int, consumers: int, settings: Mapping[str, str], handler: str, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once; every ticket comes equally often: a hot one would have the others wait for it."""
    with Rig(durable, environ) as rig:
        last_id = rig.fill([b"T%d" % (number % _TICKETS) for number in range(messages)], b"x" * 100)
        rig.stream.create_group(b"0-0")
        rig.start_programs(consumers, handler, dict(settings))
        seconds, cpu = seconds_for(rig, last_id)
        return {
            "messages": messages,
            "consumers": consumers,
            "appendonly": durable,
            "messages_per_second": round(messages / seconds, 1),
            "seconds": round(seconds, 3),
            "cpu_seconds": cpu,
            "rss_mib": rig.memory(),
            "redis": rig.redis_version(),
        }
