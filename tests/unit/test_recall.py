"""Recalls: which tickets are asked back, from whom and for whom, and what becomes of the question."""

from __future__ import annotations

import pytest

from tests.boards import NOW, arrive, board_with, hand_over, ids, planned, wait_once
from usher.common.protocol.marks import Mark
from usher.master.policy.board.board import Board
from usher.master.policy.rules import Rule, RuleAction, Rulebook, Target

#: Late enough for what was handed over at NOW.
LATER = NOW + 0.06


def loaded(tickets: int, slots: int = 4) -> Board:
    """``a`` has that many tickets, of a message each; then ``b`` joins."""
    board = board_with()
    board.join("a:1", "a", slots, 1000, True)
    for number in range(1, tickets + 1):
        arrive(board, b"T%d" % number, number)
    hand_over(board)
    board.join("b:2", "b", slots, 1000, True)
    return board


def asked(board: Board, now_s: float = LATER) -> dict[str, list[bytes]]:
    wait_once(board)
    return dict(board.recalls(now_s))


def test_the_youngest_tickets_are_asked_back_by_half_of_what_is_there() -> None:
    assert asked(loaded(12)) == {"a:1": [b"T12", b"T11", b"T10", b"T9", b"T8", b"T7"]}


@pytest.mark.parametrize("tickets", [0, 1, 3, 4])
def test_a_consumer_that_has_no_more_than_its_slots_is_never_asked(tickets: int) -> None:
    board = loaded(tickets)
    assert asked(board) == {}
    assert board.next_due_s() is None, "nothing to wait for"


def test_no_more_than_the_idle_one_can_run_and_have_ready() -> None:
    board = loaded(100)
    assert len(asked(board)["a:1"]) == 8


def test_nothing_is_asked_back_while_something_waits() -> None:
    board = loaded(12)
    arrive(board, b"T-new", 99)
    assert asked(board) == {}
    assert hand_over(board)
    assert asked(board)


def test_a_ticket_that_was_just_handed_over_is_left_and_looked_at_again() -> None:
    board = loaded(12)
    assert asked(board, NOW + 0.01) == {}
    assert board.next_due_s() == NOW + 0.05
    assert asked(board, NOW + 0.05)


def test_nothing_is_asked_back_of_who_keeps_up_until_it_is_silent() -> None:
    board = Board(512, work_s=1.0)
    board.join("a:1", "a", 4, 1000, True)
    for number in range(1, 13):
        arrive(board, b"T%d" % number, number)
    hand_over(board)
    board.free("a:1", [(b"T1", ids(1)), (b"T2", ids(2))], NOW + 0.1)  # 50 ms each
    hand_over(board)
    board.join("b:2", "b", 4, 1000, True)
    assert asked(board, NOW + 0.2) == {}, "half a second of work"
    assert (board.next_due_s(), board.takeable(NOW + 0.2)) == (pytest.approx(NOW + 0.45), 0)
    assert asked(board, NOW + 0.85), "it has told nothing for too long"


def test_one_question_per_consumer_at_a_time_and_none_twice() -> None:
    board = loaded(20)
    first = asked(board)["a:1"]
    assert len(first) == 8
    assert asked(board, LATER + 0.1) == {}, "it has not answered yet"
    assert board.next_due_s() == LATER + 0.5
    assert asked(board, LATER + 0.5) == {"a:1": [b"T12", b"T11", b"T10", b"T9", b"T8", b"T7", b"T6", b"T5"]}
    assert asked(board, LATER + 1.1) == {}, "all were asked for, and stayed"
    assert board.next_due_s() is None, "no polling"
    assert asked(board, LATER + 6), "after a while they may be asked for again"


def test_new_entries_of_an_asked_ticket_are_parked_until_it_is_answered() -> None:
    board = loaded(5)
    assert asked(board) == {"a:1": [b"T5"]}
    arrive(board, b"T5", 9)
    assert hand_over(board) == {}
    assert asked(board, LATER + 0.5) == {}, "it stays silent: it has started the ticket"
    assert hand_over(board) == {("a:1", b"T5"): ids(9)}


def test_a_report_of_something_of_it_says_that_it_was_started() -> None:
    board = board_with()
    board.join("a:1", "a", 1, 1000, True)
    arrive(board, b"S", 1)
    arrive(board, b"T", 2, 3)
    hand_over(board)
    board.join("b:2", "b", 1, 1000, True)
    assert asked(board) == {"a:1": [b"T"]}
    arrive(board, b"T", 4)
    board.free("a:1", [(b"T", ids(2))], LATER)
    assert hand_over(board) == {("a:1", b"T"): ids(4)}


def test_several_idle_ones_share_and_several_busy_ones_give() -> None:
    board = board_with()
    for name in ("a", "b"):
        board.join(f"{name}:1", name, 4, 1000, True)
    for number in range(1, 41):
        arrive(board, b"T%d" % number, number)
    hand_over(board)
    for name in ("c", "d"):
        board.join(f"{name}:2", name, 4, 1000, True)
    recalls = asked(board)
    assert set(recalls) == {"a:1", "b:1"}
    for ticket in [ticket for tickets in recalls.values() for ticket in tickets]:
        board.set_record(ticket, b"returned", 7, ids(int(ticket[1:])), LATER)
    handed = planned(board.plan(1000, LATER))
    taken = [incarnation for incarnation, _ in handed]
    assert (taken.count("c:2"), taken.count("d:2")) == (8, 8)
    assert board.plan(1000, LATER) is None


def test_another_consumer_could_take_what_waits_for_room_and_what_would_be_recalled() -> None:
    board = board_with()
    board.join("a:1", "a", 2, 5, True)
    for number in range(1, 9):
        arrive(board, b"T%d" % number, number)
    hand_over(board)
    assert (board.in_flight, board.parked, board.takeable(0.0)) == (5, 3, 6), "three wait for room, and three for slots"
    board.learn_time(1_000, NOW)
    board.set_record(b"W", b"waits@9000", 3, ids(20), NOW)
    board.set_record(b"H", b"halted", 3, ids(21), NOW)
    arrive(board, b"T1", 30)
    assert board.takeable(0.0) == 6, "not what waits for its time, for an operator, or behind what runs"


def test_the_idle_one_gets_a_ticket_that_came_back_also_when_it_has_most_of_the_messages() -> None:
    """They are of one ticket, and keep one of its slots busy. Else the ticket would go back where it was, and be asked
    for again and again."""
    board = board_with()
    board.join("b:2", "b", 4, 1000, True)
    arrive(board, b"L", *range(1, 61))
    hand_over(board)
    board.join("a:1", "a", 4, 1000, True)
    board.join("b:2", "b", 4, 1000, False)
    for number in range(101, 107):
        arrive(board, b"T%d" % number, number)
    hand_over(board, 8)
    board.join("b:2", "b", 4, 1000, True)
    assert board.recalls(LATER) == [("a:1", [b"T106", b"T105"])]
    assert board.held([b"T106", b"T105"]) == [(b"T106", b"8", ids(106)), (b"T105", b"8", ids(105))]
    for name, number in ((b"T106", 106), (b"T105", 105)):
        board.set_record(name, b"returned", 8, ids(number), LATER)
    assert planned(board.plan(100, LATER)) == {("b:2", b"T106"): ids(106), ("b:2", b"T105"): ids(105)}


@pytest.mark.parametrize("action", [RuleAction.PAUSE, RuleAction.SLOW])
def test_what_a_rule_holds_back_ends_where_it_is(action: RuleAction) -> None:
    """Else the rule would hold for what was handed over before it."""
    board = loaded(12)
    board.follow(Rulebook([Rule(Target.PATTERN, "T1[0-2]", action, 1.0)]))
    assert asked(board) == {"a:1": [b"T9", b"T8", b"T7", b"T6", b"T5"]}


def test_what_goes_on_to_a_silent_owner_goes_on_at_once() -> None:
    board = loaded(5)
    assert asked(board) == {"a:1": [b"T5"]}
    arrive(board, b"T5", 9)
    assert board.plan(100, LATER + 0.6) is None
    assert asked(board, LATER + 0.6) == {}
    due_s = board.next_due_s()
    assert due_s is not None
    assert due_s <= LATER + 0.6, "there is no event that would wake the leader"
    assert planned(board.plan(100, LATER + 0.6)) == {("a:1", b"T5"): ids(9)}
    assert asked(board, LATER + 0.6) == {}
    assert board.next_due_s() is None


def test_what_was_asked_back_of_a_limited_tenant_waits_for_no_other_turn_and_costs_no_other_token() -> None:
    board = Board(512, 1.0, {})
    board.join("a:1", "a", 1, 100, True)
    board.follow(Rulebook([Rule(Target.TENANT, "t", RuleAction.SLOW, 2.0, concurrency=2)]))
    for number in range(1, 9):
        arrive(board, b"T%d" % number, number)
        board.learn([Mark(ids(number)[0], b"T%d" % number, b"t", 0)])
    for now_s in (NOW, NOW + 0.5):
        plan = board.plan(100, now_s)
        assert plan is not None
        board.confirm(plan, 7)
    board.join("b:2", "b", 1, 100, True)
    assert asked(board, NOW + 0.6) == {"a:1": [b"T2"]}
    board.set_record(b"T2", b"returned", 7, ids(2), NOW + 0.6)
    assert planned(board.plan(100, NOW + 0.6)) == {("b:2", b"T2"): ids(2)}
