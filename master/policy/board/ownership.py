"""Ownership: which consumer owns which ticket with which messages. Pure: no Redis, no clock; one thread owns it.

Memory is an index of the pending list, never more: a new epoch starts with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from usher.common.protocol.owner_words import HALTED, TAIL, due_ms_of, is_given_back
from usher.common.protocol.stream_id import ZERO, rank
from usher.master.policy.board.parked_tickets import ParkedTickets
from usher.master.policy.board.placement import OpenConsumers
from usher.master.policy.board.plans import NOBODY, TargetPlan, TargetReply, TicketPlan
from usher.master.policy.board.recall import Asked, Recalls
from usher.master.policy.board.tickets import OPEN, BoardTicket, ConsumerLoad, RunQueue, Standing
from usher.master.policy.board.work_pace import WorkPace

#: Standings of tickets that wait for a time or for somebody, whatever consumers do.
_STILL = (Standing.WAITING, Standing.HALTED)


class Ownership(ParkedTickets):
    """All tickets in processing or parked, their owners, and the load of every consumer."""

    def __init__(
        self, ticket_window: int, work_s: float, queue: RunQueue, worth_keeping: Callable[[BoardTicket], int]
    ) -> None:
        """Start with nothing. ``work_s``: see WorkPace. ``queue``: for tickets that may be planned. ``worth_keeping``:
        returns how many messages of a ticket to have in memory when Redis keeps account of the others."""
        super().__init__(queue, worth_keeping)
        self.consumers: dict[str, ConsumerLoad] = {}
        self.in_flight = 0
        self.has_routes = False  # rules name the consumers of some tickets
        self._window = ticket_window
        self._work_s = work_s
        self._open = OpenConsumers(())
        self.recalls = Recalls()
        self._untried: dict[str, int] = {}  # incarnation -> so many tickets that wait there may have room now

    # ---- consumers ---------------------------------------------------------------------------------------------------

    def join(
        self, incarnation: str, name: str, slots: int, capacity: int, accepts: bool, gives_back: bool = False
    ) -> ConsumerLoad:
        """Add a living incarnation, or note that it accepts new work or no longer does. ``gives_back``: see
        ConsumerLoad."""
        if (consumer := self.consumers.get(incarnation)) is None:
            pace = WorkPace(slots, capacity, self._work_s)
            consumer = self.consumers[incarnation] = ConsumerLoad(incarnation, name, slots, capacity, accepts, pace)
            self._rank()
        elif consumer.accepts != accepts:
            if (slots, capacity) != (consumer.slots, consumer.capacity):
                consumer.pace = WorkPace(slots, capacity, self._work_s)
            consumer.accepts, consumer.slots, consumer.capacity = accepts, slots, capacity
            self._rank()
        consumer.gives_back = gives_back
        for ticket in [self.tickets[of_it] for of_it in consumer.tickets] if accepts else ():
            self._queue.add(ticket)
        return consumer

    def close(self, incarnation: str) -> None:
        """Hand nothing more to an incarnation until ``join`` says that it accepts work."""
        self.consumers[incarnation].accepts = False
        self._rank()

    def mark_lost(self, incarnation: str) -> bool:
        """Note that an incarnation's lease has ended: its tickets are recovered before anything of them is planned.

        Return False if it is not known.
        """
        if (consumer := self.consumers.get(incarnation)) is None:
            return False
        consumer.accepts = False
        for name in consumer.tickets:
            self.tickets[name].standing = Standing.RECOVERING
            self.recalls.forget(name)
        self._rank()
        return True

    def keep(self, incarnation: str) -> None:
        """Keep an incarnation that was not lost after all."""
        consumer = self.consumers[incarnation]
        for name in list(consumer.tickets):
            self.tickets[name].standing = OPEN
            self._finish(self.tickets[name])
        # An incarnation that only a record named has no capacity here: it gets nothing before the roster knows it.
        self.join(
            incarnation,
            consumer.name,
            consumer.slots,
            consumer.capacity,
            consumer.capacity > 0,
            consumer.gives_back,
        )

    def recovered(self, incarnation: str, others: Iterable[bytes] = ()) -> tuple[bytes, ...]:
        """Free the tickets of a lost incarnation: all that it had is under ``master``.

        Return those of ``others`` whose records must be read again.
        """
        if (consumer := self.consumers.pop(incarnation, None)) is None:
            return ()
        self.in_flight -= consumer.in_flight
        unsure = set(others)
        for name in list(consumer.tickets):
            ticket = self.tickets[name]
            ticket.running.clear()
            ticket.owner, ticket.believed, ticket.home = None, NOBODY, consumer.name
            ticket.standing = Standing.UNSURE if name in unsure else OPEN
            self._finish(ticket)
        self._queue.retry(consumer.waiting)
        self._rank()
        return tuple(name for name in unsure if name in self.tickets)

    def _rank(self) -> None:
        """Rank consumers anew, because those that may be chosen have changed. Tickets that found none try again, and
        those that a route keeps from their owners."""
        self._open = OpenConsumers(list(self.consumers.values()))
        self.recalls.changed()
        self._queue.retry_unassigned()
        if self.has_routes:
            self.retry_waiting()

    def retry_waiting(self) -> None:
        """Let tickets that wait for their owners try again: a route may be another one now."""
        for consumer in self.consumers.values():
            if consumer.waiting:
                self._queue.retry(consumer.waiting)

    # ---- entries -----------------------------------------------------------------------------------------------------

    def arrive(self, entry_id: bytes, name: bytes) -> bool:
        """Take in a new entry, above every id seen before: park it, or leave it to Redis' account if memory does not
        have all of its ticket (``above``).

        Return False if it is in processing already, or the one that its halted ticket waits for: the group was lost and
        reads it again.
        """
        ticket = self.tickets.get(name)  # not by _ticket(): this line runs for every message
        if ticket is None:
            ticket = self.tickets[name] = BoardTicket(name)
        elif entry_id in ticket.running:
            return False
        elif ticket.above is not None:
            return entry_id != ticket.waits_for
        ticket.parked.append(entry_id)
        self.parked += 1
        if not ticket.queued:
            self._queue.add(ticket)
        return True

    def has(self, name: bytes, entry_id: bytes) -> bool:
        """Return whether memory has the entry in processing, or as the one that its ticket waits for."""
        ticket = self.tickets.get(name)
        return ticket is not None and (entry_id in ticket.running or entry_id == ticket.waits_for)

    def runs(self, name: bytes, entry_id: bytes) -> bool:
        """Return whether memory has the entry in processing with a living owner, or as the one that its ticket waits
        for."""
        if (ticket := self.tickets.get(name)) is None:
            return False
        is_owned = ticket.owner is not None and ticket.standing is OPEN
        return ticket.waits_for == entry_id or (is_owned and entry_id in ticket.running)

    def take_in(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Park entries, (id, ticket), that came to ``master`` from elsewhere: taken back, given back, stray, or found
        at a takeover.

        They come in id order; each goes to its place among the parked entries of its ticket.
        """
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
                self._release(ticket.owner, len(ran))
            self._park(ticket, self._not_hidden(ticket, ids))
            self._finish(ticket)

    def free(self, incarnation: str, items: Iterable[tuple[bytes, Sequence[bytes]]], now_s: float) -> None:
        """Free the messages that a report says are done: these ids of these tickets.

        By id and incarnation, never by counting: doubled, late or reordered reports change nothing, nor does the report
        of a consumer that no longer has the ticket.
        """
        if (consumer := self.consumers.get(incarnation)) is None:
            return
        freed, touched = 0, []
        for name, ids in items:
            ticket = self.tickets.get(name)
            if ticket is None or ticket.owner is not consumer:
                continue
            running = ticket.running
            count = len(running)
            for entry_id in ids:
                running.pop(entry_id, None)
            if len(running) < count:
                freed += count - len(running)
                touched.append(ticket)
        if freed:
            self._release(consumer, freed, now_s)
        for ticket in touched:
            if self.recalls.asked:
                self.recalls.forget(ticket.name)
            self._finish(ticket)

    def note_retrying(self, incarnation: str, tickets: int) -> None:
        """Note that so many tickets of a consumer wait for a retry: they keep none of its handlers busy."""
        if (consumer := self.consumers.get(incarnation)) is not None and consumer.retrying != tickets:
            consumer.retrying = tickets
            self._release(consumer, 0)

    def acknowledged(self, incarnation: str, name: bytes, ids: Sequence[bytes], now_s: float) -> list[str]:
        """Free one ticket's ids, and answer for each.

        Return for each id ``ok`` (freed), ``gone`` (not in processing: a repetition) or ``stale`` (another consumer has
        the ticket).
        """
        ticket = self.tickets.get(name)
        if ticket is not None and (ticket.owner is None or ticket.owner.incarnation != incarnation):
            return ["stale" for _ in ids]
        left = set(ticket.running) if ticket is not None else set()
        answers = []
        for entry_id in ids:
            answers.append("ok" if entry_id in left else "gone")
            left.discard(entry_id)
        self.free(incarnation, [(name, ids)], now_s)
        return answers

    def forget(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Forget the entries, (id, ticket), that arrived last.

        They certainly were not taken from the stream, and will be seen there again.
        """
        for entry_id, name in reversed(entries):
            ticket = self.tickets.get(name)
            if ticket is not None and ticket.parked and ticket.parked[-1] == entry_id:
                ticket.parked.pop()
                self.parked -= 1
                if not ticket.parked and not ticket.running:
                    for consumer in self.consumers.values():
                        if consumer.waiting.pop(ticket, ticket) is None:
                            ticket.queued = False
                    self._finish(ticket)

    def _release(self, consumer: ConsumerLoad, count: int, done_s: float | None = None) -> None:
        """Take ``count`` messages off a consumer, which finished them at ``done_s``. Tickets that waited for room try
        again."""
        if done_s is not None:
            consumer.pace.finished(count, done_s)
        consumer.in_flight -= count
        if consumer.room > 0:  # whether it had room before says little: callers may have taken a ticket off it by now
            self._open.has_room_again(consumer)
        self.in_flight -= count
        self._queue.retry_unassigned()
        self._retry_at(consumer)  # before those without an owner, which other consumers may have

    def _retry_at(self, consumer: ConsumerLoad) -> None:
        """Let the next plan try the tickets that wait at a consumer."""
        if consumer.waiting:
            self._untried[consumer.incarnation] = len(consumer.waiting)

    def begin(self) -> None:
        """Begin a plan: of the tickets that wait where room is by now, as many come first as there is room for."""
        for incarnation in list(self._untried):
            self._retry_front(incarnation)

    def _retry_front(self, incarnation: str) -> None:
        """Let those try that have waited longest at a consumer, as far as it has room: a route may have very many wait
        there."""
        left, consumer = self._untried.pop(incarnation), self.consumers.get(incarnation)
        most = 0 if consumer is None else min(left, consumer.room, len(consumer.waiting))
        if consumer is not None and most > 0:
            if left > most:
                self._untried[incarnation] = left - most
            self._queue.retry_first([consumer.waiting.popitem(last=False)[0] for _ in range(most)])

    def _wait_at(self, consumer: ConsumerLoad, ticket: BoardTicket) -> None:
        ticket.queued = True
        consumer.waiting[ticket] = None

    def _unbind(self, ticket: BoardTicket, owner: ConsumerLoad) -> None:
        """Take a ticket from its owner. If it waits there, it tries again: it is no longer bound to that consumer."""
        owner.tickets.pop(ticket.name, None)
        ticket.owner = None
        if ticket in owner.waiting:
            del owner.waiting[ticket]
            self._queue.retry_first([ticket])

    def _finish(self, ticket: BoardTicket) -> None:
        """Settle a ticket after ids have left it: free it if nothing runs, queue it if something waits, forget it if
        nothing is left."""
        owner = ticket.owner
        if not ticket.running and ticket.standing is OPEN and owner is not None:
            was_full = owner.busy_tickets == owner.pace.tickets
            ticket.believed = NOBODY
            self._unbind(ticket, owner)
            if was_full:  # it may have one ticket more now
                self._open.has_room_again(owner)
                self._queue.retry_unassigned()
                self._retry_at(owner)
        if ticket.parked:
            if not ticket.queued:
                self._queue.add(ticket)
        elif ticket.running or ticket.above is not None:
            return
        elif ticket.standing is OPEN or ticket.standing is Standing.RECOVERING:
            if ticket.owner is not None:
                ticket.owner.tickets.pop(ticket.name, None)
            self.tickets.pop(ticket.name, None)

    # ---- plans -------------------------------------------------------------------------------------------------------

    def next_runnable(self) -> BoardTicket | None:
        """Take out the next ticket that may be planned, also of those that wait at a consumer which has room left."""
        while (ticket := self._queue.next_runnable()) is None and self._untried:
            self._retry_front(next(iter(self._untried)))
        return ticket

    @property
    def room(self) -> int:
        """Number of messages that could be handed over now to all consumers together."""
        return self._open.room

    def is_open(self, name: str) -> bool:
        """Return whether a consumer of this name accepts work."""
        return self._open.has(name)

    def load_bound(self, more: int) -> int:
        """Return the number of messages that a consumer may have in flight before tickets go to others, once ``more``
        are handed over."""
        return self._open.bound(self.in_flight + more)

    def assign(
        self, ticket: BoardTicket, most: int, bound: int, now_s: float, route: str = ""
    ) -> tuple[str, TicketPlan] | None:
        """Hand up to ``most`` parked ids of a ticket to its owner, or to a consumer chosen now, which becomes its
        owner. ``route``: the name of the consumer that is to have it; another owner first ends what it has.

        Return the incarnation and the part of the plan; None when the ticket has to wait.
        """
        consumer = ticket.owner or self._open.choose(ticket, bound, route)
        if route and consumer is not None and consumer.name != route and self._open.has(route):
            self._wait_at(consumer, ticket)
            return None
        if consumer is None:
            self._queue.wait_unassigned(ticket)
            return None
        if not consumer.accepts:
            return None
        count = min(len(ticket.parked), self._window - len(ticket.running), most)
        if count > (room := consumer.room_for(ticket)):
            count = room
            if count <= 0:
                self._wait_at(consumer, ticket)
                return None
        if count <= 0:
            return None
        part = self._take(ticket, consumer, count, now_s)
        if ticket.parked:
            self._queue.add(ticket)
        return consumer.incarnation, part

    def _take(self, ticket: BoardTicket, consumer: ConsumerLoad, count: int, now_s: float) -> TicketPlan:
        """Move ids from parked to running."""
        if count == len(ticket.parked):  # the usual case: this runs for every ticket of every plan
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
        if not consumer.in_flight:
            consumer.pace.began(now_s)
        consumer.in_flight += count
        self.in_flight += count
        return part

    def put_back(self, part: TicketPlan) -> None:
        """Park again the ids of a part that was not carried out, before what came later."""
        ticket = self.tickets[part.ticket]
        for entry_id in part.ids:
            ticket.running.pop(entry_id, None)
        ticket.parked.extendleft(reversed(part.ids))
        self.parked += len(part.ids)
        consumer = ticket.owner
        if consumer is None:
            return
        if part.changes_owner:
            self._unbind(ticket, consumer)
        self._release(consumer, len(part.ids))
        self._queue.add(ticket)

    def granted(self, target: TargetPlan, answer: TargetReply, fence: int) -> list[TicketPlan]:
        """Update memory with the script's answer for a target. Return the parts that it refused: their records must be
        read."""
        refused, fresh = set(answer.refused), set(answer.fresh)
        head = b"%s %d" % (target.incarnation.encode(), fence)
        undone = []
        for part in target.parts:
            ticket = self.tickets[part.ticket]
            if part.ticket in refused:
                self.put_back(part)
                ticket.standing = Standing.UNSURE
                undone.append(part)
            elif part.changes_owner or part.ticket in fresh:
                ticket.believed = head
        for part in target.parts if answer.gone else ():
            ticket = self.tickets[part.ticket]
            lost_bodies = [entry_id for entry_id in answer.gone if entry_id in ticket.running]
            for entry_id in lost_bodies:
                del ticket.running[entry_id]
            if lost_bodies and ticket.owner is not None:
                self._release(ticket.owner, len(lost_bodies))
                self._finish(ticket)
        return undone

    def window_is_full(self, ticket: BoardTicket) -> bool:
        """Return whether the ticket's owner has as many of its entries as it may have at a time."""
        return len(ticket.running) >= self._window

    # ---- reading again -----------------------------------------------------------------------------------------------

    def set_record(self, name: bytes, owner: bytes, fence: int, ids: Sequence[bytes], now_s: float) -> str | None:
        """Follow the index record of a ticket: at takeover, after a refusal, and when reports may have been lost.

        Return the incarnation to recover when its owner is not among the living, else None.
        """
        ticket = self._ticket(name)
        asked = self._disown(ticket)
        ticket.believed = b"%s %d" % (owner, fence)
        ticket.compared_s = now_s
        if owner == HALTED:
            self._hide(ticket, ids)
            ticket.waits_for = ids[0]
            return None
        self._reopen(ticket)
        if is_given_back(owner):
            if (due_ms := due_ms_of(owner)) is None:
                ticket.standing = OPEN
                if asked is not None:
                    self.recalls.returned(asked)
            else:
                self.waits.begin(ticket, due_ms)
            self._park(ticket, self._not_hidden(ticket, sorted(ids, key=rank)))
            self._queue.add(ticket)
            return None
        if owner == TAIL:
            ticket.standing, ticket.until = Standing.ENDING, rank(ids[0])
            self._park(ticket, self._not_hidden(ticket, sorted(ids[1:], key=rank)))
            self._ending[name] = None
            return None
        incarnation = owner.decode()
        if (consumer := self.consumers.get(incarnation)) is None:
            consumer = self.join(incarnation, incarnation.rpartition(":")[0], 0, 0, False)
        ticket.owner = consumer
        consumer.tickets[name] = None
        # Parked entries are under ``master`` for certain; the index still ascribes strays to their dead owner.
        strays = set(ids).intersection(ticket.parked)
        ticket.running = dict.fromkeys(entry_id for entry_id in ids if entry_id not in strays)
        consumer.in_flight += len(ticket.running)
        self.in_flight += len(ticket.running)
        if not consumer.capacity or ticket.standing is Standing.RECOVERING:
            ticket.standing = Standing.RECOVERING
            return incarnation
        ticket.standing = OPEN
        self._queue.add(ticket)
        return None

    def clear_record(self, name: bytes) -> None:
        """Follow the index, which has no record of the ticket: nothing of it is in processing."""
        if (ticket := self.tickets.get(name)) is None or ticket.standing is Standing.RECOVERING:
            return
        self._disown(ticket)
        self._reopen(ticket)
        ticket.standing = OPEN
        self._finish(ticket)

    def halt(self, name: bytes, now_s: float) -> None:
        """Halt a ticket whose record cannot be read: nothing of it moves until somebody has looked."""
        ticket = self._ticket(name)
        self._disown(ticket)
        self._hide(ticket, (ZERO,))
        ticket.compared_s = now_s

    def _disown(self, ticket: BoardTicket) -> Asked | None:
        """Forget who has a ticket. Return how it was asked back, if it was."""
        asked = self.recalls.forget(ticket.name)
        consumer = ticket.owner
        running = len(ticket.running)
        ticket.running = {}
        ticket.waits_for = b""
        ticket.believed = NOBODY
        if consumer is not None:
            self._unbind(ticket, consumer)
            self._release(consumer, running)
        return asked

    def quiet_since(self, limit_s: float) -> list[bytes]:
        """Return the tickets in processing, waiting or halted that were last compared with the index before
        ``limit_s``: their reports and announcements may have been lost."""
        old = [ticket for ticket in self.tickets.values() if ticket.compared_s < limit_s]
        return [one.name for one in old if one.standing in _STILL or (one.running and one.standing is OPEN)]
