"""Loss of the consumer group (FLUSHALL, DEL, XGROUP DESTROY, a failover that lost it): decide where the group begins
again. Pure.

Not at ``0``: that would repeat everything. Not at ``$``: that would lose everything since. At the saved position; the
exact ids that may come again, or are lost, are reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from usher.common.protocol.mishaps import IdRange
from usher.common.protocol.stream_id import ZERO, GroupPosition, Span, after, before, from_rank, rank


class IndexedIdRange:
    """The ``lowest`` and the ``highest`` id in the index, of those between the ends of the stream. A record may be
    older than what is left of the stream (deleted, trimmed): such ids do not come again. None: there is none."""

    def __init__(self, span: Span | None) -> None:
        self._ends = (
            (rank(span.first), rank(span.last_generated)) if span is not None and span.first is not None else (1, 0)
        )
        self._held: tuple[int, int] | None = None

    def add(self, ids: Iterable[bytes]) -> None:
        first, last = self._ends
        there = [value for value in map(rank, ids) if first <= value <= last]
        if there:
            there += self._held or ()
            self._held = (min(there), max(there))

    @property
    def lowest(self) -> bytes | None:
        return from_rank(self._held[0]) if self._held is not None else None

    @property
    def highest(self) -> bytes | None:
        return from_rank(self._held[1]) if self._held is not None else None


@dataclass(frozen=True)
class Restart:
    """Order to make the group at ``start``. ``repeat``: first and last id that may be delivered again; ``lost``: ids
    between which unfinished entries are no longer in the stream. None: there are none. ``first_time``: there never was
    a group."""

    start: bytes
    repeat: tuple[bytes, bytes] | None = None
    lost: tuple[bytes, bytes] | None = None
    first_time: bool = False


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


def repeats(noted: bytes | None, highest_held: bytes | None, delivered: bytes) -> bytes | None:
    """Return the id up to which a group that has been given ``delivered`` is given entries a second time, from the note
    in Redis and the highest id in the index (which only entries that were handed over have). A note stays also when the
    group is past it: the entries may not have rejoined their owners yet."""
    if highest_held is None or rank(highest_held) <= rank(delivered):
        return noted
    return _highest(noted, highest_held)


def restart(
    position: GroupPosition | None,
    span: Span | None,
    saved: bool = True,
    lowest_held: bytes | None = None,
    known: Iterable[bytes | None] = (),
) -> Restart:
    """Decide where the group begins again, from how far it was (None: not known), the span of the stream (None: it is
    gone), the lowest id in the index, and other ids ``known`` to have been given to the group (the highest id in the
    index, repeats of an earlier loss), because the position is older than those.

    =============================================  =======  ===================  ===========================
    case                                           start    repeat               lost
    =============================================  =======  ===================  ===========================
    no position                                    0-0      -                    -
    not ``saved``: the position is gone from       0-0      first .. given       oldest pending .. delivered
    Redis too, and so is all that it had
    the stream is gone, or it is a new one, whose  0-0      first .. known       oldest pending .. delivered
    ids are below what was delivered
    the stream begins above the floor              floor    first .. given       floor + 1 .. below first
    nothing of the stream is gone                  floor    floor + 1 .. given   -
    =============================================  =======  ===================  ===========================

    "Given" is the highest id that was delivered or is known. A known id above the last id of the stream belongs to
    another stream that was there before.

    The floor is just below the oldest pending entry, or the last delivered id when nothing was pending, and never above
    an entry that the index has in processing. A stream that is gone may come back with any ids, also lower ones: its
    group begins at 0-0.
    """
    if position is None:
        return Restart(ZERO, first_time=True)
    delivered = position.delivered
    floor = before(position.oldest_pending) if position.oldest_pending is not None else delivered
    if lowest_held is not None:
        floor = min(floor, before(lowest_held), key=rank)
    undone = _range(after(floor), delivered)
    first, last = (span.first, span.last_generated) if span is not None else (None, ZERO)
    given = max(
        (known_id for known_id in known if known_id is not None and rank(known_id) <= rank(last)),
        key=rank,
        default=None,
    )
    if not saved:
        return Restart(ZERO, _range(first, _highest(given, delivered)), undone)
    if span is None or rank(last) < rank(delivered):
        return Restart(ZERO, _range(first, given), undone)
    if first is None:
        return Restart(floor, None, undone)
    lost = _range(undone[0], min(before(first), delivered, key=rank)) if undone is not None else None
    return Restart(floor, _range(_highest(first, after(floor)), _highest(given, delivered)), lost)


def _highest(known_id: bytes | None, other: bytes) -> bytes:
    return other if known_id is None else max(known_id, other, key=rank)


def _range(first: bytes | None, last: bytes | None) -> tuple[bytes, bytes] | None:
    return (first, last) if first is not None and last is not None and rank(first) <= rank(last) else None
