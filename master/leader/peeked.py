"""Looks at a ticket stream: what comes next above the group's position. They change nothing; ``hand_over`` takes what
was seen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Mean bytes of entries that are small: a few of them may come here, bodies and all.
_SMALL = 1024
#: How many times as many may come next, and how many at most.
_GROWTH, _MOST = 8, 32


class Found(NamedTuple):
    """An entry: ``ticket`` is None when it names none. ``size`` is its bytes when it is too large, else 0."""

    id: bytes
    ticket: bytes | None
    size: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """Entries that the group was not given yet: those that come next above its ``position``. ``is_all``: there are no
    more. ``size``: bytes of all. ``heard``: "", or their digest if the doorbell told of them: it has another
    connection, which may be to another server, so the script that takes them checks that they are what is there."""

    position: bytes
    found: list[Found]
    is_all: bool
    size: int = field(default=0, compare=False)
    heard: str = ""


NO_NEWS = News(b"", [], True)


class Reading(NamedTuple):
    """How entries are read: the field that names the ticket, and the most bytes of a message (0: any)."""

    field: bytes
    longest_message: int = 0

    def news(self, position: bytes, entries: Sequence[Any], is_all: bool, heard: str = "") -> News:
        """``entries``: [id, fields] each, as Redis sends them."""
        sizes = [sum(map(len, fields)) for _, fields in entries]
        found = [self._found(entry_id, fields, size) for (entry_id, fields), size in zip(entries, sizes, strict=True)]
        return News(position, found, is_all, sum(sizes), heard)

    def _found(self, entry_id: bytes, fields: list[bytes], size: int) -> Found:
        """The same as lua/includes/ticket_of.lua."""
        ticket = next(
            (value for name, value in zip(fields[::2], fields[1::2], strict=True) if name == self.field), None
        )
        return Found(entry_id, ticket or b"", size) if 0 < self.longest_message < size else Found(entry_id, ticket)


def digest(entries: Sequence[Any]) -> str:
    """By which hand_over.lua knows the same entries."""
    parts = (part for entry_id, fields in entries for part in (entry_id, *fields))
    return hashlib.sha1(b"".join(b"%d:%b" % (len(part), part) for part in parts), usedforsecurity=False).hexdigest()


def most_to_tell(seen: int, size: int) -> int:
    """How many entries the doorbell may tell of, after ``seen`` of ``size`` bytes together were seen. What comes next
    is likely to be of the same size; but a few small ones prove little, so the number grows step by step. Where they
    are large it tells of one, and that there may be more."""
    return max(1, min(_GROWTH * seen, _MOST)) if size <= _SMALL * seen else 1
