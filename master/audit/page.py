"""The audit's page: one HTML file with everything in it. It opens offline, runs no script and loads nothing."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from usher.common.base.text import label
from usher.master.audit import plots
from usher.master.audit.findings import CHECKS, AuditFinding
from usher.master.audit.report import AuditReport, document

#: So many tickets with findings are listed.
_TICKETS = 50
#: From here on times are told in hours.
_HOURS_MS = 7_200_000
_TITLES = {
    "pending": "pending entries",
    "tickets_pending": "tickets with pending entries",
    "oldest_age_ms": "oldest pending entry",
    "entries": "entries in the streams",
    "dead_letters": "dead letters",
    "executions": "executions in the run log",
    "unsuccessful": "executions not successful",
    "crashed": "executions ended by a crash",
    "repeated": "started again under a new owner",
    "succeeded_again": "done twice by that (allowed)",
    "execution_p50_ms": "an execution takes, median",
    "execution_p99_ms": "an execution takes, 99 %",
    "slowest_recovery_ms": "slowest recovery",
}


def render(report: AuditReport) -> str:
    """Return the page as text."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["label"] = label
    template = environment.from_string(
        (resources.files("usher.master.audit") / "page.html").read_text(encoding="utf-8")
    )
    return template.render(
        report=report,
        began=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(report.started_ms / 1000)),
        figures=shown_figures(report),
        found=[one | {"known": _known(one["examples"])} for one in document(report)["findings"]],
        checks=[CHECKS[name] for name in report.checks],
        charts=plots.charts(report),
        lines=plots.lines(report),
        histories={stream: (plots.time_line(spans), spans) for stream, spans in report.spans.items()},
        tickets=_by_ticket(report),
        moment=plots.moment,
    )


def _known(examples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns that at least one of the examples has: a finding about owners has no entries."""
    return [name for name in ("id", "ticket", "owner") if any(example[name] for example in examples)]


def _by_ticket(report: AuditReport) -> list[tuple[str, str, list[AuditFinding], str]]:
    """Return (stream, ticket, findings about it, what lists its executions), those with the most findings first."""
    of: dict[tuple[str, str], list[AuditFinding]] = {}
    for one in report.found:
        for ticket in dict.fromkeys(example.ticket for example in one.examples if example.ticket):
            of.setdefault((one.stream, ticket), []).append(one)
    rows = sorted(of.items(), key=lambda row: -len(row[1]))[:_TICKETS]
    return [
        (
            stream,
            ticket,
            found,
            shlex.join(("usher", "audit", "--streams", stream, "--group", report.group, "runs", "--ticket", ticket)),
        )
        for (stream, ticket), found in rows
    ]


def shown_figures(report: AuditReport) -> list[tuple[str, str]]:
    """Return (name, value) pairs for people; what was not looked at has none."""
    of = report.figures
    return [(title, _format_figure(name, of[name])) for name, title in _TITLES.items() if name in of]


def _format_figure(name: str, value: float | int | None) -> str:
    if value is None:
        return "-"
    if name.endswith("_ms") and value >= _HOURS_MS:
        return f"{value / 3_600_000:,.1f} h"
    if name.endswith("_ms"):
        return f"{value / 1000:,.1f} s" if value >= 1000 else f"{value:,.1f} ms"
    return f"{value:,}"


def write(path: Path, report: AuditReport) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(render(report), encoding="utf-8")
    written.replace(path)
