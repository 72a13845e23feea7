"""The report of an audit or a proof: one plain value, of which terminal, JSON, and the summary for the masters' pages
are made."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from usher.common.base.log import redacted
from usher.common.base.text import escape_control, label
from usher.common.protocol.keys import Keys
from usher.master.audit.archive import said
from usher.master.audit.findings import CHECKS, AuditFinding, look, repair
from usher.master.audit.settings import AuditChoices
from usher.master.insight.formatting import duration

#: The most names of streams in a summary.
_LISTED = 100


@dataclass(frozen=True)
class AuditReport:
    """A run's report. ``unproven``: sentences about what could not be said; ``proven``: of a proof from the archive,
    what it proves of each stream; ``checks``: the names of those that were made."""

    run: str
    started_ms: int
    seconds: float
    redis: str
    streams: tuple[str, ...]
    group: str
    found: tuple[AuditFinding, ...]
    unproven: tuple[str, ...]
    figures: Mapping[str, Any]
    proven: tuple[str, ...] = ()
    checks: tuple[str, ...] = tuple(CHECKS)

    @classmethod
    def of(
        cls, plan: AuditChoices, started_ns: int, found: Sequence[AuditFinding], unproven: Sequence[str], **more: Any
    ) -> AuditReport:
        """Return the report of a run that ends now."""
        started_ms, took_s = started_ns // 1_000_000, round((time.time_ns() - started_ns) / 1e9, 3)
        run = time.strftime("%Y%m%dT%H%M%S", time.gmtime(started_ms / 1000)) + f".{started_ms % 1000:03d}Z"
        about = (run, started_ms, took_s, redacted(plan.redis_url), plan.streams, plan.group)
        worst_first = sorted(found, key=lambda one: (one.check.severity, one.check.name, one.stream))
        return cls(*about, tuple(worst_first), tuple(unproven), **more)

    @property
    def verdict(self) -> str:
        return "clean" if not self.found else min(one.check.severity for one in self.found)

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


def document(report: AuditReport) -> dict[str, Any]:
    told = {name: value for name, value in vars(report).items() if name != "found"}
    return told | {"verdict": report.verdict, "findings": [_found(report, one) for one in report.found]}


def _found(report: AuditReport, one: AuditFinding) -> dict[str, Any]:
    name, severity, section, rule, means, *_ = one.check
    keys = Keys(one.stream, report.group)
    examples = [
        each._asdict() | {"look": look(each, keys), "repair": repair(one.check, each, keys)} for each in one.examples
    ]
    words = {"check": name, "severity": severity, "rule": rule, "means": means, "runbook": section}
    return words | {"stream": one.stream, "count": one.count, "suspects": one.suspects, "examples": examples}


def summary(report: AuditReport, stream: str) -> dict[str, Any]:
    """Return the summary that is stored in Redis for pages and metrics: small, whatever was found. What was found is of
    this stream, with the first example of each check; the figures are of the whole run."""
    found = [one for one in report.found if one.stream == stream]
    counts = {
        severity: sum(one.count for one in found if one.check.severity == severity) for severity in ("bad", "warn")
    }
    return {
        "run": report.run,
        "started_ms": report.started_ms,
        "seconds": report.seconds,
        "streams": list(report.streams[:_LISTED]),
        "verdict": replace(report, found=tuple(found)).verdict,
        "findings": {one.check.name: one.count for one in found},
        "severities": counts,
        "examples": [_found(report, replace(one, examples=one.examples[:1])) for one in found],
        "unproven": len(report.unproven),
        "unproven_said": said(report.unproven),
        **{name: report.figures.get(name) for name in ("pending", "executions", "oldest_age_ms", "tickets_pending")},
    }


_STYLES = {"clean": "bold green", "warn": "bold yellow", "bad": "bold red"}
_SHOWN_EXAMPLES = 2


def print_audit_report(report: AuditReport) -> None:
    """Print verdict, findings with examples, what stays open, and the figures."""
    screen = Console(highlight=False, emoji=False)
    screen.print(f"[{_STYLES[report.verdict]}]Audit {report.run}: {_safe(report.sentence())}[/]")
    for sentence in report.proven:
        screen.print(_safe(sentence))
    for one in report.found:
        more = f" (of {one.suspects:,} suspects)" if one.suspects != one.count else ""
        severity = f"[{_STYLES[one.check.severity]}]{label(one.check.severity)}[/]"
        screen.print(f"\n{severity} [bold]{one.check.name}[/] {_safe(one.stream)}: {one.count:,}{more}")
        screen.print(f"  {_safe(one.check.rule)} {_safe(one.check.means)}", style="dim")
        for example in one.examples[:_SHOWN_EXAMPLES]:
            named = (("entry", example.id), ("ticket", example.ticket), ("owner", example.owner))
            place = " ".join(f"{what} {value}" for what, value in named if value)
            screen.print(f"  {_safe(place)}: {_safe(example.detail)}" if place else f"  {_safe(example.detail)}")
            keys = Keys(one.stream, report.group)
            for line in filter(None, (look(example, keys), repair(one.check, example, keys))):
                screen.print(f"    {_safe(line)}", soft_wrap=True)
        left = one.count - min(len(one.examples), _SHOWN_EXAMPLES)
        more = f"{left:,} more: with --json, the first {len(one.examples)}. " if left > 0 else ""
        screen.print(f"  {more}What then: deploy/runbook.md, {_safe(one.check.section)}", style="dim", soft_wrap=True)
    if report.unproven:
        screen.print("\n[bold]Not proven[/]")
        for sentence in report.unproven:
            screen.print(f"  {_safe(sentence)}")
    screen.print()
    for name, value in report.figures.items():
        shown = duration(value) if name.endswith("_ms") else f"{value:,}" if isinstance(value, int) else str(value)
        screen.print(f"{name.removesuffix('_ms').replace('_', ' '):<30}{shown:>12}")
    screen.print(f"\n{len(report.checks)} checks in {report.seconds:.1f} s.")


def _safe(text: str) -> str:
    return escape(escape_control(text))
