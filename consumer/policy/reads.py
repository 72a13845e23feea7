"""Which reads of the own pending list bring the bodies of exactly the ids that are wanted. Pure.

``XREADGROUP ... 0`` from the start would bring everything pending on every turn and count it as delivered again. Ids lower than those
held do come (parked ones released late, moved ones), so one read from the lowest wanted id is not enough of an answer either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from common.stream_id import before, rank

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
    ordered = sorted(wanted, key=rank)
    if rank(ordered[0]) > highest_held:
        return [OwnRead(before(ordered[0]), len(ordered))]
    runs: list[OwnRead] = []
    lowest, highest = rank(ordered[0]), rank(ordered[-1])
    between = sorted((rank(entry_id), False) for entry_id in held() if lowest < rank(entry_id) < highest)
    line = sorted([*between, *((rank(entry_id), True) for entry_id in ordered)])
    start: bytes | None = None
    count = 0
    position = 0
    for _, is_wanted in line:
        if is_wanted:
            if start is None:
                start = ordered[position]
            count += 1
            position += 1
        elif start is not None:
            runs.append(OwnRead(before(start), count))
            start, count = None, 0
    if start is not None:
        runs.append(OwnRead(before(start), count))
    return runs if len(runs) <= _MOST_RUNS else [OwnRead(before(ordered[0]), len(line))]
