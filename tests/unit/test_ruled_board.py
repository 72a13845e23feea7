"""What the board does about rules, one sentence each. That it holds in any order of events is in
test_ruled_model.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.boards import NOW, answer, arrive, board_with, freed, hand_over, ids, planned, wait_once
from usher.common.protocol.stream_id import rank
from usher.master.policy.board.board import Board
from usher.master.policy.board.rule_gate import RuleGate
from usher.master.policy.board.tickets import Standing
from usher.master.policy.board.views import BoardFacts, Parked
from usher.master.policy.rules import Rule, RuleAction, Rulebook, Target, TicketTokenBuckets, rule_id


def rule(
    value: str, action: RuleAction = RuleAction.PAUSE, rate: float | None = None, target: Target = Target.TICKET
) -> Rule:
    return Rule(target, value, action, rate, id=rule_id(target, value))


def of(ticket: bytes, *numbers: int) -> list[tuple[bytes, bytes]]:
    return [(entry_id, ticket) for entry_id in ids(*numbers)]


def read_all(board: Board, master: dict[bytes, bytes], page: int = 500) -> int:
    """What is under ``master`` (id -> ticket) is read until nothing more is wanted. Returns the pages."""
    pages = 0
    while (start := board.to_read()) is not None:
        found = [(entry_id, ticket) for entry_id, ticket in master.items() if rank(entry_id) > rank(start)][:page]
        board.was_read(found, found[-1][0] if found else None)
        pages += 1
    return pages


def follow(board: Board, *rules: Rule) -> None:
    board.follow(Rulebook(rules))


class TestPause:
    def test_a_paused_ticket_waits_while_others_go_on_and_goes_on_in_order(self) -> None:
        board = board_with("c1")
        follow(board, rule("P"))
        arrive(board, b"P", 1, 2)
        arrive(board, b"T", 3)
        assert hand_over(board) == {("c1:1", b"T"): ids(3)}
        arrive(board, b"P", 4)
        assert hand_over(board) == {}
        assert board.room == 99, "others are read on"
        follow(board)
        assert hand_over(board) == {("c1:1", b"P"): ids(1, 2, 4)}

    def test_while_there_is_no_consumer_either_it_waits_for_its_rule_only(self) -> None:
        board = board_with()
        follow(board, rule("P"))
        arrive(board, b"P", 1)
        assert hand_over(board) == {}
        wait_once(board)

    def test_they_go_on_in_the_order_in_which_they_came(self) -> None:
        board = board_with("c1")
        follow(board, rule("", target=Target.EVERYTHING))
        for number, ticket in enumerate((b"P", b"Q", b"R"), 1):
            arrive(board, ticket, number)
        assert hand_over(board) == {}
        follow(board)
        assert [hand_over(board, limit=1) for _ in range(3)] == [
            {("c1:1", b"P"): ids(1)},
            {("c1:1", b"Q"): ids(2)},
            {("c1:1", b"R"): ids(3)},
        ]

    def test_what_its_owner_has_goes_on_and_nothing_follows(self) -> None:
        board = board_with("c1")
        arrive(board, b"P", 1)
        hand_over(board)
        follow(board, rule("P"))
        arrive(board, b"P", 2)
        assert hand_over(board) == {}
        assert freed(board, "c1:1", b"P", ids(1)) == ["ok"]
        assert hand_over(board) == {}
        follow(board)
        assert hand_over(board) == {("c1:1", b"P"): ids(2)}

    def test_nothing_more_is_read_while_everything_is_paused(self) -> None:
        board = board_with("c1")
        follow(board, rule("", target=Target.EVERYTHING))
        assert board.room == 0
        follow(board)
        assert board.room == 100

    def test_what_a_paused_ticket_has_parked_leaves_memory_when_that_is_full_and_is_read_again(self) -> None:
        board = board_with("c1")
        follow(board, rule("P"))
        arrive(board, b"P", 1, 2)
        arrive(board, b"T", 3)
        hand_over(board)
        board.unload()
        assert board.parked == 0
        arrive(board, b"P", 4)
        assert board.parked == 0, "Redis keeps account of it now"
        assert board.to_read() is None, "and nobody reads it while it is paused"
        follow(board)
        assert board.to_read() == b"0-18446744073709551615"
        board.was_read(of(b"P", 1, 2), b"2-0")
        assert board.to_read() == b"2-0"
        board.was_read(of(b"P", 4), b"4-0")
        assert board.redis_has_more
        board.was_read([], None)
        assert hand_over(board) == {("c1:1", b"P"): ids(1, 2, 4)}
        assert not board.redis_has_more

    def test_a_plan_names_the_range_of_its_ids_while_redis_has_more_than_memory(self) -> None:
        board = board_with("c1")
        follow(board, rule("P"))
        arrive(board, b"P", 1, 2)
        hand_over(board)
        board.unload()
        arrive(board, b"T", 3, 4)
        plan = board.plan(1000, NOW)
        assert plan is not None
        assert (plan.lowest, plan.highest) == (b"3-0", b"4-0")
        board.confirm(plan, answer(plan))
        follow(board)
        arrive(board, b"T", 5)
        plan = board.plan(1000, NOW)
        assert plan is not None
        assert (plan.lowest, plan.highest) == (b"5-0", b"5-0"), "it is not read again yet"

    def test_a_paused_consumer_that_was_not_lost_after_all_stays_paused(self) -> None:
        board = board_with("c1")
        follow(board, rule("c1", target=Target.CONSUMER))
        board.join("c1:1", "c1", 4, 100, False)
        board.mark_lost("c1:1")
        board.keep("c1:1")
        arrive(board, b"T", 1)
        assert hand_over(board) == {}

    def test_one_reading_brings_back_all_tickets_that_were_unloaded(self) -> None:
        board = board_with("c1", capacity=1000)
        follow(board, rule("", target=Target.EVERYTHING))
        for number in range(1, 301):
            arrive(board, b"P%d" % (number % 100), number)
        board.plan(1000, NOW)
        board.unload()
        follow(board)
        assert (
            read_all(
                board,
                {entry_id: b"P%d" % (number % 100) for number, entry_id in enumerate(ids(*range(1, 301)), 1)},
                page=50,
            )
            == 7
        )
        assert len(hand_over(board)) == 100
        assert board.in_flight == 300

    def test_what_comes_back_below_the_reading_is_not_lost(self) -> None:
        board = board_with("c1")
        follow(board, rule("P"), rule("Q"))
        arrive(board, b"Q", 1)
        arrive(board, b"P", 3)
        hand_over(board)
        board.unload()
        follow(board)
        board.to_read()
        board.was_read(of(b"Q", 1), b"4-0")
        board.take_in(of(b"P", 3))
        board.was_read([], None)
        assert hand_over(board) == {("c1:1", b"Q"): ids(1), ("c1:1", b"P"): ids(3)}

    def test_a_ticket_that_has_enough_is_read_on_later_from_where_it_was(self) -> None:
        board = board_with("c1", window=2)
        follow(board, rule("P"))
        arrive(board, b"P", 1, 2, 3, 4)
        hand_over(board)
        board.unload()
        follow(board)
        board.to_read()
        board.was_read(of(b"P", 1, 2, 3, 4), b"4-0")
        assert board.parked == 2
        assert board.to_read() is None
        assert hand_over(board) == {("c1:1", b"P"): ids(1, 2)}
        assert board.to_read() == b"2-0"

    def test_what_nobody_wants_any_more_is_not_read(self) -> None:
        board = board_with("c1", window=1)
        follow(board, rule("P"), rule("Q"))
        arrive(board, b"P", *range(1, 90))
        arrive(board, b"Q", 90)
        hand_over(board)
        board.unload()
        follow(board)
        board.to_read()
        board.was_read(of(b"P", 1, 2), b"2-0")
        assert board.to_read() == b"89-18446744073709551615"

    def test_an_unloaded_ticket_stays_unloaded_while_it_is_paused_by_another_rule(self) -> None:
        board = board_with("c1")
        follow(board, rule("P"))
        arrive(board, b"P", 1)
        hand_over(board)
        board.unload()
        follow(board, rule("?", target=Target.PATTERN))
        assert board.to_read() is None

    def test_a_paused_ticket_that_ends_stays_in_memory_and_its_letters_are_written(self) -> None:
        board = board_with("c1")
        follow(board, rule("P"))
        arrive(board, b"P", 1, 2)
        hand_over(board)
        board.set_record(b"P", b"tail", 7, ids(2), NOW)
        board.unload()
        page = board.ending_page(10)
        assert page is not None
        assert page[1:] == (ids(1, 2), True)

    def test_an_unloaded_ticket_of_which_nothing_is_left_is_nowhere_when_the_rule_is_lifted(self) -> None:
        """Somebody has deleted its entries."""
        board = board_with("c1")
        follow(board, rule("P"))
        arrive(board, b"P", 1)
        hand_over(board)
        board.unload()
        board.clear_record(b"P")
        assert read_all(board, {}) == 1
        follow(board)
        assert (dict(board.tickets), board.redis_has_more) == ({}, False)


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
        board.confirm(plan, answer(plan))
        assert planned(board.plan(100, NOW + 60)) == {("c1:1", b"S"): ids(4, 5)}, (
            "nobody saves up more than a second's worth"
        )

    def test_more_than_a_thousand_slowed_tickets_go_on(self) -> None:
        board = board_with("c1", capacity=2000)
        follow(board, rule("", RuleAction.SLOW, 1.0, Target.EVERYTHING))
        for number in range(1, 1102):
            arrive(board, b"S%d" % number, number)
        assert len(hand_over(board, limit=2000)) == 1101

    def test_a_plan_that_did_not_happen_costs_no_tokens(self) -> None:
        board = board_with("c1")
        follow(board, rule("S", RuleAction.SLOW, 1.0))
        arrive(board, b"S", 1, 2)
        plan = board.plan(100, NOW)
        assert plan is not None
        board.withdraw(plan)
        assert hand_over(board) == {("c1:1", b"S"): ids(1)}

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
        monkeypatch.setattr(TicketTokenBuckets, "due_s", lambda *_: asked.append(NOW) or NOW)  # type: ignore[func-returns-value]
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
        board.unload()
        assert board.parked == 1, "beyond what ten seconds allow it leaves memory"
        assert board.tickets[b"S"].above == b"2-0"

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
        monkeypatch.setattr(RuleGate, "due_of", lambda _, ticket: looked_for.append(ticket))
        assert {board.parked_of(name) for name in names[-5:]} == {Parked(1, True)}
        assert board.parked_of(b"unknown") is None
        assert looked_for == []
        assert board.glance(names[-1], NOW, 1000) == BoardFacts("open", 1, True, False, 0)
        assert looked_for == [names[-1]], "that is what looks through them"

    def test_a_ticket_is_told_to_fill_its_window_when_its_owner_has_as_much_of_it_as_it_may(self) -> None:
        board = board_with("c1", window=2)
        arrive(board, b"T", 1, 2, 3)
        for limit, is_full in ((1, False), (1000, True)):
            hand_over(board, limit=limit)
            facts = board.glance(b"T", NOW, 1000)
            assert facts is not None
            assert facts.window_is_full == is_full

    def test_what_leaves_memory_of_slowed_tickets_is_read_again_when_it_is_wanted(self) -> None:
        board = board_with("c1")
        follow(board, rule("S", RuleAction.SLOW, 0.4))
        arrive(board, b"S", *range(1, 13))
        assert hand_over(board) == {("c1:1", b"S"): ids(1)}
        board.unload()
        assert board.parked == 5
        assert board.to_read() is None, "it has enough for now"
        for second in (2.5, 5.0, 7.5):
            plan = board.plan(1000, NOW + second)
            assert plan is not None
            board.confirm(plan, answer(plan))
        assert read_all(board, dict.fromkeys(ids(*range(5, 13)), b"S")) == 1
        assert list(board.tickets[b"S"].parked) == ids(5, 6, 7, 8, 9)

    @pytest.mark.parametrize(("held", "kept"), [(rule("S", RuleAction.SLOW, 0.1), ids(2, 3)), (rule("S"), [])])
    def test_what_leaves_memory_in_the_midst_of_its_reading_is_read_once_more(
        self, held: Rule, kept: list[bytes]
    ) -> None:
        """Else it would be passed over: what comes behind it would run before it, or instead of it."""
        board = board_with("c1")
        follow(board, rule("S"))
        arrive(board, b"S", *range(1, 12))
        hand_over(board)
        board.unload()
        follow(board, rule("S", RuleAction.SLOW, 1.0))
        board.to_read()
        board.was_read(of(b"S", *range(1, 9)), b"8-0")
        assert hand_over(board) == {("c1:1", b"S"): ids(1)}
        follow(board, held)
        assert hand_over(board) == {}
        board.unload()
        assert list(board.tickets[b"S"].parked) == kept
        assert board.to_read() is None, "it has as much as it may, or may not go at all"
        board.was_read(of(b"S", 9, 10, 11), None)
        follow(board)
        read_all(board, dict.fromkeys(ids(*range(2, 12)), b"S"))
        assert hand_over(board) == {("c1:1", b"S"): ids(*range(2, 12))}

    def test_a_slow_rule_for_many_tickets_does_not_fill_memory(self) -> None:
        board = board_with("c1", capacity=1000)
        follow(board, rule("*", RuleAction.SLOW, 0.1, Target.PATTERN))
        for number in range(1, 1001):
            arrive(board, b"S%d" % (number % 20), number)
        hand_over(board)
        board.unload()
        assert board.parked == 40


class TestDeadLetter:
    def test_letters_are_due_in_order_and_only_when_the_owner_is_done(self) -> None:
        board = board_with("c1")
        arrive(board, b"D", 1)
        hand_over(board)
        follow(board, rule("D", RuleAction.DEAD_LETTER))
        arrive(board, b"D", 2, 3)
        assert hand_over(board) == {}
        assert board.condemned(10) == []
        freed(board, "c1:1", b"D", ids(1))
        assert hand_over(board) == {}
        [doomed] = board.condemned(1)
        assert (doomed.ticket, doomed.believed, doomed.ids) == (b"D", b"", ids(2))
        assert board.buried([doomed], []) == []
        [doomed] = board.condemned(10)
        assert doomed.ids == ids(3)
        assert board.buried([doomed], []) == []
        assert not board.tickets
        assert board.parked == 0

    def test_no_more_of_them_are_written_at_a_time_than_was_asked_for_however_many_tickets_they_are_of(self) -> None:
        board = board_with("c1")
        follow(board, rule("", RuleAction.DEAD_LETTER, target=Target.EVERYTHING))
        arrive(board, b"D", 1, 2)
        arrive(board, b"E", 3, 4)
        arrive(board, b"F", 5)
        assert hand_over(board) == {}
        assert [(doomed.ticket, doomed.ids) for doomed in board.condemned(3)] == [(b"D", ids(1, 2)), (b"E", ids(3))]
        assert [doomed.ids for doomed in board.condemned(2)] == [ids(1, 2)]
        assert [doomed.ids for doomed in board.condemned(10)] == [ids(1, 2), ids(3, 4), ids(5)]

    def test_beyond_a_window_they_leave_memory_and_come_back(self) -> None:
        board = board_with("c1", window=2)
        follow(board, rule("D", RuleAction.DEAD_LETTER))
        arrive(board, b"D", 1, 2, 3)
        assert hand_over(board) == {}
        board.unload()
        assert board.parked == 2
        [doomed] = board.condemned(10)
        assert doomed.ids == ids(1, 2)
        board.buried([doomed], [])
        read_all(board, {b"3-0": b"D"})
        assert hand_over(board) == {}
        [doomed] = board.condemned(10)
        assert doomed.ids == ids(3)
        assert board.buried([doomed], []) == []
        assert not board.tickets

    def test_a_ticket_that_a_drain_gave_back_is_read_again_after_its_last_letter(self) -> None:
        board = board_with("c1")
        follow(board, rule("D", RuleAction.DEAD_LETTER))
        board.set_record(b"D", b"returned", 5, ids(1, 2), NOW)
        assert hand_over(board) == {}
        assert board.buried(board.condemned(1), []) == []
        [doomed] = board.condemned(10)
        assert (doomed.believed, doomed.ids) == (b"returned 5", ids(2))
        assert board.buried([doomed], []) == [b"D"]
        assert board.tickets[b"D"].standing is Standing.UNSURE
        board.clear_record(b"D")
        assert not board.tickets

    def test_a_refused_ticket_is_read_again_and_keeps_what_it_has(self) -> None:
        board = board_with("c1")
        follow(board, rule("D", RuleAction.DEAD_LETTER))
        arrive(board, b"D", 1)
        hand_over(board)
        condemned = board.condemned(10)
        assert board.buried(condemned, [b"D"]) == [b"D"]
        assert list(board.tickets[b"D"].parked) == ids(1)

    @pytest.mark.parametrize("records", [(b"halted",), (b"tail",), (b"halted", b"returned")])
    def test_nothing_ends_by_rule_while_the_ticket_is_halted_or_ends_or_is_not_read_again_and_afterwards_it_does(
        self, records: list[bytes]
    ) -> None:
        board = board_with("c1")
        follow(board, rule("D", RuleAction.DEAD_LETTER))
        arrive(board, b"D", 1, 2)
        hand_over(board)
        for owner in records:
            board.set_record(b"D", owner, 7, ids(1), NOW)
        assert board.condemned(10) == []
        board.set_record(b"D", b"returned", 7, ids(1), NOW)
        read_all(board, dict.fromkeys(ids(1, 2), b"D"))
        assert hand_over(board) == {}
        assert [(doomed.believed, doomed.ids) for doomed in board.condemned(10)] == [(b"returned 7", ids(1, 2))]

    def test_a_rule_that_was_lifted_in_time_ends_nothing(self) -> None:
        board = board_with("c1")
        follow(board, rule("D", RuleAction.DEAD_LETTER))
        arrive(board, b"D", 1)
        hand_over(board)
        follow(board)
        assert board.condemned(10) == []
        assert hand_over(board) == {("c1:1", b"D"): ids(1)}

    def test_a_ticket_whose_owner_is_not_done_goes_on_when_the_rule_is_lifted(self) -> None:
        board = board_with("c1")
        arrive(board, b"D", 1)
        hand_over(board)
        follow(board, rule("D", RuleAction.DEAD_LETTER))
        arrive(board, b"D", 2)
        assert hand_over(board) == {}
        follow(board)
        assert hand_over(board) == {("c1:1", b"D"): ids(2)}


class TestRoute:
    def test_a_routed_ticket_goes_to_its_consumer_however_busy_that_is_and_waits_for_room_there(self) -> None:
        board = board_with("c1", "c2", capacity=3)
        follow(board, route("R*", "c2", Target.PATTERN))
        arrive(board, b"R1", 1)
        arrive(board, b"R2", 2)
        arrive(board, b"R3", 3)
        arrive(board, b"R4", 4)
        assert hand_over(board) == {("c2:1", name): ids(number) for number, name in enumerate((b"R1", b"R2", b"R3"), 1)}
        wait_once(board)
        assert freed(board, "c2:1", b"R1", ids(1)) == ["ok"]
        assert hand_over(board) == {("c2:1", b"R4"): ids(4)}

    def test_while_its_consumer_takes_no_work_any_other_one_gets_it(self) -> None:
        board = board_with("c1")
        follow(board, route("R", "c2"))
        arrive(board, b"R", 1)
        assert hand_over(board) == {("c1:1", b"R"): ids(1)}
        assert freed(board, "c1:1", b"R", ids(1)) == ["ok"]
        board.join("c2:1", "c2", 4, 100, False)
        arrive(board, b"R", 2)
        assert hand_over(board) == {("c1:1", b"R"): ids(2)}

    def test_a_former_owner_ends_what_it_has_first(self) -> None:
        board = board_with("c1")
        arrive(board, b"R", 1, 2)
        hand_over(board)
        board.join("c2:1", "c2", 4, 100, True)
        follow(board, route("R", "c2"))
        arrive(board, b"R", 3)
        assert hand_over(board) == {}
        freed(board, "c1:1", b"R", ids(1))
        assert hand_over(board) == {}
        freed(board, "c1:1", b"R", ids(2))
        assert hand_over(board) == {("c2:1", b"R"): ids(3)}
        wait_once(board)

    def test_a_routed_ticket_waits_for_other_rules_like_any_other(self) -> None:
        board = board_with("c1", "c2")
        follow(board, route("R", "c2"), rule("R"))
        arrive(board, b"R", 1)
        assert hand_over(board) == {}
        follow(board, route("R", "c2"))
        assert hand_over(board) == {("c2:1", b"R"): ids(1)}


def test_very_many_tickets_that_wait_for_one_busy_consumer_cost_a_report_no_more_than_they_can_use() -> None:
    board = board_with("c1", "c2")
    follow(board, route("R*", "c1", Target.PATTERN))
    for number in range(1, 3001):
        arrive(board, b"R%d" % number, number)
    hand_over(board)
    assert board.in_flight == 100
    tried, assign = [0], board._ownership.assign

    def counting(*args: Any) -> Any:
        tried[0] += 1
        return assign(*args)

    board._ownership.assign = counting  # type: ignore[method-assign]
    for number in range(1, 101):
        freed(board, "c1:1", b"R%d" % number, ids(number))
        assert hand_over(board) == {("c1:1", b"R%d" % (100 + number)): ids(100 + number)}, "in their order"
        wait_once(board)
    assert tried[0] <= 300
    board.free("c1:1", [(b"R%d" % number, ids(number)) for number in range(101, 201)], NOW)
    assert len(hand_over(board)) == 100, "all that there is room for"


def test_tickets_that_wait_for_one_consumer_go_in_the_order_in_which_they_came() -> None:
    board = Board(512, 5.0)
    board.join("c1:1", "c1", 2, 1000, True)
    follow(board, route("", "c1", Target.EVERYTHING))
    for number in range(1, 41):
        arrive(board, b"R%d" % number, number)
    running, served = [], []
    now_s = NOW
    for number in range(41, 100):
        while (plan := board.plan(1000, now_s)) is not None:
            board.confirm(plan, answer(plan))
            running += [part.ticket for target in plan.targets for part in target.parts]
        name = running.pop(0)
        served.append(name)
        now_s += 3.0
        board.free("c1:1", [(name, [*board.tickets[name].running])], now_s)
        arrive(board, b"R%d" % number, number)
    assert served == [b"R%d" % number for number in range(1, 60)]


def test_what_is_refused_again_and_again_does_not_wait_at_its_consumer_many_times() -> None:
    board = board_with("c1", "c2", capacity=1, slots=1)
    follow(board, route("R*", "c1", Target.PATTERN))
    arrive(board, b"R1", 1)
    hand_over(board)
    for _ in range(10):
        arrive(board, b"R2", 2)
        assert board.plan(100, NOW) is None
        board.forget([(ids(2)[0], b"R2")])
    assert not board.consumers["c1:1"].waiting
    arrive(board, b"R2", 2)
    freed(board, "c1:1", b"R1", ids(1))
    assert hand_over(board) == {("c1:1", b"R2"): ids(2)}


def route(value: str, to: str, target: Target = Target.TICKET, set_ms: int = 0) -> Rule:
    return Rule(target, value, RuleAction.ROUTE, set_ms=set_ms, id=rule_id(target, value, RuleAction.ROUTE), to=to)


def test_of_several_routes_that_of_the_ticket_holds_then_the_newest_pattern() -> None:
    everything = route("", "c0", Target.EVERYTHING, 9)
    old, new = route("a*", "c1", Target.PATTERN, 1), route("*b", "c2", Target.PATTERN, 2)
    book = Rulebook([everything, new, old, route("ab", "c3"), rule("x")])
    found = [book.route_of(name) for name in (b"x", b"a", b"acb", b"ab")]
    assert found == ["c0", "c1", "c2", "c3"]
    assert (book.is_empty, Rulebook([everything]).is_empty, Rulebook().has_routes) == (False, True, False)
