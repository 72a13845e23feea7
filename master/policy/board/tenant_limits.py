"""Tenant limits: live rules that bound what runs of a tenant, over all consumers together. Pure.

``rate_per_second``: so many messages are handed over per second. ``concurrency``: so many tickets are in processing at
a time; a ticket runs one message after the other, so no more messages run. The leader hands out both as tokens: a
tenant that has none left is skipped by the queue (``turns.FairQueue.holds``) until it has one again.
"""

from __future__ import annotations

from collections.abc import Iterable

from usher.master.policy.board.tickets import BoardTicket
from usher.master.policy.rules import Rule, Rulebook, TicketTokenBuckets

_ANY = 1 << 31


class TenantLimits:
    """The limits that hold, and what was handed out under them."""

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
        """Begin a plan."""
        self._now_s = now_s

    def holds(self, tenant: bytes) -> bool:
        """Return whether nothing of the tenant may be planned now."""
        return tenant in self._rules and self.room(tenant) <= 0

    def room(self, tenant: bytes) -> int:
        """Return how many messages of the tenant's next ticket may be planned now."""
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
        """Describe for people what holds the tenant."""
        if (rule := self._rules.get(tenant)) is None:
            return ""
        if self._is_full(tenant, rule):
            return f"tenant {rule.value} has its {rule.concurrency} of {rule.concurrency}"
        return f"tenant {rule.value} is {rule.told()}"

    def _is_full(self, tenant: bytes, rule: Rule) -> bool:
        running = sum(1 for ticket in list(self._running.get(tenant, {}).values()) if ticket.running)
        return rule.concurrency is not None and running >= rule.concurrency
