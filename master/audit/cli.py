"""``usher audit``: prove from pending lists, index and run log that the promise held, or show where it did not."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import orjson
from rich.console import Console
from rich.markup import escape

from usher.common.base.durations import Number
from usher.common.base.errors import StartRefused
from usher.common.base.text import escape_control, json_line, label, span
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.redis.client import Link, check_reachable
from usher.common.redis.endpoints import near
from usher.common.redis.locate import resolve_redis_url
from usher.common.redis.replies import facts_of, first_of
from usher.common.runtime.own_command import run_every
from usher.common.runtime.settings import load, options, takes_json
from usher.master.audit.findings import PROVES, filled
from usher.master.audit.settings import LOCAL, AuditChoices, AuditSettings, where
from usher.master.cli.shared import console, print_json, stacked, table

if TYPE_CHECKING:  # these need an extra, which help and refusals do not
    from usher.master.audit.engine import Engine
    from usher.master.audit.job import AuditReport

_FULL = 1 / 3  # so much of a run log may be new before it is proven, whatever the time: the rest is for the run itself
_STYLES = {"clean": "bold green", "warn": "bold yellow", "bad": "bold red"}
_SHOWN_EXAMPLES = 2
T = TypeVar("T")
_SMALL_ENTRIES, _SMALL_RECORDS = 200_000, 4_000  # below both, Spark is started for little data
_KEEP = "Days that stay in the archive, and of older ones what later executions are compared with [default: all]."
_BODIES = "Archive what is in the messages, too: replay and reconcile need it [default: ids, times, tickets and uids]."
_archives = stacked(
    click.option("--keep-days", type=click.IntRange(1), metavar="DAYS", help=_KEEP),
    click.option("--bodies", is_flag=True, help=_BODIES),
    takes_json,
)
_ENGINE = "What executes the SQL: spark, local (DuckDB in this process), or auto (USHER_AUDIT_ENGINE)."
_EVERY = "Do it again and again until stopped; `audit --every 5 prove` sooner, too, when the run log fills up."
_MEMORY = "Memory of what executes the SQL (Java's heap) [default: 1024]; what does not fit goes to disk."
_looks = stacked(
    click.option("--streams", metavar="NAMES", default="", help="Comma separated [default: USHER_TICKET_STREAM]."),
    click.option("--engine", type=click.Choice(("auto", "local", "spark")), help=_ENGINE),
    click.option("--every", type=Number(0.1, 43_200), metavar="MINUTES", help=_EVERY),
    click.option("--memory", "memory_mib", type=click.IntRange(512), metavar="MIB", default=1024, help=_MEMORY),
    takes_json,
    options(AuditSettings),
)


@click.group(
    invoke_without_command=True,
    help="""Audit the pending lists and the run log of a running system: in this process, or with Spark on this machine
    or on a cluster.

    `python docs/reference.py findings` lists the checks. Exit code 0: nothing found, 1: findings, 2: not done.""",
)
@click.option("--py-files", default="", metavar="ZIP", help="Usher, for Spark's executors on other machines.")
@_looks
def audit(flags: dict[str, Any], as_json: bool, every: float | None, **chosen: Any) -> None:
    settings = _chosen(flags, **chosen)
    context = click.get_current_context()
    if every and context.invoked_subcommand in (None, "archive", "prove", "reconcile"):
        proves = context.invoked_subcommand == "prove"
        run_every(every * 60, functools.partial(is_filling, settings) if proves else bool)
    context.obj = settings
    if context.invoked_subcommand is None:
        report = _audited(reachable(settings))
        _show(report, as_json)
        sys.exit(1 if report.found else 0)


def _chosen(flags: dict[str, Any], streams: str, engine: str | None, **chosen: Any) -> AuditChoices:
    given = flags if engine is None else flags | {"audit_engine": engine}
    return AuditChoices(**load(AuditSettings, os.environ, given).model_dump(), chosen_streams=streams, **chosen)


def reachable(settings: AuditChoices | None = None) -> AuditChoices:
    settings = settings or click.get_current_context().obj
    url = resolve_redis_url(settings)
    check_reachable(url)
    return settings.model_copy(update={"redis_url": url})


def _show(report: AuditReport, as_json: bool, **about: Any) -> None:
    """Print verdict, findings with examples, what stays open, and the figures."""
    from usher.master.audit.job import document

    if as_json:
        print_json(document(report) | about)
        return
    screen = Console(highlight=False, emoji=False)
    screen.print(f"[{_STYLES[report.verdict]}]Audit {report.run}: {_safe(report.sentence())}[/]")
    for sentence in report.proven:
        screen.print(_safe(sentence))
    for one in report.found:
        severity = f"[{_STYLES[one.check.severity]}]{label(one.check.severity)}[/]"
        screen.print(f"\n{severity} [bold]{one.check.name}[/] {_safe(one.stream)}: {one.count:,}")
        screen.print(f"  {_safe(one.check.rule)} {_safe(one.check.means)}", style="dim")
        for example in one.examples[:_SHOWN_EXAMPLES]:
            named = (("entry", example.id), ("ticket", example.ticket), ("owner", example.owner))
            place = " ".join(f"{what} {value}" for what, value in named if value)
            screen.print(f"  {_safe(place)}: {_safe(example.detail)}" if place else f"  {_safe(example.detail)}")
            repair = filled(one.check.repair, example, Keys(one.stream, report.group))
            screen.print(f"    {_safe(repair)}", soft_wrap=True)
        left = one.count - min(len(one.examples), _SHOWN_EXAMPLES)
        more = f"{left:,} more: with --json, the first {len(one.examples)}. " if left > 0 else ""
        screen.print(f"  {more}What then: deploy/runbook.md, {_safe(one.check.section)}", style="dim", soft_wrap=True)
    if report.unproven:
        screen.print("\n[bold]Not proven[/]")
        for sentence in report.unproven:
            screen.print(f"  {_safe(sentence)}")
    screen.print()
    for name, value in report.figures.items():
        shown = span(value) if name.endswith("_ms") else f"{value:,}" if isinstance(value, int) else str(value)
        screen.print(f"{name.removesuffix('_ms').replace('_', ' '):<30}{shown:>12}")
    screen.print(f"\n{len(report.checks)} checks in {report.seconds:.1f} s.")


def _safe(text: str) -> str:
    return escape(escape_control(text))


def _audited(settings: AuditChoices) -> AuditReport:
    from usher.master.audit.job import AuditRun, summary

    with session(settings, settings.redis_url) as (engine, reading):
        report = AuditRun(engine, settings, reading).run()

    def store(link: Link, keys: Keys) -> None:
        link.call("SET", keys.audit, orjson.dumps(summary(report, keys.stream)))

    problems = []
    for stream in settings.streams:
        try:
            with_link(settings, stream, store)
        except StartRefused as refused:  # memory or disk of Redis is full: the findings matter all the more
            problems.append(f"{stream}: the summary could not be stored, masters still show an earlier run: {refused}")
    report.unproven += tuple(problems)
    return report


@audit.command(
    help="""Add what is new in streams and run log to the archive (Parquet, by day), exactly once. Redis knows how
    far, for `usher trim --archived-only`. Exit code 1: something was cut before it was archived (column gap)."""
)
@_archives
def archive(keep_days: int | None, bodies: bool, as_json: bool) -> None:
    settings = reachable()
    place, added = settings.archive, []
    from usher.master.audit.archive import add, locked

    with locked(place), Console(stderr=True).status("archiving"):
        for stream in settings.streams:
            url, field = near(settings.redis_url, stream), settings.field(stream)
            made = add(url, settings.keys(stream), field, place, keep_days, bodies)
            added += [(stream, name, one.rows, one.after, one.last, one.gap) for name, one in made.items()]
    names = ("stream", "table", "rows", "after", "last", "gap")
    _tell(as_json, {"archive": where(place)}, "added", f"Archive {where(place)}", names, added)
    sys.exit(1 if any(gap for *_, gap in added) else 0)


def _tell(
    as_json: bool, about: dict[str, Any], kind: str, title: str, names: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    if as_json:
        print_json(about | {kind: [dict(zip(names, row, strict=True)) for row in rows]})
    else:
        cells = [["" if one is None else str(one) for one in row] for row in rows]
        console().print(table(title, names, cells, numbers=tuple({"rows"} & {*names})))


@audit.command(
    help="""Archive what is new, and prove it together with what was proven before: the promise held from the first
    archived execution until now, or where it did not. Run it as often as the run log is long: only what was archived
    before it was cut is proven. Exit code 1: findings, or holes in the proof, that no former run has told."""
)
@click.option("--all", "again", is_flag=True, help="Prove the whole archive once more, and commit nothing.")
@_archives
def prove(again: bool, keep_days: int | None, bodies: bool, as_json: bool) -> None:
    settings = reachable().model_copy(update={"keep_days": keep_days, "bodies": bodies})
    place, started_ns = settings.archive, time.time_ns()
    from usher.master.audit.archive import locked, nothing_new
    from usher.master.audit.job import AuditReport, Proof

    is_old = functools.partial(with_link, settings, do=functools.partial(nothing_new, place))
    with locked(place):
        if not again and all(map(is_old, settings.streams)):
            told = {"archive": where(place), "new": False}
            click.echo(json_line(told) if as_json else "Nothing is new: what was proven is proven until now.")
            return
        url, archived = settings.redis_url, place if again else None
        with session(settings, url, archived, local=not again) as (engine, reading):
            proofs = [Proof(engine, settings, stream, place, reading) for stream in settings.streams]
            for one in proofs:
                one.run(again=again)
        found, unproven = ([told for one in proofs for told in getattr(one, what)] for what in ("fresh", "unproven"))
        figures, proven = {"executions": sum(one.executions for one in proofs)}, tuple(one.sentence() for one in proofs)
        report = AuditReport(settings, started_ns, found, unproven, figures, proven, PROVES)
        _show(report, as_json, archive=where(place), new=True)
        for one in () if again else proofs:
            one.commit()
    sys.exit(1 if report.found or any(one.holes for one in proofs) else 0)


@audit.command(
    help="""Compare running totals of log consumers (tables checkpoints and consumer_states) with the archive. Exit
    code 1: some differ (`LogConsumer.reset` sets a right one)."""
)
@click.option("--states-url", envvar="USHER_OUTBOX_URL", required=True, help="SQLAlchemy URL of their database.")
@click.option("--value", envvar="USHER_RECONCILE", required=True, help="A field to sum, or data.NAME in its JSON.")
@click.option("--object", "kind", default="", help="Only messages with this value in the field object.")
@click.option("--state-key", default="total", show_default=True, help="The number in a consumer's state.")
@takes_json
def reconcile(states_url: str, value: str, kind: str, state_key: str, as_json: bool) -> None:
    from usher.common.outbox.log_consumer import stored_states
    from usher.master.audit.archive import data_sets, locked, totals_of_archive

    settings: AuditChoices = click.get_current_context().obj
    stream, *others = settings.streams
    if others:
        raise StartRefused("reconcile looks at one stream: set USHER_TICKET_STREAM, or name one by --streams")
    states, place = stored_states(states_url, "--states-url", stream), settings.archive
    data, *_ = data_sets(place, settings.keys(stream))
    with locked(place):
        if data.recover() is None:
            raise StartRefused(f"there is no archive of {stream} in {where(place)}: run `usher audit archive` first")
        with session(settings, "", place) as (engine, _):
            rows = totals_of_archive(engine, data, value, kind, state_key, states)
    names = ("name", "total", "last_id", "has", "agrees", "why")
    _tell(as_json, {"stream": stream}, "consumers", "Totals as they should be", names, rows)
    sys.exit(0 if all(row[4] for row in rows) else 1)


@click.command(
    help="""Report waits, run times, retries, dead letters and worker seconds: by day and by tenant, handler, ticket and
    consumer, with a trend and when the consumers' slots are all busy; of archive and run log. The page report.html and
    tables (report/days.parquet, hours.parquet) lie in USHER_AUDIT_DIR. USHER_TENANT_FIELD says where tenants stand."""
)
@click.option("--days", type=click.IntRange(1), default=30, show_default=True, help="How many days, up to today.")
@click.option("--top", type=click.IntRange(1, 1000), default=20, show_default=True, help="Names shown of each kind.")
@_looks
def report(flags: dict[str, Any], days: int, top: int, every: float | None, as_json: bool, **chosen: Any) -> None:
    settings = _chosen(flags, **chosen)
    if every:
        run_every(every * 60)
    settings = reachable(settings)
    from usher.master.audit import job

    job.report(settings, days, top, as_json)


@contextlib.contextmanager
def session(
    settings: AuditChoices, url: str, archive: Path | None = None, *, local: bool = False
) -> Iterator[tuple[Engine, Path]]:
    """Yield an engine, and a folder. ``url``, ``archive``: what is read; ``local``: in this process, if it may be."""
    from usher.master.audit.archive import data_sets
    from usher.master.audit.engine import GATEWAY, local_engine, own_folder, spark_engine

    sizes = [with_link(settings, stream, _amount) for stream in settings.streams if url]
    entries, records = (sum(size[at] for size in sizes) for at in (0, 1))
    sets = [data_sets(archive, settings.keys(one)) for one in settings.streams] if archive else []
    rows = sum(commit.rows for entries_and_runs in sets for data in entries_and_runs[:2] for commit in data.chain())
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(own_folder(settings.folder / "reading"))
        opened.enter_context(Console(stderr=True).status("auditing"))
        is_free = settings.audit_engine == "auto" and settings.audit_spark_master == LOCAL and GATEWAY not in os.environ
        if settings.audit_engine == "local" or (is_free and (local or find_spec("pyspark") is None)):
            yield opened.enter_context(local_engine(folder, settings.memory_mib)), folder
            return
        small = entries + rows < _SMALL_ENTRIES and records < _SMALL_RECORDS
        yield opened.enter_context(spark_engine(settings, folder, os.environ, small)), folder


def with_link(settings: AuditChoices, stream: str, do: Callable[[Link, Keys], T]) -> T:
    """Return what ``do`` returns over a connection of its own. Raises StartRefused when Redis does not answer."""
    from usher.master.audit.batches import BulkReader
    from usher.master.audit.engine import refusing

    with refusing("USHER_REDIS_URL"), BulkReader(near(settings.redis_url, stream)) as link:
        return do(link, settings.keys(stream))


def _amount(link: Link, keys: Keys) -> list[int]:
    """Return the number of entries and of records to read; of what cannot be read the audit tells."""
    return [one if isinstance(one, int) else 0 for one in link.pipeline([("XLEN", keys.stream), ("XLEN", keys.runs)])]


def is_filling(settings: AuditChoices) -> bool:
    """Return True when a run log may soon be cut before it is archived. False while Redis is away."""

    def new_share(link: Link, keys: Keys) -> float:
        archived, log = link.call("HGET", keys.archived, "runs"), facts_of(link, keys.runs)
        first, cap = first_of(log), settings.run_log_length
        if not first or not cap:
            return 0.0
        new, held = (rank(log[b"last-generated-id"]) - rank(since) for since in (archived or ZERO, first))
        return (min(1.0, max(0, new) / held) if held else float(new > 0)) * min(1.0, log[b"length"] / cap)

    with contextlib.suppress(StartRefused):
        found = settings.model_copy(update={"redis_url": resolve_redis_url(settings)})
        return any(with_link(found, one, new_share) >= _FULL for one in settings.streams)
    return False
