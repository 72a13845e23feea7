"""Stuck tickets: those that are stuck or retrying, described for people. Pure: facts of the index in, rows for pages
out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from usher.common.base.text import time_of_day
from usher.common.protocol.attempts import NEVER, Attempts, attempts_told
from usher.common.protocol.last_error import LastError
from usher.common.protocol.owner_words import HALTED, RETURNED, due_ms_of, is_given_back
from usher.common.protocol.registration import name_of
from usher.common.protocol.stream_id import milliseconds, rank
from usher.common.protocol.ticket_states import TicketState
from usher.master.policy.board.plans import Parked
from usher.master.policy.explain.tried import told_alike, tried
from usher.master.policy.rules import Rule, RuleAction, Rulebook

#: A head that has stood still for less, in ms, is not shown: at full speed there is always an oldest one.
STUCK_MS = 5_000
#: A fence is the milliseconds of its hand-over times this, unless numbers were given faster
#: (lua/includes/numbers.lua).
_FENCES_PER_MS = 1024


class Head(NamedTuple):
    """The first unfinished message of a ticket. ``owner``: as in the index, empty while it is parked. ``size``:
    unfinished messages known to it."""

    ticket: bytes
    owner: bytes
    fence: int
    id: bytes
    size: int

    @property
    def sent_ms(self) -> int:
        return milliseconds(self.id)


class StuckContext(NamedTuple):
    """Further facts: attempts by message, consumers' states by incarnation, when a head was seen to move, parked
    messages by ticket, live rules, last errors by message."""

    attempts: Mapping[bytes, Attempts]
    states: Mapping[str, str]
    moved_ms: Mapping[bytes, int]
    parked: Mapping[bytes, Parked]
    rules: Rulebook = Rulebook()
    errors: Mapping[bytes, LastError] = MappingProxyType({})


def parse_head(ticket: bytes, value: bytes) -> Head | None:
    """Parse the head of a record (lua/includes/records.lua); None when it has no messages, or cannot be read. Kept
    short, because it runs by the thousand."""
    parts = value.split(b" ", 3)
    if len(parts) < 3 or not parts[1].isdigit() or not parts[2].partition(b"-")[0].isdigit():
        return None
    return Head(ticket, parts[0], int(parts[1]), parts[2], 2 + parts[3].count(b" ") if len(parts) > 3 else 1)


def oldest(heads: Iterable[Head], most: int) -> list[Head]:
    return heapq.nsmallest(most, heads, key=lambda head: head.sent_ms)


def fence_ms(fence: int) -> int:
    return fence // _FENCES_PER_MS


def since_ms(head: Head, moved_ms: int, now_ms: int) -> int:
    """Return since when the head has stood still: since it was sent, got its owner, or the message before it was
    finished. Times in the future prove nothing, because an id need not be a time. When nothing else is known: since
    now.

    >>> handed, parked = Head(b"T", b"c:1", 7000 * 1024, b"5000-0", 1), Head(b"T", b"", 0, b"5000-0", 1)
    >>> since_ms(handed, 0, 9500), since_ms(parked, 9000, 9500), since_ms(handed, 0, 6000), since_ms(parked, 0, 4000)
    (7000, 9000, 5000, 4000)
    """
    handed_ms = fence_ms(head.fence)
    known = [ms for ms in (head.sent_ms, *filter(None, (handed_ms, moved_ms))) if ms <= now_ms]
    return max(known, default=now_ms)


def stuck_rows(heads: Iterable[Head], seen: StuckContext, now_ms: int, most: int) -> list[dict[str, Any]]:
    rows = []
    for head in sorted(heads, key=lambda one: rank(one.id)):
        row = describe(head, seen, now_ms)
        if now_ms - row["since_ms"] >= STUCK_MS or row["attempts"] or head.owner == HALTED:
            rows.append(row)
        if len(rows) == most:
            break
    return rows


def describe(head: Head, seen: StuckContext, now_ms: int) -> dict[str, Any]:
    attempts = seen.attempts.get(head.id, NEVER)
    parked, known = seen.parked.get(head.ticket, Parked()), tried(attempts, seen.errors.get(head.id))
    error = known["last_error"]
    first_ms = error["since_ms"] if error is not None else 0  # of the failure; a hand-over is anew with each retry
    return {
        "ticket_id": head.ticket.decode(errors="replace"),
        "head": head.id.decode(errors="replace"),
        "sent_ms": head.sent_ms,
        "since_ms": min(first_ms or since_ms(head, seen.moved_ms.get(head.id, 0), now_ms), now_ms),
        "behind": behind(head, parked.messages),
        "behind_is_exact": parked.is_exact,
        "attempts": known["attempts"],
        "tried": attempts_told(known["attempts"], known["charged"], known["max_attempts"] or 0)
        if known["attempts"]
        else "",
        "error": error["told"] if error is not None else "",
        "at": error["at"] if error is not None else "",
        "put_off": attempts.put_off,
        "owners_lost": attempts.crashes,  # a loss may be an outage of Redis, or a restart: it blames nobody
        **_describe_head(head, seen.states, attempts, seen.rules.of(head.ticket)),
        **_describe_alike(head, told_alike(seen.errors.get(head.id))),
    }


def _describe_alike(head: Head, told: str) -> dict[str, Any]:
    if not told or head.owner in (b"", HALTED, RETURNED):
        return {"alike": False}
    return {"alike": True, "state": TicketState.RETRYING, "why": told, "put_off": False}


def behind(head: Head, parked: int) -> int:
    """Count the messages that wait behind the head, when ``parked`` of the ticket are pending under ``master``, those
    included that its record names."""
    return head.size - 1 + max(0, parked - named_under_master(head))


def named_under_master(head: Head) -> int:
    """Count the entries of a record that are pending under ``master``: all of a ticket without an owner, of a halted
    one all but the head."""
    if head.owner == HALTED:
        return head.size - 1
    return head.size if not head.owner or is_given_back(head.owner) else 0


def _describe_head(head: Head, states: Mapping[str, str], attempts: Attempts, rule: Rule | None) -> dict[str, str]:
    if not head.owner:
        if rule is not None and rule.action is RuleAction.PAUSE:
            return {"state": TicketState.PAUSED, "consumer": "", "why": rule.told()}
        return {
            "state": TicketState.WAITING,
            "consumer": "",
            "why": "waits: no consumer has it" + (f"; {rule.told()}" if rule is not None else ""),
        }
    if head.owner == HALTED:
        told = "halted by a dead letter; waits for a redrive or a drop"
        return {"state": TicketState.HALTED, "consumer": "", "why": told}
    if head.owner == RETURNED:
        return {"state": TicketState.RETURNED, "consumer": "", "why": "given back at a drain; waits for a new owner"}
    if (due_ms := due_ms_of(head.owner)) is not None:
        if attempts.failures:
            told = f"failed {attempts.failures}x; tried again at {time_of_day(due_ms)}"
            return {"state": TicketState.RETRYING, "consumer": "", "why": told}
        told = f"waits until {time_of_day(due_ms)}, asked for by its handler"
        return {"state": TicketState.PUT_OFF, "consumer": "", "why": told}
    owner = head.owner.decode(errors="replace")
    state = states.get(owner, "lost")
    why = {
        "live": "handed over and not done yet",
        "paused": "its consumer was drained by an operator; it finishes what it has",
        "draining": "its consumer drains",
        "revoked": "its consumer did not answer; taken back when the lease ends",
        "lost": "its consumer is lost; it is being taken back",
    }
    told = _tried(attempts) if attempts.starts and state in ("live", "paused") else why.get(state, state)
    tried_before = TicketState.RETRYING if attempts.starts else TicketState.HANDED_OVER
    doing = TicketState.RECOVERING if state == "lost" else tried_before
    return {"state": doing, "consumer": name_of(owner), "why": told}


def _tried(attempts: Attempts) -> str:
    if attempts.put_off:
        return "asked to be called again later"
    failed = attempts.failures + attempts.crashes
    return f"failed {failed}x; retrying" if failed else "its consumer was lost with it; retrying"
