"""Turns: in which order tickets are planned where tenants or priorities are configured, and which live rules hold back.
Pure.

Tenants take turns: of those that wait, the one that was given least for its weight is next (start-time fair queueing:
the shares of deficit round robin, but who was quiet is next at once, and not at the end of a round). Being quiet saves
nothing up, and one tenant alone gets everything. The unit is a message.

Of a tenant, the most urgent ticket is next. Each level of priority counts as ``AGE_S`` seconds of waiting, so that a
ticket waits behind none of its tenant's that came more than ``MOST_URGENT * AGE_S`` seconds after it.

Goyal, Vin and Cheng, "Start-time Fair Queuing", 1996.

Live rules (``rules``) hold back. A ticket that one holds back is put aside when its turn to be planned comes, and tries
again when the rules change, its time has come, or its owner is done; without rules no ticket costs anything. A rule for
a tenant bounds what runs of it, over all consumers together: ``rate_per_second`` messages, ``concurrency`` tickets at a
time, as a ticket runs one message after the other. The leader hands out both as tokens: a tenant that has none left is
skipped until it has one again.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from usher.common.protocol.marks import Mark
from usher.master.policy.board.tickets import BoardTicket, RunQueue, Standing, TicketMarks
from usher.master.policy.rules import Rule, RuleAction, Rulebook, TokenBuckets

#: Seconds of waiting that one level of priority is worth.
AGE_S = 10.0
#: Most tenants that have turns of their own: those with a weight or a live rule, and the first others; tenants beyond
#: these, which anybody may invent, share one queue, of the weight of so many.
_MOST, _WEIGHT_OF_REST = 2000, 200.0
_REST = b"(all other tenants)"
#: Number of outdated places that do not matter.
_OUTDATED = 64


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant. ``due``: when its turn is, in messages that a tenant of weight 1 was given. ``given``: number of its
    messages that were planned. ``waiting``: number of its tickets that wait for their turns, in a heap that may also
    have outdated places of them."""

    name: bytes
    weight: float
    due: float = 0.0
    given: int = 0
    places: list[_Place] = field(default_factory=list)
    waiting: int = 0
    is_held: bool = False


#: Place of a ticket: since when it waits, less what its priority is worth; which ticket came first; which place; the
#: ticket.
_Place = tuple[float, int, int, BoardTicket]


class FairQueue(RunQueue):
    """The run queue, in which tenants take turns. ``holds``: returns whether nothing of a tenant may be planned now;
    it is asked again by ``begin``."""

    def __init__(self, ticket_window: int, weights: Mapping[bytes, float], holds: Callable[[bytes], bool]) -> None:
        super().__init__(ticket_window)
        self.holds = holds
        self._weights = weights
        self._tenants: dict[bytes, _Tenant] = {}
        self._rest = _Tenant(_REST, _WEIGHT_OF_REST)
        self._is_full = False  # as was seen since the plan began
        self._turns: list[tuple[float, int, _Tenant]] = []  # a heap; a tenant may also be in it where it was before
        self._held: list[_Tenant] = []
        self._number = itertools.count().__next__
        self.lined_up = 0  # tickets that wait for their turns
        self._now_s = 0.0
        self._last = 0.0  # the turn that was had last
        self._urgent_came = False  # since a ticket found no consumer

    def begin(self, now_s: float) -> None:
        self._now_s, self._is_full = now_s, False
        held, self._held = self._held, []
        for tenant in held:
            if self.holds(tenant.name):
                self._held.append(tenant)
            else:
                tenant.is_held = False
                self._enter(tenant)

    def weigh(self, weights: Mapping[bytes, float]) -> None:
        self._weights = weights
        for tenant in self._tenants.values():
            tenant.weight = weights.get(tenant.name, 1.0)

    @property
    def held(self) -> list[bytes]:
        """Tenants of which nothing may be planned now, and something waits."""
        return [tenant.name for tenant in self._held]

    def tenants(self) -> dict[bytes, tuple[int, int, float, bool]]:
        """Return, for each tenant, how many of its messages were planned, how many of its tickets wait for their turns,
        its weight, and whether it is held. For people."""
        return {one.name: (one.given, one.waiting, one.weight, one.is_held) for one in self._all()}

    def is_behind_urgent(self, ticket: BoardTicket) -> bool:
        """Return whether a more urgent ticket of its tenant has its turn before this one. For people: it looks at all
        of them."""
        marks, mine = ticket.marks, ticket.priority
        places = list(marks.line.places) if marks is not None and marks.line is not None else []
        turn = marks.turn if marks is not None else None
        return isinstance(turn, tuple) and any(
            place < turn and place[-1].priority > mine and _is_valid(place) for place in places
        )

    @property
    def has_runnable(self) -> bool:
        # One that found no consumer means that none has room: nobody else need ask, unless it is urgent.
        return (self._urgent_came or not self._unassigned) and self._next_tenant() is not None

    @property
    def is_waiting(self) -> bool:
        return bool(self._unassigned or self._next_tenant() or self._held)

    def next_runnable(self) -> BoardTicket | None:
        while self.has_runnable and (tenant := self._next_tenant()) is not None:
            self._last = tenant.due
            ticket = self._leave(tenant)
            if tenant is self._rest and self.holds(ticket.tenant):
                self._line_up(ticket)  # under a rule it waits by itself
                continue
            ticket.queued = False
            if ticket.standing is Standing.OPEN and ticket.parked:
                return ticket
        return None

    def wait_unassigned(self, ticket: BoardTicket) -> None:
        super().wait_unassigned(ticket)
        self._urgent_came = False

    def spend(self, ticket: BoardTicket, messages: int) -> None:
        """Note that so many messages of the ticket were planned; with less than 0, that they were not handed over
        after all."""
        marks = ticket.marks
        tenant = self._rest if marks is not None and marks.line is self._rest else self._of(ticket.tenant)
        tenant.due = max(0.0, tenant.due + messages / tenant.weight)
        tenant.given += messages
        if messages > 0 and marks is not None:
            marks.since = None
            if marks.turn is not None:  # what is left of it waits anew
                self._move(ticket, marks)
        self._last = min(self._last, tenant.due) if messages < 0 else self._last
        if tenant.waiting and not tenant.is_held:
            self._push(tenant)

    def learn(self, ticket: BoardTicket, mark: Mark) -> None:
        """Learn the mark of one of the ticket's messages; it may get another place by it."""
        marks = ticket.marks = ticket.marks or TicketMarks()
        tenant, priority = marks.tenant, marks.priority(ticket)
        marks.learn(mark.tenant, mark.priority, mark.id)
        self._urgent_came = self._urgent_came or mark.priority > 0
        if marks.turn is not None and (mark.tenant != tenant or mark.priority > priority):
            self._move(ticket, marks)

    def waiting(self) -> Iterator[BoardTicket]:
        yield from super().waiting()
        for tenant in self._all():
            yield from (place[-1] for place in list(tenant.places) if _is_valid(place))

    # ---- places ------------------------------------------------------------------------------------------------------

    def _line_up(self, ticket: BoardTicket) -> None:
        marks = ticket.marks = ticket.marks or TicketMarks()
        since_s, order = marks.since = marks.since or (self._now_s, self._number())
        tenant = marks.line = self._of(marks.tenant)
        place = (since_s - AGE_S * marks.priority(ticket), order, self._number(), ticket)
        marks.turn = place
        heapq.heappush(tenant.places, place)
        tenant.waiting += 1
        self.lined_up += 1
        if len(tenant.places) > 2 * tenant.waiting + _OUTDATED:
            tenant.places = list(filter(_is_valid, tenant.places))
            heapq.heapify(tenant.places)
        if tenant.waiting == 1 and not tenant.is_held:
            self._enter(tenant)

    def _move(self, ticket: BoardTicket, marks: TicketMarks) -> None:
        marks.line.waiting -= 1
        self.lined_up -= 1
        self._line_up(ticket)

    def _leave(self, tenant: _Tenant) -> BoardTicket:
        while not _is_valid(place := heapq.heappop(tenant.places)):
            pass
        tenant.waiting -= 1
        self.lined_up -= 1
        ticket = place[-1]
        assert ticket.marks is not None
        ticket.marks.turn = None
        return ticket

    # ---- tenants -----------------------------------------------------------------------------------------------------

    def _all(self) -> list[_Tenant]:
        return [*self._tenants.values(), *([self._rest] if self._rest.given or self._rest.waiting else [])]

    def _of(self, name: bytes) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= _MOST and not self._is_full:
                self._forget()
            if self._is_full and name not in self._weights and not self.holds(name):
                return self._rest
            tenant = self._tenants[name] = _Tenant(name, self._weights.get(name, 1.0))
        return tenant

    def _forget(self) -> None:
        idle = [one for one in self._tenants.values() if not one.waiting and one.due <= self._last]
        for one in sorted(idle, key=lambda one: one.given)[: (len(idle) + 1) // 2]:
            del self._tenants[one.name]
        self._is_full = len(self._tenants) >= _MOST

    def _enter(self, tenant: _Tenant) -> None:
        """Let a tenant of which nothing waited take part: it has saved nothing up."""
        tenant.due = max(tenant.due, self._last)
        self._push(tenant)

    def _push(self, tenant: _Tenant) -> None:
        heapq.heappush(self._turns, (tenant.due, self._number(), tenant))

    def _next_tenant(self) -> _Tenant | None:
        while self._turns:
            due, _, tenant = self._turns[0]
            if due != tenant.due or not tenant.waiting or tenant.is_held:
                heapq.heappop(self._turns)
            elif self.holds(tenant.name):
                heapq.heappop(self._turns)
                tenant.is_held = True
                self._held.append(tenant)
            else:
                return tenant
        return None


def _is_valid(place: _Place) -> bool:
    marks = place[-1].marks
    return marks is not None and marks.turn is place


_ANY = 1 << 31
#: Rate of a rule that slows, and does not say how far.
_SLOWEST = 0.001


class Limiter:
    """Limiter of tickets and tenants. A ticket is put aside in at most one place, and is ``queued`` while it is."""

    def __init__(self) -> None:
        self.rules = Rulebook()
        self.has_rules = False  # asked for every part of a plan
        # A heap of the tickets that are put aside, by the time at which they may go on; infinite: they are paused.
        self._aside: list[tuple[float, int, BoardTicket]] = []
        self._number = itertools.count().__next__
        self._buckets, self._of_tenants = TokenBuckets(), TokenBuckets()
        self._running: dict[bytes, dict[bytes, BoardTicket]] = {}  # of each tenant with a concurrency
        self._gave_back = False
        self._now_s = 0.0

    def follow(self, rules: Rulebook, tickets: Iterable[BoardTicket]) -> list[BoardTicket]:
        """Follow these rules from now on. ``tickets``: all that may be in processing. Return those that were held back:
        every one tries again."""
        held, self._aside = [ticket for _, _, ticket in self._aside], []
        self.rules, self.has_rules = rules, not rules.is_empty
        self._running = {name: {} for name, rule in rules.tenant_limits.items() if rule.concurrency}
        for ticket in tickets if self._running else ():
            self.began(ticket)
        return held

    # ---- plans -------------------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> list[BoardTicket]:
        """Begin a plan: take out the slowed tickets that may go on by now; all of them when tokens were given back."""
        self._now_s = now_s
        due, gave_back, self._gave_back = list[BoardTicket](), self._gave_back, False
        while self._aside and (self._aside[0][0] <= now_s or (gave_back and self._aside[0][0] < math.inf)):
            due.append(heapq.heappop(self._aside)[2])
        return due

    def allow(self, ticket: BoardTicket, most: int) -> int:
        """Return how many messages of the ticket, up to ``most``, may be planned now. With 0, the ticket is put
        aside."""
        tenant = ticket.tenant
        if self.rules.tenant_limits:
            most = min(most, self._room(tenant))
        if (rule := self.rules.of(ticket.name, tenant)) is None:
            return most
        due_s = math.inf
        if rule.action is RuleAction.SLOW:
            rate = rule.rate_per_second or _SLOWEST
            if (tokens := self._buckets.tokens(ticket.name, rate, self._now_s)) >= 1:
                return min(most, tokens)
            due_s = self._buckets.due_s(ticket.name, rate)
        ticket.queued = True
        heapq.heappush(self._aside, (due_s, self._number(), ticket))
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
        return self._aside[0][0] if self._aside else None

    def due_of(self, name: bytes) -> float | None:
        """Return when this slowed ticket may go on; None: it is not slowed. For people: it searches all of them."""
        return next((due_s for due_s, _, one in list(self._aside) if one.name == name and due_s < math.inf), None)

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
        for _, _, ticket in self._aside:
            ticket.queued = bool(ticket.parked)
        self._aside = [one for one in self._aside if one[2].parked]
        heapq.heapify(self._aside)
