"""Waits: the tickets that were given back until a time, on Redis' clock (owner word ``waits@<ms>``). Pure."""

from __future__ import annotations

import heapq

from usher.master.policy.board.tickets import BoardTicket, Standing


class Waits:
    """Timers of the waiting tickets. Their time is Redis' own: hand_over, which refuses a ticket before it is due, has
    the last word, and a refused ticket is read again, with the time."""

    def __init__(self) -> None:
        self._timers: list[tuple[int, int, BoardTicket]] = []  # a heap, by the time in ms
        self._order = 0
        self._behind_ms = 0.0  # what to subtract from Redis' time for ours

    def learn_time(self, redis_ms: int, now_s: float) -> None:
        """Note what Redis' clock says now."""
        self._behind_ms = redis_ms - 1000 * now_s

    def begin(self, ticket: BoardTicket, due_ms: int) -> None:
        """Let a ticket wait until then. One whose wait has changed keeps its former timer, which does nothing."""
        if ticket.standing is not Standing.WAITING or ticket.until != due_ms:
            ticket.standing, ticket.until = Standing.WAITING, due_ms
            self._order += 1
            heapq.heappush(self._timers, (due_ms, self._order, ticket))

    def take_due(self, now_s: float) -> list[BoardTicket]:
        """Take out the tickets that may go on by now."""
        due: list[BoardTicket] = []
        while self._timers and self._timers[0][0] <= self._behind_ms + 1000 * now_s:
            due_ms, _, ticket = heapq.heappop(self._timers)
            if ticket.standing is Standing.WAITING and ticket.until == due_ms:
                due.append(ticket)
        return due

    def next_due_s(self) -> float | None:
        """Return when the next ticket may go on; None: none waits."""
        return (self._timers[0][0] - self._behind_ms) / 1000 if self._timers else None
