"""Measure what becomes of messages, and of others, while what their handler needs is away."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.programs.handlers import AWAY
from benchmarks.rig.system import Rig
from usher.common.protocol.run_log import DONE, RunRecord, decode
from usher.deploy.bench.rig import STREAM

_HANDLER = "benchmarks.programs.handlers:needing"
_PATIENCE_S = 300.0
#: Seconds of load before and after the outage; other tickets, and their messages per second.
_AROUND_S, _OTHERS, _RATE = 10.0, 200, 100.0
_STEP_S = 0.02


def outage(
    seconds: float, tickets: int, whom: str, tenants: bool, consumers: int, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once: ``tickets`` get at least one message each while the dependency of ``whom`` (all, or one tenant) refuses
    for so many seconds; others get theirs at a steady rate all the time. ``whom`` nobody: nothing refuses, and what
    would have failed comes at the end all at once, to compare with: so much a backlog alone costs others; none: it
    comes as it does with an outage."""
    with Rig(durable, environ) as rig:
        flag = rig.folder / whom
        settings = {"USHER_CONCURRENCY": "8", "USHER_RUN_LOG_LENGTH": "1000000"}
        settings |= {"USHER_TENANT_FIELD": "tenant"} if tenants else {}
        rig.stream.create_group(b"0-0")
        rig.start_programs(consumers, _HANDLER, settings)
        rig.release()
        away_s, back_s, last = _load(rig, flag, seconds, tickets)
        rig.wait_until_done(last, _PATIENCE_S)
        drained_s = time.time()
        time.sleep(1.0)
        entries = rig.link.call("XRANGE", rig.keys.runs, "-", "+")
        runs = [run for _, fields in entries for value in fields[1::2] if value[:1] == b"{" for run in decode(value)]
        return {
            "outage_seconds": round(back_s - away_s, 1),
            "tickets": tickets,
            "whom": whom,
            "tenant_field": tenants,
            "consumers": consumers,
            "letters": rig.link.call("XLEN", rig.keys.dead),
            **_figures(runs, away_s, back_s, whom),
            "drained_seconds": round(drained_s - back_s, 1),
            "cpu_seconds": {name: round(used, 1) for name, used in rig.cpu().items()},
            "redis": rig.redis_version(),
        }


def _load(rig: Rig, flag: Path, seconds: float, tickets: int) -> tuple[float, float, bytes]:
    """Send, and let the dependency go and come back. Return when it did, and the last message."""
    rate = max(100.0, 1.5 * tickets / seconds)
    began_s, sent, last, away_s, back_s = time.time(), [0, 0], b"", 0.0, 0.0
    while (passed_s := time.time() - began_s) < seconds + 2 * _AROUND_S:
        if not away_s and passed_s >= _AROUND_S:
            flag.touch()
            away_s = time.time()
        if away_s and not back_s and time.time() - away_s >= seconds:
            flag.unlink()
            back_s = time.time()
        commands: list[Sequence[Any]] = []
        for at, (tenant, each, of) in enumerate((("one", rate, tickets), ("others", _RATE, _OTHERS))):
            is_kept = tenant == "one" and flag.name == "nobody" and flag.exists()
            for number in range(sent[at], sent[at] if is_kept else int(each * passed_s)):
                fields = ("ticket_id", f"{tenant}-{number % of}", "tenant", tenant, AWAY, str(rig.folder))
                commands.append(("XADD", STREAM, "*", *fields))
                sent[at] = number + 1
        if commands:
            last = rig.link.pipeline(commands)[-1]
        rig.check()
        time.sleep(_STEP_S)
    return away_s, back_s, last


def _figures(runs: Sequence[RunRecord], away_s: float, back_s: float, whom: str) -> dict[str, Any]:
    of_ticket: dict[str, list[RunRecord]] = defaultdict(list)
    for run in sorted((run for run in runs if run.outcome == DONE), key=lambda run: run.start_us):
        of_ticket[run.ticket].append(run)
    orders = [[tuple(map(int, run.id.split("-"))) for run in each] for each in of_ticket.values()]
    failed = [run for run in runs if run.outcome != DONE]
    # The first failing start of a ticket is how it is seen that it needs what is away; the others are probes.
    probes = len(failed) - len({run.ticket for run in failed})
    concerned = [run for run in runs if run.outcome == DONE and (whom == "all" or run.ticket.startswith("one"))]
    resumed_s = min((run.end_us / 1e6 - back_s for run in concerned if run.end_us / 1e6 > back_s), default=math.nan)
    waited = [run for run in concerned if _sent_s(run) < back_s < run.end_us / 1e6]
    return {
        "failed_starts": len(failed),
        "most_starts_of_one": max((run.attempt for run in runs), default=0),
        "probes_per_minute": round(60 * probes / max(1.0, back_s - away_s), 1),
        "resumed_seconds": round(resumed_s, 2),
        "caught_up_seconds": round(max((run.end_us / 1e6 for run in waited), default=back_s) - back_s, 1),
        "reordered": sum(order != sorted(order) for order in orders),
        "doubled": sum(len(order) - len(set(order)) for order in orders),
        "handled": sum(map(len, orders)),
        "others_p99_ms_before": _p99_ms(runs, away_s - _AROUND_S + 2, away_s),
        "others_p99_ms_during": None if whom == "all" else _p99_ms(runs, away_s, back_s),
        "others_p99_ms_after": _p99_ms(runs, back_s + (5.0 if whom == "all" else 0.0), math.inf),
    }


def _sent_s(run: RunRecord) -> float:
    return int(run.id.partition("-")[0]) / 1000


def _p99_ms(runs: Sequence[RunRecord], from_s: float, until_s: float) -> float | None:
    """Return the 99th percentile of the others' waits, of messages that were sent then."""
    waits = sorted(
        run.start_us / 1000 - 1000 * _sent_s(run)
        for run in runs
        if run.outcome == DONE and run.ticket.startswith("others") and from_s <= _sent_s(run) < until_s
    )
    return round(waits[int(0.99 * len(waits))], 1) if waits else None
