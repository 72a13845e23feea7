"""What the board does about rules, one sentence each. That it holds in any order of events is in
test_ruled_model.py."""

from __future__ import annotations

import time

import pytest

from tests.boards import NOW, arrive, board_with, hand_over, ids, planned
from usher.master.policy.board.board import Board
from usher.master.policy.board.plans import BoardFacts, Parked
from usher.master.policy.board.turns import Limiter
from usher.master.policy.rules import Rule, RuleAction, Rulebook, Target, TokenBuckets, rule_id


def rule(
    value: str, action: RuleAction = RuleAction.PAUSE, rate: float | None = None, target: Target = Target.TICKET
) -> Rule:
    return Rule(target, value, action, rate, id=rule_id(target, value))


def of(ticket: bytes, *numbers: int) -> list[tuple[bytes, bytes]]:
    return [(entry_id, ticket) for entry_id in ids(*numbers)]


def follow(board: Board, *rules: Rule) -> None:
    board.follow(Rulebook(rules))


class TestPause:
    def test_nothing_more_is_read_while_everything_is_paused(self) -> None:
        board = board_with("c1")
        follow(board, rule("", target=Target.EVERYTHING))
        assert board.room == 0
        follow(board)
        assert board.room == 100


class TestSlow:
    def test_a_slowed_ticket_gets_its_tokens_and_no_more(self) -> None:
        board = board_with("c1")
        follow(board, rule("S", RuleAction.SLOW, 2.0))
        arrive(board, b"S", *range(1, 10))
        assert hand_over(board) == {("c1:1", b"S"): ids(1)}
        assert hand_over(board) == {}
        assert board.next_due_s() == NOW + 0.5
        arrive(board, b"T", 10)
        due = [facts and facts.due_ms for facts in (board.glance(b"S", NOW, 1000), board.glance(b"T", NOW, 1000))]
        assert due == [1500, 0], "a slowed ticket tells when it goes on, and no other does"
        board.forget([(b"10-0", b"T")])
        assert planned(board.plan(100, NOW + 0.4)) == {}
        plan = board.plan(100, NOW + 1.0)
        assert planned(plan) == {("c1:1", b"S"): ids(2, 3)}
        assert plan is not None
        board.confirm(plan, 7)
        assert planned(board.plan(100, NOW + 60)) == {("c1:1", b"S"): ids(4, 5)}, (
            "nobody saves up more than a second's worth"
        )

    def test_after_a_plan_that_did_not_happen_the_slowed_are_asked_once_and_not_with_every_plan(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There may be 100,000 of them."""
        board = board_with("c1")
        follow(board, rule("S", RuleAction.SLOW, 1.0))
        arrive(board, b"S", 1, 2)
        plan = board.plan(100, NOW)
        assert plan is not None
        board.withdraw(plan)
        hand_over(board)
        asked: list[float] = []
        monkeypatch.setattr(TokenBuckets, "due_s", lambda *_: asked.append(NOW) or NOW)  # type: ignore[func-returns-value]
        arrive(board, b"T", 3)
        assert hand_over(board) == {("c1:1", b"T"): ids(3)}
        assert asked == []

    def test_a_slowed_ticket_costs_the_others_nothing(self) -> None:
        board = board_with("c1", window=3)
        follow(board, rule("S", RuleAction.SLOW, 0.001))
        arrive(board, b"S", *range(1, 10))
        arrive(board, b"T", 10)
        assert hand_over(board) == {("c1:1", b"S"): ids(1), ("c1:1", b"T"): ids(10)}
        assert board.room == 98

    def test_how_much_of_each_is_parked_is_told_without_looking_through_the_slowed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A page that is looked at asks that of 200 tickets a second, of the process that leads, and there may be
        100,000 that wait for a slot."""
        board = board_with("c1")
        names = [b"T%d" % number for number in range(10)]
        for number, name in enumerate(names, 1):
            arrive(board, name, number, 100 + number)
        follow(board, rule("", RuleAction.SLOW, 0.001, Target.EVERYTHING))
        while board.plan(100, NOW) is not None:
            pass
        looked_for: list[bytes] = []
        monkeypatch.setattr(Limiter, "due_of", lambda _, ticket: looked_for.append(ticket))
        assert {board.parked_of(name) for name in names[-5:]} == {Parked(1, True)}
        assert board.parked_of(b"unknown") is None
        assert looked_for == []
        assert board.glance(names[-1], NOW, 1000) == BoardFacts("open", 1, True, False, 0, first=(b"110-0",))
        assert looked_for == [names[-1]], "that is what looks through them"


def test_what_waits_of_one_ticket_costs_looks_no_time() -> None:
    """With a group that is set back, or a stream that is trimmed, each look went through all of it."""
    board, many = Board(512), ids(*range(1, 300_001))
    board.take_in([(one, b"T") for one in many])
    began = time.process_time()
    assert all(board.who_has(b"T", one) == "master" for one in many[2_000:3_000])
    for at in range(0, 2_500, 25):
        board.drop(many[at : at + 25])
    assert time.process_time() - began < 0.5
    assert (board.who_has(b"T", many[2_499]), board.who_has(b"T", many[2_500]), board.parked) == ("", "master", 297_500)
