"""The leader's board: every ticket in processing or parked, who owns it with which messages, and what is handed over
next, given what rules hold back (``limiter``).

Pure: no Redis, no clock; one thread owns a board. Memory is an index of the pending list, never more: a new epoch
starts with nothing. What a plan takes, it takes at once (``plan`` moves ids from parked to running); the turn then
carries it out (``confirm``), or nothing of it (``withdraw``).

Memory has the ids of all that waits under ``master``, at some 70 bytes each, whatever it waits for: so nothing is ever
read a second time, and all counts are exact.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from usher.common.protocol.keys import HALTED, MASTER
from usher.common.protocol.marks import Mark
from usher.common.protocol.stream_id import rank
from usher.common.protocol.ticket_states import RETURNED, due_ms_of, is_given_back, is_waiting
from usher.master.policy.board.placement import Asked, OpenConsumers, Recalls
from usher.master.policy.board.plans import (
    NOBODY,
    TICKET_PLAN,
    BoardFacts,
    HandOverPlan,
    Parked,
    TargetPlan,
    TicketPlan,
)
from usher.master.policy.board.tickets import (
    OPEN,
    BoardTicket,
    ConsumerLoad,
    RunQueue,
    Standing,
    TicketMarks,
    WorkPace,
)
from usher.master.policy.board.turns import FairQueue, Limiter
from usher.master.policy.rules import Rulebook

#: Most entries read ahead at a time: fewer would hide for longer what stands behind a flood; and told of a ticket.
_AHEAD, _TOLD = 1000, 200
#: Standings of tickets that wait for a time or for somebody, whatever consumers do.
_STILL = (Standing.WAITING, Standing.HALTED)
#: Seconds between two times at which records are written of tickets of which something is over, and most at a time.
_REWRITTEN_S, _REWRITTEN = 1.0, 500
#: A ticket that waits for a time is compared so much later: there may be very many, and its time will come.
_WAITING_S = 60.0
#: Parked messages from which on a ticket is looked at in part only.
_LONG = 1_000


class Board:
    """All tickets and consumers of one epoch. It keeps in step what a plan depends on: the owners, the limiter, and the
    queue of tickets."""

    def __init__(
        self, ticket_window: int, work_s: float = math.inf, weights: Mapping[bytes, float] | None = None
    ) -> None:
        """Make an empty board. ``work_s``: seconds of work that a consumer is given at a time (``WorkPace``).
        ``weights``: of tenants, which take turns; None: neither tenants nor priorities are configured."""
        self._window = ticket_window
        self._work_s = work_s
        self._weights, self._limiter = weights or {}, Limiter()
        self._fair = None if weights is None else FairQueue(ticket_window, weights, self._limiter.holds)
        self._queue = self._fair or RunQueue(ticket_window)
        self.tickets: dict[bytes, BoardTicket] = {}
        self.consumers: dict[str, ConsumerLoad] = {}
        self.in_flight = 0  # messages that consumers have
        self.parked = 0  # messages in memory that no consumer has
        self._still = 0  # of these, those of halted and waiting tickets, a few seconds ago
        self.unsure: set[bytes] = set()  # tickets whose records others have changed, and that are to be read again
        self.over: set[bytes] = set()  # tickets of which nothing is left, and that may have a record
        self._shrunk: set[bytes] = set()  # tickets of which something in their record is over
        self._rewritten_s = 0.0
        # A heap of the tickets that were given back until a time (owner word ``waits@<ms>``), by Redis' own clock.
        self._waiting: list[tuple[int, int, BoardTicket]] = []
        self._number = itertools.count().__next__
        self._behind_ms = 0.0  # what to subtract from Redis' time for ours
        self.asked_back = Recalls(self._limiter.stays)
        self._open = OpenConsumers(())
        self._untried: dict[str, int] = {}  # incarnation -> so many tickets that wait there may have room now

    # ---- plans -------------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Number of entries that could be read now and handed over at once; 0 while anything waits for room. Where
        tenants take turns, what stands behind a flood is read all the same: a few at a time."""
        if self.rules.pauses_all:
            return 0
        room = 0 if self._queue.is_waiting else self._open.room
        return room if self._fair is None else max(room, _AHEAD)

    @property
    def is_busy(self) -> bool:
        """Return whether something is in processing, or could be."""
        return self.in_flight > 0 or self._queue.is_waiting

    @property
    def lined_up(self) -> int:
        """Number of tickets that wait for their turns, where tenants take turns."""
        return 0 if self._fair is None else self._fair.lined_up

    def plan(self, limit: int, now_s: float) -> HandOverPlan | None:
        """Take up to ``limit`` ids for one turn. Return None when nothing can be handed over now."""
        limiter, queue, fair = self._limiter, self._queue, self._fair
        due = limiter.begin(now_s)
        if fair is not None:
            fair.begin(now_s)
        queue.retry(due)
        self._wake_due(now_s)
        for incarnation in list(self._untried):  # of the tickets that wait where room is by now, as many as fit
            self._retry_front(incarnation)
        size = 0
        parts: dict[str, list[TicketPlan]] = {}
        # The bound follows from the load after this plan: with the load before it, all but the first ticket would
        # exceed it.
        bound = self._open.bound(self.in_flight + min(limit, max(0, self.parked - self._still)))
        while size < limit:
            if (ticket := queue.next_runnable()) is None:
                if not self._untried:
                    break
                self._retry_front(next(iter(self._untried)))
                continue
            most = limit - size
            if limiter.has_rules and (most := limiter.allow(ticket, most)) <= 0:
                continue
            assigned = self._assign(ticket, most, bound, now_s)
            if assigned is None:
                continue
            incarnation, part = assigned
            parts.setdefault(incarnation, []).append(part)
            size += len(part.ids)
            if limiter.has_rules:
                limiter.spend(ticket, len(part.ids))
            if fair is not None:
                fair.spend(ticket, len(part.ids))
        if not size:
            return None
        return HandOverPlan([TargetPlan(name, planned) for name, planned in parts.items()], size)

    def _assign(self, ticket: BoardTicket, most: int, bound: int, now_s: float) -> tuple[str, TicketPlan] | None:
        """Hand up to ``most`` parked ids of a ticket to its owner, or to a consumer chosen now, which becomes its
        owner.

        Return the incarnation and the part of the plan; None when the ticket has to wait.
        """
        consumer = ticket.owner or self._open.choose(ticket, bound)
        if consumer is None:
            self._queue.wait_unassigned(ticket)
            return None
        if not consumer.accepts:
            return None
        count = min(len(ticket.parked), self._window - len(ticket.running), most)
        # Within its pace it has room for certain, which costs less to see: this runs for every ticket.
        if consumer.in_flight + count > consumer.pace.window and count > (room := consumer.room_for(ticket)):
            count = room
            if count <= 0:
                ticket.queued = True
                consumer.waiting[ticket] = None
                return None
        if count <= 0:
            return None
        parked, running = ticket.parked, ticket.running
        if count == len(parked):
            ids = list(parked)
            parked.clear()
        else:
            ids = [parked.popleft() for _ in range(count)]
        self.parked -= count
        part = TICKET_PLAN((ticket.name, ticket.believed, ids, list(running) if running else ()))
        for entry_id in ids:
            running[entry_id] = None
        if len(consumer.tickets) <= consumer.retrying:  # it had nothing to do: what waits for a retry is no work
            consumer.pace.began(now_s)
        if ticket.owner is None:
            ticket.owner, ticket.compared_s = consumer, now_s
            consumer.tickets[ticket.name] = None
        consumer.in_flight += count
        self.in_flight += count
        if parked:
            self._queue.add(ticket)
        return consumer.incarnation, part

    def recalls(self, now_s: float) -> list[tuple[str, list[bytes]]]:
        """Return the tickets to ask back now, by incarnation, for consumers that have nothing to do. They count as
        asked from now on."""
        released = self.asked_back.release(now_s) if self.asked_back.asked else []
        again_s = now_s if released else math.inf  # at once: the plans of this turn have been made
        self._queue.retry(released)
        if self._queue.has_runnable:
            self.asked_back.pause(again_s)
            return []
        return self.asked_back.choose(self.consumers, self.tickets, now_s)

    def confirm(self, plan: HandOverPlan, fence: int) -> None:
        """Note that a plan was carried out. ``fence``: of the tickets that changed their owner."""
        for target in plan.targets:
            head = b"%s %d" % (target.incarnation.encode(), fence)
            for part in target.parts:
                if part.changes_owner:
                    self.tickets[part.ticket].believed = head
                    self.over.discard(part.ticket)

    def withdraw(self, plan: HandOverPlan) -> None:
        """Undo a plan that certainly did not happen: its ids are parked again, where they were, and its tickets try
        again."""
        for part in (part for target in plan.targets for part in target.parts):
            self._put_back(self.tickets[part.ticket], part)
            self._give_back(self.tickets[part.ticket], len(part.ids))

    def _give_back(self, ticket: BoardTicket, count: int) -> None:
        """Have so many messages of a ticket count as not planned."""
        self._limiter.spend(ticket, -count)
        if self._fair is not None:
            self._fair.spend(ticket, -count)

    def _put_back(self, ticket: BoardTicket, part: TicketPlan) -> None:
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

    # ---- consumers ---------------------------------------------------------------------------------------------------

    def join(self, incarnation: str, name: str, slots: int, capacity: int, accepts: bool) -> ConsumerLoad:
        """Add a living incarnation, or note that it accepts new work or no longer does."""
        if (consumer := self.consumers.get(incarnation)) is None:
            pace = WorkPace(slots, capacity, self._work_s)
            consumer = self.consumers[incarnation] = ConsumerLoad(incarnation, name, slots, capacity, accepts, pace)
            self._rank()
        elif consumer.accepts != accepts:
            if (slots, capacity) != (consumer.slots, consumer.capacity):
                consumer.pace = WorkPace(slots, capacity, self._work_s)
            consumer.accepts, consumer.slots, consumer.capacity = accepts, slots, capacity
            self._rank()
        for ticket in [self.tickets[of_it] for of_it in consumer.tickets] if accepts else ():
            self._queue.add(ticket)
        return consumer

    def close(self, incarnation: str) -> None:
        """Hand nothing more to an incarnation until ``join`` says that it accepts work."""
        self.consumers[incarnation].accepts = False
        self._rank()

    def mark_lost(self, incarnation: str) -> None:
        """Note that an incarnation's lease has ended: its tickets are recovered before anything of them is planned."""
        consumer = self.consumers[incarnation]
        consumer.accepts = False
        for name in consumer.tickets:
            self.tickets[name].standing = Standing.RECOVERING
            self.asked_back.forget(name)
        self._rank()

    def keep(self, incarnation: str) -> None:
        """Keep an incarnation that was not lost after all. One that a rule has drained gets nothing new."""
        consumer = self.consumers[incarnation]
        for name in list(consumer.tickets):
            self.tickets[name].standing = Standing.UNSURE if name in self.unsure else OPEN
            self._finish(self.tickets[name])
        # An incarnation that only a record named has no capacity here: it gets nothing before the roster knows it.
        accepts = consumer.capacity > 0 and self.rules.of_consumers.get(consumer.name) is None
        self.join(incarnation, consumer.name, consumer.slots, consumer.capacity, accepts)

    def recovered(self, incarnation: str) -> None:
        """Free the tickets of a lost incarnation: all that it had is under ``master``. Their records, which still name
        it, are over, unless others have changed them."""
        if (consumer := self.consumers.pop(incarnation, None)) is None:
            return
        self.in_flight -= consumer.in_flight
        for name in list(consumer.tickets):
            ticket = self.tickets[name]
            ticket.running.clear()
            ticket.owner, ticket.believed, ticket.home = None, NOBODY, consumer.name
            ticket.standing = Standing.UNSURE if name in self.unsure else OPEN
            self.over.add(name)
            self._finish(ticket)
        self._queue.retry(consumer.waiting)
        self._rank()

    def _rank(self) -> None:
        """Rank consumers anew, because those that may be chosen have changed. Tickets that found none try again."""
        self._open = OpenConsumers(list(self.consumers.values()))
        self.asked_back.changed()
        self._queue.retry_unassigned()

    # ---- entries -----------------------------------------------------------------------------------------------------

    def arrive(self, entries: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Take in new entries, (id, ticket), above every id seen before: park them.

        Return those that are in processing already, or that their halted tickets wait for: the group was lost and
        reads them again.
        """
        known, parked = [], 0
        tickets, add = self.tickets, self._queue.add
        for entry_id, name in entries:
            ticket = tickets.get(name)
            if ticket is None:
                ticket = tickets[name] = BoardTicket(name)
            elif entry_id in ticket.running or entry_id == ticket.waits_for:
                known.append((entry_id, name))
                continue
            ticket.parked.append(entry_id)
            parked += 1
            if not ticket.queued:
                add(ticket)
        self.parked += parked
        return known

    def who_has(self, name: bytes, entry_id: bytes) -> str:
        """Return under which name the entry should be pending, as far as memory knows; empty: it does not."""
        if (ticket := self.tickets.get(name)) is None:
            return ""
        if ticket.waits_for == entry_id:
            return HALTED.decode()
        if ticket.owner is not None and entry_id in ticket.running:
            return ticket.owner.incarnation
        parked = ticket.parked  # it may be very long
        at = bisect_left(parked, rank(entry_id), key=rank)
        return MASTER.decode() if at < len(parked) and parked[at] == entry_id else ""

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
            self._park(ticket, ids)
            self._finish(ticket)

    def drop(self, ids: Iterable[bytes]) -> None:
        """Forget messages that are over, and that memory may have parked. It looks at every ticket, at those that are
        long only as far as these ids go."""
        over = set(ids)
        last = max(map(rank, over), default=0)
        for ticket in [*self.tickets.values()] if over else ():
            parked, count, kept = ticket.parked, len(ticket.parked), list[bytes]()
            if count <= _LONG and over.isdisjoint(parked):
                continue
            while parked and rank(parked[0]) <= last:
                if (one := parked.popleft()) not in over:
                    kept.append(one)
            parked.extendleft(reversed(kept))
            if len(parked) < count:
                self.parked -= count - len(parked)
                self._finish(ticket)

    def learn(self, marks: Iterable[Mark]) -> None:
        """Learn the tenants and priorities of entries that are on the board now, or in processing."""
        if (fair := self._fair) is None:
            return
        for mark in marks:
            if (ticket := self.tickets.get(mark.ticket)) is not None:
                fair.learn(ticket, mark)
                self._limiter.began(ticket)

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
            if self.asked_back.asked:
                self.asked_back.forget(ticket.name)
            if ticket.running:
                self._shrunk.add(ticket.name)
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
        is_aside = False
        for entry_id, name in reversed(entries):
            ticket = self.tickets.get(name)
            if ticket is not None and ticket.parked and ticket.parked[-1] == entry_id:
                ticket.parked.pop()
                self.parked -= 1
                if not ticket.parked and not ticket.running:
                    for consumer in self.consumers.values():
                        if consumer.waiting.pop(ticket, ticket) is None:
                            ticket.queued = False
                    is_aside |= ticket.queued
                    self._finish(ticket)
        if is_aside:  # it walks through all that rules put aside
            self._limiter.drop_empty()

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
        if consumer.waiting:
            self._untried[consumer.incarnation] = len(consumer.waiting)

    def _retry_front(self, incarnation: str) -> None:
        left, consumer = self._untried.pop(incarnation), self.consumers.get(incarnation)
        most = 0 if consumer is None else min(left, consumer.room, len(consumer.waiting))
        if consumer is not None and most > 0:
            if left > most:
                self._untried[incarnation] = left - most
            self._queue.retry_first([consumer.waiting.popitem(last=False)[0] for _ in range(most)])

    def _unbind(self, ticket: BoardTicket, owner: ConsumerLoad) -> None:
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
            was_full = len(owner.tickets) - owner.retrying == owner.pace.tickets
            self.over.add(ticket.name)
            ticket.believed = NOBODY
            self._unbind(ticket, owner)
            if was_full:  # it may have one ticket more now
                self._open.has_room_again(owner)
                self._queue.retry_unassigned()
                self._retry_at(owner)
        if ticket.parked:
            if not ticket.queued:
                self._queue.add(ticket)
        elif ticket.running:
            return
        elif ticket.standing is OPEN or ticket.standing is Standing.RECOVERING:
            if ticket.owner is not None:
                ticket.owner.tickets.pop(ticket.name, None)
            if ticket.believed != NOBODY:
                self.over.add(ticket.name)
            self.tickets.pop(ticket.name, None)

    # ---- records -----------------------------------------------------------------------------------------------------

    def set_record(self, name: bytes, owner: bytes, fence: int, ids: Sequence[bytes], now_s: float) -> str | None:
        """Follow the index record of a ticket at takeover, when others changed it, and when reports may be lost. What
        it has in processing counts. What was asked back has cost its tenant nothing, and does not wait for another
        turn. A record that cannot be read counts as one that is halted at ``ZERO``: nothing of its ticket moves until
        somebody has looked."""
        self.unsure.discard(name)
        ticket, believed = self._ticket(name), b"%s %d" % (owner, fence)
        if ticket.standing is Standing.HALTED and ticket.believed == believed:
            ticket.compared_s = now_s
            return None
        if self._fair is not None and owner == RETURNED and name in self.asked_back.asked:
            ticket.marks = ticket.marks or TicketMarks()
            ticket.marks.since = (0.0, 0)
            self._give_back(ticket, len(ticket.running))
        if (is_put_off := is_waiting(owner)) and ticket.owner is not None:
            ticket.home = ticket.owner.name  # who knows why it waits
        # What was put off, its consumer has worked on: very many that need what is away must not look like slow work.
        asked = self._disown(ticket, now_s if is_put_off else None)
        self.over.discard(name)
        ticket.believed, ticket.compared_s = believed, now_s
        if owner == HALTED:
            ticket.standing, ticket.waits_for = Standing.HALTED, ids[0]
            self._park(ticket, sorted(ids[1:], key=rank))
            return None
        if is_given_back(owner):
            if (due_ms := due_ms_of(owner)) is None:
                ticket.standing = OPEN
                if asked is not None:
                    self.asked_back.returned(asked)
            elif ticket.standing is not Standing.WAITING or ticket.until != due_ms:  # a former timer does nothing
                ticket.standing, ticket.until = Standing.WAITING, due_ms
                heapq.heappush(self._waiting, (due_ms, self._number(), ticket))
            self._park(ticket, sorted(ids, key=rank))
            self._queue.add(ticket)
            return None
        incarnation = owner.decode()
        if (consumer := self.consumers.get(incarnation)) is None:
            consumer = self.join(incarnation, incarnation.rpartition(":")[0], 0, 0, False)
        ticket.owner = consumer
        consumer.tickets[name] = None
        # Parked entries are under ``master`` for certain; the index still ascribes strays to their dead owner.
        strays = set(ids).intersection(ticket.parked)
        ticket.running = dict.fromkeys(entry_id for entry_id in ids if entry_id not in strays)
        self._limiter.began(ticket)
        consumer.in_flight += len(ticket.running)
        self.in_flight += len(ticket.running)
        if not consumer.capacity or ticket.standing is Standing.RECOVERING:
            ticket.standing = Standing.RECOVERING
            return incarnation
        ticket.standing = OPEN
        self._queue.add(ticket)
        return None

    def learn_time(self, redis_ms: int, now_s: float) -> None:
        """Learn how far Redis' clock is ahead of ours: with each record that is read."""
        self._behind_ms = redis_ms - 1000 * now_s

    def clear_record(self, name: bytes) -> None:
        """Follow the index, which has no record of the ticket: nothing of it is in processing."""
        self.unsure.discard(name)
        if (ticket := self.tickets.get(name)) is None or ticket.standing is Standing.RECOVERING:
            return
        self._disown(ticket)
        self.over.discard(name)
        ticket.standing = OPEN
        self._finish(ticket)

    def is_of(self, name: bytes, owner: bytes) -> bool:
        """Return whether memory has the ticket with this owner; nothing has changed, then, if the record says so."""
        ticket = self.tickets.get(name)
        if ticket is None or ticket.owner is None or ticket.owner.incarnation.encode() != owner:
            return False
        self.unsure.discard(name)
        if ticket.standing is Standing.UNSURE:
            ticket.standing = OPEN
        self._finish(ticket)
        return True

    def outdated(self, now_s: float) -> dict[bytes, bytes]:
        """Return the records that are not up to date: empty where a ticket is over, and, once a second, those of which
        something is over, for people and for who leads next. Those that others have changed are read first."""
        records = dict.fromkeys(self.over - self.unsure, b"")
        if self._shrunk and now_s >= self._rewritten_s + _REWRITTEN_S:
            for name in [self._shrunk.pop() for _ in range(min(len(self._shrunk), _REWRITTEN))]:
                ticket = self.tickets.get(name)
                if ticket is not None and ticket.owner is not None and ticket.standing is OPEN and ticket.running:
                    records[name] = b" ".join((ticket.believed, *ticket.running))
            if not self._shrunk:
                self._rewritten_s = now_s
        return records

    def due_records_s(self) -> float:
        """Return when records are to be written although nothing is handed over; infinite: never."""
        return self._rewritten_s + _REWRITTEN_S if self.over or self._shrunk else math.inf

    def doubt(self, names: Iterable[bytes]) -> None:
        """Plan nothing of tickets whose records others have changed: these are read first."""
        for name in names:
            self.unsure.add(name)
            ticket = self._ticket(name)
            if ticket.standing in (OPEN, Standing.WAITING):
                ticket.standing = Standing.UNSURE

    def _disown(self, ticket: BoardTicket, done_s: float | None = None) -> Asked | None:
        """Forget who has a ticket. Return how it was asked back, if it was. ``done_s``: as in ``_release``."""
        asked = self.asked_back.forget(ticket.name)
        consumer = ticket.owner
        running = len(ticket.running)
        ticket.running = {}
        ticket.waits_for = b""
        ticket.believed = NOBODY
        if consumer is not None:
            self._unbind(ticket, consumer)
            self._release(consumer, running, done_s)
        return asked

    def quiet_since(self, limit_s: float) -> dict[str, list[bytes]]:
        """Return the tickets that were last compared with Redis before ``limit_s``, by owner: those in processing, of
        which reports may have been lost, and under "" those that wait or are halted, of which notes may have been."""
        found: dict[str, list[bytes]] = {}
        self._still = sum(len(one.parked) for one in self.tickets.values() if one.standing in _STILL)
        for ticket in self.tickets.values():
            later_s = _WAITING_S if ticket.standing is Standing.WAITING else 0.0
            if ticket.compared_s >= limit_s - later_s:
                continue
            if ticket.standing in _STILL:
                found.setdefault("", []).append(ticket.name)
            elif ticket.running and ticket.standing is OPEN and ticket.owner is not None:
                found.setdefault(ticket.owner.incarnation, []).append(ticket.name)
        return found

    def unfinished(self, incarnation: str) -> list[tuple[bytes, list[bytes]]]:
        """Return what a consumer has in processing, by ticket."""
        tickets = self.consumers[incarnation].tickets if incarnation in self.consumers else ()
        return [(name, list(self.tickets[name].running)) for name in tickets]

    def looked_at(self, names: Iterable[bytes], now_s: float) -> list[tuple[bytes, list[bytes]]]:
        """Return what is in processing of these tickets. They count as compared now."""
        found = [ticket for name in names if (ticket := self.tickets.get(name)) is not None and ticket.running]
        for ticket in found:
            ticket.compared_s = now_s
        return [(ticket.name, list(ticket.running)) for ticket in found]

    def held(self, names: Iterable[bytes]) -> list[tuple[bytes, bytes, list[bytes]]]:
        """Return those of these tickets that have owners, each with its fence and what its owner has of it: whatever
        was started is among it."""
        found = [self.tickets[name] for name in names if name in self.tickets]
        return [
            (one.name, one.believed.rpartition(b" ")[2], list(one.running))
            for one in found
            if one.owner is not None and one.believed != NOBODY
        ]

    # ---- what is parked ----------------------------------------------------------------------------------------------

    def _ticket(self, name: bytes) -> BoardTicket:
        return self.tickets.get(name) or self.tickets.setdefault(name, BoardTicket(name))

    def _park(self, ticket: BoardTicket, ids: Sequence[bytes]) -> None:
        if not ids:
            return
        parked, count = ticket.parked, len(ticket.parked)
        if not parked or rank(ids[0]) > rank(parked[-1]):
            parked.extend(ids)
        else:  # they belong, or are, near its beginning; it may be very long
            last, first = rank(ids[-1]), set(ids)
            while parked and rank(parked[0]) <= last:
                first.add(parked.popleft())
            parked.extendleft(sorted(first, key=rank, reverse=True))
        self.parked += len(parked) - count

    def _wake_due(self, now_s: float) -> None:
        while self._waiting and self._waiting[0][0] <= self._behind_ms + 1000 * now_s:
            due_ms, _, ticket = heapq.heappop(self._waiting)
            if ticket.standing is Standing.WAITING and ticket.until == due_ms:
                ticket.standing = OPEN
                self._finish(ticket)

    def takeable(self, now_s: float) -> int:
        """Count what another consumer could be given now: messages that wait for room, and tickets to be recalled."""
        tenants = set(self._fair.held) if self._fair is not None else set()
        free = [one for one in self._queue.waiting() if one.owner is None and one.standing is OPEN]
        parked = sum(len(one.parked) for one in free if one.tenant not in tenants)
        return parked + self.asked_back.recallable(self.consumers.values(), now_s)

    # ---- rules -------------------------------------------------------------------------------------------------------

    @property
    def rules(self) -> Rulebook:
        return self._limiter.rules

    def follow(self, rules: Rulebook) -> None:
        """Follow these rules from now on; every ticket that was held back tries again."""
        released = self._limiter.follow(rules, self.tickets.values())
        if self._fair is not None:
            given = {name: float(rule.weight) for name, rule in rules.tenant_limits.items() if rule.weight}
            self._fair.weigh({**self._weights, **given})
        self._queue.retry(released)
        self.asked_back.changed()

    def next_due_s(self) -> float | None:
        """Return when the next slowed or waiting ticket may go on, or tickets may be asked back; None: unless
        something happens, never."""
        held = map(self._limiter.tenant_due_s, self._fair.held) if self._fair is not None else ()
        waiting_s = (self._waiting[0][0] - self._behind_ms) / 1000 if self._waiting else None
        known = (self._limiter.next_due_s(), waiting_s, self.asked_back.next_due_s(), *held)
        return min((due_s for due_s in known if due_s is not None and due_s < math.inf), default=None)

    # ---- from other threads: what they see may be a moment old -------------------------------------------------------

    def tenants(self) -> dict[bytes, tuple[int, int, float, bool]]:
        return {} if self._fair is None else self._fair.tenants()

    def glance(self, name: bytes, now_s: float, now_ms: int) -> BoardFacts | None:
        ticket = self.tickets.get(name)
        if ticket is None:
            return None
        due_s = self._limiter.due_of(name)
        due_ms = 0 if due_s is None else now_ms + int(1000 * (due_s - now_s))
        if ticket.standing is Standing.WAITING:
            due_ms = ticket.until
        window_is_full = len(ticket.running) >= self._window
        asked = self.asked_back.unanswered.get(name)
        turn, tenant = "", ticket.tenant
        if self._fair is not None and tenant in self._fair.held:
            turn, due_s = self._limiter.told(tenant), self._limiter.tenant_due_s(tenant)
            due_ms = due_ms or (0 if due_s is None else now_ms + int(1000 * (due_s - now_s)))
        elif self._fair is not None and self._fair.is_behind_urgent(ticket):
            turn = "behind more urgent tickets"
        return BoardFacts(
            ticket.standing.value,
            len(ticket.parked),
            True,
            window_is_full,
            due_ms,
            "" if asked is None else asked.idle,
            turn,
            tenant,
            first=_first_of(ticket.parked),
        )

    def parked_of(self, name: bytes) -> Parked | None:
        """Count what memory has parked of a ticket. It costs next to nothing, so many tickets may be asked about."""
        ticket = self.tickets.get(name)
        return None if ticket is None else Parked(len(ticket.parked), True)


def _first_of(parked: deque[bytes]) -> tuple[bytes, ...]:
    """Return the first of these, which another thread may be changing."""
    found = list[bytes]()
    with contextlib.suppress(IndexError):
        found.extend(parked[at] for at in range(_TOLD))
    return tuple(found)
