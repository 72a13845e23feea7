"""``python -m benchmarks strangers``: health answers, and leases, while strangers hold many connections."""

from __future__ import annotations

import os
import sys

import click
import orjson
from rich.table import Table

from benchmarks.measure import strangers as measure
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import JSON, print_table


@click.command(
    help=(
        "Measure health answers of a master and of a consumer while strangers without a token hold many connections"
        " that say nothing, half a head or half a body; and the consumers whose leases were revoked meanwhile, though"
        " they renewed them. Exit code 1 if any was, or if an answer took longer than half a second (p99)."
    )
)
@click.option(
    "--connections", type=click.IntRange(1, 20_000), multiple=True, default=(100, 500, 1000), show_default=True
)
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(list(measure.KINDS)),
    multiple=True,
    default=tuple(measure.KINDS),
    show_default=True,
)
@click.option("--seconds", type=click.FloatRange(min=1), default=20.0, show_default=True, help="Of each of them.")
@JSON
def strangers(connections: tuple[int, ...], kinds: tuple[str, ...], seconds: float, as_json: bool) -> None:
    rows = measure.strangers(connections, kinds, seconds, os.environ)
    if as_json:
        click.echo(orjson.dumps(rows))
    else:
        shown = Table(*(name.replace("_", " ") for name in rows[0]), box=None, padding=(0, 1, 0, 0))
        for row in rows:
            shown.add_row(*(f"{value:,}" if not isinstance(value, str) else value for value in row.values()))
        print_table(shown, machine.facts(""))
    sys.exit(any(row["revoked"] or row["p99_s"] > 0.5 for row in rows))
