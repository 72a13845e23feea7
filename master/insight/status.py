"""Read the state that pages and commands show, from Redis alone: works without a master, and on any of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from heapq import heapify, heappop, nsmallest
from itertools import islice
from time import thread_time
from typing import Any, NamedTuple

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import GroupMissing
from usher.common.doctor.collector import SourcesReader
from usher.common.doctor.judgements import INFO_COMMANDS, write_trouble
from usher.common.protocol.attempts import NEVER, decode
from usher.common.protocol.keys import MASTER, Keys
from usher.common.protocol.last_error import LastError
from usher.common.protocol.last_error import decode as decode_error
from usher.common.protocol.mishaps import losses_command, parse_losses, told
from usher.common.protocol.owner_words import due_ms_of
from usher.common.protocol.registration import name_of
from usher.common.protocol.sources import SourceSelection
from usher.common.protocol.stream_id import milliseconds
from usher.common.protocol.ticket_states import TicketState
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import TicketRecord, TicketStream, pairs, parse_record
from usher.common.redis.scripts import ScriptRunner
from usher.master.insight.lag import stream_sums, tickets_of
from usher.master.membership.registry import SILENT, read_left_ms, read_registry, state_of, strangers
from usher.master.operations.dead_letters import DeadLetters
from usher.master.operations.live_rules import read_rules
from usher.master.policy.explain.stuck import fence_ms
from usher.master.policy.rules import Rulebook
from usher.master.policy.states import Seen, kind_of, last_error, ticket_state, told_alike, tried
from usher.master.policy.ticket_filter import TicketFilter

#: The most entries counted for the lag where Redis does not know it (before 7.0).
_MOST_COUNTED = 100_000
#: The most tickets in processing that are looked through for their owners.
_MOST_INDEXED = 20_000
#: Seconds for which the state of many sources is kept: they are looked at one by one.
_SOURCES_KEPT_S = 2.0
#: Parked messages that are looked at for their tickets at a time; records that are read at a time, and looked at.
_PARKED, _AT_ONCE, _LOOKED_AT = 200, 5000, 2000
#: The key of a ticket for an order, its id, its record.
_Listed = tuple[Any, bytes, bytes]


def _age(ticket: bytes, parts: Sequence[bytes], starts: int) -> int:
    try:
        return milliseconds(parts[2])
    except (IndexError, ValueError):
        return 0  # Usher has not written it


#: Orders of a list: the keys of an id, the parts of a record and starts sort the first ticket to the front.
ORDERS: Mapping[str, Callable[[bytes, Sequence[bytes], int], Any]] = {
    "age": _age,
    "attempts": lambda ticket, parts, starts: (-starts, _age(ticket, parts, 0)),
    "messages": lambda ticket, parts, starts: (-sum(part.count(b" ") for part in parts[3:]), _age(ticket, parts, 0)),
    "ticket": lambda ticket, parts, starts: ticket,
}


@lru_cache(1000)
def _starts(noted: bytes | None) -> int:
    return decode(noted or b"0").starts


class FoundTickets(NamedTuple):
    """Tickets that fit a filter. ``number``: of all that were found; ``is_all``: nothing was left out of the search;
    ``are_first``: no other one comes before the last row."""

    rows: list[dict[str, Any]]
    number: int
    is_all: bool
    are_first: bool


class _Looked(NamedTuple):
    """A ticket of the index, its place in a list, and what one look at Redis tells of it. ``made``: its row, if there
    is one already."""

    key: Any
    ticket: bytes
    record: bytes
    seen: Seen
    error: LastError | None
    made: dict[str, Any] | None = None

    def row(self) -> dict[str, Any]:
        row = self.made or ticket_row(self.ticket, self.record)
        if "message_ids" in row and self.made is None:
            row |= tried(self.seen.attempts, self.error) | _stated(self.seen)
        return row


class StatusReader:
    def __init__(
        self, link: Link, keys: Keys, sources: SourceSelection | None = None, ticket_field: str = "ticket_id"
    ) -> None:
        self._ticket_field, self._link = ticket_field, link
        self._sources = SourcesReader(link, keys, sources) if sources is not None else None
        self._keys, self._stream, self._scripts = keys, TicketStream(link, keys), ScriptRunner(link)
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
        rows = ticket_rows(self._link, self._keys, pairs(flat).items())
        following = bytes(found).decode()
        return {"tickets": rows, "cursor": None if following == "0" else following}

    def each(self, wanted: TicketFilter) -> Iterator[list[dict[str, Any]]]:
        """Yield page by page the tickets of the index that fit; a ticket whose record changes meanwhile may come
        twice."""
        for found in self._listed(wanted, "age", set()):
            yield [one.row() for one in self._fitting(found, wanted)]

    def find(self, wanted: TicketFilter, order: str, most: int, within_s: float = math.inf) -> FoundTickets:
        """Return the first ``most`` tickets of all that fit, in an order of ``ORDERS``: they are looked at in that
        order, until there are so many, or that took ``within_s`` seconds of a core. (On a machine that is overloaded a
        page that comes late is better than one that found nothing.)"""
        began_s, listed, is_whole, named = thread_time(), list[_Listed](), True, set[bytes]()
        for page in self._listed(wanted, order, named):
            listed += page
            if thread_time() - began_s > within_s / 2:
                is_whole = False
                break
        parked, has_parked, found = list[dict[str, Any]](), True, list[_Looked]()
        if wanted.wants_waiting:
            parked, has_parked = self.parked(most, wanted.fits, now_s() + within_s, named)
        heapify(listed)
        while listed and len(found) < most and thread_time() - began_s < within_s:
            found += self._fitting([heappop(listed) for _ in range(min(len(listed), _LOOKED_AT))], wanted)
        rows = [(one.key, one.row()) for one in found[:most]]
        for row in parked:
            parts = f"x 0 {' '.join(row['message_ids'])}".encode().split(b" ", 3)
            rows.append((ORDERS[order](row["ticket_id"].encode(), parts, 0), row))
        shown = [row for _, row in nsmallest(most, rows, key=lambda one: one[0])]
        self.explained([row for row in shown if row.get("last_error") is None])
        is_all = is_whole and has_parked and not listed
        are_first = is_all or (is_whole and has_parked and len(shown) == most)
        return FoundTickets(shown, len(found) + len(parked), is_all, are_first)

    def _listed(self, wanted: TicketFilter, order: str, named: set[bytes]) -> Iterator[list[_Listed]]:
        """Yield page by page the tickets of the index that may fit, as far as their records tell. ``named`` gets the
        messages that records of tickets without an owner name, if those of others that wait are wanted. Kept short,
        because it runs by the hundred thousand."""
        key, known, noted, names = ORDERS[order], dict[bytes, bool](), dict[bytes, int](), wanted.wants_waiting
        cursor = b""
        while cursor != b"0":
            cursor, flat = self._link.call("HSCAN", self._keys.tickets, cursor or b"0", "COUNT", _AT_ONCE)
            found = []
            if order == "attempts" and flat:
                ids = [b"".join(record.split(b" ", 3)[2:3]) for record in flat[1::2]]
                noted = dict(zip(ids, map(_starts, self._link.call("HMGET", self._keys.attempts, *ids)), strict=True))
            for ticket, record in zip(flat[::2], flat[1::2], strict=True):
                parts = record.split(b" ", 3)
                # until when one waits, makes no difference
                word = b"waits@" if record.startswith(b"waits@") else parts[0]
                if word not in known:
                    known[word] = wanted.may_fit(parts[0])
                if known[word]:
                    starts = noted.get(parts[2], 0) if noted and len(parts) > 2 else 0
                    found.append((key(ticket, parts, starts), ticket, record))
                if names and b":" not in word:
                    named.update(record.split(b" ")[2:])
            yield found

    def _fitting(self, listed: Sequence[_Listed], wanted: TicketFilter) -> list[_Looked]:
        found = _look_at(self._link, self._keys, listed, wanted)
        if not wanted.error:
            return found
        # Of a halted ticket its letter may tell the error: for each of these letters all may be looked through.
        unknown = [one for one in found if one.error is None and one.seen.kind == "halted"]
        told = self.explained([one.row() for one in unknown])
        rows = {one.ticket: row for one, row in zip(unknown, told, strict=True)}
        kept = []
        for one in found:
            row, error = rows.get(one.ticket), last_error(one.seen.attempts, one.error)
            if wanted.has_error(row["last_error"] if row is not None else error and error._asdict()):
                kept.append(one._replace(made=row))
        return kept

    def parked(
        self,
        most: int,
        fits: Callable[[dict[str, Any]], bool] = lambda row: True,
        until_s: float = math.inf,
        named: Collection[bytes] = (),
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return the first ``most`` tickets that fit of those without an owner that have parked messages, the oldest
        first, as far as there is time: ``paused`` by a rule (``why``), or ``waiting``. They have no record in the
        index. ``named``: messages that its records name. The second value is False when tickets, or messages of the
        listed ones, may be missing."""
        keys, ids, rows, book = self._keys, dict[bytes, list[str]](), list[dict[str, Any]](), Rulebook()
        pending = (one for one in self._stream.pending_of(MASTER) if one not in named)
        heads = tickets_of(self._scripts, keys, self._ticket_field, pending)
        with suppress(GroupMissing):
            while page := list(islice(heads, _PARKED)):
                known = len(ids)
                for entry_id, ticket in page:
                    ids.setdefault(ticket, []).append(entry_id.decode())
                new = list(islice(ids, known, None))
                records = self._link.call("HMGET", keys.tickets, *new) if new else ()
                alone = [ticket for ticket, record in zip(new, records, strict=True) if record is None]
                book = read_rules(self._link, keys) if alone and not rows else book
                for one in alone:
                    row = {"ticket_id": one.decode(errors="replace"), "message_ids": ids[one]}
                    if fits(row := row | _stated(Seen(rule=book.of(one)))):
                        rows.append(row)
                if len(rows) > most or now_s() > until_s:
                    return rows[:most], False
        return rows, True

    def ticket(self, ticket_id: str) -> dict[str, Any] | None:
        value = self._link.call("HGET", self._keys.tickets, ticket_id)
        if value is None:
            return None
        return self.explained(ticket_rows(self._link, self._keys, [(ticket_id.encode(), value)]))[0]

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

    def report(self) -> dict[str, Any] | None:
        """Return the head of the last `usher report`."""
        return _document(self._link.call("HGET", self._keys.archived, "report"))

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


def ticket_rows(link: Link, keys: Keys, found: Iterable[tuple[bytes, bytes]]) -> list[dict[str, Any]]:
    """Return rows of tickets and their records, with what they are doing, in the words of explain, as far as one look
    at Redis can tell: the owner alone knows whether a handler runs at this moment, and is not asked."""
    return [one.row() for one in _look_at(link, keys, [(0, *pair) for pair in found], TicketFilter())]


def _look_at(link: Link, keys: Keys, listed: Sequence[_Listed], wanted: TicketFilter) -> list[_Looked]:
    """Return those that are in a wanted state, with what they are doing: in one round trip for all, and one for the
    rules if any was given back. Kept short, because it runs by the ten thousand."""
    heads = [record.split(b" ", 3) for _, _, record in listed]
    heads = [head if len(head) > 2 and head[1].isdigit() else [b"", b"", b""] for head in heads]
    words, ids = [head[0].partition(b"@")[0] for head in heads], [head[2] for head in heads]
    named = dict(zip(words, (head[0] for head in heads), strict=True))  # until when one waits, makes no difference
    kinds = {word: kind_of(owner) or "unreadable" for word, owner in named.items()}
    owners = [owner for word, owner in named.items() if kinds[word] == "owned"]
    asked: list[tuple[str | bytes, ...]] = [("HMGET", key, *ids) for key in (keys.attempts, keys.errors) if ids]
    leased = [("EXISTS", keys.lease(owner.decode(errors="replace"))) for owner in owners]
    noted, errors, *leases = link.all_of([*asked, *leased]) or ((), ())
    lost = {owner for owner, there in zip(owners, leases, strict=True) if not there}
    book = read_rules(link, keys) if "returned" in kinds.values() else Rulebook()
    fits, found = dict[tuple[str, str, bytes | None], bool](), list[_Looked]()
    for one, word, value, text in zip(listed, words, noted, errors, strict=True):
        kind, lease = kinds[word], "lost" if word in lost else "live"
        alike = (kind, lease, value)  # but for errors and rules
        if text is None and kind != "returned" and not fits.get(alike, True):
            continue
        error, rule = decode_error(text), book.of(one[1]) if kind == "returned" else None
        seen = Seen(kind, lease, NEVER if value is None else decode(value), 0, rule, told_alike(error))
        is_wanted = wanted.has_state(ticket_state(seen).name)
        if text is None:
            fits[alike] = is_wanted
        if is_wanted:
            found.append(_Looked(*one, seen, error))
    return found


def _stated(seen: Seen) -> dict[str, str]:
    state = ticket_state(seen)
    return {"state": state.name, "why": state.why(seen)} if state.name == TicketState.PAUSED else {"state": state.name}
