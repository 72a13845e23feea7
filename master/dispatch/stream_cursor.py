"""How far the leader is in the stream: when it reads the next entries, and the group's position, saved outside of
the group, so that a group that is lost begins again where it was. Neither has a thread: the dispatcher gives them
turns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from usher.common.base.clock import now_s
from usher.common.base.log import WARNING, event
from usher.common.protocol.stream_id import ZERO, GroupPosition, before, from_rank, rank
from usher.common.redis.replies import TicketStream
from usher.master.dispatch.stream_notifier import Notification, StreamNotifier
from usher.master.leader.entries import NO_NEW_ENTRIES, NewEntries
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.policy.board.board import Board
from usher.master.policy.group_loss import Memory

#: Idle time after which the stream is read although no notification came: a stream that was deleted and came back with
#: lower ids sends none.
IDLE_READ_S = 15.0
#: Entries of the first read; how many times more the next may ask for; and bytes that it may bring, if none is larger
#: than the largest of the last one and than the newest of the stream. Sizes are not known before: where they jump, and
#: the newest entry was small, a read may bring more.
_FIRST_READ, _GROWTH, _READ_BYTES = 4, 4, 8 * 1024 * 1024
_MOST_BATCHES = 4  # of 16 consumers or more, so many times as many entries are read at once
#: Seconds between saves: at most this much comes again when the group is lost.
_SAVE_POSITION_S = 1.0

#: An entry with a usable ticket: (id, ticket).
TicketEntry = tuple[bytes, bytes]


def _rank_of(entry: TicketEntry) -> int:
    return rank(entry[0])


class StreamCursor:
    """How far the leader has read and taken in this epoch, and whether the stream may have more. Used by the
    dispatcher's thread.

    What was read counts as taken with the turn that hands it over (``advance``).
    """

    def __init__(
        self,
        batch: int,
        read_ahead: int,
        notifier: StreamNotifier | None,
        last_delivered: bytes = ZERO,
        highest_pending: bytes = ZERO,
    ) -> None:
        """``batch``: most entries read at once (see ``batch``). ``read_ahead``: most that are parked."""
        self._batch, self._read_ahead = batch, read_ahead
        self._notifier = notifier
        self._no_more_since_s = 0.0
        self._may_have_more = True  # the stream, as far as we know
        self._page = _FIRST_READ  # most entries of the next read
        self.is_full = False  # so many entries wait that no more are read
        self.taken = self.last_read = last_delivered  # all up to here was taken; and read
        self._read = NO_NEW_ENTRIES  # what was read and not taken
        # Rank of the highest id that the group was given: it comes again when somebody sets the group back.
        self._given = max(rank(last_delivered), rank(highest_pending))
        if notifier is not None:
            notifier.poll()  # it may be old

    def next(self, board: Board, steps: LeaderScripts, now_s: float) -> NewEntries | None:
        """Return what was read, or told, and is to be taken; nothing, if it is to be read first. None: no consumer has
        room, or nothing says that there are any."""
        if self._read.found:
            return self._read
        room = self._room(board)
        told = self._notifier.poll() if self._notifier is not None else Notification()
        if told is not None:
            self._may_have_more = True
            if told.id and told.run != steps.server_run and self._notifier is not None:
                self._notifier.fail("it is connected to another server")
                told = None
        if room <= 0 or (not self._may_have_more and now_s - self._no_more_since_s < IDLE_READ_S):
            return None
        if told is not None and told.run and told.after == self.last_read:
            new = steps.told(self.taken, (told.id, told.fields))
            if not board.who_has(new.found[0][1] or b"", told.id):  # the idle sweep may have found it with a stranger
                return new  # once: if it is refused, the next turn reads
        return replace(NO_NEW_ENTRIES, position=self.taken)

    def count(self, board: Board, new: NewEntries) -> int:
        """Return how many entries to read behind ``new``, which is planned. As long as what was refused to be taken
        makes more than a batch, nothing is read."""
        return 0 if len(new.found) > self.batch(board) else max(0, min(self._room(board), self._page))

    def advance(self, new: NewEntries, read: NewEntries, count: int) -> None:
        """Note that ``new`` was taken, and what was read behind it, of up to ``count``. If that is nothing, its
        position is the group's."""
        if new.found:
            self.taken = new.found[-1][0]
            self._given = max(self._given, rank(self.taken))
        if read.found and not self.may_have_more and self._notifier is not None:
            self._notifier.reset()  # it has not told of these: its server may be one that was replaced
        if new.is_told and read.found and read.found[0][0] == self.taken:  # else it is gone, or others have it
            self.last_read, read = self.taken, replace(read, found=read.found[1:])
        if read.found:
            self.last_read = read.found[-1][0]
        elif count:  # others have moved the group, or read from it
            self.taken = self.last_read = read.position
        self._read = read if read.position == self.taken else replace(read, position=self.taken)
        if not count:
            self._may_have_more = True  # nobody has looked
            return
        self._may_have_more = not read.is_all
        if read.is_all:
            self._no_more_since_s = now_s()
        if found := len(read.found) + new.is_told:
            self._page = _GROWTH * (max(_FIRST_READ, found) if read.is_all else self._page)
        self._page = max(1, min(self._page, _MOST_BATCHES * self._batch, _READ_BYTES // max(1, read.largest)))

    @property
    def may_have_more(self) -> bool:
        return self._may_have_more or bool(self._read.found)

    @property
    def to_look_at(self) -> bytes:
        """The highest id at which entries of others may be looked for: what was read and not taken goes before those
        above it, which only strangers can have. Empty: any."""
        return before(self._read.found[0][0]) if self._read.found else b""

    @property
    def given(self) -> bytes:
        return from_rank(self._given)

    def split(self, entries: Sequence[TicketEntry]) -> tuple[Sequence[TicketEntry], ...]:
        """Split entries, which are in id order: those that this group was given before somebody set it back, and those
        that are new."""
        if not entries or rank(entries[0][0]) > self._given:
            return (), entries
        given = bisect_right(entries, self._given, key=_rank_of)
        return entries[:given], entries[given:]

    def arm(self, board: Board) -> None:
        """Ask for a notification of the next entry, if there is room for it."""
        if self._room(board) <= 0:
            self._may_have_more = True  # nobody tells of what comes meanwhile
        elif self._notifier is not None:
            self._notifier.arm(self.last_read)

    def batch(self, board: Board) -> int:
        """Return the most entries read, and handed over, at once: of many consumers each would get only a few."""
        return self._batch * max(1, min(_MOST_BATCHES, len(board.consumers) // 4))

    def may_read(self, board: Board) -> int:
        """Return how many more entries there is space for. A ticket that waits for its turn counts as twenty."""
        return max(0, self._read_ahead - board.parked - 19 * board.lined_up)

    def _room(self, board: Board) -> int:
        may_read = self.may_read(board)
        if not may_read and not self.is_full:
            event("waiting_limit_reached", level=WARNING, parked=board.parked)
        # It is told once, and again when a tenth had been free meanwhile.
        self.is_full = not may_read or (self.is_full and may_read < self._read_ahead // 10)
        return min(self.batch(board), may_read, board.room)


class PositionSaver:
    """Saver of the group's position, on the dispatcher's thread. ``memory``: what this master knows of the group, also
    between two epochs."""

    def __init__(self, stream: TicketStream, look_s: float) -> None:
        """Make a saver that looks at least every three times ``look_s`` seconds, although nothing moves."""
        self._stream = stream
        self._look_s = 3 * look_s
        self.memory = Memory()
        self._was_open = False  # the last saved position had something pending
        self._saved_s = self._next_s = 0.0

    def follow(self) -> float:
        """Learn, on a standby, what the leader saved last, in case that is lost together with all the other data in
        Redis. Return for how many seconds that will do."""
        saved, before = self._stream.saved_position(), self.memory
        if saved is not None:
            self.memory = before.followed(saved)
        return self._look_s / 3 if self.memory == before else _SAVE_POSITION_S

    def remember(self, new: NewEntries) -> None:
        if new.found:
            self.memory = self.memory.read(new.found[0][0], new.found[-1][0])

    def turn(self, board: Board, steps: LeaderScripts, last_read: bytes) -> GroupPosition | None:
        """Save the position, once a second while it moves, and return it; None when Redis was not asked."""
        now = now_s()
        is_open = board.is_busy
        noted = self.memory.noted
        has_moved = noted is None or noted.delivered != last_read or is_open or self._was_open
        self._next_s = self._saved_s + (_SAVE_POSITION_S if has_moved else self._look_s)
        if now < self._next_s:
            return None
        position = steps.save_position(board.takeable(now))
        self.memory = Memory(position)
        self._was_open, self._saved_s = is_open, now
        self._next_s = now + (_SAVE_POSITION_S if is_open else self._look_s)
        return position

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self._next_s - now_s)
