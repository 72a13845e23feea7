"""The consumer group is gone (FLUSHALL, DEL, XGROUP DESTROY, a failover that lost it): where does it begin again? Pure.

Not at ``0``: that would repeat everything. Not at ``$``: that would lose everything since. At the saved position, and the exact ids that
may come again, or are lost, are told.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.stream_id import ZERO, after, before, rank


@dataclass(frozen=True)
class Restart:
    """Make the group at ``start``. ``repeat``: first and last id that may be delivered again; ``lost``: ids between which entries that
    were not done are not in the stream any more. None: nothing of the kind. ``first_time``: there never was a group."""

    start: bytes
    repeat: tuple[bytes, bytes] | None = None
    lost: tuple[bytes, bytes] | None = None
    first_time: bool = False


def restart(delivered: bytes | None, oldest_pending: bytes | None, span: tuple[bytes, bytes] | None) -> Restart:
    """From the saved position (None: never saved) and the first and last id now in the stream (None: it is empty).

    =============================================  =============  ==========================  =======================
    case                                           start          repeat                      lost
    =============================================  =============  ==========================  =======================
    never saved                                    0-0            -                           -
    the stream ends below what was delivered:      0-0            -                           oldest pending .. delivered
    it was deleted, and its ids went back
    the stream begins above the floor              floor          first .. delivered          floor + 1 .. below first
    nothing of the stream is gone                  floor          floor + 1 .. delivered      -
    =============================================  =============  ==========================  =======================

    The floor is just below the oldest pending entry, or the last delivered id when nothing was pending.
    """
    if delivered is None:
        return Restart(ZERO, first_time=True)
    floor = before(oldest_pending) if oldest_pending is not None else delivered
    undone = (after(floor), delivered) if rank(floor) < rank(delivered) else None
    if span is not None and rank(span[1]) < rank(delivered):
        return Restart(ZERO, None, undone)
    if undone is None:
        return Restart(floor)
    first = span[0] if span is not None else after(delivered)
    if rank(first) > rank(delivered):
        return Restart(floor, None, undone)
    if rank(first) > rank(undone[0]):
        return Restart(floor, (first, delivered), (undone[0], before(first)))
    return Restart(floor, undone)
