"""Read the state that pages and commands show, from Redis alone: works without a master, and on any of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import islice
from time import thread_time
from typing import Any, NamedTuple

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import GroupMissing
from usher.common.doctor.collector import SourcesReader
from usher.common.doctor.judgements import INFO_COMMANDS, write_trouble
from usher.common.protocol.attempts import NEVER, Attempts, decode
from usher.common.protocol.keys import MASTER, Keys
from usher.common.protocol.last_error import LastError
from usher.common.protocol.last_error import decode as decode_error
from usher.common.protocol.mishaps import losses_command, parse_losses, told
from usher.common.protocol.owner_words import due_ms_of
from usher.common.protocol.registration import name_of
from usher.common.protocol.sources import SourceSelection
from usher.common.protocol.ticket_states import TicketState
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import TicketRecord, TicketStream, pairs, parse_record
from usher.common.redis.scripts import ScriptRunner
from usher.master.insight.stats import Kept, stream_sums, tickets_of
from usher.master.membership.registry import SILENT, read_left_ms, read_registry, state_of, strangers
from usher.master.operations.dead_letters import DeadLetters
from usher.master.operations.live_rules import read_rules
from usher.master.policy.explain.stuck import fence_ms
from usher.master.policy.rules import Rulebook
from usher.master.policy.states import Seen, kind_of, last_error, ticket_state, told_alike, tried
from usher.master.policy.ticket_filter import TicketFilter

#: The most entries counted for the lag where Redis does not know it (before 7.0).
_MOST_COUNTED = 100_000
#: Seconds of a core that looking through the index for the tickets of consumers may take.
_OWNERS_S = 0.1
#: Seconds for which the state of many sources is kept: they are looked at one by one; and for which a scan of the index
#: serves all lists.
_SOURCES_KEPT_S, _SCAN_KEPT_S = 2.0, 2.0
#: Parked messages that are looked at for their tickets at a time; records that are read at a time, and looked at.
_PARKED, _AT_ONCE, _LOOKED_AT = 200, 5000, 2000


@lru_cache(1000)
def _attempts(noted: bytes | None) -> Attempts:
    return NEVER if noted is None else decode(noted)


class _Scan:
    """Tickets and their records, and what lists choose and sort them by, in columns: kept short, because they have a
    hundred thousand. ``is_all``: there was time for all of them."""

    def __init__(self, link: Link, keys: Keys, found: Mapping[bytes, bytes], is_all: bool = True) -> None:
        self._link, self._keys, self.is_all, self.at_s = link, keys, is_all, now_s()
        self.tickets, self.records = list(found), list(found.values())
        self._orders = dict[str, list[int]]()

    @cached_property
    def words(self) -> list[bytes]:
        """Name who has each ticket; until when one waits, makes no difference."""
        return [record.partition(b" ")[0].partition(b"@")[0] for record in self.records]

    @cached_property
    def heads(self) -> list[bytes]:
        """The first message of each ticket; b"" where Usher has not written the record."""
        parts = (record.split(b" ", 3) for record in self.records)
        return [part[2] if len(part) > 2 and part[1].isdigit() else b"" for part in parts]

    @cached_property
    def ages(self) -> list[int]:
        return [int(ms) if (ms := head.partition(b"-")[0]).isdigit() else 0 for head in self.heads]

    @cached_property
    def starts(self) -> list[int]:
        parts = (self.heads[at : at + _AT_ONCE] for at in range(0, len(self.heads), _AT_ONCE))
        noted = self._link.all_of([("HMGET", self._keys.attempts, *ids) for ids in parts])
        return [_attempts(one).starts for part in noted for one in part]

    @cached_property
    def sizes(self) -> list[int]:
        return [record.count(b" ") for record in self.records]

    @cached_property
    def named(self) -> set[bytes]:
        """Messages that records name, and other words of some."""
        long = b" ".join(record for record, size in zip(self.records, self.sizes, strict=True) if size > 2)
        return {*self.heads, *long.split(b" ")}

    def order(self, name: str) -> list[int]:
        """Return the places of all tickets, the first one first."""
        if name not in self._orders:
            by_age = range(len(self.records)) if name in ("age", "ticket") else self.order("age")  # no two are alike
            self._orders[name] = sorted(by_age, key=ORDERS[name](self).__getitem__)
        return self._orders[name]

    @cached_property
    def owners(self) -> dict[bytes, bytes]:
        """What records name in place of an owner, by its word."""
        return {
            word: record.partition(b" ")[0] for word, record in dict(zip(self.words, self.records, strict=True)).items()
        }

    def places(self, wanted: TicketFilter, order: str) -> Iterator[int]:
        """Yield, in an order, the places of tickets that may fit, as far as their records tell."""
        words, fits = self.words, {word: wanted.may_fit(owner) for word, owner in self.owners.items()}
        return (at for at in (self.order(order) if any(fits.values()) else ()) if fits[words[at]])


#: Orders of a list: the columns that it is sorted by; what is alike comes by age.
ORDERS: Mapping[str, Callable[[_Scan], Sequence[Any]]] = {
    "age": lambda scan: scan.ages,
    "attempts": lambda scan: [-starts for starts in scan.starts],
    "messages": lambda scan: [-size for size in scan.sizes],
    "ticket": lambda scan: scan.tickets,
}


class _Looked(NamedTuple):
    """A ticket of the index, and what one look at Redis tells of it. ``made``: its row, if there is one already."""

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
        self._letters, self._scanning = DeadLetters(link, keys), threading.Lock()
        self._scan: _Scan | None = None
        self._kept_sources = Kept(_SOURCES_KEPT_S, self._sources.overview) if self._sources is not None else None

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
        return self._kept_sources() if self._kept_sources is not None else None

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
        scan = self._scanned(_OWNERS_S)
        for ticket, owner in zip(scan.tickets, scan.words, strict=True):
            if owner in having:
                having[owner].append(ticket.decode(errors="replace"))
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
        for page in self._pages():
            scan = _Scan(self._link, self._keys, dict(page))
            yield [one.row() for one in self._fitting(scan, list(scan.places(wanted, "age")), wanted)]

    def find(self, wanted: TicketFilter, order: str, most: int, within_s: float = math.inf) -> dict[str, Any]:
        """Return the first ``most`` tickets of all that fit, in an order of ``ORDERS``: they are looked at in that
        order, until there are so many, or that took ``within_s`` seconds of a core. (On a machine that is overloaded a
        page that comes late is better than one that found nothing.)

        ``rows``: as they are now; ``number``: of all that were found; ``is_all``: nothing was left out of the search;
        ``are_first``: no other one comes before the last row; ``age_s``: how long ago the index was looked through."""
        began_s, scan = thread_time(), self._scanned(within_s / 2)
        parked, has_parked, found, is_over = list[dict[str, Any]](), True, list[_Looked](), False
        if wanted.wants_waiting:
            parked, has_parked = self.parked(most, wanted.fits, now_s() + within_s, scan.named)
        places, wants_all = scan.places(wanted, order), wanted == TicketFilter()
        at_once = most if wants_all else _LOOKED_AT
        while not is_over and len(found) < most and thread_time() - began_s < within_s:
            some = list(islice(places, at_once))
            found, is_over = found + self._fitting(scan, some, wanted), len(some) < at_once
        looked, found = len(scan.tickets) if wants_all else len(found), self._now(found[:most], wanted)
        number = looked - min(looked, most) + len(found) + len(parked)
        rows = {row["ticket_id"].encode(): row for row in parked} | {one.ticket: one.row() for one in found}
        free = {row["ticket_id"].encode(): f"x 0 {' '.join(row['message_ids'])}".encode() for row in parked}
        both = _Scan(self._link, self._keys, free | {one.ticket: one.record for one in found})
        shown = [rows[both.tickets[at]] for at in both.order(order)[:most]]
        self.explained([row for row in shown if row.get("last_error") is None])
        is_all = scan.is_all and has_parked and (is_over or wants_all)
        are_first = is_all or (scan.is_all and has_parked and len(shown) == most)
        told = {"rows": shown, "number": number, "is_all": is_all, "are_first": are_first}
        return told | {"age_s": now_s() - scan.at_s}

    def _scanned(self, within_s: float) -> _Scan:
        """Return the index as one scan found it, at most ``_SCAN_KEPT_S`` ago: who asks meanwhile waits for the same
        one. It has what ``within_s`` seconds of a core were enough for."""
        with self._scanning:
            scan = self._scan  # of which another thread may let go
            if scan is None or now_s() - scan.at_s > _SCAN_KEPT_S:
                began_s, records, is_all = thread_time(), dict[bytes, bytes](), True
                for page in self._pages():
                    records.update(page)
                    if not (is_all := thread_time() - began_s <= within_s):
                        break
                scan = self._scan = _Scan(self._link, self._keys, records, is_all)
            return scan

    def forget(self) -> None:
        """Let go of the scan: it has a hundred bytes a ticket, and more."""
        self._scan = None

    def _pages(self) -> Iterator[Iterator[tuple[bytes, bytes]]]:
        cursor = b""
        while cursor != b"0":
            cursor, flat = self._link.call("HSCAN", self._keys.tickets, cursor or b"0", "COUNT", _AT_ONCE)
            yield zip(flat[::2], flat[1::2], strict=True)

    def _now(self, found: list[_Looked], wanted: TicketFilter) -> list[_Looked]:
        """Look again at those whose records have changed since the scan; those that do not fit any more are left
        out."""
        values = self._link.call("HMGET", self._keys.tickets, *(one.ticket for one in found)) if found else []
        now = {one.ticket: value for one, value in zip(found, values, strict=True)}
        changed = {one.ticket: value for one in found if (value := now[one.ticket]) not in (None, one.record)}
        scan = _Scan(self._link, self._keys, changed)
        again = {one.ticket: one for one in self._fitting(scan, list(scan.places(wanted, "age")), wanted)}
        as_now = [one if now[one.ticket] == one.record else again.get(one.ticket) for one in found]
        return [one for one in as_now if one is not None]

    def _fitting(self, scan: _Scan, places: Sequence[int], wanted: TicketFilter) -> list[_Looked]:
        found = _look_at(self._link, self._keys, scan, places, wanted)
        if not wanted.error:
            return found
        # Of a halted ticket its letter may tell the error: for each of these letters all may be looked through.
        unknown = [one for one in found if one.error is None and one.seen.kind == "halted"]
        told = self.explained([one.row() for one in unknown])
        rows = {one.ticket: row for one, row in zip(unknown, told, strict=True)}
        known = [one._replace(made=rows.get(one.ticket)) for one in found]
        return [one for one in known if one.made is None or wanted.has_error(one.made["last_error"])]

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

    def proofs(self) -> dict[str, Any]:
        """Return what was found last, None for what was never made, or cannot be read: ``audit``
        (``usher.master.audit.job.summary``); ``history``: what the last proof from the archive said; ``until_ms``:
        until when it proves history, by Redis' clock; ``report``: the head of the last `usher report`."""
        asked = ("HMGET", self._keys.archived, "history", "report", "proven_until_ms")
        audit, (history, report, noted) = self._link.all_of([("GET", self._keys.audit), asked])
        until_ms, known = int(noted) if noted and noted.isdigit() else None, _document(history)
        told = {"audit": _document(audit), "report": _document(report), "until_ms": until_ms}
        return told | {"history": known and known | {"until_ms": until_ms}}


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
    scan = _Scan(link, keys, dict(found))
    return [one.row() for one in _look_at(link, keys, scan, range(len(scan.tickets)), TicketFilter())]


def _look_at(link: Link, keys: Keys, scan: _Scan, places: Sequence[int], wanted: TicketFilter) -> list[_Looked]:
    """Return those that are in a wanted state, with what they are doing, and may have a wanted error: in one round trip
    for all, and one for the rules if any was given back. Kept short, because it runs by the ten thousand."""
    heads, words = scan.heads, scan.words
    named = {word: scan.owners[word] for word in {words[at] for at in places}}
    kinds = {word: kind_of(owner) or "unreadable" for word, owner in named.items()}
    owners, ids = [owner for word, owner in named.items() if kinds[word] == "owned"], [heads[at] for at in places]
    asked: list[tuple[str | bytes, ...]] = [("HMGET", key, *ids) for key in (keys.attempts, keys.errors) if ids]
    leased = [("EXISTS", keys.lease(owner.decode(errors="replace"))) for owner in owners]
    noted, errors, *leases = link.all_of([*asked, *leased]) or ((), ())
    lost = {owner for owner, there in zip(owners, leases, strict=True) if not there}
    book = read_rules(link, keys) if "returned" in kinds.values() else Rulebook()
    unfit, found = set[tuple[bytes, bytes | None]](), list[_Looked]()
    for at, value, text in zip(places, noted, errors, strict=True):
        word, ticket = words[at], scan.tickets[at]
        if text is None and (word, value) in unfit:
            continue
        kind, lease = kinds[word] if heads[at] else "unreadable", "lost" if word in lost else "live"
        known, error = _attempts(value), decode_error(text)
        has_error = not wanted.error or (kind == "halted" and error is None)  # whose letter may tell it
        has_error = has_error or ((last := last_error(known, error)) is not None and wanted.has_error(last._asdict()))
        rule = book.of(ticket) if kind == "returned" and has_error else None
        seen = Seen(kind, lease, known, 0, rule, told_alike(error))
        if has_error and wanted.has_state(ticket_state(seen).name):
            found.append(_Looked(ticket, scan.records[at], seen, error))
        elif text is None and heads[at] and kind != "returned":  # where nothing else differs
            unfit.add((word, value))
    return found


def _stated(seen: Seen) -> dict[str, str]:
    state = ticket_state(seen)
    return {"state": state.name, "why": state.why(seen)} if state.name == TicketState.PAUSED else {"state": state.name}
