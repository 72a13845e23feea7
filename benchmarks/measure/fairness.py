"""Measure what a quiet tenant, and an urgent message, wait behind a flood."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.rig.system import Rig
from usher.common.protocol.run_log import RunRecord, decode
from usher.deploy.bench.rig import STREAM, BenchFailed

_HANDLER = "benchmarks.programs.handlers:taking_its_time"
_PATIENCE_S = 600.0
#: Tickets of a flood; messages of the quiet tenant, and seconds between two of them.
_TICKETS, _QUIET, _EVERY_S = 2000, 10, 0.1
#: Seconds of flood before anything else comes.
_BEFORE_S = 3.0
#: Messages of the urgent one's ticket before it.
_OWN_BEFORE = 20


def fairness(
    flood: int, handler_s: float, slots: int, weight: int, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once: the flood with tenants unknown, then in one stream, then with a stream each; two floods of different
    weights; an urgent message behind the others of its ticket and the flood."""
    load = _Load(handler_s, slots, durable, environ)
    plain, one, each = load.quiet(flood, {}), load.quiet(flood, {"USHER_TENANT_FIELD": "tenant"}), load.streams(flood)
    shares = load.shares(flood // 3, weight)
    urgent = load.urgent(max(1000, flood * 5 // 6))
    return {
        "flood": flood,
        "handler_seconds": handler_s,
        "slots": slots,
        "appendonly": durable,
        "unfair_p99_ms": plain["p99_ms"],
        "p99_ms": one["p99_ms"],
        "streams_p99_ms": each["p99_ms"],
        "flood_seconds": [plain["seconds"], one["seconds"], each["seconds"]],
        "ratio": round(plain["seconds"] / one["seconds"], 3),
        "streams_ratio": round(plain["seconds"] / each["seconds"], 3),
        "weight": weight,
        "share": shares,
        **urgent,
        "redis": plain["redis"],
    }


class _Load:
    """The load of every run: handlers of the same time, one consumer."""

    def __init__(self, handler_s: float, slots: int, durable: bool, environ: Mapping[str, str]) -> None:
        self._handler_s = handler_s
        self._durable, self._environ = durable, environ
        self._settings = {"USHER_CONCURRENCY": str(slots), "USHER_RUN_LOG_LENGTH": "1000000"}

    def quiet(self, flood: int, settings: dict[str, str], streams: int = 1) -> dict[str, Any]:
        """Measure the waits of a quiet tenant's messages that come during a flood, and the flood's time."""
        with Rig(self._durable, self._environ, STREAM if streams == 1 else f"{STREAM}:*") as rig:
            names = [STREAM] * 2 if streams == 1 else [f"{STREAM}:{number}" for number in range(2)]
            last = self._add(rig, names[0], [f"a{n % _TICKETS}" for n in range(flood)], b"a")
            began_s = self._begin(rig, settings)
            for number in range(_QUIET):
                last = self._add(rig, names[1], [f"quiet{number}"], b"q")
                time.sleep(_EVERY_S)
            rig.wait_until_done(last if streams == 1 else b"-%d" % (flood + _QUIET), _PATIENCE_S)
            seconds = time.monotonic() - began_s
            waits = sorted(self._wait_ms(rig, run) for run in _runs(rig) if "quiet" in run.ticket)
            return {"p99_ms": waits[-1], "seconds": round(seconds, 2), "redis": rig.redis_version()}

    def streams(self, flood: int) -> dict[str, Any]:
        """Measure the same with a stream for each tenant."""
        return self.quiet(flood, {"USHER_TENANT_FIELD": "@stream"}, 2)

    def shares(self, messages: int, weight: int) -> float:
        """Return how many messages of a tenant with a weight run for each of one without, while both wait."""
        with Rig(self._durable, self._environ) as rig:
            for n in range(0, messages, 100):
                for tenant in ("a", "b"):
                    last = self._add(rig, STREAM, [f"{tenant}{i}" for i in range(n, n + 100)], tenant.encode())
            self._begin(rig, {"USHER_TENANT_FIELD": "tenant", "USHER_TENANT_WEIGHTS": f"b={weight}"})
            rig.wait_until_done(last, _PATIENCE_S)
            while_both = sorted(_runs(rig), key=lambda run: run.start_us)[:messages]
            count = Counter(run.ticket[0] for run in while_both)
            return round(count["b"] / count["a"], 3)

    def urgent(self, others: int) -> dict[str, Any]:
        """Measure the wait of an urgent message in handler times; ``urgent_own``: messages of its ticket that were
        before it, and not begun, when it came."""
        with Rig(self._durable, self._environ) as rig:
            tickets = [f"o{n % _TICKETS}" for n in range(others)] + ["own"] * _OWN_BEFORE
            self._add(rig, STREAM, tickets, b"a")
            self._begin(rig, {"USHER_PRIORITY_FIELD": "priority"})
            last = self._add(rig, STREAM, ["own"], b"a", priority=9)
            own: list[RunRecord] = []
            deadline_s = time.monotonic() + _PATIENCE_S
            while len(own) <= _OWN_BEFORE:
                if time.monotonic() > deadline_s:
                    raise BenchFailed("the urgent message did not run")
                rig.check()
                time.sleep(0.1)
                own = sorted((run for run in _runs(rig) if run.ticket == "own"), key=lambda run: run.start_us)
            came_us = 1000 * int(last.partition(b"-")[0])
            return {
                "urgent_handler_times": round(self._wait_ms(rig, own[-1]) / (1000 * self._handler_s), 1),
                "urgent_own": sum(run.start_us > came_us for run in own[:-1]),
                "urgent_in_order": [run.id for run in own]
                == sorted((run.id for run in own), key=lambda one: tuple(map(int, one.split("-")))),
            }

    def _begin(self, rig: Rig, settings: dict[str, str]) -> float:
        """Start one consumer, let the flood run for a while, and return when it began."""
        rig.stream.create_group(b"0-0")
        rig.start_programs(1, _HANDLER, self._settings | settings)
        rig.release()
        rig.wait_until_begun()
        began_s = time.monotonic()
        time.sleep(_BEFORE_S)
        return began_s

    def _add(self, rig: Rig, stream: str, tickets: Sequence[str], tenant: bytes, priority: int = 0) -> bytes:
        last = b""
        for at in range(0, len(tickets), 1000):
            fields = ("tenant", tenant, "priority", priority, "seconds", str(self._handler_s))
            commands = [("XADD", stream, "*", "ticket_id", ticket, *fields) for ticket in tickets[at : at + 1000]]
            last = rig.link.pipeline(commands)[-1]
        return last

    def _wait_ms(self, rig: Rig, run: RunRecord) -> float:
        """Return how long after XADD it started. A gathered message's origin tells when it was sent."""
        [entry] = rig.link.call("XRANGE", rig.keys.stream, run.id, run.id)
        sent = entry[1][1] if entry[1][0] == b"usher_from" else entry[0]
        return round(run.start_us / 1000 - int(sent.partition(b"-")[0]), 1)


def _runs(rig: Rig) -> list[RunRecord]:
    """Return all executions."""
    entries = rig.link.call("XRANGE", rig.keys.runs, "-", "+")
    return [run for _, fields in entries for value in fields[1::2] if value[:1] == b"{" for run in decode(value)]
