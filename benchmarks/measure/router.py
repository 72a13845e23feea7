"""The measurement of ``python -m benchmarks router``: the time of an entry to a subscriber, and the cost of
subscriptions, in both modes."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.programs.router_reader import stream_name
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.router.router import RouterOptions
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import BenchFailed, redis_version

_SEED = 1


def measure(modes: Sequence[str], streams: int, rate: float, seconds: float, idle_s: float) -> list[dict[str, Any]]:
    """Run once per mode, one after the other, on the same streams of one Redis: subscribe, do nothing for ``idle_s``,
    then send entries on an open-loop schedule to streams at random; the wait counts from an entry's due time until a
    subscriber has it."""
    folder = Path(tempfile.mkdtemp(prefix="usher-bench-"))
    try:
        with EmbeddedRedis(folder, durable=False) as server, Link(server.url, "bench", timeout_s=60.0) as link:
            _fill(link, streams)
            return [_run(server, link, mode, streams, rate, seconds, idle_s) for mode in modes]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _RouterProcess:
    """The process with the router."""

    def __init__(self, url: str, mode: str, streams: int, messages: int) -> None:
        words = [sys.executable, "-m", "benchmarks.programs.router_reader", url, mode, str(streams), str(messages)]
        self.process = subprocess.Popen(
            words, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, word: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if word:
            self.process.stdin.write(word.encode() + b"\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise BenchFailed("the router's process ended; its words are above")
        document: dict[str, Any] = orjson.loads(line)
        return document

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def _run(
    server: EmbeddedRedis, link: Link, mode: str, streams: int, rate: float, seconds: float, idle_s: float
) -> dict[str, Any]:
    messages = int(rate * seconds)
    formula_s = _formula_s(streams)
    reader = _RouterProcess(server.url, mode, streams, messages)
    try:
        ready = reader.ask()
        idle_before, redis_before = reader.ask("seen")["cpu_seconds"], machine.cpu_seconds(server.pid)
        time.sleep(idle_s)
        idle_after, redis_idle = reader.ask("seen")["cpu_seconds"], machine.cpu_seconds(server.pid)
        began = time.monotonic()
        late_ms = _send(link, streams, messages, rate)
        deadline_s = time.monotonic() + 2 * formula_s + 30
        while (seen := reader.ask("seen"))["seen"] < messages and time.monotonic() < deadline_s:
            time.sleep(0.1)
        took = time.monotonic() - began
        redis_after = machine.cpu_seconds(server.pid)
        verdict = reader.ask("end")
    finally:
        reader.end()
    return {
        "mode": mode,
        "streams": streams,
        "messages": messages,
        "rate": rate,
        **verdict,
        "sent_late_p99_ms": late_ms,
        "formula_ms": round(formula_s * 1000) if mode == "portable" else None,
        "seconds": round(took, 2),
        "subscribe_seconds": ready["seconds"],
        "bytes_per_subscription": ready["bytes_per_subscription"],
        "cpu_seconds": {
            "router": round(seen["cpu_seconds"] - idle_after, 2),
            "redis": round(redis_after - redis_idle, 2),
        },
        "idle_cpu_percent": {
            "router": round((idle_after - idle_before) / idle_s * 100, 2),
            "redis": round((redis_idle - redis_before) / idle_s * 100, 2),
        },
        "redis": redis_version(link),
    }


def _formula_s(streams: int) -> float:
    """Return the longest wait in seconds that the portable mode promises, with the readers it will have."""
    options = RouterOptions()
    return (
        math.ceil(math.ceil(streams / options.xread_streams) / options.worker_count)
        * (options.xread_block_millis or 0)
        / 1000
    )


def _fill(link: Link, streams: int) -> None:
    for at in range(0, streams, 1000):
        commands = [
            ("XADD", stream_name(number), "*", "n", 0, "due_ns", 0) for number in range(at, min(streams, at + 1000))
        ]
        for reply in link.pipeline(commands):
            if isinstance(reply, Exception):
                raise reply


def _send(link: Link, streams: int, messages: int, rate: float) -> float:
    """Send message i at i / rate; a late one is sent at once, with its due time. Returns the lateness (p99, ms): the
    part of the waits for which this machine was too busy, whatever the router does."""
    rng = random.Random(_SEED)
    names = [stream_name(rng.randrange(streams)) for _ in range(messages)]
    began_ns = time.time_ns()
    sent = 0
    late_ns: list[int] = []
    while sent < messages:
        due = min(messages, int((time.time_ns() - began_ns) / 1e9 * rate) + 1)
        if due <= sent:
            time.sleep(max(0.0, sent / rate - (time.time_ns() - began_ns) / 1e9))
            continue
        now_ns = time.time_ns() - began_ns
        late_ns += [now_ns - int(at / rate * 1e9) for at in range(sent, due)]
        for reply in link.pipeline(
            [("XADD", names[at], "*", "n", at, "due_ns", began_ns + int(at / rate * 1e9)) for at in range(sent, due)]
        ):
            if isinstance(reply, Exception):
                raise reply
        sent = due
    return round(sorted(late_ns)[int(len(late_ns) * 0.99)] / 1e6, 3)
