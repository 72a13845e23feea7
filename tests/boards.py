"""Boards in the states that tests begin with, and what is done to them over and over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from usher.master.policy.board.board import Board
from usher.master.policy.board.plans import HandOverPlan
from usher.master.policy.board.tickets import BoardTicket

NOW = 100.0


def seeds(number: int, brief: int) -> list[Any]:
    """Seeds of walks; a plain run takes the first ``brief`` of them."""
    return [pytest.param(seed, marks=pytest.mark.slow if seed >= brief else ()) for seed in range(number)]


def ids(*numbers: int) -> list[bytes]:
    return [b"%d-0" % number for number in numbers]


def board_with(*names: str, window: int = 512, slots: int = 4, capacity: int = 100) -> Board:
    """A board with a first incarnation of each name."""
    board = Board(window)
    for name in names:
        board.join(f"{name}:1", name, slots, capacity, True)
    return board


def arrive(board: Board, ticket: bytes, *numbers: int) -> None:
    for entry_id in ids(*numbers):
        assert not board.arrive([(entry_id, ticket)])


def planned(plan: HandOverPlan | None) -> dict[tuple[str, bytes], list[bytes]]:
    """(incarnation, ticket) -> ids of a plan."""
    return (
        {}
        if plan is None
        else {(target.incarnation, part.ticket): part.ids for target in plan.targets for part in target.parts}
    )


def hand_over(board: Board, fence: int = 7, limit: int = 1000) -> dict[tuple[str, bytes], list[bytes]]:
    """Plan, and have it all granted."""
    plan = board.plan(limit, NOW)
    if plan is not None:
        board.confirm(plan, fence)
    return planned(plan)


def freed(board: Board, incarnation: str, ticket: bytes, entry_ids: Iterable[bytes]) -> list[str]:
    return board.acknowledged(incarnation, ticket, list(entry_ids), 0.0)


def held_back(board: Board) -> list[BoardTicket]:
    """Name the tickets that rules hold back."""
    return [ticket for _, _, ticket in board._limiter._aside]


def may_plan(board: Board) -> bool:
    """Tell whether a ticket waits for nothing but its turn."""
    return board._queue.has_runnable


def wait_once(board: Board) -> None:
    """A ticket waits in one place at most, and knows whether it does: one that waits in two is planned twice, and put
    aside twice whenever the rules change."""
    waiting = [*board._queue.waiting(), *held_back(board)]
    waiting += [asked.ticket for asked in board.asked_back.asked.values() if asked.holds]
    waiting += [ticket for consumer in board.consumers.values() for ticket in consumer.waiting]
    names = [ticket.name for ticket in waiting]
    assert len(set(map(id, waiting))) == len(waiting), f"twice: {names}"
    assert all(ticket.queued for ticket in waiting), names
    assert {ticket.name for ticket in board.tickets.values() if ticket.queued} <= set(names)
