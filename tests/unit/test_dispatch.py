"""What the leader's board promises of plans, replies and reports, one sentence each.

That all of it holds in any order of events, with recovery and records, is in test_board_model.py.
"""

from __future__ import annotations

import pytest

from tests.boards import NOW, arrive, board_with, freed, hand_over, ids
from usher.master.policy.board import placement as choice
from usher.master.policy.board.placement import Affinity


class TestPlan:
    def test_a_thousand_that_join_one_after_the_other_are_ranked_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ranked: list[int] = []
        monkeypatch.setattr(choice, "Affinity", lambda names: ranked.append(len(names)) or Affinity(names))
        board = board_with(*(f"c{number}" for number in range(1000)))
        arrive(board, b"T", 1)
        hand_over(board)
        assert ranked == [1000]

    def test_of_many_tickets_that_come_at_once_each_goes_where_it_belongs(self) -> None:
        """Also to idle consumers: who is above the bound is seen by what all of them will have."""
        names = ("c1", "c2", "c3")
        board = board_with(*names, capacity=1000)
        for number in range(600):
            arrive(board, b"T%d" % number, number + 1)
        hand_over(board)
        ranking = Affinity(names).ranking
        assert all(
            consumer.name == ranking(ticket)[0] for consumer in board.consumers.values() for ticket in consumer.tickets
        )

    def test_what_its_owner_was_about_to_get_when_it_began_to_drain_waits_until_it_is_done(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1)
        hand_over(board)
        arrive(board, b"T", 2)
        board.join("c1:1", "c1", 4, 100, False)
        board.join("c2:1", "c2", 4, 100, True)
        assert hand_over(board) == {}
        freed(board, "c1:1", b"T", ids(1))
        assert hand_over(board) == {("c2:1", b"T"): ids(2)}

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

    def test_a_plan_ends_at_its_limit_and_the_next_one_goes_on(self) -> None:
        board = board_with("c1")
        arrive(board, b"A", 1, 2, 3)
        arrive(board, b"B", 4)
        assert hand_over(board, limit=2) == {("c1:1", b"A"): ids(1, 2)}
        assert board.room == 0, "what is runnable goes first"
        assert {ticket: handed for (_, ticket), handed in hand_over(board).items()} == {b"A": ids(3), b"B": ids(4)}

    def test_nobody_gets_much_more_than_its_share_though_all_tickets_belong_to_it(self) -> None:
        names = ("c1", "c2", "c3")
        board = board_with(*names)
        ranking = Affinity(names).ranking
        of_c1 = [name for name in (b"T%d" % number for number in range(1000)) if ranking(name)[0] == "c1"][:60]
        for number, name in enumerate(of_c1, 1):
            arrive(board, name, number)
        hand_over(board, limit=1000)
        assert max(consumer.in_flight for consumer in board.consumers.values()) <= 1.25 * 60 / 3 + 2

    def test_a_ticket_whose_window_turns_out_to_be_full_waits(self) -> None:
        """Its record is read when it is about to be planned."""
        board = board_with("c1", window=2)
        arrive(board, b"T", 3)
        arrive(board, b"U", 4)
        board.set_record(b"T", b"c1:1", 7, ids(1, 2), NOW)
        assert hand_over(board) == {("c1:1", b"U"): ids(4)}
        freed(board, "c1:1", b"T", ids(1))
        assert hand_over(board) == {("c1:1", b"T"): ids(3)}


class TestReplies:
    def test_the_records_of_a_dead_consumer_go_but_for_those_that_others_have_changed(self) -> None:
        board = board_with("c1")
        for number, name in enumerate((b"T", b"U", b"V"), 1):
            arrive(board, name, number)
        hand_over(board)
        freed(board, "c1:1", b"V", ids(3))
        board.mark_lost("c1:1")
        board.take_in([(one, b"T") for one in ids(1)])
        board.doubt([b"U"])
        board.recovered("c1:1")
        assert board.outdated(NOW) == {b"T": b"", b"V": b""}
        board.join("c2:1", "c2", 4, 100, True)
        assert hand_over(board) == {("c2:1", b"T"): ids(1)}
        assert board.outdated(NOW) == {b"V": b""}, "it has another record"

    def test_of_a_ticket_that_others_have_changed_nothing_is_planned_before_its_record_is_read(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1)
        board.doubt([b"T", b"U"])
        arrive(board, b"U", 2)
        assert hand_over(board) == {}
        board.clear_record(b"T")
        board.set_record(b"U", b"returned", 3, ids(1), NOW)
        assert hand_over(board) == {("c1:1", b"T"): ids(1), ("c1:1", b"U"): ids(1, 2)}

    def test_what_is_over_is_not_planned_any_more(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1, 2)
        arrive(board, b"U", 3)
        board.drop(ids(1, 3, 9))
        assert (board.parked, hand_over(board)) == (1, {("c1:1", b"T"): ids(2)})
        assert b"U" not in board.tickets


class TestHalted:
    def test_what_comes_meanwhile_waits_in_its_order_is_counted_and_costs_no_room(self) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1, 2, 3)
        hand_over(board)
        for _ in range(2):  # its record is compared now and then
            arrive(board, b"T", 4 + board.parked)
            board.set_record(b"T", b"halted", 7, ids(1, 2, 3), NOW)
        assert (list(board.tickets[b"T"].parked), board.tickets[b"T"].unfinished) == (ids(2, 3, 4, 7), 5)
        assert (board.parked_of(b"T"), hand_over(board), board.room) == ((4, True), {}, 100)
        assert board.arrive([(b"1-0", b"T")]) == [(b"1-0", b"T")], "the group was set back"
        assert (board.who_has(b"T", b"1-0"), board.who_has(b"T", b"3-0")) == ("halted", "master")
        board.set_record(b"T", b"returned", 7, ids(1, 2, 3), NOW)
        assert hand_over(board) == {("c1:1", b"T"): ids(1, 2, 3, 4, 7)}
