"""``usher doctor``: how this Redis and the ticket stream are set up, and what that means for the promise."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from usher.common.base.errors import RedisTrouble, SettingsError, StartRefused
from usher.common.base.log import redacted
from usher.common.base.text import escape_control, json_line, label
from usher.common.doctor.collector import collect
from usher.common.doctor.judgements import DoctorFacts, DoctorFinding, DoctorSeverity, Holds, examine, promise, worst
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.redis.locate import resolve_redis_url
from usher.common.runtime.settings import CommonSettings, load, options, takes_json

_STYLES = {
    DoctorSeverity.OK: "green",
    DoctorSeverity.UNKNOWN: "cyan",
    DoctorSeverity.WARN: "yellow",
    DoctorSeverity.BAD: "bold red",
}
_ENDS = {
    DoctorSeverity.OK: "all is well",
    DoctorSeverity.UNKNOWN: "nothing critical was seen, but some questions could not be asked",
    DoctorSeverity.WARN: "nothing critical was seen; the warnings say what costs something",
    DoctorSeverity.BAD: "something is critical: the promise does not hold, or work is stuck",
}


@click.command(
    help=(
        "Check Redis and the ticket stream. Exit code 0: nothing is critical; 1: something is; 2: it could not"
        " be asked."
    )
)
@takes_json
@options(CommonSettings)
def doctor(flags: dict[str, Any], as_json: bool) -> None:
    settings = load(CommonSettings, os.environ, flags)
    url = resolve_redis_url(settings)
    facts = _asked(url, settings)
    findings = examine(facts)
    if as_json:
        click.echo(json_line(_document(url, facts, findings)))
    else:
        _print_doctor_report(url, facts, findings)
    sys.exit(1 if worst(findings) is DoctorSeverity.BAD else 0)


def _asked(url: str, settings: CommonSettings) -> DoctorFacts:
    try:
        link = Link(url, "usher:doctor")
    except ValueError as wrong:
        raise SettingsError([f"USHER_REDIS_URL cannot be read: {wrong}"]) from None
    try:
        return collect(
            link, Keys(settings.work_stream, settings.group), int(settings.lease_seconds * 1000), settings.sources
        )
    except RedisTrouble as trouble:
        raise StartRefused(f"USHER_REDIS_URL: {redacted(url)}: {trouble}") from trouble
    finally:
        link.close()


def _document(url: str, facts: DoctorFacts, findings: list[DoctorFinding]) -> dict[str, Any]:
    return {
        "redis": redacted(url),
        "verdict": worst(findings).value,
        "findings": [dataclasses.asdict(finding) | {"severity": finding.severity.value} for finding in findings],
        "promise": [holds._asdict() for holds in promise(facts)],
    }


def _print_doctor_report(url: str, facts: DoctorFacts, findings: list[DoctorFinding]) -> None:
    screen = Console(highlight=False, emoji=False)
    screen.print(_findings_table(redacted(url), findings))
    screen.print()
    screen.print(_promise_table(promise(facts)))
    screen.print()
    verdict = worst(findings)
    counts = ", ".join(
        f"{sum(finding.severity is severity for finding in findings)} {label(severity.value)}"
        for severity in DoctorSeverity
    )
    screen.print(f"[{_STYLES[verdict]}]Verdict: {_ENDS[verdict]}[/] ({counts})")


def _findings_table(url: str, findings: Iterable[DoctorFinding]) -> Table:
    made = _table(f"Doctor: {url}", "", "check", "seen", "means")
    for finding in findings:
        means = finding.means + (
            f"\n-> {finding.do}" if finding.do and finding.severity is not DoctorSeverity.OK else ""
        )
        made.add_row(
            f"[{_STYLES[finding.severity]}]{label(finding.severity.value)}[/]",
            *map(_safe, (finding.check, finding.seen, means)),
        )
    return made


def _promise_table(rows: Iterable[Holds]) -> Table:
    made = _table("The promise on this Redis", "when", "what holds")
    for row in rows:
        made.add_row(*map(_safe, row))
    return made


def _table(title: str, *columns: str) -> Table:
    made = Table(title=_safe(title), title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def _safe(text: str) -> str:
    return escape(escape_control(text, kept="\n"))
