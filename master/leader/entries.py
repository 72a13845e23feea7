"""Entries as the leader sees them, without their bodies: those that were read, and are in nobody's list before a turn
takes them, and those found under ``master`` or a dead incarnation; which of them can be handed over; and
what they tell of tenants and priorities."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from usher.common.base.errors import MessageUndecodable
from usher.common.base.log import WARNING, event
from usher.common.protocol.marks import NO_FIELDS, Mark, MarkFields
from usher.common.protocol.message import LONGEST_TICKET, check_ticket, first_value, ticket_value
from usher.common.redis.replies import pack_entry

#: Most bytes shown of a ticket id that cannot be used.
_SHOWN = 64
#: The reason of entries above USHER_LONGEST_MESSAGE_BYTES.
TOO_LARGE = "too_large"
#: The reason of entries beyond the limit of their ticket (``usher limit``).
OVER_LIMIT = "over_limit"
#: Bodies up to this size, packed, go to their owners with the inbox, as long as those of a batch have this mean, or are
#: no more than so much together. Owners read all others from their own pending lists.
_SMALL_BODY, _MEAN_BODY, _FEW_BODIES = 8 * 1024, 1024, 1024 * 1024
#: Bytes of a tenant or priority field that are looked at (lua/includes/ticket_of.lua).
LONGEST_MARK = 600


class PeekedEntry(NamedTuple):
    """An entry as the leader sees it, without its body: read, or found under ``master`` or a dead incarnation.
    ``ticket`` is None when it names none; ``size`` is its bytes when it is too large, else 0. ``tenant`` and
    ``priority``: values of the fields that tell these (``common/protocol/marks.py``), empty without them."""

    id: bytes
    ticket: bytes | None
    size: int = 0
    tenant: bytes = b""
    priority: bytes = b""


#: Makes one of a tuple of all its parts, at half the cost.
PEEKED = functools.partial(tuple.__new__, PeekedEntry)


@dataclass(frozen=True, slots=True)
class NewEntries:
    """Entries to be taken: those that come next above ``position``, up to which all was taken. ``is_all``: there were
    no more.

    ``found``: of those that can be handed over, nearly all, (id, ticket) is enough. ``largest``: about the bytes of the
    largest. ``bodies``: those that go with the inbox, packed, with their ids. ``given``: how many entries the group was
    given up to the last of these, as Redis counts them; None: that is not known. ``is_told``: it is one, a notification
    told of it, and the turn that takes it reads it first. ``kept``: ids of those that come again
    and that somebody has, by the name for which they are to be pending again; "": they are.
    """

    position: bytes
    found: list[PeekedEntry | tuple[bytes, bytes]]
    is_all: bool
    largest: int = field(default=0, compare=False)
    bodies: Mapping[bytes, bytes] = field(default_factory=dict, compare=False)
    given: int | None = field(default=None, compare=False)
    is_told: bool = field(default=False, compare=False)
    kept: Mapping[str, list[bytes]] = field(default_factory=dict, compare=False)


NO_NEW_ENTRIES = NewEntries(b"", [], True)


class EntryParser(NamedTuple):
    """Parser of entries. ``field`` names the ticket; ``longest_message`` is the most bytes of a message (0: any);
    ``tenant_field`` and ``priority_field`` name two more fields (empty: none)."""

    field: bytes
    longest_message: int = 0
    tenant_field: bytes = b""
    priority_field: bytes = b""

    def parse(self, position: bytes, entries: Sequence[Any], is_all: bool, given: int | None = None) -> NewEntries:
        name, most = self.field, self.longest_message or math.inf
        is_plain = not (self.tenant_field or self.priority_field or b"." in name)
        ids = [entry_id for entry_id, _ in entries]
        packed = [pack_entry((entry_id, *fields)) for entry_id, fields in entries]
        sizes = list(map(len, packed))
        largest, room = max(sizes, default=0), max(_FEW_BODIES, _MEAN_BODY * len(entries))
        if largest <= _SMALL_BODY and sum(sizes) <= room:
            bodies = dict(zip(ids, packed, strict=True))
        else:
            small = [one if one <= _SMALL_BODY else 0 for one in sizes]
            bodies = {
                entry_id: body
                for entry_id, body, size, so_far in zip(ids, packed, small, accumulate(small), strict=True)
                if size and so_far <= room
            }
        found: list[PeekedEntry | tuple[bytes, bytes]] = [
            (entry_id, fields[1])
            if is_plain
            and fields[0] == name
            and size <= most
            and 0 < len(fields[1]) <= LONGEST_TICKET
            and fields[1].isascii()
            else self._entry(entry_id, fields, sum(map(len, fields)))
            for (entry_id, fields), size in zip(entries, sizes, strict=True)
        ]
        return NewEntries(position, found, is_all, largest, bodies, given)

    def _entry(self, entry_id: bytes, fields: list[bytes], size: int) -> PeekedEntry:
        ticket = ticket_value(fields, self.field)
        if 0 < self.longest_message < size:
            return PeekedEntry(entry_id, ticket or b"", size)
        names = (self.tenant_field, self.priority_field)
        marks = [((first_value(fields, name) if name else None) or b"")[:LONGEST_MARK] for name in names]
        return PeekedEntry(entry_id, ticket, 0, *marks)


class Rejected(NamedTuple):
    """An entry that can be handed to no consumer. ``shown``: the part of its ticket id that may be shown."""

    id: bytes
    shown: bytes
    reason: str


def partition_entries(
    found: Iterable[PeekedEntry | tuple[bytes, bytes]],
) -> tuple[list[tuple[bytes, bytes]], list[Rejected]]:
    """Return (id, ticket) of the entries that can be handed over, and those that must become dead letters, each with
    its reason."""
    usable: list[tuple[bytes, bytes]] = []
    rejected: list[Rejected] = []
    for entry in found:
        if not isinstance(entry, PeekedEntry):
            usable.append(entry)
        elif entry.size:
            rejected.append(Rejected(entry.id, (entry.ticket or b"")[:LONGEST_TICKET], TOO_LARGE))
        else:
            try:
                usable.append((entry.id, check_ticket(entry.ticket)))
            except MessageUndecodable as why:
                rejected.append(Rejected(entry.id, (entry.ticket or b"")[:_SHOWN], why.reason))
    return usable, rejected


class MarkReader:
    """Reader of the marks of entries (``common/protocol/marks.py``)."""

    def __init__(self, fields: MarkFields) -> None:
        self._fields = fields
        self.fields = fields.names
        self.tells_tenants = bool(fields.tenant)
        self.unreadable = 0  # priorities, since the start of the process

    def read(self, found: Iterable[Any]) -> Sequence[Mark]:
        """Return the marks of the entries; nothing when nobody asked for any. Priorities that cannot be read count as
        the least, and are told."""
        if self._fields.is_empty:
            return ()
        read = self._fields.read
        marks = [read(one.id, one.ticket or b"", one.tenant, one.priority) for one in found]
        unreadable = [mark for mark in marks if not mark.is_readable]
        if unreadable:
            self.unreadable += len(unreadable)
            first, why = unreadable[0], "not a number from 0 to 9: it counts as 0"
            facts: dict[str, Any] = {"count": len(unreadable), "first": first.id, "ticket": first.ticket, "why": why}
            event("priority_unreadable", level=WARNING, **facts)
        return marks


#: Reader for those who need no marks.
NO_MARKS = MarkReader(NO_FIELDS)
