"""Events that other threads post to the dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from usher.master.membership.registry import RegisteredConsumer
from usher.master.policy.board.board import Board


@dataclass
class Report:
    """Acknowledgements of one incarnation, posted by an HTTP thread, which may wait for ``answered``.

    ``answers``: None until the dispatcher has taken the report; empty when none are wanted. ``fenced``: the incarnation
    has ended. ``retrying``: tickets of it that wait for a retry.
    """

    incarnation: str
    items: Sequence[tuple[bytes, list[bytes]]]
    wants_answers: bool = True
    answers: list[list[str]] | None = None
    fenced: bool = False
    retrying: int = 0
    answered: threading.Event = field(default_factory=threading.Event)

    def answer(self, board: Board, now_s: float) -> None:
        """Free the messages that are done, and answer the waiting thread."""
        board.note_retrying(self.incarnation, self.retrying)
        if self.wants_answers:
            self.answers = [board.acknowledged(self.incarnation, ticket, ids, now_s) for ticket, ids in self.items]
        else:
            board.free(self.incarnation, self.items, now_s)
            self.answers = []
        self.fenced = self.incarnation not in board.consumers
        self.answered.set()


@dataclass(frozen=True)
class ChangedElsewhere:
    """Tickets whose records another client has changed; ``rules``: the rules have changed."""

    tickets: frozenset[bytes]
    rules: bool = False


#: The mapping is a new roster: all registered consumers, by incarnation.
DispatcherEvent = Report | ChangedElsewhere | dict[str, RegisteredConsumer]
