"""Stuck tickets: those that are stuck or retrying, described for people; those in the same trouble (same state, same
error) are one group. Alarms: what needs attention, one sentence each, the worst first, for a person on call. Pure:
facts in, rows for pages out."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from usher.common.base.text import label, pluralize, time_of_day
from usher.common.doctor.judgements import NEARLY_FULL
from usher.common.protocol.attempts import NEVER, Attempts, attempts_told
from usher.common.protocol.last_error import LastError
from usher.common.protocol.owner_words import HALTED, due_ms_of, is_given_back
from usher.common.protocol.registration import name_of
from usher.common.protocol.stream_id import milliseconds, rank
from usher.common.protocol.ticket_states import TicketState
from usher.master.policy.board.plans import Parked
from usher.master.policy.rules import Rulebook
from usher.master.policy.states import (
    BAD,
    BY_NAME,
    LISTED,
    OUTAGE,
    WARN,
    Seen,
    kind_of,
    ticket_state,
    told_alike,
    tried,
)

#: A head that has stood still for less, in ms, is not shown: at full speed there is always an oldest one.
STUCK_MS = 5_000
#: A fence is the milliseconds of its hand-over times this, unless numbers were given faster
#: (lua/includes/numbers.lua).
FENCES_PER_MS = 1024


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
    messages by ticket, live rules, last errors by message; behind what tickets wait for their turn (``Seen.queue``)."""

    attempts: Mapping[bytes, Attempts]
    states: Mapping[str, str]
    moved_ms: Mapping[bytes, int]
    parked: Mapping[bytes, Parked]
    rules: Rulebook = Rulebook()
    errors: Mapping[bytes, LastError] = MappingProxyType({})
    queue: str = ""


def parse_head(ticket: bytes, value: bytes) -> Head | None:
    """Parse the head of a record (lua/includes/records.lua); None when it has no messages, or cannot be read. Kept
    short, because it runs by the thousand."""
    parts = value.split(b" ", 3)
    if len(parts) < 3 or not parts[1].isdigit() or not parts[2].partition(b"-")[0].isdigit():
        return None
    return Head(ticket, parts[0], int(parts[1]), parts[2], 2 + parts[3].count(b" ") if len(parts) > 3 else 1)


def oldest(heads: Iterable[Head], most: int) -> list[Head]:
    """Return the oldest heads of each kind (``kind_of``): what was put off hides no handler that hangs."""
    by_kind = defaultdict[str, list[Head]](list)
    for head in heads:
        by_kind[kind_of(head.owner)].append(head)
    return [one for some in by_kind.values() for one in heapq.nsmallest(most, some, key=lambda head: head.sent_ms)]


def fence_ms(fence: int) -> int:
    return fence // FENCES_PER_MS


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
    """Return rows of the oldest tickets of each state that are stuck."""
    rows, of_state = list[dict[str, Any]](), Counter[str]()
    for head in sorted(heads, key=lambda one: rank(one.id)):
        row = describe(head, seen, now_ms)
        is_stuck = now_ms - row["since_ms"] >= STUCK_MS or row["attempts"] or head.owner == HALTED
        if is_stuck and of_state[row["state"]] < most:
            of_state[row["state"]] += 1
            rows.append(row)
    return rows


def describe(head: Head, seen: StuckContext, now_ms: int) -> dict[str, Any]:
    attempts, owner = seen.attempts.get(head.id, NEVER), head.owner.decode(errors="replace")
    alike, due_ms = told_alike(seen.errors.get(head.id)), due_ms_of(head.owner) or 0
    lease, rule = seen.states.get(owner, "lost"), seen.rules.of(head.ticket)
    facts = Seen(kind_of(head.owner), lease, attempts, due_ms, rule, alike, seen.queue if rule is None else "")
    state = ticket_state(facts)
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
        "put_off": attempts.put_off and not alike,
        "alike": bool(alike) and state.name is TicketState.RETRYING,
        "state": state.name,
        "why": state.why(facts),
        "consumer": name_of(owner) if facts.kind == "owned" else "",
    }


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


# -- groups

#: Rows that a group shows; the others are counted.
SHOWN = 20
#: Most groups; tickets of further ones are counted as "others".
_MOST = 200
GroupKey = tuple[str, str]
#: Words for states whose own text is another one for each ticket.
_ALL_ALIKE = {TicketState.QUEUED: "for their turn", TicketState.PUT_OFF: "asked to be called again later"}
#: The group of what is in none of the named ones.
FURTHER = "further"
_FURTHER = {"state": FURTHER, "error": "", "at": "", "alike": False, "rows": []}
_FURTHER |= {"tickets_are_all": True, "messages_are_all": False}


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
    """Groups, as their tickets are added one by one. Only a bounded number of rows is kept."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, dict[str, Any]] = {}
        self.others = 0

    def add(self, row: dict[str, Any]) -> None:
        key = key_of(row)
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= _MOST:
                self.others += 1
                return
            names = {"state": key[0], "text": key[1], "error": row["error"], "at": row["at"], "alike": False}
            group = {**names, "tickets": 0, "messages": 0, "messages_are_all": True, "since_ms": row["since_ms"]}
            self._groups[key] = group | {"rows": []}
            group = self._groups[key]
        group["tickets"] += 1
        group["alike"] = group["alike"] or row.get("alike", False)
        group["messages"] += 1 + row["behind"]
        group["messages_are_all"] = group["messages_are_all"] and row["behind_is_exact"]
        group["since_ms"] = min(group["since_ms"], row["since_ms"])
        if len(group["rows"]) < SHOWN:
            group["rows"].append(row)

    def merged(
        self, rows: Iterable[dict[str, Any]], has_all: bool = False, most: float = math.inf
    ) -> list[dict[str, Any]]:
        """Return all groups, those that need somebody first; of ``rows``, what is in none of the groups counted here
        is counted too, and what is in one takes the place of the rows kept. ``has_all``: no message waits that the
        records do not name; ``most``: so many rows of a state may not be all of them."""
        more, fresh, of_state = TicketGroups(), dict[GroupKey, list[dict[str, Any]]](), Counter[str]()
        for row in rows:
            key = key_of(row)
            of_state[row["state"]] += 1
            if key in self._groups:
                fresh.setdefault(key, []).append(row)
            else:
                more.add(row)
        known = [
            (larger := _larger(group, fresh.get(key, [])))
            | {"messages_are_all": has_all or larger["messages_are_all"], "rows": fresh.get(key, group["rows"])[:SHOWN]}
            | {"tickets_are_all": True}
            for key, group in self._groups.items()
        ]
        if others := self.others + more.others:
            text = f"further errors, more than {_MOST} in all"
            since_ms = min(group["since_ms"] for group in known)
            known.append(dict(_FURTHER, text=text, tickets=others, messages=others, since_ms=since_ms))
        others_known = [
            group | {"tickets_are_all": is_all, "messages_are_all": is_all and group["messages_are_all"]}
            for group in more._groups.values()
            for is_all in (of_state[group["state"]] < most,)
        ]
        both = [group | {"told": told(group), "what": what(group)} for group in (*known, *others_known)]
        ranks = {state: at for at, state in enumerate(LISTED)}  # what needs somebody comes first
        return sorted(both, key=lambda one: (ranks.get(one["state"], len(ranks)), -one["tickets"], one["text"]))


def _larger(group: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    messages, has_all = sum(1 + row["behind"] for row in rows), len(rows) >= group["tickets"]
    group = group | {"messages": max(messages, group["messages"])}
    if has_all and all(row["behind_is_exact"] for row in rows):
        group = group | {"messages": messages, "messages_are_all": True}
    if len(rows) <= group["tickets"]:
        return group
    return group | {"tickets": len(rows), "since_ms": min(row["since_ms"] for row in rows)}


def told(group: Mapping[str, Any]) -> str:
    """Say in one line what the tickets of a group have in common.

    >>> told({"state": "halted", "text": "KeyError in shop.py:4", "tickets": 40, "messages": 212,
    ...     "tickets_are_all": True, "messages_are_all": True, "since_ms": 1790000000000, "rows": []})
    '40 tickets halted: KeyError in shop.py:4, since 14:13:20 UTC, in all 212 messages wait'
    """
    tickets = group["tickets"]
    if tickets == 1 and group["rows"] and group["tickets_are_all"]:
        return f"Ticket {group['rows'][0]['shown']} {what(group)}"
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
_WORDS = {BAD: "Critical", WARN: "Warning", OK: "OK"}


def _alarm(level: str, text: str, href: str) -> dict[str, str]:
    """Return an alarm. ``level``: bad, warn or ok; ``word`` is the same for people; ``href``: the page with more, or
    ""."""
    return {"level": level, "word": _WORDS[level], "text": text, "href": href}


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
    """Return the alarms of a snapshot of the pulse, beside its groups of stuck tickets; when there is neither, one that
    says that all is well."""
    of_rules = [_alarm(WARN, f"All tickets are {told}", "/rules") for told in seen["broad_rules"]]
    found = [*_of_programs(seen), *_of_stream(seen), *_of_tickets(seen), *of_rules, *_of_flow(seen)]
    if not (found or seen["groups"]):
        return [_alarm(OK, _calm(seen), "/dead-letters" if seen["dead_letters"] else "")]
    return sorted(found, key=lambda one: one["level"] != BAD)


def _of_programs(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    states = seen["consumers"]
    found = []
    # This comes first: leases cannot be renewed either, so the others follow from it.
    if (trouble := seen["write_trouble"]) is not None:
        found.append(
            _alarm(BAD if trouble["is_certain"] or seen["leader_url"] is None else WARN, trouble["text"], "/doctor")
        )
    elif (share := seen.get("memory_share") or 0.0) >= NEARLY_FULL:
        text = f"{share:.0%} of Redis' memory is used; when all is, nothing can be sent"
        found.append(_alarm(WARN, text, "/streams"))
    if seen["leader_url"] is None:
        found.append(_alarm(BAD, "No master leads: nothing is handed over", "/doctor"))
    if not states["live"]:
        some = states["draining"] or states["paused"]
        waits = "those that drain or are paused take nothing more" if some else "nothing is handled"
        found.append(_alarm(BAD, f"No consumer is live: {waits}", "/consumers"))
    for state, says in (("lost", "lost; others get what was theirs"), ("revoked", "not answering over HTTP")):
        if states[state]:
            found.append(_alarm(WARN, f"{pluralize(states[state], 'consumer')} {says}", "/consumers"))
    return found


def _of_stream(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    told, since_s = seen["mishaps"], seen["time_ms"] / 1000 - _RECENT_S
    found = []
    if told["unread_cut"] and told["unread_cut_s"] > since_s:
        text = f"Cut from the stream before they were read, and lost: {pluralize(told['unread_cut'], 'message')}"
        found.append(_alarm(BAD, text, "/doctor"))
    recent = [one for one in seen.get("losses", ()) if one["ms"] / 1000 > since_s]
    found += [_alarm(BAD, f"Declared: {one['text']}", "/streams") for one in recent if one["kind"] in _OF_GROUP][:1]
    return found


def _of_tickets(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    if not seen["halted"] or any(group["state"] == TicketState.HALTED for group in seen["groups"]):
        return []  # else they are not among those that were looked at yet
    told = f"{pluralize(seen['halted'], 'ticket')} halted by a dead letter: redrive or drop it"
    return [_alarm(BAD, told, "/dead-letters")]


def _of_flow(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    # of what is pending; also None without a group, where the number of unread entries is unknown
    oldest_ms = seen["oldest_ms"]
    found = [_alarm(BAD, seen["sudden"], "/dead-letters")] if seen.get("sudden") else []
    found += [_alarm(WARN, seen["letters_wrong"], "/dead-letters")] if seen.get("letters_wrong") else []
    is_queued = any(group["state"] == TicketState.QUEUED for group in seen["groups"])  # which says behind what
    if seen["lag"] >= _LAG and not is_queued and oldest_ms and seen["time_ms"] - oldest_ms >= _OLD_MS:
        lag = f"{'' if seen['lag_is_exact'] else 'more than '}{seen['lag']:,}"
        found.append(_alarm(WARN, f"The consumers are behind: {lag} messages are unread", "/consumers"))
    return found


def _calm(seen: Mapping[str, Any]) -> str:
    letters, live = seen["dead_letters"], pluralize(seen["consumers"]["live"], "consumer")
    told = f"; {pluralize(letters, 'dead letter')} {'waits' if letters == 1 else 'wait'}" if letters else ""
    return f"Nothing is stuck. {live} live{told}"
