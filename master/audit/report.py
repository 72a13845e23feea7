"""The report of an audit: one plain value from which terminal, JSON, history, page and summary are made."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from usher.common.protocol.keys import Keys
from usher.master.audit.commits import ProvenSpan, said
from usher.master.audit.findings import CHECKS, AuditFinding, AuditSeverity, commands, repair

#: The most names of streams in a summary; the most runs of a trend.
_LISTED, _RUNS = 100, 60
#: The figures that the history keeps.
_KEPT = (
    *("pending", "tickets_pending", "oldest_age_ms", "dead_letters", "executions", "unsuccessful", "repeated"),
    *("execution_p99_ms", "slowest_recovery_ms"),
)


@dataclass(frozen=True)
class AuditReport:
    """A run's report. ``unproven``: sentences about what could not be said; ``trend``: earlier runs, oldest first, from
    the history; ``proven``: sentences about the spans of a proof from the archive; ``spans``: stream -> these, oldest
    first. ``checks``: the names of those that were made."""

    run: str
    started_ms: int
    seconds: float
    redis: str
    streams: tuple[str, ...]
    group: str
    found: tuple[AuditFinding, ...]
    unproven: tuple[str, ...]
    figures: Mapping[str, Any]
    plots: Mapping[str, Any] = field(default_factory=dict)
    trend: tuple[Mapping[str, Any], ...] = ()
    proven: tuple[str, ...] = ()
    spans: Mapping[str, Sequence[ProvenSpan]] = field(default_factory=dict)
    checks: tuple[str, ...] = tuple(CHECKS)

    @property
    def verdict(self) -> str:
        if not self.found:
            return "clean"
        return "bad" if any(one.check.severity is AuditSeverity.BAD for one in self.found) else "warn"

    @property
    def exit_code(self) -> int:
        return 1 if self.found else 0

    def sentence(self) -> str:
        if self.verdict == "clean":
            if not any(self.figures.get(name) for name in ("entries", "pending", "executions")):
                return "nothing found, for there is nothing: no message and no execution in any of the streams"
            return (
                "nothing found: whatever could be checked is as promised"
                if self.unproven
                else "clean: the promise held"
            )
        count, kinds = sum(one.count for one in self.found), len({one.check.name for one in self.found})
        found = "1 finding" if count == 1 else f"{count:,} findings" + (f" of {kinds} kinds" if kinds > 1 else "")
        return found + ("; the promise was broken" if self.verdict == "bad" else "")


def run_name(started_ms: int) -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(started_ms / 1000)) + f".{started_ms % 1000:03d}Z"


def document(report: AuditReport) -> dict[str, Any]:
    return {
        "run": report.run,
        "started_ms": report.started_ms,
        "seconds": report.seconds,
        "redis": report.redis,
        "streams": list(report.streams),
        "group": report.group,
        "verdict": report.verdict,
        "findings": [_found(report, one) for one in report.found],
        "unproven": list(report.unproven),
        "proven": list(report.proven),
        "spans": {stream: [one._asdict() for one in spans] for stream, spans in report.spans.items()},
        "figures": dict(report.figures),
        "checks": list(CHECKS),
    }


def _found(report: AuditReport, one: AuditFinding) -> dict[str, Any]:
    keys = Keys(one.stream, report.group)
    return {
        "check": one.check.name,
        "severity": one.check.severity.value,
        "stream": one.stream,
        "count": one.count,
        "suspects": one.suspects,
        "rule": one.check.rule,
        "means": one.check.means,
        "runbook": one.check.section,
        "examples": [
            {
                "id": example.id,
                "ticket": example.ticket,
                "owner": example.owner,
                "detail": example.detail,
                "look": commands(one.check, example, keys),
                "repair": repair(one.check, example, keys),
            }
            for example in one.examples
        ],
    }


def summary(report: AuditReport, stream: str) -> dict[str, Any]:
    """Return the summary that is stored in Redis beside ``stream`` for pages and metrics: small, whatever was found.

    ``verdict``, ``findings``, ``severities`` and ``examples`` (the first one of each check) are of this stream; the
    figures are of the whole run.
    """
    found = [one for one in report.found if one.stream == stream]
    mine = replace(report, found=tuple(found))
    severities = {
        severity.value: sum(one.count for one in found if one.check.severity is severity) for severity in AuditSeverity
    }
    names = ("pending", "executions", "oldest_age_ms", "tickets_pending", "repeated")
    return {
        "run": report.run,
        "started_ms": report.started_ms,
        "seconds": report.seconds,
        "streams": list(report.streams[:_LISTED]),
        "verdict": mine.verdict,
        "findings": {one.check.name: one.count for one in found},
        "severities": severities,
        "examples": [_found(report, one) | {"examples": _found(report, one)["examples"][:1]} for one in found],
        "unproven": len(report.unproven),
        "unproven_said": said(report.unproven),
        **{name: report.figures.get(name) for name in names},
    }


def remembered(file: Path, report: AuditReport) -> AuditReport:
    """Add a run to the history, a line of JSON for each, and return the report with the trend of the last ones."""
    row = {name: getattr(report, name) for name in ("run", "started_ms", "seconds", "verdict", "streams")}
    row |= {"findings": sum(one.count for one in report.found), **{name: report.figures.get(name) for name in _KEPT}}
    row["found"] = [{"stream": one.stream, "check": one.check.name, "findings": one.count} for one in report.found]
    trend, problems, lines = [], [], []
    try:
        with file.open("ab+") as history:
            history.seek(0)
            lines = history.read().splitlines()[1 - _RUNS :]
            history.write(orjson.dumps(row) + b"\n")
    except OSError as failed:
        problems.append(f"this run could not be added to the history: {failed}")
    for line in lines:
        try:
            trend.append(orjson.loads(line))
        except ValueError:
            problems.append(f"a line of {file} cannot be read, the trend is without it: {line[:80]!r}")
    return replace(report, trend=(*trend, row), unproven=(*report.unproven, *problems))
