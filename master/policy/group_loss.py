"""Loss of the consumer group (FLUSHALL, DEL, XGROUP DESTROY, a failover that lost it): decide where the group begins
again. Pure.

Not at ``0``: that would repeat everything. Not at ``$``: that would lose everything since. At the saved position; the
exact ids that may come again, or are lost, are reported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from usher.common.protocol.mishaps import IdRange
from usher.common.protocol.stream_id import ZERO, GroupPosition, Span, after, before, rank


@dataclass(frozen=True)
class Memory:
    """Memory that a master has of the group: the position that it saved last, and the first and last id that it has
    read since (None: nothing, or it never saved a position). ``fallen``: a lower position that Redis has instead."""

    noted: GroupPosition | None = None
    first_since: bytes | None = None
    last_since: bytes | None = None
    fallen: GroupPosition | None = None

    @property
    def highest(self) -> bytes:
        known = (self.last_since, self.noted and self.noted.delivered)
        return max((one for one in known if one), key=rank, default=ZERO)

    def followed(self, saved: GroupPosition) -> Memory:
        """Return the memory of a master that does not lead, and finds this position saved. A lower one that does not
        move is that of a Redis which has lost its last moments: what was known of these is kept, to be declared. One
        that moves is of another leader, who has declared it."""
        if saved == self.noted:
            return self
        if rank(saved.delivered) < rank(self.highest) and self.fallen in (None, saved):
            return replace(self, fallen=saved)
        return Memory(saved)

    def read(self, first: bytes, last: bytes) -> Memory:
        return Memory(self.noted, self.first_since or first, last)

    def found(self, delivered: bytes) -> Memory:
        """Return the memory of a master that leads anew, when the group has been given ``delivered``. Entries that it
        has not read itself were read by another master, which led meanwhile, if only for a moment: that may be all
        above the saved position."""
        if self.noted is None or rank(delivered) <= rank(self.last_since or self.noted.delivered):
            return self
        first = after(self.noted.delivered)
        return Memory(
            self.noted, first if self.first_since is None else min(first, self.first_since, key=rank), delivered
        )


def reached(saved: GroupPosition | None, memory: Memory) -> GroupPosition | None:
    """Return how far the group was, from the position saved in Redis and what this master remembers. Memory counts only
    if nobody else has saved since; entries read after the position was saved count as not done."""
    noted = memory.noted
    if noted is None or (saved is not None and saved != noted):
        return saved
    if memory.first_since is None or memory.last_since is None:
        return noted
    return GroupPosition(memory.last_since, noted.oldest_pending or memory.first_since)


def set_back(memory: Memory, delivered: bytes, last_generated: bytes) -> tuple[IdRange | None, IdRange | None]:
    """Return the ids that this master knows to have been given to a group that is only at ``delivered`` now: those that
    may run again, and those that are lost because the stream ends before them. Redis lost its last moments (power
    loss, failover), or somebody has set the group back."""
    known = memory.highest
    return (
        _range(after(delivered), min(known, last_generated, key=rank)),
        _range(after(max(delivered, last_generated, key=rank)), known),
    )


def restart(
    position: GroupPosition, span: Span | None, saved: bool = True, taken: bytes | None = None
) -> tuple[bytes, IdRange | None, IdRange | None]:
    """Decide where the group begins again, from how far it was, the span of the stream (None: it is gone), and the last
    id that was ``taken`` (``Keys.taken``), because the position is older than that. Return also the ids that may be
    delivered again, and those between which unfinished entries are no longer in the stream.

    =============================================  =======  ===================  ===========================
    case                                           start    repeat               lost
    =============================================  =======  ===================  ===========================
    not ``saved``: the position is gone from       0-0      first .. given       oldest pending .. delivered
    Redis too, and so is all that it had
    the stream is gone, or it is a new one, whose  0-0      first .. taken       oldest pending .. delivered
    ids are below what was delivered
    the stream begins above the floor              floor    first .. given       floor + 1 .. below first
    nothing of the stream is gone                  floor    floor + 1 .. given   -
    =============================================  =======  ===================  ===========================

    "Given" is the higher one of what was delivered and taken. A taken id above the last id of the stream belongs to
    another stream that was there before.

    The floor is just below the oldest pending entry, or the last delivered id when nothing was pending. A stream that
    is gone may come back with any ids, also lower ones: its group begins at 0-0.
    """
    delivered = position.delivered
    floor = before(position.oldest_pending) if position.oldest_pending is not None else delivered
    undone = _range(after(floor), delivered)
    first, last = (span.first, span.last_generated) if span is not None else (None, ZERO)
    if taken is not None and rank(taken) > rank(last):
        taken = None
    if not saved:
        return ZERO, _range(first, _highest(taken, delivered)), undone
    if span is None or rank(last) < rank(delivered):
        return ZERO, _range(first, taken), undone
    if first is None:
        return floor, None, undone
    lost = _range(undone[0], min(before(first), delivered, key=rank)) if undone is not None else None
    return floor, _range(_highest(first, after(floor)), _highest(taken, delivered)), lost


def _highest(known_id: bytes | None, other: bytes) -> bytes:
    return other if known_id is None else max(known_id, other, key=rank)


def _range(first: bytes | None, last: bytes | None) -> tuple[bytes, bytes] | None:
    return (first, last) if first is not None and last is not None and rank(first) <= rank(last) else None
