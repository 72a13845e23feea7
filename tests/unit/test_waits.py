"""Waits: the board lets a ticket that was given back until a time alone, and plans it then."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.boards import NOW, arrive, board_with, ids, planned, wait_once
from usher.master.policy.board.board import Board

#: Redis' clock, when ours says NOW.
REDIS_MS = 1_790_000_000_000


def _waiting(after_ms: int = 5_000, window: int = 512) -> Board:
    board = board_with("c", window=window)
    board.learn_time(REDIS_MS, NOW)
    board.set_record(b"T", b"waits@%d" % (REDIS_MS + after_ms), 5, ids(2, 1), NOW)
    return board


def test_it_is_planned_when_it_is_due_with_what_came_meanwhile_behind_it() -> None:
    board = _waiting()
    arrive(board, b"T", 3)
    assert (board.in_flight, board.parked, board.room) == (0, 3, 100), "it takes nobody's share, and no slot"
    assert board.plan(100, NOW + 4.999) is None
    assert board.next_due_s() == NOW + 5
    plan = board.plan(100, NOW + 5)
    assert planned(plan) == {("c:1", b"T"): ids(1, 2, 3)}
    assert plan is not None
    [part] = plan.targets[0].parts
    assert (part.believed, part.changes_owner) == (b"waits@%d 5" % (REDIS_MS + 5_000), True)
    assert board.next_due_s() is None


def test_one_that_is_in_doubt_waits_on_when_its_record_says_so() -> None:
    board = _waiting()
    board.doubt([b"T"])
    assert board.plan(100, NOW + 5) is None
    board.learn_time(REDIS_MS + 4_900, NOW + 5)
    board.set_record(b"T", b"waits@%d" % (REDIS_MS + 5_000), 5, ids(1, 2), NOW + 5)
    assert board.plan(100, NOW + 5.09) is None
    assert board.plan(100, NOW + 5.1) is not None
    wait_once(board)


def test_many_that_are_due_at_once_go_on_in_their_order_at_no_cost_for_those_without_room() -> None:
    board = board_with("c", slots=2, capacity=10)
    board.learn_time(REDIS_MS, NOW)
    for number in range(20_000):
        board.set_record(b"T%d" % number, b"waits@%d" % (REDIS_MS + 5), 5, ids(number + 1), NOW)
    plan = board.plan(100, NOW + 1)
    for first in range(0, 50, 10):
        assert planned(plan) == {("c:1", b"T%d" % n): ids(n + 1) for n in range(first, first + 10)}
        assert plan is not None
        board.confirm(plan, 7)
        assert board.plan(100, NOW + 1) is None
        for n in range(first, first + 10):
            board.free("c:1", [(b"T%d" % n, ids(n + 1))], NOW + 1)
        plans = []
        assert _calls_of(lambda plans=plans: plans.append(board.plan(100, NOW + 1))) < 20_000
        [plan] = plans


def _calls_of(step: Callable[[], object]) -> int:
    """How many functions a step calls."""
    calls = 0

    def count(_frame: object, what: str, _arg: object) -> None:
        nonlocal calls
        calls += what in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls
