"""Halted tickets: ends the tails of tickets that end, and reads again what memory did not keep of tickets that go on.

It has no thread: the dispatcher gives it turns, because it changes the board. ``change_watch`` is told of such tickets.
"""

from __future__ import annotations

from usher.common.base.errors import ReplyUnknown
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.leader.validation import partition_entries
from usher.master.policy.board.board import Board

#: Entries read, or dead letters written, by one script call.
_PAGE = 500


class HaltedTickets:
    """Used by the dispatcher's thread."""

    def turn(self, board: Board, steps: LeaderScripts, unsure: set[bytes]) -> bool:
        """Do one page of a ticket that ends, and one of what tickets that go on have in Redis; False when there is
        nothing to do.

        Tickets to read again are added to ``unsure``. Raises ReplyUnknown when memory is not what the index says.
        """
        busy = False
        ending = board.ending_page(_PAGE)
        if ending is not None:
            ticket, ids, is_last = ending
            if not steps.end_tail(ticket.name, ticket.believed, ids, is_last):
                raise ReplyUnknown("the record of a ticket that ends is another one: memory and the index differ")
            board.ended(ticket, ids, is_last)
            busy = True
        start = board.to_read()
        if start is not None:
            page = steps.read_parked(start, _PAGE)
            usable, _ = partition_entries(page.found, steps.spread)  # what is not usable was rejected when it came
            unsure.update(board.was_read(usable, page.last))
            busy = True
        return busy
