"""What an audit says: one plain value that terminal, JSON, history, page and the summary in Redis are made from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.keys import Keys
from master.audit.findings import CHECKS, Found, Severity, commands, in_order, repair


@dataclass(frozen=True)
class Report:
    """One run. ``unproven``: sentences about what could not be said; ``trend``: earlier runs, oldest first, from the history."""

    run: str
    started_ms: int
    seconds: float
    redis: str
    streams: tuple[str, ...]
    group: str
    found: tuple[Found, ...]
    unproven: tuple[str, ...]
    figures: Mapping[str, Any]
    plots: Mapping[str, Any] = field(default_factory=dict)
    trend: tuple[Mapping[str, Any], ...] = ()

    @property
    def verdict(self) -> str:
        """``clean``, or the worst severity."""
        if not self.found:
            return "clean"
        return "bad" if any(one.check.severity is Severity.BAD for one in self.found) else "warn"

    @property
    def exit_code(self) -> int:
        return 1 if self.found else 0

    def sentence(self) -> str:
        """The verdict in words."""
        if self.verdict == "clean":
            return "nothing found: what could be looked at is as promised" if self.unproven else "clean: the promise held"
        kinds = len({one.check.name for one in self.found})
        return f"{sum(one.count for one in self.found):,} findings of {kinds} kinds" + ("; the promise was broken" if self.verdict == "bad" else "")


def document(report: Report) -> dict[str, Any]:
    """The JSON document."""
    return {
        "run": report.run,
        "started_ms": report.started_ms,
        "seconds": report.seconds,
        "redis": report.redis,
        "streams": list(report.streams),
        "group": report.group,
        "verdict": report.verdict,
        "findings": [_found(report, one) for one in in_order(report.found)],
        "unproven": list(report.unproven),
        "figures": dict(report.figures),
        "checks": list(CHECKS),
    }


def _found(report: Report, one: Found) -> dict[str, Any]:
    keys = Keys(one.stream, report.group)
    return {
        "check": one.check.name,
        "severity": one.check.severity.value,
        "stream": one.stream,
        "count": one.count,
        "suspects": one.suspects,
        "rule": one.check.rule,
        "means": one.check.means,
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


def summary(report: Report) -> dict[str, Any]:
    """What is stored in Redis for pages and metrics: small, whatever was found."""
    counts: dict[str, int] = {}
    for one in report.found:
        counts[one.check.name] = counts.get(one.check.name, 0) + one.count
    names = ("pending", "executions", "oldest_age_ms", "tickets_pending", "repeated")
    return {
        "run": report.run,
        "started_ms": report.started_ms,
        "seconds": report.seconds,
        "verdict": report.verdict,
        "findings": counts,
        "unproven": len(report.unproven),
        **{name: report.figures.get(name) for name in names},
    }
