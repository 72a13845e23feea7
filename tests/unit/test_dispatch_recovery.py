"""What the leader's board promises when consumers are lost, and when the index is read again."""

from __future__ import annotations

import pytest

from tests.boards import NOW, arrive, board_with, freed, hand_over, ids, owner_of
from usher.master.policy.board.board import Board
from usher.master.policy.board.placement import Affinity


class TestRecovery:
    def lost(self) -> Board:
        """c1 had 1 and 2 of T and is dead; c2 lives; 3 has arrived since."""
        board = board_with("c1")
        arrive(board, b"T", 1, 2)
        hand_over(board)
        board.join("c2:1", "c2", 4, 100, True)
        assert board.mark_lost("c1:1")
        arrive(board, b"T", 3)
        return board

    def test_a_restarted_consumer_gets_its_tickets_back(self) -> None:
        board = board_with("c1", "c2", "c3", "c4")
        ranking = Affinity(["c1", "c2", "c3", "c4"]).ranking
        elsewhere = [ticket for ticket in (b"T%d" % number for number in range(50)) if ranking(ticket)[0] != "c1"][:4]
        entries = [(b"%d-0" % number, ticket) for number, ticket in enumerate(elsewhere, 1)]
        for entry_id, ticket in entries:
            board.set_record(ticket, b"c1:1", 7, [entry_id], NOW)
        board.mark_lost("c1:1")
        board.join("c1:2", "c1", 4, 100, True)
        board.take_in(entries)
        board.recovered("c1:1")
        assert {incarnation for incarnation, _ in hand_over(board)} == {"c1:2"}, (
            "although all of them rank another one first"
        )

    def test_a_ticket_that_somebody_else_has_is_read_before_it_goes_on(self) -> None:
        board = self.lost()
        assert board.recovered("c1:1", [b"T"]) == (b"T",)
        assert board.plan(1000, NOW) is None
        board.set_record(b"T", b"returned", 7, ids(1, 2), NOW)
        assert hand_over(board) == {("c2:1", b"T"): ids(1, 2, 3)}

    def test_a_consumer_that_was_not_dead_after_all_gets_others_however_little_it_takes_at_a_time(self) -> None:
        board = board_with("c1", capacity=1)
        board.mark_lost("c1:1")
        board.keep("c1:1")
        arrive(board, b"T", 1)
        assert hand_over(board) == {("c1:1", b"T"): ids(1)}

    def test_a_ticket_that_was_done_while_its_owner_seemed_dead_is_bound_to_nobody(self) -> None:
        board = self.lost()
        freed(board, "c1:1", b"T", ids(1, 2))
        board.keep("c1:1")
        board.join("c1:1", "c1", 4, 100, False)
        assert hand_over(board) == {("c2:1", b"T"): ids(3)}

    def test_a_ticket_that_was_all_done_before_its_owner_was_lost_waits_for_no_recovery(self) -> None:
        board = board_with("c1", "c2")
        board.set_record(b"T", b"c1:1", 7, ids(1), NOW)
        board.mark_lost("c1:1")
        freed(board, "c1:1", b"T", ids(1))
        arrive(board, b"T", 2)
        assert hand_over(board) == {("c2:1", b"T"): ids(2)}
        assert board.recovered("c1:1") == ()
        assert owner_of(board, b"T") == "c2:1"

    def test_what_found_no_room_goes_to_whoever_is_left_when_a_consumer_is_lost(self) -> None:
        board = board_with("c1", capacity=1)
        arrive(board, b"A", 1)
        arrive(board, b"B", 2)
        hand_over(board)
        board.join("c1:2", "c1", 1, 5, False)
        board.consumers["c1:2"].accepts = True  # it hides behind its dead former incarnation of the same name
        board.mark_lost("c1:1")
        assert hand_over(board) == {("c1:2", b"B"): ids(2)}


class TestRecords:
    """Memory follows the index."""

    def test_an_owner_that_only_a_record_named_gets_nothing_before_the_roster_knows_it(self) -> None:
        board = board_with()
        board.set_record(b"T", b"c9:4", 7, ids(1), NOW)
        board.keep("c9:4")
        arrive(board, b"U", 2)
        assert board.plan(1000, NOW) is None
        board.join("c9:4", "c9", 4, 100, True)
        assert hand_over(board) == {("c9:4", b"U"): ids(2)}

    def test_a_stray_stays_parked_although_its_record_still_names_it(self) -> None:
        """The sweep brings a dead owner's entries to master and leaves the index alone; they must not get lost between
        the two."""
        board = board_with("c1", "c2")
        board.set_record(b"T", b"c1:1", 7, ids(1, 2), NOW)
        board.take_in([(b"1-0", b"T"), (b"2-0", b"T")])
        board.set_record(b"T", b"c1:1", 7, ids(1, 2), NOW)
        assert (list(board.tickets[b"T"].running), list(board.tickets[b"T"].parked)) == ([], ids(1, 2))
        board.mark_lost("c1:1")
        board.recovered("c1:1")
        assert hand_over(board) == {("c2:1", b"T"): ids(1, 2)}

    @pytest.mark.parametrize("halted", ["by its record", "because its record cannot be read"])
    def test_a_halted_ticket_does_not_move_and_stops_nobody_else(self, halted: str) -> None:
        board = board_with("c1")
        arrive(board, b"T", 1)
        if halted == "by its record":
            assert board.set_record(b"T", b"halted", 7, ids(9), NOW) is None
        else:
            board.halt(b"T", NOW)
        arrive(board, b"T", 2)
        arrive(board, b"U", 3)
        assert hand_over(board) == {("c1:1", b"U"): ids(3)}
        assert (board.in_flight, board.parked) == (1, 0), "Redis has what is parked of a halted ticket"

    def test_while_a_ticket_is_halted_nobody_looks_for_what_only_redis_has_of_it(self) -> None:
        board = board_with("c1")
        for owner, is_wanted in ((b"halted", False), (b"returned", True), (b"halted", False)):
            board.set_record(b"T", owner, 7, ids(9), NOW)
            assert (board.redis_has_more, board.to_read() is not None) == (is_wanted, is_wanted)

    def test_what_comes_back_of_a_halted_ticket_is_read_again_in_order_once_it_moves(self) -> None:
        """A stray below the message it waits for, too; until then all of it is Redis'."""
        board = board_with("c1")
        board.set_record(b"T", b"halted", 7, ids(5), NOW)
        board.take_in([(entry_id, b"T") for entry_id in ids(3, 8)])
        assert (board.parked, hand_over(board)) == (0, {})
        board.set_record(b"T", b"returned", 7, ids(5), NOW)
        assert board.to_read() == b"2-18446744073709551615"
        board.was_read([(entry_id, b"T") for entry_id in ids(3, 5, 8)], None)
        assert hand_over(board) == {("c1:1", b"T"): ids(3, 5, 8)}

    def test_what_its_record_says_its_owner_has_is_not_parked_beside_that_when_it_is_read_again(self) -> None:
        """Somebody has brought it to ``master`` by hand; the index counts."""
        board = board_with("c1")
        for owner in (b"halted", b"returned", b"c1:1"):
            board.set_record(b"T", owner, 7, ids(5), NOW)
        assert board.to_read() is not None
        board.was_read([(entry_id, b"T") for entry_id in ids(5, 8)], None)
        assert (list(board.tickets[b"T"].running), list(board.tickets[b"T"].parked)) == (ids(5), ids(8))

    def test_a_given_back_ticket_of_which_redis_has_nothing_is_read_again(self) -> None:
        """Its entries were deleted; its record would stay for ever."""
        board = board_with("c1")
        for ticket in (b"T", b"U"):
            for owner in (b"halted", b"returned"):
                board.set_record(ticket, owner, 7, ids(9), NOW)
        assert board.to_read() is not None
        assert board.was_read([(b"9-0", b"U")], None) == [b"T"]
        assert hand_over(board) == {("c1:1", b"U"): ids(9)}

    def test_a_ticket_whose_record_cannot_be_read_any_more_weighs_on_nobody_and_is_compared_now_and_then(self) -> None:
        board = board_with("c1")
        board.set_record(b"T", b"c1:1", 7, ids(1), NOW)
        board.halt(b"T", NOW + 5)
        assert (board.in_flight, board.consumers["c1:1"].in_flight) == (0, 0)
        assert board.quiet_since(NOW + 5) == []
        assert board.quiet_since(NOW + 6) == [b"T"]

    def test_only_tickets_that_nobody_reported_on_are_read_again(self) -> None:
        board = board_with("c1", "c2")
        for number in range(10):
            board.set_record(b"T%d" % number, b"c1:1", 7, ids(number + 1), float(number))
        board.set_record(b"L", b"c2:1", 7, ids(99), 0.0)
        board.mark_lost("c2:1")
        arrive(board, b"P", 100)
        assert board.quiet_since(3.0) == [b"T0", b"T1", b"T2"]
        board.acknowledged("c1:1", b"T0", ids(55), 0.0)
        assert board.quiet_since(1.0) == [b"T0"], "a report that freed nothing tells nothing"
