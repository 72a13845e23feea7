"""Define ``usher audit archive``, ``prove`` and ``reconcile``, subcommands of ``audit``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from usher.common.base.errors import GroupMissing, RedisTrouble, StartRefused
from usher.common.base.log import redacted
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import CommandRefused, Link, check_reachable
from usher.common.redis.endpoints import near
from usher.common.redis.locate import resolve_redis_url
from usher.master.audit.commits import mark_told, note_duration, nothing_new
from usher.master.audit.sessions import session, with_link
from usher.master.audit.settings import AuditChoices
from usher.master.cli.shared import console, print_json, table

if TYPE_CHECKING:
    from usher.master.audit.report import AuditReport

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_TO = click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the archive [default: archive in USHER_AUDIT_DIR].",
)


@contextlib.contextmanager
def telling(first: str) -> Iterator[Callable[[str], None]]:
    """Show the progress as a line on the terminal; on a copy of stderr, because Spark's start borrows stderr itself."""
    with os.fdopen(os.dup(2), "w") as terminal, Console(file=terminal).status(first, spinner="dots") as status:
        yield status.update


@click.command(
    help="""Add what is new in streams and run log to the archive (Parquet, by day), exactly once: after a kill, run it
    again.

    The last archived ids are noted in Redis as the floor of `usher trim --archived-only`. Exit code 1: something was
    cut before it was archived (column gap)."""
)
@_TO
@_JSON
def archive(folder: Path | None, as_json: bool) -> None:
    settings: AuditChoices = click.get_current_context().obj
    url = resolve_redis_url(settings)
    check_reachable(url)
    place = _folder(settings, folder)
    from usher.master.audit.archive import Archive
    from usher.master.audit.commits import locked
    from usher.master.audit.job import plan_of

    plan = plan_of(settings, url)
    with locked(place), telling("looking at Redis") as tell:
        added = []
        for stream in settings.streams:
            keys = Keys(stream, settings.group)
            added += Archive(near(url, stream), keys, plan.field(stream), place).add(tell)
    if as_json:
        print_json({"archive": str(place), "added": [dataclasses.asdict(one) for one in added]})
    else:
        rows = [(one.stream, one.table, one.rows, one.after, one.last, one.gap) for one in added]
        console().print(
            table(f"Archive {place}", ("stream", "table", "rows", "after", "up to", "gap"), rows, numbers=("rows",))
        )
    sys.exit(1 if any(one.gap for one in added) else 0)


@click.command(
    help="""Archive what is new, and prove it together with what was proven before: the promise held from the first
    archived execution until now, without a gap, or where it did not.

    The cost follows what is new, and nothing new costs nothing. Run it as often as the run log is long: it is
    proven only what was archived before it was cut. Exit code 1: findings, or holes in the proof, that nobody was told
    of yet."""
)
@_TO
@click.option("--all", "again", is_flag=True, help="Prove the whole archive once more, and commit nothing.")
@_JSON
def prove(folder: Path | None, again: bool, as_json: bool) -> None:
    settings: AuditChoices = click.get_current_context().obj
    url = resolve_redis_url(settings)
    check_reachable(url)
    place = _folder(settings, folder)
    from usher.master.audit.commits import locked

    report, holes = None, 0
    with locked(place):
        if again or not all(_nothing_new(settings, url, stream, place) for stream in settings.streams):
            report, holes = _prove(settings, url, place, again)
        _tell(settings, place, report, as_json)
        if not again:
            for stream in settings.streams:
                mark_told(place, Keys(stream, settings.group))
    sys.exit(1 if report and (report.found or holes) else 0)


def _tell(settings: AuditChoices, place: Path, report: AuditReport | None, as_json: bool) -> None:
    from usher.master.audit import page
    from usher.master.audit import report as reports

    page_file: Path | None = settings.folder / "proof.html"
    if report is not None:
        try:
            page.write(settings.folder / "proof.html", report)
        except OSError as failed:
            page_file = None
            click.echo(f"usher: the page could not be written: {failed}", err=True)
    if as_json:
        print_json({"archive": str(place), "new": report is not None} | (reports.document(report) if report else {}))
    elif report is None:
        console().print("Nothing is new: what was proven is proven until now.")
    else:
        page.print_audit_report(report, page_file)


def _prove(settings: AuditChoices, url: str, place: Path, again: bool) -> tuple[AuditReport, int]:
    """Return the report, and how many holes it tells of."""
    from usher.master.audit.report import AuditReport, run_name

    started_ms = time.time_ns() // 1_000_000
    from usher.master.audit.commits import archived_rows
    from usher.master.audit.job import plan_of
    from usher.master.audit.proof import PROVES, Proof

    rows = sum(archived_rows(place, Keys(one, settings.group)) for one in settings.streams) if again else 0
    with (
        telling("looking at Redis") as tell,
        session(settings, url, os.environ, tell, local=not again, rows=rows) as (engine, reading),
    ):
        plan = plan_of(settings, url)
        proven = [Proof(engine, plan, stream, place, reading, tell).run(again=again) for stream in settings.streams]
        took_ms = time.time_ns() // 1_000_000 - started_ms
        # The first run proves all that is archived: its duration says nothing of the next ones.
        for stream in () if again else [one.stream for one in proven if one.run > 1]:
            with contextlib.suppress(RedisTrouble, CommandRefused):  # the proof stands
                with_link(near(url, stream), functools.partial(note_duration, took_ms), Keys(stream, settings.group))
    report = AuditReport(
        run_name(started_ms),
        started_ms,
        time.time_ns() / 1e9 - started_ms / 1000,
        redacted(url),
        settings.streams,
        settings.group,
        tuple(found for one in proven for found in one.fresh),
        tuple(sentence for one in proven for sentence in one.unproven),
        {"executions": sum(one.executions for one in proven)},
        proven=tuple(one.sentence() for one in proven),
        spans={one.stream: one.spans for one in proven},
        checks=PROVES,
    )
    return report, sum(one.holes for one in proven)


def _nothing_new(settings: AuditChoices, url: str, stream: str, place: Path) -> bool:
    def look(link: Link, keys: Keys) -> bool:
        try:
            return nothing_new(link, keys, place)
        except GroupMissing:  # told with the settings to look at, by the proof
            return False

    return with_link(near(url, stream), look, Keys(stream, settings.group))


@click.command(
    help="""Compare running totals of log consumers (tables checkpoints and consumer_states) with canonical data: the
    archive, or a query.

    Shows name, total and last id of each that differs; writes nothing unless --apply is given. Exit code 1: some
    differ."""
)
@click.option(
    "--states-url", required=True, help="SQLAlchemy URL of the database with checkpoints and consumer_states."
)
@click.option(
    "--value",
    required=True,
    help="The value to sum: a message field, or data.NAME for a number in the JSON of field data.",
)
@click.option("--object", "kind", default="", help="Only messages with this value in the field object.")
@click.option("--state-key", default="total", show_default=True, help="The number in a consumer's state.")
@click.option("--source-url", default="", help="Database of --source-query.")
@click.option(
    "--source-query",
    default="",
    help="Instead of the archive: a query that returns the total; for consumers at the end of the stream.",
)
@click.option("--apply", "do_apply", is_flag=True, help="Write the correct totals.")
@_TO
@_JSON
def reconcile(states_url: str, state_key: str, do_apply: bool, as_json: bool, **source: Any) -> None:
    from usher.master.audit import reconcile as reconciler

    settings: AuditChoices = click.get_current_context().obj
    [stream] = settings.streams if len(settings.streams) == 1 else _one_stream()
    states = reconciler.read_states(states_url, stream, state_key)
    wanted, why = (
        _from_query(settings, states, source) if source["source_query"] else _from_archive(settings, states, source)
    )
    compared = reconciler.compare(states, wanted, why)
    applied = {}
    if do_apply:
        for state, one in zip(states, compared, strict=True):
            if one.wanted is not None and not one.agrees:
                applied[one.name] = reconciler.apply(states_url, state_key, state, one.wanted)
    rows = [
        {
            "name": one.name,
            "total": reconciler.to_json_number(one.wanted),
            "last_id": one.last_id,
            "has": reconciler.to_json_number(one.total),
            "agrees": one.agrees,
            "why": one.why,
            "applied": applied.get(one.name),
        }
        for one in compared
    ]
    if as_json:
        print_json({"stream": stream, "consumers": rows})
    else:
        names = ("name", "total", "last_id", "has", "agrees", "why", "applied")
        cells = [["" if row[name] is None else str(row[name]) for name in names] for row in rows]
        console().print(table("Totals as they should be", names, cells))
    settled = all(one.agrees or applied.get(one.name) for one in compared)
    sys.exit(0 if settled else 1)


def _one_stream() -> Any:
    raise StartRefused("reconcile looks at one stream: set USHER_TICKET_STREAM, or name one by --streams")


def _folder(settings: AuditChoices, given: Path | None) -> Path:
    return (given or settings.folder / "archive").expanduser().absolute()


def _from_archive(settings: AuditChoices, states: list[Any], source: dict[str, Any]) -> tuple[list[Any], list[str]]:
    from usher.master.audit import reconcile as reconciler
    from usher.master.audit.commits import data_sets, locked

    place = _folder(settings, source["folder"])
    data, *_ = data_sets(place, Keys(settings.streams[0], settings.group))
    with locked(place):
        last = data.recover()
        if last is None:
            raise StartRefused(
                f"there is no archive of {settings.streams[0]} in {place}: run `usher audit archive` first, or give"
                " --source-query"
            )
        with telling("reading the archive") as tell, session(settings, "", os.environ, tell) as (engine, _):
            wanted: list[Any] = reconciler.totals_of_archive(engine, data, source["value"], source["kind"], states)
        gaps = data.gaps()
    why = [""] * len(states)
    for at, state in enumerate(states):
        gap = next((gap for behind, gap in gaps if rank(state.last_id.encode()) > rank(behind.encode())), "")
        if gap:
            wanted[at], why[at] = None, f"the archive has a gap: {gap}; compare with --source-query"
        elif rank(state.last_id.encode()) > rank(last.last.encode()):
            wanted[at], why[at] = None, f"the archive ends at {last.last}, before its checkpoint"
    return wanted, why


def _from_query(settings: AuditChoices, states: list[Any], source: dict[str, Any]) -> tuple[list[Any], list[str]]:
    from usher.common.redis.replies import TicketStream
    from usher.master.audit import reconcile as reconciler

    url = near(resolve_redis_url(settings), settings.streams[0])
    check_reachable(url)
    # Before the stream is read: rows that the query counts are then in the stream, or were still in the outbox.
    total = reconciler.total_of_query(source["source_url"], source["source_query"])
    link = Link(url, "usher:reconcile")
    try:
        span = TicketStream(link, Keys(settings.streams[0], settings.group)).span()
    finally:
        link.close()
    wanted: list[Any] = [total] * len(states)
    why = [""] * len(states)
    for at, state in enumerate(states):
        if span is not None and rank(state.last_id.encode()) < rank(span.last_generated):
            wanted[at], why[at] = (
                None,
                (
                    f"it is at {state.last_id}, the stream at {span.last_generated.decode()}: compare when it is at"
                    " the end"
                ),
            )
    return wanted, why
