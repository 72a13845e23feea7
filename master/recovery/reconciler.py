"""Reconciler of quiet tickets, on which nobody has reported for a while. Reports and announcements may have been lost,
so their records are read again."""

from __future__ import annotations

from collections import deque

from usher.master.policy.board.board import Board

#: Tickets whose records are compared with memory per turn.
PAGE = 500
#: Seconds between two pages, in which others have their turn.
_PAUSE_S = 0.02


class Reconciler:
    """Schedule of the quiet tickets: all of them every ``every_s`` seconds, page by page. They are found at once for
    all pages: there may be a hundred thousand, and one that has moved on before its page comes is compared all the
    same."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._names: deque[bytes] = deque()
        self._next_s = 0.0

    def begin(self, now_s: float) -> None:
        """Begin a new epoch, which has just read everything."""
        self._names.clear()
        self._next_s = now_s + self._every_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next page."""
        return max(0.0, self._next_s - now_s)

    def page(self, board: Board, now_s: float) -> tuple[list[bytes], bool]:
        """Return the tickets to compare now, and whether all have had their turn with them."""
        if now_s < self._next_s:
            return [], False
        if not self._names:
            self._names.extend(board.quiet_since(now_s - self._every_s))
        names = [self._names.popleft() for _ in range(min(len(self._names), PAGE))]
        self._next_s = now_s + (_PAUSE_S if self._names else self._every_s)
        return names, not self._names
