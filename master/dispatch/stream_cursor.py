"""How far the leader is in the stream: when it peeks at the next entries, and the group's position, saved outside of
the group, so that a group that is lost begins again where it was. Neither has a thread: the dispatcher gives them
turns."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.stream_id import ZERO, from_rank, rank
from usher.common.redis.replies import TicketStream
from usher.master.dispatch.stream_notifier import StreamNotifier
from usher.master.leader.entries import NewEntries, notification_limit
from usher.master.leader.leader_scripts import LeaderScripts, PositionLook
from usher.master.policy.board.board import Board
from usher.master.policy.group_loss import Memory

log = logging.getLogger(__name__)

#: Idle time after which the stream is read although no notification came: a stream that was deleted and came back with
#: lower ids sends none.
IDLE_READ_S = 5.0
#: Entries under ``master`` at which nothing more is read: a takeover reads them all.
_MOST_UNDER_MASTER = 2_000_000
#: Read-ahead: most bytes of ids, of tickets and of entries, in memory.
_BYTES = 64 * 1024 * 1024
_LONGEST_ID = 41
_LONGEST = LONGEST_TICKET + _LONGEST_ID
#: Seconds between saves: at most this much comes again when the group is lost.
_SAVE_POSITION_S = 1.0

#: An entry with a usable ticket: (id, ticket).
TicketEntry = tuple[bytes, bytes]


def _rank_of(entry: TicketEntry) -> int:
    return rank(entry[0])


class StreamCursor:
    """The group's position in this epoch, and whether the stream may have more. Used by the dispatcher's thread.

    Peeking changes nothing; entries count as read with the hand-over that takes them (``advance``). If it is refused,
    they are peeked at again (``retry``).
    """

    def __init__(self, batch: int, read_ahead: int, notifier: StreamNotifier | None) -> None:
        """``batch``: most entries peeked at once. ``read_ahead``: see ``read_ahead_room``."""
        self._batch, self._read_ahead = batch, read_ahead
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
        self.last_read = new.found[-1].id
        self._given = max(self._given, rank(self.last_read))
        if self._notifier is not None:
            self._notifier.accept()

    @property
    def given(self) -> bytes:
        return from_rank(self._given)

    def split(self, entries: Sequence[TicketEntry]) -> tuple[Sequence[TicketEntry], ...]:
        """Split entries, which are in id order: those that a group which was lost was given, those that this group was
        given before somebody set it back, and those that are new."""
        if not entries or (self.repeats_until is None and rank(entries[0][0]) > self._given):
            return (), (), entries
        repeated = 0 if self.repeats_until is None else bisect_right(entries, rank(self.repeats_until), key=_rank_of)
        given = bisect_right(entries, self._given, lo=repeated, key=_rank_of)
        return entries[:repeated], entries[repeated:given], entries[given:]

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
        if self._room(board) <= 0:
            self._may_have_more = True  # nobody tells of what comes meanwhile
        elif self._notifier is not None:
            self._notifier.arm(after, self._notification_limit)

    def _reject_notification(self) -> None:
        if self._notifier is not None:
            self._notifier.reject()

    def may_read(self, board: Board) -> int:
        """Return how many more entries there is space for, in memory and under ``master``."""
        if self.under_master >= _MOST_UNDER_MASTER:
            return 0
        return read_ahead_room(self._read_ahead, board.parked, board.tickets)

    def _room(self, board: Board) -> int:
        may_read = self.may_read(board)
        if not may_read and not self.is_full:
            event(log, "waiting_limit_reached", level=logging.WARNING, parked=board.parked)
        # It is told once, and again when a tenth had been free meanwhile.
        self.is_full = not may_read or (self.is_full and may_read < self._read_ahead // 10)
        return min(self._batch, may_read, board.room)


def read_ahead_room(most: int, parked: int, tickets: Iterable[bytes]) -> int:
    """Return how many more entries may be read, so that no more than ``most`` are parked, and their ids fit into 64
    MiB. ``tickets``: names of all tickets in memory; looked at only where the bytes could be too many."""
    room = most - parked
    if room > 0 and (parked + 1) * _LONGEST > _BYTES:
        room = min(room, (_BYTES - parked * _LONGEST_ID - sum(map(len, tickets))) // _LONGEST)
    return max(0, room)


class PositionSaver:
    """Saver of the group's position, on the dispatcher's thread. ``memory``: what this master knows of the group, also
    between two epochs."""

    def __init__(self, stream: TicketStream, look_s: float) -> None:
        """Make a saver that looks every ``look_s`` seconds although nothing moves."""
        self._stream = stream
        self._look_s = look_s
        self.memory = Memory()
        self._was_open = False  # the last saved position had something pending
        self._saved_s = self._next_s = 0.0

    def follow(self) -> float:
        """Learn, on a standby, what the leader saved last, in case that is lost together with all the other data in
        Redis. Return for how many seconds that will do."""
        saved, before = self._stream.saved_position(), self.memory
        if saved is not None:
            self.memory = before.followed(saved)
        return self._look_s if self.memory == before else _SAVE_POSITION_S

    def begin(self, last_delivered: bytes) -> None:
        self.memory = self.memory.found(last_delivered)

    def remember(self, new: NewEntries) -> None:
        self.memory = self.memory.read(new.found[0].id, new.found[-1].id)

    def turn(self, board: Board, steps: LeaderScripts, last_read: bytes) -> PositionLook | None:
        """Save the position, once a second while it moves. Return what Redis told with it; None when it was not
        asked."""
        now = now_s()
        is_open = bool(board.in_flight or board.parked)
        noted = self.memory.noted
        has_moved = noted is None or noted.delivered != last_read or is_open or self._was_open
        self._next_s = self._saved_s + (_SAVE_POSITION_S if has_moved else self._look_s)
        if now < self._next_s:
            return None
        look = steps.save_position(board.takeable())
        self.memory = Memory(look.position)
        self._was_open, self._saved_s = is_open, now
        self._next_s = now + (_SAVE_POSITION_S if is_open else self._look_s)
        return look

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self._next_s - now_s)
