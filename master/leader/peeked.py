"""Peeked entries: what comes next in a ticket stream above the group's position. To peek changes nothing; ``hand_over``
takes what was seen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Mean bytes of entries that are small: a notification may bring a few of them, bodies and all.
_SMALL = 1024
#: How many times as many the next notification may bring, and how many at most.
_GROWTH, _MOST = 8, 32


class PeekedEntry(NamedTuple):
    """An entry: ``ticket`` is None when it names none. ``size`` is its bytes when it is too large, else 0."""

    id: bytes
    ticket: bytes | None
    size: int = 0


@dataclass(frozen=True, slots=True)
class NewEntries:
    """Entries that the group was not given yet: those that come next above its ``position``. ``is_all``: there are no
    more.

    ``size``: bytes of all. ``digest``: empty after a peek; their digest when a notification brought them. It comes over
    another connection, which may be to another server, so the script that takes them checks that they are what is
    there.
    """

    position: bytes
    found: list[PeekedEntry]
    is_all: bool
    size: int = field(default=0, compare=False)
    digest: str = ""


NO_NEW_ENTRIES = NewEntries(b"", [], True)


class EntryParser(NamedTuple):
    """Parse entries: ``field`` names the ticket; ``longest_message`` is the most bytes of a message (0: any)."""

    field: bytes
    longest_message: int = 0

    def parse(self, position: bytes, entries: Sequence[Any], is_all: bool, digest: str = "") -> NewEntries:
        """Parse [id, fields] pairs, as Redis sends them."""
        sizes = [sum(map(len, fields)) for _, fields in entries]
        found = [self._entry(entry_id, fields, size) for (entry_id, fields), size in zip(entries, sizes, strict=True)]
        return NewEntries(position, found, is_all, sum(sizes), digest)

    def _entry(self, entry_id: bytes, fields: list[bytes], size: int) -> PeekedEntry:
        """Do the same as lua/includes/ticket_of.lua."""
        ticket = next(
            (value for name, value in zip(fields[::2], fields[1::2], strict=True) if name == self.field), None
        )
        return (
            PeekedEntry(entry_id, ticket or b"", size)
            if 0 < self.longest_message < size
            else PeekedEntry(entry_id, ticket)
        )


def digest_of(entries: Sequence[Any]) -> str:
    """Compute the digest by which hand_over.lua knows the same entries."""
    parts = (part for entry_id, fields in entries for part in (entry_id, *fields))
    return hashlib.sha1(b"".join(b"%d:%b" % (len(part), part) for part in parts), usedforsecurity=False).hexdigest()


def notification_limit(seen: int, size: int) -> int:
    """Return how many entries a notification may bring, after ``seen`` of ``size`` bytes together were seen.

    What comes next is likely to be of the same size; but a few small ones prove little, so the number grows step by
    step. Where they are large a notification brings none, and says only that there is something.
    """
    return max(1, min(_GROWTH * seen, _MOST)) if size <= _SMALL * seen else 1
