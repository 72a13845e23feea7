"""Events that other threads post to the dispatcher, and the thread that learns from the stream ``changed`` what others
have changed.

A consumer that halts its ticket, and an operator who redrives or drops a dead letter, write the ticket's name there; so
do changes of rules and registrations of consumers. ``ChangeWatch`` waits with a plain XREAD (nothing is consumed) and
wakes the dispatcher, which looks there itself before it hands anything over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from usher.common.protocol.stream_id import ZERO
from usher.common.redis.client import Link
from usher.common.redis.replies import read_command
from usher.common.runtime.service import Service
from usher.master.membership.registry import RegisteredConsumer
from usher.master.policy.board.board import Board

#: Notes read at a time.
_NOTES = 1000


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
    """News that others have changed something, up to the note of this id."""

    until: bytes


#: The mapping is a new roster: all registered consumers, by incarnation.
DispatcherEvent = Report | ChangedElsewhere | dict[str, RegisteredConsumer]


class ChangeWatch(Service):
    """Service that waits for the names of tickets whose records others have changed, and for word of changed rules, of
    consumers that come and go, and of a leader that resigns or was elected. What it is the dispatcher reads itself,
    on the connection over which it hands over (leader_scripts.py: look)."""

    name = "changes"
    _BLOCK_MS = 5000

    def __init__(
        self,
        link: Link,
        changed_key: str,
        tell: Callable[[ChangedElsewhere], object],
        on_members: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._link = link
        self._key = changed_key
        self._tell = tell
        self._on_members = on_members
        self.on_leader: Callable[[], None] = lambda: None  # it has resigned: its lease is free; or another was elected
        # Start with old notes: to look once more costs next to nothing, to miss one costs time.
        self._after = ZERO

    def run_once(self) -> float:
        self.look(self._BLOCK_MS)
        return 0.0

    def look(self, block_ms: int | None) -> None:
        """Post what has changed since the last look. ``block_ms`` is how long to wait for it; None does not wait."""
        command = read_command(self._key, self._after, block_ms, _NOTES)
        reply = self._link.call(*command, block_s=(block_ms or 0) / 1000)
        if reply:
            entries = reply[0][1]
            self._tell(ChangedElsewhere(entries[-1][0]))
            if any(fields[0] == b"consumer" for _, fields in entries):
                self._on_members()
            if any(fields[0] == b"leader" for _, fields in entries):
                self.on_leader()
            self._after = entries[-1][0]

    def interrupt(self) -> None:
        self._link.interrupt()
