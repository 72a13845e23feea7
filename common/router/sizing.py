"""Compute the number of readers of the portable mode, and the size of a sweep. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

#: Streams of one slice of a sweep, and the shortest time between two slices.
_AT_ONCE, _SHORTEST_S = 250, 0.05


class Slice(NamedTuple):
    """A slice of a sweep: ``size`` streams are looked at, every ``every_s`` seconds."""

    size: int
    every_s: float


def readers_wanted(streams: int, per_read: int, block_s: float, round_s: float, lowest: int, highest: int) -> int:
    """Return the number of readers that bring every stream's turn within ``round_s``, as far as ``highest`` allows: a
    turn may take ``block_s``.

    >>> readers_wanted(streams=40_000, per_read=1000, block_s=0.1, round_s=1.0, lowest=1, highest=16)
    4
    """
    reads = math.ceil(streams / per_read)
    wanted = math.ceil(reads * block_s / round_s)
    return max(lowest, min(highest, wanted, max(1, reads)))


def longest_wait_s(streams: int, per_read: int, block_s: float, readers: int) -> float:
    """Return the longest wait of an entry for its stream's turn, in seconds: the known weakness of the portable mode.

    >>> longest_wait_s(streams=40_000, per_read=100, block_s=5.0, readers=80)
    25.0
    """
    return math.ceil(math.ceil(streams / per_read) / readers) * block_s


def sweep_slice(streams: int, pass_s: float) -> Slice:
    """Return the slice for a pass over all streams in ``pass_s``: a little once a second; of many streams, a few
    hundred at a time, because changed ones wait meanwhile.

    >>> sweep_slice(600, 60.0), sweep_slice(60_000, 60.0)
    (Slice(size=10, every_s=1.0), Slice(size=250, every_s=0.25))
    """
    per_second = streams / pass_s
    if per_second <= _AT_ONCE:
        size = max(1, min(streams, math.ceil(per_second)))
        return Slice(size, min(1.0, pass_s * size / max(1, streams)))
    every_s = max(_SHORTEST_S, _AT_ONCE / per_second)
    return Slice(math.ceil(per_second * every_s), every_s)
