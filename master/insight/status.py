"""Read the state that pages and commands show, from Redis alone: works without a master, and on any of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import GroupMissing
from usher.common.doctor.judgements import INFO_COMMANDS, write_trouble
from usher.common.doctor.source_status import SourcesReader
from usher.common.protocol.attempts import NEVER, decode
from usher.common.protocol.keys import MASTER, Keys
from usher.common.protocol.last_error import LastError
from usher.common.protocol.last_error import decode as decode_error
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.mishaps import losses_command, parse_losses, told
from usher.common.protocol.owner_words import due_ms_of
from usher.common.protocol.registration import name_of
from usher.common.protocol.sources import SourceSelection
from usher.common.protocol.ticket_states import TicketState
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import TicketRecord, TicketStream, pairs, parse_record
from usher.common.redis.scripts import ScriptRunner
from usher.master.insight.lag import stream_sums
from usher.master.membership.registry import SILENT, read_left_ms, read_registry, state_of, strangers
from usher.master.operations.dead_letters import DeadLetters
from usher.master.operations.live_rules import read_rules
from usher.master.policy.explain.stuck import fence_ms
from usher.master.policy.rules import Rulebook
from usher.master.policy.states import Seen, kind_of, ticket_state, told_alike, tried
from usher.master.policy.ticket_filter import ORDERS, TicketFilter

#: The most entries counted for the lag where Redis does not know it (before 7.0).
_MOST_COUNTED = 100_000
#: The most tickets in processing that are looked through for their owners.
_MOST_INDEXED = 20_000
#: Seconds for which the state of many sources is kept: they are looked at one by one.
_SOURCES_KEPT_S = 2.0
#: The most parked messages that are looked at for their tickets, the oldest ones.
LOOKED_AT = 200


class ParkedRows(NamedTuple):
    """Rows of tickets with parked messages. ``is_all``: False when tickets, or messages of the listed ones, may be
    missing: more is parked than was looked at, or was asked for."""

    rows: list[dict[str, Any]]
    is_all: bool


class FoundTickets(NamedTuple):
    """Tickets that fit a filter. ``number``: of all that were found; ``is_all``: nothing was left out of the search."""

    rows: list[dict[str, Any]]
    number: int
    is_all: bool


class StatusReader:
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
        seen = stream_sums(self._link, self._scripts, self._keys, _MOST_COUNTED)
        for name in ("by_name", "oldest", "told", "delivered"):
            del seen[name]
        losses, *told_of = self._link.pipeline([losses_command(self._keys, 1), *INFO_COMMANDS])
        trouble = write_trouble(*told_of)
        last_loss = next((told(loss) for loss in parse_losses(losses)), None)
        return seen | {"write_trouble": None if trouble is None else trouble.text, "last_loss": last_loss}

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
        """Return all registered consumers, and names in the group that still hold entries without being registered
        (``consumer_rows``), with the tickets that they have in processing."""
        try:
            group = {pair.name.decode(errors="replace"): pair.pending for pair in self._stream.group_consumers()}
        except (GroupMissing, CommandRefused):
            group = {}
        rows = consumer_rows(self._link, self._keys, read_rules(self._link, self._keys), group)
        having: dict[bytes, list[str]] = {str(row["incarnation"]).encode(): [] for row in rows}
        for ticket, record in islice(self._stream.records(), _MOST_INDEXED):
            if record is not None and record.owner in having:
                having[record.owner].append(ticket.decode(errors="replace"))
        return [row | {"ticket_ids": sorted(having[str(row["incarnation"]).encode()])} for row in rows]

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
        value = self._link.call("HGET", self._keys.tickets, ticket_id)
        if value is None:
            return None
        row = ticket_row(ticket_id.encode(), value)
        add_ticket_states(self._link, self._keys, [row])
        return self.explained([row])[0]

    def explained(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows; those of halted tickets with the dead letter that they wait for (``dead_letter``), and its
        error where none is noted."""
        found = self._letters.parked_for(
            row["ticket_id"].encode() for row in rows if row["state"] == TicketState.HALTED
        )
        for row in rows:
            letter = found.get(row["ticket_id"].encode())
            if letter is not None:
                row["dead_letter"] = letter.row()
            if letter is not None and row.get("last_error") is None:
                error = LastError(letter.error, letter.error_type, letter.at, letter.attempts, at_ms=letter.written_ms)
                row |= tried(NEVER, error)
        return rows

    def audit(self) -> dict[str, Any] | None:
        """Return the summary of the last audit (``usher.master.audit.job.summary``); None when there was
        none, or the stored summary cannot be read."""
        return _document(self._link.call("GET", self._keys.audit))

    def history(self) -> dict[str, Any] | None:
        """Return what the last proof from the archive said (``since_ms``, ``executions``, ``before``, ``unproven``),
        and ``until_ms``; None when there was none, or it cannot be read."""
        found = _document(self._link.call("HGET", self._keys.archived, "history"))
        return found and found | {"until_ms": self.proven_until_ms()}

    def proven_until_ms(self) -> int | None:
        """Return until when history is proven from the archive, by Redis' clock; None without a proof."""
        noted = self._link.call("HGET", self._keys.archived, "proven_until_ms")
        return int(noted) if noted and noted.isdigit() else None


def consumer_rows(link: Link, keys: Keys, rules: Rulebook, pending: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return a row for each registered consumer, and with less in it for each name in the group that holds entries
    without being registered. ``state``: see ``state_of``; ``lease_ms``: what is left of its lease; ``silent``: it
    renews that, and does not answer the leader over HTTP."""
    members = read_registry(link, keys)
    left_ms = read_left_ms(link, keys, members)
    silent = (link.call("HGET", keys.counters, SILENT) or b"").decode().split()
    rows: list[dict[str, Any]] = []
    for incarnation, member in members.items():
        asked = member.registration
        row: dict[str, Any] = {"name": asked.name, "incarnation": incarnation, "state": state_of(member, rules)}
        row |= {"lease_ms": left_ms[incarnation], "pending": pending.get(incarnation, 0)}
        row |= {"silent": True} if incarnation in silent and member.alive else {}
        row |= {"slots": asked.slots, "capacity": asked.capacity, "health_url": asked.health_url}
        rows.append(row | {"started_ms": fence_ms(asked.generation)})
    for incarnation, count in strangers(pending, members).items():
        row = {"name": name_of(incarnation), "incarnation": incarnation, "state": "lost"}
        rows.append(row | {"lease_ms": 0, "pending": count})
    return sorted(rows, key=lambda row: str(row["incarnation"]))


def _document(stored: bytes | None) -> dict[str, Any] | None:
    try:
        found = orjson.loads(stored or b"null")
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def ticket_row(ticket: bytes, value: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"ticket_id": ticket.decode(errors="replace")}  # Usher may not have written it
    try:
        record: TicketRecord = parse_record(value)
    except ValueError:
        return row | {"state": TicketState.UNREADABLE}
    kind, owner, due_ms = kind_of(record.owner), record.owner.decode(errors="replace"), due_ms_of(record.owner)
    row |= {"state": ticket_state(Seen(kind)).name, "fence": record.fence}
    row |= {"message_ids": [entry_id.decode() for entry_id in record.ids]}
    row |= {"due_ms": due_ms} if due_ms is not None else {}
    return row | ({"consumer_name": name_of(owner), "owner": owner} if kind == "owned" else {})


def add_ticket_states(link: Link, keys: Keys, rows: Sequence[dict[str, Any]]) -> None:
    """Add to the tickets of a page what they are doing, in the words of explain, as far as one look at Redis for the
    whole page can tell: the owner alone knows whether a handler runs at this moment, and is not asked.

    Set the state of rows of the index: ``retrying``, by their owner or in a while; ``recovering``, when the lease of
    the owner has ended; ``paused`` (with ``why``), when the ticket was given back and a rule holds it. Add how often
    the first message was tried, and its last error. Makes one round trip for all rows, and one for the rules if any
    ticket was given back."""
    heads = {row["message_ids"][0]: row for row in rows if row.get("message_ids")}
    if heads:
        owners = list(dict.fromkeys(row["owner"] for row in heads.values() if "owner" in row))
        asked = [("HMGET", keys.attempts, *heads), ("HMGET", keys.errors, *heads)]
        noted, errors, *leases = link.all_of([*asked, *(("EXISTS", keys.lease(owner)) for owner in owners)])
        alive = {owner for owner, there in zip(owners, leases, strict=True) if there}
        is_held = any(row["state"] == TicketState.RETURNED for row in heads.values())
        book = read_rules(link, keys) if is_held else Rulebook()
        for row, value, error in zip(heads.values(), noted, errors, strict=True):
            known, last = NEVER if value is None else decode(value), decode_error(error)
            kind = "owned" if "owner" in row else str(row["state"])
            rule = (
                book.of(row["ticket_id"].encode("utf-8", "surrogateescape")) if kind == TicketState.RETURNED else None
            )
            lease = "lost" if kind == "owned" and row["owner"] not in alive else "live"
            row |= tried(known, last)
            row |= _stated(Seen(kind, lease, known, row.get("due_ms", 0), rule, told_alike(last)))


def _stated(seen: Seen) -> dict[str, str]:
    state = ticket_state(seen)
    return {"state": state.name, "why": state.why(seen)} if state.name == TicketState.PAUSED else {"state": state.name}


def parked_rows(link: Link, scripts: ScriptRunner, keys: Keys, ticket_field: str, most: int) -> ParkedRows:
    """Return tickets without an owner that have parked messages, the oldest first: ``paused`` by a rule (``why``), or
    ``waiting``. They have no record in the index; of very many parked messages only the oldest are looked at."""
    is_all, flat = scripts.run(
        "pending_heads", (keys.stream,), (keys.group, MASTER, LOOKED_AT + 1, ticket_field, LONGEST_TICKET)
    )
    ids: dict[bytes, list[str]] = {}
    for entry_id, ticket in zip(flat[::2], flat[1::2], strict=True):
        ids.setdefault(ticket, []).append(entry_id.decode())
    if not ids:
        return ParkedRows([], bool(is_all))
    records = link.call("HMGET", keys.tickets, *ids)
    alone = [ticket for ticket, record in zip(ids, records, strict=True) if record is None]
    book = read_rules(link, keys)
    rows = [
        {"ticket_id": one.decode(errors="replace"), "message_ids": ids[one], **_stated(Seen(rule=book.of(one)))}
        for one in alone[:most]
    ]
    return ParkedRows(rows, bool(is_all) and len(alone) <= most)
