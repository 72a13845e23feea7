"""The leader's memory of who has what, and its plans. Pure: no Redis, no clock; one thread owns a board.

Memory is an index of the pending list, never more: a new epoch starts with an empty board. What a plan takes, it takes at once
(``plan`` moves ids from parked to running); the script's reply then confirms or refuses it (``confirm``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from common.stream_id import rank
from master.policy.choice import OpenConsumers
from master.policy.plans import HALTED, NOBODY, RETURNED, HandOverPlan, HandOverReply, Part, TargetPlan, TargetReply, Verdict, span
from master.policy.tickets import ConsumerLoad, Standing, Ticket


class Board:
    """All tickets in processing or parked, and the load of every consumer."""

    def __init__(self, ticket_window: int) -> None:
        self._window = ticket_window
        self._refill_at = ticket_window // 2  # a ticket that fills its window is refilled in halves: each refill writes its record anew
        self.tickets: dict[bytes, Ticket] = {}
        self.consumers: dict[str, ConsumerLoad] = {}
        self._open = OpenConsumers(())
        self._ready: deque[Ticket] = deque()
        self._homeless: deque[Ticket] = deque()  # ready, but nobody had room or was there
        self.in_flight = 0
        self.parked = 0

    # ---- consumers -----------------------------------------------------------------------------------------------------------

    def join(self, incarnation: str, name: str, slots: int, capacity: int, accepts: bool) -> ConsumerLoad:
        """A living incarnation appears, or changes whether it accepts new work."""
        consumer = self.consumers.get(incarnation)
        if consumer is None:
            consumer = self.consumers[incarnation] = ConsumerLoad(incarnation, name, slots, capacity, accepts)
            self._rank()
        elif consumer.accepts != accepts:
            consumer.accepts, consumer.slots, consumer.capacity = accepts, slots, capacity
            self._rank()
        for ticket in [self.tickets[of_it] for of_it in consumer.tickets] if accepts else ():
            self._queue(ticket)
        return consumer

    def lose(self, incarnation: str) -> bool:
        """An incarnation's lease has ended: its tickets are recovered before anything of them is planned. False if it is not known."""
        if (consumer := self.consumers.get(incarnation)) is None:
            return False
        consumer.accepts = False
        for name in consumer.tickets:
            self.tickets[name].standing = Standing.RECOVERING
        self._rank()
        return True

    def keep(self, incarnation: str) -> None:
        """It was not lost after all."""
        consumer = self.consumers[incarnation]
        for name in list(consumer.tickets):
            self.tickets[name].standing = Standing.OPEN
            self._settle(self.tickets[name])
        # One that only a record named has no capacity here: it gets nothing before the roster knows it.
        self.join(incarnation, consumer.name, consumer.slots, consumer.capacity, consumer.capacity > 0)

    def recovered(self, incarnation: str, others: Iterable[bytes] = ()) -> tuple[bytes, ...]:
        """All that a lost incarnation had is under ``master``; its tickets are free. Returns those of ``others`` that must be read again."""
        if (consumer := self.consumers.pop(incarnation, None)) is None:
            return ()
        self.in_flight -= consumer.in_flight
        unsure = set(others)
        for name in list(consumer.tickets):
            ticket = self.tickets[name]
            ticket.running.clear()
            ticket.owner, ticket.believed, ticket.home = None, NOBODY, consumer.name
            ticket.standing = Standing.UNSURE if name in unsure else Standing.OPEN
            self._settle(ticket)
        for ticket in consumer.waiting:
            ticket.queued = False
            self._queue(ticket)
        self._rank()
        return tuple(name for name in unsure if name in self.tickets)

    def _rank(self) -> None:
        """Who may be chosen has changed; what found nobody tries again."""
        self._open = OpenConsumers(c for c in self.consumers.values() if c.accepts)
        self._retry(self._homeless)

    # ---- entries -------------------------------------------------------------------------------------------------------------

    def arrive(self, entry_id: bytes, name: bytes) -> bool:
        """A new entry, above every id seen before. False: it is in processing already (the group was lost and reads it again)."""
        ticket = self.tickets.get(name)  # not by _ticket(): this line runs for every message
        if ticket is None:
            ticket = self.tickets[name] = Ticket(name)
        elif entry_id in ticket.running:
            return False
        ticket.parked.append(entry_id)
        self.parked += 1
        if not ticket.queued:
            self._queue(ticket)
        return True

    def runs(self, name: bytes, entry_id: bytes) -> bool:
        """Whether memory has the entry in processing with an owner that lives."""
        ticket = self.tickets.get(name)
        return ticket is not None and entry_id in ticket.running and ticket.owner is not None and ticket.standing is Standing.OPEN

    def take_in(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """(id, ticket) of entries that came to ``master`` from elsewhere (taken back, given back, stray, adopted), in id order: each
        goes to its place among what is parked of its ticket."""
        by_ticket: dict[bytes, list[bytes]] = {}
        for entry_id, name in entries:
            by_ticket.setdefault(name, []).append(entry_id)
        for name, ids in by_ticket.items():
            ids.sort(key=rank)
            ticket = self._ticket(name)
            ran = [entry_id for entry_id in ids if entry_id in ticket.running]
            for entry_id in ran:
                del ticket.running[entry_id]
            if ran and ticket.owner is not None:
                self._lighter(ticket.owner, len(ran))
            self._park(ticket, ids)
            self._settle(ticket)

    def _ticket(self, name: bytes) -> Ticket:
        ticket = self.tickets.get(name)
        if ticket is None:
            ticket = self.tickets[name] = Ticket(name)
        return ticket

    def _park(self, ticket: Ticket, ids: Sequence[bytes]) -> None:
        """Put ids, in id order, to their places; usually all below or all above what is there."""
        parked, before = ticket.parked, len(ticket.parked)
        if not parked or rank(ids[0]) > rank(parked[-1]):
            parked.extend(ids)
        elif rank(ids[-1]) < rank(parked[0]):
            parked.extendleft(reversed(ids))
        else:
            ticket.parked = deque(sorted({*parked, *ids}, key=rank))
        self.parked += len(ticket.parked) - before

    def acknowledged(self, incarnation: str, name: bytes, ids: Iterable[bytes]) -> list[str]:
        """A report: these ids are done. Per id ``ok`` (freed), ``gone`` (not in processing: a repetition) or ``stale`` (somebody else has
        the ticket). By id and incarnation, never by counting: doubled, late or reordered reports change nothing."""
        if (ticket := self.tickets.get(name)) is None:
            return ["gone" for _ in ids]
        owner = ticket.owner
        if owner is None or owner.incarnation != incarnation:
            return ["stale" for _ in ids]
        answers = []
        freed = 0
        for entry_id in ids:
            if entry_id in ticket.running:
                del ticket.running[entry_id]
                freed += 1
                answers.append("ok")
            else:
                answers.append("gone")
        if freed:
            self._lighter(owner, freed)
            self._settle(ticket)
        return answers

    def _lighter(self, consumer: ConsumerLoad, count: int) -> None:
        consumer.in_flight -= count
        self.in_flight -= count
        if consumer.waiting:
            self._retry(consumer.waiting)
        if self._homeless:
            self._retry(self._homeless)

    def _settle(self, ticket: Ticket) -> None:
        """After ids left: free the ticket if nothing runs, queue it if something waits, forget it if nothing is left."""
        owner = ticket.owner
        if not ticket.running and ticket.standing is Standing.OPEN and owner is not None:
            owner.tickets.pop(ticket.name, None)
            ticket.owner, ticket.believed = None, NOBODY
            self._retry(owner.waiting)  # it may wait there, and is not bound to that consumer any more
        if ticket.parked:
            if not ticket.queued:
                self._queue(ticket)
        elif not ticket.running and ticket.standing in (Standing.OPEN, Standing.RECOVERING):
            if ticket.owner is not None:
                ticket.owner.tickets.pop(ticket.name, None)
            self.tickets.pop(ticket.name, None)

    def _queue(self, ticket: Ticket) -> None:
        if ticket.queued or ticket.standing is not Standing.OPEN or not ticket.parked or len(ticket.running) > self._refill_at:
            return
        if ticket.owner is not None and not ticket.owner.accepts:
            return  # it waits until its draining owner is done with it
        ticket.queued = True
        self._ready.append(ticket)

    def _retry(self, waiting: deque[Ticket]) -> None:
        for ticket in waiting:
            ticket.queued = False
            self._queue(ticket)
        waiting.clear()

    # ---- plans ---------------------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Entries that could be read now and handed over at once; 0 while something ready waits for room."""
        if self._homeless or self._ready:
            return 0
        return self._open.room

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def plan(self, limit: int, now_s: float) -> HandOverPlan | None:
        """Take up to ``limit`` ids for one hand_over call; None when nothing can be handed over now."""
        if not self._ready:
            return None
        parked_before = self.parked
        parts: dict[str, list[Part]] = {}
        size = 0
        bound = self._open.bound(self.in_flight)
        while self._ready and size < limit:
            ticket = self._ready.popleft()
            ticket.queued = False
            if ticket.standing is not Standing.OPEN or not ticket.parked:
                continue
            consumer = ticket.owner or self._open.choose(ticket, bound)
            if consumer is None:
                ticket.queued = True
                self._homeless.append(ticket)
                continue
            if not consumer.accepts:
                continue
            count = min(len(ticket.parked), self._window - len(ticket.running), limit - size)
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
            if ticket.parked:
                self._queue(ticket)
        if not size:
            return None
        lowest, highest = span(parts.values()) if parked_before > size + 1000 else (b"-", b"+")
        return HandOverPlan([TargetPlan(name, planned) for name, planned in parts.items()], size, lowest, highest)

    def _take(self, ticket: Ticket, consumer: ConsumerLoad, count: int, now_s: float) -> Part:
        ids = [ticket.parked.popleft() for _ in range(count)]
        self.parked -= count
        ticket.running.update(dict.fromkeys(ids))
        part = Part(ticket.name, ticket.believed, ids)
        if ticket.owner is None:
            ticket.owner, ticket.compared_s = consumer, now_s
            consumer.tickets[ticket.name] = None
        consumer.in_flight += count
        self.in_flight += count
        return part

    # ---- replies -------------------------------------------------------------------------------------------------------------

    def confirm(self, plan: HandOverPlan, reply: HandOverReply) -> Verdict:
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
        return Verdict(tuple(lost), tuple(unsure), doubt)

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

    def _undo(self, part: Part) -> None:
        """A part that did not happen: its ids are parked again, before what came later."""
        ticket = self.tickets[part.ticket]
        for entry_id in part.ids:
            ticket.running.pop(entry_id, None)
        ticket.parked.extendleft(reversed(part.ids))
        self.parked += len(part.ids)
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

    # ---- reading again -------------------------------------------------------------------------------------------------------

    def set_record(self, name: bytes, owner: bytes, fence: int, ids: Sequence[bytes], now_s: float) -> str | None:
        """The index says this of a ticket (at adoption, after a refusal, and when reports may have been lost): memory follows.

        Returns the incarnation to recover when its owner is not among the living, else None.
        """
        ticket = self._ticket(name)
        self._disown(ticket)
        ticket.believed = b"%s %d" % (owner, fence)
        ticket.compared_s = now_s
        if owner == RETURNED:
            ticket.standing = Standing.OPEN
            self._park(ticket, sorted(ids, key=rank))
            self._queue(ticket)
            return None
        if owner == HALTED:
            ticket.standing = Standing.HALTED
            return None
        incarnation = owner.decode()
        consumer = self.consumers.get(incarnation)
        if consumer is None:
            consumer = self.join(incarnation, incarnation.rpartition(":")[0], 0, 0, False)
        ticket.owner = consumer
        consumer.tickets[name] = None
        # What is parked is under ``master`` for certain; of a stray the index still says that its dead owner has it.
        strays = set(ids).intersection(ticket.parked)
        ticket.running = dict.fromkeys(entry_id for entry_id in ids if entry_id not in strays)
        consumer.in_flight += len(ticket.running)
        self.in_flight += len(ticket.running)
        if not consumer.capacity or ticket.standing is Standing.RECOVERING:
            ticket.standing = Standing.RECOVERING
            return incarnation
        ticket.standing = Standing.OPEN
        self._queue(ticket)
        return None

    def clear_record(self, name: bytes) -> None:
        """The index has no record of the ticket: nothing of it is in processing."""
        ticket = self.tickets.get(name)
        if ticket is None or ticket.standing is Standing.RECOVERING:
            return
        self._disown(ticket)
        ticket.standing = Standing.OPEN
        self._settle(ticket)

    def halt(self, name: bytes) -> None:
        """The ticket's record cannot be read: nothing of it moves until somebody has looked."""
        ticket = self._ticket(name)
        self._disown(ticket)
        ticket.standing = Standing.HALTED

    def _disown(self, ticket: Ticket) -> None:
        consumer = ticket.owner
        running = len(ticket.running)
        ticket.running = {}
        ticket.believed = NOBODY
        ticket.owner = None
        if consumer is not None:
            consumer.tickets.pop(ticket.name, None)
            self._lighter(consumer, running)

    def quiet_since(self, limit_s: float, most: int) -> list[bytes]:
        """Tickets in processing that were last compared with the index before ``limit_s``: reports of theirs may have been lost."""
        found: list[bytes] = []
        for ticket in self.tickets.values():
            if ticket.running and ticket.standing is Standing.OPEN and ticket.compared_s < limit_s:
                found.append(ticket.name)
                if len(found) >= most:
                    break
        return found
