"""Rule gate and tenant limits: hold back what live rules (``rules``) are about. Pure.

A ticket that a rule holds back is put aside here when its turn to be planned comes, and tries again when the rules
change, its time has come, or its owner is done. Tickets whose turn does not come cost nothing, and without rules no
ticket does. The gate knows tickets only by what it holds of them; who owns them is not its business.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from usher.master.policy.board.tickets import BoardTicket
from usher.master.policy.rules import Rule, RuleAction, Rulebook, TicketTokenBuckets

#: Seconds' worth of a slowed ticket's messages, at its rate, that are kept in memory when memory is full.
_KEPT_S = 10.0
_ANY = 1 << 31


class RuleGate:
    """Gate that decides how much of a ticket may be planned, and keeps the tickets that may not: paused or slowed.

    A ticket is kept in at most one of these places, and is ``queued`` while it is.
    """

    def __init__(self, ticket_window: int) -> None:
        self.rules = Rulebook()
        self.has_rules = False  # asked for every part of a plan
        self._window = ticket_window
        self._paused: deque[BoardTicket] = deque()
        self._slowed: list[tuple[float, int, BoardTicket]] = []  # a heap, by the time at which the ticket may go on
        self._order = 0
        # Paused tickets of which only Redis keeps account, and their tenants.
        self._unloaded: dict[bytes, bytes] = {}
        self._buckets = TicketTokenBuckets()
        self._gave_back = False

    def follow(self, rules: Rulebook) -> tuple[list[BoardTicket], list[bytes]]:
        """Follow these rules from now on. Every ticket that was held back tries again."""
        self.rules = rules
        self.has_rules = not rules.is_empty
        held = [*self._paused, *self.slowed()]
        self._paused.clear()
        self._slowed.clear()
        unloaded = [name for name, tenant in self._unloaded.items() if not self._is_paused(name, tenant)]
        for name in unloaded:
            del self._unloaded[name]
        return held, unloaded

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
        ticket.queued = True
        self._paused.append(ticket)
        return 0

    def holds(self, ticket: BoardTicket) -> bool:
        return self.has_rules and self.rules.of(ticket.name, ticket.tenant) is not None

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
        return self._slowed[0][0] if self._slowed else None

    def due_of(self, name: bytes) -> float | None:
        """Return when this slowed ticket may go on; None: it is not slowed. For people: it searches all of them."""
        return next((due_s for due_s, _, ticket in list(self._slowed) if ticket.name == name), None)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def worth_keeping(self, ticket: BoardTicket) -> int:
        """Return how many messages of a ticket are worth having in memory when Redis keeps account of the others."""
        rule = self.rules.of(ticket.name, ticket.tenant) if self.has_rules else None
        if rule is None or rule.action is not RuleAction.SLOW:
            return self._window
        return min(self._window, 1 + int(_KEPT_S * (rule.rate_per_second or 0)))

    def paused(self) -> Sequence[BoardTicket]:
        return self._paused

    def slowed(self) -> list[BoardTicket]:
        return [ticket for _, _, ticket in self._slowed]

    def was_unloaded(self, ticket: BoardTicket) -> None:
        """Note that nothing of a paused ticket is in memory until it may move."""
        self._unloaded[ticket.name] = ticket.tenant

    def drop_empty(self) -> None:
        """Drop tickets that have nothing parked any more: a rule may hold for long, and they would pile up."""
        for ticket in (*self._paused, *self.slowed()):
            ticket.queued = bool(ticket.parked)
        self._paused = deque(ticket for ticket in self._paused if ticket.parked)
        self._slowed = [slowed for slowed in self._slowed if slowed[2].parked]
        heapq.heapify(self._slowed)


class TenantLimits:
    """Live rules that bound what runs of a tenant, over all consumers together, and what was handed out under them.

    ``rate_per_second``: so many messages are handed over per second. ``concurrency``: so many tickets are in processing
    at a time; a ticket runs one message after the other, so no more messages run. The leader hands out both as tokens:
    a tenant that has none left is skipped by the queue (``turns.FairQueue.holds``) until it has one again.
    """

    def __init__(self) -> None:
        self._rules: dict[bytes, Rule] = {}
        self._buckets = TicketTokenBuckets()
        self._running: dict[bytes, dict[bytes, BoardTicket]] = {}  # of each tenant with a concurrency
        self._now_s = 0.0

    def follow(self, rules: Rulebook, tickets: Iterable[BoardTicket]) -> None:
        """Follow these rules from now on. ``tickets``: all that may be in processing."""
        self._rules = rules.tenant_limits
        self._running = {name: {} for name, rule in self._rules.items() if rule.concurrency}
        for ticket in tickets if self._running else ():
            self.began(ticket)

    def begin(self, now_s: float) -> None:
        self._now_s = now_s

    def holds(self, tenant: bytes) -> bool:
        return tenant in self._rules and self.room(tenant) <= 0

    def room(self, tenant: bytes) -> int:
        rule = self._rules.get(tenant)
        if rule is None:
            return _ANY
        if rule.concurrency:
            held = self._running[tenant]
            if len(held) >= rule.concurrency:
                held = self._running[tenant] = {name: ticket for name, ticket in held.items() if ticket.running}
            if len(held) >= rule.concurrency:
                return 0
        return self._buckets.tokens(tenant, rule.rate_per_second, self._now_s) if rule.rate_per_second else _ANY

    def began(self, ticket: BoardTicket) -> None:
        """Note that a ticket is in processing, if its tenant has a concurrency."""
        if ticket.running and (held := self._running.get(ticket.tenant)) is not None:
            held[ticket.name] = ticket

    def spend(self, ticket: BoardTicket, messages: int) -> None:
        """Note that so many messages of a ticket were planned; with less than 0, that they were not handed over."""
        if (rule := self._rules.get(ticket.tenant)) is not None:
            if rule.rate_per_second:
                self._buckets.give_back(ticket.tenant, -messages)
            self.began(ticket)

    def due_s(self, tenant: bytes) -> float | None:
        """Return when this held tenant may go on by its rate; None: it does not wait for a time."""
        rule = self._rules.get(tenant)
        if rule is None or not rule.rate_per_second or self._is_full(tenant, rule):
            return None
        return self._buckets.due_s(tenant, rule.rate_per_second, self._now_s)

    def told(self, tenant: bytes) -> str:
        if (rule := self._rules.get(tenant)) is None:
            return ""
        if self._is_full(tenant, rule):
            return f"tenant {rule.value} has its {rule.concurrency} of {rule.concurrency}"
        return f"tenant {rule.value} is {rule.told()}"

    def _is_full(self, tenant: bytes, rule: Rule) -> bool:
        running = sum(1 for ticket in list(self._running.get(tenant, {}).values()) if ticket.running)
        return rule.concurrency is not None and running >= rule.concurrency
