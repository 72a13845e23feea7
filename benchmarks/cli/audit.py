"""``python -m benchmarks audit``: the time and memory of a large audit."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.measure import audit as bench
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import BenchFailed


@click.command(
    help=(
        "Audit a Redis of its own with N pending entries (or with M executions in its run log), as a program, JVM start"
        " included."
    )
)
@click.option(
    "--entries",
    type=click.IntRange(min=0),
    default=1_000_000,
    show_default=True,
    help="Pending entries over all streams.",
)
@click.option(
    "--executions",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Instead of pending entries: executions to prove.",
)
@click.option("--streams", type=click.IntRange(1, 64), default=4, show_default=True, help="Ticket streams.")
@click.option(
    "--payload", type=click.IntRange(min=0), default=20, show_default=True, help="Bytes of payload per entry."
)
@click.option(
    "--cores",
    default="2",
    show_default=True,
    help="Cores that the audit may use; of several (1,2) each is measured on the same data.",
)
@click.option("--memory-mib", type=click.IntRange(min=512), default=1024, show_default=True, help="Heap of the JVM.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def audit(
    entries: int, executions: int, streams: int, payload: int, cores: str, memory_mib: int, as_json: bool
) -> None:
    document: dict[str, Any] = {"machine": machine.facts(""), "runs": []}
    folder = Path(tempfile.mkdtemp(prefix="usher-bench-"))
    numbers = [int(number) for number in cores.split(",")]
    try:
        for run in bench.measure(
            folder, 0 if executions else entries, executions, streams, payload, numbers, os.environ, memory_mib
        ):
            click.echo(f"usher: {run['cores']} cores: {run['seconds']} s", err=True)
            document["runs"].append(run)
    except BenchFailed as failed:
        click.echo(f"usher: {failed}", err=True)
        sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    document["machine"]["redis"] = document["runs"][0]["redis"]
    last = document["runs"][-1]
    document |= {name: last[name] for name in ("seconds", "entries_per_second", "executions_per_second", "rss_mib")}
    if as_json:
        click.echo(orjson.dumps(document))
        return
    shown = Table("cores", "seconds", "read/s", "executions/s", "RSS MiB", "CPU seconds")
    for run in document["runs"]:
        sizes, spent = (
            ", ".join(f"{name} {value:,}" for name, value in run[key].items()) for key in ("rss_mib", "cpu_seconds")
        )
        rates = (f"{run[name]:,.0f}" if run[name] else "-" for name in ("entries_per_second", "executions_per_second"))
        shown.add_row(str(run["cores"]), f"{run['seconds']:,.1f}", *rates, sizes, spent)
    Console().print(shown)
