"""Quiet tickets: those that nobody has reported on for a while. Reports and news may have been lost, so their records
are read again."""

from __future__ import annotations

from collections import deque

from usher.master.policy.board.board import Board

#: Tickets whose records are compared with memory per turn.
PAGE = 500
#: Between two pages others have their turn.
_PAUSE_S = 0.02


class Reconciler:
    """Whose turn it is: all of them every ``every_s``, page by page. They are found at once for all pages: there may be
    a hundred thousand, of which any may have moved on before its page comes, and is compared all the same."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._names: deque[bytes] = deque()
        self._next_s = 0.0

    def begin(self, now_s: float) -> None:
        """A new epoch has just read everything."""
        self._names.clear()
        self._next_s = now_s + self._every_s

    def wait_s(self, now_s: float) -> float:
        """Until the next page."""
        return max(0.0, self._next_s - now_s)

    def page(self, board: Board, now_s: float) -> tuple[list[bytes], bool]:
        """Tickets to compare now, and whether all have had their turn with them."""
        if now_s < self._next_s:
            return [], False
        if not self._names:
            self._names.extend(board.quiet_since(now_s - self._every_s))
        names = [self._names.popleft() for _ in range(min(len(self._names), PAGE))]
        self._next_s = now_s + (_PAUSE_S if self._names else self._every_s)
        return names, not self._names
