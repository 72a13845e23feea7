"""Limiter: holds back what live rules (``rules``) are about. Pure.

A ticket that a rule holds back is put aside here when its turn to be planned comes, and tries again when the rules
change, its time has come, or its owner is done. Tickets whose turn does not come cost nothing, and without rules no
ticket does. The limiter knows tickets only by what it holds of them; who owns them is not its business.

A rule for a tenant bounds what runs of it, over all consumers together. ``rate_per_second``: so many messages are
handed over per second. ``concurrency``: so many tickets are in processing at a time; a ticket runs one message after
the other, so no more messages run. The leader hands out both as tokens: a tenant that has none left is skipped by the
queue (``turns.FairQueue.holds``) until it has one again.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable

from usher.master.policy.board.tickets import BoardTicket
from usher.master.policy.rules import Rule, RuleAction, Rulebook, TokenBuckets

_ANY = 1 << 31
#: Rate of a rule that slows, and does not say how far.
_SLOWEST = 0.001


class Limiter:
    """Limiter of tickets and tenants. A ticket is put aside in at most one place, and is ``queued`` while it is."""

    def __init__(self) -> None:
        self.rules = Rulebook()
        self.has_rules = False  # asked for every part of a plan
        self._paused: deque[BoardTicket] = deque()
        self._slowed: list[tuple[float, int, BoardTicket]] = []  # a heap, by the time at which the ticket may go on
        self._number = itertools.count().__next__
        self._buckets, self._of_tenants = TokenBuckets(), TokenBuckets()
        self._running: dict[bytes, dict[bytes, BoardTicket]] = {}  # of each tenant with a concurrency
        self._gave_back = False
        self._now_s = 0.0

    def follow(self, rules: Rulebook, tickets: Iterable[BoardTicket]) -> list[BoardTicket]:
        """Follow these rules from now on. ``tickets``: all that may be in processing. Return those that were held back:
        every one tries again."""
        held, self._paused, self._slowed = self.held, deque(), []
        self.rules, self.has_rules = rules, not rules.is_empty
        self._running = {name: {} for name, rule in rules.tenant_limits.items() if rule.concurrency}
        for ticket in tickets if self._running else ():
            self.began(ticket)
        return held

    @property
    def held(self) -> list[BoardTicket]:
        """The tickets that are put aside."""
        return [*self._paused, *(ticket for _, _, ticket in self._slowed)]

    # ---- plans -------------------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> list[BoardTicket]:
        """Begin a plan: take out the slowed tickets that may go on by now; all of them when tokens were given back."""
        self._now_s = now_s
        due, due_s = list[BoardTicket](), math.inf if self._gave_back else now_s
        self._gave_back = False
        while self._slowed and self._slowed[0][0] <= due_s:
            due.append(heapq.heappop(self._slowed)[2])
        return due

    def allow(self, ticket: BoardTicket, most: int) -> int:
        """Return how many messages of the ticket, up to ``most``, may be planned now. With 0, the ticket is put
        aside."""
        tenant = ticket.tenant
        if self.rules.tenant_limits:
            most = min(most, self._room(tenant))
        if (rule := self.rules.of(ticket.name, tenant)) is None:
            return most
        if rule.action is RuleAction.SLOW:
            rate = rule.rate_per_second or _SLOWEST
            tokens = self._buckets.tokens(ticket.name, rate, self._now_s)
            if tokens < 1:
                ticket.queued = True
                heapq.heappush(self._slowed, (self._buckets.due_s(ticket.name, rate), self._number(), ticket))
            return min(most, tokens)
        ticket.queued = True
        self._paused.append(ticket)
        return 0

    def spend(self, ticket: BoardTicket, count: int) -> None:
        """Note that so many messages of a ticket were planned after ``allow``; with less than 0, that they were not
        handed over after all: a ticket that gets tokens back may go on before it was due."""
        if not self.has_rules:
            return
        self._gave_back = self._gave_back or count < 0
        if (rule := self.rules.of(ticket.name, ticket.tenant)) is not None and rule.action is RuleAction.SLOW:
            self._buckets.spend(ticket.name, count)
        if (limit := self.rules.tenant_limits.get(ticket.tenant)) is not None:
            if limit.rate_per_second:
                self._of_tenants.spend(ticket.tenant, count)
            self.began(ticket)

    def stays(self, ticket: BoardTicket) -> bool:
        """Return whether a rule speaks against asking a ticket back."""
        return self.has_rules and self.rules.of(ticket.name, ticket.tenant) is not None

    def next_due_s(self) -> float | None:
        return self._slowed[0][0] if self._slowed else None

    def due_of(self, name: bytes) -> float | None:
        """Return when this slowed ticket may go on; None: it is not slowed. For people: it searches all of them."""
        return next((due_s for due_s, _, ticket in list(self._slowed) if ticket.name == name), None)

    # ---- tenants -----------------------------------------------------------------------------------------------------

    def holds(self, tenant: bytes) -> bool:
        return tenant in self.rules.tenant_limits and self._room(tenant) <= 0

    def _room(self, tenant: bytes) -> int:
        if (rule := self.rules.tenant_limits.get(tenant)) is None:
            return _ANY
        if rule.concurrency:
            held = self._running[tenant]
            if len(held) >= rule.concurrency:
                held = self._running[tenant] = {name: ticket for name, ticket in held.items() if ticket.running}
            if len(held) >= rule.concurrency:
                return 0
        return self._of_tenants.tokens(tenant, rule.rate_per_second, self._now_s) if rule.rate_per_second else _ANY

    def began(self, ticket: BoardTicket) -> None:
        """Note that a ticket is in processing, if its tenant has a concurrency."""
        if ticket.running and (held := self._running.get(ticket.tenant)) is not None:
            held[ticket.name] = ticket

    def tenant_due_s(self, tenant: bytes) -> float | None:
        """Return when this held tenant may go on by its rate; None: it does not wait for a time."""
        rule = self.rules.tenant_limits.get(tenant)
        if rule is None or not rule.rate_per_second or self._is_full(tenant, rule):
            return None
        return self._of_tenants.due_s(tenant, rule.rate_per_second, self._now_s)

    def told(self, tenant: bytes) -> str:
        if (rule := self.rules.tenant_limits.get(tenant)) is None:
            return ""
        if self._is_full(tenant, rule):
            return f"tenant {rule.value} has its {rule.concurrency} of {rule.concurrency}"
        return f"tenant {rule.value} is {rule.told()}"

    def _is_full(self, tenant: bytes, rule: Rule) -> bool:
        running = sum(1 for ticket in list(self._running.get(tenant, {}).values()) if ticket.running)
        return rule.concurrency is not None and running >= rule.concurrency

    def drop_empty(self) -> None:
        """Drop tickets that have nothing parked any more: a rule may hold for long, and they would pile up."""
        for ticket in self.held:
            ticket.queued = bool(ticket.parked)
        self._paused = deque(ticket for ticket in self._paused if ticket.parked)
        self._slowed = [slowed for slowed in self._slowed if slowed[2].parked]
        heapq.heapify(self._slowed)
