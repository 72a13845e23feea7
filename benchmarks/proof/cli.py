"""``python -m benchmarks prove``: the cost of a step of the proof from the archive, beside a proof of everything."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.proof.measure import Scale, measure
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import BenchFailed


@click.command(
    help=(
        "Prove a simulated history in steps of five minutes, as `usher audit prove` does, and then as a whole. The"
        " prover is killed at random steps; each step must be proven once, and each seeded fault told once."
    )
)
@click.option("--executions", type=click.IntRange(100), default=1_000_000, show_default=True, help="Executions in all.")
@click.option("--steps", type=click.IntRange(2), default=12, show_default=True, help="Steps of five minutes.")
@click.option("--tickets", type=click.IntRange(2), default=20_000, show_default=True, help="Tickets.")
@click.option(
    "--hot", type=click.FloatRange(0, 1), multiple=True, default=[0.0], help="Share of one ticket; each given is a row."
)
@click.option("--faults", type=click.IntRange(0), default=5, show_default=True, help="Steps between two seeded faults.")
@click.option("--kills", type=click.IntRange(0), default=2, show_default=True, help="Steps with a killed prover.")
@click.option(
    "--engine",
    type=click.Choice(("local", "spark")),
    default="local",
    show_default=True,
    help="What proves; local: a process for each step, and its start counts.",
)
@click.option("--cores", type=click.IntRange(1), default=2, show_default=True, help="Cores that Spark may use.")
@click.option(
    "--memory-mib", type=click.IntRange(min=512), default=1024, show_default=True, help="Memory of the engine."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def prove(
    executions: int,
    steps: int,
    tickets: int,
    hot: tuple[float, ...],
    faults: int,
    kills: int,
    engine: str,
    cores: int,
    memory_mib: int,
    as_json: bool,
) -> None:
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as bar:
            for share in hot:
                task = bar.add_task(f"proving, {share:.0%} in one ticket", total=steps)
                scale = Scale(executions, steps, tickets, share, faults, kills, engine)
                folder = Path(tempfile.mkdtemp(prefix="usher-bench-"))
                try:
                    rows.append(measure(folder, scale, cores, memory_mib, os.environ, partial(bar.advance, task)))
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
    except BenchFailed as failed:
        click.echo(f"usher: {failed}", err=True)
        sys.exit(1)
    document = {"machine": machine.facts(rows[0]["redis"]), "runs": rows}
    if as_json:
        click.echo(orjson.dumps(document))
        return
    shown = Table("in one ticket", "", "a step, first third", "last third", "largest", "the whole", "spilt MiB")
    for row in rows:
        for name in ("seconds", "cpu_seconds"):
            values = (f"{value:,.1f}" for value in row[name].values())
            shown.add_row(f"{row['hot']:.0%}", name.replace("_", " "), *values, f"{row['spilt_mib']:,.0f}")
    Console().print(shown)
