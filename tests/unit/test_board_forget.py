"""``Board.forget``: news that were seen and planned, and not taken after all, leave the board as it was, and come again
as if for the first time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.boards import NOW, answer, arrive, board_with, freed, hand_over, ids, planned
from usher.common.protocol.owner_words import HALTED, RETURNED
from usher.master.policy.board.board import Board
from usher.master.policy.rules import Rule, RuleAction, Rulebook, Target

#: (ticket, number of the id) of news, in id order: several of one ticket, the tickets by turns; A is what a board here
#: is about.
_NEWS = [(b"A", 50), (b"B", 51), (b"A", 52), (b"C", 53), (b"B", 54), (b"A", 60), (b"A", 100), (b"D", 101)]


def _rule(action: RuleAction, rate: float | None = None, target: Target = Target.TICKET) -> Rulebook:
    return Rulebook([Rule(target, "A" if target is Target.TICKET else "", action, rate)])


# ---- boards ----


def _empty() -> Board:
    return board_with("c1", "c2")


def _nobody() -> Board:
    return board_with()


def _runs() -> Board:
    board = board_with("c1", "c2")
    arrive(board, b"A", 1, 2)
    arrive(board, b"B", 3)
    hand_over(board)
    return board


def _full_window() -> Board:
    """Some of A runs, some of it is parked behind that."""
    board = board_with("c1", window=2)
    arrive(board, b"A", 1, 2, 3, 4)
    hand_over(board)
    return board


def _half_window() -> Board:
    board = board_with("c1", window=4)
    arrive(board, b"A", 1, 2, 3)
    hand_over(board)
    return board


def _runnable() -> Board:
    """Old ones may go, together with the news."""
    board = board_with("c1", "c2")
    arrive(board, b"A", 1, 2)
    arrive(board, b"C", 3)
    return board


def _unassigned() -> Board:
    """A waits for anybody to have room."""
    board = board_with("c1", capacity=1)
    arrive(board, b"X", 1)
    arrive(board, b"A", 2)
    hand_over(board)
    return board


def _no_room() -> Board:
    """A runs, and waits for its owner to have room."""
    board = board_with("c1", capacity=2)
    arrive(board, b"A", 1, 2, 3)
    hand_over(board)
    return board


def _one_is_full() -> Board:
    """A's owner has no room; another has."""
    board = board_with("c1", capacity=2)
    arrive(board, b"A", 1, 2)
    hand_over(board)
    board.join("c2:1", "c2", 4, 100, True)
    return board


def _draining() -> Board:
    board = _runs()
    for consumer in list(board.consumers.values()):
        board.join(consumer.incarnation, consumer.name, 4, 100, False)
    board.join("c3:1", "c3", 4, 100, True)
    return board


def _recovering() -> Board:
    board = _runs()
    for name in list(board.consumers):
        board.mark_lost(name)
    board.join("c3:1", "c3", 4, 100, True)
    return board


def _recovered() -> Board:
    """A had an owner that died, which is where it goes if that comes back."""
    board = _recovering()
    board.take_in([(entry_id, b"A") for entry_id in ids(1, 2)])
    for name in ("c1:1", "c2:1"):
        board.recovered(name)
    return board


def _unsure() -> Board:
    board = board_with("c1", "c2")
    arrive(board, b"A", 1)
    plan = board.plan(1000, NOW)
    assert plan is not None
    board.confirm(plan, answer(plan, refused=[b"A"]))
    return board


def _returned() -> Board:
    board = board_with("c1", "c2")
    board.set_record(b"A", RETURNED, 5, ids(1, 2), NOW)
    return board


def _halted() -> Board:
    board = board_with("c1")
    board.set_record(b"A", HALTED, 5, ids(1, 2), NOW)
    return board


def _hidden() -> Board:
    """A may move again, and is not read again yet."""
    board = _halted()
    board.set_record(b"A", RETURNED, 5, ids(1, 2), NOW)
    return board


def _being_read() -> Board:
    board = _hidden()
    assert board.to_read() is not None
    board.was_read([(entry_id, b"A") for entry_id in ids(1)], b"1-0")
    return board


def _slowed() -> Board:
    """A has used up its tokens, and waits."""
    board = board_with("c1")
    board.follow(_rule(RuleAction.SLOW, 2.0))
    arrive(board, b"A", 1, 2, 3)
    hand_over(board)
    assert board.next_due_s() == NOW + 0.5
    return board


def _slowed_and_new() -> Board:
    """Nothing of A came yet."""
    board = board_with("c1")
    board.follow(_rule(RuleAction.SLOW, 2.0))
    return board


def _paused() -> Board:
    board = board_with("c1")
    board.follow(_rule(RuleAction.PAUSE))
    arrive(board, b"A", 1, 2)
    hand_over(board)
    return board


def _paused_and_new() -> Board:
    board = board_with("c1")
    board.follow(_rule(RuleAction.PAUSE))
    return board


def _unloaded() -> Board:
    board = _paused()
    board.unload()
    assert board.tickets[b"A"].above is not None
    return board


_BOARDS = [
    *(_empty, _nobody, _runs, _full_window, _half_window, _runnable, _unassigned, _no_room, _one_is_full, _draining),
    *(_recovering, _recovered, _unsure, _returned, _halted, _hidden, _being_read, _slowed, _slowed_and_new),
    *(_paused, _paused_and_new, _unloaded),
]


# ---- what a board is ----


def _facts(board: Board) -> dict[str, Any]:
    """All that a board remembers, without what is only the order in which it will look at things."""
    tickets = {
        one.name: (
            *(list(one.running), list(one.parked), one.owner and one.owner.incarnation, one.believed, one.home),
            *(one.standing, one.above, one.waits_for, one.until),
        )
        for one in board.tickets.values()
    }
    consumers = {one.incarnation: (one.accepts, one.in_flight, list(one.tickets)) for one in board.consumers.values()}
    return {"tickets": tickets, "order": list(tickets), "consumers": consumers, "sums": (board.parked, board.in_flight)}


def _plans(board: Board) -> tuple[list[dict[tuple[str, bytes], list[bytes]]], int]:
    """All that the board would plan from now on, and what room there is then."""
    board, made = copy.deepcopy(board), []
    for now_s in (NOW, NOW, NOW + 0.5, NOW + 60):
        plan = board.plan(1000, now_s)
        made.append(planned(plan))
        if plan is not None:
            board.confirm(plan, answer(plan))
    return made, board.room


def _see(board: Board, limit: int) -> Callable[[], None]:
    """News come and are planned. Returns what undoes it."""
    news = [(entry_id, ticket) for ticket, number in _NEWS for entry_id in ids(number)]
    for entry_id, ticket in news:
        assert board.arrive(entry_id, ticket)
    plan = board.plan(limit, NOW)

    def undo() -> None:
        if plan is not None:
            board.withdraw(plan)
        board.forget(news)

    return undo


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
@pytest.mark.parametrize("make", _BOARDS)
def test_a_board_that_forgets_what_it_saw_is_as_before_however_often(make: Callable[[], Board], limit: int) -> None:
    board = make()
    before, plans = _facts(board), _plans(board)
    for _ in range(3):
        _see(board, limit)()
        assert _facts(board) == before
    assert _plans(board) == plans


def test_tickets_that_were_only_seen_are_nowhere_when_the_rules_are_lifted_or_memory_is_full() -> None:
    """They were put aside for a rule, and the board must not come back to them."""
    for make in (_slowed_and_new, _paused_and_new):
        board = make()
        _see(board, 1000)()
        board.unload()
        board.follow(Rulebook())
        assert board.plan(1000, NOW + 60) is None
        assert (board.tickets, board.parked, board.in_flight, board.room) == ({}, 0, 0, 100)


def test_the_slowed_who_were_there_before_the_news_go_on_when_each_one_is_due() -> None:
    board = board_with("c1")
    board.follow(
        Rulebook(
            Rule(Target.TICKET, name, RuleAction.SLOW, rate) for name, rate in (("A", 1.0), ("B", 0.2), ("C", 0.5))
        )
    )
    arrive(board, b"A", 1)
    hand_over(board)
    freed(board, "c1:1", b"A", ids(1))
    arrive(board, b"B", 2, 3)
    arrive(board, b"C", 4, 5)
    hand_over(board)
    arrive(board, b"A", 6)
    assert board.plan(1000, NOW) is None
    assert board.next_due_s() == NOW + 1
    board.forget([(b"6-0", b"A")])
    assert board.next_due_s() == NOW + 2
    assert planned(board.plan(1000, NOW + 2)) == {("c1:1", b"C"): ids(5)}


def test_only_what_is_last_of_its_ticket_is_forgotten() -> None:
    """Others are no news: those that the board did not take because their ticket has them in processing, and those of
    halted tickets."""
    board = board_with("c1")
    arrive(board, b"A", 1, 2)
    hand_over(board)
    assert not board.arrive(b"2-0", b"A")
    arrive(board, b"A", 3)
    board.forget([(b"2-0", b"A"), (b"3-0", b"A"), (b"9-0", b"A"), (b"9-0", b"Z")])
    assert (list(board.tickets[b"A"].running), list(board.tickets[b"A"].parked), board.parked) == (ids(1, 2), [], 0)


def test_a_ticket_of_which_all_is_stray_keeps_its_owner() -> None:
    """Its record says that a living owner has it, but somebody has brought all of it to ``master``."""
    board = board_with("c1")
    arrive(board, b"A", 1)
    board.set_record(b"A", b"c1:1", 5, ids(1), NOW)
    before = _facts(board)
    assert before["tickets"][b"A"][:4] == ([], ids(1), "c1:1", b"c1:1 5")
    _see(board, 1000)()
    assert _facts(board) == before
