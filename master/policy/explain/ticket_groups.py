"""Tickets that are in the same trouble are one group: same state, same error. Pure: rows in (``stuck.describe``),
groups out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from usher.common.base.text import label, pluralize, time_of_day
from usher.common.protocol.ticket_states import TicketState

#: Rows that a group shows; the others are counted.
SHOWN = 20
#: Most groups; tickets of further ones are counted as "others".
_MOST = 200
#: What needs somebody comes first.
_ORDER = tuple(
    map(
        TicketState,
        ("halted", "unreadable", "retrying", "recovering", "paused", "waiting", "handed_over", "returned", "put_off"),
    )
)

GroupKey = tuple[str, str]
#: The group of what is in none of the named ones.
_FURTHER = {"state": "further", "error": "", "at": "", "tickets_are_all": True, "messages_are_all": False, "rows": []}


def key_of(row: Mapping[str, Any]) -> GroupKey:
    state = row["state"]
    if row["error"]:
        return state, row["error"]
    if state in (TicketState.HALTED, TicketState.RETRYING):
        return state, ""
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
        self, rows: Iterable[dict[str, Any]], has_all: bool = False, rows_are_all: bool = True
    ) -> list[dict[str, Any]]:
        """Return all groups, those that need somebody first; of ``rows``, what is in none of the groups counted here
        is counted too, and what is in one takes the place of the rows kept. ``has_all``: no message waits that the
        records do not name; ``rows_are_all``: no ticket is stuck that is neither counted here nor a row."""
        more, fresh = TicketGroups(), dict[GroupKey, list[dict[str, Any]]]()
        for row in rows:
            key = key_of(row)
            if key in self._groups:
                fresh.setdefault(key, []).append(row)
            else:
                more.add(row)
        known = [
            _larger(group, fresh.get(key, []))
            | {"messages_are_all": has_all or group["messages_are_all"], "rows": fresh.get(key, group["rows"])[:SHOWN]}
            | {"tickets_are_all": True}
            for key, group in self._groups.items()
        ]
        if others := self.others + more.others:
            text = f"further errors, more than {_MOST} in all"
            since_ms = min(group["since_ms"] for group in known)
            known.append(dict(_FURTHER, text=text, tickets=others, messages=others, since_ms=since_ms))
        others_known = [
            group | {"tickets_are_all": rows_are_all, "messages_are_all": rows_are_all and group["messages_are_all"]}
            for group in more._groups.values()
        ]
        both = [group | {"told": told(group), "what": what(group)} for group in (*known, *others_known)]
        ranks = {state: at for at, state in enumerate(_ORDER)}
        return sorted(both, key=lambda one: (ranks.get(one["state"], len(ranks)), -one["tickets"], one["text"]))


def _larger(group: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(rows) <= group["tickets"]:
        return group
    messages, since_ms = sum(1 + row["behind"] for row in rows), min(row["since_ms"] for row in rows)
    return group | {"tickets": len(rows), "messages": max(messages, group["messages"]), "since_ms": since_ms}


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
    how = "waiting, uncharged, for a try that succeeds" if group.get("alike") else label(group["state"])
    return f"{how}{why}, since {time_of_day(group['since_ms'])}, in all {wait}"
