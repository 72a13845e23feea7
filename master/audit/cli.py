"""``usher audit``: prove from pending lists, index and run log that the promise held, or show where it did not.

Of a schedule each run is a process of its own, so that no Java holds memory between two of them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import orjson

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.base.text import json_line, label
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import name_of
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.redis.client import CommandRefused, Link, check_reachable
from usher.common.redis.endpoints import CLUSTER, mode, near
from usher.common.redis.locate import resolve_redis_url
from usher.common.redis.replies import pairs
from usher.common.runtime.own_command import usher_command
from usher.common.runtime.settings import load, options
from usher.master.audit.archive_cli import archive, prove, reconcile, telling
from usher.master.audit.commits import noted_history
from usher.master.audit.findings import CHECKS
from usher.master.audit.sessions import session, with_link
from usher.master.audit.settings import AuditChoices, AuditSettings
from usher.master.cli.shared import console, fitted, print_json, table
from usher.master.insight.formatting import duration, moment

_GLOB = frozenset("*?[")
#: So much of a run log may be new before it is proven, whatever the time: the rest is for the run itself.
_FULL = 1 / 3
#: So many looks at the run logs between two runs.
_LOOKS = 20
_RUN = ("stream", "consumer", "ticket", "id", "fence", "attempt", "start_us", "end_us", "outcome")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(
    invoke_without_command=True,
    help="""Audit the pending lists and the run log of a running system: in this process, or with Spark on this machine
    or on a cluster.

    `usher audit checks` lists the checks. Exit code 0: nothing found, 1: findings, 2: the audit could not be done. The
    page with plots and the history lie in USHER_AUDIT_DIR.""",
)
@_JSON
@click.option(
    "--streams",
    metavar="NAMES",
    default="",
    help=(
        "Streams to audit in one run, comma separated; patterns too, as in orders,tickets:* [default: the one that"
        " USHER_TICKET_STREAM works on]."
    ),
)
@click.option(
    "--engine",
    type=click.Choice(("auto", "local", "spark")),
    help="What executes the checks: spark, local (DuckDB in this process), or auto (USHER_AUDIT_ENGINE).",
)
@click.option(
    "--every",
    type=click.FloatRange(0.1, 43_200),
    metavar="MINUTES",
    help="Do it again and again until stopped; `audit --every 5 prove` sooner, too, when the run log fills up.",
)
@click.option(
    "--memory",
    "memory_mib",
    type=click.IntRange(512),
    metavar="MIB",
    default=1024,
    show_default=True,
    help="Memory of what executes the checks, in MiB (Java's heap); what does not fit goes to disk.",
)
@click.option("--py-files", default="", metavar="ZIP", help="Usher, for Spark's executors on other machines.")
@click.option("--sink", default="default", show_default=True, help="The SqlSink's name in USHER_AUDIT_SINK_URL.")
@options(AuditSettings)
def audit(
    flags: dict[str, Any], as_json: bool, streams: str, engine: str | None, every: float | None, **chosen: Any
) -> None:
    given = flags if engine is None else flags | {"audit_engine": engine}
    settings = AuditChoices(**load(AuditSettings, os.environ, given).model_dump(), chosen_streams=streams, **chosen)
    context = click.get_current_context()
    if every and context.invoked_subcommand in (None, "archive", "prove"):
        proves = context.invoked_subcommand == "prove"
        run_every(every * 60, functools.partial(is_filling, settings) if proves else None)
    if any(map(is_pattern, settings.streams)) and context.invoked_subcommand != "checks":
        found = expand(resolve_redis_url(settings), settings.streams, settings.group)
        settings = settings.model_copy(update={"chosen_streams": ",".join(found)})
    context.obj = settings
    if context.invoked_subcommand is None:
        sys.exit(_once(settings, as_json))


def _once(settings: AuditChoices, as_json: bool) -> int:
    """Run one audit. Returns the exit code."""
    url = resolve_redis_url(settings)
    check_reachable(url)
    with telling("looking at Redis") as tell, session(settings, url, os.environ, tell) as (engine, reading):
        report = _audited(engine, reading, settings, url, tell)
    from usher.master.audit import page
    from usher.master.audit.report import document, remembered

    page_file: Path | None = settings.folder / "audit.html"
    report = remembered(settings.folder / "history.jsonl", report)
    try:
        page.write(settings.folder / "audit.html", report)
    except OSError as failed:
        page_file = None
        click.echo(f"usher: the page could not be written: {failed}", err=True)
    if as_json:
        click.echo(json_line(document(report) | {"page": str(page_file) if page_file else None}))
    else:
        page.print_audit_report(report, page_file)
    return report.exit_code


def _audited(engine: Any, reading: Path, settings: AuditChoices, url: str, tell: Callable[[str], None]) -> Any:
    from usher.master.audit.job import AuditRun, plan_of
    from usher.master.audit.report import summary

    report = AuditRun(engine, plan_of(settings, url), reading, tell).run()
    problems, spans = [], {}
    for stream in settings.streams:
        try:
            spans[stream] = with_link(near(url, stream), noted_history, Keys(stream, settings.group))
        except (StartRefused, ValueError) as odd:
            problems.append(f"{stream}: which part of its history is proven cannot be read: {odd}")
        told = orjson.dumps(summary(report, stream))
        try:
            with_link(near(url, stream), functools.partial(_store, told), Keys(stream, settings.group))
        except StartRefused as refused:  # memory or disk of Redis is full: the findings matter all the more
            problems.append(f"{stream}: the summary could not be stored, masters still show an earlier run: {refused}")
    return dataclasses.replace(report, unproven=(*report.unproven, *problems), spans=spans)


def _store(told: bytes, link: Link, keys: Keys) -> None:
    link.call("SET", keys.audit, told)


@audit.command(
    help="List the checks of an audit: each one's name, its rule, and what it means when the rule does not hold."
)
@_JSON
def checks(as_json: bool) -> None:
    rows = [(one.name, one.severity.value, one.rule, one.means) for one in CHECKS.values()]
    names = ("finding", "severity", "rule", "means")
    if as_json:
        print_json({"checks": [dict(zip(names, row, strict=True)) for row in rows]})
    else:
        console().print(table("Findings", names, [(name, label(severity), *words) for name, severity, *words in rows]))


@audit.command(
    help="Show executions of one ticket, or of one message, in the run log, oldest record first. Needs no Spark."
)
@click.option("--ticket", help="The ticket's id.")
@click.option("--message", help="The message's id (its place in the stream).")
@_JSON
def runs(ticket: str | None, message: str | None, as_json: bool) -> None:
    from usher.master.audit import batches
    from usher.master.audit.bulk import BulkReader, Interrupted

    if ticket is None and message is None:
        raise click.UsageError("which ticket, or which message? Give --ticket or --message.")
    settings: AuditChoices = click.get_current_context().obj
    url = resolve_redis_url(settings)
    check_reachable(url)
    found = []
    for stream in settings.streams:
        try:
            with BulkReader(near(url, stream)) as reader:
                for batch in batches.runs(reader, stream, Keys(stream, settings.group).runs, (b"-", b"+")):
                    rows = zip(*(batch[name].to_pylist() for name in _RUN), strict=True)
                    found += [row for row in rows if ticket in (None, row[2]) and message in (None, row[3])]
        except Interrupted as trouble:
            raise StartRefused(f"USHER_REDIS_URL: {trouble}") from trouble
    if as_json:
        print_json({"ticket": ticket, "message": message, "runs": [dict(zip(_RUN, row, strict=True)) for row in found]})
    else:
        of = " and ".join(
            f"{what} {name}" for what, name in (("ticket", ticket), ("message", message)) if name is not None
        )
        console().print(_runs_table(of, found, len(settings.streams) > 1))


def _runs_table(of: str, found: Sequence[Sequence[Any]], several: bool) -> Any:
    """Return a table of executions. ``several``: of several streams, so that the table names the stream."""
    today, rows = moment(time.time_ns() // 1_000_000)[:11], []
    for stream, consumer, _, message_id, fence, attempt, start_us, end_us, outcome in found:
        took = duration((end_us - start_us) / 1000) if end_us else "its process ended"
        began = moment(start_us // 1000).removeprefix(today)
        rows.append(
            (
                *([stream] if several else []),
                message_id,
                str(attempt),
                outcome,
                began,
                took,
                name_of(consumer),
                str(fence),
            )
        )
    columns = (
        *(["stream"] if several else []),
        "message",
        "attempt",
        "outcome",
        "began (UTC)",
        "took",
        "consumer",
        "fence",
    )
    ids = ("message", "attempt", "outcome", "began (UTC)", "fence")
    return fitted(f"Executions of {of}", columns, rows, (), ids, extras=("fence", "consumer"))


# ---- schedules ------------------------------------------------------------------------------------------------------


def run_every(every_s: float, is_early: Callable[[], bool] | None = None) -> None:
    """Run this process' command every ``every_s``, and sooner when ``is_early`` says so; with it the first time after
    ``every_s``, else at once. Ends with a signal."""
    words = [word for word in sys.argv[1:] if not word.startswith("--every=")]
    if "--every" in words:
        at = words.index("--every")
        del words[at : at + 2]
    if words[:1] != ["audit"]:
        words = ["audit", *words]
    if is_early is not None:
        _wait(time.monotonic() + every_s, every_s / _LOOKS, is_early)
    while True:
        began_s = time.monotonic()
        code = subprocess.run(usher_command(*words), check=False).returncode
        click.echo(f"usher: audit ended with exit code {code}; the next one in {every_s / 60:g} minutes", err=True)
        _wait(max(began_s + every_s, time.monotonic() + 1.0), every_s / _LOOKS, is_early)


def _wait(until_s: float, look_s: float, is_early: Callable[[], bool] | None) -> None:
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(left_s if is_early is None else min(left_s, look_s))
        if is_early is not None and is_early():
            return


def is_filling(settings: AuditChoices) -> bool:
    """Return True when a run log has so much new that it may be cut before it is archived. False while Redis is
    away."""
    try:
        url, streams = resolve_redis_url(settings), settings.streams
        if any(map(is_pattern, streams)):
            streams = expand(url, streams, settings.group)
        return any(
            _filled(near(url, one), Keys(one, settings.group), settings.run_log_length) >= _FULL for one in streams
        )
    except (RedisTrouble, CommandRefused, StartRefused):
        return False


def _filled(url: str, keys: Keys, cap: int) -> float:
    link = Link(url, "usher:audit", timeout_s=30.0)
    try:
        archived, log = link.pipeline([("HGET", keys.archived, "runs"), ("XINFO", "STREAM", keys.runs)])
        return 0.0 if isinstance(log, Exception) else filled(archived or ZERO, pairs(log), cap)
    finally:
        link.close()


def filled(archived: bytes, log: Mapping[bytes, Any], cap: int) -> float:
    """Return which part of a run log that holds up to ``cap`` records is new, by their times.

    >>> filled(b"70-0", {b"first-entry": [b"10-0"], b"last-generated-id": b"110-0", b"length": 50}, 100)
    0.2
    """
    if not log[b"first-entry"] or not cap:
        return 0.0
    new, held = (rank(log[b"last-generated-id"]) - rank(since) for since in (archived, log[b"first-entry"][0]))
    share = min(1.0, max(0, new) / held) if held else float(new > 0)
    return share * min(1.0, log[b"length"] / cap)


# ---- streams --------------------------------------------------------------------------------------------------------


def is_pattern(name: str) -> bool:
    """Return True when a name may stand for several streams.

    >>> is_pattern("orders"), is_pattern("tickets:*")
    (False, True)
    """
    return bool(_GLOB.intersection(name))


def expand(url: str, names: Sequence[str], group: str) -> tuple[str, ...]:
    """Return the selected streams: a name is itself; a pattern is every stream it matches that has ``group``. Each
    once, in order.

    Raises StartRefused when a pattern matches none, or cannot be looked for.
    """
    if not any(map(is_pattern, names)):
        return tuple(dict.fromkeys(names))
    link = Link(url, "usher:audit", timeout_s=30.0)
    try:
        found = [
            stream for name in names for stream in (_matching(link, url, name, group) if is_pattern(name) else [name])
        ]
    except (RedisTrouble, CommandRefused) as trouble:
        raise StartRefused(f"USHER_REDIS_URL: {trouble}") from trouble
    finally:
        link.close()
    return tuple(dict.fromkeys(found))


def _matching(link: Link, url: str, pattern: str, group: str) -> list[str]:
    if link.call("EXISTS", pattern):
        return [pattern]  # a stream may have a name like "what?"
    if mode(url) == CLUSTER:
        raise StartRefused(
            f"--streams: in a cluster the streams of a pattern lie on several servers: name each ({pattern!r})"
        )
    found = sorted(key.decode() for key in _scanned(link, pattern) if _has_group(link, key, group))
    if not found:
        raise StartRefused(f"--streams: no stream with the group {group} matches {pattern!r}")
    return found


def _scanned(link: Link, pattern: str) -> Iterator[bytes]:
    cursor = b"0"
    while True:
        cursor, keys = link.call("SCAN", cursor, "MATCH", pattern, "COUNT", 5000, "TYPE", "stream")
        yield from set(keys)
        if bytes(cursor) == b"0":
            return


def _has_group(link: Link, stream: bytes, group: str) -> bool:
    """Return True when the stream has the group. This leaves out inboxes, run logs and dead letters: they have no
    group."""
    try:
        return any(row[b"name"] == group.encode() for row in map(pairs, link.call("XINFO", "GROUPS", stream)))
    except CommandRefused:  # deleted meanwhile
        return False


audit.add_command(archive)
audit.add_command(prove)
audit.add_command(reconcile)
