"""Which reads of the own pending list bring the bodies of exactly the ids that are wanted. Pure.

``XREADGROUP ... 0`` from the start would bring everything pending on every turn and count it as delivered again. Ids
lower than those held do come (parked ones released late, moved ones), so one read from the lowest wanted id is not
enough of an answer either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from usher.common.protocol.stream_id import from_rank, rank

#: More separate runs than this are read as one: a round trip of many commands costs more than bodies read twice.
_MOST_RUNS = 16
#: Messages that are fetched at first, and at most, by one call.
FIRST_PAGE, _MOST_PAGE = 16, 1000
#: A page that came faster, once it began to come, may be followed by a larger one; one that took longer is followed by
#: a smaller one.
_FAST_S, _SLOW_S = 0.2, 1.0


class OwnRead(NamedTuple):
    """Read ``most`` entries of the own pending list above ``after``."""

    after: bytes
    most: int


def next_page(page: int, fetched: int, took_s: float | None) -> int:
    """Most messages of the next fetch, after one of up to ``page`` for ``fetched`` of them (0: it was for none, and
    tells nothing). ``took_s``: from the first byte to the last, so that a server that is far away, or busy, does not
    count as a narrow network. None: it was cut off.

    >>> next_page(16, 16, 0.01), next_page(16, 3, 0.01), next_page(16, 16, 5.0), next_page(16, 16, None), next_page(16, 0, None)
    (32, 16, 8, 4, 16)
    """
    if not fetched:
        return page
    if took_s is None:
        return max(1, min(page, fetched) // 4)
    if took_s > _SLOW_S:
        return max(1, min(page, fetched) // 2)
    return min(_MOST_PAGE, 2 * page) if took_s < _FAST_S and fetched >= page else page


def plan_reads(wanted: Sequence[bytes], held: Callable[[], Collection[bytes]], highest_held: int) -> list[OwnRead]:
    """Reads that cover ``wanted`` (any order), given a way to ask for the ids that are pending too (``held``) and the
    rank of the highest ever held.

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
