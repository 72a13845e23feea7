"""Say what the leader's memory has of a ticket, for those who ask from outside: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Parked(NamedTuple):
    """Count the messages of a ticket that are pending under ``master``. Not exact: at least so many."""

    messages: int = 0
    is_exact: bool = False


@dataclass(frozen=True)
class BoardFacts:
    """Describe a ticket as the leader remembers it, when it is this master. ``standing``: see
    master/policy/board/tickets.py. ``due_ms``: when a slowed ticket goes on."""

    standing: str
    parked: int
    has_all: bool
    window_is_full: bool = False
    due_ms: int = 0
