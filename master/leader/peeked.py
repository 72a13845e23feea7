"""Peeked entries: those that come next in a ticket stream above the group's position. Peeking changes nothing;
``hand_over`` takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from usher.common.protocol.message import first_value

#: Mean size of small entries, in bytes: a notification may bring a few of them, bodies included.
_SMALL = 1024
#: Factor by which the next notification may bring more, and the most it may bring.
_GROWTH, _MOST = 8, 32
#: Bytes of a tenant or priority field that are looked at (lua/includes/ticket_of.lua).
LONGEST_MARK = 600


class PeekedEntry(NamedTuple):
    """An entry as the leader sees it, without its body: peeked at, or found under ``master`` or a dead incarnation.
    ``ticket`` is None when it names none; ``size`` is its bytes when it is too large, else 0. ``tenant`` and
    ``priority``: values of the fields that tell these (``common/protocol/marks.py``), empty without them."""

    id: bytes
    ticket: bytes | None
    size: int = 0
    tenant: bytes = b""
    priority: bytes = b""


@dataclass(frozen=True, slots=True)
class NewEntries:
    """Entries that the group has not been given yet: those that come next above its ``position``. ``is_all``: there are
    no more.

    ``size``: bytes of all. ``digest``: empty after a peek; for entries that a notification brought, their digest. A
    notification comes over another connection, perhaps to another server, so the script that takes the entries checks
    that they are really there.
    """

    position: bytes
    found: list[PeekedEntry]
    is_all: bool
    size: int = field(default=0, compare=False)
    digest: str = ""


NO_NEW_ENTRIES = NewEntries(b"", [], True)


class EntryParser(NamedTuple):
    """Parser of entries. ``field`` names the ticket; ``longest_message`` is the most bytes of a message (0: any);
    ``tenant_field`` and ``priority_field`` name two more fields (empty: none)."""

    field: bytes
    longest_message: int = 0
    tenant_field: bytes = b""
    priority_field: bytes = b""

    @property
    def is_path(self) -> bool:
        """Return True if the ticket may stand in JSON, which only the scripts read."""
        return b"." in self.field

    def parse(self, position: bytes, entries: Sequence[Any], is_all: bool, digest: str = "") -> NewEntries:
        """Parse [id, fields] pairs, as Redis sends them."""
        sizes = [sum(map(len, fields)) for _, fields in entries]
        found = [self._entry(entry_id, fields, size) for (entry_id, fields), size in zip(entries, sizes, strict=True)]
        return NewEntries(position, found, is_all, sum(sizes), digest)

    def _entry(self, entry_id: bytes, fields: list[bytes], size: int) -> PeekedEntry:
        """Do the same as lua/includes/ticket_of.lua."""
        ticket = first_value(fields, self.field)
        if 0 < self.longest_message < size:
            return PeekedEntry(entry_id, ticket or b"", size)
        if not (self.tenant_field or self.priority_field):
            return PeekedEntry(entry_id, ticket)
        names = (self.tenant_field, self.priority_field)
        marks = [((first_value(fields, name) if name else None) or b"")[:LONGEST_MARK] for name in names]
        return PeekedEntry(entry_id, ticket, 0, *marks)


def digest_of(entries: Sequence[Any]) -> str:
    """Compute the digest by which hand_over.lua knows the same entries."""
    parts = (part for entry_id, fields in entries for part in (entry_id, *fields))
    return hashlib.sha1(b"".join(b"%d:%b" % (len(part), part) for part in parts), usedforsecurity=False).hexdigest()


def notification_limit(seen: int, size: int) -> int:
    """Return how many entries a notification may bring, after ``seen`` of ``size`` bytes together were seen.

    The next entries are likely to be of the same size, but a few small ones prove little, so the number grows step by
    step. Where entries are large, a notification brings none and only says that there are some.
    """
    return max(1, min(_GROWTH * seen, _MOST)) if size <= _SMALL * seen else 1
