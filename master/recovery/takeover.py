"""Takeover: reads what a new leader must know before it reads anything new; otherwise a ticket's second message might
go out before its first.

Memory starts empty. The tickets of living owners come from the index; the entries of dead incarnations are taken back
until their lists are empty; then all entries pending under ``master`` are taken in, in id order.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import GroupMissing
from usher.common.base.log import event
from usher.common.protocol.keys import MASTER, Keys
from usher.common.protocol.mishaps import DeclaredLoss, format_id_range
from usher.common.protocol.owner_words import HALTED, is_given_back
from usher.common.protocol.stream_id import ZERO, Span, before, rank
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketStream, redis_ms
from usher.master.leader.entries import partition_entries
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.membership.registry import RegisteredConsumer, read_registry
from usher.master.policy.board.board import Board
from usher.master.policy.group_loss import IndexedIdRange, Memory, reached, repeats, restart, set_back
from usher.master.recovery.repairs import PAGE

log = logging.getLogger(__name__)

_PAGE = 1000


@dataclass(frozen=True)
class Takeover:
    """The state a new epoch begins with. ``repeats_until``: after a group loss, the last id that the group is given a
    second time. ``highest_pending``: it may be above ``last_delivered``."""

    board: Board
    members: dict[str, RegisteredConsumer]
    last_delivered: bytes
    highest_pending: bytes
    repeats_until: bytes | None
    taken_back: int

    def facts(self) -> dict[str, Any]:
        board = self.board
        return {
            "consumers": len(board.consumers),
            "tickets": len(board.tickets),
            "parked": board.parked,
            "taken_back": self.taken_back,
        }


def take_over(
    link: Link,
    keys: Keys,
    stream: TicketStream,
    steps: LeaderScripts,
    board: Board,
    memory: Memory,
    made_progress: Callable[[], None],
) -> Takeover:
    """Read everything from Redis onto an empty ``board``. ``memory``, from before this epoch, only makes the report
    about a lost group more exact.

    Raises Fenced, and what Link.call raises.
    """
    was_there = _ensure_group(stream, keys, steps, memory, made_progress)
    steps.begin(is_new=not was_there)
    board.waits.learn_time(redis_ms(link), now_s())
    span = stream.span() or Span(None, ZERO)
    delivered = stream.last_delivered()
    again, lost = set_back(memory, delivered, span.last_generated) if was_there else (None, None)
    if again or lost:
        steps.losses.set_back(again, lost)
    members = read_registry(link, keys)
    for incarnation, member in members.items():
        if member.alive:
            one = member.registration
            board.join(incarnation, one.name, one.slots, one.capacity, member.accepts)
    held = IndexedIdRange(span)
    # Entries that the stream has had and the group has not been given were lost with the group: they come as new,
    # unless they are gone.
    below = before(span.first) if span.first is not None else span.last_generated
    dead = _load_index(stream, board, held, max(delivered, below, key=rank), made_progress)
    noted = stream.repeats_until()
    repeats_until = repeats(noted, held.highest, delivered)
    if repeats_until != noted:
        steps.note_repeats(repeats_until)
    living = set(board.consumers) - dead
    for name, pending in stream.group_consumers():
        # A name that no incarnation can have is not ours to end; the idle sweep finds what it holds.
        incarnation = name.decode(errors="replace")
        if pending and name not in (MASTER, HALTED) and ":" in incarnation and incarnation not in living:
            dead.add(incarnation)
    taken_back = _take_back_all(dead, board, steps, made_progress)
    _learn_tenants(board, steps, made_progress)
    _take_in_parked(board, steps, repeats_until, made_progress)
    highest = stream.highest_pending() or ZERO
    return Takeover(board, members, stream.last_delivered(), highest, repeats_until, taken_back)


def _ensure_group(
    stream: TicketStream, keys: Keys, steps: LeaderScripts, memory: Memory, made_progress: Callable[[], None]
) -> bool:
    """Make the group where it was, if it is missing, and declare in exact ids what may repeat or is lost. Return
    whether it was there."""
    try:
        stream.group_facts()
        return True
    except GroupMissing:
        saved = stream.saved_position()
        span = stream.span()
        held = _look_at_index(stream, span, made_progress)
        with contextlib.suppress(GroupMissing):
            steps.begin()  # no turn of another leader reads from the group that is made now
        again = restart(
            reached(saved, memory), span, saved is not None, held.lowest, (held.highest, stream.repeats_until())
        )
    if again.repeat:
        steps.note_repeats(again.repeat[1])
    if not again.first_time:
        steps.losses.declare(DeclaredLoss("group_lost", again.repeat, again.lost))
    stream.create_group(again.start)
    if again.first_time:
        event(log, "group_created", stream=keys.stream, group=keys.group)
        return False
    facts: dict[str, Any] = {"stream": keys.stream, "group": keys.group, "restarted_at": again.start}
    facts |= {"may_repeat": format_id_range(again.repeat), "lost": format_id_range(again.lost)}
    facts |= {} if span else {"unread": "what was not read yet is gone with the stream"}
    event(log, "group_lost", level=logging.ERROR, **facts)
    return False


def _look_at_index(stream: TicketStream, span: Span | None, made_progress: Callable[[], None]) -> IndexedIdRange:
    held = IndexedIdRange(span)
    for number, (_, record) in enumerate(stream.records()):
        if number % _PAGE == 0:
            made_progress()
        if record is not None:
            held.add(record.ids)
    return held


def _load_index(
    stream: TicketStream, board: Board, held: IndexedIdRange, read_up_to: bytes, made_progress: Callable[[], None]
) -> set[str]:
    """Put every record on the board; no entry that comes as new is up to ``read_up_to``. Return the owners that do not
    live."""
    dead = set()
    now, last_read = now_s(), rank(read_up_to)
    for number, (ticket, record) in enumerate(stream.records()):
        if number % _PAGE == 0:
            made_progress()
        if record is None:
            event(log, "record_unreadable", level=logging.ERROR, ticket=ticket)
            board.halt(ticket, now)
            continue
        ids = record.ids
        held.add(ids)
        if is_given_back(record.owner):
            # Entries that come as new are not parked under ``master``.
            ids = [entry_id for entry_id in ids if rank(entry_id) <= last_read]
        owner = board.set_record(ticket, record.owner, record.fence, ids, now)
        if owner is not None:
            dead.add(owner)
    return dead


def _take_back_all(dead: set[str], board: Board, steps: LeaderScripts, made_progress: Callable[[], None]) -> int:
    """Bring all entries of dead incarnations to ``master`` and return their number. The pages are not looked at,
    because all of ``master`` is read afterwards."""
    taken_back = 0
    for incarnation in sorted(dead):
        while True:
            page = steps.take_back(incarnation, PAGE)
            taken_back += page.size
            made_progress()
            if page.alive:
                _keep(incarnation, board)
                break
            if not page.size and _is_freed(incarnation, board, steps):
                break
    return taken_back


def _is_freed(incarnation: str, board: Board, steps: LeaderScripts) -> bool:
    """Free the tickets of an incarnation whose list was empty. Return False when it got more meanwhile, and its list
    must be read again."""
    consumer = board.consumers.get(incarnation)
    if consumer is None:
        return True
    freed = steps.free_tickets(incarnation, list(consumer.tickets))
    if freed is None:
        return False
    steps.losses.restored(freed.restored)
    # Nobody else acts in our epoch, but a drain that ended just now may have given tickets back: those are read again.
    for ticket in board.recovered(incarnation, freed.others):
        board.clear_record(ticket)
    return True


def _keep(incarnation: str, board: Board) -> None:
    """Keep the tickets of an incarnation whose lease lives but which is not on the roster (somebody deleted its
    registration); it gets no others. With every new roster the dispatcher checks again, until the lease has ended."""
    event(log, "unregistered_consumer", level=logging.WARNING, consumer=incarnation)
    if incarnation in board.consumers:
        board.keep(incarnation)


def _learn_tenants(board: Board, steps: LeaderScripts, made_progress: Callable[[], None]) -> None:
    """Learn the tenants of tickets in processing from their first messages there: nothing else of them may be read."""
    owned = [(next(iter(one.running)), one.name) for one in board.tickets.values() if one.running]
    for at in range(0, len(owned) if steps.marks.tells_tenants else 0, _PAGE):
        board.learn(steps.tenants_of(owned[at : at + _PAGE]))
        made_progress()


def _take_in_parked(
    board: Board, steps: LeaderScripts, repeats_until: bytes | None, made_progress: Callable[[], None]
) -> None:
    after: bytes | None = None
    again = -1 if repeats_until is None else rank(repeats_until)
    while True:
        page = steps.read_parked(after, _PAGE)
        usable, rejected = partition_entries(page.found)
        known, unknown = [], []
        for entry_id, ticket in usable:
            if rank(entry_id) <= again or board.runs(ticket, entry_id):
                known.append((ticket, entry_id))
            else:
                unknown.append((entry_id, ticket))
        board.take_in(unknown)
        if known:
            rejoin(known, board, steps)
        board.learn(steps.marks.read(page.found))
        board.drop([*page.gone, *(one.id for one in rejected)])  # records may name them
        while rejected:
            del rejected[: steps.reject(rejected)]
            made_progress()
        made_progress()
        if page.last is None:
            return
        after = page.last


def rejoin(known: list[tuple[bytes, bytes]], board: Board, steps: LeaderScripts) -> None:
    """Let entries under ``master``, as (ticket, id), that the group was given before it was lost and made again rejoin
    their owners. Entries that an owner has in processing, according to index and inbox, go back to it; those below them
    were done before and are over. All others are planned like anything under ``master``: of a ticket that nobody has,
    everything from there on runs again, in order and under a new fence.

    Only entries that were lost with the group are known to repeat. When somebody sets a group back by hand (XGROUP
    SETID), repeats of a ticket that is in processing are handed to its owner like late ones: they run behind what runs
    there, under the same fence. And an entry that somebody had taken out of its ticket's order by hand, and that was
    not done when the group was lost, counts as done: only the lost pending list knew.
    """
    board.repeated.update(ticket for ticket, _ in known)
    rejoined = steps.rejoin(known)
    over = set(rejoined.over)
    count = len(known) - len(over) - len(rejoined.done)
    if count or rejoined.done:
        event(
            log,
            "group_entries_restored",
            level=logging.WARNING,
            count=count,
            done_before=len(rejoined.done),
            repeated=len(over),
        )
    board.take_in((entry_id, ticket) for ticket, entry_id in known if entry_id in over)


def sort_again(
    again: Sequence[tuple[bytes, bytes]], board: Board, stream: TicketStream
) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
    """Sort entries, as (id, ticket), that the group is given again because somebody has set it back: first (ticket, id)
    of those in processing, then (id, ticket) of the others. Memory alone cannot tell: a late report of the first time
    may have freed them there, so the index is read too. An entry in processing must not be handed over again: it would
    be in its ticket's record twice, and its owner, who has it, would skip it."""
    if not again:
        return [], []
    tickets = list(dict.fromkeys(ticket for _, ticket in again))
    named = {
        (ticket, entry_id)
        for ticket, record in zip(tickets, stream.records_of(tickets), strict=True)
        if record is not None and not (is_given_back(record.owner) or record.owner == HALTED)
        for entry_id in record.ids
    }
    held = [
        (ticket, entry_id) for entry_id, ticket in again if board.has(ticket, entry_id) or (ticket, entry_id) in named
    ]
    is_held = set(held)
    return held, [(entry_id, ticket) for entry_id, ticket in again if (ticket, entry_id) not in is_held]
