"""Views of the leader's memory of a ticket, for readers outside of it: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
