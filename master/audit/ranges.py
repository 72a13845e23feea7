"""Cut streams and pending lists into ranges of ids of about equal work, from a few probes.

Ids are times, and traffic comes in bursts: equal spans of time may hold nothing or everything. A probe measures the
density of entries behind one point; ranges are cut where the estimated numbers are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import rank
from usher.common.redis.replies import pairs
from usher.master.audit.bulk import BulkReader

#: Entries of a range of the pending list or of a stream; records of a range of the run log.
PART_ENTRIES, PART_RECORDS = 250_000, 400
_MOST_PARTS, _MOST_PROBES, _PROBES_A_PART, _PROBE = 256, 256, 4, 10
Span = tuple[bytes, bytes]


class Probe(NamedTuple):
    """From rank ``at`` on, ``found`` entries lie up to rank ``last`` (included); ``more``: others may follow."""

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
    ends = [*(probe.at for probe in probes[1:]), highest + 1]
    weights = [_weight(probe, end) for probe, end in zip(probes, ends, strict=True)]
    total = sum(weights)
    if parts <= 1 or not probes or probes[0].at != lowest or total <= 0:
        return [(lowest, highest)]
    edges: list[int] = []
    passed = 0.0
    for probe, end, weight in zip(probes, ends, weights, strict=True):
        while len(edges) < parts - 1 and passed + weight >= total * (len(edges) + 1) / parts:
            share = (total * (len(edges) + 1) / parts - passed) / weight if weight else 1.0
            edges.append(probe.at + int((end - probe.at) * share))
        passed += weight
    inner = sorted({edge for edge in edges if lowest < edge <= highest})
    return list(zip([lowest, *inner], [*(edge - 1 for edge in inner), highest], strict=True))


def _weight(probe: Probe, end: int) -> float:
    """Return the estimated number of entries from the probe's point to ``end``."""
    if probe.found == 0 or probe.last < probe.at:
        return 0.0
    if not probe.more and probe.last < end:
        return float(probe.found)
    return probe.found * (end - probe.at) / (probe.last - probe.at + 1)


def pending_span(reader: BulkReader, keys: Keys, everything: bool) -> Span | None:
    """Return the lowest and highest id to read, both included: of the pending entries, or, with ``everything``, from
    the stream's first entry to the last one that the group has read."""
    count, lowest, highest, _ = reader.ask("XPENDING", keys.stream, keys.group)
    if not everything:
        return (lowest, highest) if count else None
    groups = map(pairs, reader.ask("XINFO", "GROUPS", keys.stream))
    read = next(row[b"last-delivered-id"] for row in groups if row[b"name"] == keys.group.encode())
    first = pairs(reader.ask("XINFO", "STREAM", keys.stream))[b"first-entry"]
    ends = [entry_id for entry_id in (lowest, first[0] if first else None) if entry_id]
    if not ends:
        return None
    span = min(ends, key=rank), max((read, *([highest] if highest else [])), key=rank)
    return span if rank(span[0]) <= rank(span[1]) else None


def stream_span(reader: BulkReader, key: str, span: Span) -> Span | None:
    """Return the first and last id that there is between those of ``span``, both included."""
    head = reader.ask("XRANGE", key, *span, "COUNT", 1)
    tail = reader.ask("XREVRANGE", key, *reversed(span), "COUNT", 1)
    return (head[0][0], tail[0][0]) if head and tail else None


def parts(reader: BulkReader, key: str, span: Span, per_part: int, number: int = 0) -> list[Span]:
    """Return ranges of ids (both ends included) that cover ``span``; ``number``: how many, 0: as many as fit."""
    number = number or max(1, min(_MOST_PARTS, -(-reader.ask("XLEN", key) // per_part)))
    lo, hi = map(rank, span)
    probes = []
    for at in points(lo, hi, min(_MOST_PROBES, _PROBES_A_PART * number)) if number > 1 else []:
        rows = reader.ask("XRANGE", key, _id(at), span[1], "COUNT", _PROBE)
        probes.append(Probe(at, len(rows), rank(rows[-1][0]) if rows else 0, len(rows) == _PROBE))
    return [(_id(first), _id(last)) for first, last in cut(lo, hi, probes, number)] if probes else [span]


def _id(value: int) -> bytes:
    return b"%d-%d" % (value >> 64, value & (1 << 64) - 1)
