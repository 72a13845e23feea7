"""Placement: choose the consumer of a ticket without an owner by rendezvous hashing with bounded load. Pure.

A ticket tends to come back to the same consumer (warm caches, connections), no consumer gets more than its share, and a
consumer that joins or leaves moves only the tickets that rank it first.

Rendezvous hashing: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998. Bounded load:
Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016. Ranking every consumer for every
ticket costs too much at 1,000 consumers, so tickets fall into slots and the ranking is kept per slot; and of very many
consumers, only the next ones behind a slot on a ring are ranked for it.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import heapq
import zlib
from collections.abc import Iterable, Sequence

from usher.master.policy.board.tickets import BoardTicket, ConsumerLoad

_SLOTS = 4096
#: Consumers ranked per slot; when all of these are over the bound, the least loaded of all consumers gets the ticket.
_RANKED = 8
#: Consumers on the ring that are looked at for a slot.
_LOOKED_AT = 24
#: The "1 + e" of bounded load: no consumer is given more than a quarter above the mean.
_OVER_MEAN = 1.25


def _score(slot: int, name: str) -> bytes:
    return hashlib.blake2b(f"{slot}/{name}".encode(), digest_size=8).digest()


@functools.lru_cache(16_384)
def _place(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


class Affinity:
    """Ranking of consumer names per ticket. Made anew whenever the roster changes. Names, not incarnations, are ranked,
    so that a restarted consumer gets its tickets back."""

    def __init__(self, names: Iterable[str]) -> None:
        self._ring = sorted((_place(name), name) for name in set(names))
        self._ranked: dict[int, Sequence[str]] = {}

    def ranking(self, ticket: bytes) -> Sequence[str]:
        """Return up to ``_RANKED`` names, best first.

        >>> Affinity(["c1"]).ranking(b"42")
        ['c1']
        """
        slot = zlib.crc32(ticket) % _SLOTS
        ranked = self._ranked.get(slot)
        if ranked is None:
            at = bisect.bisect(self._ring, (_place(f"slot {slot}"), ""))
            near = [name for _, name in (self._ring[at:] + self._ring[:at])[:_LOOKED_AT]]
            ranked = self._ranked[slot] = heapq.nlargest(_RANKED, near, key=lambda name: _score(slot, name))
        return ranked


class OpenConsumers:
    """The consumers that accept work at the moment, to choose from. Made anew whenever they change; loads are read
    live.

    They are sorted at the first use: a thousand may join one after the other.
    """

    def __init__(self, consumers: Iterable[ConsumerLoad]) -> None:
        self._consumers = consumers

    @functools.cached_property
    def _by_name(self) -> dict[str, ConsumerLoad]:
        # An outdated roster may bring a former incarnation back for a moment: the highest generation counts.
        open_ones = (consumer for consumer in self._consumers if consumer.accepts)
        by_generation = sorted(open_ones, key=lambda consumer: (len(consumer.incarnation), consumer.incarnation))
        return {consumer.name: consumer for consumer in by_generation}

    @functools.cached_property
    def _affinity(self) -> Affinity:
        return Affinity(self._by_name)

    @functools.cached_property
    def _unfilled(self) -> dict[str, ConsumerLoad]:
        """Consumers that have room, and some that had it: few to look at, where a thousand are busy."""
        return dict(self._by_name)

    @property
    def room(self) -> int:
        return sum(consumer.room for consumer in self._with_room())

    def has_room_again(self, consumer: ConsumerLoad) -> None:
        """Look again at a consumer that was full."""
        if self._by_name.get(consumer.name) is consumer:
            self._unfilled[consumer.name] = consumer

    def _with_room(self) -> Iterable[ConsumerLoad]:
        for name in [name for name, consumer in self._unfilled.items() if consumer.room <= 0]:
            del self._unfilled[name]
        return self._unfilled.values()

    def bound(self, in_flight: int) -> int:
        """Return the number of messages that each may have in flight before tickets go to others. ``in_flight``: the
        sum."""
        return int(_OVER_MEAN * (in_flight + 1) / len(self._by_name)) + 1 if self._by_name else 0

    def choose(self, ticket: BoardTicket, bound: int) -> ConsumerLoad | None:
        """Choose the ticket's former consumer after a crash, or who it was asked back for, else the best ranked below
        the bound, else the least loaded.

        Return None when no consumer has room. A consumer with a free handler slot is never over the bound: at low load,
        tickets stay where they belong. Load is compared in seconds of work: by what each may have. An urgent one
        waits for no pace, only for capacity: its consumer runs it next.
        """
        names, found = self._affinity.ranking(ticket.name), self._by_name.get
        for name in (ticket.home, *names) if ticket.home else names:
            consumer = found(name)
            if consumer is None:
                continue
            load = consumer.in_flight
            if load >= consumer.pace.window and consumer.room <= 0:  # the former first: it costs less, for every ticket
                continue
            if load < bound or load < consumer.slots:
                return consumer
            if name == ticket.home and consumer.busy_tickets < consumer.slots:  # many messages, but of few tickets
                return consumer
        having_room: Iterable[ConsumerLoad] = self._with_room()
        if ticket.priority and not self._unfilled:
            having_room = (one for one in self._by_name.values() if one.in_flight < one.capacity)
        return min(having_room, key=lambda consumer: consumer.in_flight / consumer.pace.window, default=None)
