"""Events that other threads post to the dispatcher, and the thread that learns from the stream ``changed`` what others
have changed.

A consumer that halts its ticket, and an operator who redrives or drops a dead letter, write the ticket's name there; so
do changes of rules and registrations of consumers. ``ChangeWatch`` waits with a plain XREAD (nothing is consumed) and
wakes the dispatcher, which looks there itself before it hands anything over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson

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


def report_of(body: bytes, retrying: int) -> Report:
    """Return the report that a consumer made for a master, as one that wants no answers. Raises ValueError, KeyError
    and the like for what is none."""
    told = orjson.loads(body)
    items = [
        (one["ticket_id"].encode(), [entry_id.encode() for entry_id in one["message_ids"]]) for one in told["tickets"]
    ]
    return Report(str(told["incarnation"]), items, wants_answers=False, retrying=retrying)


#: Bytes: others have changed something, up to the note of this id. The mapping is a new roster: all registered
#: consumers, by incarnation.
DispatcherEvent = Report | bytes | dict[str, RegisteredConsumer]


class ChangeWatch(Service):
    """Service that waits for the names of tickets whose records others have changed, and for word of changed rules, of
    consumers that come and go, and of a leader that resigns or was elected. What it is the dispatcher reads itself,
    on the connection over which it hands over (leader_scripts.py: look). While ``leads`` says so, it also passes on the
    reports of consumers that know no master's URL."""

    name = "changes"
    waits_on_link = True
    _BLOCK_MS = 5000

    def __init__(
        self,
        link: Link,
        changed_key: str,
        tell: Callable[[bytes | Report], object],
        on_members: Callable[[], None] = lambda: None,
        reports_key: str = "",
        leads: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._link = link
        self._key = changed_key
        self._tell = tell
        self._on_members = on_members
        self.on_leader: Callable[[], None] = lambda: None  # it has resigned: its lease is free; or another was elected
        self._reports_key, self._leads = reports_key, leads
        # Start with old notes: to look once more costs next to nothing, to miss one costs time.
        self._after = self._reported = ZERO

    def run_once(self) -> float:
        self.look(self._BLOCK_MS)
        return 0.0

    def look(self, block_ms: int | None) -> None:
        """Post what has changed since the last look. ``block_ms`` is how long to wait for it; None does not wait."""
        command = read_command(self._key, self._after, block_ms, _NOTES)
        if self._leads():
            command = (*command[:-2], self._key, self._reports_key, self._after, self._reported)
        else:
            self._reported = self._after  # it is our election, of which a note comes, that makes others' reports ours
        for key, entries in self._link.call(*command, block_s=(block_ms or 0) / 1000) or ():
            if key != self._key.encode():
                self._pass_on(entries)
                continue
            self._tell(entries[-1][0])
            if any(fields[0] == b"consumer" for _, fields in entries):
                self._on_members()
            if any(fields[0] == b"leader" for _, fields in entries):
                self.on_leader()
            self._after = entries[-1][0]

    def _pass_on(self, entries: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        for entry_id, fields in entries:
            self._reported = entry_id
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, IndexError):  # a stranger's
                self._tell(report_of(fields[1], int(fields[0])))
