"""Measure throughput: each measurement runs real processes and returns a plain document."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from usher.common.protocol.registration import parse
from usher.deploy.bench.handlers import DUE_FIELD, FOLDER_VARIABLE, WARM, read_waits
from usher.deploy.bench.rig import STREAM, BenchFailed, Rig, bare_consumers, floor_seconds, zipf_tickets

_SEED = 1
_PATIENCE_S = 300.0


def throughput(
    messages: int,
    tickets: int,
    payload: int,
    consumers: int,
    no_aof: bool,
    no_run_log: bool,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """Run once: the raw floor, then the system, on the same stream of ``messages`` that is there before the clock
    starts.

    The clock runs from the first entry read to the last one acknowledged (the pending list is empty).
    """
    names = zipf_tickets(messages, tickets, _SEED)
    with new_rig(not no_aof, environ) as (rig, _):
        last_id = rig.fill(names, b"x" * payload)
        floor_s = floor_seconds(rig, consumers, messages)
        rig.stream.create_group(b"0-0")
        run_log = {"USHER_RUN_LOG_LENGTH": "0" if no_run_log else "1000"}
        rig.start_programs(consumers, "usher.deploy.bench.handlers:noop", run_log)
        seconds, cpu = seconds_for(rig, last_id)
        return {
            "messages": messages,
            "tickets": tickets,
            "payload_bytes": payload,
            "consumers": consumers,
            "appendonly": not no_aof,
            "run_log": not no_run_log,
            "messages_per_second": round(messages / seconds, 1),
            "floor_per_second": round(messages / floor_s, 1),
            "ratio": round(floor_s / seconds, 4),
            "seconds": round(seconds, 3),
            "cpu_seconds": cpu,
            "rss_mib": rig.memory(),
            "redis": rig.redis_version(),
        }


def seconds_for(rig: Rig, last_id: bytes, first: bytes = b"0-0", held: int = 0) -> tuple[float, dict[str, float]]:
    """Release the programs; return the seconds until all above ``first`` up to ``last_id`` is done, except ``held``,
    and the CPU seconds that it took."""
    before = rig.cpu()
    rig.release()
    rig.wait_until_begun(first)
    began = time.monotonic()
    rig.wait_until_done(last_id, _PATIENCE_S, held)
    seconds, after = time.monotonic() - began, rig.cpu()
    if rig.link.call("XLEN", rig.keys.dead):
        raise BenchFailed("messages became dead letters")
    return seconds, {name: round(after[name] - before[name], 2) for name in after}


def warm_up(rig: Rig, payload: int) -> None:
    """Send messages that are not measured, until all of them are done: to all consumers, by the same way as the
    measured ones. Ask each for its health, as a master does a few seconds after the start: that makes its page."""
    tickets = [b"%s-%d" % (WARM, number % 40) for number in range(200)]
    rig.wait_until_done(send_on_schedule(rig, tickets, b"x" * payload, 200.0), 60.0)
    for stored in rig.link.call("HVALS", rig.keys.consumers):
        urlopen(parse(b"", stored).health_url, timeout=60.0).close()


def send_on_schedule(
    rig: Rig, names: list[bytes], payload: bytes, rate: float, idle: Callable[[float], object] = time.sleep
) -> bytes:
    """Send message i at i / rate, however slow the system is; a late message is sent at once, with its due time.
    ``idle`` is called in between, with the seconds that are left until then."""
    began_ns = time.time_ns()
    sent, last = 0, b""
    while sent < len(names):
        due = min(len(names), int((time.time_ns() - began_ns) / 1e9 * rate) + 1)
        if due <= sent:
            idle(min(0.05, max(0.0, sent / rate - (time.time_ns() - began_ns) / 1e9)))
            continue
        commands = [
            ("XADD", STREAM, "*", "ticket_id", names[at], DUE_FIELD, began_ns + int(at / rate * 1e9), "body", payload)
            for at in range(sent, due)
        ]
        sent, last = due, rig.link.all_of(commands)[-1]
    return last


@contextlib.contextmanager
def new_rig(durable: bool, environ: Mapping[str, str], streams: str = STREAM) -> Iterator[tuple[Rig, Path]]:
    with (
        tempfile.TemporaryDirectory(prefix="usher-bench-", ignore_cleanup_errors=True) as folder,
        Rig(Path(folder), durable, environ, streams) as rig,
    ):
        yield rig, Path(folder)


def medians(runs: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in names}


def latency(
    rate: float, seconds: float, tickets: int, payload: int, consumers: int, no_aof: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once: messages on an open-loop schedule; the wait counts from a message's due time to the start of its
    handler. Then, the system having ended, the same schedule once more to as many bare consumers
    (``usher.deploy.bench.bare``)."""
    count = int(rate * seconds)
    names = zipf_tickets(count, tickets, _SEED)
    with new_rig(not no_aof, environ) as (rig, folder):
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
        files = [str(bare_folder / f"b{number}") for number in range(consumers)]
        with bare_consumers(rig, "$", [(Path(file).name, file) for file in files]):
            send_on_schedule(rig, names, b"x" * payload, rate)
            time.sleep(1.0)
        version = rig.redis_version()
        waits, bare = _figures(waits_folder, count), _figures(bare_folder, count)
    return {
        "messages": count,
        "rate": rate,
        "tickets": tickets,
        "payload_bytes": payload,
        "consumers": consumers,
        "appendonly": not no_aof,
        **waits,
        **{f"bare_{name}": figure for name, figure in bare.items()},
        "p50_ratio": round(waits["p50_ms"] / bare["p50_ms"], 2),
        "p99_ratio": round(waits["p99_ms"] / bare["p99_ms"], 2),
        "seconds": round(took, 2),
        "cpu_seconds": {name: round(cpu_after[name] - cpu_before[name], 2) for name in cpu_after},
        "redis": version,
    }


def _figures(folder: Path, count: int) -> dict[str, float]:
    waits = sorted(read_waits(folder))
    if len(waits) < count * 0.9:
        raise BenchFailed(f"only {len(waits)} of {count} messages were timed")
    p50, p99, most = (
        round(wait / 1e6, 3) for wait in (waits[len(waits) // 2], waits[int(len(waits) * 0.99)], waits[-1])
    )
    return {"timed": len(waits), "p50_ms": p50, "p99_ms": p99, "max_ms": most}
