"""Rule gate: holds back the tickets that live rules (``rules``) are about. Pure.

A ticket that a rule holds back is put aside here when its turn to be planned comes, and tries again when the rules
change, its time has come, or its owner is done. Tickets whose turn does not come cost nothing, and without rules no
ticket does. The gate knows tickets only by what it holds of them; who owns them is not its business (``ownership``).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from usher.master.policy.board.tickets import BoardTicket, Standing
from usher.master.policy.rules import Rule, RuleAction, Rulebook, TicketTokenBuckets

#: Seconds' worth of a slowed ticket's messages, at its rate, that are kept in memory when memory is full.
_KEPT_S = 10.0


class Condemned(NamedTuple):
    """Parked ids that become dead letters, and the rule that says so. ``believed``: the head of the ticket's record."""

    ticket: bytes
    believed: bytes
    ids: list[bytes]
    rule: Rule


class Released(NamedTuple):
    """Tickets that new rules let go: those that try again, and those that may be read into memory again."""

    tickets: list[BoardTicket]
    unloaded: list[bytes]


class RuleGate:
    """Gate that decides how much of a ticket may be planned, and keeps the tickets that may not: paused, slowed, or
    condemned.

    A ticket is kept in at most one of these places, and is ``queued`` while it is.
    """

    def __init__(self, ticket_window: int) -> None:
        self.rules = Rulebook()
        self.has_rules = self.has_routes = False  # asked for every part of a plan
        self._window = ticket_window
        self._paused: deque[BoardTicket] = deque()
        self._slowed: list[tuple[float, int, BoardTicket]] = []  # a heap, by the time at which the ticket may go on
        self._order = 0
        self._condemned: dict[bytes, BoardTicket] = {}
        # Paused tickets of which only Redis keeps account, and their tenants.
        self._unloaded: dict[bytes, bytes] = {}
        self._buckets = TicketTokenBuckets()
        self._gave_back = False

    def follow(self, rules: Rulebook) -> Released:
        """Follow these rules from now on. Every ticket that was held back tries again."""
        self.rules = rules
        self.has_rules, self.has_routes = not rules.is_empty, rules.has_routes
        held = [*self._paused, *self.slowed_or_condemned()]
        self._paused.clear()
        self._slowed.clear()
        self._condemned.clear()
        unloaded = [name for name, tenant in self._unloaded.items() if not self._is_paused(name, tenant)]
        for name in unloaded:
            del self._unloaded[name]
        return Released(held, unloaded)

    def _is_paused(self, name: bytes, tenant: bytes) -> bool:
        rule = self.rules.of(name, tenant)
        return rule is not None and rule.action is RuleAction.PAUSE

    # ---- plans -------------------------------------------------------------------------------------------------------

    def allow(self, ticket: BoardTicket, most: int, now_s: float) -> int:
        """Return how many messages of the ticket, up to ``most``, may be planned now. With 0, the ticket is put
        aside."""
        rule = self.rules.of(ticket.name, ticket.tenant)
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
            self.condemn(ticket)
        return 0

    def holds(self, ticket: BoardTicket) -> bool:
        """Return whether a rule holds the ticket back, or slows it."""
        return self.has_rules and self.rules.of(ticket.name, ticket.tenant) is not None

    def route(self, ticket: BoardTicket) -> str:
        """Return the name of the consumer that is to have the ticket by a rule, or ""."""
        return self.rules.route_of(ticket.name, ticket.tenant) if self.has_routes else ""

    def spend(self, name: bytes, count: int) -> None:
        """Spend tokens for messages of a ticket that were planned after ``allow``."""
        rule = self.rules.of(name)
        if rule is not None and rule.action is RuleAction.SLOW:
            self._buckets.spend(name, count)

    def give_back(self, name: bytes, count: int) -> None:
        """Give back the tokens of messages that were planned and did not go out."""
        if self.has_rules:
            self._buckets.give_back(name, count)
            self._gave_back = True

    def take_due(self, now_s: float) -> list[BoardTicket]:
        """Take out the slowed tickets that may go on by now; all of them when tokens were given back."""
        if not self._slowed:
            return []
        due_s = float("inf") if self._gave_back else now_s  # a ticket that got tokens back may go on before it was due
        self._gave_back = False
        due = []
        while self._slowed and self._slowed[0][0] <= due_s:
            due.append(heapq.heappop(self._slowed)[2])
        return due

    def next_due_s(self) -> float | None:
        """Return when the next slowed ticket may go on; None: no ticket is slowed."""
        return self._slowed[0][0] if self._slowed else None

    def due_of(self, name: bytes) -> float | None:
        """Return when this slowed ticket may go on; None: it is not slowed. For people: it searches all of them."""
        return next((due_s for due_s, _, ticket in list(self._slowed) if ticket.name == name), None)

    # ---- dead letters by rule ----------------------------------------------------------------------------------------

    def condemn(self, ticket: BoardTicket) -> None:
        """Keep a ticket whose parked messages all become dead letters."""
        ticket.queued = True
        self._condemned[ticket.name] = ticket

    def condemned(self, most: int) -> tuple[list[Condemned], list[BoardTicket]]:
        """Return up to ``most`` ids that become dead letters, each ticket's from its lowest one on.

        Tickets of which an owner still has something wait until it is done: letters are written in order. Also returned
        are the tickets that are no longer condemned: they are taken out, and try again.
        """
        found: list[Condemned] = []
        spared: list[BoardTicket] = []
        for name, ticket in list(self._condemned.items()):
            rule = self.rules.of(name, ticket.tenant)
            may_end = ticket.standing is Standing.OPEN and ticket.parked
            if rule is None or rule.action is not RuleAction.DEAD_LETTER or not may_end:
                spared.append(self.acquit(name))
                continue
            if ticket.running:
                continue
            ids = [entry_id for entry_id, _ in zip(ticket.parked, range(most), strict=False)]
            found.append(Condemned(name, ticket.believed, ids, rule))
            most -= len(ids)
            if most <= 0:
                break
        return found, spared

    def acquit(self, name: bytes) -> BoardTicket:
        """Take a condemned ticket out."""
        ticket = self._condemned.pop(name)
        ticket.queued = False
        return ticket

    # ---- memory ------------------------------------------------------------------------------------------------------

    @property
    def has_unloaded(self) -> bool:
        """Return whether only Redis keeps account of some paused tickets."""
        return bool(self._unloaded)

    def worth_keeping(self, ticket: BoardTicket) -> int:
        """Return how many messages of a ticket are worth having in memory when Redis keeps account of the others."""
        rule = self.rules.of(ticket.name, ticket.tenant) if self.has_rules else None
        if rule is None or rule.action is not RuleAction.SLOW:
            return self._window
        return min(self._window, 1 + int(_KEPT_S * (rule.rate_per_second or 0)))

    def paused(self) -> Sequence[BoardTicket]:
        """Return the tickets of which nothing needs to be in memory."""
        return self._paused

    def slowed_or_condemned(self) -> list[BoardTicket]:
        """Return the tickets of which only messages worth keeping need to be in memory: slowed and condemned ones."""
        return [*(ticket for _, _, ticket in self._slowed), *self._condemned.values()]

    def was_unloaded(self, ticket: BoardTicket) -> None:
        """Note that nothing of a paused ticket is in memory until it may move."""
        self._unloaded[ticket.name] = ticket.tenant

    def drop_empty(self) -> None:
        """Drop tickets that have nothing parked any more: a rule may hold for long, and they would pile up."""
        for ticket in (*self._paused, *self.slowed_or_condemned()):
            ticket.queued = bool(ticket.parked)
        self._paused = deque(ticket for ticket in self._paused if ticket.parked)
        self._slowed = [slowed for slowed in self._slowed if slowed[2].parked]
        heapq.heapify(self._slowed)
        self._condemned = {name: ticket for name, ticket in self._condemned.items() if ticket.parked}
