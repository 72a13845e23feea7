"""The measurement of ``python -m benchmarks audit``: an audit, started as a program, of its own Redis that holds N
pending entries, or M executions.

All data are as masters and consumers would have left them, so the audit must find nothing; a finding ends the
measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import psutil

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.runtime.own_command import usher_command
from usher.deploy.bench.rig import BenchFailed, cpu_seconds, family, redis_version
from usher.master.policy.explain import FENCES_PER_MS

GROUP = "bench_group"
_CHUNK, _PER_TICKET, _OWNERS, _PER_RECORD = 5_000, 10, 8, 100
_LEASE_MS = 24 * 3_600_000
_POLL_S = 0.25
#: A chunk: entries, delivered to one owner, and their records in the index, or acknowledged. Test data: 10 million
#: XADDs over the wire would take minutes.
_FILL = """
local stream, tickets, group, owner, chunk = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local size, each, fence = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[7]
local body, ids, all = string.rep('x', tonumber(ARGV[6])), {}, {}
for n = 0, size - 1 do
  local t = n % (size / each)
  all[n + 1] = redis.call('XADD', stream, '*', 'ticket_id', 'T' .. chunk .. '-' .. t, 'body', body)
  ids[t] = (ids[t] or '') .. ' ' .. all[n + 1]
end
redis.call('XREADGROUP', 'GROUP', group, owner, 'COUNT', size, 'STREAMS', stream, '>')
if fence ~= '' then
  for t, list in pairs(ids) do redis.call('HSET', tickets, 'T' .. chunk .. '-' .. t, owner .. ' ' .. fence .. list) end
else
  for n = 1, size, 1000 do redis.call('XACK', stream, group, unpack(all, n, math.min(n + 999, size))) end
end
return all
"""


def _begin(link: Link, keys: Keys) -> list[str]:
    """Make a stream with living owners, and return these."""
    link.call("XGROUP", "CREATE", keys.stream, GROUP, "0", "MKSTREAM")
    owners = [f"c{number}:1" for number in range(_OWNERS)]
    link.call("HSET", keys.counters, "generation", 1)
    for owner in owners:
        link.call("SET", keys.lease(owner), "live", "PX", _LEASE_MS)
        link.call("HSET", keys.consumers, owner.partition(":")[0], "1 uuid 1 1 - http://127.0.0.1:1")
    return owners


def fill_pending(link: Link, keys: Keys, entries: int, payload: int) -> None:
    """Add ``entries`` pending entries to one stream, ten per ticket."""
    owners, fence = _begin(link, keys), time.time_ns() // 1_000_000 * FENCES_PER_MS
    for owner in owners:  # what it held before was read
        link.call("XADD", keys.inbox(owner), "*", "fence", fence + 1)
    for chunk in range(-(-entries // _CHUNK)):
        size = min(_CHUNK, entries - chunk * _CHUNK)
        sizes = (size - size % _PER_TICKET, _PER_TICKET, payload)
        link.call("EVAL", _FILL, 2, keys.stream, keys.tickets, GROUP, owners[chunk % _OWNERS], chunk, *sizes, fence)


def fill_runs(link: Link, keys: Keys, executions: int, payload: int) -> None:
    """Add ``executions`` of finished entries to a run log, as consumers write it."""
    owners = _begin(link, keys)
    for chunk in range(-(-executions // _CHUNK)):
        sizes, owner = (_CHUNK, _PER_TICKET, payload), owners[chunk % _OWNERS]
        fence, now_us = time.time_ns() // 1_000_000 * FENCES_PER_MS, time.time_ns() // 1000
        ids = link.call("EVAL", _FILL, 2, keys.stream, keys.tickets, GROUP, owner, chunk, *sizes, "")
        for at in range(0, _CHUNK, _PER_RECORD):
            record = {
                "consumer": owner,
                "ids": [entry_id.decode() for entry_id in ids[at : at + _PER_RECORD]],
                "tickets": [f"T{chunk}-{n % (_CHUNK // _PER_TICKET)}" for n in range(at, at + _PER_RECORD)],
                "fences": [fence] * _PER_RECORD,
                "attempts": [1] * _PER_RECORD,
                "start_us": [now_us + n for n in range(at, at + _PER_RECORD)],
                "end_us": [now_us + n + 1 for n in range(at, at + _PER_RECORD)],
            }
            link.call("XADD", keys.runs, "*", "batch", orjson.dumps(record))


def measure(
    folder: Path,
    entries: int,
    executions: int,
    streams: int,
    payload: int,
    cores: list[int],
    environ: Mapping[str, str],
    memory_mib: int,
) -> Any:
    """Fill once, then run one audit per number of cores. Yields a document each."""
    names = [f"bench{number}" for number in range(streams)]
    with EmbeddedRedis(folder / "server", durable=False) as server:
        link = Link(server.url, "bench", timeout_s=120.0)
        for name in names:
            if entries:
                fill_pending(link, Keys(name, GROUP), entries // streams, payload)
            else:
                fill_runs(link, Keys(name, GROUP), executions // streams, payload)
        version, used = redis_version(link), int(link.call("INFO", "memory").partition(b"used_memory:")[2].split()[0])
        link.close()
        for number in cores:
            yield _audit(folder, server, names, number, environ, memory_mib) | {
                "entries": entries,
                "executions": executions,
                "streams": streams,
                "payload_bytes": payload,
                "redis_mib": used >> 20,
                "redis": version,
            }


def _audit(
    folder: Path, server: EmbeddedRedis, names: list[str], cores: int, environ: Mapping[str, str], memory_mib: int
) -> dict[str, Any]:
    base = {name: value for name, value in environ.items() if not name.startswith("USHER_")}
    base |= {"USHER_REDIS_URL": server.url, "USHER_GROUP": GROUP, "USHER_AUDIT_DIR": str(folder / "audit")}
    base |= {"USHER_LEASE_SECONDS": "3600", "USHER_AUDIT_SPARK_MASTER": f"local[{cores}]"}
    base |= {"USHER_RUN_LOG_LENGTH": "10000000"}
    redis_before, began = cpu_seconds(server.pid), time.monotonic()
    words = ("--streams", ",".join(names), "--memory", str(memory_mib), "--json")
    process = subprocess.Popen(usher_command("audit", *words), env=base, stdout=subprocess.PIPE)
    # Pin all its threads and processes, Java's compiler too: otherwise "one core" would be two half-used ones.
    os.sched_setaffinity(process.pid, sorted(os.sched_getaffinity(0))[:cores])
    highest: dict[str, float] = {}
    cpu = 0.0
    while process.poll() is None:
        cpu = max(cpu, cpu_seconds(process.pid))
        for kind, size in _sizes(process.pid).items():
            highest[kind] = max(highest.get(kind, 0.0), size)
        time.sleep(_POLL_S)
    seconds = time.monotonic() - began
    assert process.stdout is not None
    said = process.stdout.read()
    process.stdout.close()
    if process.returncode != 0:
        raise BenchFailed(
            f"the audit ended with exit code {process.returncode}: {said[:2000].decode(errors='replace')}"
        )
    told = json.loads(said)
    figures = told["figures"]
    return {
        "cores": cores,
        "seconds": round(seconds, 2),
        "audit_seconds": told["seconds"],
        "entries_per_second": round(figures["pending"] / figures["reading_seconds"], 1) if figures["pending"] else None,
        "executions_per_second": round(figures["executions"] / seconds, 1) if figures["executions"] else None,
        "reading_seconds": figures["reading_seconds"],
        "rss_mib": {kind: round(size, 1) for kind, size in highest.items()},
        "cpu_seconds": {"audit": round(cpu, 2), "redis": round(cpu_seconds(server.pid) - redis_before, 2)},
        "memory_mib": memory_mib,
    }


def _sizes(pid: int) -> dict[str, float]:
    """Return resident MiB: the driver's Python, its JVM, and the Python workers together."""
    found = {"driver": 0.0, "jvm": 0.0, "workers": 0.0}
    for member in family(pid):
        with contextlib.suppress(psutil.Error):
            kind = "jvm" if member.name() == "java" else "driver" if member.pid == pid else "workers"
            found[kind] += member.memory_info().rss / 2**20
    return found
