"""Position saver: saves the group's position outside of the group, so that a group that is lost begins again where it
was.

It has no thread: the dispatcher gives it turns.
"""

from __future__ import annotations

from usher.common.base.clock import now_s
from usher.common.redis.replies import TicketStream
from usher.master.leader.leader_scripts import LeaderScripts, PositionLook
from usher.master.leader.peeked import NewEntries
from usher.master.policy.board.board import Board
from usher.master.policy.group_loss import Memory

#: Seconds between saves: at most this much comes again when the group is lost.
_SAVE_POSITION_S = 1.0


class PositionSaver:
    """Saver of the group's position, on the dispatcher's thread. ``memory``: what this master knows of the group, also
    between two epochs."""

    def __init__(self, stream: TicketStream, look_s: float) -> None:
        """Make a saver that looks every ``look_s`` seconds although nothing moves."""
        self._stream = stream
        self._look_s = look_s
        self.memory = Memory()
        self._was_open = False  # the last saved position had something pending
        self._saved_s = 0.0

    def follow(self) -> None:
        """Learn, on a standby, what the leader saved last, in case that is lost together with all the other data in
        Redis."""
        saved = self._stream.saved_position()
        if saved is not None:
            self.memory = self.memory.followed(saved)

    def begin(self, last_delivered: bytes) -> None:
        """Begin to lead: the group has been given everything up to ``last_delivered``."""
        self.memory = self.memory.found(last_delivered)

    def remember(self, new: NewEntries) -> None:
        """Remember that these entries were taken."""
        self.memory = self.memory.read(new.found[0].id, new.found[-1].id)

    def turn(self, board: Board, steps: LeaderScripts, last_read: bytes) -> PositionLook | None:
        """Save the position, once a second while it moves. Return what Redis told with it; None when it was not
        asked."""
        now = now_s()
        is_open = bool(board.in_flight or board.parked)
        noted = self.memory.noted
        has_moved = noted is None or noted.delivered != last_read or is_open or self._was_open
        if now - self._saved_s < (_SAVE_POSITION_S if has_moved else self._look_s):
            return None
        look = steps.save_position(board.takeable())
        self.memory = Memory(look.position)
        self._was_open, self._saved_s = is_open, now
        return look
