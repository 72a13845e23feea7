"""``python -m benchmarks consumers``: throughput while very many consumers are registered."""

from __future__ import annotations

import os

import click

from benchmarks.measure import consumers as measure
from usher.deploy.bench.rig import CONSUMERS, JSON, RUNS, TICKETS, VOLATILE, report


@click.command(
    help=(
        "Measure messages per second of two consumers while very many others are registered, beat, answer health"
        " questions and have all the work that they may have; and the same without them. The others are simulated by"
        " one process, over real HTTP and Redis."
    )
)
@click.option(
    "--registered",
    type=click.IntRange(1, 5000),
    default=1000,
    show_default=True,
    help="Consumers besides those that work.",
)
@click.option("--messages", type=click.IntRange(min=1000), default=200_000, show_default=True, help="Messages per run.")
@TICKETS
@CONSUMERS
@RUNS
@VOLATILE
@JSON
def consumers(
    registered: int, messages: int, tickets: int, consumers: int, runs: int, no_aof: bool, as_json: bool
) -> None:
    report(
        lambda: measure.measure_simulated(registered, messages, tickets, consumers, not no_aof, os.environ),
        runs,
        ("messages_per_second", "floor_per_second", "ratio"),
        as_json,
    )
