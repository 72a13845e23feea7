"""Placement: choose the consumer of a ticket without an owner, by rendezvous hashing with bounded load; and the tickets
to ask back from busy consumers, for one that has nothing to do. Pure.

A ticket tends to come back to the same consumer (warm caches, connections), no consumer gets more than its share, and a
consumer that joins or leaves moves only the tickets that rank it first.

Rendezvous hashing: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998. Bounded load:
Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016. Ranking every consumer for every
ticket costs too much at 1,000 consumers, so tickets fall into slots and the ranking is kept per slot; and of very many
consumers, only the next ones behind a slot on a ring are ranked for it.

What was handed over stays with its consumer until it is done, also when others have started since or are done sooner.
So a consumer with free handler slots, for which nothing waits, is found tickets that another one has and, by all that
is known, has not started: the youngest of those that are more than the other has slots. Whether they come is the
other's business: what it has started, it keeps, and says nothing. Memory changes when a record has been read again.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import heapq
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from usher.master.policy.board.tickets import OPEN, BoardTicket, ConsumerLoad

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


#: Least time between two looks: in all, and for each consumer.
_LOOK_S, _LOOK_EACH_S = 0.01, 0.00002
#: A ticket that was handed over a shorter time ago is not worth asking for: it may be done before it could come back.
_YOUNG_S = 0.05
#: Work of a shorter time is not worth asking for. A consumer that keeps up tells only twice a second what it has done.
_WORTH_S = 0.75
#: Who is asked has answered within this time, or is as good as silent: it may be asked for other tickets.
_ANSWER_S = 0.5
#: A ticket that did not come back has been started, and is not asked for again for so long.
_FUTILE_S = 5.0
#: Most tickets of one recall.
_MOST = 100


@dataclass
class Asked:
    """A ticket that was asked back from its owner, an incarnation, for another consumer. ``holds``: it is ``queued``
    here, so that its new entries stay parked meanwhile."""

    ticket: BoardTicket
    owner: str
    idle: str
    at_s: float
    holds: bool


def _older(asked: dict[bytes, Asked], than_s: float) -> Iterator[Asked]:
    while asked and (first := next(iter(asked.values()))).at_s <= than_s:
        del asked[first.ticket.name]
        yield first


class Recalls:
    """The tickets that were asked back, oldest question first. ``unanswered``: those that may yet come back."""

    def __init__(self, stays: Callable[[BoardTicket], bool]) -> None:
        """``stays``: whether a rule speaks against asking a ticket back."""
        self.asked: dict[bytes, Asked] = {}
        self.unanswered: dict[bytes, Asked] = {}
        self._stays = stays
        self._came_back = 0
        self._look_s = 0.0  # no look before that
        self._again_s = math.inf  # when to look again, whatever happens meanwhile
        self._enough = 0.0  # with so few tickets, no consumer has more than slots
        self._in_vain = False  # the last look found only tickets that stay

    def pause(self, again_s: float = math.inf) -> None:
        """Note that there is nothing to do until then: something waits for the consumers."""
        self._again_s = again_s

    def changed(self) -> None:
        """Note that the consumers, or the rules, are not what they were at the last look."""
        self._enough, self._in_vain = 0.0, False

    def next_due_s(self) -> float:
        """Return when there may be something to do although nothing happens until then; infinite: never."""
        answer_s = next((asked.at_s + _ANSWER_S for asked in self.unanswered.values()), math.inf)
        return min(answer_s, self._again_s)

    def recallable(self, consumers: Iterable[ConsumerLoad], now_s: float) -> int:
        """Count the tickets that would be asked back, were there a consumer with nothing to do."""
        if self._in_vain:
            return 0
        worth = [one for one in consumers if one.accepts and one.pace.left_s(one.in_flight, now_s) >= _WORTH_S]
        return sum(max(0, one.busy_tickets - one.slots) for one in worth)

    def take_came_back(self) -> int:
        count, self._came_back = self._came_back, 0
        return count

    def returned(self, asked: Asked) -> None:
        """Let who has nothing to do get a ticket that came back: its rank alone would send it where it was."""
        asked.ticket.home = asked.idle
        self._came_back += 1

    def forget(self, name: bytes) -> Asked | None:
        """Forget that a ticket was asked back: something of it was done, or its record is read again."""
        asked = self.asked.pop(name, None)
        self.unanswered.pop(name, None)
        if asked is not None and asked.holds:
            asked.ticket.queued = asked.holds = False
        return asked

    def release(self, now_s: float) -> list[BoardTicket]:
        """Return the held tickets whose owners stay silent; their new entries go on to them."""
        held = []
        for asked in _older(self.unanswered, now_s - _ANSWER_S):
            if asked.holds:
                asked.ticket.queued = asked.holds = False
                held.append(asked.ticket)
        for _ in _older(self.asked, now_s - _FUTILE_S):
            pass
        return held

    def choose(
        self, consumers: Mapping[str, ConsumerLoad], tickets: Mapping[bytes, BoardTicket], now_s: float
    ) -> list[tuple[str, list[bytes]]]:
        """Choose the tickets to ask back now, by incarnation. Nothing waits for any consumer, and ``release`` was
        called."""
        self._again_s = math.inf
        if len(tickets) <= self._enough:
            return []
        if now_s < self._look_s:
            self._again_s = self._look_s
            return []
        self._look_s = now_s + _LOOK_S + _LOOK_EACH_S * len(consumers)
        givers = [one for one in consumers.values() if one.accepts]
        self._enough = min((one.slots for one in givers), default=math.inf)
        idle = [one for one in givers if one.busy_tickets < one.slots]
        left = [(one.pace.left_s(one.in_flight, now_s), one) for one in givers if one.busy_tickets > one.slots]
        if busy := [one for left_s, one in left if left_s >= _WORTH_S] if idle else []:
            return self._match(idle, busy, tickets, now_s)
        if idle and left:
            self._again_s = now_s + _WORTH_S - max(left_s for left_s, _ in left)
        return []

    def _match(
        self, idle: list[ConsumerLoad], busy: list[ConsumerLoad], tickets: Mapping[bytes, BoardTicket], now_s: float
    ) -> list[tuple[str, list[bytes]]]:
        """Ask each busy one, the longest work first, for what it has beyond its share; no idle one gets more than its
        own."""
        slots = sum(one.slots for one in (*idle, *busy))
        share = sum(one.busy_tickets for one in (*idle, *busy)) / slots  # tickets per slot
        self._in_vain = False
        unanswered = self.unanswered.values()
        being_asked, coming = {asked.owner for asked in unanswered}, Counter(asked.idle for asked in unanswered)
        wanting: list[str] = []
        for one in sorted(idle, key=lambda one: one.busy_tickets / one.slots):
            own = max(1, min(one.pace.tickets, int(share * one.slots))) - one.busy_tickets - coming[one.name]
            wanting += [one.name] * min(own, one.room)
        recalls = []
        for one in sorted(busy, key=lambda one: one.in_flight / one.pace.window, reverse=True):
            most = min(one.busy_tickets - max(one.slots, int(share * one.slots)), len(wanting), _MOST)
            if one.incarnation in being_asked or most <= 0:
                continue
            chosen = list(islice(self._unstarted(one, tickets, now_s), most))
            for ticket in chosen:
                asked = Asked(ticket, one.incarnation, wanting.pop(0), now_s, not ticket.queued)
                self.asked[ticket.name] = self.unanswered[ticket.name] = asked
                ticket.queued = True
            if chosen:
                recalls.append((one.incarnation, [ticket.name for ticket in chosen]))
        self._in_vain = self._in_vain and not recalls
        return recalls

    def _unstarted(
        self, one: ConsumerLoad, tickets: Mapping[bytes, BoardTicket], now_s: float
    ) -> Iterator[BoardTicket]:
        """Yield the tickets of a consumer that it has hardly started, the youngest first; none behind many that
        stay."""
        stay = 0
        for name in islice(reversed(one.tickets), one.busy_tickets - one.slots):
            ticket = tickets[name]
            if name in self.asked or ticket.standing is not OPEN or not ticket.running:
                continue
            if self._stays(ticket):
                self._in_vain, stay = True, stay + 1
                if stay >= _MOST:
                    return
            elif now_s >= ticket.compared_s + _YOUNG_S:
                yield ticket
            else:
                self._again_s = min(self._again_s, ticket.compared_s + _YOUNG_S)
