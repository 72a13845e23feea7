"""Measure the load time of a master's pages while it works: ten thousands of tickets wait, messages come in, and a user
clicks around."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.programs.handlers import WAITING
from usher.deploy.bench.rig import STREAM, BenchFailed, Rig
from usher.deploy.bench.throughput import new_rig

_SETTLES_S, _PATIENCE_S = 3.0, 300.0
#: Waiting tickets per dead letter, and messages that wait after the first one of the ticket that is looked at.
_PER_LETTER, _BEHIND = 10, 500
_PAUSE_S, _COMPUTES_S = 0.02, 0.003
_HEADERS = {"Accept": "text/html, */*;q=0.8"}


def page(
    pending: int, rate: float, gets: int, consumers: int, durable: bool, environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return a row per page and way of asking: with one connection for all its GETs (``keep_alive``), and with a new
    one for each. ``all_p99_ms`` is of all GETs together.

    ``pending`` tickets wait for their next attempt, and ``rate`` messages of other tickets come per second and are done
    at once. The pages are requested in turn, with a short pause, ``gets`` times each way; a time is from before the
    connection to the last byte. ``late_p99_ms`` is the yardstick: the time for which a computation of a few
    milliseconds waited for a core, between the GETs.
    """
    with new_rig(durable, environ) as (rig, _):
        rig.stream.create_group(b"0-0")
        capacity = str(min(100_000, pending // consumers + pending // 2 + 2000))
        given = {"USHER_CAPACITY": capacity, "USHER_LEADER_LEASE_SECONDS": "5", "USHER_LOG_LEVEL": "error"}
        [url] = rig.start_programs(consumers, "benchmarks.programs.handlers:waiting", given)
        rig.release()
        _fill(rig, pending)
        cpu_before, began = rig.cpu(), time.monotonic()
        rig.start("sender", ["send", "--simulate", "1000000000", "--rate", str(rate)], {})
        time.sleep(_SETTLES_S)  # the run log and the pulse have something to show
        host = url.removeprefix("http://")
        pages = list(_pages(rig))
        waits: dict[tuple[str, bool], list[float]] = {}
        sizes: dict[str, int] = {}
        late: list[float] = []
        kept = http.client.HTTPConnection(host, timeout=60)
        for path in pages:  # the very first GET prepares the templates
            _get(kept, path)
        for _ in range(gets):
            for path in pages:
                for keep_alive in (True, False):
                    late.append(_pause())
                    waited_s, sizes[path] = _get(
                        kept if keep_alive else http.client.HTTPConnection(host, timeout=60), path
                    )
                    waits.setdefault((path, keep_alive), []).append(waited_s * 1000)
        kept.close()
        facts = _facts(rig, pending, rate, gets, time.monotonic() - began, cpu_before)
    for name, ms in (("all", [one for some in waits.values() for one in some]), ("late", late)):
        facts |= {f"{name}_{figure}": value for figure, value in _figures(ms).items()}
    return [
        {"page": path, "keep_alive": keep_alive, "bytes": sizes[path], **_figures(ms), **facts}
        for (path, keep_alive), ms in waits.items()
    ]


def _fill(rig: Rig, pending: int) -> None:
    rig.fill([WAITING + b"-%d" % number for number in range(pending)], b"x" * 100)
    rig.link.pipeline([("XADD", STREAM, "*", "body", b"no ticket id")] * (pending // _PER_LETTER))
    rig.fill([WAITING + b"-1"] * _BEHIND, b"x" * 100)
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        tickets, letters, tried = rig.link.pipeline(
            [("HLEN", rig.keys.tickets), ("XLEN", rig.keys.dead), ("HLEN", rig.keys.attempts)]
        )
        if tickets == pending and letters == pending // _PER_LETTER and tried >= pending:
            return
        if time.monotonic() > deadline_s:
            raise BenchFailed(
                f"after {_PATIENCE_S:.0f} s only {tickets} tickets wait, {tried} were tried, {letters} are dead letters"
            )
        time.sleep(0.2)


def _pages(rig: Rig) -> Iterator[str]:
    """Yield every page that can be long."""
    waiting, letter = (
        WAITING.decode(),
        bytes(rig.link.call("XREVRANGE", rig.keys.dead, "+", "-", "COUNT", 1)[0][0]).decode(),
    )
    yield from ("/", "/tickets", f"/tickets?q={waiting}-1", f"/tickets/{waiting}-1", "/tickets/never-sent")
    yield from ("/consumers", "/dead-letters", "/dead-letters?error=nothing+has+this", f"/dead-letters/{letter}")
    yield from ("/rules", "/streams", "/audit", "/doctor", "/actions", f"/api/explain?id={waiting}-1")


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[float, int]:
    """Return seconds, and bytes of the body. The last answer on a connection that is not kept ends it."""
    began = time.perf_counter()
    connection.request("GET", path, headers=_HEADERS)
    answer = connection.getresponse()
    body = answer.read()
    waited_s = time.perf_counter() - began
    if answer.status != 200:
        raise BenchFailed(f"{path}: HTTP {answer.status}")
    return waited_s, len(body)


def _pause() -> float:
    """Pause; return how long we had to wait for a core, in ms."""
    time.sleep(_PAUSE_S)
    began, cpu_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_s < _COMPUTES_S:
        pass
    return (time.perf_counter() - began - _COMPUTES_S) * 1000


def _figures(ms: list[float]) -> dict[str, float]:
    ms = sorted(ms)
    return {
        "p50_ms": round(ms[len(ms) // 2], 1),
        "p99_ms": round(ms[min(len(ms) - 1, int(len(ms) * 0.99))], 1),
        "max_ms": round(ms[-1], 1),
    }


def _facts(rig: Rig, pending: int, rate: float, gets: int, seconds: float, before: dict[str, float]) -> dict[str, Any]:
    """Return the facts that hold for all rows."""
    after = rig.cpu()
    return {
        "pending": pending,
        "rate": rate,
        "gets": gets,
        "seconds": round(seconds, 1),
        "entries": rig.link.call("XLEN", rig.keys.stream),
        "cpu_seconds": {name: round(after[name] - before[name], 2) for name in after},
        "redis": rig.redis_version(),
    }
