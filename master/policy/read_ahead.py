"""Read-ahead: how many more entries the leader may read although nobody has room for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from usher.common.protocol.message import LONGEST_TICKET

#: Most bytes of ids, of tickets and of entries, in memory.
_BYTES = 64 * 1024 * 1024
_LONGEST_ID = 41
_LONGEST = LONGEST_TICKET + _LONGEST_ID


def read_ahead_room(most: int, parked: int, tickets: Iterable[bytes]) -> int:
    """Return how many more entries may be read, so that no more than ``most`` are parked, and their ids fit into 64
    MiB. ``tickets``: names of all tickets in memory; looked at only where the bytes could be too many."""
    room = most - parked
    if room > 0 and (parked + 1) * _LONGEST > _BYTES:
        room = min(room, (_BYTES - parked * _LONGEST_ID - sum(map(len, tickets))) // _LONGEST)
    return max(0, room)
