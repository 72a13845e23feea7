"""Recalls: decide which tickets to ask back from busy consumers, for one that has nothing to do. Pure.

What was handed over stays with its consumer until it is done, also when others have started since or are done sooner.
So a consumer with free handler slots, for which nothing waits, is found tickets that another one has and, by all that
is known, has not started: the youngest of those that are more than the other has slots. Whether they come is the
other's business: what it has started, it keeps, and says nothing. Memory changes when a record has been read again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from usher.master.policy.board.tickets import OPEN, BoardTicket, ConsumerLoad

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
