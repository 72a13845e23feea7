"""The states of a ticket: one table. The first row that fits is a ticket's state; explanations, lists, groups of stuck
tickets, alarms, events, badges, commands and the table of docs/operate.md read it. Pure.

Facts may be few: a list asks no consumer whether a handler runs, and says then what it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from usher.common.base.text import pluralize, span, time_of_day
from usher.common.protocol.attempts import CUT_OFF, NEVER, Attempts
from usher.common.protocol.keys import HALTED
from usher.common.protocol.last_error import LastError, error_name
from usher.common.protocol.registration import name_of
from usher.common.protocol.ticket_states import RETURNED, TicketState, due_ms_of
from usher.master.policy.letters import has_error
from usher.master.policy.rules import Rule, RuleAction

BAD, WARN, CALM = "bad", "warn", "calm"


class Seen(NamedTuple):
    """A ticket as it was looked at. ``kind``: what its record says (``kind_of``); ``lease``: the state of its owner,
    ``lost`` when it has ended; ``attempts``: of its first message; ``alike``: see ``told_alike``; ``queue``: behind
    what it waits, where others are handled meanwhile."""

    kind: str = ""
    lease: str = "live"
    attempts: Attempts = NEVER
    due_ms: int = 0
    rule: Rule | None = None
    alike: str = ""
    queue: str = ""


class Queue(NamedTuple):
    """Messages that wait for their turns while others are handled. ``tenant``: who has most of them, ``of_tenant``; ""
    where that is not known, or there are no tenants. ``tenants``: of each one, by name, how many are unfinished, and
    how many are handed over per second."""

    messages: int
    per_second: float
    tenant: str = ""
    of_tenant: int = 0
    tenants: Mapping[str, tuple[int, float]] = MappingProxyType({})

    @classmethod
    def of(
        cls, seen: Mapping[str, Any], tenants: Mapping[str, tuple[int, float]] = MappingProxyType({})
    ) -> Queue | None:
        """Return what waits under the master; None when nothing does, or nothing moves: then it is no queue."""
        moves = seen["leader_url"] is not None and (seen["done_per_second"] or 0) > 0
        if not (moves and seen["parked"]):
            return None
        name, (most, _) = max(tenants.items(), key=lambda one: one[1][0], default=("", (0, 0.0)))
        return cls(seen["parked"], seen["done_per_second"], name, min(most, seen["parked"]) * bool(name), tenants)

    def before(self, tenant: str) -> Queue:
        """Return the queue in which the tickets of this tenant stand: tenants take turns, so a flood of one is not
        before those of another."""
        waiting, per_second = self.tenants.get(tenant, (0, 0.0))
        return self._replace(messages=waiting, per_second=per_second, of_tenant=-1) if tenant and per_second else self

    @property
    def seconds(self) -> float:
        return self.messages / self.per_second

    @property
    def text(self) -> str:
        most = f", of which {self.of_tenant:,} are of tenant {self.tenant}" if self.tenant else ""
        most = most if self.of_tenant >= 0 else " of its tenant"
        about = f"about {span(int(self.seconds * 1000))} at {self.per_second:,.1f} per second"
        return f"behind {pluralize(self.messages, 'waiting message')}{most}: {about}"


class State(NamedTuple):
    """A state. ``meaning``: completes "the ticket ..."; ``ways``: the verbs that help; ``needs_writes``: it ends with a
    write to Redis, and not with a handler, a time or an operator."""

    name: TicketState
    severity: str
    meaning: str
    ways: tuple[str, ...] = ()
    needs_writes: bool = False


class Row(NamedTuple):
    """A row: whether a ticket is in that state, and what keeps it, in a line."""

    name: TicketState
    fits: Callable[[Seen], bool]
    why: Callable[[Seen], str]


_S, _RETRY = TicketState, ("retry", "give-up")
#: In each severity what needs somebody comes first.
STATES = (
    State(_S.UNREADABLE, BAD, "has a record in Redis that is none"),
    State(_S.HALTED, BAD, "waits for an operator because of a dead letter", ("redrive", "drop")),
    State(_S.RECOVERING, BAD, "had a consumer that was lost, and is taken back", needs_writes=True),
    State(_S.WAITING, BAD, "was read, and no consumer has it", needs_writes=True),
    State(_S.HALTED_IN_OUTBOX, BAD, "has a row in an outbox that was refused"),
    State(_S.RETRYING, WARN, "has failed, and waits for its next attempt", _RETRY),
    State(_S.PAUSED, WARN, "is held by a rule", ("lift",)),
    State(_S.RETURNED, WARN, "was given back by its consumer, and waits for another", needs_writes=True),
    State(_S.QUEUED, WARN, "was read, and waits for its turn, while others are handled", ("slow",), True),
    State(_S.PUT_OFF, CALM, "is to be called later, and has not failed", _RETRY, True),
    State(_S.HANDED_OVER, CALM, "is with a consumer (lists do not ask it whether a handler runs)"),
    State(_S.RUNNING, CALM, "is with a consumer whose handler runs"),
    State(_S.UNREAD, CALM, "is in the stream, and the leader has not read it", needs_writes=True),
    State(_S.DELAYED, CALM, "is added to the stream later"),
    State(_S.IN_OUTBOX, CALM, "is committed in an outbox, and not sent yet"),
    State(_S.IDLE, CALM, "has nothing left to do"),
    State(_S.NOT_FOUND, CALM, "has nothing that was found, as far as was searched"),
)
BY_NAME = {state.name: state for state in STATES}
_LEASES = {
    "live": "handed over and not done yet",
    "paused": "its consumer was drained by an operator; it finishes what it has",
    "draining": "its consumer drains",
    "revoked": "its consumer did not answer; taken back when the lease ends",
    "lost": "its consumer is lost; it is being taken back",
}


#: Why a ticket waits that was not tried itself.
OUTAGE = "all of its tenant, or of its kind, fail alike"


def _leased(seen: Seen) -> str:
    return _LEASES.get(seen.lease, seen.lease)


def _tried(seen: Seen) -> str:
    if seen.lease not in ("live", "paused"):
        return _leased(seen)
    if seen.attempts.is_given_up:
        return "given up by an operator; it ends unless the run under way succeeds"
    if seen.attempts.put_off:
        return "asked to be called again later"
    failed = seen.attempts.failed
    return f"failed {failed}x; retrying" if failed else "its consumer was lost with it; retrying"


def _put_off(seen: Seen) -> str:
    until, failed = time_of_day(seen.due_ms), seen.attempts.failed
    if not seen.attempts.starts:
        return f"not tried before {until}: {OUTAGE}"
    return f"failed {failed}x; next attempt at {until}" if failed else f"asked to be called again at {until}"


def _ruled(seen: Seen) -> str:
    return seen.rule.told() if seen.rule is not None else ""


def _is_paused(seen: Seen) -> bool:
    return seen.kind in ("", "returned") and seen.rule is not None and seen.rule.action is RuleAction.PAUSE


_HALTED = "halted by a dead letter; waits for a redrive or a drop"
#: The first row that fits tells the state.
ROWS = (
    Row(_S.UNREADABLE, lambda seen: seen.kind == "unreadable", lambda seen: "its record cannot be read"),
    Row(_S.HALTED, lambda seen: seen.kind == "halted", lambda seen: _HALTED),
    Row(_S.RETRYING, lambda seen: seen.kind in ("owned", "put_off") and seen.alike != "", lambda seen: seen.alike),
    Row(_S.RETRYING, lambda seen: seen.kind == "put_off" and seen.attempts.failures > 0, _put_off),
    Row(_S.PUT_OFF, lambda seen: seen.kind == "put_off", _put_off),
    Row(_S.PAUSED, _is_paused, _ruled),
    Row(_S.RETURNED, lambda seen: seen.kind == "returned", lambda seen: "given back at a drain; waits for a new owner"),
    Row(_S.RECOVERING, lambda seen: seen.kind == "owned" and seen.lease == "lost", _leased),
    Row(_S.RETRYING, lambda seen: seen.kind == "owned" and seen.attempts.starts > 0, _tried),
    Row(_S.HANDED_OVER, lambda seen: seen.kind == "owned", _leased),
    Row(_S.QUEUED, lambda seen: seen.queue != "", lambda seen: seen.queue),
    Row(_S.WAITING, lambda _: True, lambda seen: "; ".join(filter(None, ("waits: no consumer has it", _ruled(seen))))),
)
#: The states that a list can tell.
LISTED = tuple(state.name for state in STATES if state.name in {row.name for row in ROWS})
#: The states that a record leaves open, by its kind (``Seen``).
OF_KIND: Mapping[str, frozenset[TicketState]] = {
    "halted": frozenset((_S.HALTED,)),
    "put_off": frozenset((_S.RETRYING, _S.PUT_OFF)),
    "returned": frozenset((_S.PAUSED, _S.RETURNED)),
    "owned": frozenset((_S.RECOVERING, _S.RETRYING, _S.HANDED_OVER)),
}


def ticket_state(seen: Seen) -> Row:
    return next(row for row in ROWS if row.fits(seen))


_KINDS = {b"": "", RETURNED: "returned", HALTED: "halted"}


def kind_of(owner: bytes) -> str:
    """Return what a record says by its owner: "" (nobody), owned, returned, put_off or halted."""
    known = _KINDS.get(owner)
    return known if known is not None else "owned" if due_ms_of(owner) is None else "put_off"


# -- how often it was tried


def last_known(known: Attempts, error: LastError | None) -> tuple[Attempts, LastError | None]:
    """Return the attempts, which an error may tell, too, and the error of the last start."""
    error = last_error(known, error)
    return Attempts(error.starts, error.charged) if known == NEVER and error is not None else known, error


def tried(known: Attempts, error: LastError | None) -> dict[str, Any]:
    """Return, for a row, the starts (``attempts``), how many of them are charged of ``max_attempts``, and the last
    error; None for what is not known."""
    known, error = last_known(known, error)
    return {
        "attempts": known.starts,
        "charged": known.failures,
        "max_attempts": (error.most if error is not None else 0) or None,
        "last_error": None if error is None else error._asdict() | {"told": error.told},
    }


def told_alike(error: LastError | None) -> str:
    """Say that a ticket waits because others fail like it; "" for one that does not."""
    if error is None or not error.alike:
        return ""
    many = pluralize(error.alike, "ticket fails", "tickets fail alike")
    since = f"at least {many} since {time_of_day(error.since_ms)}, {error.told}"
    return f"waits: {since}. Each consumer tries one of them a second, and charges no attempt"


def last_error(known: Attempts, error: LastError | None) -> LastError | None:
    """Return the error of the last start. Nothing is noted where a start ended with its process."""
    if known.crashes and (error is None or error.starts < known.starts):
        most, first_ms = (error.most, error.since_ms) if error is not None else (0, 0)
        return LastError(CUT_OFF, starts=known.starts, charged=known.failures, most=most, since_ms=first_ms)
    return error


# -- which of them a list shows: rows as ``usher tickets list --json`` has them


@dataclass(frozen=True)
class TicketFilter:
    """A filter: all that is given must hold. ``states``: none is any; ``error``: see ``has_error``, in texts of errors
    only for who may see them (``sees_texts``)."""

    states: frozenset[str] = frozenset()
    consumer: str = ""
    error: str = ""
    sees_texts: bool = field(default=True, compare=False)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Return whether a ticket without an owner fits, and so without an error."""
        return self.has_state(row["state"]) and not self.error

    def has_state(self, state: str) -> bool:
        return not self.states or state in self.states

    def has_error(self, error: Mapping[str, Any] | None) -> bool:
        if error is None:
            return False
        name, text = error_name(error["error_type"], error["error"]), error["error"] if self.sees_texts else ""
        return has_error(self.error, name, error["at"], text)

    def may_fit(self, owner: bytes) -> bool:
        """Return whether a ticket may fit whose record names this owner."""
        kind, states = kind_of(owner), self.states
        is_of = not self.consumer or (kind == "owned" and name_of(owner.decode()) == self.consumer)
        return is_of and (not states or "unreadable" in states or not states.isdisjoint(OF_KIND.get(kind, ())))

    @property
    def wants_waiting(self) -> bool:
        without_owner = {TicketState.WAITING, TicketState.PAUSED}
        return not (self.consumer or self.error) and not (self.states and self.states.isdisjoint(without_owner))


def parse_states(text: str) -> frozenset[str]:
    """Parse a list of states. Raises ValueError.

    >>> sorted(parse_states("halted, retrying")), parse_states("")
    (['halted', 'retrying'], frozenset())
    """
    asked = frozenset(filter(None, (part.strip() for part in text.split(","))))
    if wrong := sorted(asked - set(LISTED)):
        raise ValueError(f"{wrong[0]!r} is no state that a list can tell: {', '.join(LISTED)}")
    return asked
