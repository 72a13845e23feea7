"""Stream cursor: keeps how far the leader is in the stream, and decides when it peeks at the next entries."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from usher.common.base.log import event
from usher.common.protocol.stream_id import ZERO, from_rank, rank
from usher.master.dispatch.stream_notifier import StreamNotifier
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.leader.limits import LeaderLimits
from usher.master.leader.peeked import NewEntries, notification_limit
from usher.master.policy.board.board import Board
from usher.master.policy.read_ahead import read_ahead_room

log = logging.getLogger(__name__)

#: Idle time after which the stream is read although no notification came: a stream that was deleted and came back with
#: lower ids sends none.
IDLE_READ_S = 2.0
#: Entries under ``master`` at which nothing more is read: a takeover reads them all.
_MOST_UNDER_MASTER = 2_000_000

#: An entry with a usable ticket: (id, ticket).
TicketEntry = tuple[bytes, bytes]


def _rank_of(entry: TicketEntry) -> int:
    return rank(entry[0])


class SplitEntries(NamedTuple):
    """Entries, split by whether the group was given them before.

    ``repeated``: a group that was lost was given them. ``redelivered``: this group was given them, before somebody set
    it back. ``new``: no group was given them.
    """

    repeated: Sequence[TicketEntry]
    redelivered: Sequence[TicketEntry]
    new: Sequence[TicketEntry]


class StreamCursor:
    """The group's position in this epoch, and whether the stream may have more. Used by the dispatcher's thread.

    Peeking changes nothing; entries count as read with the hand-over that takes them (``advance``). If it is refused,
    they are peeked at again (``retry``).
    """

    def __init__(self, limits: LeaderLimits, notifier: StreamNotifier | None) -> None:
        self._limits = limits
        self._notifier = notifier
        self._no_more_since_s = 0.0
        self._may_have_more = True  # the stream, as far as we know
        self._notification_limit = 1  # most entries that a notification may bring
        self.under_master = 0  # entries pending under ``master``, when that was last looked at
        self.is_full = False  # so many entries wait that no more are read
        self.last_read = ZERO
        self.repeats_until: bytes | None = None  # after a group loss: entries up to here were read before
        # Rank of the highest id that the group was given: it comes again when somebody sets the group back.
        self._given = 0

    def begin(self, last_delivered: bytes, repeats_until: bytes | None, highest_pending: bytes = ZERO) -> None:
        """Begin a new epoch."""
        self.last_read, self.repeats_until = last_delivered, repeats_until
        self._given = max(rank(last_delivered), rank(highest_pending))
        self._no_more_since_s = 0.0
        self._notification_limit = 1
        self._may_have_more, self.is_full, self.under_master = True, False, 0
        if self._notifier is not None:
            self._notifier.poll()  # it may be old
            self._notifier.accept()

    def peek(self, board: Board, steps: LeaderScripts, now_s: float) -> NewEntries | None:
        """Peek at new entries. Return None when there is no reason to: no consumer has room, or nothing says that there
        are any."""
        count = self._room(board)
        notification = self._notifier.poll() if self._notifier is not None else None
        if self._notifier is None or notification is not None:
            self._may_have_more = True
        if count <= 0 or (not self._may_have_more and now_s - self._no_more_since_s < IDLE_READ_S):
            return None
        if notification is not None and notification.entries and notification.after == self.last_read:
            new = steps.notified(notification.after, notification.entries, count)
        else:
            new = steps.peek(count)
        if new.found:
            self._notification_limit = notification_limit(len(new.found), new.size)
        self._may_have_more = not new.is_all  # if there is more, it need not wait for a notification
        if new.is_all:
            self._no_more_since_s = now_s
        if not new.found:
            # Another client may have read from the group: follow it, else each notification would tell of its entries.
            self.last_read = new.position
            if notification is not None and notification.after == new.position:
                self._reject_notification()
        return new

    def retry(self, is_mismatch: bool) -> None:
        """Peek again at entries that were not taken. ``is_mismatch``: the notification that brought them did not match
        the stream."""
        self._may_have_more = True
        if is_mismatch:
            self._reject_notification()

    def advance(self, new: NewEntries) -> None:
        """Move past these entries: the group has been given them."""
        self.last_read = new.found[-1].id
        self._given = max(self._given, rank(self.last_read))
        if self._notifier is not None:
            self._notifier.accept()

    @property
    def given(self) -> bytes:
        """The highest id that the group was given."""
        return from_rank(self._given)

    def split(self, entries: Sequence[TicketEntry]) -> SplitEntries:
        """Split entries, which are in id order, by whether the group was given them before."""
        if not entries or (self.repeats_until is None and rank(entries[0][0]) > self._given):
            return SplitEntries((), (), entries)
        repeated = 0 if self.repeats_until is None else bisect_right(entries, rank(self.repeats_until), key=_rank_of)
        given = bisect_right(entries, self._given, lo=repeated, key=_rank_of)
        return SplitEntries(entries[:repeated], entries[repeated:given], entries[given:])

    def is_past_repeats(self, new: NewEntries) -> bool:
        """Return whether these entries end the ones that the group is given a second time.

        A notification may say "all" about another server only, so it proves nothing here.
        """
        return self.repeats_until is not None and (
            (new.is_all and not new.digest) or rank(self.last_read) >= rank(self.repeats_until)
        )

    def arm(self, board: Board) -> None:
        """Ask for a notification of the next entry, if there is room for it."""
        self._arm(board, self.last_read)

    def arm_early(self, board: Board, new: NewEntries) -> None:
        """Ask for a notification while ``new`` entries are being taken: that costs less while Redis is awake, and
        nobody waits for it.

        If they are not taken after all, ``arm`` asks anew.
        """
        if new.is_all:
            self._arm(board, new.found[-1].id)

    def _arm(self, board: Board, after: bytes) -> None:
        if self._notifier is not None and self._room(board) > 0:
            self._notifier.arm(after, self._notification_limit)

    def _reject_notification(self) -> None:
        if self._notifier is not None:
            self._notifier.reject()

    def may_read(self, board: Board) -> int:
        """Return how many more entries there is space for, in memory and under ``master``."""
        if self.under_master >= _MOST_UNDER_MASTER:
            return 0
        return read_ahead_room(self._limits.read_ahead, board.parked, board.tickets)

    def _room(self, board: Board) -> int:
        may_read = self.may_read(board)
        if not may_read and not self.is_full:
            event(log, "waiting_limit_reached", level=logging.WARNING, parked=board.parked)
        # It is told once, and again when a tenth had been free meanwhile.
        self.is_full = not may_read or (self.is_full and may_read < self._limits.read_ahead // 10)
        return min(self._limits.batch, may_read, board.room)
