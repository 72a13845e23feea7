"""What others post to the dispatcher."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from master.policy.dispatch import Board
from master.roster import Member


@dataclass
class Report:
    """Acknowledgements of one incarnation, posted by an HTTP thread, which waits for ``answered``. ``fenced``: the incarnation has ended."""

    incarnation: str
    items: list[tuple[bytes, list[bytes]]]
    answers: list[list[str]] | None = None
    fenced: bool = False
    answered: threading.Event = field(default_factory=threading.Event)

    def answer(self, board: Board) -> None:
        """Free what is done, and say so to whoever waits."""
        self.answers = [board.acknowledged(self.incarnation, ticket, ids) for ticket, ids in self.items]
        self.fenced = self.incarnation not in board.consumers
        self.answered.set()


@dataclass(frozen=True)
class Changed:
    """Tickets whose records somebody else has changed; and whether the rules have changed."""

    tickets: frozenset[bytes]
    rules: bool = False


Posted = Report | Changed | dict[str, Member]
