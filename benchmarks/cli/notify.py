"""``python -m benchmarks notify``: the price of a bell at commits."""

from __future__ import annotations

import importlib
import os

import click

from usher.deploy.bench.cli import JSON, RUNS, VOLATILE, report


@click.command(
    help=(
        "Measure commits per second of many writers to an outbox in PostgreSQL, while a streamer sends it: without a"
        " trigger that notifies, with the one of schema version 1, and with the one of now, by turns; and at fixed"
        " rates the time from the INSERT to the stream. Needs pgbench, and a database whose commits wait for the disk"
        " (fsync); it makes a schema usher_bench there, and drops it."
    )
)
@click.option("--sql", "sql_url", required=True, help="A database, e.g. postgresql+psycopg://user@host/bench.")
@click.option("--writers", type=click.IntRange(1, 1000), default=32, show_default=True, help="Connections that write.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=2.0,
    show_default=True,
    help="Length of a turn; at fixed rates, five times that.",
)
@click.option("--turns", type=click.IntRange(1, 1000), default=10, show_default=True, help="Turns at full speed.")
@click.option(
    "--rate",
    "rates",
    type=click.FloatRange(min=1),
    multiple=True,
    default=(20.0, 200.0),
    show_default=True,
    help="Commits per second of all writers when the time to the stream is measured; repeatable.",
)
@RUNS
@VOLATILE
@JSON
def notify(
    sql_url: str,
    writers: int,
    seconds: float,
    turns: int,
    rates: tuple[float, ...],
    runs: int,
    no_aof: bool,
    as_json: bool,
) -> None:
    module = importlib.import_module("benchmarks.measure.notify")  # needs the extra `postgres`
    headline = (
        *("bare_per_second", "former_per_second", "new_per_second", "former_ratio", "new_ratio"),
        *(f"{variant}_p99_ms_at_{rate:g}" for rate in rates for variant in ("former", "new")),
    )
    report(
        lambda: module.notify(writers, seconds, turns, rates, sql_url, not no_aof, os.environ), runs, headline, as_json
    )
