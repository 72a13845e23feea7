"""All runs of ``python -m benchmarks compare``: the peers in turn, several times, and their results. A failed peer is a
row that says so."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import compare
from benchmarks.measure.compare import Installed, Workload
from benchmarks.peers.peer import Peer
from usher.common.base.errors import UsherError

_USHER = {
    "name": "usher",
    "title": "Usher",
    "keeps": "per ticket",
    "promise": (
        "In order and one at a time per ticket, also through retries, crashes and changes of owner. At least once. A"
        " paused process can wake up inside of a handler, as everywhere; each hand-over has a fencing token by which"
        " what stores its effect can refuse it. There are no partitions: no ticket waits for another."
    ),
    "source": "README",
    "configuration": "one master, 2 consumers with 8 slots, all settings at their defaults, run log on",
}
_COUNTED = ("lost", "doubled", "out_of_order", "overlapping")


def run_comparison(
    peers: Sequence[Peer],
    environments: Path | None,
    workload: Workload,
    runs: int,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return a row for Usher and for each peer, the fastest first and those without a figure last."""
    turns: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = [
        (_USHER | {"version": _version(), "runs": []}, lambda: compare.run_usher(workload, environ))
    ]
    rows = [turns[0][0]]
    for peer in peers:
        installed = compare.find(peer, environments)
        rows.append(_row(peer, installed))
        if isinstance(installed, Installed):
            turns.append((rows[-1], _turn(peer, installed, workload, environ)))
        else:
            say(f"{peer.title}: {installed}")
    for number in range(1, runs + 1):
        for at, (row, run) in enumerate(turns, 1):
            if "failed" not in row:
                say(f"run {number} of {runs}, {at} of {len(turns)}: {row['title']} {row['version']}")
                _take(row, run, say)
    for row in rows:
        row |= summary(row["runs"], rows[0]["runs"])
    return sorted(rows, key=lambda row: -(row["messages_per_second"] or 0))


def _version() -> str:
    try:
        return importlib.metadata.version("usher-streams")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _row(peer: Peer, installed: Installed | str) -> dict[str, Any]:
    told = {name: getattr(peer, name) for name in ("name", "title", "keeps", "promise", "source", "configuration")}
    found = (
        {"version": installed.version} if isinstance(installed, Installed) else {"version": "", "skipped": installed}
    )
    return told | found | {"runs": []}


def _turn(
    peer: Peer, installed: Installed, workload: Workload, environ: Mapping[str, str]
) -> Callable[[], dict[str, Any]]:
    return lambda: compare.run_peer(peer, installed, workload, environ)


def _take(row: dict[str, Any], run: Callable[[], dict[str, Any]], say: Callable[[str], None]) -> None:
    load = round(os.getloadavg()[0], 2)
    try:
        result = run()
    except (UsherError, OSError) as problem:
        row["failed"] = str(problem)
        say(f"  failed: {problem}")
        return
    row["runs"].append(result | {"load_before": load})
    say(
        f"  {result['messages_per_second']:,.0f} messages/s of"
        f" {result['messages']:,}{', ' + result['cut'] if result['cut'] else ''}"
    )


def summary(runs: Sequence[Mapping[str, Any]], ushers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians of the figures and sums of the counts; None where nothing was measured."""
    if not runs:
        return dict.fromkeys(("messages", "messages_per_second", "cpu_us_per_message", "ratio", *_COUNTED))
    rate = statistics.median(run["messages_per_second"] for run in runs)
    usher = statistics.median(run["messages_per_second"] for run in ushers) if ushers else 0
    sums = {
        name: None if any(run[name] is None for run in runs) else sum(run[name] for run in runs) for name in _COUNTED
    }
    cpu_us = statistics.median(run["cpu_us_per_message"] for run in runs)
    ratio = round(rate / usher, 4) if usher else None
    return {
        "messages": runs[0]["messages"],
        "messages_per_second": rate,
        "cpu_us_per_message": cpu_us,
        "ratio": ratio,
        **sums,
    }
