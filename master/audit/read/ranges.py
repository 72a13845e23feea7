"""Cut a range of stream ids into parts of about equal numbers of entries, from a few probes. Pure.

Ids are times, and traffic comes in bursts: equal spans of time may hold nothing or everything. A probe measures the
density of entries behind one point; parts are cut where the estimated numbers are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Probe(NamedTuple):
    """A sample of the stream: from rank ``at`` on, ``found`` entries lie up to rank ``last`` (included); ``more``:
    others may follow."""

    at: int
    found: int
    last: int
    more: bool = True


def points(lowest: int, highest: int, number: int) -> list[int]:
    """Return ``number`` ranks at equal distances, the first one ``lowest``."""
    span = highest - lowest + 1
    return sorted({lowest + span * at // number for at in range(number)})


def cut(lowest: int, highest: int, probes: Sequence[Probe], parts: int) -> list[tuple[int, int]]:
    """Return at most ``parts`` ranges (first, last; both included) that cover lowest..highest without a gap and without
    touching.

    >>> cut(0, 99, [Probe(0, 10, 9), Probe(50, 10, 95)], 2)
    [(0, 29), (30, 99)]
    """
    if parts <= 1 or not probes or probes[0].at != lowest:
        return [(lowest, highest)]
    starts = [probe.at for probe in probes]
    ends = [*starts[1:], highest + 1]
    weights = [_weight(probe, end) for probe, end in zip(probes, ends, strict=True)]
    total = sum(weights)
    if total <= 0:
        return [(lowest, highest)]
    edges: list[int] = []
    passed = 0.0
    for start, end, weight in zip(starts, ends, weights, strict=True):
        while len(edges) < parts - 1 and passed + weight >= total * (len(edges) + 1) / parts:
            share = (total * (len(edges) + 1) / parts - passed) / weight if weight else 1.0
            edges.append(start + int((end - start) * share))
        passed += weight
    inner = sorted({edge for edge in edges if lowest < edge <= highest})
    return list(zip([lowest, *inner], [*(edge - 1 for edge in inner), highest], strict=True))


def _weight(probe: Probe, end: int) -> float:
    """Return the estimated number of entries from the probe's point to ``end``."""
    if probe.found == 0 or probe.last < probe.at:
        return 0.0
    if probe.last >= end:  # its entries reach beyond ``end``: spread them over the stretch it saw
        return probe.found * (end - probe.at) / (probe.last - probe.at + 1)
    return probe.found * (end - probe.at) / (probe.last - probe.at + 1) if probe.more else float(probe.found)
