"""Takeover: reads what a new leader must know before it reads anything new; otherwise a ticket's second message might
go out before its first.

Memory starts empty. The tickets of living owners come from the index; the entries of dead incarnations are taken back
until their lists are empty; then all entries pending under ``master`` are taken in, in id order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import GroupMissing
from usher.common.base.log import event
from usher.common.protocol.keys import Keys
from usher.common.protocol.mishaps import DeclaredLoss, format_id_range
from usher.common.protocol.owner_words import HALTED, is_given_back
from usher.common.protocol.stream_id import ZERO, Span, before, rank
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketStream, redis_ms
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.membership.registry import RegisteredConsumer, read_registry
from usher.master.policy.board.board import Board
from usher.master.policy.group_loss import Memory, reached, restart, set_back
from usher.master.recovery.repairs import Recoverer, take_in

log = logging.getLogger(__name__)

_PAGE = 1000
#: Seconds between two looks whether leases have ended.
_LOOK_S = 0.1


class Takeover:
    """The takeover of a new epoch, and the state that it begins with. ``board``: on which everything comes that is read
    from Redis. ``highest_pending``: it may be above ``last_delivered``."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        stream: TicketStream,
        steps: LeaderScripts,
        board: Board,
        made_progress: Callable[[], None],
    ) -> None:
        self._link, self._keys, self._stream, self._steps, self.board = link, keys, stream, steps, board
        self._made_progress = made_progress
        self.members: dict[str, RegisteredConsumer] = {}
        self.last_delivered = self.highest_pending = ZERO
        self._taken_back = 0

    def facts(self) -> dict[str, Any]:
        board = self.board
        counts = {"consumers": len(board.consumers), "tickets": len(board.tickets), "parked": board.parked}
        return counts | {"taken_back": self._taken_back}

    def run(self, memory: Memory) -> Takeover:
        """Read everything. ``memory``, from before this epoch, only makes the report about a lost group more exact.
        Raises Fenced, and what Link.call raises."""
        stream, steps, board = self._stream, self._steps, self.board
        was_there = self._ensure_group(memory)
        steps.begin(is_new=not was_there)
        board.waits.learn_time(redis_ms(self._link), now_s())
        span = stream.span() or Span(None, ZERO)
        delivered = stream.last_delivered()
        again, lost = set_back(memory, delivered, span.last_generated) if was_there else (None, None)
        if again or lost:
            steps.losses.set_back(again, lost)
        self.members = read_registry(self._link, self._keys)
        for incarnation, member in self.members.items():
            if member.alive:
                one = member.registration
                board.join(incarnation, one.name, one.slots, one.capacity, member.accepts)
        # Entries that the stream has had and the group has not been given were lost with the group: they come as new,
        # unless they are gone.
        below = before(span.first) if span.first is not None else span.last_generated
        dead = self._load_index(max(delivered, below, key=rank))
        living = set(board.consumers) - dead
        held = {name.decode(errors="replace"): pending for name, pending in stream.group_consumers() if pending}
        # A name that no incarnation can have is not ours to end; the idle sweep finds what it holds.
        self._recover(dead | {name for name in held if ":" in name and name not in living}, held)
        self._learn_tenants()
        self._take_in_parked()
        self.highest_pending, self.last_delivered = stream.highest_pending() or ZERO, stream.last_delivered()
        return self

    def _ensure_group(self, memory: Memory) -> bool:
        """Make the group where it was, if it is missing, and declare in exact ids what may repeat or is lost. Return
        whether it was there."""
        keys, stream, steps = self._keys, self._stream, self._steps
        try:
            stream.group_facts()
            return True
        except GroupMissing:
            with contextlib.suppress(GroupMissing):
                steps.begin()  # no turn of another leader reads from the group that is made now
            saved, taken = stream.saved_position(), self._link.call("GET", keys.taken)
            position, span = reached(saved, memory), stream.span()
        if position is None:  # there never was one
            stream.create_group(ZERO)
            event(log, "group_created", stream=keys.stream, group=keys.group)
            return False
        known = None if taken is None else taken.partition(b" ")[0]
        start, repeat, lost = restart(position, span, saved is not None, known)
        self._end_all()
        steps.losses.declare(DeclaredLoss("group_lost", repeat, lost))
        stream.create_group(start)
        facts: dict[str, Any] = {"stream": keys.stream, "group": keys.group, "restarted_at": start}
        facts |= {"may_repeat": format_id_range(repeat), "lost": format_id_range(lost)}
        facts |= {} if span else {"unread": "unread messages are gone with the stream"}
        event(log, "group_lost", level=logging.ERROR, **facts)
        return False

    def _end_all(self) -> None:
        """Have all incarnations end that may have something, and wait until their leases have ended: with the pending
        list it is lost who has what, and all of it is handed over again, in order."""
        owners = {record.owner.decode() for _, record in self._stream.records() if record is not None}
        living = [name for name in owners | read_registry(self._link, self._keys).keys() if ":" in name]
        while living := [one for one in living if self._steps.revoke(one)]:
            self._made_progress()
            time.sleep(_LOOK_S)

    def _load_index(self, read_up_to: bytes) -> set[str]:
        """Put every record on the board, as far as the pending list bears it out; no entry that comes as new is up to
        ``read_up_to``. Return the owners that do not live."""
        dead = set()
        now, last_read = now_s(), rank(read_up_to)
        pending: dict[bytes, set[bytes]] = {}
        for number, (ticket, record) in enumerate(self._stream.records()):
            if number % _PAGE == 0:
                self._made_progress()
            if record is None:
                event(log, "record_unreadable", level=logging.ERROR, ticket=ticket)
                self.board.halt(ticket, now)
                continue
            owner, fence, ids = record
            if is_given_back(owner):
                # Entries that come as new are not parked under ``master``.
                ids = [entry_id for entry_id in ids if rank(entry_id) <= last_read]
            elif owner != HALTED:
                if owner not in pending:
                    pending[owner] = set(self._stream.pending_of(owner))
                ids = [entry_id for entry_id in ids if entry_id in pending[owner]]
                if not ids:
                    self.board.over.add(ticket)
                    continue
            to_recover = self.board.set_record(ticket, owner, fence, ids, now)
            if to_recover is not None:
                dead.add(to_recover)
        return dead

    def _recover(self, dead: set[str], held: Mapping[str, int]) -> None:
        """Bring all entries of dead incarnations to ``master``. One whose lease lives but which is not on the roster
        (somebody deleted its registration) keeps its tickets, and gets no others. With every new roster the dispatcher
        checks again, until the lease has ended."""
        recoverer = Recoverer()
        for incarnation in sorted(dead):
            recoverer.add(incarnation, quietly=True)
        while recoverer.is_busy:
            # Nobody else acts in our epoch, but a drain that ended just now may have given tickets back; all under
            # ``master``, rejected ones included, is read afterwards.
            for ticket in recoverer.turn(self.board, self._steps, []):
                self.board.clear_record(ticket)
            self._made_progress()
        for incarnation in sorted(dead & self.board.consumers.keys()):
            event(log, "unregistered_consumer", level=logging.WARNING, consumer=incarnation)
        self._taken_back = sum(held.get(name, 0) for name in dead - self.board.consumers.keys())

    def _learn_tenants(self) -> None:
        """Learn the tenants of tickets in processing from their first messages there: nothing else of them may be
        read."""
        owned = [(next(iter(one.running)), one.name) for one in self.board.tickets.values() if one.running]
        for at in range(0, len(owned) if self._steps.marks.tells_tenants else 0, _PAGE):
            self.board.learn(self._steps.tenants_of(owned[at : at + _PAGE]))
            self._made_progress()

    def _take_in_parked(self) -> None:
        after: bytes | None = None
        while True:
            page = self._steps.read_parked(after, _PAGE)
            rejected = take_in(self.board, self._steps, page.found)
            self.board.drop([*page.gone, *(one.id for one in rejected)])  # records may name them
            while rejected:
                del rejected[: self._steps.reject(rejected)]
                self._made_progress()
            self._made_progress()
            if (after := page.last) is None:
                return
