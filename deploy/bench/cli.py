"""``usher bench``: throughput and latency of this machine, each against a yardstick of the same run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import orjson
import psutil
from rich.console import Console
from rich.table import Column, Table

from usher.common.base.durations import Number
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import BenchFailed

RUNS = click.option(
    "--runs", type=click.IntRange(1, 50), default=3, show_default=True, help="Runs; the headline figures are medians."
)
TICKETS = click.option(
    "--tickets",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Different tickets (Zipf 1.0, seeded).",
)
PAYLOAD = click.option(
    "--payload", type=click.IntRange(min=0), default=100, show_default=True, help="Bytes of payload per message."
)
CONSUMERS = click.option(
    "--consumers", type=click.IntRange(1, 32), default=2, show_default=True, help="Consumer processes."
)
VOLATILE = click.option(
    "--no-aof",
    is_flag=True,
    help="Without append-only file. Default: appendonly yes, appendfsync everysec, as shipped.",
)
#: Its commands are those of `python -m benchmarks`, too, which has no option for all.
JSON = click.option(
    "--json",
    "as_json",
    is_flag=True,
    hidden=True,
    callback=lambda ctx, _parameter, value: value or "json" in (ctx.find_root().obj or ()),
)


@click.group(
    help=(
        "Measure this machine. Everything runs in a temporary folder with a Redis of its own; nothing that runs already"
        " is touched. USHER_REDIS_SERVER=/usr/bin/redis-server has it measured with that one."
    )
)
def bench() -> None:
    pass


@bench.command(
    help=(
        "Measure messages per second with a handler that does nothing, and the raw floor (2 processes, XREADGROUP +"
        " XACK, no order) beside it."
    )
)
@click.option("--messages", type=click.IntRange(min=1000), default=200_000, show_default=True, help="Messages per run.")
@TICKETS
@PAYLOAD
@CONSUMERS
@RUNS
@VOLATILE
@click.option("--no-run-log", is_flag=True, help="Without the run log, to see what it costs.")
@JSON
def throughput(runs: int, as_json: bool, **asked: Any) -> None:
    headline = ("messages_per_second", "floor_per_second", "ratio")
    report(lambda: machine.throughput(environ=os.environ, **asked), runs, headline, as_json)


@bench.command(
    help=(
        "Measure the time from XADD (when it was due) to the start of the handler, at a fixed rate, and beside it the"
        " time to bare consumers (XREADGROUP BLOCK, no order) of the same Redis."
    )
)
@click.option("--rate", type=Number(min=1), default=1000.0, show_default=True, help="Messages per second.")
@click.option("--seconds", type=Number(min=1), default=10.0, show_default=True, help="Length of a run.")
@TICKETS
@PAYLOAD
@CONSUMERS
@RUNS
@VOLATILE
@JSON
def latency(runs: int, as_json: bool, **asked: Any) -> None:
    headline = ("p50_ms", "p99_ms", "bare_p50_ms", "bare_p99_ms", "p99_ratio")
    report(lambda: machine.latency(environ=os.environ, **asked), runs, headline, as_json)


@contextlib.contextmanager
def _leaving_no_program() -> Iterator[None]:
    """End what was started, also when a signal ends us: it comes at any line, perhaps before somebody has written down
    what was just started, or within a destructor, where its exception is lost: then the run fails for want of its
    programs."""

    def kill() -> None:
        for program in machine.family(os.getpid())[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                program.kill()

    def end(number: int, frame: object) -> None:
        kill()
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def report(run: Callable[[], dict[str, Any]], count: int, headline: Sequence[str], as_json: bool) -> None:
    document: dict[str, Any] = {"machine": machine.facts(""), "runs": []}
    try:
        with _leaving_no_program():
            for number in range(1, count + 1):
                click.echo(f"usher: run {number} of {count}", err=True)
                document["runs"].append(run())
    except BenchFailed as failed:
        click.echo(f"usher: {failed}", err=True)
        sys.exit(1)
    document["machine"]["redis"] = document["runs"][0].pop("redis")
    for later in document["runs"][1:]:
        later.pop("redis")
    document |= machine.medians(document["runs"], tuple(headline))
    if as_json:
        click.echo(orjson.dumps(document))
        return
    shown = Table(
        Column("run"), *(Column(name.replace("_", " "), justify="right") for name in headline), Column("CPU seconds")
    )
    for number, one in enumerate(document["runs"], 1):
        shown.add_row(
            str(number),
            *(f"{one[name]:,}" for name in headline),
            "  ".join(f"{who} {spent}" for who, spent in one["cpu_seconds"].items()),
        )
    shown.add_row("median", *(f"{document[name]:,}" for name in headline), "", style="bold")
    print_table(shown, document["machine"])


def print_table(shown: Table, facts: dict[str, Any]) -> None:
    console = Console()
    console.print(shown)
    console.print(
        f"{facts['cores']} cores, {facts['cpu']}, Python {facts['python']}, {facts['redis']}", highlight=False
    )
