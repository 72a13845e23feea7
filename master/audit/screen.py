"""Print the audit's report on a terminal: one screen."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from usher.common.base.text import escape_control, label
from usher.common.protocol.keys import Keys
from usher.master.audit.findings import CHECKS, AuditSeverity, commands, repair
from usher.master.audit.page import shown_figures
from usher.master.audit.report import AuditReport

_STYLES = {
    "clean": "bold green",
    "warn": "bold yellow",
    "bad": "bold red",
    AuditSeverity.BAD: "bold red",
    AuditSeverity.WARN: "yellow",
}
_SHOWN_EXAMPLES = 2


def print_audit_report(report: AuditReport, page: Path | None) -> None:
    """Print verdict, findings with examples, what stays open, and the figures."""
    screen = Console(highlight=False, emoji=False)
    screen.print(f"[{_STYLES[report.verdict]}]Audit {report.run}: {_safe(report.sentence())}[/]")
    for sentence in report.proven:
        screen.print(_safe(sentence))
    for one in report.found:
        more = f" (of {one.suspects:,} suspects)" if one.suspects != one.count else ""
        severity = f"[{_STYLES[one.check.severity]}]{label(one.check.severity.value)}[/]"
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
    shown = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    shown.add_column()
    shown.add_column(justify="right")
    for name, value in shown_figures(report):
        shown.add_row(name, value)
    screen.print()
    screen.print(shown)
    screen.print(
        f"\n{len(CHECKS)} checks in {report.seconds:.1f} s{_by(report)}."
        + (f" Page with plots: {_safe(str(page))}" if page else "")
    )


def _by(report: AuditReport) -> str:
    return f" (engine {report.figures['engine']})" if "engine" in report.figures else ""


def _safe(text: str) -> str:
    """Return a text from Redis, which may hold anything, without control characters and markup."""
    return escape(escape_control(text))
