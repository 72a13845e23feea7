"""Plans, the replies of hand_over, and what readers outside are told of the leader's memory: plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from usher.common.protocol.owner_words import RETURNED
from usher.common.protocol.stream_id import rank

#: Head of a record that does not exist.
NOBODY = b""
#: How the head of a record begins whose ticket was given back (``owner_words.is_given_back``).
_GIVEN_BACK = (RETURNED + b" ", b"waits@")


def is_given_back_head(believed: bytes) -> bool:
    """Return whether the head of a record says that the ticket was given back: it has no owner, and has a record."""
    return believed.startswith(_GIVEN_BACK)


class TicketPlan(NamedTuple):
    """A ticket's ids in a plan. ``believed``: the head of its record (``owner fence``) as memory has it, ``NOBODY`` for
    none."""

    ticket: bytes
    believed: bytes
    ids: list[bytes]

    @property
    def changes_owner(self) -> bool:
        return self.believed == NOBODY or self.believed.startswith(_GIVEN_BACK)


class TargetPlan(NamedTuple):
    """All parts of a plan for one incarnation."""

    incarnation: str
    parts: list[TicketPlan]


class HandOverPlan(NamedTuple):
    """The plan of one hand_over call. All its ids lie between ``lowest`` and ``highest``."""

    targets: list[TargetPlan]
    size: int
    lowest: bytes
    highest: bytes


#: Plan when nothing can be handed over.
NOTHING = HandOverPlan([], 0, b"-", b"+")


def span(planned: Iterable[list[TicketPlan]]) -> tuple[bytes, bytes]:
    """Return the lowest and the highest id of all parts; worth its cost only when much more is parked than is
    planned."""
    parts = [part for target in planned for part in target]
    return min((part.ids[0] for part in parts), key=rank), max((part.ids[-1] for part in parts), key=rank)


class TargetReply(NamedTuple):
    """Answer of hand_over for a target: its state, refused tickets, ids that are over, tickets that got a new fence
    after all."""

    state: str
    refused: list[bytes]
    gone: list[bytes]
    fresh: list[bytes]


class HandOverReply(NamedTuple):
    """Reply of a hand_over call. ``fence``: the number of the call, 0 if it gave none. ``cut``: number of entries that
    were cut from the stream, unread, before the new ones. ``missing``: refused tickets of which nobody has an entry
    pending any more, although nobody of ours has ended it. ``newest``: bytes of the newest entry of the stream, if it
    is read on."""

    fence: int
    targets: tuple[TargetReply, ...]
    cut: int = 0
    missing: tuple[bytes, ...] = ()
    newest: int = 0


@dataclass(frozen=True)
class ReplyFollowUp:
    """Follow-up that a reply asks for: lost consumers, tickets to read again, and whether memory must be dropped."""

    lost: tuple[str, ...] = ()
    unsure: tuple[bytes, ...] = ()
    doubt: bool = False


class Parked(NamedTuple):
    """Number of a ticket's messages that are pending under ``master``. Not exact: at least this many."""

    messages: int = 0
    is_exact: bool = False


@dataclass(frozen=True)
class BoardFacts:
    """A ticket as the leader remembers it, when it is this master. ``standing``: see master/policy/board/tickets.py.
    ``due_ms``: when a slowed or waiting ticket goes on. ``recalled_for``: the consumer for which it was asked back.
    ``turn``: why it does not have its turn, if that is known. ``is_full``: so many entries wait that no more are
    read."""

    standing: str
    parked: int
    has_all: bool
    window_is_full: bool = False
    due_ms: int = 0
    recalled_for: str = ""
    turn: str = ""
    tenant: bytes = b""
    is_full: bool = False
