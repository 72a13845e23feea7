"""Measure calls: many in flight from one process, beside as many that each wait at a list of their own (BLPOP); and the
time from ``message.progress`` to who follows, here and over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

import orjson
import psutil

from benchmarks.peers.blpop import asking
from benchmarks.programs.handlers import PARTS, REPLY_TO
from benchmarks.rig.system import Rig
from usher import AsyncProducer, Producer
from usher.deploy.bench.rig import GROUP, STREAM, BenchFailed

_PATIENCE_S = 120.0


def calls(count: int, parts: int, durable: bool, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run once."""
    found: dict[str, Any] = {"calls": count, "cpu_seconds": {}}
    with Rig(durable, environ) as rig:
        rig.link.call("CONFIG", "SET", "maxclients", count + 1000)
        rig.stream.create_group(b"0-0")
        [master] = rig.start_programs(1, "benchmarks.programs.handlers:answering", {})
        rig.release()
        for kind in ("call", "blpop"):
            words = [sys.executable, "-m", "benchmarks.measure.calls", rig.url, kind, str(count)]
            told = subprocess.run(words, capture_output=True, check=False)
            if told.returncode:
                raise BenchFailed(f"{kind}: {told.stderr.decode()}")
            found |= {f"{kind}_{name}": value for name, value in orjson.loads(told.stdout).items()}
        producer = Producer(rig.url, STREAM, group=GROUP)
        here = [1000 * (time.time() - sent_s) for sent_s in producer.stream("parts", {PARTS: str(parts)}, _PATIENCE_S)]
        uid, over_http = uuid.uuid4().hex, list[float]()
        producer.send_followed("parts", {PARTS: str(parts)}, uid)
        following = http.client.HTTPConnection(urlsplit(master).netloc, timeout=_PATIENCE_S)
        following.request("GET", f"/api/messages/{uid}/events")
        with following.getresponse() as answered:
            for line in answered:
                if line.startswith(b"data: ") and isinstance(sent_s := orjson.loads(line[6:])["json"], float):
                    over_http.append(1000 * (time.time() - sent_s))
        for who, waits in (("part", here), ("http_part", over_http)):
            found |= {f"{who}_{name}": value for name, value in _percentiles(waits).items()}
        return found | {"redis": rig.redis_version()}


def _percentiles(waits_ms: list[float]) -> dict[str, float]:
    if not waits_ms:
        raise BenchFailed("nothing came")
    waits_ms.sort()
    return {f"p{part}_ms": round(waits_ms[(len(waits_ms) - 1) * part // 100], 1) for part in (50, 99)}


async def _in_flight(count: int, one: Callable[[int], Coroutine[Any, Any, Any]], others: int) -> dict[str, Any]:
    """Have so many calls in flight at once; the memory and the connections of this process are those it has at most."""
    process, waits, most = psutil.Process(), list[float](), [0, 0]
    before = process.memory_info().rss

    async def timed(number: int) -> None:
        began = time.perf_counter()
        await one(number)
        waits.append(1000 * (time.perf_counter() - began))
        if number % 1000 == 0:
            most[:] = max(most[0], len(process.net_connections("all"))), max(most[1], process.memory_info().rss)

    began = time.perf_counter()
    await asyncio.gather(*map(timed, range(count)))
    seconds, mib = time.perf_counter() - began, round((most[1] - before) / 2**20, 1)
    return {"seconds": round(seconds, 2), "connections": most[0] - others, "more_mib": mib, **_percentiles(waits)}


async def _measure(url: str, kind: str, count: int) -> dict[str, Any]:
    others = len(psutil.Process().net_connections("all"))  # the event loop's own
    if kind == "call":
        producer = AsyncProducer(url, STREAM, group=GROUP)
        await producer.call("first", {}, _PATIENCE_S)
        return await _in_flight(count, lambda one: producer.call(f"{one}", {}, _PATIENCE_S), others)
    ask = asking(url, STREAM, REPLY_TO, count, _PATIENCE_S)
    return await _in_flight(count, ask, others)


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.stdout.buffer.write(orjson.dumps(asyncio.run(_measure(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
    sys.stdout.flush()
    os._exit(0)
