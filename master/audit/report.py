"""The report of an audit: one plain value from which terminal, JSON, page and summary are made. The page is one
HTML file with everything in it, which opens offline, runs no script and loads nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from rich.markup import escape

from usher.common.base.log import redacted
from usher.common.base.text import escape_control, label
from usher.common.protocol.keys import Keys
from usher.master.audit.archive import said
from usher.master.audit.findings import CHECKS, AuditFinding, commands, repair
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
    plots: Mapping[str, Any] = field(default_factory=dict)
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
        return cls(*about, tuple(found), tuple(unproven), **more)

    @property
    def verdict(self) -> str:
        if not self.found:
            return "clean"
        return "bad" if any(one.check.severity == "bad" for one in self.found) else "warn"

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
    told = {name: value for name, value in vars(report).items() if name not in ("found", "plots")}
    findings = [_found(report, one) for one in report.found]
    return told | {"verdict": report.verdict, "findings": findings, "checks": list(CHECKS)}


def _found(report: AuditReport, one: AuditFinding) -> dict[str, Any]:
    keys = Keys(one.stream, report.group)
    return {
        "check": one.check.name,
        "severity": one.check.severity,
        "stream": one.stream,
        "count": one.count,
        "suspects": one.suspects,
        "rule": one.check.rule,
        "means": one.check.means,
        "runbook": one.check.section,
        "examples": [
            example._asdict() | {"look": commands(one.check, example, keys), "repair": repair(one.check, example, keys)}
            for example in one.examples
        ],
    }


def summary(report: AuditReport, stream: str) -> dict[str, Any]:
    """Return the summary that is stored in Redis for pages and metrics: small, whatever was found. What was found is of
    this stream, with the first example of each check; the figures are of the whole run."""
    found = [one for one in report.found if one.stream == stream]
    mine = replace(report, found=tuple(found))
    severities = {
        severity: sum(one.count for one in found if one.check.severity == severity) for severity in ("bad", "warn")
    }
    names = ("pending", "executions", "oldest_age_ms", "tickets_pending")
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


# ---- page and terminal -----------------------------------------------------------------------------------------------

_TITLES = {
    "pending": "pending entries",
    "tickets_pending": "tickets with pending entries",
    "oldest_age_ms": "oldest pending entry",
    "entries": "entries in the streams",
    "dead_letters": "dead letters",
    "executions": "executions in the run log",
}
_AGES = ("under 1 s", "1-10 s", "10-60 s", "1-10 min", "10-60 min", "1-24 h", "over a day")
_STYLES = {"clean": "bold green", "warn": "bold yellow", "bad": "bold red"}
_SHOWN_EXAMPLES = 2


def fill(name: str, **values: Any) -> str:
    """Fill a template: page.html, or one that extends it."""
    files = resources.files("usher.master.audit")
    loader = jinja2.FunctionLoader(lambda file: (files / file).read_text(encoding="utf-8"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    environment.filters |= {"label": label, "ms": duration}
    return environment.get_template(name).render(values)


def render(report: AuditReport) -> str:
    return fill(
        "page.html",
        report=report,
        began=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(report.started_ms / 1000)),
        figures=shown_figures(report),
        found=document(report)["findings"],
        checks=[CHECKS[name] for name in report.checks],
        charts=_charts(report),
    )


def shown_figures(report: AuditReport) -> list[tuple[str, str]]:
    told = [(name, title, report.figures[name]) for name, title in _TITLES.items() if name in report.figures]
    return [(title, duration(n) if name.endswith("_ms") or n is None else f"{n:,}") for name, title, n in told]


def write_page(path: Path, page: str) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(page, encoding="utf-8")
    written.replace(path)


# ---- plots -----------------------------------------------------------------------------------------------------------


def _charts(report: AuditReport) -> list[dict[str, Any]]:
    if report.proven:
        return []
    plots, is_one = report.plots, len(report.streams) == 1

    def of(figure: str) -> list[tuple[str, int]]:
        return [(one if is_one else f"{stream} {one}", n) for stream, one, n in plots.get(figure, ())[:20]]

    ages = list(zip(_AGES, plots.get("ages", ()), strict=False))
    return [
        _bars("Age of pending entries", "since they were added", ages),
        _bars("Load by owner", "pending entries; master holds what waits", of("owners")),
        _bars("Tickets with most entries pending", "a few hot ones limit the gain from more consumers", of("tickets")),
    ]


def _bars(title: str, note: str, rows: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return a chart of (label, number) rows: (label, number, width of 100) each."""
    most = max((number for _, number in rows), default=0)
    made = [(_clean(what), f"{n:,}", round(max(0.3, 100 * n / most), 1) if n else 0.0) for what, n in rows if most]
    return {"title": title, "note": note, "bars": made}


def _clean(text: str) -> str:
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


# ---- terminal --------------------------------------------------------------------------------------------------------


def print_audit_report(report: AuditReport, page: Path | None) -> None:
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
            for line in commands(one.check, example, keys):
                screen.print(f"    {_safe(line)}", style="cyan", soft_wrap=True)
            screen.print(f"    {_safe(repair(one.check, example, keys))}", soft_wrap=True)
        left = one.count - min(len(one.examples), _SHOWN_EXAMPLES)
        more = f"{left:,} more: on the page, or with --json, the first {len(one.examples)}. " if left > 0 else ""
        screen.print(f"  {more}What then: deploy/runbook.md, {_safe(one.check.section)}", style="dim", soft_wrap=True)
    if report.unproven:
        screen.print("\n[bold]Not proven[/]")
        for sentence in report.unproven:
            screen.print(f"  {_safe(sentence)}")
    if report.proven:  # a proof has no other figures
        return
    screen.print()
    for name, value in shown_figures(report):
        screen.print(f"{name:<30}{value:>12}")
    screen.print(
        f"\n{len(CHECKS)} checks in {report.seconds:.1f} s (engine {report.figures['engine']})."
        + (f" Page with plots: {_safe(str(page))}" if page else "")
    )


def _safe(text: str) -> str:
    return escape(escape_control(text))
