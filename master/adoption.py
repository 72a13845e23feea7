"""Adoption: what a new epoch knows before it reads anything new (DESIGN 5.2). Otherwise order breaks: measured, 2 before 1.

Memory starts empty. Living owners' tickets come from the index, what dead incarnations hold is taken back until their lists are
empty, and all that is pending under ``master`` is taken in, in id order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.clock import now_s
from common.errors import GroupMissing
from common.keys import HALTED, MASTER, Keys
from common.log import event
from common.redis_client import Link
from common.streams import TicketStream
from master.intake import sort_out
from master.leader_steps import LeaderSteps
from master.policy.dispatch import Board
from master.policy.group_loss import Memory, reached, restart
from master.recoverer import PAGE
from master.roster import Member, read_roster

log = logging.getLogger(__name__)

_PAGE = 1000


@dataclass(frozen=True)
class Adopted:
    """The state a new epoch begins with."""

    board: Board
    members: dict[str, Member]
    last_delivered: bytes
    taken_back: int


def adopt(
    link: Link,
    keys: Keys,
    stream: TicketStream,
    steps: LeaderSteps,
    ticket_window: int,
    memory: Memory,
    made_progress: Callable[[], None],
) -> Adopted:
    """Read everything from Redis; ``memory`` of the time before only makes more exact what is told of a group that was lost.

    Raises Fenced, and what Link.call raises.
    """
    board = Board(ticket_window)
    _ensure_group(stream, keys, memory)
    members = read_roster(link, keys)
    for incarnation, member in members.items():
        if member.alive:
            registration = member.registration
            board.join(incarnation, registration.name, registration.slots, registration.capacity, member.accepts)
    dead = _load_index(stream, board, made_progress)
    living = set(board.consumers) - dead
    for name, pending in stream.group_consumers():
        # A name that no incarnation can have is not ours to end; what it holds is found by the idle sweep.
        incarnation = name.decode(errors="replace")
        if pending and name not in (MASTER, HALTED) and ":" in incarnation and incarnation not in living:
            dead.add(incarnation)
    taken_back = _take_back_all(dead, board, steps, made_progress)
    _take_in_parked(board, steps, made_progress)
    return Adopted(board, members, stream.last_delivered(), taken_back)


def _ensure_group(stream: TicketStream, keys: Keys, memory: Memory) -> None:
    """Make the group if it is not there, where it was; what may repeat or is lost is said, in exact ids."""
    try:
        stream.group_facts()
        return
    except GroupMissing:
        saved = stream.saved_position()
        again = restart(reached(saved, memory), stream.span(), saved=saved is not None)
    stream.create_group(again.start)
    if again.first_time:
        event(log, "group_created", stream=keys.stream, group=keys.group)
        return
    event(
        log,
        "group_lost",
        level=logging.ERROR,
        stream=keys.stream,
        group=keys.group,
        restarted_at=again.start,
        may_repeat=_told(again.repeat),
        lost=_told(again.lost),
    )


def _told(ids: tuple[bytes, bytes] | None) -> str:
    return f"{ids[0].decode()}..{ids[1].decode()}" if ids else "nothing"


def _load_index(stream: TicketStream, board: Board, made_progress: Callable[[], None]) -> set[str]:
    """Put every record on the board. Returns owners that do not live."""
    dead = set()
    now = now_s()
    for number, (ticket, record) in enumerate(stream.records()):
        if number % _PAGE == 0:
            made_progress()
        if record is None:
            event(log, "record_unreadable", level=logging.ERROR, ticket=ticket)
            board.halt(ticket)
            continue
        owner = board.set_record(ticket, record.owner, record.fence, record.ids, now)
        if owner is not None:
            dead.add(owner)
    return dead


def _take_back_all(dead: set[str], board: Board, steps: LeaderSteps, made_progress: Callable[[], None]) -> int:
    """Bring all that dead incarnations hold to ``master``; the pages are not looked at, because all of ``master`` is read afterwards."""
    taken_back = 0
    for incarnation in sorted(dead):
        size = -1
        while size:
            size = steps.take_back(incarnation, PAGE).size
            taken_back += max(0, size)
            made_progress()
        consumer = board.consumers.get(incarnation)
        if consumer is not None:
            freed = steps.free_tickets(incarnation, list(consumer.tickets))
            # Nobody else acts in our epoch, but a drain that ended just now may have given tickets back: those are read again.
            for ticket in board.recovered(incarnation, freed.others if freed is not None else ()):
                board.clear_record(ticket)
    return taken_back


def _take_in_parked(board: Board, steps: LeaderSteps, made_progress: Callable[[], None]) -> None:
    after: bytes | None = None
    while True:
        page = steps.read_parked(after, _PAGE)
        usable, rejected = sort_out(page.found, steps.spread)
        known = [(ticket, entry_id) for entry_id, ticket in usable if board.runs(ticket, entry_id)]
        board.take_in(pair for pair in usable if not board.runs(pair[1], pair[0]))
        if known:
            rejoin(known, board, steps)
        if rejected:
            steps.reject(rejected)
        made_progress()
        if page.last is None:
            return
        after = page.last


def rejoin(known: list[tuple[bytes, bytes]], board: Board, steps: LeaderSteps) -> None:
    """(ticket, id) of entries under ``master`` that a living owner has in processing, as index and inbox say: the group was lost and made
    again. They go back to their owners; what was acknowledged meanwhile is planned like anything else under ``master``."""
    over = set(steps.rejoin(known))
    event(log, "entries_rejoined", level=logging.WARNING, count=len(known) - len(over), done_meanwhile=len(over))
    board.take_in((entry_id, ticket) for ticket, entry_id in known if entry_id in over)
