"""The reads of our own pending list that bring the bodies of exactly the wanted ids. Pure.

``XREADGROUP ... 0`` from the start would bring everything pending on every turn and count it as delivered again. Ids
lower than those held do come (of a ticket that was given back, taken back or parked for long), so one read from the
lowest wanted id is not enough either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from usher.common.protocol.stream_id import from_rank, rank

#: More separate runs of ids than this are read as one: many commands in a round trip cost more than bodies read twice.
_MOST_RUNS = 16
#: Most messages that the first fetch, and any fetch, asks for; and about how many bytes.
FIRST_PAGE, _MOST_PAGE, PAGE_BYTES = 4, 1000, 16 * 1024 * 1024
#: A larger page may follow one that came in less than the first time, counted from its first byte; a smaller page
#: follows one that took longer than the second. In seconds.
_FAST_S, _SLOW_S = 0.2, 1.0


class OwnRead(NamedTuple):
    """A read of up to ``most`` entries of our own pending list, above the id ``after``."""

    after: bytes
    most: int


def next_page(page: int, fetched: int, took_s: float | None) -> int:
    """Return the most messages of the next fetch, after one of up to ``page`` that asked for ``fetched`` (0: it asked
    for none, and proves nothing). ``took_s``: from the first byte to the last, so that a distant or busy server does
    not count as a narrow network. None: the fetch was cut off.

    >>> next_page(16, 16, 0.01), next_page(16, 3, 0.01), next_page(16, 16, 5.0)
    (64, 16, 8)
    >>> next_page(16, 16, None), next_page(16, 0, None)
    (4, 16)
    """
    if not fetched:
        return page
    if took_s is None:
        return max(1, min(page, fetched) // 4)
    if took_s > _SLOW_S:
        return max(1, min(page, fetched) // 2)
    return min(_MOST_PAGE, 4 * page) if took_s < _FAST_S and fetched >= page else page


def fitting(page: int, mean_bytes: float, room: int) -> int:
    """Return how many messages of up to ``page`` to fetch at once, where those of the last page had ``mean_bytes``, and
    there is ``room`` for so many bytes: at least one.

    >>> fitting(64, 100.0, 1 << 28), fitting(64, 1e6, 1 << 28), fitting(64, 1e6, 3_000_000), fitting(64, 1e6, -5)
    (64, 16, 3, 1)
    """
    return max(1, min(page, int(min(PAGE_BYTES, room) / max(1.0, mean_bytes))))


def plan_reads(wanted: Sequence[bytes], held: Callable[[], Collection[bytes]], highest_held: int) -> list[OwnRead]:
    """Return the reads that cover ``wanted`` (in any order). ``held`` gives the other ids that are pending,
    ``highest_held`` is the rank of the highest id ever held.

    In the usual case, all new ids above all old ones, it is one read of exactly their number.
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
