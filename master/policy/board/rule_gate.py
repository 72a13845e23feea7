"""The part of the board that keeps the live rules (``rules``). Pure.

A ticket that a rule holds back is put aside when its turn to be planned comes, and tries again when the rules change,
its time has come, or its owner is done. Nothing is asked of tickets whose turn does not come, and nothing at all while
there are no rules. What is parked of a ticket that was put aside costs the others neither window nor room; and when
memory has as much parked as it may have, it leaves memory: Redis keeps account of it, as of a halted ticket, until the
ticket may move (``was_read``).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from usher.common.protocol.stream_id import before, rank
from usher.master.policy.board.ownership import Holdings
from usher.master.policy.board.plans import NOBODY, RETURNED
from usher.master.policy.board.tickets import BoardTicket, Standing
from usher.master.policy.rules import Rule, RuleAction, Rulebook, TicketTokenBuckets

#: What is kept of a slowed ticket when memory is full: what it may hand over in so many seconds.
_KEPT_S = 10.0


class Condemned(NamedTuple):
    """Parked ids of a ticket that become dead letters, and the rule that says so; ``believed``: the head of the
    ticket's record."""

    ticket: bytes
    believed: bytes
    ids: list[bytes]
    rule: Rule


class RuledHoldings(Holdings):
    """Who has what, and which tickets the rules hold back."""

    def __init__(self, ticket_window: int) -> None:
        super().__init__(ticket_window)
        self.rules = Rulebook()
        self._ruled = False  # whether any rule is about tickets
        self._paused: deque[BoardTicket] = deque()
        self._slowed: list[tuple[float, int, BoardTicket]] = []  # heap by the time at which it may go on
        self._order = 0
        self._gave_back = False
        self._condemned: dict[bytes, BoardTicket] = {}
        self._unloaded: dict[bytes, None] = {}
        self._buckets = TicketTokenBuckets()

    def follow(self, rules: Rulebook) -> None:
        """These are the rules from now on; every ticket that was held back tries again."""
        self.rules = rules
        self._ruled = not rules.is_empty
        waiting = deque([*(ticket for _, _, ticket in self._slowed), *self._condemned.values()])
        self._slowed.clear()
        self._condemned.clear()
        self._retry(self._paused)
        self._retry(waiting)
        for name in [name for name in self._unloaded if not self._is_paused(name)]:
            del self._unloaded[name]
            ticket = self.tickets.get(name)
            if ticket is not None and ticket.above is not None and ticket.standing is not Standing.HALTED:
                self._hidden[name] = None

    @property
    def redis_has_more(self) -> bool:
        """Whether there is much under ``master`` that memory does not know."""
        return bool(self._hidden or self._unloaded)

    def keep(self, incarnation: str) -> None:
        super().keep(incarnation)
        consumer = self.consumers[incarnation]
        if self.rules.of_consumer(consumer.name) is not None:
            self.join(incarnation, consumer.name, consumer.slots, consumer.capacity, False)

    def next_due_s(self) -> float | None:
        """When the next slowed ticket may go on."""
        return self._slowed[0][0] if self._slowed else None

    def due_of(self, name: bytes) -> float | None:
        """When this slowed ticket may go on; None when it is not held back for that. For people: it looks through
        all."""
        return next((due_s for due_s, _, ticket in list(self._slowed) if ticket.name == name), None)

    def window_is_full(self, ticket: BoardTicket) -> bool:
        """Whether its owner has as many of its entries as it may have at a time."""
        return len(ticket.running) >= self._window

    def _is_paused(self, name: bytes) -> bool:
        rule = self.rules.of(name)
        return rule is not None and rule.action is RuleAction.PAUSE

    def _wake_slowed(self, now_s: float) -> None:
        due_s = float("inf") if self._gave_back else now_s  # whoever got tokens back may go on before it was due
        self._gave_back = False
        while self._slowed and self._slowed[0][0] <= due_s:
            ticket = heapq.heappop(self._slowed)[2]
            ticket.queued = False
            self._queue(ticket)

    def _allowed(self, ticket: BoardTicket, most: int, now_s: float) -> int:
        """Up to ``most`` entries of the ticket that the rules let go now; with 0 it has been put aside."""
        rule = self.rules.of(ticket.name)
        if rule is None:
            return most
        if rule.action is RuleAction.SLOW:
            rate = rule.rate_per_second or 0.001
            tokens = self._buckets.tokens(ticket.name, rate, now_s)
            if tokens < 1:
                self._order += 1
                ticket.queued = True
                heapq.heappush(self._slowed, (self._buckets.due_s(ticket.name, rate), self._order, ticket))
            return min(most, tokens)
        if rule.action is RuleAction.PAUSE:
            ticket.queued = True
            self._paused.append(ticket)
        else:
            ticket.queued = True
            self._condemned[ticket.name] = ticket
        return 0

    def _spend(self, ticket: BoardTicket, count: int) -> None:
        """So many of it were planned, with what ``_allowed`` said."""
        rule = self.rules.of(ticket.name)
        if rule is not None and rule.action is RuleAction.SLOW:
            self._buckets.spend(ticket.name, count)

    def _give_back(self, ticket: BoardTicket, count: int) -> None:
        """So many of what was planned did not happen."""
        self._buckets.give_back(ticket.name, count)
        self._gave_back = True

    # ---- dead letters by rule ------------------------------------------------------------------------------------------------

    def condemned(self, most: int) -> list[Condemned]:
        """Up to ``most`` ids of tickets that a rule makes dead letters of, each ticket's from its lowest one on. Those
        of which an owner still has something wait until it is done: letters are written in order."""
        found: list[Condemned] = []
        for name, ticket in list(self._condemned.items()):
            rule = self.rules.of(name)
            if (
                rule is None
                or rule.action is not RuleAction.DEAD_LETTER
                or ticket.standing is not Standing.OPEN
                or not ticket.parked
            ):
                del self._condemned[name]
                ticket.queued = False
                self._queue(ticket)
                continue
            if ticket.running:
                continue
            ids = [entry_id for entry_id, _ in zip(ticket.parked, range(most), strict=False)]
            found.append(Condemned(name, ticket.believed, ids, rule))
            most -= len(ids)
            if most <= 0:
                break
        return found

    def buried(self, written: Iterable[Condemned], refused: Iterable[bytes]) -> list[bytes]:
        """These are dead letters now, but for the tickets that were refused. Returns the tickets whose records must be
        read again."""
        unsure = set(refused)
        for doomed in written:
            ticket = self._condemned.pop(doomed.ticket)
            ticket.queued = False
            if doomed.ticket in unsure:
                ticket.standing = Standing.UNSURE
                continue
            for _ in doomed.ids:
                ticket.parked.popleft()
            self.parked -= len(doomed.ids)
            if ticket.parked:
                ticket.queued = True
                self._condemned[ticket.name] = ticket
                continue
            if ticket.believed.startswith(RETURNED + b" "):
                unsure.add(ticket.name)  # its record went with the last of its ids, if memory had them all
                ticket.believed = NOBODY
                ticket.standing = Standing.UNSURE
            self._settle(ticket)
        return [name for name in unsure if name in self.tickets]

    # ---- memory --------------------------------------------------------------------------------------------------------------

    def _keeps(self, ticket: BoardTicket) -> int:
        rule = self.rules.of(ticket.name) if self._ruled else None
        if rule is None or rule.action is not RuleAction.SLOW:
            return self._window
        return min(self._window, 1 + int(_KEPT_S * (rule.rate_per_second or 0)))

    def forget(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """(id, ticket) of the entries that arrived last: they certainly were not taken from the stream, and will be
        seen there again."""
        for entry_id, name in reversed(entries):
            ticket = self.tickets.get(name)
            if ticket is not None and ticket.parked and ticket.parked[-1] == entry_id:
                ticket.parked.pop()
                self.parked -= 1
                if not ticket.parked and not ticket.running:
                    self._settle(ticket)
        # Who waits for a rule may wait for long: tickets that are no more are not to pile up there.
        for ticket in (*self._paused, *(ticket for _, _, ticket in self._slowed), *self._condemned.values()):
            ticket.queued = bool(ticket.parked)
        self._paused = deque(ticket for ticket in self._paused if ticket.parked)
        self._slowed = [slowed for slowed in self._slowed if slowed[2].parked]
        heapq.heapify(self._slowed)
        self._condemned = {name: ticket for name, ticket in self._condemned.items() if ticket.parked}

    def unload(self) -> None:
        """Too much is parked: what belongs to paused tickets, and to others that a rule holds back beyond what is worth
        having, leaves memory. Redis has it."""
        for ticket in self._paused:
            if ticket.parked and ticket.standing is Standing.OPEN:
                self._leave_reading(ticket)
                ticket.above = before(ticket.parked[0])
                self.parked -= len(ticket.parked)
                ticket.parked.clear()
                self._hidden.pop(ticket.name, None)
                self._unloaded[ticket.name] = None
        for ticket in [*(ticket for _, _, ticket in self._slowed), *self._condemned.values()]:
            keeps = self._keeps(ticket)
            beyond = len(ticket.parked) - keeps
            if beyond > 0 and ticket.standing is Standing.OPEN:
                self._leave_reading(ticket)
                kept = [ticket.parked.popleft() for _ in range(keeps)]
                assert rank(kept[-1]) < rank(ticket.parked[0])
                ticket.above, ticket.parked = kept[-1], deque(kept)
                self.parked -= beyond
                self._hidden[ticket.name] = None
