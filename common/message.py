"""Messages: how an entry becomes what a handler gets, and which entries cannot.

A producer needs no library: ``XADD ticket_stream * ticket_id 42 ...`` from any language is a valid message.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import MessageUndecodable

#: Longest ticket id in bytes (RELIABILITY 6.1). Longer ones would travel through every index, inbox and log.
LONGEST_TICKET = 256
UID_FIELD = b"uid"
#: No real ticket can begin with it: this byte never occurs in UTF-8.
_UNKEYED = b"\xff"
BODY_FIELD = b"body"


def check_ticket(ticket: bytes | None) -> bytes:
    """The ticket id, if an entry with it can be handed over. Raises MessageUndecodable with one of the reasons

    ``no_ticket_id``, ``empty_ticket_id``, ``ticket_id_too_long``, ``ticket_id_not_utf8``.
    """
    if ticket is None:
        raise MessageUndecodable("no_ticket_id")
    if not ticket:
        raise MessageUndecodable("empty_ticket_id")
    if len(ticket) > LONGEST_TICKET:
        raise MessageUndecodable("ticket_id_too_long")
    try:
        ticket.decode()
    except UnicodeDecodeError:
        raise MessageUndecodable("ticket_id_not_utf8") from None
    return ticket


def unkeyed_ticket(stream_id: bytes) -> bytes:
    """The name under which a message without a ticket id is a ticket of its own (USHER_UNKEYED=spread).

    >>> unkeyed_ticket(b"5-1")
    b'\\xff5-1'
    """
    return _UNKEYED + stream_id


def ticket_text(ticket: bytes) -> str:
    """The ticket id as handlers, reports, logs and pages have it; "" for a message without one.

    >>> ticket_text(b"42"), ticket_text(unkeyed_ticket(b"5-1"))
    ('42', '')
    """
    return "" if ticket.startswith(_UNKEYED) else ticket.decode()


def first_value(fields: Sequence[bytes], name: bytes) -> bytes | None:
    """The value of the first field ``name`` in a flat list of names and values. First, not last: as the scripts read the ticket."""
    for at in range(0, len(fields), 2):
        if fields[at] == name:
            return fields[at + 1]
    return None


def as_mapping(fields: Sequence[bytes]) -> dict[str, str]:
    """Fields as text. Bytes that are not UTF-8 survive as surrogates: ``value.encode("utf-8", "surrogateescape")`` gives them back."""
    values = iter(fields)
    mapping: dict[str, str] = {}
    for name, value in zip(values, values, strict=True):
        mapping.setdefault(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
    return mapping
