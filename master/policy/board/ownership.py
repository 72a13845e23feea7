"""Who has what, as the leader remembers it. Pure: no Redis, no clock; one thread owns it.

Memory is an index of the pending list, never more: a new epoch starts with nothing. Of a halted ticket it holds nothing
but the name and the message that the ticket waits for: what arrives meanwhile is under ``master`` in Redis, and is read
again from there, in order and a page at a time, once the ticket may move (``was_read``). So a ticket that waits for an
operator costs the others neither memory nor room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from usher.common.protocol.stream_id import ZERO, before, rank
from usher.master.policy.board.placement import OpenConsumers
from usher.master.policy.board.plans import HALTED, NOBODY, RETURNED, TAIL
from usher.master.policy.board.tickets import MOVING, OPEN, BoardTicket, ConsumerLoad, Standing


class Holdings:
    """All tickets in processing or parked, and the load of every consumer."""

    def __init__(self, ticket_window: int) -> None:
        self._window = ticket_window
        self._refill_at = (
            ticket_window // 2
        )  # a ticket that fills its window is refilled in halves: each refill writes its record anew
        self.tickets: dict[bytes, BoardTicket] = {}
        self.consumers: dict[str, ConsumerLoad] = {}
        self._open = OpenConsumers(())
        self._ready: deque[BoardTicket] = deque()
        self._homeless: deque[BoardTicket] = deque()  # ready, but nobody had room or was there
        self._hidden: dict[bytes, None] = {}  # tickets that may move, of which Redis knows more than memory
        self._being_read: dict[
            bytes, None
        ] = {}  # those of them that are being read, all by one reading of what is under ``master``
        self._scanned = ZERO  # how far it is: what these have up to here, memory knows
        self._ending: dict[bytes, None] = {}
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
        """An incarnation's lease has ended: its tickets are recovered before anything of them is planned. False if it
        is not known."""
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
        """All that a lost incarnation had is under ``master``; its tickets are free. Returns those of ``others`` that
        must be read again."""
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
        self._open = OpenConsumers(list(self.consumers.values()))
        self._retry(self._homeless)

    # ---- entries -------------------------------------------------------------------------------------------------------------

    def arrive(self, entry_id: bytes, name: bytes) -> bool:
        """A new entry, above every id seen before. False: it is in processing already (the group was lost and reads it
        again)."""
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
            self._queue(ticket)
        return True

    def has(self, name: bytes, entry_id: bytes) -> bool:
        """Whether memory has the entry in processing, or as what its ticket waits for."""
        ticket = self.tickets.get(name)
        return ticket is not None and (entry_id in ticket.running or entry_id == ticket.waits_for)

    def runs(self, name: bytes, entry_id: bytes) -> bool:
        """Whether memory has the entry in processing with an owner that lives, or as what its ticket waits for."""
        ticket = self.tickets.get(name)
        if ticket is not None and ticket.waits_for == entry_id:
            return True
        return (
            ticket is not None
            and entry_id in ticket.running
            and ticket.owner is not None
            and ticket.standing is Standing.OPEN
        )

    def take_in(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """(id, ticket) of entries that came to ``master`` from elsewhere (taken back, given back, stray, adopted), in
        id order: each goes to its place among what is parked of its ticket."""
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
            self._park(ticket, self._not_hidden(ticket, ids))
            self._settle(ticket)

    def _ticket(self, name: bytes) -> BoardTicket:
        return self.tickets.get(name) or self.tickets.setdefault(name, BoardTicket(name))

    def _park(self, ticket: BoardTicket, ids: Sequence[bytes]) -> None:
        """Put ids, in id order, to their places; usually all below or all above what is there."""
        if not ids:
            return
        parked, count = ticket.parked, len(ticket.parked)
        if not parked or rank(ids[0]) > rank(parked[-1]):
            parked.extend(ids)
        elif rank(ids[-1]) < rank(parked[0]):
            parked.extendleft(reversed(ids))
        else:
            ticket.parked = deque(sorted({*parked, *ids}, key=rank))
        self.parked += len(ticket.parked) - count

    def free(self, incarnation: str, items: Iterable[tuple[bytes, Sequence[bytes]]]) -> None:
        """A report: these ids of these tickets are done. By id and incarnation, never by counting: doubled, late or
        reordered reports change nothing, nor does what somebody else says who has the ticket no more."""
        consumer = self.consumers.get(incarnation)
        if consumer is None:
            return
        freed, lighter = 0, []
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
                lighter.append(ticket)
        if freed:
            self._lighter(consumer, freed)
        for ticket in lighter:
            self._settle(ticket)

    def _lighter(self, consumer: ConsumerLoad, count: int) -> None:
        if consumer.in_flight >= consumer.capacity:
            self._open.has_room_again(consumer)
        consumer.in_flight -= count
        self.in_flight -= count
        if consumer.waiting:
            self._retry(consumer.waiting)
        if self._homeless:
            self._retry(self._homeless)

    def _settle(self, ticket: BoardTicket) -> None:
        """After ids left: free the ticket if nothing runs, queue it if something waits, forget it if nothing is
        left."""
        owner = ticket.owner
        if not ticket.running and ticket.standing is OPEN and owner is not None:
            owner.tickets.pop(ticket.name, None)
            ticket.owner, ticket.believed = None, NOBODY
            self._retry(owner.waiting)  # it may wait there, and is not bound to that consumer any more
        if ticket.parked:
            if not ticket.queued:
                self._queue(ticket)
        elif (
            not ticket.running
            and ticket.above is None
            and (ticket.standing is OPEN or ticket.standing is Standing.RECOVERING)
        ):
            if ticket.owner is not None:
                ticket.owner.tickets.pop(ticket.name, None)
            self.tickets.pop(ticket.name, None)

    def _queue(self, ticket: BoardTicket) -> None:
        if ticket.queued or ticket.standing is not OPEN or not ticket.parked or len(ticket.running) > self._refill_at:
            return
        if ticket.owner is not None and not ticket.owner.accepts:
            return  # it waits until its draining owner is done with it
        ticket.queued = True
        self._ready.append(ticket)

    def _retry(self, waiting: deque[BoardTicket]) -> None:
        for ticket in waiting:
            ticket.queued = False
            self._queue(ticket)
        waiting.clear()

    # ---- reading again -------------------------------------------------------------------------------------------------------

    def set_record(self, name: bytes, owner: bytes, fence: int, ids: Sequence[bytes], now_s: float) -> str | None:
        """The index says this of a ticket (at adoption, after a refusal, and when reports may have been lost): memory
        follows.

        Returns the incarnation to recover when its owner is not among the living, else None.
        """
        ticket = self._ticket(name)
        self._disown(ticket)
        ticket.believed = b"%s %d" % (owner, fence)
        ticket.compared_s = now_s
        if owner == HALTED:
            self._hide(ticket, ids)
            ticket.waits_for = ids[0]
            return None
        self._reopen(ticket)
        if owner == RETURNED:
            ticket.standing = Standing.OPEN
            self._park(ticket, self._not_hidden(ticket, sorted(ids, key=rank)))
            self._queue(ticket)
            return None
        if owner == TAIL:
            ticket.standing, ticket.until = Standing.ENDING, rank(ids[0])
            self._ending[name] = None
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
        self._reopen(ticket)
        ticket.standing = Standing.OPEN
        self._settle(ticket)

    def halt(self, name: bytes, now_s: float) -> None:
        """The ticket's record cannot be read: nothing of it moves until somebody has looked."""
        ticket = self._ticket(name)
        self._disown(ticket)
        self._hide(ticket, (ZERO,))
        ticket.compared_s = now_s

    def _disown(self, ticket: BoardTicket) -> None:
        consumer = ticket.owner
        running = len(ticket.running)
        ticket.running = {}
        ticket.waits_for = b""
        ticket.believed = NOBODY
        ticket.owner = None
        if consumer is not None:
            consumer.tickets.pop(ticket.name, None)
            self._lighter(consumer, running)

    def quiet_since(self, limit_s: float) -> list[bytes]:
        """Tickets in processing or halted, last compared with the index before ``limit_s``: reports and news of theirs
        may have been lost."""
        old = [ticket for ticket in self.tickets.values() if ticket.compared_s < limit_s]
        return [
            one.name
            for one in old
            if one.standing is Standing.HALTED or (one.running and one.standing is Standing.OPEN)
        ]

    # ---- tickets that wait for an operator, and after it ---------------------------------------------------------------------

    def _hide(self, ticket: BoardTicket, ids: Sequence[bytes]) -> None:
        """The ticket is halted: of what is under ``master``, from the lowest of ``ids`` on, Redis alone keeps
        account."""
        ticket.standing = Standing.HALTED
        self._leave_reading(ticket)
        lowest = min((*ids, *list(ticket.parked)[:1]), key=rank)
        if ticket.above is None or rank(lowest) <= rank(ticket.above):
            ticket.above = before(lowest)
        self.parked -= len(ticket.parked)
        ticket.parked.clear()
        self._hidden.pop(ticket.name, None)

    def _leave_reading(self, ticket: BoardTicket) -> None:
        """The reading goes on without the ticket."""
        if ticket.name in self._being_read:
            del self._being_read[ticket.name]
            ticket.above = max(ticket.above or ZERO, self._scanned, key=rank)

    def _not_hidden(self, ticket: BoardTicket, ids: list[bytes]) -> list[bytes]:
        """Those of ``ids`` that memory is to know now; the others are read again from Redis."""
        if ticket.above is None:
            return ids
        if ticket.standing is Standing.HALTED:
            self._hide(ticket, ids)
            return []
        self._leave_reading(ticket)
        limit = rank(ticket.above)
        return [entry_id for entry_id in ids if rank(entry_id) <= limit]

    def _reopen(self, ticket: BoardTicket) -> None:
        """It is halted no more: what memory does not know of it is read again before it is planned."""
        self._ending.pop(ticket.name, None)
        if ticket.above is not None:
            self._hidden[ticket.name] = None

    def _keeps(self, ticket: BoardTicket) -> int:
        """Entries of a ticket that are worth having in memory when Redis keeps account of the others."""
        return self._window

    def to_read(self) -> bytes | None:
        """Where to read on what is under ``master``: above this id. One reading is for all hidden tickets of which
        little is left in memory, however many they are. None: there are none."""
        if not self._being_read:
            hidden = map(self.tickets.__getitem__, self._hidden)
            wanting = [one for one in hidden if one.standing in MOVING and 2 * len(one.parked) <= self._keeps(one)]
            if not wanting:
                return None
            wanting.sort(key=lambda one: rank(one.above or ZERO))
            self._being_read, self._scanned = {one.name: None for one in wanting}, ZERO
        first = self.tickets[next(iter(self._being_read))]  # it began lowest: what is below it is nobody's who is left
        self._scanned = max(self._scanned, first.above or ZERO, key=rank)
        return self._scanned

    def was_read(self, found: Iterable[tuple[bytes, bytes]], last: bytes | None) -> list[bytes]:
        """(id, ticket) of all that Redis has under ``master`` from ``to_read`` up to ``last``; None: to the end.
        Returns tickets of which nothing is there although their records say so, which must be read again."""
        by_ticket: dict[bytes, list[bytes]] = {}
        for entry_id, name in found:
            if name in self._being_read:
                by_ticket.setdefault(name, []).append(entry_id)
        for name, ids in by_ticket.items():
            self._add_read(self.tickets[name], ids)
        if last is not None:
            self._scanned = last
            return []
        unsure = []
        for ticket in [self.tickets[name] for name in self._being_read]:
            if ticket.standing not in MOVING:
                continue  # it is read once more when it may move
            ticket.above = None
            self._hidden.pop(ticket.name, None)
            if not ticket.parked and not ticket.running and ticket.believed.startswith(RETURNED + b" "):
                unsure.append(ticket.name)
            self._settle(ticket)
        self._being_read = {}
        return unsure

    def _add_read(self, ticket: BoardTicket, ids: Sequence[bytes]) -> None:
        above = rank(ticket.above or ZERO)
        unknown = [entry_id for entry_id in ids if rank(entry_id) > above and entry_id not in ticket.running]
        taken = unknown[: max(0, self._keeps(ticket) - len(ticket.parked))] if ticket.standing in MOVING else []
        self._park(ticket, taken)
        if len(taken) < len(unknown):
            self._leave_reading(ticket)
        if taken:
            ticket.above = taken[-1]
        self._settle(ticket)

    def ending_page(self, most: int) -> tuple[BoardTicket, list[bytes], bool] | None:
        """An ending ticket, up to ``most`` of its ids that end, and whether they are the last."""
        for name in self._ending:
            ticket = self.tickets[name]
            ids = [entry_id for entry_id in ticket.parked if rank(entry_id) <= ticket.until]
            all_known = ticket.above is None or rank(ticket.above) >= ticket.until
            if ids or all_known:
                return ticket, ids[:most], all_known and len(ids) <= most
        return None

    def ended(self, ticket: BoardTicket, ids: Sequence[bytes], is_last: bool) -> None:
        """These are dead letters now."""
        for _ in ids:
            ticket.parked.popleft()
        self.parked -= len(ids)
        if is_last:
            self.clear_record(ticket.name)
