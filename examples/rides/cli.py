"""``python -m examples.rides``: an outbox with faults on, and the programs that it runs."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import click
import orjson
from rich.console import Console
from rich.table import Column, Table

from examples.rides.faults import FaultNotes, RideCounter, double_sending
from examples.rides.flow import CONSUMERS, Programs, RidesVerdict, run
from examples.rides.source import Source
from usher.common.base.errors import UsherError
from usher.common.base.log import configure
from usher.common.outbox.log_consumer import LogConsumer
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.runtime.settings import load
from usher.common.runtime.signals import StopAsked, StopRequest
from usher.master.settings import StreamerSettings
from usher.master.streamer.cli import run as run_streamer
from usher.master.streamer.program import StreamerProgram

#: Command that starts the programs: in the root of a checkout, like this one.
_OWN = [sys.executable, "-m", "examples.rides"]
_STREAM = "rides"
_BATCH = 40
_FOLDER = "USHER_RIDES_FOLDER"
_SEED = "USHER_RIDES_SEED"
_FAULTS = 0.1


@click.group(
    invoke_without_command=True,
    help=(
        "Rocket rides: an outbox with a streamer that sends twice and consumers that crash, judged by the source table."
    ),
)
@click.option("--rides", "count", type=click.IntRange(min=100), default=2000, show_default=True, help="Rides.")
@click.option("--sql", "sql_url", default="", help="An empty database to use. Default: SQLite in a temporary folder.")
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same rides.")
@click.option("--keep", is_flag=True, help="Keep the temporary folder with logs and database.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON document.")
@click.pass_context
def rides(ctx: click.Context, count: int, sql_url: str, seed: int, keep: bool, as_json: bool) -> None:
    if ctx.invoked_subcommand is not None:
        return
    folder = Path(tempfile.mkdtemp(prefix="usher-rides-"))
    try:
        with StopRequest() as stop:
            try:
                verdict = _run(folder, sql_url or f"sqlite:///{folder / 'rides.db'}", count, seed, stop)
            except StopAsked:
                click.echo("usher: demo stopped", err=True)
                sys.exit(stop.exit_code)
            except UsherError as problem:
                click.echo(f"usher: the demo failed: {problem}", err=True)
                sys.exit(1)
    finally:
        if keep:
            click.echo(f"usher: logs and database are in {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        click.echo(orjson.dumps(verdict.document()))
    else:
        _print_rides_verdict(verdict)
    sys.exit(0 if verdict.clean else 1)


def _run(folder: Path, sql_url: str, count: int, seed: int, stop: StopRequest) -> RidesVerdict:
    source = Source(sql_url)
    try:
        with EmbeddedRedis(folder, durable=True) as server:
            environ = {name: value for name, value in os.environ.items() if not name.startswith("USHER_")}
            environ |= {"USHER_REDIS_URL": server.url, "USHER_TICKET_STREAM": _STREAM, "USHER_OUTBOX_URL": sql_url}
            environ |= {_FOLDER: str(folder), _SEED: str(seed)}
            commands = {name: [*_OWN, "consumer", name] for name in CONSUMERS}
            commands["streamer"] = [*_OWN, "streamer"]
            link = Link(server.url, "usher:rides")
            try:
                click.echo(f"usher: {count:,} rides, with faults", err=True)
                return run(source, link, _STREAM, Programs(commands, environ, folder), folder, count, seed, stop.check)
            finally:
                link.close()
    finally:
        source.close()


def _rng(name: str, notes: FaultNotes) -> random.Random:
    """Make random numbers that differ after a crash from those before it."""
    return random.Random(f"{os.environ[_SEED]} {name} {notes.count}")


@rides.command(name="streamer", hidden=True)
def rides_streamer() -> None:
    """Run the streamer of the rides: it sends every tenth batch twice."""
    settings = load(StreamerSettings, os.environ)
    configure("streamer", settings.log_level, settings.log_format)
    notes = FaultNotes(Path(os.environ[_FOLDER]), "streamer")
    faulty = double_sending(_FAULTS, notes, _rng("streamer", notes))
    sys.exit(run_streamer(StreamerProgram(settings, settings.redis_url, faulty, 1.0, _BATCH)))


@rides.command(name="consumer", hidden=True)
@click.argument("name")
def rides_consumer(name: str) -> None:
    """Run a consumer of the rides: it crashes before every tenth commit."""
    settings = load(StreamerSettings, os.environ)
    configure(name, settings.log_level, settings.log_format)
    notes = FaultNotes(Path(os.environ[_FOLDER]), name)
    counter = RideCounter(name, _FAULTS, notes, _rng(name, notes))
    with (
        StopRequest() as stop,
        LogConsumer(
            name, settings.one_stream, settings.outbox_url, redis_url=settings.redis_url, batch=_BATCH
        ) as consumer,
    ):
        consumer.run(counter, lambda: stop.asked)


def _print_rides_verdict(verdict: RidesVerdict) -> None:
    console = Console()
    shown = Table("", *(Column(name, justify="right") for name in ("rides", "distance", "lost", "twice")))
    shown.add_row("source table", f"{verdict.sent:,}", f"{verdict.distance:,}", "", "")
    for one in verdict.consumers:
        shown.add_row(one.name, f"{one.rides:,}", f"{one.distance:,}", f"{one.lost:,}", f"{one.duplicates:,}")
    console.print(shown)
    faults = (
        f"{verdict.double_sent_batches} batches sent twice, {verdict.crashes} crashes before a commit, {verdict.kills}"
        " kills"
    )
    console.print(
        f"{faults}, {verdict.rolled_back} transactions rolled back, {verdict.sent_again} requests sent again;"
        f" reconciled {verdict.reconciled} times, {verdict.wrong} times wrong; {verdict.seconds:.1f} s",
        highlight=False,
        soft_wrap=True,
    )
    said = (
        "clean: every consumer has every ride exactly once" if verdict.clean else "NOT CLEAN (run it again with --keep)"
    )
    console.print(f"[bold {'green' if verdict.clean else 'red'}]Verdict: {said}[/]", highlight=False, soft_wrap=True)
