"""Read what messages say, as far as lists show it: chosen fields of many of them in few calls. And find messages by a
value in a field, among what is unfinished and the dead letters."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from usher.common.base.clock import now_s
from usher.common.protocol.keys import Keys
from usher.common.protocol.message import LONGEST_TICKET, SHOWN_BYTES, shown_fields
from usher.common.protocol.registration import name_of
from usher.common.protocol.stream_id import ZERO, is_id, rank
from usher.common.protocol.ticket_states import BY_OWNER, TicketState
from usher.common.redis.client import Link
from usher.common.redis.scripts import ScriptRunner
from usher.master.insight.stats import stream_sums
from usher.master.insight.status import ticket_rows
from usher.master.policy.letters import HALT

#: Seconds that reading a list, or a search, may take for one answer; and messages read by one call.
FIELDS_S, _READ_AT_ONCE = 0.15, 200
#: Of a traceback, which the handler's process bounds.
_TRACE_BYTES = 32_768
#: Of a search: entries looked at by one call, and for one answer; and the most entries counted for the lag where Redis
#: does not know it.
_FIND_AT_ONCE, _MOST_LOOKED_AT, _MOST_COUNTED = 200, 20_000, 4_000
#: Rows of an answer, which may have those of one call more; and the longest value that is looked for, in bytes.
ROWS, LONGEST_VALUE = 100, 1_024
DEAD_LETTER = "dead_letter"
#: Nothing comes after it, and Redis refuses to look there.
_HIGHEST = b"18446744073709551615-18446744073709551615"
#: A search goes the way that messages go, so that none slips past it: what is pending, what was unread when it began,
#: what is dead.
_PENDING, _UNREAD, _DEAD = "pending", "unread", "dead"
_CURSOR = re.compile(r"(pending|unread|dead)_([0-9]+-[0-9]+)_([0-9]+-[0-9]+)_([0-9]{1,12})")
_STATES = {b"": TicketState.UNREAD, **BY_OWNER}

IdOf = Callable[[dict[str, Any]], str | None]


class FoundMessages(NamedTuple):
    """An answer of a search. ``looked_at``: entries, those for former answers included, of ``number`` (or more, unless
    ``is_exact``); ``cursor``: where the next one begins, None at the end."""

    rows: list[dict[str, Any]]
    looked_at: int
    number: int
    is_exact: bool
    cursor: str | None


class _SearchPosition(NamedTuple):
    """Place in a search: the last entry looked at of a part. ``since``: the last id that the group had been given
    when the search began."""

    part: str
    last: bytes
    since: bytes
    looked_at: int

    def __str__(self) -> str:
        return f"{self.part}_{self.last.decode()}_{self.since.decode()}_{self.looked_at}"


class MessageFields:
    """Reader of the messages of one ticket stream, and of its dead letters. ``names``: the fields that lists show.
    ``within_s``: what takes longer is not read, and said to be left."""

    def __init__(
        self, link: Link, keys: Keys, ticket_field: str, names: Sequence[str] = (), within_s: float = FIELDS_S
    ) -> None:
        self._link = link
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self._ticket_field = ticket_field
        self.names = tuple(names)
        self._within_s = within_s

    def add(self, rows: Sequence[dict[str, Any]], id_of: IdOf, stream: str = "") -> list[dict[str, Any]]:
        """Return the rows, each with ``shown_fields`` of its message: texts by name, None for a field that it lacks.
        None instead of them all: it was not read, because those before it took too long."""
        if not self.names:
            return [row | {"shown_fields": {}} for row in rows]
        ids = list(dict.fromkeys(filter(None, map(id_of, rows))))
        values = self._values(stream or self._keys.stream, self.names, ids)
        known = {one: shown_fields(self.names, found) for one, found in values.items()}
        nothing = shown_fields(self.names, ())
        return [row | {"shown_fields": known.get(one) if (one := id_of(row)) else nothing} for row in rows]

    def add_to_letters(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.add(rows, lambda row: row["id"], self._keys.dead)

    def add_to_tickets(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.add(rows, lambda row: next(iter(row.get("message_ids") or ()), None))

    def add_to_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return groups of stuck tickets with the fields of the first message of each ticket."""
        rows = iter(self.add([row for group in groups for row in group["rows"]], lambda row: row["head"]))
        return [group | {"rows": [next(rows) for _ in group["rows"]]} for group in groups]

    def traces(self, letters: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the traceback of the first letter of each kind of error, by its id."""
        first = {(row["error_type"], row["at"]): row["id"] for row in reversed(letters)}
        found = self._values(self._keys.dead, ("usher-traceback",), list(first.values()), _TRACE_BYTES)
        return {one: told[0].decode(errors="replace") for one, (told,) in found.items() if told}

    def _values(
        self, stream: str, names: Sequence[str], ids: Sequence[str], most_bytes: int = SHOWN_BYTES
    ) -> dict[str, list[Any]]:
        until_s, known, left = now_s() + self._within_s, dict[str, list[Any]](), list(ids)
        while left:
            some = left[:_READ_AT_ONCE]
            values = self._scripts.run("read_fields", (stream,), (most_bytes, "", len(names), *names, *some))
            known.update(zip(some, values, strict=False))
            left = left[len(values) :]
            if now_s() > until_s:
                break
        return known

    # -- the search

    def find(
        self,
        field: str,
        value: bytes,
        cursor: str | None = None,
        most: int = ROWS,
        most_looked_at: int = _MOST_LOOKED_AT,
    ) -> FoundMessages:
        """Find messages whose first field of that name (or path) is exactly ``value``. Raises ValueError when
        ``cursor`` is not from a former answer."""
        until_s, (delivered, number, is_exact) = now_s() + self._within_s, self._bounds()
        place: _SearchPosition | None = (first := _begin(cursor, delivered or ZERO))
        # What moves on meanwhile may be met twice.
        rows, looked_at = dict[str, dict[str, Any]](), first.looked_at
        while place is not None:
            ids, seen, following = self._look(field, value, place, delivered is not None)
            rows |= {
                row["message_id"] or row["letter_id"]: row for row in self._told(ids, place.part, delivered or ZERO)
            }
            looked_at, place = looked_at + seen, following
            if len(rows) >= most or looked_at - first.looked_at >= most_looked_at or now_s() > until_s:
                break
        return FoundMessages(list(rows.values()), looked_at, max(number, looked_at), is_exact, place and str(place))

    def _bounds(self) -> tuple[bytes | None, int, bool]:
        """Return the last id that the group was given (None: there is no group), and how many entries there are to look
        at, with whether that is exact."""
        seen = stream_sums(self._link, self._scripts, self._keys, _MOST_COUNTED)
        delivered = seen["delivered"] if seen["has_group"] else None
        return delivered, seen["pending"] + seen["lag"] + seen["dead_letters"], seen["lag_is_exact"]

    def _look(
        self, field: str, value: bytes, place: _SearchPosition, has_group: bool
    ) -> tuple[list[bytes], int, _SearchPosition | None]:
        keys, last, ids, number, is_all = self._keys, b"", list[bytes](), 0, 1
        stream, group = (keys.dead if place.part == _DEAD else keys.stream), keys.group * (place.part == _PENDING)
        if (has_group or not group) and place.last != _HIGHEST:
            named = field.encode("utf-8", "surrogateescape")
            args = ("XRANGE", b"(" + place.last, "+", _FIND_AT_ONCE, named, value, "", group, "")
            number, last, ids, is_all = self._scripts.run("find_entries", (stream,), args)
        further = place._replace(looked_at=place.looked_at + number)
        if not is_all:
            return ids, number, further._replace(last=last)
        if place.part == _PENDING:
            return ids, number, further._replace(part=_UNREAD, last=place.since)
        return ids, number, further._replace(part=_DEAD, last=ZERO) if place.part == _UNREAD else None

    def _told(self, ids: list[bytes], part: str, delivered: bytes) -> list[dict[str, Any]]:
        keys, named = self._keys, [one.decode() for one in ids]
        if part == _DEAD:
            values = self._values(keys.dead, ("usher-ticket", "usher-id", "usher-policy", *self.names), named)
            halts = {one for one in named if _text(values.get(one), 2) == HALT}
            return [
                self._row(TicketState.HALTED if one in halts else DEAD_LETTER, values.get(one), 3)
                | {"letter_id": one, "message_id": _text(values.get(one), 1)}
                for one in named
            ]
        asked = [("XPENDING", keys.stream, keys.group, one, one, 1) for one in ids]
        replies = self._link.pipeline(asked)
        owners = [b"" if isinstance(reply, Exception) or not reply else bytes(reply[0][1]) for reply in replies]
        found = zip(named, owners, strict=True)
        kept = {one: owner for one, owner in found if owner or rank(one.encode()) > rank(delivered)}
        values = self._values(keys.stream, (self._ticket_field, *self.names), list(kept))
        rows = [
            self._row(_STATES.get(owner, TicketState.HANDED_OVER), values.get(one), 1)
            | {"message_id": one, "consumer_name": "" if owner in _STATES else name_of(owner.decode(errors="replace"))}
            for one, owner in kept.items()
        ]
        first = self._first_states({row["ticket_id"] for row in rows if row["ticket_id"]})
        return [row | {"state": first.get(row["message_id"], row["state"])} for row in rows]

    def _first_states(self, tickets: Collection[str]) -> dict[str, str]:
        """Return the states of the first messages of these tickets, as their lists and pages say them."""
        values = self._link.call("HMGET", self._keys.tickets, *tickets) if tickets else []
        named = zip(tickets, values, strict=True)
        rows = ticket_rows(self._link, self._keys, [(ticket.encode(), value) for ticket, value in named if value])
        return {row["message_ids"][0]: row["state"] for row in rows if row.get("message_ids")}

    def _row(self, state: str, values: list[Any] | None, before: int) -> dict[str, Any]:
        ticket = _text(values, 0)
        chosen = None if values is None else shown_fields(self.names, values[before:])
        nothing = {"message_id": None, "letter_id": None, "consumer_name": ""}
        return {**nothing, "ticket_id": ticket, "state": state, "shown_fields": chosen}


def _begin(cursor: str | None, delivered: bytes) -> _SearchPosition:
    if cursor is None:
        return _SearchPosition(_PENDING, ZERO, delivered, 0)
    parts = _CURSOR.fullmatch(cursor)
    if parts is None or not all(is_id(one) or one.encode() == _HIGHEST for one in parts.group(2, 3)):
        raise ValueError("not a place in a search")
    return _SearchPosition(parts[1], parts[2].encode(), parts[3].encode(), int(parts[4]))


def _text(values: list[Any] | None, at: int) -> str | None:
    found = values[at] if values is not None and at < len(values) else None
    return None if found is None or found[1] > LONGEST_TICKET else found[0].decode(errors="replace")
