"""Plan what the leader hands over next, given who owns what (``ownership``) and what rules hold back (``rule_gate``).

Pure: no Redis, no clock; one thread owns a board. What a plan takes, it takes at once (``plan`` moves ids from parked
to running); the script's reply then confirms or refuses it (``confirm``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from usher.common.protocol.marks import Mark
from usher.common.protocol.owner_words import RETURNED
from usher.master.policy.board.ownership import Ownership
from usher.master.policy.board.plans import HandOverPlan, HandOverReply, ReplyFollowUp, TargetPlan, TicketPlan, span
from usher.master.policy.board.recall import Recall
from usher.master.policy.board.rule_gate import Condemned, RuleGate
from usher.master.policy.board.tenant_limits import TenantLimits
from usher.master.policy.board.tickets import OPEN, BoardTicket, RunQueue, Standing, TicketMarks
from usher.master.policy.board.turns import FairQueue
from usher.master.policy.board.views import BoardFacts, Parked
from usher.master.policy.rules import Rulebook

#: Number of parked entries beyond a plan from which it pays to name the range of the plan's ids.
_MUCH_MORE = 1000
#: Most entries read ahead at a time: fewer would hide for longer what stands behind a flood.
_AHEAD = 1000


class Board:
    """The board: plans hand-overs, and keeps in step what a plan depends on: the ownership, the rule gate, and the
    queue of tickets.

    The ownership and the gate do not know each other: each method here concerns both.
    """

    def __init__(
        self, ticket_window: int, work_s: float = math.inf, weights: Mapping[bytes, float] | None = None
    ) -> None:
        """Make an empty board. ``work_s``: seconds of work that a consumer is given at a time (``WorkPace``).
        ``weights``: of tenants, which take turns; None: neither tenants nor priorities are configured."""
        self._fair = None if weights is None else FairQueue(ticket_window, weights)
        self._weights, self._limits = weights or {}, TenantLimits()
        if self._fair is not None:
            self._fair.holds = self._limits.holds
        self._queue = self._fair or RunQueue(ticket_window)
        self._gate = RuleGate(ticket_window)
        self._window = ticket_window
        self._ownership = owned = Ownership(ticket_window, work_s, self._queue, self._gate.worth_keeping)
        owned.recalls.stays = self._stays
        self.tickets, self.consumers = owned.tickets, owned.consumers
        # These are the ownership's own, for rules have no say in them. Bound, not forwarded: ``arrive`` runs for every
        # message.
        self.join, self.mark_lost, self.recovered = owned.join, owned.mark_lost, owned.recovered
        self.arrive, self.take_in = owned.arrive, owned.take_in
        self.free, self.acknowledged, self.note_retrying = owned.free, owned.acknowledged, owned.note_retrying
        self.has, self.runs, self.quiet_since = owned.has, owned.runs, owned.quiet_since
        self.clear_record, self.halt = owned.clear_record, owned.halt
        self.to_read, self.was_read = owned.to_read, owned.was_read
        self.ending_page, self.ended = owned.ending_page, owned.ended
        self.learn_time, self.take_came_back = owned.waits.learn_time, owned.recalls.take_came_back

    @property
    def in_flight(self) -> int:
        """Number of messages that consumers have."""
        return self._ownership.in_flight

    @property
    def parked(self) -> int:
        """Number of messages in memory that no consumer has."""
        return self._ownership.parked

    # ---- plans -------------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Number of entries that could be read now and handed over at once; 0 while anything waits for room. Where
        tenants take turns, what stands behind a flood is read all the same: a few at a time."""
        if self._gate.rules.pauses_all:
            return 0
        room = 0 if self._queue.is_waiting else self._ownership.room
        return room if self._fair is None else max(room, _AHEAD)

    def plan(self, limit: int, now_s: float) -> HandOverPlan | None:
        """Take up to ``limit`` ids for one hand_over call. Return None when nothing can be handed over now."""
        owned, gate, queue, fair = self._ownership, self._gate, self._queue, self._fair
        if fair is not None:
            self._limits.begin(now_s)
            fair.begin(now_s)
        queue.retry(gate.take_due(now_s))
        owned.wake_due(now_s)
        owned.begin()
        parked_before, size = owned.parked, 0
        parts: dict[str, list[TicketPlan]] = {}
        # The bound follows from the load after this plan: with the load before it, all but the first ticket would
        # exceed it.
        bound = owned.load_bound(min(limit, parked_before))
        while size < limit and (ticket := owned.next_runnable()) is not None:
            most = limit - size
            if fair is not None:
                most = min(most, self._limits.room(ticket.tenant))
            if gate.has_rules and (most := gate.allow(ticket, most, now_s)) <= 0:
                continue
            route = gate.route(ticket) if gate.has_routes else ""
            assigned = owned.assign(ticket, most, bound, now_s, route)
            if assigned is None:
                continue
            incarnation, part = assigned
            parts.setdefault(incarnation, []).append(part)
            size += len(part.ids)
            if gate.has_rules:
                gate.spend(part.ticket, len(part.ids))
            if fair is not None:
                fair.spend(ticket, len(part.ids))
                self._limits.spend(ticket, len(part.ids))
        if not size:
            return None
        much_more = parked_before > size + _MUCH_MORE or self.redis_has_more
        lowest, highest = span(parts.values()) if much_more else (b"-", b"+")
        return HandOverPlan([TargetPlan(name, planned) for name, planned in parts.items()], size, lowest, highest)

    def recalls(self, now_s: float) -> list[Recall]:
        """Return the tickets to ask back now, for consumers that have nothing to do. They count as asked from now
        on."""
        recalls = self._ownership.recalls
        released = recalls.release(now_s) if recalls.asked else []
        again_s = now_s if released else math.inf  # at once: the plans of this turn have been made
        self._queue.retry(released)
        if self._queue.has_runnable:
            recalls.pause(again_s)
            return []
        return recalls.choose(self.consumers, self.tickets, now_s)

    def _stays(self, ticket: BoardTicket) -> bool:
        """Return whether a rule speaks against asking a ticket back: it holds back what is handed over from now on, or
        names the consumer."""
        return self._gate.holds(ticket) or self._ownership.is_open(self._gate.route(ticket))

    def confirm(self, plan: HandOverPlan, reply: HandOverReply) -> ReplyFollowUp:
        """Update memory with the script's reply, and return what else it asks for."""
        lost: list[str] = []
        unsure: list[bytes] = []
        doubt = False
        for target, answer in zip(plan.targets, reply.targets, strict=True):
            if answer.state == "OK":
                for part in self._ownership.granted(target, answer, reply.fence):
                    self._unspend(part)
                    unsure.append(part.ticket)
                continue
            doubt = doubt or answer.state == "STRAY"
            self._ownership.close(target.incarnation)
            self._undo(target.parts)
            if answer.state == "LOST":
                lost.append(target.incarnation)
        return ReplyFollowUp(tuple(lost), tuple(unsure), doubt)

    def withdraw(self, plan: HandOverPlan) -> None:
        """Undo a plan that certainly did not happen: its ids are parked again, where they were, and its tickets try
        again."""
        for target in plan.targets:
            self._undo(target.parts)

    def _undo(self, parts: Iterable[TicketPlan]) -> None:
        for part in parts:
            self._ownership.put_back(part)
            self._unspend(part)

    def _unspend(self, part: TicketPlan) -> None:
        self._gate.give_back(part.ticket, len(part.ids))
        if self._fair is not None:
            self._fair.spend(self.tickets[part.ticket], -len(part.ids))
            self._limits.spend(self.tickets[part.ticket], -len(part.ids))

    # ---- consumers and entries ---------------------------------------------------------------------------------------

    def learn(self, marks: Iterable[Mark]) -> None:
        """Learn the tenants and priorities of entries that are on the board now, or in processing."""
        if (fair := self._fair) is None:
            return
        for mark in marks:
            if (ticket := self.tickets.get(mark.ticket)) is not None:
                fair.learn(ticket, mark)
                self._limits.began(ticket)

    def set_record(self, name: bytes, owner: bytes, fence: int, ids: Sequence[bytes], now_s: float) -> str | None:
        """Follow the index record of a ticket (``Ownership.set_record``). What it has in processing counts. What was
        asked back has cost its tenant nothing, and does not wait for another turn."""
        fair, ticket = self._fair, self.tickets.get(name)
        if fair is not None and owner == RETURNED and ticket is not None and name in self._ownership.recalls.asked:
            ticket.marks = ticket.marks or TicketMarks()
            ticket.marks.since = (0.0, 0)
            fair.spend(ticket, -len(ticket.running))
            self._limits.spend(ticket, -len(ticket.running))
        to_recover = self._ownership.set_record(name, owner, fence, ids, now_s)
        if fair is not None:
            self._limits.began(self.tickets[name])
        return to_recover

    def keep(self, incarnation: str) -> None:
        """Keep an incarnation that was not lost after all. One that a rule has drained gets nothing new."""
        self._ownership.keep(incarnation)
        consumer = self.consumers[incarnation]
        if self._gate.rules.of_consumer(consumer.name) is not None:
            self.join(incarnation, consumer.name, consumer.slots, consumer.capacity, False, consumer.gives_back)

    def forget(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Forget the entries, (id, ticket), that arrived last.

        They certainly were not taken from the stream, and will be seen there again.
        """
        self._ownership.forget(entries)
        self._gate.drop_empty()

    # ---- rules -------------------------------------------------------------------------------------------------------

    @property
    def rules(self) -> Rulebook:
        """Rules that the board follows."""
        return self._gate.rules

    def follow(self, rules: Rulebook) -> None:
        """Follow these rules from now on; every ticket that was held back tries again."""
        released = self._gate.follow(rules)
        if self._fair is not None:
            self._limits.follow(rules, self.tickets.values())
            given = {name: float(rule.weight) for name, rule in rules.tenant_limits.items() if rule.weight}
            self._fair.weigh({**self._weights, **given})
        self._queue.retry(released.tickets)
        self._ownership.has_routes = self._gate.has_routes
        self._ownership.recalls.changed()
        self._ownership.retry_waiting()
        self._ownership.reread(released.unloaded)

    def next_due_s(self) -> float | None:
        """Return when the next slowed or waiting ticket may go on, or tickets may be asked back; None: unless
        something happens, never."""
        owned = self._ownership
        held = map(self._limits.due_s, self._fair.held) if self._fair is not None else ()
        known = (self._gate.next_due_s(), owned.waits.next_due_s(), owned.recalls.next_due_s(), *held)
        return min((due_s for due_s in known if due_s is not None and due_s < math.inf), default=None)

    def condemned(self, most: int) -> list[Condemned]:
        """Return up to ``most`` ids that become dead letters by a rule, each ticket's from its lowest one on."""
        found, spared = self._gate.condemned(most)
        self._queue.retry(spared)
        return found

    def buried(self, written: Iterable[Condemned], refused: Iterable[bytes]) -> list[bytes]:
        """Forget the messages that are dead letters now: all of ``written`` except for the tickets that were refused.

        Return the tickets whose records must be read again.
        """
        unsure = set(refused)
        for doomed in written:
            ticket = self._gate.acquit(doomed.ticket)
            if doomed.ticket in unsure:
                ticket.standing = Standing.UNSURE
                continue
            if self._ownership.bury(ticket, len(doomed.ids)):
                unsure.add(doomed.ticket)
            if ticket.parked:
                self._gate.condemn(ticket)
        return [name for name in unsure if name in self.tickets]

    # ---- memory ------------------------------------------------------------------------------------------------------

    @property
    def redis_has_more(self) -> bool:
        """Return whether Redis has entries under ``master``, perhaps many, that memory does not know."""
        return self._ownership.has_hidden or self._gate.has_unloaded

    def unload(self) -> None:
        """Drop from memory what rules hold back, because too much is parked: all messages of paused tickets, and of
        others those beyond what is worth having. Redis keeps account of them, as of a halted ticket, until the ticket
        may move (``was_read``)."""
        for ticket in self._gate.paused():
            if self._ownership.unload(ticket):
                self._gate.was_unloaded(ticket)
        for ticket in self._gate.slowed_or_condemned():
            self._ownership.shorten(ticket)

    def shorten_long(self) -> None:
        """Leave to Redis' account what is parked of long tickets beyond their windows, also of such as wait, because
        too much is parked. It looks at every ticket."""
        for ticket in [one for one in self.tickets.values() if len(one.parked) > self._window]:
            self._ownership.shorten(ticket)

    def takeable(self) -> int:
        """Count what another consumer could be given now: parked messages that wait for room alone, wherever it is, and
        tickets that could be recalled. It looks at every ticket."""
        owned = self._ownership
        held = {one.name for one in (*self._gate.paused(), *self._gate.slowed_or_condemned())}
        held.update(one.name for consumer in self.consumers.values() for one in consumer.waiting)
        tenants = set(self._fair.held) if self._fair is not None else set()
        free = (one for one in self.tickets.values() if one.owner is None and one.standing is OPEN)
        parked = sum(len(one.parked) for one in free if one.name not in held and one.tenant not in tenants)
        return parked + owned.recalls.recallable(self.consumers.values())

    # ---- from other threads: what they see may be a moment old -------------------------------------------------------

    def tenants(self) -> dict[bytes, tuple[int, int, float, bool]]:
        """Return what ``FairQueue.tenants`` does; nothing where tickets have no turns."""
        return {} if self._fair is None else self._fair.tenants()

    def glance(self, name: bytes, now_s: float, now_ms: int) -> BoardFacts | None:
        """Return what memory has of a ticket; None: nothing."""
        ticket = self.tickets.get(name)
        if ticket is None:
            return None
        due_s = self._gate.due_of(name)
        due_ms = 0 if due_s is None else now_ms + int(1000 * (due_s - now_s))
        if ticket.standing is Standing.WAITING:
            due_ms = ticket.until
        window_is_full = self._ownership.window_is_full(ticket)
        asked = self._ownership.recalls.unanswered.get(name)
        turn, tenant = "", ticket.tenant
        if self._fair is not None and tenant in self._fair.held:
            turn, due_s = self._limits.told(tenant), self._limits.due_s(tenant)
            due_ms = due_ms or (0 if due_s is None else now_ms + int(1000 * (due_s - now_s)))
        elif self._fair is not None and self._fair.is_behind_urgent(ticket):
            turn = "behind more urgent tickets"
        return BoardFacts(
            ticket.standing.value,
            len(ticket.parked),
            ticket.above is None,
            window_is_full,
            due_ms,
            "" if asked is None else asked.idle,
            turn,
            tenant,
        )

    def is_hidden(self, name: bytes) -> bool:
        """Return whether Redis alone keeps account of some messages of a ticket that memory knows."""
        ticket = self.tickets.get(name)
        return ticket is not None and ticket.above is not None

    def parked_of(self, name: bytes) -> Parked | None:
        """Count what memory has parked of a ticket. It costs next to nothing, so many tickets may be asked about."""
        ticket = self.tickets.get(name)
        return None if ticket is None else Parked(len(ticket.parked), ticket.above is None)
