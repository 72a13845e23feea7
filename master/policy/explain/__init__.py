"""Explain what a ticket waits for, and until when. A pure function: facts in, named reasons and sentences out.

Every state of the protocol has its words here; the first reason is the one that decides. What cannot be known is said
to be unknown.

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

Stuck tickets: those that are stuck or retrying, described for people; those in the same trouble (same state, same
error) are one group. Alarms: what needs attention, one sentence each, the worst first, for a person on call.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from usher.common.base.text import label, pluralize, span, time_of_day
from usher.common.doctor.judgements import NEARLY_FULL
from usher.common.protocol.attempts import GIVEN_UP, NEVER, Attempts, attempts_told
from usher.common.protocol.last_error import LastError
from usher.common.protocol.registration import name_of
from usher.common.protocol.stream_id import milliseconds
from usher.common.protocol.ticket_states import TicketState
from usher.master.policy.board.plans import BoardFacts, Parked
from usher.master.policy.letters import DeadLetter
from usher.master.policy.rules import Rule, RuleAction, Target
from usher.master.policy.states import (
    BAD,
    BY_NAME,
    LISTED,
    OUTAGE,
    WARN,
    Queue,
    Seen,
    last_error,
    last_known,
    ticket_state,
    told_alike,
    tried,
)
from usher.master.policy.ticket_orders import LETTER_UNKNOWN

#: Codes of what a ticket waits for while others are handled.
_QUEUES = ("waits_for_turn", "consumers_full", "waiting_limit")
#: Words for a leader's lease plus the time to take over, within which a dead leader has a successor; not for decisions.
_SOON = "within moments"
_MOMENTS_S = 2.0
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

    def document(self) -> dict[str, Any]:
        told: dict[str, Any] = {"name": self.name, "incarnation": self.incarnation, "state": self.state or "lost"}
        return told | {"lease_ms": self.lease_ms, "paused": self.paused is not None}


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
    crowd: Counter[str] = field(
        default_factory=Counter
    )  # consumers that are not lost, by state; ``live`` ones take work
    room: int = 0  # messages that the live ones may yet be handed
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


class Reason(NamedTuple):
    """A reason: a word for programs, a sentence for people. Of the first one: the ticket's ``state``, what it waits for
    ("": nothing), and until when (0: that is unknown). ``ways``: what a command does, and the command."""

    code: str
    text: str
    state: str = ""
    waits_for: str = ""
    until_ms: int = 0
    ways: Sequence[tuple[str, str]] = ()


def explain(facts: TicketFacts) -> dict[str, Any]:
    """Return what the ticket waits for, as a document. Never raises, whatever the facts are: they come from Redis,
    where anybody may have written."""
    first, *others = _explained(facts)
    state, waits_for, until_ms = first.state, first.waits_for, first.until_ms
    reasons, rules = [first, *_last_error(facts), *_lost_with_it(facts), *others], list(facts.rules)
    if facts.limit is not None:
        rules.append(facts.limit)
        over = "newer ones become dead letters (over_limit)"
        reasons.append(Reason("limit", f"the ticket is {facts.limit.told()}: {over}"))
    if facts.refuses_writes and BY_NAME[TicketState(state)].needs_writes:
        reasons.insert(0, Reason("redis_refuses_writes", f"the ticket does not move: {facts.refuses_writes}"))
        waits_for, until_ms = "Redis to take writes again", 0
    texts, owner = [reason.text for reason in reasons], facts.owner
    ways = [way for reason in reasons for way in reason.ways]
    for rule in rules:
        lifts = f"lifts the rule of {rule.target.value} {rule.value}".rstrip()
        ways.append((lifts, f"usher rules lift {shlex.quote(rule.id)}"))
    return {
        "ticket_id": facts.ticket_id,
        "time_ms": facts.now_ms,
        "state": state,
        "summary": texts[0],
        "sentences": texts,
        "reasons": [{"code": reason.code, "text": reason.text} for reason in reasons],
        **tried(facts.attempts.get(facts.first, NEVER), facts.error),
        "traceback": facts.traceback,
        "waits_for": waits_for or None,
        "until_ms": until_ms or None,
        "entries": list(_rows(facts))[:MOST_SHOWN],
        "in_processing": len(facts.ids) if facts.kind == "owned" else 0,
        "parked": facts.all_parked,
        "parked_is_exact": facts.all_parked_is_exact,
        "unread": len(facts.unread),
        "unread_is_exact": facts.unread_is_exact,
        "owner": None if owner is None else owner.document(),
        "fence": facts.fence or None,
        "max_attempts": (facts.told.max_attempts or None) if facts.told is not None else None,
        "leader_url": facts.leader,
        "rules": [rule.shown() for rule in rules],
        "dead_letter": None if facts.letter is None else facts.letter.row(),
        "last_dead_letter": None if facts.last_letter is None else facts.last_letter.row(),
        "commands": [{"does": does, "command": command} for does, command in ways],
    }


def _last_error(facts: TicketFacts) -> Iterator[Reason]:
    error = last_error(facts.attempts.get(facts.first, NEVER), facts.error)
    if error is not None and facts.kind != "halted":
        when = f", {_ago(facts, error.at_ms)}" if error.at_ms else ""
        yield Reason("last_error", f"last error: {error.told}{when} (start {error.starts})")


def _lost_with_it(facts: TicketFacts) -> Iterator[Reason]:
    """Tell how many processes in a row ended while they ran the ticket's first message: it may be what ends them. Of an
    owner that only fell silent nothing is told: Redis may have been away, or somebody restarted it."""
    first = facts.first
    known = facts.attempts.get(first, NEVER)
    if known.crashes:
        ended = "process that ran it" if known.crashes == 1 else f"{known.crashes} processes"
        text = f"{_id(first)} may end or freeze its process. The last {ended} ended meanwhile"
        yield Reason("owners_lost", f"{text}, so fewer and fewer others run beside it.")


def _explained(facts: TicketFacts) -> Iterator[Reason]:
    if facts.kind == "unreadable":
        return _unreadable(facts)
    if facts.kind == "halted":
        return _halted(facts)
    if (
        facts.kind == "put_off"
        and facts.leader is not None
        and (facts.due_ms > facts.now_ms or (facts.board is not None and facts.board.standing == "waiting"))
    ):
        return _put_off(facts)
    if facts.kind == "owned" and facts.owner is not None:
        return _owned(facts, facts.owner) if facts.owner.state else _lost(facts, facts.owner)
    given_back = facts.kind in ("returned", "put_off")
    if given_back or facts.parked or (facts.board is not None and facts.board.parked):
        return _waiting(facts, TicketState(facts.kind) if given_back else TicketState.WAITING)
    if facts.unread:
        return _waiting(facts, TicketState.UNREAD)
    return _nothing(facts)


# ---- an owner has it -------------------------------------------------------------------------------------------------


def _owned(facts: TicketFacts, owner: OwnerFacts) -> Iterator[Reason]:
    told = {entry.id: entry for entry in facts.told.entries} if facts.told is not None else {}
    head = next((told[entry_id] for entry_id in facts.ids if entry_id in told), None)
    run = next((entry for entry in told.values() if entry.state == "running"), None) or head
    yield _doing(facts, owner, run)
    if facts.board is not None and facts.board.recalled_for:
        text = f"the leader recalls it from {owner.name} for {facts.board.recalled_for}, which has nothing to do"
        yield Reason("recalled", f"{text}, unless it has started by now")
    yield from _lease(facts, owner)
    yield from _behind(facts, run.id if run is not None else _first_of_record(facts))
    if facts.parked or (facts.board is not None and facts.board.parked) or facts.unread or facts.rules:
        yield from _later(facts, owner)


def _doing(facts: TicketFacts, owner: OwnerFacts, run: OwnEntry | None) -> Reason:
    name, fence = owner.name, f"fencing token {facts.fence}"
    if run is None:
        first = _first_of_record(facts)
        before = facts.attempts.get(first, NEVER)
        past = f"; attempts before: {attempts_told(before.starts, before.failures)}" if before.starts else ""
        text = f"{_id(first)} was handed over to {name}{_since_fence(facts)} ({fence}{past})"
        if facts.told is not None:
            text = f"{text}; it is on its way into a lane there, or has just ended"
            return Reason("on_the_way", text, TicketState.HANDED_OVER, name)
        silent = f"{name} did not say whether it runs: if it is dead, others get the ticket once its lease has ended"
        return Reason("owner_silent", f"{text}; {silent}", TicketState.HANDED_OVER, name)
    what, known, most = _id(run.id), facts.attempts.get(run.id, NEVER), facts.told.max_attempts if facts.told else 0
    if run.state == "running":
        code, text = "handler_runs", f"{what} has run on {name} for {_for(facts, run.started_ms)}"
        attempt = f"{_attempt(run.attempt, known.failures + 1, most)}, {fence}"
        if run.runs_apart:
            code, text = "suspect_runs", f"{text}, in a process of its own"
            attempt = f"{attempt}. {_suspicion(facts, run.id)}."
        return Reason(code, f"{text}: {attempt}", TicketState.RUNNING, f"the handler on {name}")
    if run.state == "waiting":
        due = span(run.due_ms - facts.now_ms)
        its_next = TicketState.RETRYING, f"its next attempt on {name}", run.due_ms
        if not run.attempt:
            text = f"{what} waits on {name} ({fence}): its handler's rate lets it start in {due}"
            return Reason("handler_rate", text, TicketState.HANDED_OVER, f"its turn on {name}", run.due_ms)
        if alike := told_alike(facts.error):
            text = f"{what} ({name}, {fence}) {alike}. Its turn comes in {due}."
            return Reason("fails_alike", text, TicketState.RETRYING, "a try that succeeds", run.due_ms)
        if known.put_off:
            text = f"{what} asked {name} ({fence}) to call it again in {due} (start {run.attempt})"
            return Reason("retry_later", text, *its_next)
        failed = f"{what}: {_attempt(run.attempt, known.failures, most)} failed on {name} ({fence})"
        return Reason("retry_backoff", f"{failed}. Next attempt in {due}.", *its_next)
    if run.state == "apart":
        text = f"{what} waits on {name} ({fence}) for a process of its own. {_suspicion(facts, run.id)}."
        return Reason("suspect_apart", text, TicketState.HANDED_OVER, f"a process of its own on {name}")
    text = f"{what} was handed over to {name}{_since_fence(facts)} ({fence}) and waits there for a free handler slot"
    return Reason("waits_for_slot", text, TicketState.HANDED_OVER, f"a handler slot on {name}")


def _suspicion(facts: TicketFacts, entry_id: bytes) -> str:
    known = facts.attempts.get(entry_id, NEVER)
    if known.crashes:
        return f"Its process ended {pluralize(known.crashes, 'time')} while it ran"
    return f"{pluralize(known.losses, 'consumer')} in a row were lost when it was the next of its ticket"


def _attempt(start: int, number: int, most: int) -> str:
    """Name an attempt: the start that it is (or was), if others were not charged."""
    told = f"attempt {number:,}{f' of {most:,}' if most else ''}" if number else "an uncharged attempt"
    told = "the last attempt, given up by an operator" if number >= GIVEN_UP else told
    return told if start == number else f"{told} (start {start:,})"


def _lease(facts: TicketFacts, owner: OwnerFacts) -> Iterator[Reason]:
    ends = span(owner.lease_ms)
    if owner.state == "draining":
        text = "it starts no more messages of the ticket, and gives back those that do not run"
        yield Reason("owner_draining", f"consumer {owner.name} drains: {text}; else its lease ends in {ends}")
    elif owner.state == "revoked":
        text = "did not answer at its health URL, so its lease was revoked: others get the ticket in"
        yield Reason("owner_revoked", f"{owner.name} {text} {ends}")
    else:
        yield Reason("lease", f"the lease of {owner.name} ends in {ends} unless it is renewed")
    if owner.paused is not None:
        text = f"drained consumer {owner.name}{owner.paused.reason and ': '}{owner.paused.reason}"
        later = "it finishes what it has, and others get what comes later"
        yield Reason("owner_paused", f"{owner.paused.who or 'somebody'} {text}: {later}")


def _lost(facts: TicketFacts, owner: OwnerFacts) -> Iterator[Reason]:
    first = _first_of_record(facts)
    died = f"consumer {owner.name} died with {_id(first)}"
    if facts.leader is None:
        yield Reason("owner_lost", f"{died}: its lease has ended", TicketState.RECOVERING, "a master that leads")
        yield _no_leader()
        return
    by = f"the leader {facts.leader} takes its messages back, oldest first, and hands them over under a new fencing"
    by = f"{by} token, in {span(facts.lease_ms)} at the latest"
    successor = f"; {owner.successor} has its name now and gets the ticket first" if owner.successor else ""
    text, until_ms = f"{died} (fencing token {facts.fence}): {by}{successor}", facts.now_ms + facts.lease_ms
    yield Reason("owner_lost", text, TicketState.RECOVERING, "its recovery by the leader", until_ms)
    yield from _behind(facts, first)


# ---- nobody has it ---------------------------------------------------------------------------------------------------


def _waiting(facts: TicketFacts, where: str) -> Iterator[Reason]:
    rule = facts.rules[0] if facts.rules else None
    first = next(iter((*facts.ids, *facts.parked, *facts.unread)), b"")
    what = _id(first) if first else "its next message"
    is_held = where != TicketState.UNREAD or (rule is not None and rule.target in (Target.STREAM, Target.EVERYTHING))
    obstacle = _obstacle(facts, rule, what, where)
    state = TicketState.PAUSED if obstacle.code == "rule_pause" and is_held else where
    if where == TicketState.WAITING and obstacle.code in _QUEUES and facts.queue is not None:
        state = TicketState.QUEUED
    yield obstacle._replace(state=state)
    yield from (*_place(facts, first, what, where), *_behind(facts, first))
    if not obstacle.code.startswith("rule_"):
        yield from _rule_too(facts)


def _put_off(facts: TicketFacts) -> Iterator[Reason]:
    """Explain a ticket that was given back until a time, which Redis keeps: no consumer and no restart shortens it."""
    first, due = _first_of_record(facts), span(facts.due_ms - facts.now_ms)
    known, until = facts.attempts.get(first, NEVER), f"{time_of_day(facts.due_ms)}, in {due}"
    if alike := told_alike(facts.error):
        text = f"{_id(first)} {alike}. Its turn comes in {due} at the latest."
        yield Reason("fails_alike", text, TicketState.RETRYING, "a try that succeeds", facts.due_ms)
    elif known.failures:
        attempt = _attempt(known.starts, known.failures, facts.error.most if facts.error is not None else 0)
        text = f"{_id(first)}: {attempt} failed. Next attempt at {until}."
        yield Reason("put_off", text, TicketState.RETRYING, "its time", facts.due_ms)
    else:
        text = f"asked to be called again at {until}" if known.starts else f"waits until {until}: {OUTAGE}"
        yield Reason("put_off", f"{_id(first)} {text}", TicketState.PUT_OFF, "its time", facts.due_ms)
    yield from (*_behind(facts, first), *_rule_too(facts))


def _place(facts: TicketFacts, first: bytes, what: str, where: str) -> Iterator[Reason]:
    if where == TicketState.RETURNED:
        how = f"the ticket's next owner begins with it, under a fencing token above {facts.fence}"
        yield Reason("returned", f"{what} was given back, by a drain, a recall or a redrive: {how}")
    elif where == TicketState.PUT_OFF:
        yield Reason("was_put_off", f"its handler had asked to be called again at {time_of_day(facts.due_ms)}")
    elif where == TicketState.WAITING:
        yield Reason("parked", f"the leader has read {what}{_sent(facts, first)}, and no consumer has it")
    else:
        lag = f"{pluralize(facts.lag, 'entry', 'entries')} of all tickets {'is' if facts.lag == 1 else 'are'} unread"
        yield Reason("unread", f"the leader has not read {what}{_sent(facts, first)} yet; {lag}")


def _obstacle(facts: TicketFacts, rule: Rule | None, what: str, where: str) -> Reason:
    crowd, board = facts.crowd, facts.board or BoardFacts("", 0, False)
    is_slowed = rule is not None and rule.action is RuleAction.SLOW
    if facts.leader is None:
        return _no_leader()
    if rule is not None and rule.action is RuleAction.PAUSE:
        text = f"{what} waits because the ticket is {rule.told()}"
        return Reason("rule_pause", text, waits_for="the rule to be lifted")
    if not facts.has_group:
        text = "the consumer group is gone: the leader makes it again, where it was"
        return Reason("no_group", text, waits_for="the group")
    if not crowd.total():
        text = f"{what} waits for a consumer, and none is alive (is `usher consumer` running?)"
        return Reason("no_consumers", text, waits_for="a consumer")
    if not crowd["live"]:
        told = ", ".join(f"{crowd[state]} {state}" for state in ("starting", "paused", "draining", "revoked"))
        way = "; `usher consumers resume NAME` ends an operator's drain" if crowd["paused"] else ""
        text = f"{what} waits: of {pluralize(crowd.total(), 'consumer')} none takes work ({told}){way}"
        return Reason("none_accepts", text, waits_for="a consumer that takes work")
    if rule is not None and is_slowed and board.due_ms:
        text = f"{what} waits {span(board.due_ms - facts.now_ms)} more: the ticket is {rule.told()}"
        return Reason("rule_slow", text, waits_for="its turn by the rule", until_ms=board.due_ms)
    queue = facts.queue if facts.queue is not None and facts.queue.seconds > _MOMENTS_S else None
    behind = f"; {queue.text}" if queue is not None else ""
    if board.turn:
        text = f"{what} waits for its turn: {board.turn}{behind}"
        return Reason("waits_for_turn", text, waits_for="its turn", until_ms=board.due_ms)
    if where == TicketState.UNREAD and board.is_full:
        text = f"the leader does not read {what} yet: it has as many waiting messages as it may"
        return Reason("waiting_limit", text, waits_for="others to be done")
    if facts.room <= 0:
        text = f"{what} waits for room: {pluralize(crowd['live'], 'consumer')} that take work, all full{behind}"
        return Reason("consumers_full", text, waits_for="room on a consumer")
    if queue is not None and where != TicketState.UNREAD:
        return Reason("waits_for_turn", f"{what} waits for its turn {queue.text}", waits_for="its turn")
    if board.standing not in ("", "open"):
        text = f"{what} waits until the leader has found out who has the ticket ({board.standing})"
        return Reason("leader_unsure", text, waits_for="the leader")
    if where == TicketState.UNREAD:
        text = f"the leader {facts.leader} has not come to {what} yet: it reads the stream in order"
        return Reason("lag", text, waits_for="the leader to read it")
    slowed = f", as fast as its rule lets it ({rule.told()})" if rule is not None and is_slowed else ""
    text = f"the leader {facts.leader} hands {what} over {_SOON}{slowed}"
    return Reason("about_to_move", text, waits_for="the leader")


def _no_leader() -> Reason:
    text = "no master leads, so nothing moves (is `usher master` running?)"
    return Reason("no_leader", text, waits_for="a master that leads")


# ---- an operator's business ------------------------------------------------------------------------------------------


def _halted(facts: TicketFacts) -> Iterator[Reason]:
    first, letter, ticket = _first_of_record(facts), facts.letter, shlex.quote(facts.ticket_id)
    text = f"halted: {_id(first)} became a dead letter that was not found"
    if letter is not None:
        when = f"{_ago(facts, letter.written_ms)} after {pluralize(letter.attempts, 'attempt')}"
        text = f"halted: {_id(first)} became a dead letter {when} ({letter.why})"
    is_gone = letter is None and facts.letters_are_all
    ways = (
        ("runs it again, then what is behind it", f"usher dead redrive --all --ticket {ticket}"),
        ("goes on without it", f"usher dead drop --all --ticket {ticket}"),
        *((("runs it again where that letter is gone", f"usher tickets retry {ticket}"),) if is_gone else ()),
    )
    halted = TicketState.HALTED, "an operator: redrive or drop its dead letter", 0, ways
    yield Reason("halted", f"{text}; the ticket waits for an operator", *halted)
    yield from _behind(facts, first)
    if letter is None and not is_gone:
        yield Reason(LETTER_UNKNOWN, "that letter may be there all the same: not all were searched")
    if facts.leader is None:
        yield _no_leader()
    yield from _rule_too(facts, "a rule holds too, also after that")


def _unreadable(facts: TicketFacts) -> Iterator[Reason]:
    text = "the ticket's record in the index cannot be read (did somebody write it by hand?): repair or delete it, and"
    command = f"redis-cli HDEL <prefix>:tickets {shlex.quote(facts.ticket_id)}"
    way = ("forgets the record; the sweep finds its pending entries again", command)
    text = f"{text} the ticket moves again"
    yield Reason("record_unreadable", text, TicketState.UNREADABLE, "an operator", ways=(way,))


def _nothing(facts: TicketFacts) -> Iterator[Reason]:
    if facts.delayed:
        at_least, are = "" if facts.delayed_is_exact else "at least ", "is" if facts.delayed == 1 else "are"
        due = f"due in {span(facts.due_ms - facts.now_ms)}" if facts.due_ms > facts.now_ms else "due now"
        first, many = "" if facts.delayed == 1 else "the first is ", pluralize(facts.delayed, "message")
        lists = f"usher delayed list --ticket {shlex.quote(facts.ticket_id)}"
        delayed = TicketState.DELAYED, "its time", facts.due_ms, [("shows them; `usher delayed drop` ends them", lists)]
        yield Reason("delayed", f"{at_least}{many} of the ticket {are} delayed, {first}{due}", *delayed)
        if facts.leader is None:
            yield _no_leader()
    sure = facts.unread_is_exact and facts.parked_is_exact and not facts.not_gathered and facts.gathered_is_exact
    letter, code = facts.last_letter, "not_looked_through"
    if facts.not_gathered:
        at_least = "" if facts.gathered_is_exact else "at least "
        waits = f"{at_least}{pluralize(facts.not_gathered, 'entry waits', 'entries wait')} in the ticket streams to be"
        text = f"the ticket has nothing in the work stream; {waits} gathered, and some may belong to it"
        code = "not_gathered"
    elif sure:
        ends = "" if letter is not None else ": everything is finished, or nothing was ever sent"
        if not facts.letters_are_all:
            ends = "; it may have a dead letter: not all were searched"
        code, text = "nothing_to_do", f"the ticket has nothing unread, waiting or in processing{ends}"
    elif facts.unread_is_exact and facts.parked_is_exact:
        text = "nothing of the ticket was found; not all ticket streams were searched, so it may wait in one"
        text = f"{text} to be gathered"
    else:
        text = "the ticket has nothing in processing; more is unread or waiting than was searched, so it may be further"
        text = f"{text} behind"
    yield Reason(code, text, TicketState.IDLE if sure else TicketState.NOT_FOUND)
    if facts.by_stream and "/" not in facts.ticket_id:
        of_streams = "with several streams, ask for STREAM/ID"
        yield Reason("by_stream", f"{of_streams}, such as shop:3/{facts.ticket_id}")
    if letter is not None:
        how = f"{_ago(facts, letter.written_ms)} ({letter.why})"
        way = ("runs it again, as a new message", f"usher dead redrive {_id(letter.id)}")
        text = f"its message {_id(letter.message_id)} became a dead letter {how}"
        yield Reason("has_dead_letter", text, ways=(way,))
    yield from _rule_too(facts, "a rule waits for it")


# ---- words -----------------------------------------------------------------------------------------------------------


def _first_of_record(facts: TicketFacts) -> bytes:
    return facts.ids[0] if facts.ids else b"?"


def _later(facts: TicketFacts, owner: OwnerFacts) -> Iterator[Reason]:
    rule = facts.rules[0] if facts.rules else None
    if rule is not None:
        text = f"{owner.name} goes on with what it has; the ticket's other messages are {rule.told()}"
        yield Reason(f"rule_{rule.action.value}", text)
    elif facts.board is not None and facts.board.window_is_full:
        text = "the owner has as many of the ticket's messages as it may have at a time"
        yield Reason("window_full", f"{pluralize(facts.all_parked, 'more waits', 'more wait')}: {text}")
    elif owner.state != "live" or owner.paused is not None:
        yield Reason("owner_takes_nothing", f"others get the rest when {owner.name} is done with what it has")


def _behind(facts: TicketFacts, first: bytes) -> Iterator[Reason]:
    """Say how many entries wait behind the first one; or how many wait in all, when the first is unknown because only
    the leader's memory has them."""
    waiting = [entry_id for entry_id in (*facts.ids, *facts.parked, *facts.unread) if entry_id != first]
    count = len(waiting) + facts.hidden
    if not count:
        return
    exact = "" if facts.all_parked_is_exact and facts.unread_is_exact else "at least "
    if not first:
        yield Reason("behind", f"{exact}{pluralize(count, 'entry waits', 'entries wait')}")
    elif count == 1 and waiting:
        yield Reason("behind", f"{exact}{_id(waiting[0])}{_sent(facts, waiting[0])} waits behind {_id(first)}")
    else:
        following = f", the next is {_id(waiting[0])}{_sent(facts, waiting[0])}" if waiting else ""
        yield Reason("behind", f"{exact}{pluralize(count, 'waits', 'wait')} behind {_id(first)}{following}")


def _rows(facts: TicketFacts) -> Iterator[dict[str, Any]]:
    told = {entry.id: entry for entry in facts.told.entries} if facts.told is not None else {}
    words = {"running": TicketState.RUNNING, "waiting": TicketState.RETRYING}
    before = b""
    is_free = facts.kind in ("halted", "returned", "put_off")
    of_record = TicketState(facts.kind) if is_free else TicketState.HANDED_OVER
    for entry_id in facts.ids:
        own, known = told.get(entry_id), facts.attempts.get(entry_id, NEVER)
        state = words.get(own.state, TicketState.HANDED_OVER) if own is not None else of_record
        if is_free and before:
            state = TicketState.WAITING
        elif of_record == TicketState.PUT_OFF and known.failures:  # as the lists say it
            state = TicketState.RETRYING
        run = own or OwnEntry(entry_id, "", known.starts)
        started_ms = run.started_ms * (state == TicketState.RUNNING) or None
        due_ms = run.due_ms * (state == TicketState.RETRYING) or None
        yield _row(entry_id, state, run.attempt, before) | {"started_ms": started_ms, "due_ms": due_ms}
        before = entry_id
    for state, ids in ((TicketState.WAITING, facts.parked), (TicketState.UNREAD, facts.unread)):
        for entry_id in ids:
            yield _row(entry_id, state, facts.attempts.get(entry_id, NEVER).starts, before)
            before = entry_id


def _row(entry_id: bytes, state: str, attempt: int, behind: bytes) -> dict[str, Any]:
    told = {"id": _id(entry_id), "state": state, "attempt": attempt or None, "started_ms": None, "due_ms": None}
    return told | {"behind": _id(behind) or None}


def _rule_too(facts: TicketFacts, told: str = "a rule holds too") -> Iterator[Reason]:
    if facts.rules:
        yield Reason("rule_too", f"{told}: the ticket is {facts.rules[0].told()}")


def _since_fence(facts: TicketFacts) -> str:
    """Say when the ticket got its owner: fences are made from the clock (lua/includes/numbers.lua)."""
    handed_ms = facts.fence // 1024
    return f" {_ago(facts, handed_ms)}" if _is_time(facts, handed_ms) else ""


def _sent(facts: TicketFacts, entry_id: bytes) -> str:
    sent_ms = milliseconds(entry_id) if entry_id[:1].isdigit() else 0
    return f" (sent {_ago(facts, sent_ms)})" if _is_time(facts, sent_ms) else ""


def _is_time(facts: TicketFacts, ms: int) -> bool:
    return 0 <= facts.now_ms - ms < 10 * 365 * 86_400_000  # a number need not be one


def _ago(facts: TicketFacts, at_ms: int) -> str:
    return f"{_for(facts, at_ms)} ago" if at_ms > 0 else "at an unknown time"


def _for(facts: TicketFacts, at_ms: int) -> str:
    return span(facts.now_ms - at_ms) if at_ms > 0 else "an unknown time"


def _id(entry_id: bytes) -> str:
    return entry_id.decode(errors="replace")


#: A head that has stood still for less, in ms, is not shown: at full speed there is always an oldest one.
STUCK_MS = 5_000
#: A fence is the milliseconds of its hand-over times this, unless numbers were given faster
#: (lua/includes/numbers.lua).
FENCES_PER_MS = 1024


class Looked(NamedTuple):
    """A ticket, and what one look at Redis tells of it. ``record``: of the index, ``owner fence id id ...``; the owner
    is empty where there is none, and the ids are those of parked messages. ``made``: its row for lists, if there is one
    already."""

    ticket: bytes
    record: bytes
    seen: Seen
    error: LastError | None
    made: dict[str, Any] | None = None

    @property
    def owner(self) -> bytes:
        return self.record.partition(b" ")[0]

    @property
    def head(self) -> bytes:
        return self.record.split(b" ", 3)[2]

    @property
    def size(self) -> int:
        return self.record.count(b" ") - 1

    @property
    def has_failed(self) -> bool:
        return self.seen.attempts is not NEVER or self.error is not None or self.seen.kind == "halted"

    @property
    def under_master(self) -> int:
        """The entries of its record that are pending under ``master``: all of a ticket without an owner, of a halted
        one all but the head."""
        return 0 if self.seen.kind == "owned" else self.size - (self.seen.kind == "halted")

    def behind(self, parked: int) -> int:
        """Count the messages behind the head, when ``parked`` of the ticket are pending under ``master``, those
        included that its record names."""
        return self.size - 1 + max(0, parked - self.under_master)


def fence_ms(fence: int) -> int:
    return fence // FENCES_PER_MS


def since_ms(one: Looked, moved_ms: int, now_ms: int) -> int:
    """Return since when the head has stood still: since it was sent, got its owner, or the message before it was
    finished. Times in the future prove nothing, because an id need not be a time. When nothing else is known: since
    now.

    >>> handed, parked = (Looked(b"T", record, Seen(), None) for record in (b"c:1 7168000 5000-0", b" 0 5000-0"))
    >>> since_ms(handed, 0, 9500), since_ms(parked, 9000, 9500), since_ms(handed, 0, 6000), since_ms(parked, 0, 4000)
    (7000, 9000, 5000, 4000)
    """
    _, fence, head, *_ = one.record.split(b" ", 3)
    times = milliseconds(head), fence_ms(int(fence)), moved_ms
    return max((ms for ms in times if 0 < ms <= now_ms), default=now_ms)


def describe(one: Looked, since: int, parked: Parked, now_ms: int) -> dict[str, Any]:
    """Return a row. ``since``: see ``since_ms``; ``parked``: messages of the ticket."""
    seen, alike, state = one.seen, one.seen.alike, ticket_state(one.seen)
    known, error = last_known(seen.attempts, one.error)
    first_ms = error.since_ms if error is not None else 0  # of the failure; a hand-over is anew with each retry
    most = error.most if error is not None else 0
    return {
        "ticket_id": one.ticket.decode(errors="replace"),
        "head": one.head.decode(errors="replace"),
        "sent_ms": milliseconds(one.head),
        "since_ms": min(first_ms or since, now_ms),
        "behind": one.behind(parked.messages),
        "behind_is_exact": parked.is_exact,
        "attempts": known.starts,
        "tried": attempts_told(known.starts, known.failures, most) if known.starts else "",
        "error": error.told if error is not None else "",
        "at": error.at if error is not None else "",
        "put_off": seen.attempts.put_off and not alike,
        "alike": bool(alike) and state.name is TicketState.RETRYING,
        "state": state.name,
        "why": state.why(seen),
        "consumer": name_of(one.owner.decode(errors="replace")) if seen.kind == "owned" else "",
    }


# -- groups

#: Rows that a group shows; the others are counted.
SHOWN = 20
#: Most groups that are told apart.
_MOST = 200
GroupKey = tuple[str, str]
#: Words for states whose own text is another one for each ticket.
_ALL_ALIKE = {TicketState.QUEUED: "for their turn", TicketState.PUT_OFF: "asked to be called again later"}
#: The group of what is in none of the named ones.
FURTHER = "further"


def key_of(row: Mapping[str, Any]) -> GroupKey:
    state = row["state"]
    if row["error"]:
        return state, row["error"]
    if state in (TicketState.HALTED, TicketState.RETRYING):
        return state, ""
    if (calm := _ALL_ALIKE.get(state)) is not None:
        return state, OUTAGE if state == TicketState.PUT_OFF and not row["attempts"] else calm
    return state, f"on {row['consumer']}" if row["consumer"] else row["why"]


class TicketGroups:
    """Groups, as their tickets are added one by one. Only a bounded number of rows is kept, the oldest ones."""

    def __init__(self, groups: Mapping[GroupKey, dict[str, Any]] = MappingProxyType({})) -> None:
        self._groups = {key: group | {"rows": [*group["rows"]]} for key, group in groups.items()}

    def copied(self) -> TicketGroups:
        return TicketGroups(self._groups)

    def add(self, row: dict[str, Any], are_all: bool = True) -> None:
        """Add a ticket. ``are_all``: no others of its kind may be left out."""
        key, error, at = key_of(row), row["error"], row["at"]
        if key not in self._groups and len(self._groups) >= _MOST:
            key, error, at = (FURTHER, f"further errors, more than {_MOST} in all"), "", ""
        if (group := self._groups.get(key)) is None:
            group = {"state": key[0], "text": key[1], "error": error, "at": at, "alike": False, "rows": []}
            group |= {"tickets": 0, "tickets_are_all": True, "messages": 0, "messages_are_all": True}
            group["since_ms"] = row["since_ms"]
            self._groups[key] = group
        group["tickets"] += 1
        group["tickets_are_all"] = group["tickets_are_all"] and are_all
        group["alike"] = group["alike"] or row.get("alike", False)
        group["messages"] += 1 + row["behind"]
        group["messages_are_all"] = group["messages_are_all"] and row["behind_is_exact"]
        group["since_ms"] = min(group["since_ms"], row["since_ms"])
        group["rows"].append(row)
        if len(group["rows"]) > 2 * SHOWN:
            group["rows"] = _oldest(group["rows"])

    def told(self, has_all: bool = False, are_all: bool = True) -> list[dict[str, Any]]:
        """Return all groups, those that need somebody first. ``has_all``: no message waits that the records do not
        name; ``are_all``: all tickets were looked at."""
        known = [
            group
            | {"tickets_are_all": is_all, "messages_are_all": is_all and (has_all or group["messages_are_all"])}
            | {"rows": _oldest(group["rows"])}
            for group in self._groups.values()
            for is_all in (are_all and group["tickets_are_all"],)
        ]
        both = [group | {"told": told(group), "what": what(group)} for group in known]
        ranks = {state: at for at, state in enumerate(LISTED)}  # what needs somebody comes first
        return sorted(both, key=lambda one: (ranks.get(one["state"], len(ranks)), -one["tickets"], one["text"]))


def _oldest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["since_ms"])[:SHOWN]


def told(group: Mapping[str, Any]) -> str:
    """Say in one line what the tickets of a group have in common.

    >>> told({"state": "halted", "text": "KeyError in shop.py:4", "tickets": 40, "messages": 212,
    ...     "tickets_are_all": True, "messages_are_all": True, "since_ms": 1790000000000, "rows": []})
    '40 tickets halted: KeyError in shop.py:4, since 14:13:20 UTC, in all 212 messages wait'
    """
    tickets = group["tickets"]
    if tickets == 1 and group["rows"] and group["tickets_are_all"]:
        return f"Ticket {group['rows'][0]['ticket_id']} {what(group)}"
    return f"{'' if group['tickets_are_all'] else 'at least '}{pluralize(tickets, 'ticket')} {what(group)}"


def what(group: Mapping[str, Any]) -> str:
    is_unknown = not group["text"] and group["state"] in (TicketState.HALTED, TicketState.RETRYING)
    why = f": {group['text']}" if group["text"] else ": their errors are not known" if is_unknown else ""
    messages, more = group["messages"], "" if group["messages_are_all"] else "at least "
    wait = f"{more}{pluralize(messages, 'message waits', 'messages wait')}"
    how = "waiting for a try that succeeds, uncharged" if group.get("alike") else label(group["state"])
    return f"{how}{why}, since {time_of_day(group['since_ms'])}, in all {wait}"


#: Number of unread messages, and age of the oldest one, above which an alarm says that consumers are behind.
_LAG, _OLD_MS = 1_000, 60_000
#: A handler may take its time: only above this age, or with this many attempts, somebody has to act.
_STILL_MS, _ATTEMPTS = 60_000, 3
#: Seconds for which an alarm tells what somebody did to the stream.
_RECENT_S = 86_400
#: Declared losses of the group itself; of others there are alarms anyway.
_OF_GROUP = ("group_lost", "set_back")
OK = "ok"


def level_of(group: Mapping[str, Any], now_ms: int) -> str:
    """Return the level of a group of stuck tickets. What an operator has paused waits for that operator, what is queued
    for its turn, and what asked to be called later has not failed."""
    state = BY_NAME.get(group["state"])
    if group["alike"] or (state is not None and state.severity == BAD):
        return BAD
    is_calm = group["state"] in (TicketState.PAUSED, TicketState.QUEUED, TicketState.PUT_OFF, FURTHER)
    tries = max((row["attempts"] for row in group["rows"] if not row["put_off"]), default=0)
    is_old = any(not row["put_off"] and now_ms - row["since_ms"] >= _STILL_MS for row in group["rows"])
    return BAD if not is_calm and (is_old or tries >= _ATTEMPTS) else WARN


def alarms(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the alarms of a snapshot of the pulse, beside its groups of stuck tickets, the worst first: ``level`` bad,
    warn or ok, ``text``, and ``href``, the page with more; when there is neither, one that says that all is well."""
    found = [{"level": level, "text": text, "href": href} for level, text, href in _troubles(seen)]
    if not (found or seen["groups"]):
        return [{"level": OK, "text": _calm(seen), "href": "/dead-letters" if seen["dead_letters"] else ""}]
    return sorted(found, key=lambda one: one["level"] != BAD)


def _troubles(seen: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    states, mishaps, nobody_leads = seen["consumers"], seen["mishaps"], seen["leader_url"] is None
    since_s, of_groups = seen["time_ms"] / 1000 - _RECENT_S, {group["state"] for group in seen["groups"]}
    # This comes first: leases cannot be renewed either, so the others follow from it.
    if (trouble := seen["write_trouble"]) is not None:
        yield BAD if trouble["is_certain"] or nobody_leads else WARN, trouble["text"], "/doctor"
    elif (share := seen.get("memory_share") or 0.0) >= NEARLY_FULL:
        yield WARN, f"{share:.0%} of Redis' memory is used; when all is, nothing can be sent", "/streams"
    if nobody_leads:
        yield BAD, "No master leads: nothing is handed over", "/doctor"
    if not states["live"]:
        some = states["draining"] or states["paused"]
        waits = "those that drain or are paused take nothing more" if some else "nothing is handled"
        yield BAD, f"No consumer is live: {waits}", "/consumers"
    for state, says in (("lost", "lost; others get what was theirs"), ("revoked", "not answering over HTTP")):
        if states[state]:
            yield WARN, f"{pluralize(states[state], 'consumer')} {says}", "/consumers"
    if mishaps["unread_cut"] and mishaps["unread_cut_s"] > since_s:
        lost = pluralize(mishaps["unread_cut"], "message")
        yield BAD, f"Cut from the stream before they were read, and lost: {lost}", "/doctor"
    losses = (one for one in seen.get("losses", ()) if one["ms"] / 1000 > since_s and one["kind"] in _OF_GROUP)
    if (loss := next(losses, None)) is not None:
        yield BAD, f"Declared: {loss['text']}", "/streams"
    if seen["halted"] and TicketState.HALTED not in of_groups:  # they were not looked at yet
        yield BAD, f"{pluralize(seen['halted'], 'ticket')} halted by a dead letter: redrive or drop it", "/dead-letters"
    for told in seen["broad_rules"]:
        yield WARN, f"All tickets are {told}", "/rules"
    for level, text in ((BAD, seen.get("sudden")), (WARN, seen.get("letters_wrong"))):
        if text:
            yield level, text, "/dead-letters"
    # of what is pending; also None without a group, where the number of unread entries is unknown
    is_old = seen["oldest_ms"] and seen["time_ms"] - seen["oldest_ms"] >= _OLD_MS
    if seen["lag"] >= _LAG and is_old and TicketState.QUEUED not in of_groups:  # which say behind what they wait
        lag = f"{'' if seen['lag_is_exact'] else 'more than '}{seen['lag']:,}"
        yield WARN, f"The consumers are behind: {lag} messages are unread", "/consumers"


def _calm(seen: Mapping[str, Any]) -> str:
    letters, live = seen["dead_letters"], pluralize(seen["consumers"]["live"], "consumer")
    told = f"; {pluralize(letters, 'dead letter')} {'waits' if letters == 1 else 'wait'}" if letters else ""
    return f"Nothing is stuck. {live} live{told}"
