"""``python -m benchmarks compare``: Usher beside the systems that people would take instead of it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from benchmarks.cli.comparison import run_comparison
from benchmarks.measure.compare import Workload, find, prepare
from benchmarks.peers.catalog import PEERS
from benchmarks.peers.peer import Peer
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import BenchFailed

_ONLY = f"Only this one beside Usher (repeatable): {', '.join(PEERS)}."


@click.command(
    help=(
        "Measure Usher and other systems on the same messages, which are all there before the clock starts, with the"
        " same handler: it only notes what ran when, and the order of each system is judged from the notes. Two worker"
        " processes each. A peer that is not installed is left out, and one that fails is a row that says"
        " so.\n\n\b\nFirst:  python -m benchmarks compare --environments ./peers --prepare\nThen:   python -m"
        " benchmarks compare --environments ./peers\n\nThe first makes a virtual environment for each peer, because"
        " their requirements contradict each other. RabbitMQ's server is the system's (apt-get install"
        " rabbitmq-server); a separate one is started on a loopback port."
    )
)
@click.option("--peer", "names", type=click.Choice(list(PEERS)), metavar="NAME", multiple=True, help=_ONLY)
@click.option(
    "--alone",
    is_flag=True,
    help="Also the task queues with one worker that takes one message at a time: how most of them keep order.",
)
@click.option(
    "--messages",
    type=click.IntRange(min=100),
    default=200_000,
    show_default=True,
    help="Messages per run; slow peers get a part of it.",
)
@click.option(
    "--tickets",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Different tickets (Zipf 1.0, seeded).",
)
@click.option(
    "--payload", type=click.IntRange(min=0), default=100, show_default=True, help="Bytes of payload per message."
)
@click.option(
    "--runs",
    type=click.IntRange(1, 50),
    default=3,
    show_default=True,
    help="Runs; the figures are medians, the violations sums.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Stop a peer's clock then, and count what it handled.",
)
@click.option(
    "--environments",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder with the peers' virtual environments, one each.",
)
@click.option(
    "--prepare",
    "preparing",
    is_flag=True,
    help="Make these environments with the newest versions of the peers (pip), and end.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def compare(
    names: tuple[str, ...],
    alone: bool,
    environments: Path | None,
    preparing: bool,
    runs: int,
    as_json: bool,
    **options: Any,
) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the started processes, as Ctrl-C does
    peers = [
        peer
        for peer in PEERS.values()
        if peer.name in names or (not names and (alone or not peer.name.endswith("-alone")))
    ]
    if preparing:
        if environments is None:
            raise click.UsageError("--prepare needs --environments: the folder to make them in")
        sys.exit(_prepare(peers, environments))
    workload = Workload(options["messages"], options["tickets"], options["payload"], options["seconds"])
    document: dict[str, Any] = {"machine": machine.facts("")}
    rows = run_comparison(peers, environments, workload, runs, os.environ, _echo_progress)
    usher = next(row for row in rows if row["name"] == "usher")
    document["machine"]["redis"] = usher["runs"][0]["server"] if usher["runs"] else ""
    document |= {"workload": {**options, "runs": runs}, "peers": rows}
    if as_json:
        click.echo(orjson.dumps(document))
    else:
        _print_comparison(rows, document["machine"])
    if "failed" in usher or any(usher[count] for count in ("lost", "out_of_order", "overlapping")):
        _echo_progress("Usher itself did not do what it promises")
        sys.exit(1)


def _echo_progress(text: str) -> None:
    click.echo(f"usher: {text}", err=True)


def _prepare(peers: list[Peer], environments: Path) -> int:
    """Make the peers' environments; return the exit code: 1 when a part is still missing."""
    failures = 0
    for peer in {peer.environment: peer for peer in reversed(peers) if peer.name != "floor"}.values():
        _echo_progress(f"{peer.environment}: {', '.join(peer.requires)}")
        try:
            prepare(peer, environments)
            installed = find(peer, environments)
        except BenchFailed as failed:
            installed = str(failed)
        failures += isinstance(installed, str)
        _echo_progress(
            f"  {installed if isinstance(installed, str) else f'{peer.distribution} {installed.version} is ready'}"
        )
    return min(failures, 1)


def _print_comparison(rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    right = ("messages/s", "of Usher", "CPU us", "lost", "doubled")
    columns = (
        Column(name, justify="right" if name in right else "left")
        for name in ("peer", *right[:3], "keeps order", "seen", *right[3:])
    )
    shown = Table(*columns, box=None, padding=(0, 1, 0, 0), header_style="bold")
    for row in rows:
        who = f"{row['title']} {row['version']}".strip()
        if row["messages_per_second"] is None:
            shown.add_row(who, "", "", "", row["keeps"], row.get("failed") or row.get("skipped"), style="dim")
            continue
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        counts = ("?" if row[name] is None else f"{row[name]:,}" for name in ("lost", "doubled"))
        style = "bold" if row["name"] == "usher" else None
        figures = (f"{row['messages_per_second']:,.0f}", ratio, f"{row['cpu_us_per_message']:,.0f}")
        shown.add_row(who, *figures, row["keeps"], _order(row), *counts, style=style)
    console = Console()
    console.print(shown)
    for row in rows:
        if row["messages_per_second"] is not None:
            console.print(
                Text.assemble("\n", (row["title"], "bold"), f": {row['promise']} As run: {row['configuration']}.")
            )
    console.print(
        "\nCPU us: of server, workers and what else there is, per message; it depends less on what else the machine"
        " does."
    )
    console.print(
        f"{facts['cores']} cores, {facts['cpu']}, Python {facts['python']}, {facts['redis']}", highlight=False
    )


def _order(row: dict[str, Any]) -> str:
    counts = {"out of order": row["out_of_order"], "overlapping": row["overlapping"]}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "kept"
