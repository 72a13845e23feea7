"""The consumer group is gone (FLUSHALL, DEL, XGROUP DESTROY, a failover that lost it): where does it begin again? Pure.

Not at ``0``: that would repeat everything. Not at ``$``: that would lose everything since. At the saved position, and the exact ids that
may come again, or are lost, are told.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.stream_id import ZERO, Position, Span, after, before, rank


@dataclass(frozen=True)
class Restart:
    """Make the group at ``start``. ``repeat``: first and last id that may be delivered again; ``lost``: ids between which entries that
    were not done are not in the stream any more. None: nothing of the kind. ``first_time``: there never was a group."""

    start: bytes
    repeat: tuple[bytes, bytes] | None = None
    lost: tuple[bytes, bytes] | None = None
    first_time: bool = False


@dataclass(frozen=True)
class Memory:
    """What a master remembers of the group: the position that it noted last, and the first and last id that it has read since (None:
    nothing, or it never noted any)."""

    noted: Position | None = None
    first_since: bytes | None = None
    last_since: bytes | None = None

    def read(self, first: bytes, last: bytes) -> Memory:
        """It has read these, and what is between."""
        return Memory(self.noted, self.first_since or first, last)

    def found(self, delivered: bytes) -> Memory:
        """It leads anew, and the group has been given ``delivered``. What it has not read itself another master has, which led meanwhile, if
        only for a moment: that may be all that is above what was noted."""
        if self.noted is None or rank(delivered) <= rank(self.last_since or self.noted.delivered):
            return self
        first = after(self.noted.delivered)
        return Memory(self.noted, first if self.first_since is None else min(first, self.first_since, key=rank), delivered)


def reached(saved: Position | None, memory: Memory) -> Position | None:
    """How far the group was, from what Redis has saved and what this master remembers. Memory counts only if nobody else has saved since;
    what was read after the position was noted counts as not done."""
    noted = memory.noted
    if noted is None or (saved is not None and saved != noted):
        return saved
    if memory.first_since is None or memory.last_since is None:
        return noted
    return Position(memory.last_since, noted.oldest_pending or memory.first_since)


def restart(position: Position | None, span: Span | None, saved: bool = True, lowest_held: bytes | None = None) -> Restart:
    """From how far the group was (None: not known), what there is of the stream (None: it is gone), and the lowest id in the index.

    =============================================  =============  ==========================  =======================
    case                                           start          repeat                      lost
    =============================================  =============  ==========================  =======================
    no position                                    0-0            -                           -
    not ``saved``: the position is gone from       0-0            first .. delivered          oldest pending .. delivered
    Redis too, and so is all that it had
    the stream is gone, or it is a new one, whose  0-0            -                           oldest pending .. delivered
    ids are below what was delivered
    the stream begins above the floor              floor          first .. delivered          floor + 1 .. below first
    nothing of the stream is gone                  floor          floor + 1 .. delivered      -
    =============================================  =============  ==========================  =======================

    The floor is just below the oldest pending entry, or the last delivered id when nothing was pending, and never above what the index has
    in processing. A stream that is gone may come
    back with any ids, also with lower ones: its group begins at 0-0.
    """
    if position is None:
        return Restart(ZERO, first_time=True)
    delivered = position.delivered
    floor = before(position.oldest_pending) if position.oldest_pending is not None else delivered
    if lowest_held is not None:
        floor = min(floor, before(lowest_held), key=rank)
    undone = (after(floor), delivered) if rank(floor) < rank(delivered) else None
    first = span.first if span is not None else None
    if not saved:
        return Restart(ZERO, (first, delivered) if first is not None and rank(first) <= rank(delivered) else None, undone)
    if span is None or rank(span.last_generated) < rank(delivered):
        return Restart(ZERO, None, undone)
    if undone is None:
        return Restart(floor)
    if first is None or rank(first) > rank(delivered):
        return Restart(floor, None, undone)
    if rank(first) > rank(undone[0]):
        return Restart(floor, (first, delivered), (undone[0], before(first)))
    return Restart(floor, undone)
