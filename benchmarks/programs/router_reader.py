"""A process of ``python -m benchmarks router``: a stream router with many subscriptions, which notes when entries come.

``python -m benchmarks.programs.router_reader URL MODE STREAMS MESSAGES``: subscribes from now on, prints the cost,
waits for lines, and prints what it received.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import orjson

from usher.common.protocol.message import EntryView
from usher.common.router.router import NOW, Mode, StreamRouter, Subscription
from usher.deploy.bench.rig import rss_mib

_PATIENCE_S = 300.0


def stream_name(number: int) -> str:
    """Return the key of a stream of this benchmark."""
    return f"bench:router:{number}"


class RouterDeliveries:
    """Deliveries: their times (ns), and the number of each message."""

    def __init__(self, messages: int) -> None:
        self.waits: list[int] = []
        self.seen = bytearray(messages)

    def take(self, _subscription: Subscription, entries: Sequence[EntryView]) -> None:
        now = time.time_ns()
        for entry in entries:
            _, number, _, due_ns = entry.flat
            self.waits.append(now - int(due_ns))
            self.seen[int(number)] += 1

    def verdict(self) -> dict[str, Any]:
        waits = sorted(self.waits) or [0]
        return {
            "p50_ms": round(waits[len(waits) // 2] / 1e6, 3),
            "p99_ms": round(waits[int(len(waits) * 0.99)] / 1e6, 3),
            "max_ms": round(waits[-1] / 1e6, 3),
            "missed": self.seen.count(0),
            "doubled": sum(count > 1 for count in self.seen),
        }


def main(url: str, mode: str, streams: str, messages: str) -> None:
    notes = RouterDeliveries(int(messages))
    router = StreamRouter(url, mode=Mode(mode), name="bench")
    router.start()
    count = int(streams)
    keys = [stream_name(number).encode() for number in range(count)]
    gc.collect()
    before_mib = _rss()
    began = time.monotonic()
    subscriptions = router.subscribe_all(keys, NOW, on_entries=notes.take, timeout_s=_PATIENCE_S)
    keys.clear()
    while router.mode is not Mode.PORTABLE and router.metrics()["queued"]:
        time.sleep(0.05)
    gc.collect()
    _write_router_result(
        {
            "seconds": round(time.monotonic() - began, 2),
            "bytes_per_subscription": round((_rss() - before_mib) * 2**20 / count),
        }
    )
    for line in sys.stdin:
        if line.strip() == "seen":
            _write_router_result(
                {"seen": len(notes.waits), "cpu_seconds": sum(resource.getrusage(resource.RUSAGE_SELF)[:2])}
            )
        else:
            break
    counters = router.metrics()
    _write_router_result(
        {
            **notes.verdict(),
            "mode": router.mode.value,
            "connections": counters["connections"],
            "reads": counters["reads"],
        }
    )
    router.stop()
    del subscriptions


def _rss() -> float:
    return rss_mib(os.getpid())


def _write_router_result(document: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(document) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
