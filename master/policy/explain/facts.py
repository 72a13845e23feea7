"""Facts that an explanation is made of, and the explanation itself: plain values. Pure.

The document of an explanation (``GET /api/explain?id=``, ``usher tickets explain --json``)::

    {"ticket_id": "42", "time_ms": 1790000000000,
     "state": a TicketState, "summary": "one sentence", "sentences": ["...", ...],
     "reasons": [{"code": "handler_runs", "text": "..."}, ...],  # the first is what it waits for; texts as in sentences
     "waits_for": "the handler on c3" | null, "until_ms": 1790000004000 | null,      # null: unknown
     "entries": [{"id": "17-0", "state": a TicketState, "attempt": 2 | null, "started_ms": ... | null,
                  "due_ms": ... | null, "behind": "12-0" | null}, ...],              # 200 at most
     "attempts": 5, "charged": 3, "last_error": {...} | null, "traceback": "...",  # of its first message, as in lists
     "in_processing": 2, "parked": 5, "parked_is_exact": true, "unread": 0, "unread_is_exact": true,
     "owner": {"name": "c3", "incarnation": "c3:7", "state": "live", "lease_ms": 4000, "paused": false} | null,
     "fence": 88 | null, "max_attempts": 5 | null, "leader_url": "http://..." | null,
     "rules": [rule, ...], "dead_letter": letter | null,      # the one that a halted ticket waits for
     "last_dead_letter": letter | null,                       # the newest, of a ticket that has nothing else there
     "commands": [{"does": "runs it again", "command": "usher dead redrive ..."}, ...]}

``until_ms`` is the moment when what it waits for ends, or must have ended; in milliseconds since the epoch, like all
names that end with ``_ms``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from usher.common.protocol.attempts import NEVER, Attempts
from usher.common.protocol.last_error import LastError
from usher.master.policy.board.plans import BoardFacts
from usher.master.policy.letters import DeadLetter
from usher.master.policy.rules import Rule
from usher.master.policy.states import Queue, tried

#: Most entries that a document names.
MOST_SHOWN = 200


@dataclass(frozen=True)
class OwnerFacts:
    """The incarnation in the ticket's record. ``state``: live, draining, revoked, or "" when its lease has ended.
    ``successor``: the incarnation that has its name now, if that is another."""

    incarnation: str
    state: str
    lease_ms: int
    successor: str = ""
    paused: Rule | None = None

    @property
    def name(self) -> str:
        return self.incarnation.rpartition(":")[0] or self.incarnation


@dataclass(frozen=True)
class OwnEntry:
    """A message as its owner has it. ``state``: running, waiting (for its next attempt, until ``due_ms``), queued, or
    apart (it waits for a child process, as a suspect of a crash). ``attempt``: the one that runs, or the last one; 0:
    none. ``runs_apart``: it runs in a child process."""

    id: bytes
    state: str
    attempt: int = 0
    started_ms: int = 0
    due_ms: int = 0
    runs_apart: bool = False


@dataclass(frozen=True)
class OwnerTold:
    """The owner's answer to the question what it does with the ticket."""

    entries: tuple[OwnEntry, ...]
    max_attempts: int = 0


@dataclass(frozen=True)
class ConsumerTotals:
    """All consumers together. ``live`` ones take work, ``paused`` ones live and do not, ``starting`` ones have not
    renewed their lease yet. ``room``: messages that the living may yet be handed."""

    live: int = 0
    starting: int = 0
    paused: int = 0
    draining: int = 0
    revoked: int = 0
    room: int = 0

    @property
    def all(self) -> int:
        return self.live + self.starting + self.paused + self.draining + self.revoked


@dataclass(frozen=True)
class TicketFacts:
    """All that is known of a ticket at a moment. Ids are in id order; ``ids`` are those that its record names,
    ``parked`` and ``unread`` the others."""

    ticket_id: str
    now_ms: int
    kind: str = ""  # kind of its record: "" none, owned, returned, put_off, halted, unreadable
    fence: int = 0
    ids: tuple[bytes, ...] = ()
    owner: OwnerFacts | None = None
    told: OwnerTold | None = None
    attempts: Mapping[bytes, Attempts] = field(default_factory=dict)
    error: LastError | None = None  # the last error of its first message, and the end of its traceback
    traceback: str = ""
    parked: tuple[bytes, ...] = ()
    parked_is_exact: bool = True
    unread: tuple[bytes, ...] = ()
    unread_is_exact: bool = True
    lag: int = 0  # entries of all tickets that were not read
    has_group: bool = True
    leader: str | None = None  # its URL, "" where that is unknown; None: no master leads
    board: BoardFacts | None = None
    crowd: ConsumerTotals = ConsumerTotals()
    rules: tuple[Rule, ...] = ()  # rules that match the ticket, the one that holds first
    limit: Rule | None = None  # the least one
    letter: DeadLetter | None = None  # the letter that a halted ticket waits for
    last_letter: DeadLetter | None = None  # the ticket's newest letter
    lease_ms: int = 10_000  # the life of a consumer's lease
    letters_are_all: bool = True  # all letters were searched for those of the ticket, or one was found
    not_gathered: int = 0  # entries of all sources that are not in the work stream yet
    gathered_is_exact: bool = True  # all sources were looked at, and to their end
    by_stream: bool = False  # tickets of a work stream are called STREAM/ID
    refuses_writes: str = ""  # why Redis refuses writes, for people
    delayed: int = 0  # messages that wait for their time, when nothing else of the ticket is there
    delayed_is_exact: bool = True
    due_ms: int = 0  # when the first of them is due, or the ticket that was put off
    queue: Queue | None = None  # what waits for its turn

    @property
    def first(self) -> bytes:
        return next(iter((*self.ids, *self.parked)), b"")

    @property
    def of_record_parked(self) -> int:
        """Number of its record's entries that are under ``master``: all when they were given back, all but the first of
        a halted ticket."""
        return {"returned": len(self.ids), "put_off": len(self.ids), "halted": max(0, len(self.ids) - 1)}.get(
            self.kind, 0
        )

    @property
    def hidden(self) -> int:
        """Number of parked entries that only the leader's memory knows of. While a lost owner is recovered, memory has
        also parked what that owner had."""
        if self.board is None:
            return 0
        taken_back = len(self.ids) if self.kind == "owned" and self.board.standing == "recovering" else 0
        return max(0, self.board.parked - len(self.parked) - self.of_record_parked - taken_back)

    @property
    def all_parked(self) -> int:
        return self.of_record_parked + len(self.parked) + self.hidden

    @property
    def all_parked_is_exact(self) -> bool:
        """Return whether the entries read from Redis are all there are, or memory knows of more and has all."""
        return self.parked_is_exact if not self.hidden else self.board is not None and self.board.has_all


@dataclass(frozen=True)
class Reason:
    """A reason for the state: a word for programs, a sentence for people."""

    code: str
    text: str


@dataclass(frozen=True)
class TicketExplanation:
    """The result of ``explain``. ``waits_for``: "" when it waits for nothing; ``until_ms``: 0 when that is unknown."""

    facts: TicketFacts
    state: str
    reasons: tuple[Reason, ...]
    entries: tuple[dict[str, Any], ...]
    waits_for: str = ""
    until_ms: int = 0
    commands: tuple[tuple[str, str], ...] = ()

    def document(self) -> dict[str, Any]:
        facts, owner, texts = self.facts, self.facts.owner, [reason.text for reason in self.reasons]
        return {
            "ticket_id": facts.ticket_id,
            "time_ms": facts.now_ms,
            "state": self.state,
            "summary": texts[0],
            "sentences": texts,
            "reasons": [{"code": reason.code, "text": reason.text} for reason in self.reasons],
            **tried(facts.attempts.get(facts.first, NEVER), facts.error),
            "traceback": facts.traceback,
            "waits_for": self.waits_for or None,
            "until_ms": self.until_ms or None,
            "entries": list(self.entries[:MOST_SHOWN]),
            "in_processing": len(facts.ids) if facts.kind == "owned" else 0,
            "parked": facts.all_parked,
            "parked_is_exact": facts.all_parked_is_exact,
            "unread": len(facts.unread),
            "unread_is_exact": facts.unread_is_exact,
            "owner": None if owner is None else _owner(owner),
            "fence": facts.fence or None,
            "max_attempts": (facts.told.max_attempts or None) if facts.told is not None else None,
            "leader_url": facts.leader,
            "rules": [rule.shown() for rule in (*facts.rules, facts.limit) if rule is not None],
            "dead_letter": None if facts.letter is None else facts.letter.row(),
            "last_dead_letter": None if facts.last_letter is None else facts.last_letter.row(),
            "commands": [{"does": does, "command": command} for does, command in self.commands],
        }


def _owner(owner: OwnerFacts) -> dict[str, Any]:
    return {
        "name": owner.name,
        "incarnation": owner.incarnation,
        "state": owner.state or "lost",
        "lease_ms": owner.lease_ms,
        "paused": owner.paused is not None,
    }
