"""Reader: when the leader looks at the stream, and how far it is."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence

from usher.common.base.log import event
from usher.common.protocol.stream_id import ZERO, rank
from usher.master.dispatch.stream_notifier import Doorbell
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.leader.limits import LeaderLimits
from usher.master.leader.peeked import News, most_to_tell
from usher.master.policy.board.board import Board

log = logging.getLogger(__name__)

#: Idle time after which the stream is read although the doorbell did not ring: a stream that was deleted and came back
#: with lower ids never rings.
IDLE_READ_S = 2.0
#: How often in a row the doorbell may tell of what is not there, until it is mistrusted. Once may be chance: an entry
#: was deleted meanwhile.
_MISHEARD = 3

#: (id, ticket)
Entry = tuple[bytes, bytes]


def _rank_of(entry: Entry) -> int:
    return rank(entry[0])


class Reader:
    """How far the group is, in this epoch, and whether there may be more in the stream. Used by the dispatcher's
    thread.

    To look at entries changes nothing; they count as read with the hand-over that takes them (``took``). If that did
    nothing, they are looked at again (``again``).
    """

    def __init__(self, limits: LeaderLimits, doorbell: Doorbell | None) -> None:
        self._limits = limits
        self._doorbell = doorbell
        self._dry_since_s = 0.0
        self._may_have_more = True  # in the stream, as far as we know
        self._most = 1  # entries that the doorbell may tell of
        self._misheard = 0  # times in a row that what the doorbell told was not what is there
        self.last_read = ZERO
        self.repeats_until: bytes | None = None  # after a group loss: what comes up to here was read before
        self._given = (
            0  # rank of the highest id that the group was given: it comes again when somebody sets the group back
        )

    def begin(self, last_delivered: bytes, repeats_until: bytes | None, highest_pending: bytes = ZERO) -> None:
        """A new epoch begins here."""
        self.last_read, self.repeats_until = last_delivered, repeats_until
        self._given = max(rank(last_delivered), rank(highest_pending))
        self._dry_since_s = 0.0
        self._most, self._misheard = 1, 0
        self._may_have_more = True
        if self._doorbell is not None:
            self._doorbell.heard()  # it may be of long ago

    def look(self, board: Board, steps: LeaderScripts, now_s: float) -> News | None:
        """New entries; None when there was no reason to look: no consumer has room, or nobody said that there are
        any."""
        count = self._room(board)
        heard = self._doorbell.heard() if self._doorbell is not None else None
        if self._doorbell is None or heard is not None:
            self._may_have_more = True
        if count <= 0 or (not self._may_have_more and now_s - self._dry_since_s < IDLE_READ_S):
            return None
        if heard is not None and heard.entries and heard.after == self.last_read:
            news = steps.heard(heard.after, heard.entries, count)
        else:
            news = steps.peek(count)
        if news.found:
            self._most = most_to_tell(len(news.found), news.size)
        self._may_have_more = not news.is_all  # if so, no need to wait for the bell
        if news.is_all:
            self._dry_since_s = now_s
        if (
            not news.found
        ):  # rung for nothing: somebody else may have read from the group, and the bell must not ring for that for ever
            self.last_read = news.position
            if heard is not None and heard.after == news.position:
                self._mishear()
        return news

    def again(self, misheard: bool) -> None:
        """What was seen was not taken."""
        self._may_have_more = True
        if misheard:
            self._mishear()

    def took(self, news: News) -> None:
        """The group has been given these."""
        self.last_read, self._misheard = news.found[-1].id, 0
        self._given = max(self._given, rank(self.last_read))

    def split(self, entries: Sequence[Entry]) -> tuple[Sequence[Entry], Sequence[Entry], Sequence[Entry]]:
        """Three parts of these, which are in id order: what a lost group had been given, what this group was given
        before somebody set it back, and what is new."""
        if not entries or (self.repeats_until is None and rank(entries[0][0]) > self._given):
            return (), (), entries
        lost = 0 if self.repeats_until is None else bisect_right(entries, rank(self.repeats_until), key=_rank_of)
        given = bisect_right(entries, self._given, lo=lost, key=_rank_of)
        return entries[:lost], entries[lost:given], entries[given:]

    def is_past_repeats(self, news: News) -> bool:
        """Whether nothing more comes that the group is given a second time, once these have come."""
        return self.repeats_until is not None and (
            (news.is_all and not news.heard) or rank(self.last_read) >= rank(self.repeats_until)
        )

    def arm(self, board: Board) -> None:
        """Have the doorbell ring for what comes next, if there is room for it."""
        self._arm(board, self.last_read)

    def arm_ahead(self, board: Board, news: News) -> None:
        """The same while the ``news`` are being taken: to ask costs less while Redis is awake, and nobody waits for it.
        If they are not taken after all, ``arm`` asks anew."""
        if news.is_all:
            self._arm(board, news.found[-1].id)

    def _arm(self, board: Board, after: bytes) -> None:
        if self._doorbell is not None and self._room(board) > 0:
            self._doorbell.arm(after, self._most)

    def _mishear(self) -> None:
        if self._doorbell is None:
            return
        self._misheard += 1
        if self._misheard < _MISHEARD:
            self._doorbell.hang_up()  # it may have been another server, which has nothing more to tell
        else:
            self._doorbell.mistrust()
            self._misheard = 0

    def _room(self, board: Board) -> int:
        if board.parked >= self._limits.parked:
            event(log, "parked_limit", level=logging.WARNING, parked=board.parked)
            return 0
        return min(self._limits.batch, board.room)
