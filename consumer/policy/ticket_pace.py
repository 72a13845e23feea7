"""Pace of each ticket: its messages start at least so far apart (``@handler(rate=...)``). Pure."""

from __future__ import annotations

#: Number of tickets above which those are forgotten whose next start is not held back any more.
_MANY = 1000


class TicketPace:
    """Times before which nothing more of a ticket starts. May be used by many threads: a ticket has one runner at a
    time, and what two of them forget is the same.

    >>> pace = TicketPace(0.5)
    >>> pace.due_s(b"T", 10.0), pace.due_s(b"T", 10.2), pace.due_s(b"U", 10.2), pace.due_s(b"T", 12.0)
    (10.0, 12.0, 10.2, 12.0)
    """

    def __init__(self, rate: float) -> None:
        self._every_s = 1 / rate
        self._next_s: dict[bytes, float] = {}
        self._most = _MANY

    def due_s(self, ticket: bytes, now_s: float) -> float:
        """Return when a message of the ticket may start: ``now_s``, which then counts as its start, or a later time, at
        which to ask again."""
        if (due_s := self._next_s.get(ticket, now_s)) > now_s:
            return due_s
        if len(self._next_s) >= self._most:
            self._next_s = {name: at_s for name, at_s in [*self._next_s.items()] if at_s > now_s}
            self._most = max(_MANY, 2 * len(self._next_s))
        self._next_s[ticket] = now_s + self._every_s
        return now_s
