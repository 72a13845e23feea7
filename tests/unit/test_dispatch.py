"""What the leader's board promises, one sentence each. That all of it holds in any order of events is in test_board_model.py."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from master.policy.affinity import Affinity
from master.policy.dispatch import Board
from master.policy.plans import NOBODY, HandOverPlan, HandOverReply, TargetReply, Verdict
from master.policy.tickets import Standing

NOW = 100.0


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
        assert board.arrive(entry_id, ticket)


def planned(plan: HandOverPlan | None) -> dict[tuple[str, bytes], list[bytes]]:
    """(incarnation, ticket) -> ids of a plan."""
    return {} if plan is None else {(target.incarnation, part.ticket): part.ids for target in plan.targets for part in target.parts}


def answer(plan: HandOverPlan, fence: int = 7, state: str = "OK", **facts: list[bytes]) -> HandOverReply:
    """The same answer for all targets."""
    target = TargetReply(state, facts.get("refused", []), facts.get("gone", []), facts.get("fresh", []))
    return HandOverReply(fence, tuple(target for _ in plan.targets))


def hand_over(board: Board, fence: int = 7, limit: int = 1000) -> dict[tuple[str, bytes], list[bytes]]:
    """Plan, and have it all granted."""
    plan = board.plan(limit, NOW)
    if plan is not None:
        assert board.confirm(plan, answer(plan, fence)) == Verdict()
    return planned(plan)


def owner_of(board: Board, ticket: bytes) -> str:
    owner = board.tickets[ticket].owner
    return "" if owner is None else owner.incarnation


def freed(board: Board, incarnation: str, ticket: bytes, entry_ids: Iterable[bytes]) -> list[str]:
    return board.acknowledged(incarnation, ticket, list(entry_ids))


class TestPlan:
    def test_a_ticket_goes_to_one_consumer_whole_and_in_id_order(self) -> None:
        board = board_with("c1", "c2", "c3")
        arrive(board, b"T", 1, 2, 9, 10)
        ((_, handed),) = hand_over(board).items()
        assert handed == ids(1, 2, 9, 10)

    def test_different_tickets_are_spread_over_the_consumers(self) -> None:
        board = board_with("c1", "c2", "c3")
        for number in range(90):
            arrive(board, b"T%d" % number, number + 1)
        hand_over(board)
        assert all(15 <= consumer.in_flight <= 40 for consumer in board.consumers.values())

    def test_a_ticket_in_processing_stays_with_its_owner_whoever_else_is_idle(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1)
        hand_over(board)
        for name in ("c2", "c3", "c4", "c5"):
            board.join(f"{name}:1", name, 4, 100, True)
        arrive(board, b"T", 2)
        assert hand_over(board) == {("c1:1", b"T"): ids(2)}

    def test_a_ticket_that_is_done_is_forgotten_and_may_go_elsewhere(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1)
        hand_over(board)
        assert freed(board, "c1:1", b"T", ids(1)) == ["ok"]
        assert not board.tickets
        board.join("c1:1", "c1", 4, 100, False)
        board.join("c2:1", "c2", 4, 100, True)
        arrive(board, b"T", 2)
        assert hand_over(board) == {("c2:1", b"T"): ids(2)}

    def test_the_plan_carries_what_memory_believes_of_the_record(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1)
        plan = board.plan(1000, NOW)
        assert plan is not None
        assert plan.targets[0].parts[0].believed == NOBODY
        board.confirm(plan, answer(plan, 7))
        arrive(board, b"T", 2)
        plan = board.plan(1000, NOW)
        assert plan is not None
        assert plan.targets[0].parts[0].believed == b"c1:1 7"
        board.confirm(plan, answer(plan, 0))
        assert board.tickets[b"T"].believed == b"c1:1 7"

    def test_an_owner_whose_acknowledgement_came_before_its_report_gets_a_new_fence(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1)
        hand_over(board, 7)
        arrive(board, b"T", 2)
        plan = board.plan(1000, NOW)
        assert plan is not None
        board.confirm(plan, answer(plan, 8, fresh=[b"T"]))
        assert board.tickets[b"T"].believed == b"c1:1 8"

    def test_a_hot_ticket_is_parked_beyond_its_window_and_stops_nobody(self) -> None:
        board = board_with("c1", window=2)
        arrive(board, b"HOT", *range(1, 100))
        arrive(board, b"T", 100)
        assert hand_over(board) == {("c1:1", b"HOT"): ids(1, 2), ("c1:1", b"T"): ids(100)}
        assert (board.parked, board.in_flight) == (97, 3)
        arrive(board, b"HOT", 101)
        assert board.room == 97, "others may still be read"
        freed(board, "c1:1", b"HOT", ids(1))
        assert hand_over(board) == {("c1:1", b"HOT"): ids(3)}

    def test_a_consumer_never_gets_more_than_its_capacity(self) -> None:
        board = board_with("c1", capacity=3)
        arrive(board, b"A", 1, 2)
        arrive(board, b"B", 3, 4)
        arrive(board, b"C", 5)
        assert hand_over(board) == {("c1:1", b"A"): ids(1, 2), ("c1:1", b"B"): ids(3)}
        assert hand_over(board) == {}
        assert board.room == 0
        freed(board, "c1:1", b"A", ids(1))
        assert sum(map(len, hand_over(board).values())) == 1

    def test_whoever_waits_for_room_gets_it_in_the_order_of_waiting(self) -> None:
        board = board_with("c1", capacity=1)
        for number, ticket in enumerate((b"A", b"B", b"C"), 1):
            arrive(board, ticket, number)
        handed = []
        for _ in range(3):
            ((_, ticket),) = hand_over(board)
            handed.append(ticket)
            freed(board, "c1:1", ticket, list(board.tickets[ticket].running))
        assert handed == [b"A", b"B", b"C"]

    def test_nothing_is_planned_and_nothing_more_is_read_while_nobody_accepts(self) -> None:
        board = board_with()
        assert board.room == 0
        arrive(board, b"T", 1)
        assert board.plan(1000, NOW) is None
        board.join("c1:1", "c1", 4, 100, True)
        assert hand_over(board) == {("c1:1", b"T"): ids(1)}
        assert board.room == 99

    def test_a_plan_ends_at_its_limit_and_the_next_one_goes_on(self) -> None:
        board = board_with("c1")
        arrive(board, b"A", 1, 2, 3)
        arrive(board, b"B", 4)
        assert hand_over(board, limit=2) == {("c1:1", b"A"): ids(1, 2)}
        assert board.room == 0, "what is ready goes first"
        assert {ticket: handed for (_, ticket), handed in hand_over(board).items()} == {b"A": ids(3), b"B": ids(4)}

    def test_a_plan_names_the_range_of_its_ids_only_when_much_more_is_parked(self) -> None:
        board = board_with("c1", window=2, capacity=5000)
        arrive(board, b"A", *range(1, 1500))
        arrive(board, b"B", 9000, 9001)
        plan = board.plan(1000, NOW)
        assert plan is not None
        assert (plan.lowest, plan.highest, plan.size) == (b"1-0", b"9001-0", 4)
        arrive(board, b"C", 9002)
        small = board_with("c1")
        arrive(small, b"A", 1)
        plan = small.plan(1000, NOW)
        assert plan is not None
        assert (plan.lowest, plan.highest) == (b"-", b"+")

    def test_a_plan_that_redis_refused_for_the_moment_leaves_no_trace(self) -> None:
        board = board_with("c1", window=2)
        arrive(board, b"T", 1, 2, 3)
        plan = board.plan(1000, NOW)
        assert plan is not None
        board.withdraw(plan)
        assert (board.in_flight, board.parked, owner_of(board, b"T")) == (0, 3, "")
        assert hand_over(board) == {("c1:1", b"T"): ids(1, 2)}


class TestReplies:
    @pytest.mark.parametrize(
        ("state", "verdict"),
        [
            ("LOST", Verdict(lost=("c1:1",))),
            ("DRAINING", Verdict()),
            ("REVOKED", Verdict()),
            ("STRAY", Verdict(doubt=True)),
        ],
    )
    def test_a_refused_target_gets_nothing_more_and_its_part_goes_to_another(self, state: str, verdict: Verdict) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1, 2)
        plan = board.plan(1000, NOW)
        assert plan is not None
        arrive(board, b"T", 3)
        assert board.confirm(plan, answer(plan, 0, state)) == verdict
        assert board.plan(1000, NOW) is None
        board.join("c2:1", "c2", 4, 100, True)
        assert hand_over(board) == {("c2:1", b"T"): ids(1, 2, 3)}

    def test_what_a_draining_owner_still_runs_keeps_the_rest_of_its_ticket_parked(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1)
        hand_over(board)
        board.join("c2:1", "c2", 4, 100, True)
        arrive(board, b"T", 2)
        plan = board.plan(1000, NOW)
        assert plan is not None
        board.confirm(plan, answer(plan, 0, "DRAINING"))
        assert board.plan(1000, NOW) is None
        freed(board, "c1:1", b"T", ids(1))
        assert hand_over(board) == {("c2:1", b"T"): ids(2)}

    def test_a_refused_ticket_waits_until_its_record_was_read_and_stops_nobody_else(self) -> None:
        board = board_with("c1")
        arrive(board, b"A", 1)
        arrive(board, b"B", 2)
        plan = board.plan(1000, NOW)
        assert plan is not None
        assert board.confirm(plan, answer(plan, 7, refused=[b"A"])) == Verdict(unsure=(b"A",))
        arrive(board, b"A", 3)
        assert board.plan(1000, NOW) is None
        assert (owner_of(board, b"A"), owner_of(board, b"B")) == ("", "c1:1")
        board.clear_record(b"A")
        assert hand_over(board) == {("c1:1", b"A"): ids(1, 3)}

    def test_ids_that_are_over_are_forgotten(self) -> None:
        board = board_with("c1", capacity=2)
        arrive(board, b"A", 1, 2)
        plan = board.plan(1000, NOW)
        assert plan is not None
        board.confirm(plan, answer(plan, gone=ids(2)))
        assert (board.in_flight, list(board.tickets[b"A"].running)) == (1, ids(1))
        arrive(board, b"B", 3)
        plan = board.plan(1000, NOW)
        assert plan is not None
        board.confirm(plan, answer(plan, gone=ids(3)))
        assert b"B" not in board.tickets
        assert board.room == 1


class TestReports:
    @pytest.mark.parametrize(
        ("incarnation", "ticket", "number", "told"),
        [
            ("c1:1", b"T", 1, "ok"),
            ("c1:1", b"T", 9, "gone"),
            ("c1:1", b"unknown", 1, "gone"),
            ("c1:2", b"T", 1, "stale"),
            ("c2:1", b"T", 1, "stale"),
            ("", b"T", 1, "stale"),
        ],
    )
    def test_each_kind_of_report(self, incarnation: str, ticket: bytes, number: int, told: str) -> None:
        board = board_with("c1", "c2")
        board.set_record(b"T", b"c1:1", 7, ids(1, 2), NOW)
        assert freed(board, incarnation, ticket, ids(number)) == [told]
        assert board.in_flight == (1 if told == "ok" else 2)

    def test_a_doubled_or_reordered_report_changes_nothing(self) -> None:
        board = board_with("c1")
        board.set_record(b"T", b"c1:1", 7, ids(1, 2, 3), NOW)
        assert freed(board, "c1:1", b"T", ids(2)) == ["ok"]
        assert freed(board, "c1:1", b"T", ids(1, 2)) == ["ok", "gone"]
        assert (board.in_flight, list(board.tickets[b"T"].running)) == (1, ids(3))

    def test_a_report_on_a_ticket_that_nobody_has_is_stale(self) -> None:
        board = board_with()
        arrive(board, b"T", 1)
        assert freed(board, "c1:1", b"T", ids(1)) == ["stale"]
        assert list(board.tickets[b"T"].parked) == ids(1)


class TestTakeIn:
    def test_a_lower_id_goes_before_what_is_parked(self) -> None:
        board = board_with()
        arrive(board, b"T", 5, 6)
        board.take_in([(b"3-0", b"T"), (b"10-0", b"T"), (b"7-0", b"U")])
        board.take_in([(b"1-0", b"T"), (b"2-0", b"T")])
        board.take_in([(b"5-5", b"T"), (b"6-0", b"T")])
        assert list(board.tickets[b"T"].parked) == [b"1-0", b"2-0", b"3-0", b"5-0", b"5-5", b"6-0", b"10-0"]
        assert board.parked == 8

    def test_entries_that_come_in_the_order_of_their_hand_over_are_put_in_id_order(self) -> None:
        board = board_with()
        board.take_in([(b"7-0", b"T"), (b"10-0", b"T"), (b"5-0", b"T")])
        assert list(board.tickets[b"T"].parked) == ids(5, 7, 10)

    def test_a_ticket_that_waits_for_its_owner_to_have_room_may_go_elsewhere_once_it_is_free(self) -> None:
        board = board_with("c1", capacity=1)
        board.set_record(b"U", b"c1:1", 7, ids(9), NOW)
        board.take_in([(b"1-0", b"T")])
        board.set_record(b"T", b"c1:1", 7, ids(1), NOW)
        assert board.plan(1000, NOW) is None, "it is bound to c1, which is full"
        board.join("c2:1", "c2", 4, 100, True)
        assert board.plan(1000, NOW) is None
        board.take_in([(b"2-0", b"T")])
        assert hand_over(board) == {("c2:1", b"T"): ids(1, 2)}

    def test_an_entry_that_ran_somewhere_is_parked_again_and_its_owner_is_lighter(self) -> None:
        board = board_with("c1")
        board.set_record(b"T", b"c1:1", 7, ids(1, 2), NOW)
        board.take_in([(b"1-0", b"T")])
        assert (list(board.tickets[b"T"].running), list(board.tickets[b"T"].parked)) == (ids(2), ids(1))
        assert (board.in_flight, board.consumers["c1:1"].in_flight, board.parked) == (1, 1, 1)

    def test_a_new_entry_that_is_in_processing_already_is_told_apart(self) -> None:
        """The group was lost and reads it again."""
        board = board_with("c1")
        board.set_record(b"T", b"c1:1", 7, ids(1), NOW)
        assert not board.arrive(b"1-0", b"T")
        assert board.arrive(b"2-0", b"T")
        assert (list(board.tickets[b"T"].parked), board.parked) == (ids(2), 1)

    def test_what_a_living_owner_has_in_processing_is_known(self) -> None:
        board = board_with("c1")
        board.set_record(b"T", b"c1:1", 7, ids(1), NOW)
        assert board.runs(b"T", b"1-0")
        assert not board.runs(b"T", b"2-0")
        assert not board.runs(b"U", b"1-0")
        board.lose("c1:1")
        assert not board.runs(b"T", b"1-0")


class TestRecovery:
    def lost(self) -> Board:
        """c1 had 1 and 2 of T and is dead; c2 lives; 3 has arrived since."""
        board = board_with("c1")
        arrive(board, b"T", 1, 2)
        hand_over(board)
        board.join("c2:1", "c2", 4, 100, True)
        assert board.lose("c1:1")
        arrive(board, b"T", 3)
        return board

    def test_nothing_of_a_ticket_in_recovery_is_planned(self) -> None:
        board = self.lost()
        assert board.plan(1000, NOW) is None
        board.take_in([(b"1-0", b"T")])
        assert board.plan(1000, NOW) is None
        assert board.room == 100, "and others may be read"

    def test_what_was_recovered_goes_on_oldest_first_with_a_new_fence(self) -> None:
        board = self.lost()
        board.take_in([(b"1-0", b"T"), (b"2-0", b"T")])
        assert board.recovered("c1:1") == ()
        assert "c1:1" not in board.consumers
        plan = board.plan(1000, NOW)
        assert plan is not None
        assert planned(plan) == {("c2:1", b"T"): ids(1, 2, 3)}
        assert plan.targets[0].parts[0].believed == NOBODY

    def test_what_was_acknowledged_without_a_report_does_not_run_again(self) -> None:
        board = self.lost()
        board.take_in([(b"2-0", b"T")])
        board.recovered("c1:1")
        assert hand_over(board) == {("c2:1", b"T"): ids(2, 3)}
        assert board.in_flight == 2

    def test_a_restarted_consumer_gets_its_tickets_back(self) -> None:
        board = board_with("c1", "c2", "c3", "c4")
        ranking = Affinity(["c1", "c2", "c3", "c4"]).ranking
        elsewhere = [ticket for ticket in (b"T%d" % number for number in range(50)) if ranking(ticket)[0] != "c1"][:4]
        entries = [(b"%d-0" % number, ticket) for number, ticket in enumerate(elsewhere, 1)]
        for entry_id, ticket in entries:
            board.set_record(ticket, b"c1:1", 7, [entry_id], NOW)
        board.lose("c1:1")
        board.join("c1:2", "c1", 4, 100, True)
        board.take_in(entries)
        board.recovered("c1:1")
        assert {incarnation for incarnation, _ in hand_over(board)} == {"c1:2"}, "although all of them rank another one first"

    def test_a_ticket_that_somebody_else_has_is_read_before_it_goes_on(self) -> None:
        board = self.lost()
        assert board.recovered("c1:1", [b"T"]) == (b"T",)
        assert board.plan(1000, NOW) is None
        board.set_record(b"T", b"returned", 7, ids(1, 2), NOW)
        assert hand_over(board) == {("c2:1", b"T"): ids(1, 2, 3)}

    def test_a_consumer_that_was_not_dead_after_all_keeps_its_tickets(self) -> None:
        board = self.lost()
        board.keep("c1:1")
        assert hand_over(board) == {("c1:1", b"T"): ids(3)}

    def test_a_ticket_that_was_done_while_its_owner_seemed_dead_is_bound_to_nobody(self) -> None:
        board = self.lost()
        freed(board, "c1:1", b"T", ids(1, 2))
        board.keep("c1:1")
        board.join("c1:1", "c1", 4, 100, False)
        assert hand_over(board) == {("c2:1", b"T"): ids(3)}

    def test_what_found_no_room_goes_to_whoever_is_left_when_a_consumer_is_lost(self) -> None:
        board = board_with("c1", capacity=1)
        arrive(board, b"A", 1)
        arrive(board, b"B", 2)
        hand_over(board)
        board.join("c1:2", "c1", 1, 5, False)
        board.consumers["c1:2"].accepts = True  # it hides behind its dead former incarnation of the same name
        board.lose("c1:1")
        assert hand_over(board) == {("c1:2", b"B"): ids(2)}

    def test_nobody_unknown_is_lost_or_recovered(self) -> None:
        board = board_with("c1")
        assert not board.lose("c9:1")
        assert board.recovered("c9:1") == ()


class TestRecords:
    """Memory follows the index."""

    def test_a_record_of_a_living_owner(self) -> None:
        board = board_with("c1", "c2")
        assert board.set_record(b"T", b"c2:1", 7, ids(1, 2), NOW) is None
        arrive(board, b"T", 3)
        plan = board.plan(1000, NOW)
        assert plan is not None
        assert planned(plan) == {("c2:1", b"T"): ids(3)}
        assert plan.targets[0].parts[0].believed == b"c2:1 7"

    def test_a_record_says_what_was_acknowledged_without_a_report(self) -> None:
        board = board_with("c1", capacity=2)
        arrive(board, b"T", 1, 2, 3)
        hand_over(board)
        board.set_record(b"T", b"c1:1", 7, ids(2), NOW)
        assert (board.in_flight, list(board.tickets[b"T"].running)) == (1, ids(2))
        assert hand_over(board) == {("c1:1", b"T"): ids(3)}

    def test_a_returned_ticket_goes_on_with_its_lowest_entry(self) -> None:
        board = board_with("c1")
        board.set_record(b"T", b"c9:1", 6, ids(1, 2), NOW)
        arrive(board, b"T", 3)
        assert board.set_record(b"T", b"returned", 6, ids(2, 1), NOW) is None
        plan = board.plan(1000, NOW)
        assert plan is not None
        assert plan.targets[0].parts[0] == (b"T", b"returned 6", ids(1, 2, 3))
        assert plan.targets[0].parts[0].changes_owner

    def test_an_owner_that_nobody_knows_is_to_be_recovered(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 2)
        assert board.set_record(b"T", b"c9:4", 7, ids(1), NOW) == "c9:4"
        assert board.plan(1000, NOW) is None
        assert board.tickets[b"T"].standing is Standing.RECOVERING
        board.take_in([(b"1-0", b"T")])
        board.recovered("c9:4")
        assert hand_over(board) == {("c1:1", b"T"): ids(1, 2)}

    def test_a_record_that_is_read_during_a_recovery_does_not_end_it(self) -> None:
        board = board_with("c1")
        board.set_record(b"T", b"c1:1", 7, ids(1, 2), NOW)
        board.lose("c1:1")
        assert board.set_record(b"T", b"c1:1", 7, ids(1, 2), NOW) == "c1:1"
        assert board.tickets[b"T"].standing is Standing.RECOVERING

    def test_an_owner_that_only_a_record_named_gets_nothing_before_the_roster_knows_it(self) -> None:
        board = board_with()
        board.set_record(b"T", b"c9:4", 7, ids(1), NOW)
        board.keep("c9:4")
        arrive(board, b"U", 2)
        assert board.plan(1000, NOW) is None
        board.join("c9:4", "c9", 4, 100, True)
        assert hand_over(board) == {("c9:4", b"U"): ids(2)}

    def test_a_stray_stays_parked_although_its_record_still_names_it(self) -> None:
        """The sweep brings a dead owner's entries to master and leaves the index alone; they must not get lost between the two."""
        board = board_with("c1", "c2")
        board.set_record(b"T", b"c1:1", 7, ids(1, 2), NOW)
        board.take_in([(b"1-0", b"T"), (b"2-0", b"T")])
        board.set_record(b"T", b"c1:1", 7, ids(1, 2), NOW)
        assert (list(board.tickets[b"T"].running), list(board.tickets[b"T"].parked)) == ([], ids(1, 2))
        board.lose("c1:1")
        board.recovered("c1:1")
        assert hand_over(board) == {("c2:1", b"T"): ids(1, 2)}

    @pytest.mark.parametrize("halted", ["by its record", "because its record cannot be read"])
    def test_a_halted_ticket_does_not_move_and_stops_nobody_else(self, halted: str) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1)
        if halted == "by its record":
            assert board.set_record(b"T", b"halted", 7, ids(9), NOW) is None
        else:
            board.halt(b"T")
        arrive(board, b"T", 2)
        arrive(board, b"U", 3)
        assert hand_over(board) == {("c1:1", b"U"): ids(3)}
        assert (board.in_flight, board.parked) == (1, 2)

    def test_a_ticket_without_a_record_is_free(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1)
        hand_over(board)
        board.clear_record(b"T")
        assert (board.in_flight, b"T" in board.tickets) == (0, False)

    def test_a_ticket_in_recovery_is_not_freed_by_its_missing_record(self) -> None:
        board = board_with("c1")
        board.set_record(b"T", b"c1:1", 7, ids(1), NOW)
        board.lose("c1:1")
        board.clear_record(b"T")
        assert board.tickets[b"T"].standing is Standing.RECOVERING

    def test_only_tickets_that_nobody_reported_on_are_read_again(self) -> None:
        board = board_with("c1", "c2")
        for number in range(10):
            board.set_record(b"T%d" % number, b"c1:1", 7, ids(number + 1), float(number))
        board.set_record(b"L", b"c2:1", 7, ids(99), 0.0)
        board.lose("c2:1")
        arrive(board, b"P", 100)
        assert board.quiet_since(3.0, 500) == [b"T0", b"T1", b"T2"]
        assert board.quiet_since(3.0, 2) == [b"T0", b"T1"]
        board.acknowledged("c1:1", b"T0", ids(55))
        assert board.quiet_since(1.0, 500) == [b"T0"], "a report that freed nothing tells nothing"
