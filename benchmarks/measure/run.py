"""Measure `usher run`: memory of one that leads, the commands of Redis while nothing happens, the time from its start
to the first handled message, and the gap after the leading one is killed."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Mapping
from typing import Any

import psutil

from benchmarks.measure.idle import commands_of
from benchmarks.rig.system import Rig
from usher.common.redis.embedded import free_port
from usher.deploy.bench.rig import STREAM, family

_SETTLED_S, _LOOK_S = 5.0, 0.001


def run(seconds: float, kills: int, durable: bool, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run once: one process alone; then three of them, of which the leading one is killed, and started again."""
    with Rig(durable, environ) as rig:
        rig.stream.create_group(b"0-0")
        ports: dict[str, str] = {}
        began = time.monotonic()
        rig.wait_until_done(_begin(rig, ports, "run-1"), 60.0)
        started_s = time.monotonic() - began
        time.sleep(_SETTLED_S)
        before, cpu_before, began = commands_of(rig), sum(rig.cpu().values()), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        idle, cpu = commands_of(rig) - before, sum(rig.cpu().values()) - cpu_before
        [pid] = rig.pids_of_programs().values()
        memory = [member.memory_full_info() for member in family(pid)]
        gaps = _gaps(rig, ports, kills)
        return {
            "start_to_handled_seconds": round(started_s, 2),
            "commands_per_second": round(idle.total() / took, 1),
            "cpu_percent": round(100 * cpu / took, 2),
            "worker_rss_mib": round(memory[-1].rss / 2**20, 1),
            "arbiter_rss_mib": round(memory[0].rss / 2**20, 1),
            "pss_mib": round(sum(one.pss for one in memory) / 2**20, 1),
            "uss_mib": round(sum(one.uss for one in memory) / 2**20, 1),
            "gaps_ms": [round(one, 1) for one in gaps],
            "gap_ms": round(statistics.median(gaps), 1) if gaps else 0.0,
            "longest_gap_ms": round(max(gaps, default=0.0), 1),
            "cpu_seconds": {},
            "redis": rig.redis_version(),
        }


def _begin(rig: Rig, ports: dict[str, str], name: str) -> bytes:
    """Start one, and send a message of a ticket of its own."""
    port = str(free_port())
    ports[port] = name
    rig.start(name, ["run", "usher.deploy.bench.handlers:noop"], {"USHER_BIND": f"127.0.0.1:{port}"})
    return bytes(rig.link.call("XADD", STREAM, "*", "ticket_id", name, "body", ""))


def _gaps(rig: Rig, ports: dict[str, str], kills: int) -> list[float]:
    """Return the milliseconds from the end of the leading one to the next leader."""
    gaps = []
    for name in ("run-2", "run-3") if kills else ():
        rig.wait_until_done(_begin(rig, ports, name), 60.0)
    for _ in range(kills):
        time.sleep(_SETTLED_S)
        led = bytes(rig.link.call("GET", rig.keys.leader))
        port = led.decode().rpartition(":")[2].rstrip("/")
        group, killed = family(rig.pids_of_programs()[ports[port]]), time.monotonic()
        for member in group:
            os.kill(member.pid, signal.SIGKILL)
        while (leads := rig.link.call("GET", rig.keys.leader)) is None or leads == led:
            time.sleep(_LOOK_S)
        gaps.append(1000 * (time.monotonic() - killed))
        psutil.wait_procs(group, 5)
        rig.wait_until_done(_begin(rig, ports, ports.pop(port)), 60.0)
    return gaps
