"""Say what the leader asks of hand_over, and what hand_over answers: plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from usher.common.protocol.stream_id import rank

#: The head of a record that is not there.
NOBODY = b""
#: The owner in the record of a ticket that a drain gave back.
RETURNED = b"returned"
#: The owner in the record of a ticket that waits for an operator.
HALTED = b"halted"
#: The owner in the record of a ticket whose tail goes to the dead letters.
TAIL = b"tail"


class TicketPlan(NamedTuple):
    """Name a ticket's ids in a plan. ``believed``: the head of its record (``owner fence``) as memory has it,
    ``NOBODY`` for none."""

    ticket: bytes
    believed: bytes
    ids: list[bytes]

    @property
    def changes_owner(self) -> bool:
        """Tell whether the ticket gets an owner by this hand-over, and with it a new fence."""
        return self.believed == NOBODY or self.believed.startswith(RETURNED + b" ")


class TargetPlan(NamedTuple):
    """Gather all parts for one incarnation."""

    incarnation: str
    parts: list[TicketPlan]


class HandOverPlan(NamedTuple):
    """Ask one call of hand_over for this. All its ids lie between ``lowest`` and ``highest``."""

    targets: list[TargetPlan]
    size: int
    lowest: bytes
    highest: bytes


#: The plan when nothing can be handed over.
NOTHING = HandOverPlan([], 0, b"-", b"+")


def span(planned: Iterable[list[TicketPlan]]) -> tuple[bytes, bytes]:
    """Find the lowest and the highest id of all parts; worth its cost only when much more is parked than is planned."""
    parts = [part for target in planned for part in target]
    return min((part.ids[0] for part in parts), key=rank), max((part.ids[-1] for part in parts), key=rank)


class TargetReply(NamedTuple):
    """Answer for a target: its state, refused tickets, ids that are over, tickets that got a new fence after all."""

    state: str
    refused: list[bytes]
    gone: list[bytes]
    fresh: list[bytes]


class HandOverReply(NamedTuple):
    """Answer a call of hand_over. ``fence``: the number of the call, 0 if it gave none."""

    fence: int
    targets: tuple[TargetReply, ...]


@dataclass(frozen=True)
class ReplyFollowUp:
    """Name what a reply asks for: lost consumers, tickets to read again, and whether memory must be dropped."""

    lost: tuple[str, ...] = ()
    unsure: tuple[bytes, ...] = ()
    doubt: bool = False
