"""Events that followers of a ticket get, as server-sent events. Pure: entries and records in, events out.

``entry`` (it was added to the ticket stream), ``hand_over`` (to a consumer, under a fence), ``attempt`` (one that
failed, or attempts that a message is charged), ``completed`` (with times, from the run log), ``dead_letter``, ``state``
(handed_over, returned, put_off, paused, halted, idle; with the ``rule`` that holds), ``gap`` (events in between
are no longer there). ``time_ms`` of each: when it happened; when it was seen, if only the index tells; for a gap, the
time from which something is missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from usher.common.protocol.message import as_mapping, first_value, ticket_value
from usher.common.protocol.run_log import DONE, MERGED, decode
from usher.common.protocol.stream_id import ZERO, is_id, milliseconds
from usher.common.protocol.ticket_states import TicketState
from usher.master.policy.rules import Rule
from usher.master.policy.states import Seen, ticket_state

#: The streams that events come from, in the order of their places in a position.
SOURCES = ("entries", "runs", "dead")
ENTRIES, RUNS, DEAD = range(len(SOURCES))
#: Bytes of an entry's fields above which they are left out.
_MOST_SHOWN = 65_536
#: Most tickets that are searched for in a record before it is decoded: most records have none of them.
_FEW = 16
_POSITION = re.compile(r"[0-9]{1,20}-[0-9]{1,20}(?:_[0-9]{1,20}-[0-9]{1,20}){2}")
_BEGINNING = "_".join([ZERO.decode()] * len(SOURCES))


class Event(NamedTuple):
    """An event: ``name`` and document, for the followers of ``ticket``."""

    ticket: bytes
    name: str
    data: dict[str, Any]


def without_fields(event: Event) -> Event:
    """Return the event for followers who may not see what messages say, nor the texts of errors."""
    hidden = ("fields", "error")
    return event._replace(data={name: value for name, value in event.data.items() if name not in hidden})


def parse_position(text: str) -> list[bytes]:
    """Parse an event's ``id`` into ids: how far, in each source, a follower has come. ``0``: nowhere yet. Raises
    ValueError.

    >>> parse_position("5-1_7-0_0-0")
    [b'5-1', b'7-0', b'0-0']
    """
    text = _BEGINNING if text == "0" else text
    if not _POSITION.fullmatch(text) or not all(map(is_id, text.split("_"))):
        raise ValueError("must be the id of an event, or 0 for all that is still there")
    return [part.encode() for part in text.split("_")]


def position_text(ids: Sequence[bytes]) -> str:
    return b"_".join(ids).decode()


def frame(event: Event, position: str = "") -> bytes:
    """Encode an event for the wire. Only the last event of an entry has a position: a follower that lost the others
    then gets all of them again."""
    head = f"id: {position}\n" if position else ""
    return f"{head}event: {event.name}\ndata: ".encode() + _dump(event.data) + b"\n\n"


def _dump(data: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(data)
    except TypeError:  # text that was not UTF-8
        return orjson.dumps(
            {name: repr(value) if isinstance(value, (str, dict)) else value for name, value in data.items()}
        )


def events_of(
    source: int, entry_id: bytes, fields: Sequence[bytes], ticket_field: bytes, wanted: Collection[bytes]
) -> Iterator[Event]:
    """Yield the events of an entry of a source for the followers of the ``wanted`` tickets."""
    if source == RUNS:
        yield from _completed(entry_id, fields, wanted)
        return
    ticket = ticket_value(fields, ticket_field if source == ENTRIES else b"usher-ticket")
    if ticket is None or ticket not in wanted:
        return
    data: dict[str, Any] = {"ticket_id": ticket.decode(errors="replace"), "time_ms": milliseconds(entry_id)}
    if source == ENTRIES:
        data["message_id"] = entry_id.decode()
        if sum(map(len, fields)) <= _MOST_SHOWN:
            data["fields"] = as_mapping(fields)
        yield Event(ticket, "entry", data)
        return
    for name in ("id", "reason", "error", "error-type", "at", "attempts", "owner"):
        value = first_value(fields, f"usher-{name}".encode())
        if value is not None:
            data["message_id" if name == "id" else name.replace("-", "_")] = value.decode(errors="replace")
    yield Event(ticket, "dead_letter", data)


def _completed(entry_id: bytes, fields: Sequence[bytes], wanted: Collection[bytes]) -> Iterator[Event]:
    record = first_value(fields, b"batch")
    texts = [orjson.dumps(ticket.decode("utf-8", "replace")) for ticket in wanted] if len(wanted) <= _FEW else []
    if record is None or (texts and not any(text in record for text in texts)):
        return
    for run in decode(record):
        ticket = run.ticket.encode()
        if ticket in wanted:
            facts = run._asdict()
            # A run log that also has executions that failed says so in their outcome.
            name = "completed" if run.outcome in (DONE, MERGED) else "attempt"
            # An execution that ended with its process could not say when.
            ended = {"time_ms": run.end_us // 1000 if run.end_us else milliseconds(entry_id)}
            ids = {"ticket_id": facts.pop("ticket"), "message_id": facts.pop("id")}
            yield Event(ticket, name, ids | ended | facts)


class TicketSnapshot(NamedTuple):
    """The last view of a ticket: its row (as pages show it), and the attempts of its messages."""

    row: Mapping[str, Any]
    attempts: Mapping[str, int]


def idle(ticket: bytes) -> dict[str, Any]:
    return {"ticket_id": ticket.decode(errors="replace"), "state": TicketState.IDLE, "message_ids": []}


def ruled(row: dict[str, Any], rule: Rule | None) -> dict[str, Any]:
    """Return the row with the rule that holds: a ticket without an owner is ``paused`` by one, though the index, which
    has records only of what is handed over, may know nothing of it. Its parked messages are not looked for here, so the
    rule is shown also when none waits."""
    if rule is None:
        return row
    kind = {TicketState.IDLE: "", TicketState.RETURNED: "returned"}.get(row["state"], "owned")
    is_held = ticket_state(Seen(kind, rule=rule)).name is TicketState.PAUSED
    return row | ({"state": TicketState.PAUSED} if is_held else {}) | {"rule": rule.told()}


def changes(ticket: bytes, before: TicketSnapshot, now: TicketSnapshot) -> Iterator[Event]:
    row = now.row
    handed = before.row["message_ids"] if before.row.get("fence") == row.get("fence") else ()
    if row["state"] == TicketState.HANDED_OVER and (fresh := [one for one in row["message_ids"] if one not in handed]):
        facts = {name: row[name] for name in ("ticket_id", "owner", "consumer_name", "fence")}
        yield Event(ticket, "hand_over", {**facts, "message_ids": fresh})
    if (row["state"], row.get("rule")) != (before.row["state"], before.row.get("rule")):
        yield Event(ticket, "state", dict(row))
    for message_id, attempts in now.attempts.items():
        if before.attempts.get(message_id) != attempts:
            facts = {"ticket_id": row["ticket_id"], "message_id": message_id, "attempts": attempts}
            yield Event(ticket, "attempt", facts)
