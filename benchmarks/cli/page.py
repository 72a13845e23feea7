"""``python -m benchmarks page``: the load time of a master's pages while it works."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
import orjson
from rich.table import Column, Table

from benchmarks.measure import page as measure_page
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import BenchFailed, print_table


@click.command(
    help=(
        "Measure the load time of each page of the master, while messages come in, a great many tickets wait, fail or"
        " are held, and there are as many dead letters: with one connection for all, and with a new one each. The"
        " headline is of all GETs together."
    )
)
@click.option(
    "--pending", type=click.IntRange(100, 100_000), default=100_000, show_default=True, help="Tickets in trouble."
)
@click.option("--letters", type=click.IntRange(100, 100_000), default=100_000, show_default=True, help="Dead letters.")
@click.option(
    "--rate", type=click.FloatRange(min=0), default=2000.0, show_default=True, help="Messages per second; 0: quiet."
)
@click.option(
    "--gets",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="GETs of each page, for each way of asking.",
)
@click.option("--consumers", type=click.IntRange(1, 32), default=2, show_default=True, help="Consumer processes.")
@click.option(
    "--no-aof",
    is_flag=True,
    help="Without append-only file. Default: appendonly yes, appendfsync everysec, as shipped.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def page(pending: int, letters: int, rate: float, gets: int, consumers: int, no_aof: bool, as_json: bool) -> None:
    try:
        runs = measure_page.page(pending, letters, rate, gets, consumers, not no_aof, os.environ)
    except BenchFailed as failed:
        click.echo(f"usher: {failed}", err=True)
        sys.exit(1)
    document: dict[str, Any] = {"machine": machine.facts(runs[0]["redis"]), "runs": runs}
    document |= {name: max(run[name] for run in runs) for name in ("late_p99_ms", "late_max_ms")}
    document |= {name: runs[0][f"all_{name}"] for name in ("p50_ms", "p99_ms", "max_ms")} | {
        "worst_p99_ms": max(run["p99_ms"] for run in runs)
    }
    if as_json:
        click.echo(orjson.dumps(document))
        return
    columns = (
        Column("page", no_wrap=True),
        Column("connection"),
        *(Column(name, justify="right") for name in ("p50 ms", "p99", "max", "bytes")),
    )
    shown = Table(*columns, box=None, padding=(0, 1, 0, 0), header_style="bold")
    for run in (
        *runs,
        {"page": "all", "keep_alive": None, "bytes": 0}
        | {name: document[name] for name in ("p50_ms", "p99_ms", "max_ms")},
    ):
        times = [f"{run[name]:,.1f}" for name in ("p50_ms", "p99_ms", "max_ms")]
        shown.add_row(run["page"], {True: "kept", False: "new"}.get(run["keep_alive"], ""), *times, f"{run['bytes']:,}")
    print_table(shown, document["machine"])
    click.echo(
        f"for a core of the machine one waited {document['late_p99_ms']:g} ms meanwhile (p99; at most"
        f" {document['late_max_ms']:g})"
    )
