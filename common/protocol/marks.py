"""Marks of a message: which tenant it belongs to, and how urgent it is. Pure.

The tenant is a field of the message, the stream that it was gathered from (``@stream``), or the part of the ticket id
before a separator (``@ticket:SEPARATOR``). A ticket is of the tenant of its newest message; "" is a tenant like any
other. The priority is a number from 0 to 9; 0, the default, is the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from usher.common.protocol.message import first_value
from usher.common.protocol.sources import FROM_FIELD

#: Bytes of a tenant's name that count.
LONGEST_TENANT = 128
MOST_URGENT = 9
_STREAM, _TICKET = "@stream", "@ticket:"


class Mark(NamedTuple):
    """The tenant and the priority of an entry of a ticket. ``is_readable``: False when its priority is not a number
    from 0 to 9, and counts as 0."""

    id: bytes
    ticket: bytes
    tenant: bytes
    priority: int
    is_readable: bool = True


class MarkFields(NamedTuple):
    """Fields with the marks of a message: the settings USHER_TENANT_FIELD and USHER_PRIORITY_FIELD. ``by_stream``:
    ticket ids of a work stream begin with the name of their source."""

    tenant: str = ""
    priority: str = ""
    by_stream: bool = False

    @property
    @cache  # noqa: B019 - asked for each message, of the one value that a process has
    def names(self) -> tuple[bytes, bytes]:
        tenant = self.tenant.encode()
        if self.tenant == _STREAM or self.tenant.startswith(_TICKET):
            tenant = FROM_FIELD if self.tenant == _STREAM or self.by_stream else b""
        return tenant, self.priority.encode()

    @property
    def is_empty(self) -> bool:
        return not (self.tenant or self.priority)

    def read(self, entry_id: bytes, ticket: bytes, tenant: bytes, priority: bytes) -> Mark:
        """Return the mark of an entry with these values of the two fields.

        >>> MarkFields("customer", "priority").read(b"1-0", b"T", b"a", b"7")
        Mark(id=b'1-0', ticket=b'T', tenant=b'a', priority=7, is_readable=True)
        >>> MarkFields("@ticket:-").read(b"1-0", b"a-17", b"", b"").tenant
        b'a'
        >>> MarkFields("@stream").read(b"1-0", b"s:a/T", b"17-0 4 s:a", b"").tenant
        b's:a'
        """
        is_readable = not priority or (len(priority) == 1 and priority.isdigit())
        level = int(priority) if priority and is_readable else 0
        return Mark(entry_id, ticket, self._tenant(ticket, tenant)[:LONGEST_TENANT], level, is_readable)

    def of(self, entry_id: bytes, ticket: bytes, flat: Sequence[bytes]) -> Mark:
        tenant, priority = ((first_value(flat, name) if name else None) or b"" for name in self.names)
        return self.read(entry_id, ticket, tenant, priority)

    def _tenant(self, ticket: bytes, value: bytes) -> bytes:
        if self.tenant == _STREAM:
            return value.split(b" ", 2)[-1]
        if not self.tenant.startswith(_TICKET):
            return value
        separator = self.tenant.removeprefix(_TICKET).encode()
        parts = value.split(b" ", 2)  # of a gathered entry: id, length of what is not the producer's, source
        own = ticket[int(parts[1]) :] if len(parts) == 3 and parts[1].isdigit() else ticket
        prefix, found, _ = own.partition(separator)
        return prefix if found else b""


NO_FIELDS = MarkFields()


def check_tenant_field(value: str) -> str:
    if value.startswith("@") and value != _STREAM and not (value.startswith(_TICKET) and value != _TICKET):
        raise ValueError(f"must be a field, {_STREAM} (the source), or {_TICKET}SEPARATOR (the ticket id up to it)")
    return value


def parse_weights(text: str) -> dict[bytes, int]:
    """Parse the weights of tenants. Raises ValueError.

    >>> parse_weights("a=3, b=1")
    {b'a': 3, b'b': 1}
    """
    weights = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, weight = part.rpartition("=")
        if not equals or not weight.isascii() or not weight.isdigit() or not 1 <= int(weight) <= 1000:
            raise ValueError(f"{part!r} is not NAME=WEIGHT with a whole weight from 1 to 1000; separate with commas")
        weights[name.strip().encode()] = int(weight)
    return weights
