"""Validation of entries that were peeked at, or read under ``master``: which can be handed over, and which cannot."""

from __future__ import annotations

from collections.abc import Iterable

from usher.common.base.errors import MessageUndecodable
from usher.common.protocol.message import LONGEST_TICKET, check_ticket
from usher.master.leader.leader_scripts import Rejected
from usher.master.leader.peeked import PeekedEntry

#: Most bytes shown of a ticket id that cannot be used.
_SHOWN = 64
#: The reason of entries above USHER_LONGEST_MESSAGE_BYTES.
TOO_LARGE = "too_large"


def partition_entries(found: Iterable[PeekedEntry]) -> tuple[list[tuple[bytes, bytes]], list[Rejected]]:
    """Return (id, ticket) of the entries that can be handed over, and those that must become dead letters, each with
    its reason."""
    usable: list[tuple[bytes, bytes]] = []
    rejected: list[Rejected] = []
    for entry in found:
        if entry.size:
            rejected.append(Rejected(entry.id, (entry.ticket or b"")[:LONGEST_TICKET], TOO_LARGE))
            continue
        try:
            usable.append((entry.id, check_ticket(entry.ticket)))
        except MessageUndecodable as why:
            rejected.append(Rejected(entry.id, (entry.ticket or b"")[:_SHOWN], why.reason))
    return usable, rejected
