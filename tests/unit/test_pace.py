"""WorkPace: how much work a consumer is given at a time, in seconds of what it finishes."""

from __future__ import annotations

import math

import pytest

from usher.master.policy.board.board import Board
from usher.master.policy.board.tickets import WorkPace

SLOTS, CAPACITY = 8, 2000


def paced(
    handler_s: float, seconds: float, round_s: float = 0.02, pace: WorkPace | None = None
) -> list[tuple[float, int]]:
    """(second, window) of a consumer whose slots are always busy, and which tells every ``round_s`` what it has
    finished."""
    pace = pace or WorkPace(SLOTS, CAPACITY, 1.0)
    pace.began(0.0)
    seen, done, now = [], 0.0, 0.0
    while now < seconds:
        now += round_s
        done += min(pace.window, SLOTS * round_s / handler_s) if handler_s else pace.window
        if whole := int(done):
            done -= whole
            pace.finished(whole, now)
        seen.append((now, pace.window))
    return seen


def test_it_begins_with_two_tickets_per_slot_and_reaches_the_capacity_in_200_ms() -> None:
    assert WorkPace(SLOTS, CAPACITY, 1.0).window == WorkPace(SLOTS, CAPACITY, 1.0).tickets == 2 * SLOTS
    assert WorkPace(SLOTS, 5, 1.0).window == 5, "never above the capacity"
    assert WorkPace(SLOTS, CAPACITY, math.inf).window == CAPACITY
    assert min(second for second, window in paced(0.0, 1.0) if window == CAPACITY) <= 0.2


@pytest.mark.parametrize(("handler_s", "window"), [(0.01, 800), (0.2, 40), (0.4, 20), (1.0, 16), (30.0, 16)])
def test_it_becomes_a_second_of_work_and_never_less_than_two_tickets_per_slot(handler_s: float, window: int) -> None:
    late = [seen for second, seen in paced(handler_s, 20.0) if second > 5]
    assert min(late) >= 0.85 * window and max(late) <= 1.15 * window + 1


def test_it_follows_handlers_that_become_slow_and_fast_again() -> None:
    pace = WorkPace(SLOTS, CAPACITY, 1.0)
    assert paced(0.001, 2.0, pace=pace)[-1][1] == CAPACITY
    assert paced(0.5, 8.0, pace=pace)[-1][1] <= 20
    assert paced(0.001, 1.0, pace=pace)[-1][1] == CAPACITY


def test_tickets_that_wait_for_a_retry_make_no_consumer_look_slow() -> None:
    board = Board(512, 1.0)
    board.join("c1:1", "c1", SLOTS, CAPACITY, True)
    board.arrive([(b"1-1", b"W")])
    assert board.plan(1000, 0.0) is not None
    board.note_retrying("c1:1", 1)
    for second in range(1, 31):
        board.arrive([(b"2-%d" % second, b"T")])
        assert board.plan(1000, second) is not None
        board.free("c1:1", [(b"T", [b"2-%d" % second])], second + 0.001)
    assert board.consumers["c1:1"].pace.window > 90


def test_one_ticket_with_many_messages_does_not_keep_others_from_the_slots_beside_it() -> None:
    """Its messages run one after the other: a window full of them keeps one slot busy."""
    board = Board(512, 1.0)
    board.join("c1:1", "c1", SLOTS, CAPACITY, True)
    for number in range(500):
        board.arrive([(b"1-%d" % number, b"hot")])
    for number in range(40):
        board.arrive([(b"2-%d" % number, b"T%d" % number)])
    plan = board.plan(1000, 0.0)
    assert plan is not None
    parts = {part.ticket: len(part.ids) for target in plan.targets for part in target.parts}
    assert parts.pop(b"hot") == 64, "for its runs may absorb them"
    assert parts == {b"T%d" % number: 1 for number in range(2 * SLOTS - 1)}
    assert board.plan(1000, 0.0) is None, "no more, neither of it nor of others"
    board.free("c1:1", [(b"T0", [b"2-0"])], 0.1)
    again = board.plan(1000, 0.1)
    assert again is not None and [part.ticket for part in again.targets[0].parts] == [b"T15"]


def test_tickets_that_wait_for_a_retry_keep_no_others_from_the_handlers() -> None:
    board = Board(512, 1.0)
    board.join("c1:1", "c1", SLOTS, 100, True)
    for number in range(500):
        board.arrive([(b"1-%d" % number, b"T%d" % number)])
    plan = board.plan(1000, 0.0)
    assert plan is not None and plan.size == 2 * SLOTS
    assert board.plan(1000, 60.0) is None and board.room == 0
    board.note_retrying("c1:1", 12)
    plan = board.plan(1000, 60.0)
    assert plan is not None and plan.size == 12
    board.note_retrying("c1:1", 12)
    assert board.plan(1000, 60.0) is None
    board.free("c1:1", [(b"T20", [b"1-20"])], 61.0)
    assert board.plan(1000, 61.0) is not None, "a ticket that ends makes room"
    board.note_retrying("c1:1", 99_999)
    plan = board.plan(1000, 62.0)
    assert plan is not None and board.in_flight == 100, "never above its capacity"
    board.note_retrying("c1:1", 0)
    board.note_retrying("c9:1", 7)  # nobody
