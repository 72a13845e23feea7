"""Which consumer gets a ticket that nobody has: rendezvous hashing with bounded load.

A ticket tends to come back to the same consumer (warm caches, connections), no consumer gets more than its share, and a consumer
that joins or leaves moves only the tickets that rank it first.

Rendezvous hashing: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998. Bounded load: Mirrokni, Thorup
and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016. Ranking every consumer for every ticket costs too much at 1,000
consumers, so tickets fall into slots and the ranking is kept per slot; and of very many consumers, only the next ones behind a slot on a ring
are ranked for it.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import heapq
import zlib
from collections.abc import Iterable, Sequence

_SLOTS = 4096
#: Consumers ranked per slot; when all of these are over the bound, the least loaded one of all gets the ticket.
_RANKED = 8
#: Consumers on the ring that are looked at for a slot.
_LOOKED_AT = 24
#: The "1 + e" of bounded load: nobody is given more than a quarter above the mean.
_OVER_MEAN = 1.25


def _score(slot: int, name: str) -> bytes:
    return hashlib.blake2b(f"{slot}/{name}".encode(), digest_size=8).digest()


@functools.lru_cache(16_384)
def _place(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


class Affinity:
    """The ranking of consumer names per ticket. Rebuilt whenever the roster changes; names, not incarnations, are ranked, so that a
    restarted consumer gets its tickets back."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(sorted(set(names)))
        self._ring = sorted((_place(name), name) for name in self._names) if len(self._names) > _LOOKED_AT else []
        self._ranked: dict[int, Sequence[str]] = {}

    def ranking(self, ticket: bytes) -> Sequence[str]:
        """Up to ``_RANKED`` names, best first.

        >>> Affinity(["c1"]).ranking(b"42")
        ['c1']
        """
        slot = zlib.crc32(ticket) % _SLOTS
        ranked = self._ranked.get(slot)
        if ranked is None:
            ranked = self._ranked[slot] = heapq.nlargest(_RANKED, self._candidates(slot), key=lambda name: _score(slot, name))
        return ranked

    def _candidates(self, slot: int) -> Sequence[str]:
        if not self._ring:
            return self._names
        at = bisect.bisect(self._ring, (_place(f"slot {slot}"), ""))
        return [name for _, name in (self._ring[at : at + _LOOKED_AT] + self._ring[: max(0, at + _LOOKED_AT - len(self._ring))])]


def load_bound(in_flight: int, consumers: int) -> int:
    """Messages that one consumer may have in flight before tickets go to others, from the sum over all ``consumers``."""
    return int(_OVER_MEAN * (in_flight + 1) / consumers) + 1
