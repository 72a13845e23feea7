"""Parked tickets: what memory has of the entries under ``master``. Pure.

Of a halted ticket memory holds only the name and the message that the ticket waits for: entries that arrive meanwhile
are under ``master`` in Redis, and are read again from there, in order and a page at a time, once the ticket may move
(``was_read``). So a ticket that waits for an operator costs the others neither memory nor room.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from usher.common.protocol.stream_id import ZERO, before, rank
from usher.master.policy.board.plans import NOBODY, is_given_back_head
from usher.master.policy.board.tickets import MOVING, OPEN, BoardTicket, Rereading, RunQueue, Standing
from usher.master.policy.board.waits import Waits


class ParkedTickets(ABC):
    """All tickets, with their parked messages: in memory, or left to Redis' account."""

    def __init__(self, queue: RunQueue, worth_keeping: Callable[[BoardTicket], int]) -> None:
        self.tickets: dict[bytes, BoardTicket] = {}
        self.parked = 0
        self.waits = Waits()
        self._queue = queue
        self._worth_keeping = worth_keeping
        self._rereading = Rereading()
        self._ending: dict[bytes, None] = {}

    @abstractmethod
    def clear_record(self, name: bytes) -> None:
        """Follow the index, which has no record of the ticket: nothing of it is in processing."""

    @abstractmethod
    def _finish(self, ticket: BoardTicket) -> None:
        """Settle a ticket after ids have left it."""

    def _ticket(self, name: bytes) -> BoardTicket:
        return self.tickets.get(name) or self.tickets.setdefault(name, BoardTicket(name))

    def _park(self, ticket: BoardTicket, ids: Sequence[bytes]) -> None:
        """Put ids, in id order, in their places; usually all below or all above those there."""
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

    # ---- tickets that wait for a time --------------------------------------------------------------------------------

    def wake_due(self, now_s: float) -> None:
        """Let the tickets go on whose time has come."""
        for ticket in self.waits.take_due(now_s):
            ticket.standing = OPEN
            self._finish(ticket)

    # ---- tickets that wait for an operator, and after it -------------------------------------------------------------

    def _hide(self, ticket: BoardTicket, ids: Sequence[bytes]) -> None:
        """Halt a ticket: from the lowest of ``ids`` on, only Redis keeps account of what is under ``master``."""
        ticket.standing = Standing.HALTED
        self._rereading.leave(ticket)
        lowest = min((*ids, *list(ticket.parked)[:1]), key=rank)
        if ticket.above is None or rank(lowest) <= rank(ticket.above):
            ticket.above = before(lowest)
        self._drop_parked(ticket)

    def _drop_parked(self, ticket: BoardTicket) -> None:
        self.parked -= len(ticket.parked)
        ticket.parked.clear()
        self._rereading.end(ticket)

    def unload(self, ticket: BoardTicket) -> bool:
        """Leave all parked messages of a ticket to Redis' account until ``reread``. Return whether that was done."""
        if not ticket.parked or ticket.standing is not OPEN:
            return False
        self._rereading.leave(ticket)
        ticket.above = before(ticket.parked[0])
        self._drop_parked(ticket)
        return True

    def shorten(self, ticket: BoardTicket) -> None:
        """Leave to Redis' account the parked messages of a ticket beyond those worth keeping."""
        keeps = self._worth_keeping(ticket)
        beyond = len(ticket.parked) - keeps
        if beyond <= 0 or ticket.standing not in (OPEN, Standing.WAITING):
            return
        self._rereading.leave(ticket)
        kept = [ticket.parked.popleft() for _ in range(keeps)]
        assert rank(kept[-1]) < rank(ticket.parked[0])
        ticket.above, ticket.parked = kept[-1], deque(kept)
        self.parked -= beyond
        self._rereading.add(ticket)

    def reread(self, names: Iterable[bytes]) -> None:
        """Have the unloaded messages of these tickets read from Redis again."""
        for name in names:
            ticket = self.tickets.get(name)
            if ticket is not None and ticket.above is not None and ticket.standing is not Standing.HALTED:
                self._rereading.add(ticket)

    @property
    def has_hidden(self) -> bool:
        """Return whether Redis knows more than memory of tickets that may move."""
        return self._rereading.has_tickets

    def _not_hidden(self, ticket: BoardTicket, ids: list[bytes]) -> list[bytes]:
        """Return those of ``ids`` that memory is to know now; the others are read again from Redis."""
        if ticket.above is None:
            return ids
        if ticket.standing is Standing.HALTED:
            self._hide(ticket, ids)
            return []
        self._rereading.leave(ticket)
        limit = rank(ticket.above)
        return [entry_id for entry_id in ids if rank(entry_id) <= limit]

    def _reopen(self, ticket: BoardTicket) -> None:
        """End a halt: entries of the ticket that memory does not know are read again before it is planned."""
        self._ending.pop(ticket.name, None)
        if ticket.above is not None:
            self._rereading.add(ticket)

    def to_read(self) -> bytes | None:
        """Return the id above which to go on reading the entries under ``master``; None: nothing is to be read.

        One reading is for all hidden tickets of which little is left in memory, however many they are.
        """
        return self._rereading.start(self._wants_more)

    def _wants_more(self, ticket: BoardTicket) -> bool:
        return ticket.standing in MOVING and 2 * len(ticket.parked) <= self._worth_keeping(ticket)

    def was_read(self, found: Iterable[tuple[bytes, bytes]], last: bytes | None) -> list[bytes]:
        """Take in all entries, (id, ticket), that Redis has under ``master`` from ``to_read`` up to ``last``; None: to
        the end.

        Return tickets that have nothing there although their records say so: the records must be read again.
        """
        by_ticket: dict[bytes, list[bytes]] = {}
        for entry_id, name in found:
            if self._rereading.has(name):
                by_ticket.setdefault(name, []).append(entry_id)
        for name, ids in by_ticket.items():
            self._add_read(self.tickets[name], ids)
        if last is not None:
            self._rereading.go_on(last)
            return []
        unsure = []
        for ticket in self._rereading.finish():
            if ticket.standing not in MOVING:
                continue  # it is read once more when it may move
            ticket.above = None
            self._rereading.end(ticket)
            if not ticket.parked and not ticket.running and is_given_back_head(ticket.believed):
                unsure.append(ticket.name)
            self._finish(ticket)
        return unsure

    def _add_read(self, ticket: BoardTicket, ids: Sequence[bytes]) -> None:
        above = rank(ticket.above or ZERO)
        unknown = [entry_id for entry_id in ids if rank(entry_id) > above and entry_id not in ticket.running]
        room = max(0, self._worth_keeping(ticket) - len(ticket.parked)) if ticket.standing in MOVING else 0
        taken = unknown[:room]
        self._park(ticket, taken)
        if len(taken) < len(unknown):
            self._rereading.leave(ticket)
        if taken:
            ticket.above = taken[-1]
        self._finish(ticket)

    def ending_page(self, most: int) -> tuple[BoardTicket, list[bytes], bool] | None:
        """Return an ending ticket, up to ``most`` of its ids that end, and whether they are the last; None: no ticket
        ends."""
        for name in self._ending:
            ticket = self.tickets[name]
            ids = [entry_id for entry_id in ticket.parked if rank(entry_id) <= ticket.until]
            all_known = ticket.above is None or rank(ticket.above) >= ticket.until
            if ids or all_known:
                return ticket, ids[:most], all_known and len(ids) <= most
        return None

    def ended(self, ticket: BoardTicket, ids: Sequence[bytes], is_last: bool) -> None:
        """Forget ids of an ending ticket, which are dead letters now."""
        self._drop_first(ticket, len(ids))
        if is_last:
            self.clear_record(ticket.name)

    def bury(self, ticket: BoardTicket, count: int) -> bool:
        """Forget the first parked ids of a ticket, which are dead letters now. Return whether its record must be read
        again."""
        self._drop_first(ticket, count)
        if ticket.parked:
            return False
        was_returned = is_given_back_head(ticket.believed)
        if was_returned:  # its record went with the last of its ids, if memory had them all
            ticket.believed = NOBODY
            ticket.standing = Standing.UNSURE
        self._finish(ticket)
        return was_returned

    def _drop_first(self, ticket: BoardTicket, count: int) -> None:
        for _ in range(count):
            ticket.parked.popleft()
        self.parked -= count
