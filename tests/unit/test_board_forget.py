"""``Board.forget``: news that were seen and planned, and not taken after all, leave the board as it was, and come again
as if for the first time."""

from __future__ import annotations

from collections.abc import Callable

from tests.boards import NOW, board_with, ids
from usher.master.policy.board.board import Board
from usher.master.policy.rules import Rule, RuleAction, Rulebook, Target

#: (ticket, number of the id) of news, in id order: several of one ticket, the tickets by turns; A is what a board here
#: is about.
_NEWS = [(b"A", 50), (b"B", 51), (b"A", 52), (b"C", 53), (b"B", 54), (b"A", 60), (b"A", 100), (b"D", 101)]


def _see(board: Board) -> Callable[[], None]:
    """News come and are planned. Returns what undoes it."""
    news = [(entry_id, ticket) for ticket, number in _NEWS for entry_id in ids(number)]
    for entry_id, ticket in news:
        assert board.arrive(entry_id, ticket)
    plan = board.plan(1000, NOW)

    def undo() -> None:
        if plan is not None:
            board.withdraw(plan)
        board.forget(news)

    return undo


def test_tickets_that_were_only_seen_are_nowhere_when_the_rules_are_lifted_or_memory_is_full() -> None:
    """They were put aside for a rule, and the board must not come back to them."""
    for action, rate in ((RuleAction.SLOW, 2.0), (RuleAction.PAUSE, None)):
        board = board_with("c1")
        board.follow(Rulebook([Rule(Target.TICKET, "A", action, rate)]))
        _see(board)()
        board.unload()
        board.follow(Rulebook())
        assert board.plan(1000, NOW + 60) is None
        assert (board.tickets, board.parked, board.in_flight, board.room) == ({}, 0, 0, 100)
