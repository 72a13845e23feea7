"""Which reads of the own pending list bring the bodies of exactly the ids that are wanted. Pure.

``XREADGROUP ... 0`` from the start would bring everything pending on every turn and count it as delivered again. Ids lower than those
held do come (parked ones released late, moved ones), so one read from the lowest wanted id is not enough of an answer either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from common.stream_id import from_rank, rank

#: More separate runs than this are read as one: a round trip of many commands costs more than bodies read twice.
_MOST_RUNS = 16


class OwnRead(NamedTuple):
    """Read ``most`` entries of the own pending list above ``after``."""

    after: bytes
    most: int


def plan_reads(wanted: Sequence[bytes], held: Callable[[], Collection[bytes]], highest_held: int) -> list[OwnRead]:
    """Reads that cover ``wanted`` (any order), given a way to ask for the ids that are pending too (``held``) and the rank of the highest ever held.

    The usual case, all new ids above all old ones, is one read of exactly their number.
    """
    ranks = sorted(map(rank, wanted))
    lowest, highest = ranks[0], ranks[-1]
    if lowest > highest_held:
        return [OwnRead(from_rank(lowest - 1), len(ranks))]
    runs: list[OwnRead] = []
    between = [(at, False) for at in map(rank, held()) if lowest < at < highest]
    line = sorted([*between, *((at, True) for at in ranks)])
    start, count = 0, 0
    for at, is_wanted in line:
        if is_wanted:
            start, count = (start, count + 1) if count else (at, 1)
        elif count:
            runs.append(OwnRead(from_rank(start - 1), count))
            count = 0
    runs.append(OwnRead(from_rank(start - 1), count))  # the highest of the line is wanted
    return runs if len(runs) <= _MOST_RUNS else [OwnRead(from_rank(lowest - 1), len(line))]
