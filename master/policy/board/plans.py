"""Plans, and what readers outside are told of the leader's memory: plain values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from usher.common.protocol.ticket_states import RETURNED

#: Head of a record that does not exist.
NOBODY = b""
#: How the head of a record begins whose ticket was given back (``ticket_states.is_given_back``).
_GIVEN_BACK = (RETURNED + b" ", b"waits@")


class TicketPlan(NamedTuple):
    """A ticket's ids in a plan. ``believed``: the head of its record (``owner fence``) as memory has it, ``NOBODY`` for
    none. ``held``: what its owner has of it already."""

    ticket: bytes
    believed: bytes
    ids: list[bytes]
    held: Sequence[bytes] = ()

    @property
    def changes_owner(self) -> bool:
        return self.believed == NOBODY or self.believed.startswith(_GIVEN_BACK)


#: Makes one of a tuple of all its parts, at half the cost.
TICKET_PLAN = functools.partial(tuple.__new__, TicketPlan)


class TargetPlan(NamedTuple):
    """All parts of a plan for one incarnation."""

    incarnation: str
    parts: list[TicketPlan]


class HandOverPlan(NamedTuple):
    """The plan of a turn, with the number of its messages."""

    targets: list[TargetPlan]
    size: int


#: Plan when nothing can be handed over.
NOTHING = HandOverPlan([], 0)


class Parked(NamedTuple):
    """Number of a ticket's messages that are pending under ``master``. Not exact: at least this many."""

    messages: int = 0
    is_exact: bool = False


@dataclass(frozen=True)
class BoardFacts:
    """A ticket as the leader remembers it, when it is this master. ``standing``: see master/policy/board/tickets.py.
    ``due_ms``: when a slowed or waiting ticket goes on. ``recalled_for``: the consumer for which it was asked back.
    ``turn``: why it does not have its turn, if that is known. ``is_full``: so many entries wait that no more are
    read. ``first``: the first of what is parked."""

    standing: str
    parked: int
    has_all: bool
    window_is_full: bool = False
    due_ms: int = 0
    recalled_for: str = ""
    turn: str = ""
    tenant: bytes = b""
    is_full: bool = False
    first: tuple[bytes, ...] = ()
