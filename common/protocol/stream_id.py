"""Stream ids: ``b"<milliseconds>-<sequence>"`` as Redis sends them; compared as numbers, never as text."""

from __future__ import annotations

import re
from typing import NamedTuple

_SEQUENCE_BITS = 64
ZERO = b"0-0"
_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_LARGEST = (1 << _SEQUENCE_BITS) - 1


def is_id(text: str) -> bool:
    """Return True if Redis accepts the text as an id, also after the ``(`` of a range; the very largest id is refused
    there, because nothing comes after it."""
    found = _ID.fullmatch(text)
    return (
        found is not None
        and int(found[1]) <= _LARGEST
        and int(found[2]) <= _LARGEST
        and text != f"{_LARGEST}-{_LARGEST}"
    )


def rank(stream_id: bytes) -> int:
    """Return the id as an integer that sorts as Redis sorts: milliseconds * 2**64 + sequence."""
    milliseconds, _, sequence = stream_id.partition(b"-")
    return (int(milliseconds) << _SEQUENCE_BITS) | int(sequence)


def milliseconds(stream_id: bytes) -> int:
    """Return the first part of the id: milliseconds since the epoch, if Redis generated it."""
    return int(stream_id.partition(b"-")[0])


def from_rank(value: int) -> bytes:
    """Return the id of a rank."""
    return b"%d-%d" % (value >> _SEQUENCE_BITS, value & ((1 << _SEQUENCE_BITS) - 1))


def before(stream_id: bytes) -> bytes:
    value = rank(stream_id)
    return from_rank(value - 1) if value else ZERO


def after(stream_id: bytes) -> bytes:
    return from_rank(rank(stream_id) + 1)


class GroupPosition(NamedTuple):
    """The progress of a group: the highest id it was given, and the lowest id that was pending then."""

    delivered: bytes
    oldest_pending: bytes | None


class Span(NamedTuple):
    """The extent of a stream: the id of its first entry (None: it is empty), and the last id it ever generated."""

    first: bytes | None
    last_generated: bytes
