"""Repairs: what a new leader takes over, and, while it leads, dead incarnations that are recovered and reaped, and what
nobody reported and nobody works on, which is found.

But for the janitor they have no threads: the dispatcher gives them turns, because they change the board. A sweep on a
thread of its own, say, could bring a ticket's older entries to ``master`` unseen, while the dispatcher hands over a
newer one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import GroupMissing, NotNow
from usher.common.base.log import ERROR, WARNING, event
from usher.common.protocol.keys import HALTED, MASTER, Keys
from usher.common.protocol.mishaps import DeclaredLoss, format_id_range
from usher.common.protocol.registration import name_of
from usher.common.protocol.stream_id import ZERO, Span, before, rank
from usher.common.protocol.ticket_states import is_given_back
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketRecord, TicketStream, redis_ms, span_of
from usher.master.leader.elector import Lead
from usher.master.leader.entries import PeekedEntry, Rejected, partition_entries
from usher.master.leader.leader_scripts import LeaderCounters, LeaderScripts, LeaderService, Page
from usher.master.membership.registry import RegisteredConsumer, read_registry
from usher.master.policy.board.board import Board
from usher.master.policy.group_loss import Memory, reached, restart, set_back

#: Entries taken back or read by one script call; tickets whose records are compared with memory per turn;
#: attempts, or errors, that the janitor looks at in one turn, roughly.
PAGE = 500
#: Entries and records that a takeover takes in before it says that it goes on; and seconds between two of its looks
#: whether leases have ended.
_TAKEN_IN, _LOOK_S = 1000, 0.1
#: Letters that are counted anew in one turn: their bodies are copied.
_LETTERS = 100
#: COUNT of XAUTOCLAIM, which looks at ten times as many entries per call; so the dispatcher stops for a millisecond,
#: not for a second: what is new waits meanwhile.
_SWEPT = 25
#: So many times longer, the janitor waits behind a turn in which nobody was over.
_CALM = 6
#: Least time between two steps: a million parked entries must not keep the dispatcher busy looking at them.
_STEP_S = 0.02
#: Seconds between two pages of letters.
_PAUSE_S = 0.02


def unreadable(ticket: bytes) -> TicketRecord:
    """Tell of a record that cannot be read, and return what it counts as (``Board.set_record``)."""
    event("record_unreadable", level=ERROR, ticket=ticket)
    return TicketRecord(HALTED, 0, [ZERO])


def take_in(
    board: Board, steps: LeaderScripts, found: Sequence[PeekedEntry], gone: Iterable[bytes] = ()
) -> list[Rejected]:
    """Take in entries that are under ``master`` now, wherever they were before, and forget those that are ``gone``.
    Return those that can be handed to no consumer."""
    usable, rejected = partition_entries(found)
    board.take_in(usable)
    board.learn(steps.marks.read(found))
    board.drop(gone)
    return rejected


@dataclass
class _Recovery:
    began_s: float
    is_quiet: bool
    entries: int = 0


class Recoverer:
    """Queue of the dead incarnations that are being recovered, first come first."""

    def __init__(self, counts: LeaderCounters | None = None, looks: bool = True) -> None:
        """``looks``: whether what is brought to ``master`` comes on the board at once. A takeover reads all of it
        afterwards, in order: page by page, a long ticket would be sorted again and again."""
        self._counts, self._looks = counts or LeaderCounters(), looks
        self._queue: dict[str, _Recovery] = {}

    def add(self, incarnation: str, *, quietly: bool = False) -> None:
        """Begin to recover an incarnation. ``quietly``: its recovery is neither logged nor counted."""
        self._queue.setdefault(incarnation, _Recovery(now_s(), quietly))

    def has(self, incarnation: str) -> bool:
        return incarnation in self._queue

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def turn(self, board: Board, steps: LeaderScripts, rejected: list[Rejected]) -> None:
        """Recover one page of the first incarnation. When its list is empty, its tickets are free. Entries that can be
        handed to no consumer are added to ``rejected``."""
        if not self._queue:
            return
        incarnation, recovery = next(iter(self._queue.items()))
        page = steps.take_back(incarnation, PAGE)
        if page is None:
            del self._queue[incarnation]
            if incarnation in board.consumers:
                board.keep(incarnation)
            return
        rejected += take_in(board, steps, page.found if self._looks else ())
        recovery.entries += len(page.found) + len(page.gone)
        if page.last is not None:
            return
        parked = steps.left_behind(incarnation, board.unfinished(incarnation))
        board.take_in(parked if self._looks else ())
        if not recovery.is_quiet:
            seconds = now_s() - recovery.began_s
            event("consumer_recovered", consumer=incarnation, entries=recovery.entries, seconds=seconds)
            self._counts.recoveries.add([int(seconds * 1_000_000)])
        del self._queue[incarnation]
        board.recovered(incarnation)


class IdleSweep:
    """Finds pending entries that no living consumer works on, with XAUTOCLAIM, and takes them in: one step per turn; a
    pass begins every ``every_s`` seconds."""

    def __init__(self, min_idle_ms: int, every_s: float) -> None:
        self._min_idle_ms = min_idle_ms
        self._every_s = every_s
        self._cursor = b"0-0"
        self._next_s = 0.0

    def turn(
        self,
        board: Board,
        steps: LeaderScripts,
        known: Sequence[str],
        now_s: float,
        rejected: list[Rejected],
        has_any: bool = True,
        highest: bytes = b"",
    ) -> bool:
        """Take one step, if one is due. Return True when it found something to plan. Entries that can be handed to no
        consumer are added to ``rejected``. ``has_any``: whether anything was pending a moment ago. ``highest``: nothing
        above it is looked at."""
        if now_s < self._next_s:
            return False
        if not has_any and self._cursor == b"0-0":
            self._next_s = now_s + self._every_s
            return False
        swept = steps.sweep(known, self._min_idle_ms, self._cursor, _SWEPT, highest)
        self._cursor = swept.cursor
        if swept.strays:
            former = ",".join(sorted({owner.decode(errors="replace") for _, owner in swept.strays}))
            event("orphaned_entries_found", level=WARNING, count=len(swept.strays), former=former)
        rejected += take_in(board, steps, [found for found, _ in swept.strays], swept.gone)
        if swept.gone:
            event("pending_entries_deleted", level=WARNING, count=len(swept.gone), first=swept.gone[0])
        self._next_s = now_s + (self._every_s if swept.cursor == b"0-0" else _STEP_S)
        return bool(swept.strays)

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self._next_s - now_s)


class Janitor(LeaderService):
    """Service that forgets dead incarnations once nothing is pending for them, and the attempts and errors of messages
    that ended without their owner, and mends the index of the dead letters, while this master leads. Otherwise Redis
    would keep a name in the group for every restart there ever was, and a field for every such message. Its step
    carries the epoch, and a lost reply raises no doubt: asking again gives the same answer."""

    name = "reap"

    def __init__(
        self,
        link: Link,
        keys: Keys,
        lead: Lead,
        every_s: float,
        in_use: Callable[[str], bool] = lambda incarnation: False,
    ) -> None:
        """Make a janitor. ``in_use``: whether the dispatcher still works with an incarnation; its registration tells a
        loss from a drain."""
        super().__init__(link, keys, lead)
        self._in_use = in_use
        self.standby_s = self._every_s = every_s
        self._stream = TicketStream(link, keys)
        self._cursor, self._noted, self._next_noted = b"0", keys.attempts, keys.errors
        self._recounted = b""  # up to here
        self.stalls_after_s = max(10.0, 4 * _CALM * every_s)

    def work(self, steps: LeaderScripts) -> float:
        try:
            is_clean = self._reap(steps)
            self._cursor, _ = steps.forget_attempts(self._noted, self._cursor, PAGE)
        except GroupMissing:  # the dispatcher notices and makes it again
            return self._every_s
        if is_done := self._cursor == b"0":
            self._noted, self._next_noted = self._next_noted, self._noted
        try:
            before, self._recounted = self._recounted, steps.recount_letters(self._recounted, _LETTERS)
        except NotNow:  # memory is full, say: the index stays as it is, which is told
            return self._every_s
        if self._recounted:
            return _PAUSE_S
        if before:
            event("letters_recounted", level=WARNING)
        return _CALM * self._every_s if is_done and is_clean else self._every_s

    def _reap(self, steps: LeaderScripts) -> bool:
        """Forget the incarnations that are over; return whether there were none. Names that are no incarnation of ours
        are left to their owners; an incarnation that died before its first message is in no group."""
        members = read_registry(self._link, self._keys)
        group = self._stream.pending_counts()
        names = {
            name.decode(errors="replace"): pending for name, pending in group.items() if name not in (MASTER, HALTED)
        }
        over = {name for name in names.keys() | members.keys() if ":" in name}
        over -= {name for name, member in members.items() if member.alive}
        for incarnation in over:
            member = members.get(incarnation)
            if names.get(incarnation, 0) or self._in_use(incarnation):
                continue
            stored = member.registration.dump() if member is not None else b""
            if steps.reap(incarnation, name_of(incarnation), stored):
                event("consumer_reaped", consumer=incarnation)
        return not over


class Takeover:
    """The takeover of a new epoch: it reads what the leader must know before it reads anything new; otherwise a
    ticket's second message might go out before its first. And the state that the epoch begins with.

    Memory (``board``) starts empty. The tickets of living owners come from the index; the entries of dead incarnations
    are taken back until their lists are empty; then all entries pending under ``master`` are taken in, in id order.
    ``highest_pending``: it may be above ``last_delivered``.
    """

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
        self.taken_back = 0

    def facts(self) -> dict[str, Any]:
        board = self.board
        counts = {"consumers": len(board.consumers), "tickets": len(board.tickets), "parked": board.parked}
        return counts | {"taken_back": self.taken_back}

    def run(self, memory: Memory) -> Takeover:
        """Read everything. ``memory``, from before this epoch, only makes the report about a lost group more exact.
        Raises Fenced, and what Link.call raises."""
        stream, steps, board = self._stream, self._steps, self.board
        was_there = self._ensure_group(memory)
        steps.begin(is_new=not was_there)
        board.learn_time(redis_ms(self._link), now_s())
        span = span_of(self._link, self._keys.stream) or Span(None, ZERO)
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
        held = {name.decode(errors="replace"): pending for name, pending in stream.pending_counts().items() if pending}
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
            position, span = reached(saved, memory), span_of(self._link, keys.stream)
        if position is None:  # there never was one
            stream.create_group(ZERO)
            event("group_created", stream=keys.stream, group=keys.group)
            return False
        known = None if taken is None else taken.partition(b" ")[0]
        start, repeat, lost = restart(position, span, saved is not None, known)
        self._end_all()
        steps.losses.declare(DeclaredLoss("group_lost", repeat, lost))
        stream.create_group(start)
        facts: dict[str, Any] = {"stream": keys.stream, "group": keys.group, "restarted_at": start}
        facts |= {"may_repeat": format_id_range(repeat), "lost": format_id_range(lost)}
        facts |= {} if span else {"unread": "unread messages are gone with the stream"}
        event("group_lost", level=ERROR, **facts)
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
            if number % _TAKEN_IN == 0:
                self._made_progress()
            owner, fence, ids = record or unreadable(ticket)
            if is_given_back(owner):
                # Entries that come as new are not parked under ``master``.
                ids = [entry_id for entry_id in ids if rank(entry_id) <= last_read]
            elif owner == HALTED:
                ids = ids[:1]  # the others are under ``master``, and read there
            else:
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
        recoverer = Recoverer(looks=False)
        for incarnation in sorted(dead):
            recoverer.add(incarnation, quietly=True)
        while recoverer.is_busy:
            # All under ``master``, rejected ones included, is read afterwards; and who gives tickets back meanwhile
            # notes it in ``changed``, which the first turn heeds.
            recoverer.turn(self.board, self._steps, [])
            self._made_progress()
        for incarnation in sorted(dead & self.board.consumers.keys()):
            event("unregistered_consumer", level=WARNING, consumer=incarnation)
        self.taken_back = sum(held.get(name, 0) for name in dead - self.board.consumers.keys())

    def _learn_tenants(self) -> None:
        """Learn the tenants of tickets in processing from their first messages there: nothing else of them may be
        read."""
        owned = [(next(iter(one.running)), one.name) for one in self.board.tickets.values() if one.running]
        for at in range(0, len(owned) if self._steps.marks.tells_tenants else 0, _TAKEN_IN):
            self.board.learn(self._steps.tenants_of(owned[at : at + _TAKEN_IN]))
            self._made_progress()

    def _take_in_parked(self) -> None:
        page, over = Page(b"-", [], []), list[bytes]()  # records may name the latter
        while page.last is not None:
            page = self._steps.read_parked(None if page.last == b"-" else page.last, _TAKEN_IN)
            rejected = take_in(self.board, self._steps, page.found)
            over += [*page.gone, *(one.id for one in rejected)]
            while rejected:
                del rejected[: self._steps.reject(rejected)]
                self._made_progress()
            self._made_progress()
        self.board.drop(over)
