"""Read the state that pages and commands show, from Redis alone: works without a master, and on any of them."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import GroupMissing
from usher.common.doctor.source_status import SourcesReader
from usher.common.doctor.writes import INFO_COMMANDS, write_trouble
from usher.common.protocol.attempts import NEVER
from usher.common.protocol.keys import MASTER, Keys, LogKeys
from usher.common.protocol.last_error import LastError
from usher.common.protocol.mishaps import losses_command, mishaps_command, parse_losses, parse_mishaps, told
from usher.common.protocol.owner_words import HALTED, RETURNED, TAIL, due_ms_of
from usher.common.protocol.registration import name_of
from usher.common.protocol.sources import SourceSelection
from usher.common.protocol.ticket_states import TicketState
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import (
    TicketRecord,
    TicketStream,
    pairs,
    parse_record,
)
from usher.common.redis.scripts import ScriptRunner
from usher.master.insight.lag import lag_of
from usher.master.insight.ticket_states import LOOKED_AT, ParkedRows, add_ticket_states, parked_rows
from usher.master.leader.elector import parse_held
from usher.master.membership.registry import read_left_ms, read_registry, state_of, strangers
from usher.master.operations.dead_letters import DeadLetters
from usher.master.operations.delayed_messages import waiting_commands, waiting_of
from usher.master.operations.live_rules import read_rules
from usher.master.policy.explain.tried import tried
from usher.master.policy.ticket_filter import ORDERS, TicketFilter

#: The most entries counted for the lag where Redis does not know it (before 7.0).
_MOST_COUNTED = 100_000
#: Seconds after which the search for a halted ticket's letter ends.
_LOOK_S = 0.5
#: Seconds for which the state of many sources is kept: they are looked at one by one.
_SOURCES_KEPT_S = 2.0


class FoundTickets(NamedTuple):
    """Tickets that fit a filter. ``number``: of all that were found; ``is_all``: nothing was left out of the search."""

    rows: list[dict[str, Any]]
    number: int
    is_all: bool


class StatusReader:
    """Reads the state of one ticket stream."""

    def __init__(
        self, link: Link, keys: Keys, sources: SourceSelection | None = None, ticket_field: str = "ticket_id"
    ) -> None:
        self._ticket_field = ticket_field
        self._link = link
        self._sources = SourcesReader(link, keys, sources) if sources is not None else None
        self._keys = keys
        self._stream = TicketStream(link, keys)
        self._scripts = ScriptRunner(link)
        self._letters = DeadLetters(link, keys)
        self._seen_sources: tuple[float, dict[str, Any]] | None = None

    def overview(self) -> dict[str, Any]:
        """Return stream, group, leader, and sums: entries, lag (entries not yet read), pending by owner, tickets in
        processing and halted, dead letters, live rules; and what keeps Redis from writing."""
        keys = self._keys
        sums = [
            ("XLEN", keys.stream),
            ("HLEN", keys.tickets),
            ("XLEN", keys.dead),
            ("GET", keys.leader),
            ("HLEN", keys.rules),
        ]
        asked = [*sums, mishaps_command(keys), losses_command(keys, 1), ("HGETALL", LogKeys(keys.stream).behind)]
        asked += waiting_commands(keys)
        replies = self._link.pipeline(asked)
        for reply in replies[: len(sums)]:
            if isinstance(reply, Exception):
                raise reply
        length, tickets, dead, leader, rules, mishaps, losses, behind, *delayed = replies
        held = parse_held(leader)
        trouble = write_trouble(*self._link.pipeline(INFO_COMMANDS))
        seen: dict[str, Any] = {
            "stream": keys.stream,
            "group": keys.group,
            "leader_url": held.url,
            "epoch": held.epoch,
            "entries": length,
            "tickets": tickets,
            "dead_letters": dead,
            "rules": rules,
            "behind": _behind(behind),
            "delayed": waiting_of(*delayed)._asdict(),
            "write_trouble": None if trouble is None else trouble.text,
            "mishaps": parse_mishaps(mishaps)._asdict(),
            "last_loss": next((told(loss) for loss in parse_losses(losses)), None),
            "time_ms": time.time_ns() // 1_000_000,
        }
        try:
            facts = self._stream.group_facts()
            pending = {consumer.name: consumer.pending for consumer in self._stream.group_consumers()}
        except GroupMissing:
            return seen | {
                "has_group": False,
                "lag": length,
                "lag_is_exact": True,
                "pending": 0,
                "read": None,
                "parked": 0,
                "halted": 0,
            }
        lag = lag_of(self._scripts, keys.stream, facts, length, _MOST_COUNTED)
        by_name = {"parked": pending.get(MASTER, 0), "halted": pending.get(HALTED, 0)}
        return seen | {
            "has_group": True,
            "lag": lag.entries,
            "lag_is_exact": lag.is_exact,
            "pending": facts[b"pending"],
            "read": facts.get(b"entries-read"),
            **by_name,
        }

    def sources(self) -> dict[str, Any] | None:
        """Return the progress of gathering several ticket streams (see SourcesReader), at most some seconds old; None
        when there is one stream, which is worked on as it is."""
        if self._sources is None:
            return None
        if self._seen_sources is None or now_s() - self._seen_sources[0] > _SOURCES_KEPT_S:
            self._seen_sources = (now_s(), self._sources.overview())
        return self._seen_sources[1]

    def source_rows(self, text: str, start: int, most: int) -> tuple[list[dict[str, Any]], int]:
        """Return rows of the sources that ``sources`` has counted (``SourcesReader.rows``)."""
        if self._sources is None or self.sources() is None:
            return [], 0
        return self._sources.rows(text, start, most)

    def consumers(self) -> list[dict[str, Any]]:
        """Return all registered consumers, and names in the group that still hold entries without being registered.
        ``state``: see ``state_of``."""
        members = read_registry(self._link, self._keys)
        rules = read_rules(self._link, self._keys)
        left_ms = read_left_ms(self._link, self._keys, members)
        try:
            group = {pair.name.decode(errors="replace"): pair.pending for pair in self._stream.group_consumers()}
        except (GroupMissing, CommandRefused):
            group = {}
        rows = [
            {
                "name": member.registration.name,
                "incarnation": incarnation,
                "state": state_of(member, rules),
                "lease_ms": left_ms[incarnation],
                "pending": group.get(incarnation, 0),
                "slots": member.registration.slots,
                "capacity": member.registration.capacity,
                "health_url": member.registration.health_url,
            }
            for incarnation, member in members.items()
        ]
        for incarnation, pending in strangers(group, members).items():
            rows.append(
                {
                    "name": name_of(incarnation),
                    "incarnation": incarnation,
                    "state": "lost",
                    "lease_ms": 0,
                    "pending": pending,
                }
            )
        return sorted(rows, key=lambda row: str(row["incarnation"]))

    def tickets(self, cursor: str, limit: int) -> dict[str, Any]:
        """Return about ``limit`` tickets in processing and the next cursor; ``cursor`` is "0" at first, None at the
        end."""
        found, flat = self._link.call("HSCAN", self._keys.tickets, cursor, "COUNT", limit)
        rows = [ticket_row(ticket, value) for ticket, value in pairs(flat).items()]
        add_ticket_states(self._link, self._keys, rows)
        following = bytes(found).decode()
        return {"tickets": rows, "cursor": None if following == "0" else following}

    def each(self, wanted: TicketFilter) -> Iterator[list[dict[str, Any]]]:
        """Yield page by page the tickets of the index that fit; a ticket whose record changes meanwhile may come
        twice."""
        cursor: str | None = "0"
        while cursor is not None:
            page = self.tickets(cursor, 1000)
            rows = [row for row in page["tickets"] if wanted.fits_but_for_error(row)]
            if wanted.error:  # for each of these letters all dead letters may be looked through
                self.explained([row for row in rows if row.get("last_error") is None])
            yield [row for row in rows if wanted.fits(row)]
            cursor = page["cursor"]

    def find(self, wanted: TicketFilter, order: str, most: int, within_s: float = math.inf) -> FoundTickets:
        """Return the first ``most`` tickets of all that fit, in an order of ``ORDERS``, as far as the search goes in
        that time; those without an owner as far as a list has them at all."""
        until_s = now_s() + within_s
        parked = self.parked(LOOKED_AT) if wanted.wants_waiting else ParkedRows([], True)
        found = [row for row in parked.rows if wanted.fits(row)]
        number, is_all = len(found), parked.is_all
        for page in self.each(wanted):
            number += len(page)
            found = heapq.nsmallest(most, [*found, *page], key=ORDERS[order])
            if now_s() > until_s:
                is_all = False
                break
        self.explained([row for row in found if row.get("last_error") is None])
        return FoundTickets(found, number, is_all)

    def told(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows of the index (``ticket_row``) with what their tickets are doing (``ticket_states``)."""
        add_ticket_states(self._link, self._keys, rows)
        return rows

    def parked(self, most: int) -> ParkedRows:
        """Return tickets without an owner that have parked messages: held by a rule, or waiting for a consumer
        (``ticket_states.parked_rows``)."""
        return parked_rows(self._link, self._scripts, self._keys, self._ticket_field, most)

    def ticket(self, ticket_id: str) -> dict[str, Any] | None:
        """Return a ticket in processing, or None."""
        value = self._link.call("HGET", self._keys.tickets, ticket_id)
        if value is None:
            return None
        row = ticket_row(ticket_id.encode(), value)
        add_ticket_states(self._link, self._keys, [row])
        if row["state"] == TicketState.HALTED:
            letter = self._letters.parked_of(ticket_id.encode(), _LOOK_S)
            row |= {} if letter is None else {"dead_letter": letter.row()}
        return row

    def explained(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows; those of halted tickets with the dead letter that they wait for (``dead_letter``), if it is
        among the newest, and its error where none is noted."""
        halted = [row["ticket_id"].encode() for row in rows if row["state"] == TicketState.HALTED]
        found = self._letters.parked_for(halted) if halted else {}
        for row in rows:
            letter = found.get(row["ticket_id"].encode())
            if letter is not None:
                row["dead_letter"] = letter.row()
            if letter is not None and row.get("last_error") is None:  # by a consumer of a former version
                error = LastError(letter.error, letter.error_type, letter.at, letter.attempts, at_ms=letter.written_ms)
                row |= tried(NEVER, error)
        return rows

    def audit(self) -> dict[str, Any] | None:
        """Return the summary of the last audit (``usher.master.audit.output.report.summary``); None when there was
        none, or the stored summary cannot be read."""
        return _document(self._link.call("GET", self._keys.audit))

    def history(self) -> dict[str, Any] | None:
        """Return what of history is proven, and what is not, by the last proof from the archive (``spans``,
        ``unproven``); None when there was none, or it cannot be read."""
        found = _document(self._link.call("HGET", self._keys.archived, "history"))
        spans = found.get("spans") if found else None
        is_known = isinstance(spans, list) and all(isinstance(one, list) and len(one) == 4 for one in spans)
        return found if is_known else None

    def proven_until_ms(self) -> int | None:
        """Return until when history is proven from the archive, by Redis' clock; None without a proof."""
        noted = self._link.call("HGET", self._keys.archived, "proven_until_ms")
        return int(noted) if noted and noted.isdigit() else None


def _document(stored: bytes | None) -> dict[str, Any] | None:
    try:
        found = orjson.loads(stored or b"null")
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def ticket_row(ticket: bytes, value: bytes) -> dict[str, Any]:
    """Return a record of the index as pages and programs get it."""
    row: dict[str, Any] = {"ticket_id": ticket.decode(errors="replace")}  # Usher may not have written it
    try:
        record: TicketRecord = parse_record(value)
    except ValueError:
        return row | {"state": TicketState.UNREADABLE}
    ids = [entry_id.decode() for entry_id in record.ids]
    if record.owner == RETURNED:
        return row | {"state": TicketState.RETURNED, "fence": record.fence, "message_ids": ids}
    if (due_ms := due_ms_of(record.owner)) is not None:
        return row | {"state": TicketState.PUT_OFF, "due_ms": due_ms, "fence": record.fence, "message_ids": ids}
    if record.owner == HALTED:
        return row | {"state": TicketState.HALTED, "fence": record.fence, "message_ids": ids}
    if record.owner == TAIL:
        return row | {"state": TicketState.ENDING, "fence": record.fence, "message_ids": []}
    owner = record.owner.decode(errors="replace")
    return row | {
        "state": TicketState.HANDED_OVER,
        "consumer_name": name_of(owner),
        "owner": owner,
        "fence": record.fence,
        "message_ids": ids,
    }


def _behind(reply: Any) -> dict[str, int]:
    """Return who has so much waiting that producers are told to wait: ``<group>`` or ``<group>/<tenant>``."""
    if isinstance(reply, Exception):
        return {}
    return {name.decode(errors="replace"): int(number) for name, number in pairs(reply).items()}
