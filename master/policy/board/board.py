"""The leader's plans, made from its memory of who has what (``holdings``). Pure: no Redis, no clock; one thread owns a
board.

What a plan takes, it takes at once (``plan`` moves ids from parked to running); the script's reply then confirms or
refuses it (``confirm``).
"""

from __future__ import annotations

from collections.abc import Sequence

from usher.master.policy.board.plans import (
    HandOverPlan,
    HandOverReply,
    ReplyFollowUp,
    TargetPlan,
    TargetReply,
    TicketPlan,
    span,
)
from usher.master.policy.board.rule_gate import RuledHoldings
from usher.master.policy.board.tickets import OPEN, BoardTicket, ConsumerLoad, Standing
from usher.master.policy.explain.facts import BoardFacts
from usher.master.policy.explain.stuck import Parked


class Board(RuledHoldings):
    """All tickets in processing or parked, the load of every consumer, and what is to be handed over next."""

    # ---- plans ---------------------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Entries that could be read now and handed over at once; 0 while something ready waits for room."""
        if self._homeless or self._ready or self.rules.pauses_all:
            return 0
        return self._open.room

    def plan(self, limit: int, now_s: float) -> HandOverPlan | None:
        """Take up to ``limit`` ids for one hand_over call; None when nothing can be handed over now."""
        if self._slowed:
            self._wake_slowed(now_s)
        if not self._ready:
            return None
        parked_before = self.parked
        parts: dict[str, list[TicketPlan]] = {}
        size = 0
        # Of the load as it will be after this plan: by the load of now, all but the first ticket would be above the
        # bound.
        bound = self._open.bound(self.in_flight + min(limit, self.parked))
        while self._ready and size < limit:
            ticket = self._ready.popleft()
            ticket.queued = False
            if ticket.standing is not OPEN or not ticket.parked:
                continue
            most = limit - size
            if self._ruled and (most := self._allowed(ticket, most, now_s)) <= 0:
                continue
            consumer = ticket.owner or self._open.choose(ticket, bound)
            if consumer is None:
                ticket.queued = True
                self._homeless.append(ticket)
                continue
            if not consumer.accepts:
                continue
            count = min(len(ticket.parked), self._window - len(ticket.running), most)
            if count > consumer.room:
                count = consumer.room
                if count <= 0:
                    ticket.queued = True
                    consumer.waiting.append(ticket)
                    continue
            if count <= 0:
                continue
            parts.setdefault(consumer.incarnation, []).append(self._take(ticket, consumer, count, now_s))
            size += count
            if self._ruled:
                self._spend(ticket, count)
            if ticket.parked:
                self._queue(ticket)
        if not size:
            return None
        much_more = parked_before > size + 1000 or self.redis_has_more
        lowest, highest = span(parts.values()) if much_more else (b"-", b"+")
        return HandOverPlan([TargetPlan(name, planned) for name, planned in parts.items()], size, lowest, highest)

    def _take(self, ticket: BoardTicket, consumer: ConsumerLoad, count: int, now_s: float) -> TicketPlan:
        if count == len(ticket.parked):  # as a rule: this runs for every ticket of every plan
            ids = list(ticket.parked)
            ticket.parked.clear()
        else:
            ids = [ticket.parked.popleft() for _ in range(count)]
        self.parked -= count
        ticket.running.update(dict.fromkeys(ids))
        part = TicketPlan(ticket.name, ticket.believed, ids)
        if ticket.owner is None:
            ticket.owner, ticket.compared_s = consumer, now_s
            consumer.tickets[ticket.name] = None
        consumer.in_flight += count
        self.in_flight += count
        return part

    # ---- replies -------------------------------------------------------------------------------------------------------------

    def confirm(self, plan: HandOverPlan, reply: HandOverReply) -> ReplyFollowUp:
        """Bring memory in line with what the script did."""
        lost: list[str] = []
        unsure: list[bytes] = []
        doubt = False
        for target, answer in zip(plan.targets, reply.targets, strict=True):
            consumer = self.consumers[target.incarnation]
            if answer.state == "OK":
                unsure += self._granted(target, answer, reply.fence)
                continue
            doubt = doubt or answer.state == "STRAY"
            consumer.accepts = False
            self._rank()
            for part in target.parts:
                self._undo(part)
            if answer.state == "LOST":
                lost.append(target.incarnation)
        return ReplyFollowUp(tuple(lost), tuple(unsure), doubt)

    def _granted(self, target: TargetPlan, answer: TargetReply, fence: int) -> list[bytes]:
        refused, fresh = set(answer.refused), set(answer.fresh)
        head = b"%s %d" % (target.incarnation.encode(), fence)
        unsure = []
        for part in target.parts:
            ticket = self.tickets[part.ticket]
            if part.ticket in refused:
                self._undo(part)
                ticket.standing = Standing.UNSURE
                unsure.append(part.ticket)
            elif part.changes_owner or part.ticket in fresh:
                ticket.believed = head
        for part in target.parts if answer.gone else ():
            ticket = self.tickets[part.ticket]
            lost_bodies = [entry_id for entry_id in answer.gone if entry_id in ticket.running]
            for entry_id in lost_bodies:
                del ticket.running[entry_id]
            if lost_bodies and ticket.owner is not None:
                self._lighter(ticket.owner, len(lost_bodies))
                self._settle(ticket)
        return unsure

    def _undo(self, part: TicketPlan) -> None:
        """A part that did not happen: its ids are parked again, before what came later."""
        ticket = self.tickets[part.ticket]
        for entry_id in part.ids:
            ticket.running.pop(entry_id, None)
        ticket.parked.extendleft(reversed(part.ids))
        self.parked += len(part.ids)
        if self._ruled:
            self._give_back(ticket, len(part.ids))
        consumer = ticket.owner
        if consumer is None:
            return
        if part.changes_owner:
            consumer.tickets.pop(ticket.name, None)
            ticket.owner = None
        self._lighter(consumer, len(part.ids))
        self._queue(ticket)

    def withdraw(self, plan: HandOverPlan) -> None:
        """The plan certainly did not happen: everything is as before it."""
        for target in plan.targets:
            for part in target.parts:
                self._undo(part)

    # ---- reports -------------------------------------------------------------------------------------------------------------

    def acknowledged(self, incarnation: str, name: bytes, ids: Sequence[bytes]) -> list[str]:
        """``free`` for one ticket, for somebody who wants to know. Per id ``ok`` (freed), ``gone`` (not in processing:
        a repetition) or ``stale`` (somebody else has the ticket)."""
        ticket = self.tickets.get(name)
        if ticket is not None and (ticket.owner is None or ticket.owner.incarnation != incarnation):
            return ["stale" for _ in ids]
        left = set(ticket.running) if ticket is not None else set()
        answers = []
        for entry_id in ids:
            answers.append("ok" if entry_id in left else "gone")
            left.discard(entry_id)
        self.free(incarnation, [(name, ids)])
        return answers

    # ---- from other threads: what they see may be a moment old -----------------------------------------------------------------

    def glance(self, name: bytes, now_s: float, now_ms: int) -> BoardFacts | None:
        """What memory has of a ticket. None: nothing."""
        ticket = self.tickets.get(name)
        if ticket is None:
            return None
        due_s = self.due_of(name)
        due_ms = 0 if due_s is None else now_ms + int(1000 * (due_s - now_s))
        return BoardFacts(
            ticket.standing.value, len(ticket.parked), ticket.above is None, self.window_is_full(ticket), due_ms
        )

    def parked_of(self, name: bytes) -> Parked | None:
        """How much of a ticket memory has parked. It costs next to nothing: for those who ask about many tickets."""
        ticket = self.tickets.get(name)
        return None if ticket is None else Parked(len(ticket.parked), ticket.above is None)
