"""Halted tickets: writes the tails of given-up tickets to the dead letters, and reads again the entries that memory did
not keep of tickets that go on.

It has no thread: the dispatcher gives it turns, because it changes the board. ``change_watch`` names such tickets.
"""

from __future__ import annotations

from usher.common.base.errors import ReplyUnknown
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.leader.validation import partition_entries
from usher.master.policy.board.board import Board

#: Entries read, or dead letters written, by one script call.
_PAGE = 500


class HaltedTickets:
    """Work on halted tickets, done on the dispatcher's thread."""

    def turn(self, board: Board, steps: LeaderScripts, unsure: set[bytes]) -> bool:
        """Do one page of a ticket that ends, and read one page of the entries that tickets that go on have in Redis.
        Return False when there was nothing to do.

        Tickets to read again are added to ``unsure``. Raises ReplyUnknown when memory is not what the index says.
        """
        busy = False
        ending = board.ending_page(_PAGE)
        if ending is not None:
            ticket, ids, is_last = ending
            count = steps.end_tail(ticket.name, ticket.believed, ids, is_last)
            if count is None:
                raise ReplyUnknown(
                    "the record of a ticket that ends is not the one believed: memory and the index differ"
                )
            board.ended(ticket, ids[:count], is_last and count == len(ids))
            busy = True
        start = board.to_read()
        if start is not None:
            page = steps.read_parked(start, _PAGE)
            usable, _ = partition_entries(page.found)  # unusable entries were rejected when they came
            unsure.update(board.was_read(usable, page.last))
            board.learn(steps.marks.read(page.found))
            busy = True
        return busy
