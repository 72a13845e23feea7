"""Adoption: what a new epoch knows before it reads anything new (DESIGN 5.2). Otherwise order breaks: measured, 2 before 1.

Memory starts empty. Living owners' tickets come from the index, what dead incarnations hold is taken back until their lists are
empty, and all that is pending under ``master`` is taken in, in id order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.clock import now_s
from common.keys import HALTED, MASTER, Keys
from common.log import event
from common.redis_client import Link
from common.streams import TicketStream
from master.intake import sort_out
from master.leader_steps import LeaderSteps
from master.policy.dispatch import Board
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
    link: Link, keys: Keys, stream: TicketStream, steps: LeaderSteps, ticket_window: int, made_progress: Callable[[], None]
) -> Adopted:
    """Read everything from Redis. Raises Fenced, and what Link.call raises."""
    board = Board(ticket_window)
    if stream.ensure_group():
        event(log, "group_created", stream=keys.stream, group=keys.group)
    members = read_roster(link, keys)
    for incarnation, member in members.items():
        if member.alive:
            registration = member.registration
            board.join(incarnation, registration.name, registration.slots, registration.capacity, member.accepts)
    dead = _load_index(stream, board)
    living = set(board.consumers) - dead
    for name, pending in stream.group_consumers():
        if pending and name not in (MASTER, HALTED) and name.decode() not in living:
            dead.add(name.decode())
    taken_back = _take_back_all(dead, board, steps, made_progress)
    _take_in_parked(board, steps, made_progress)
    return Adopted(board, members, stream.last_delivered(), taken_back)


def _load_index(stream: TicketStream, board: Board) -> set[str]:
    """Put every record on the board. Returns owners that do not live."""
    dead = set()
    now = now_s()
    for ticket, record in stream.records():
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
            others = steps.free_tickets(incarnation, list(consumer.tickets))
            # Nobody else acts in our epoch, but a drain that ended just now may have given tickets back: those are read again.
            for ticket in board.recovered(incarnation, others or ()):
                board.clear_record(ticket)
    return taken_back


def _take_in_parked(board: Board, steps: LeaderSteps, made_progress: Callable[[], None]) -> None:
    after: bytes | None = None
    while True:
        page = steps.read_parked(after, _PAGE)
        usable, rejected = sort_out(page.found)
        board.take_in(usable)
        if rejected:
            steps.reject(rejected)
        made_progress()
        if page.last is None:
            return
        after = page.last
