from __future__ import annotations

from usher.master.policy.board.board import Board
from usher.master.recovery.repairs import PAGE, Reconciler


def board_with(tickets: int) -> Board:
    """Each with a message that runs since second 0."""
    board = Board(10)
    board.join("a:1", "a", 8, 10 * PAGE, True)
    for number in range(tickets):
        board.arrive(b"%d-0" % (number + 1), b"T%d" % number)
    while board.plan(PAGE, 0.0) is not None:
        pass
    return board


def test_all_of_a_pass_come_page_by_page_with_pauses_in_between() -> None:
    board, quiet, pages, now = board_with(2 * PAGE + 1), Reconciler(5.0), list[list[bytes]](), 100.0
    quiet.begin(now)
    assert quiet.page(board, now) == ([], False)
    assert quiet.wait_s(now) == 5.0
    now += 5.0
    for is_last in (False, False, True):
        names, was_all = quiet.page(board, now)
        pages.append(names)
        assert was_all is is_last
        assert 0 < quiet.wait_s(now) <= (5.0 if is_last else 0.1)
        now += quiet.wait_s(now)
    assert [len(page) for page in pages] == [PAGE, PAGE, 1]
    assert len({name for page in pages for name in page}) == 2 * PAGE + 1
