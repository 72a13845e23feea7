"""``usher doctor``: how this Redis and the ticket stream are set up, and what that means for the promise; ``usher
acl``: the users of Redis that Usher's programs need, and the scripts that masters load for them; and ``usher token``:
tokens for the HTTP API and the page."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from usher.common.base.durations import option
from usher.common.base.errors import RedisTrouble, SettingsError, StartRefused
from usher.common.base.log import redacted
from usher.common.base.text import escape_control, json_line, label
from usher.common.doctor.collector import collect
from usher.common.doctor.judgements import DoctorFacts, DoctorFinding, DoctorSeverity, examine, promise, report, worst
from usher.common.http.credentials import FILE_ROLES, Role, line_of, new_token
from usher.common.protocol.keys import Keys
from usher.common.redis.acl import acl_file, scripts_for_others
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


@click.command()
@takes_json
@options(CommonSettings)
def doctor(flags: dict[str, Any], as_json: bool) -> None:
    """Check Redis and the ticket stream. Exit code 0: nothing is critical; 1: something is; 2: it could not be
    asked."""
    settings = load(CommonSettings, os.environ, flags)
    url = resolve_redis_url(settings)
    keys, lease_ms = Keys(settings.work_stream, settings.group), int(settings.lease_seconds * 1000)
    try:
        link = Link(url, "usher:doctor")
    except ValueError as wrong:
        raise SettingsError([f"USHER_REDIS_URL cannot be read: {wrong}"]) from None
    try:
        with contextlib.closing(link):
            facts = collect(link, keys, lease_ms, settings.sources)
    except RedisTrouble as trouble:
        raise StartRefused(f"USHER_REDIS_URL: {redacted(url)}: {trouble}") from trouble
    findings = examine(facts)
    if as_json:
        click.echo(json_line(report(redacted(url), facts, findings)))
    else:
        _print_doctor_report(redacted(url), facts, findings)
    sys.exit(1 if worst(findings) is DoctorSeverity.BAD else 0)


def _print_doctor_report(url: str, facts: DoctorFacts, findings: list[DoctorFinding]) -> None:
    screen = Console(highlight=False, emoji=False)
    found = _table(f"Doctor: {url}", "", "check", "seen", "means")
    for finding in findings:
        do = f"\n-> {finding.do}" if finding.do and finding.severity is not DoctorSeverity.OK else ""
        told = map(_safe, (finding.check, finding.seen, finding.means + do))
        found.add_row(f"[{_STYLES[finding.severity]}]{label(finding.severity.value)}[/]", *told)
    holds = _table("The promise on this Redis", "when", "what holds")
    for row in promise(facts).items():
        holds.add_row(*map(_safe, row))
    screen.print(found, "", holds, "", sep="\n")
    verdict, seen = worst(findings), Counter(finding.severity for finding in findings)
    counts = ", ".join(f"{seen[severity]} {label(severity.value)}" for severity in DoctorSeverity)
    screen.print(f"[{_STYLES[verdict]}]Verdict: {_ENDS[verdict]}[/] ({counts})")


def _table(title: str, *columns: str) -> Table:
    made = Table(title=_safe(title), title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def _safe(text: str) -> str:
    return escape(escape_control(text, kept="\n"))


@click.command()
@option(
    "--server",
    "Version of Redis: 7 or later, or 6.2, which cannot keep a user from scripts of its own, nor tell keys apart.",
    click.Choice(["7", "6.2"]),
    "7",
)
@option(
    "--load loads",
    "Print nothing; load the scripts of this version, as the user of masters, before consumers are upgraded.",
    is_flag=True,
)
@options(CommonSettings)
def acl(server: str, loads: bool, flags: dict[str, Any]) -> None:
    """Print an ACL file for Redis: a user for each kind of program, with no more rights than it needs. Nothing is
    changed."""
    settings = load(CommonSettings, os.environ, flags)
    if loads:
        names = scripts_for_others()
        with Link(resolve_redis_url(settings), "acl") as link:
            refused = link.load_for_others(names)
        if refused:
            raise StartRefused(f"Redis refuses to load scripts: {refused[0]}")
        click.echo(f"{len(names)} scripts are loaded")
        return
    sources = settings.sources
    fed = () if sources is None else (*sources.names, *sources.patterns)
    click.echo(acl_file(settings.work_stream, settings.group, fed, selectors=server != "6.2"), nl=False)


@click.group()
def token() -> None:
    """Make tokens for the HTTP API and the page."""


@token.command("new")
@click.argument("role", type=click.Choice([role.value for role in FILE_ROLES]))
@click.argument("name")
@takes_json
def new(role: str, name: str, as_json: bool) -> None:
    """Make a token for ROLE (viewer, operator or consumer) and NAME, and the line for USHER_TOKENS_FILE."""
    made = new_token()
    try:
        line = line_of(Role(role), name, made)
    except ValueError as wrong:
        raise click.UsageError(f"NAME: {wrong}") from None
    if as_json:
        click.echo(json_line({"role": role, "name": name, "token": made, "line": line}))
        return
    click.echo(f"{made}\n")
    click.echo(
        f"Give it to {name} as USHER_API_TOKEN; it is not kept anywhere. Add this line to USHER_TOKENS_FILE of every"
        " master:\n",
        err=True,
    )
    click.echo(line)
