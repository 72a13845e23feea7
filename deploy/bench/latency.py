"""Measure the time from a message's due time to the start of its handler, and to a bare consumer of the same Redis."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from usher.deploy.bench.bare import GROUP
from usher.deploy.bench.handlers import FOLDER_VARIABLE, read_waits
from usher.deploy.bench.rig import STREAM, BenchFailed, Rig, zipf_tickets
from usher.deploy.bench.throughput import new_rig, send_on_schedule, warm_up

_SEED = 1
_BARE = Path(__file__).with_name("bare.py")


def latency(
    rate: float, seconds: float, tickets: int, payload: int, consumers: int, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once: messages on an open-loop schedule; the wait counts from a message's due time to the start of its
    handler. Then, the system having ended, the same schedule once more to as many bare consumers
    (``usher.deploy.bench.bare``)."""
    count = int(rate * seconds)
    names = zipf_tickets(count, tickets, _SEED)
    with new_rig(durable, environ) as (rig, folder):
        waits_folder, bare_folder = folder / "waits", folder / "bare"
        waits_folder.mkdir()
        bare_folder.mkdir()
        rig.stream.create_group(b"0-0")
        rig.start_programs(consumers, "usher.deploy.bench.handlers:timed", {FOLDER_VARIABLE: str(waits_folder)})
        rig.release()
        warm_up(rig, payload)
        cpu_before, began = rig.cpu(), time.monotonic()
        last_id = send_on_schedule(rig, names, b"x" * payload, rate)
        rig.wait_until_done(last_id, 60.0)
        took = time.monotonic() - began
        cpu_after = rig.cpu()
        rig.end_programs()
        _send_to_bare(rig, names, payload, rate, consumers, bare_folder)
        version = rig.redis_version()
        waits, bare = _figures(waits_folder, count), _figures(bare_folder, count)
    return {
        "messages": count,
        "rate": rate,
        "tickets": tickets,
        "payload_bytes": payload,
        "consumers": consumers,
        "appendonly": durable,
        **waits,
        **{f"bare_{name}": figure for name, figure in bare.items()},
        "p50_ratio": round(waits["p50_ms"] / bare["p50_ms"], 2),
        "p99_ratio": round(waits["p99_ms"] / bare["p99_ms"], 2),
        "seconds": round(took, 2),
        "cpu_seconds": {name: round(cpu_after[name] - cpu_before[name], 2) for name in cpu_after},
        "redis": version,
    }


def _figures(folder: Path, count: int) -> dict[str, float]:
    """Return the figures of the times in ``folder``; some may be left in the buffers of a process."""
    waits = sorted(read_waits(folder))
    if len(waits) < count * 0.9:
        raise BenchFailed(f"only {len(waits)} of {count} messages were timed")
    p50, p99, most = (
        round(wait / 1e6, 3) for wait in (waits[len(waits) // 2], waits[int(len(waits) * 0.99)], waits[-1])
    )
    return {"timed": len(waits), "p50_ms": p50, "p99_ms": p99, "max_ms": most}


def _send_to_bare(rig: Rig, names: Sequence[bytes], payload: int, rate: float, processes: int, folder: Path) -> None:
    rig.link.call("XGROUP", "CREATE", STREAM, GROUP, "$")
    words = [sys.executable, str(_BARE), rig.url, STREAM]
    workers = [
        subprocess.Popen([*words, f"b{number}", str(folder / f"b{number}")], stdout=subprocess.PIPE)
        for number in range(processes)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        send_on_schedule(rig, list(names), b"x" * payload, rate)
        time.sleep(1.0)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.communicate()
