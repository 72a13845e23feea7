"""Read what pages and commands show, from Redis alone: works without a master, and on any of them. ``StatusReader``:
the state of the system, its consumers and tickets. ``TicketHistory``: what is still known of a ticket; nothing is kept
per ticket, so the streams are searched backwards, in Redis, a bounded piece at a time. ``MessageFields``: what messages
say. ``SystemDiagnostics``: the doctor's findings, the stream's readers, and what may be cut of the stream."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import islice
from time import thread_time
from typing import Any, NamedTuple

import orjson

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import GroupMissing
from usher.common.base.log import redacted
from usher.common.doctor.collector import SourcesReader, collect, look_at_memory, read_growth
from usher.common.doctor.judgements import INFO_COMMANDS, DoctorFinding, describe, examine, report, write_trouble
from usher.common.protocol.attempts import NEVER, Attempts, decode
from usher.common.protocol.keys import MASTER, Keys, LogKeys
from usher.common.protocol.last_error import RUNS, TRACEBACK, LastError
from usher.common.protocol.last_error import decode as decode_error
from usher.common.protocol.message import (
    DUE_FIELD,
    LONGEST_TICKET,
    REPLAY_OF,
    SHOWN_BYTES,
    UID_FIELD,
    first_value,
    shown_fields,
    ticket_value,
)
from usher.common.protocol.mishaps import losses_command, parse_losses
from usher.common.protocol.registration import name_of
from usher.common.protocol.run_log import CRASHED, DONE, FAILED, GAVE_UP, RunRecord, decode_kept
from usher.common.protocol.run_log import decode as decode_runs
from usher.common.protocol.sources import SourceSelection
from usher.common.protocol.stream_id import ZERO, is_id, milliseconds, rank
from usher.common.protocol.ticket_states import BY_OWNER, TicketState, due_ms_of
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import (
    TicketRecord,
    TicketStream,
    found_entries,
    group_of,
    pairs,
    parse_record,
    scanned,
    stream_facts,
)
from usher.master.insight.stats import Kept, stream_sums, tickets_of
from usher.master.membership.registry import SILENT, read_left_ms, read_registry, state_of, strangers
from usher.master.operations.live_rules import read_rules
from usher.master.operations.shelves import DeadLetters
from usher.master.operations.trimming import Trimming
from usher.master.policy.explain import Looked, fence_ms
from usher.master.policy.letters import HALT, LetterFilter
from usher.master.policy.rules import Rule, Rulebook
from usher.master.policy.states import Seen, TicketFilter, kind_of, last_error, ticket_state, told_alike, tried
from usher.master.policy.trim import Cut, Nothing, Refused, Retention, RetentionFacts, decide, readers

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


class Scan:
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
    def readable(self) -> list[int]:
        return [at for at, head in enumerate(self.heads) if head]

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
        """Return what records name in place of an owner, by its word."""
        return {
            word: record.partition(b" ")[0] for word, record in dict(zip(self.words, self.records, strict=True)).items()
        }

    def places(self, wanted: TicketFilter, order: str) -> Iterator[int]:
        """Yield, in an order, the places of tickets that may fit, as far as their records tell."""
        words, fits = self.words, {word: wanted.may_fit(owner) for word, owner in self.owners.items()}
        return (at for at in (self.order(order) if any(fits.values()) else ()) if fits[words[at]])


#: Orders of a list: the columns that it is sorted by; what is alike comes by age.
ORDERS: Mapping[str, Callable[[Scan], Sequence[Any]]] = {
    "age": lambda scan: scan.ages,
    "attempts": lambda scan: [-starts for starts in scan.starts],
    "messages": lambda scan: [-size for size in scan.sizes],
    "ticket": lambda scan: scan.tickets,
}


def _row(one: Looked) -> dict[str, Any]:
    row = one.made or ticket_row(one.ticket, one.record)
    if "message_ids" in row and one.made is None:
        row |= tried(one.seen.attempts, one.error) | _stated(one.seen)
    return row


class StatusReader:
    def __init__(
        self, link: Link, keys: Keys, sources: SourceSelection | None = None, ticket_field: str = "ticket_id"
    ) -> None:
        self._ticket_field, self._link = ticket_field, link
        self._sources = SourcesReader(link, keys, sources) if sources is not None else None
        self._keys, self._stream = keys, TicketStream(link, keys)
        self._letters, self._scanning = DeadLetters(link, keys), threading.Lock()
        self._scan: Scan | None = None
        #: Returns the progress of gathering several ticket streams (see SourcesReader), at most some seconds old; None
        #: when there is one stream, which is worked on as it is.
        self.sources: Callable[[], dict[str, Any] | None] = lambda: None
        if self._sources is not None:
            self.sources = Kept(_SOURCES_KEPT_S, self._sources.overview)

    def overview(self) -> dict[str, Any]:
        """Return stream, group, leader, and sums: entries, lag (entries not yet read), pending by owner, tickets in
        processing and halted, dead letters, live rules; and what keeps Redis from writing."""
        seen = stream_sums(self._link, self._keys, _MOST_COUNTED)
        for name in ("by_name", "oldest", "delivered"):
            del seen[name]
        losses, *told_of = self._link.pipeline([losses_command(self._keys, 1), *INFO_COMMANDS])
        trouble = write_trouble(*told_of)
        last_loss = next((loss.document() for loss in parse_losses(losses)), None)
        return seen | {"write_trouble": None if trouble is None else trouble.text, "last_loss": last_loss}

    def source_rows(self, text: str, start: int, most: int) -> tuple[list[dict[str, Any]], int]:
        if self._sources is None or self.sources() is None:
            return [], 0
        return self._sources.rows(text, start, most)

    def consumers(self) -> list[dict[str, Any]]:
        """Return all registered consumers, and names in the group that still hold entries without being registered
        (``consumer_rows``), with the tickets that they have in processing."""
        try:
            group = {name.decode(errors="replace"): count for name, count in self._stream.pending_counts().items()}
        except (GroupMissing, CommandRefused):
            group = {}
        rows = consumer_rows(self._link, self._keys, read_rules(self._link, self._keys), group)
        having: dict[bytes, list[str]] = {str(row["incarnation"]).encode(): [] for row in rows}
        scan = self._scanned(_OWNERS_S)
        for ticket, owner in zip(scan.tickets, scan.words, strict=True):
            if owner in having:
                having[owner].append(ticket.decode(errors="replace"))
        return [row | {"ticket_ids": sorted(having[str(row["incarnation"]).encode()])} for row in rows]

    def tickets(self, cursor: str, limit: int, text: str = "") -> dict[str, Any]:
        """Return about ``limit`` tickets in processing whose ids contain ``text``, as far as there is time, and the
        next cursor; ``cursor`` is "0" at first, None at the end."""
        pattern = b"*" + re.sub(rb"[*?\[\]^\\-]", rb"\\\g<0>", text.encode()) + b"*"
        found, count, ends_s = dict[bytes, bytes](), limit, now_s() + _LOOK_S
        while True:
            reply, flat = self._link.call("HSCAN", self._keys.tickets, cursor, "MATCH", pattern, "COUNT", count)
            cursor, count = bytes(reply).decode(), limit if flat else 1000  # the rarer the matches, the more records
            found |= pairs(flat)
            if cursor == "0" or len(found) >= limit or now_s() > ends_s:
                rows = ticket_rows(self._link, self._keys, found.items())
                return {"tickets": rows, "cursor": None if cursor == "0" else cursor}

    def each(self, wanted: TicketFilter) -> Iterator[list[dict[str, Any]]]:
        """Yield page by page the tickets of the index that fit; a ticket whose record changes meanwhile may come
        twice."""
        for page in scanned(self._link, self._keys.tickets, _AT_ONCE):
            scan = Scan(self._link, self._keys, pairs(page))
            yield list(map(_row, self._fitting(scan, list(scan.places(wanted, "age")), wanted)))

    def find(self, wanted: TicketFilter, order: str, most: int, within_s: float = math.inf) -> dict[str, Any]:
        """Return the first ``most`` tickets of all that fit, in an order of ``ORDERS``: they are looked at in that
        order, until there are so many, or that took ``within_s`` seconds of a core. (On a machine that is overloaded a
        page that comes late is better than one that found nothing.)

        ``rows``: as they are now; ``number``: of all that were found; ``is_all``: nothing was left out of the search;
        ``are_first``: no other one comes before the last row; ``age_s``: how long ago the index was looked through."""
        began_s, scan = thread_time(), self._scanned(within_s / 2)
        parked, has_parked, found, is_over = list[dict[str, Any]](), True, list[Looked](), False
        if wanted.wants_waiting:
            parked, has_parked = self.parked(most, wanted.fits, now_s() + within_s, scan.named)
        places, wants_all = scan.places(wanted, order), wanted == TicketFilter()
        at_once = most if wants_all else _LOOKED_AT
        while not is_over and len(found) < most and thread_time() - began_s < within_s:
            some = list(islice(places, at_once))
            found, is_over = found + self._fitting(scan, some, wanted), len(some) < at_once
        looked, found = len(scan.tickets) if wants_all else len(found), self._now(found[:most], wanted)
        number = looked - min(looked, most) + len(found) + len(parked)
        rows = {row["ticket_id"].encode(): row for row in parked} | {one.ticket: _row(one) for one in found}
        free = {row["ticket_id"].encode(): f"x 0 {' '.join(row['message_ids'])}".encode() for row in parked}
        both = Scan(self._link, self._keys, free | {one.ticket: one.record for one in found})
        shown = [rows[both.tickets[at]] for at in both.order(order)[:most]]
        self.explained([row for row in shown if row.get("last_error") is None])
        is_all = scan.is_all and has_parked and (is_over or wants_all)
        are_first = is_all or (scan.is_all and has_parked and len(shown) == most)
        told = {"rows": shown, "number": number, "is_all": is_all, "are_first": are_first}
        return told | {"age_s": now_s() - scan.at_s}

    def _scanned(self, within_s: float) -> Scan:
        """Return the index as one scan found it, at most ``_SCAN_KEPT_S`` ago: who asks meanwhile waits for the same
        one. It has what ``within_s`` seconds of a core were enough for."""
        with self._scanning:
            scan = self._scan  # of which another thread may let go
            if scan is None or now_s() - scan.at_s > _SCAN_KEPT_S:
                began_s, records, is_all = thread_time(), dict[bytes, bytes](), True
                for page in scanned(self._link, self._keys.tickets, _AT_ONCE):
                    records |= pairs(page)
                    if not (is_all := thread_time() - began_s <= within_s):
                        break
                scan = self._scan = Scan(self._link, self._keys, records, is_all)
            return scan

    def forget(self) -> None:
        """Let go of the scan: it has a hundred bytes a ticket, and more."""
        self._scan = None

    def _now(self, found: list[Looked], wanted: TicketFilter) -> list[Looked]:
        """Look again: since the scan some have changed, or are gone."""
        values = self._link.call("HMGET", self._keys.tickets, *(one.ticket for one in found)) if found else []
        named = zip(found, values, strict=True)
        scan = Scan(self._link, self._keys, {one.ticket: value for one, value in named if value is not None})
        return self._fitting(scan, list(scan.places(wanted, "age")), wanted)

    def _fitting(self, scan: Scan, places: Sequence[int], wanted: TicketFilter) -> list[Looked]:
        found = look_at(self._link, self._keys, scan, places, wanted)
        if not wanted.error:
            return found
        # Of a halted ticket its letter may tell the error: for each of these letters all may be looked through.
        unknown = [one for one in found if one.error is None and one.seen.kind == "halted"]
        told = self.explained(list(map(_row, unknown)))
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
        heads = tickets_of(self._link, keys, self._ticket_field, pending)
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


def ticket_row(ticket: bytes, value: bytes | None, rule: Rule | None = None) -> dict[str, Any]:
    """Return the row of a record. ``value`` None: nothing of the ticket is handed over."""
    row: dict[str, Any] = {"ticket_id": ticket.decode(errors="replace")}  # Usher may not have written it
    if value is None:
        is_paused = ticket_state(Seen(rule=rule)).name is TicketState.PAUSED
        return row | {"state": TicketState.PAUSED if is_paused else TicketState.IDLE}
    try:
        record: TicketRecord = parse_record(value)
    except ValueError:
        return row | {"state": TicketState.UNREADABLE}
    kind, owner, due_ms = kind_of(record.owner), record.owner.decode(errors="replace"), due_ms_of(record.owner)
    row |= {"state": ticket_state(Seen(kind, rule=rule)).name, "fence": record.fence}
    row |= {"message_ids": [entry_id.decode() for entry_id in record.ids]}
    row |= {"due_ms": due_ms} if due_ms is not None else {}
    return row | ({"consumer_name": name_of(owner), "owner": owner} if kind == "owned" else {})


def ticket_rows(link: Link, keys: Keys, found: Iterable[tuple[bytes, bytes]]) -> list[dict[str, Any]]:
    """Return rows of tickets and their records, with what they are doing, in the words of explain, as far as one look
    at Redis can tell: the owner alone knows whether a handler runs at this moment, and is not asked."""
    scan = Scan(link, keys, dict(found))
    return list(map(_row, look_at(link, keys, scan, range(len(scan.tickets)), TicketFilter())))


def look_at(
    link: Link,
    keys: Keys,
    scan: Scan,
    places: Sequence[int],
    wanted: TicketFilter,
    states: Mapping[str, str] | None = None,
) -> list[Looked]:
    """Return those that are in a wanted state, with what they are doing, and may have a wanted error: in one round trip
    for all, and one for the rules if any was given back. ``states``: of consumers, by incarnation; None: only whether
    they live is asked for. Kept short, because it runs by the ten thousand."""
    heads, words = scan.heads, scan.words
    named = {word: scan.owners[word] for word in {words[at] for at in places}}
    kinds = {word: kind_of(owner) or "unreadable" for word, owner in named.items()}
    owners, ids = [owner for word, owner in named.items() if kinds[word] == "owned"], [heads[at] for at in places]
    asked: list[tuple[str | bytes, ...]] = [("HMGET", key, *ids) for key in (keys.attempts, keys.errors) if ids]
    names = [owner.decode(errors="replace") for owner in owners]
    leased = [("EXISTS", keys.lease(name)) for name in names if states is None]
    noted, errors, *leases = link.all_of([*asked, *leased]) or ((), ())
    if states is None:
        states = {name: "live" if there else "lost" for name, there in zip(names, leases, strict=True)}
    of_owners = {owner: states.get(name, "lost") for owner, name in zip(owners, names, strict=True)}
    book = read_rules(link, keys) if "returned" in kinds.values() else Rulebook()
    unfit, found = set[tuple[bytes, bytes | None]](), list[Looked]()
    for at, value, text in zip(places, noted, errors, strict=True):
        word, ticket = words[at], scan.tickets[at]
        if text is None and (word, value) in unfit:
            continue
        kind, due_ms = kinds[word] if heads[at] else "unreadable", 0
        if kind == "put_off":
            due_ms = due_ms_of(scan.records[at].partition(b" ")[0]) or 0
        known, error = _attempts(value), decode_error(text) if text is not None else None
        has_error = not wanted.error or (kind == "halted" and error is None)  # whose letter may tell it
        has_error = has_error or ((last := last_error(known, error)) is not None and wanted.has_error(last._asdict()))
        rule = book.of(ticket) if kind == "returned" and has_error else None
        seen = Seen(kind, of_owners.get(word, "live"), known, due_ms, rule, told_alike(error))
        if has_error and (not wanted.states or wanted.has_state(ticket_state(seen).name)):
            found.append(Looked(ticket, scan.records[at], seen, error))
        elif text is None and heads[at] and kind != "returned":  # where nothing else differs
            unfit.add((word, value))
    return found


def _stated(seen: Seen) -> dict[str, str]:
    state = ticket_state(seen)
    return {"state": state.name, "why": state.why(seen)} if state.name == TicketState.PAUSED else {"state": state.name}


#: Entries, or records of executions, that one call looks at: a millisecond or so of Redis.
_ENTRIES_AT_ONCE, _RUNS_AT_ONCE = 1_000, 50
#: Seconds that a piece spends on one stream, the first of a ticket and any other; and about how many events it finds.
_FIRST_S, _PIECE_S, _PIECE_EVENTS = 0.02, 0.06, 200
#: Seconds after which a search for tickets by a part of their ids ends.
_LOOK_S = 0.06
_LETTERS = 50
#: Unfinished messages of a ticket whose executions are looked for, and units of the bars that show some.
_OF_MESSAGES, BAR = 30, 300
#: Bytes of a field that are shown unless the whole is asked for.
_SHOWN = 4_096
#: Clocks may differ by so much: a record of the run log may have a lower time than its message.
_CLOCKS_MS = 60_000
END = "end"
_BACK = re.compile(rf"({END}|\([0-9]{{1,20}}-[0-9]{{1,20}})_({END}|\([0-9]{{1,20}}-[0-9]{{1,20}})")


class TicketHistory:
    def __init__(self, link: Link, keys: Keys, ticket_field: str) -> None:
        self._link, self._keys, self._field = link, keys, ticket_field
        self._letters = DeadLetters(link, keys)

    def timeline(
        self, ticket_id: str, back: str | None = None, known: Sequence[str] = (), held: tuple[str, int] | None = None
    ) -> dict[str, Any]:
        """Return one piece. ``known``: entries to list in the first piece, however old; ``held``: the ticket's present
        owner and its fence. Raises ValueError when ``back`` is not from an earlier piece.

        ``events``: newest first; ``back``: where the next piece begins, None at the beginning of the streams;
        ``since_ms``: how far back this piece went; ``attempts``: those of the first message that failed
        (``attempts_shown``)."""
        if back is not None and not _BACK.fullmatch(back):
            raise ValueError("not a position in a history")
        entries_from, runs_from = (back or "+_+").split("_")
        ticket = ticket_id.encode()
        piece_s = _PIECE_S if back else _FIRST_S
        letters = [] if back else self._letters.newest(LetterFilter(ticket), None, _LETTERS, _FIRST_S).letters
        rows = {row["message_id"]: row for row in (letter.row() for letter in letters)}
        written = [{"event": "dead_letter", "ms": row["written_ms"], "letter": row} for row in rows.values()]
        events = [event | {"message_id": one if is_id(one) else ""} for event, one in zip(written, rows, strict=True)]
        kept = self._kept([] if back else known[:_OF_MESSAGES], ticket_id)
        kept |= {one.runs[0].id: one.runs for one in reversed(letters) if one.runs}
        ends_s = time.monotonic() + piece_s
        reached = []
        if entries_from != END:
            ids, entries_from = self._find("entries", entries_from, (self._field, ticket), ends_s)
            sent = dict.fromkeys([*(one.decode() for one in ids), *(() if back else known)])
            events += [{"event": "sent", "ms": milliseconds(one.encode()), "message_id": one} for one in sent]
            reached.append(entries_from)
        if runs_from != END:
            text = orjson.dumps(ticket_id)
            records, runs_from = self._find("runs", runs_from, (text,), ends_s + piece_s)
            events += [_ran(run) for record in records for run in decode_runs(record) if run.ticket == ticket_id]
            reached.append(runs_from)
        seen = {(event["message_id"], event.get("attempt")) for event in events}
        events += [_ran(run) for runs in kept.values() for run in runs if (run.id, run.attempt) not in seen]
        events += _hand_overs([event for event in events if event["event"] == "ran"])
        if held is not None and not back and all(event.get("fence") != held[1] for event in events):
            events.append(_handed(fence_ms(held[1]), *held))  # no execution under this fence has ended yet
        events.sort(key=lambda event: (event["ms"], rank((event["message_id"] or "0-0").encode())), reverse=True)
        more = entries_from != END or runs_from != END
        times = [milliseconds(one.removeprefix("(").encode()) for one in reached if one != END]
        shown = next(iter(kept.values()), ())
        attempts = attempts_shown(shown, shown[0].id in rows) if shown else []
        back = f"{entries_from}_{runs_from}" if more else None
        return {"events": events, "back": back, "since_ms": max(times, default=None), "attempts": attempts}

    def _kept(self, ids: Sequence[str], ticket: str = "") -> dict[str, Sequence[RunRecord]]:
        """Return the executions that are kept with messages of these that failed."""
        values = self._link.call("HMGET", self._keys.errors, *(RUNS + one.encode() for one in ids)) if ids else []
        named = zip(ids, values, strict=True)
        return {one: runs for one, value in named if value and (runs := decode_kept(value, ticket, one))}

    def _find(
        self, what: str, start: str, wanted: tuple[str | bytes, ...], ends_s: float, command: str = "XREVRANGE"
    ) -> tuple[list[bytes], str]:
        key, at_once = (self._keys.stream, _ENTRIES_AT_ONCE) if what == "entries" else (self._keys.runs, _RUNS_AT_ONCE)
        wanted, ends = wanted if what == "entries" else ("batch", *wanted, "part"), "+" if command == "XRANGE" else "-"
        found: list[bytes] = []
        for _, some, last, is_all in found_entries(self._link, command, key, start, ends, at_once, *wanted):
            found, start = found + some, f"({last.decode()}" if last else start
            if is_all or time.monotonic() > ends_s or len(found) >= _PIECE_EVENTS:
                start = END if is_all else start
                break
        return found, start

    def message(self, message_id: str) -> dict[str, Any]:
        """Return what the stream, its group and the notes beside it have of a message, named as in ``MessageShown``;
        long values are cut. ``bytes`` None: it is not in the stream; ``state``: by its place in the group, whatever its
        ticket, None when it is neither pending nor still to be read."""
        keys, entry_id = self._keys, message_id.encode()
        beside = [("HGET", keys.attempts, entry_id), ("HMGET", keys.errors, entry_id, TRACEBACK + entry_id)]
        rows, taken, noted, (error, traceback) = self._link.all_of(
            [("XRANGE", keys.stream, message_id, message_id), ("GET", keys.taken), *beside]
        )
        asked = ("XPENDING", keys.stream, keys.group, message_id, message_id, 1)
        groups, pending = self._link.pipeline([("XINFO", "GROUPS", keys.stream), asked])
        group, flat = group_of(groups, keys.group, taken), rows[0][1] if rows else []
        is_unread = rows and (group is None or rank(entry_id) > rank(group[b"last-delivered-id"]))
        state = TicketState.UNREAD if is_unread else None
        if group is not None and pending:
            state = BY_OWNER.get(bytes(pending[0][1]), TicketState.HANDED_OVER)
        ticket = ticket_value(flat, self._field.encode())
        due, uid, replayed = (first_value(flat, name) or b"" for name in (DUE_FIELD, UID_FIELD, REPLAY_OF))
        told: dict[str, Any] = {"message_id": message_id, "state": state, "sent_ms": milliseconds(entry_id)}
        told |= {"ticket_id": None if ticket is None else ticket.decode(errors="replace")}
        texts = [_truncate_value(one) for one in flat[:400]]
        fields = [list(pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
        sizes = (sum(map(len, flat)), len(flat) // 2, fields) if rows else (None, None, None)
        told |= dict(zip(("bytes", "field_count", "fields"), sizes, strict=True))
        told |= {"due_ms": int(due.partition(b".")[0]) if due.partition(b".")[0].isdigit() and len(due) <= 20 else None}
        told |= {"replay_of": _id_or_none(replayed.decode(errors="replace"), message_id)}
        told |= {"redriven_from": _id_or_none(uid.decode(errors="replace"), message_id) if not replayed else None}
        told |= {"traceback": (traceback or b"").decode(errors="replace")}
        return told | tried(_attempts(noted), decode_error(error))

    def executions(self, message_id: str, after: str | None = None, kept: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the executions of a message, oldest first: from when it was sent, or (the next piece) behind a record
        of the run log. ``kept``: those that its dead letter has.

        Named as in ``MessageShown``; ``until_ms``: how far the search came. Earlier executions may have been cut off
        the log when the first one that is found is no first attempt, or none is found and the log begins after the
        message was sent."""
        sent_ms, text = milliseconds(message_id.encode()), orjson.dumps(message_id)
        start = f"({after}" if after else f"{max(0, sent_ms - _CLOCKS_MS)}-0"
        first = self._link.call("XRANGE", self._keys.runs, "-", "+", "COUNT", 1)
        records, start = self._find("runs", start, (text,), time.monotonic() + _PIECE_S, "XRANGE")
        found = [_ran(run) for record in records for run in decode_runs(record) if run.id == message_id]
        if not after:
            kept, seen = kept or self._kept([message_id]).get(message_id, ()), {run["attempt"] for run in found}
            found += [_ran(run) for run in kept if run.attempt not in seen]
            found.sort(key=lambda run: run["began_ms"])
        begins_ms = milliseconds(first[0][0]) if first else None
        more = None if start == END else start.removeprefix("(")
        until_ms = milliseconds(more.encode()) if more else None
        is_cut = not after and (found[0]["attempt"] > 1 if found else (begins_ms or sent_ms) > sent_ms)
        told = {"executions": found, "cursor": more, "until_ms": until_ms}
        return told | {"run_log_begins_ms": begins_ms, "executions_are_cut": is_cut}

    def finished(
        self, ticket: str, handler: str, before: str = "", most: int = 100, within_s: float = _PIECE_S
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return at least the ``most`` newest executions after which a message was done or a dead letter, newest first;
        only those of a ticket and of a handler, if given. And behind which record of the run log others may be; None:
        none are."""
        text = orjson.dumps(ticket) if ticket else b'"handler":' + orjson.dumps(handler) if handler else b""
        start, at_once, ends_s = f"({before}" if before else "+", 1, time.monotonic() + within_s
        rows = list[dict[str, Any]]()
        while True:
            args = ("XREVRANGE", start, "-", at_once, "batch", text, "part")
            _, last, records, is_all = self._link.run("find_entries", (self._keys.runs,), args)
            named = [
                (run, orjson.loads(record).get("handler", "")) for record in records for run in decode_runs(record)
            ]
            ran = [(run, by) for run, by in named if ticket in ("", run.ticket) and handler in ("", by)]
            letters = self._letters.of_messages({run.id for run, _ in ran if run.outcome in (FAILED, CRASHED)})
            buried = {(one, letter.attempts) for one, letter in letters.items()}
            ran = [(run._replace(outcome=GAVE_UP) if (run.id, run.attempt) in buried else run, by) for run, by in ran]
            rows += [_ran(run) | {"handler": by} for run, by in ran if run.outcome in (DONE, GAVE_UP)]
            start, at_once = f"({last.decode()}", min(_RUNS_AT_ONCE, 2 * at_once)
            if is_all or len(rows) >= most or time.monotonic() > ends_s:
                return sorted(rows, key=lambda row: -row["ms"]), None if is_all else last.decode()


def attempts_shown(runs: Sequence[RunRecord], is_over: bool) -> list[dict[str, Any]]:
    """Return attempts of a message as a page draws them, each with its wait before: from ``x`` on it waited, from
    ``start`` on it ran, of ``BAR`` units that last until now, or the last end."""
    ends, shown, before = [(run.end_us or run.start_us) // 1000 for run in runs], list[dict[str, Any]](), 0
    begin = free = min(milliseconds(runs[0].id.encode()), runs[0].start_us // 1000)
    scale = BAR / max(1, (max(ends) if is_over else wall_ms()) - begin)
    for run, end_ms in zip(runs, ends, strict=True):
        start_ms = run.start_us // 1000
        x, start, end = (round((ms - begin) * scale, 1) for ms in (free, start_ms, end_ms))
        told: dict[str, Any] = {
            "waited_ms": max(0, start_ms - free),
            "took_ms": (run.end_us - run.start_us) / 1000 if run.end_us else None,
        }
        told |= {"x": x, "start": start, "ran": max(2.0, round(end - start, 1)), "start_ms": start_ms}
        shown.append(
            run._asdict() | told | {"lacks": run.attempt - before - 1, "name": name_of(run.consumer) or run.consumer}
        )
        free, before = end_ms, run.attempt
    return shown


def _ran(run: RunRecord) -> dict[str, Any]:
    took_ms, ms = (run.end_us - run.start_us) / 1000 if run.end_us else None, (run.end_us or run.start_us) // 1000
    told: dict[str, Any] = {"event": "ran", "ms": ms, "message_id": run.id, "ticket_id": run.ticket, "took_ms": took_ms}
    told |= {"began_ms": run.start_us // 1000, "ended_ms": run.end_us // 1000 or None}
    told |= {"outcome": run.outcome, "attempt": run.attempt}
    told |= {"fence": run.fence, "owner": run.consumer, "name": name_of(run.consumer) or run.consumer}
    return told | ({"into": run.into} if run.into else {}) | ({"interrupted": True} if run.interrupted else {})


def _id_or_none(text: str, own: str) -> str | None:
    return text if is_id(text) and text != own else None


def _hand_overs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return when each owner was given the ticket: a fence tells the millisecond (lua/includes/numbers.lua), unless
    a clock went back."""
    first: dict[int, dict[str, Any]] = {}
    for run in runs:
        known = first.setdefault(run["fence"], run)
        if run["began_ms"] < known["began_ms"]:
            first[run["fence"]] = run
    return [_handed(min(fence_ms(fence), run["began_ms"]), run["owner"], fence) for fence, run in first.items()]


def _handed(ms: int, owner: str, fence: int) -> dict[str, Any]:
    return {"event": "handed", "ms": ms, "message_id": "", "owner": owner, "fence": fence}


def _truncate_value(value: bytes) -> str:
    text = value[:_SHOWN].decode("utf-8", "backslashreplace")
    return text if len(value) <= _SHOWN else f"{text}... ({len(value):,} bytes)"


#: Seconds that reading a list, or a search, may take for one answer; and messages read by one call.
FIELDS_S, _READ_AT_ONCE = 0.15, 200
#: Of a traceback, which the handler's process bounds.
_TRACE_BYTES = 32_768
#: Of a search: entries looked at by one call, and for one answer; and the most entries counted for the lag where Redis
#: does not know it.
_FIND_AT_ONCE, _MOST_LOOKED_AT, _MOST_BEHIND = 200, 20_000, 4_000
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


class _Place(NamedTuple):
    """A place in a search: the last entry looked at of a part."""

    part: str
    last: bytes


class MessageFields:
    """Reader of the messages of one ticket stream, and of its dead letters. ``names``: the fields that lists show.
    ``within_s``: what takes longer is not read, and said to be left."""

    def __init__(
        self, link: Link, keys: Keys, ticket_field: str, names: Sequence[str] = (), within_s: float = FIELDS_S
    ) -> None:
        self._link, self._keys, self._ticket_field = link, keys, ticket_field
        self.names, self._within_s = tuple(names), within_s

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
            values = self._link.run("read_fields", (stream,), (most_bytes, "", len(names), *names, *some))
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
    ) -> dict[str, Any]:
        """Find messages whose first field of that name (or path) is exactly ``value``: the document ``Found``, whose
        ``looked_at`` counts the entries for former answers, too. Raises ValueError when ``cursor`` is not from one."""
        until_s, sums = now_s() + self._within_s, stream_sums(self._link, self._keys, _MOST_BEHIND)
        number, delivered = sums["pending"] + sums["lag"] + sums["dead_letters"], sums["delivered"]
        began, since, former = _parse_cursor(cursor) if cursor is not None else (_Place(_PENDING, ZERO), delivered, 0)
        # What moves on meanwhile may be met twice.
        rows, looked_at = dict[str, dict[str, Any]](), former
        wanted = field.encode("utf-8", "surrogateescape"), value, ""
        for part, count, ids, following in self._pages(began, since, sums["has_group"], wanted):
            rows |= {row["message_id"] or row["letter_id"]: row for row in self._told(ids, part, delivered)}
            looked_at += count
            cursor = following and f"{following.part}_{following.last.decode()}_{since.decode()}_{looked_at}"
            if len(rows) >= most or looked_at - former >= most_looked_at or now_s() > until_s:
                break
        told = {"messages": list(rows.values()), "looked_at": looked_at, "of": max(number, looked_at)}
        return told | {"of_is_exact": sums["lag_is_exact"], "cursor": cursor}

    def _pages(
        self, began: _Place, since: bytes, has_group: bool, wanted: tuple[str | bytes, ...]
    ) -> Iterator[tuple[str, int, list[bytes], _Place | None]]:
        """Yield of each page from a place on its part, how many entries it had, what was found there, and the place
        behind it. ``since``: the last id that the group had been given when the search began."""
        stream, group, dead = self._keys.stream, self._keys.group, self._keys.dead
        parts = {_PENDING: (stream, group, ZERO), _UNREAD: (stream, "", since), _DEAD: (dead, "", ZERO)}
        places = [_Place(part, start) for part, (_, _, start) in parts.items()]
        at = [place.part for place in places].index(began.part)
        for place, following in zip([began, *places[at + 1 :]], [*places[at + 1 :], None], strict=True):
            key, of_group, _ = parts[place.part]
            pages = found_entries(
                self._link, "XRANGE", key, b"(" + place.last, "+", _FIND_AT_ONCE, *wanted, of_group, ""
            )
            if place.last == _HIGHEST or (of_group and not has_group):
                pages = iter([(0, [], b"", True)])
            for count, ids, last, is_all in pages:
                yield place.part, count, ids, following if is_all else _Place(place.part, last)

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
        values = self._link.call("HMGET", self._keys.tickets, *tickets) if tickets else []
        named = zip(tickets, values, strict=True)
        rows = ticket_rows(self._link, self._keys, [(ticket.encode(), value) for ticket, value in named if value])
        return {row["message_ids"][0]: row["state"] for row in rows if row.get("message_ids")}

    def _row(self, state: str, values: list[Any] | None, before: int) -> dict[str, Any]:
        ticket = _text(values, 0)
        chosen = None if values is None else shown_fields(self.names, values[before:])
        nothing = {"message_id": None, "letter_id": None, "consumer_name": ""}
        return {**nothing, "ticket_id": ticket, "state": state, "shown_fields": chosen}


def _parse_cursor(cursor: str) -> tuple[_Place, bytes, int]:
    parts = _CURSOR.fullmatch(cursor)
    if parts is None or not all(is_id(one) or one.encode() == _HIGHEST for one in parts.group(2, 3)):
        raise ValueError("not a place in a search")
    return _Place(parts[1], parts[2].encode()), parts[3].encode(), int(parts[4])


def _text(values: list[Any] | None, at: int) -> str | None:
    found = values[at] if values is not None and at < len(values) else None
    return None if found is None or found[1] > LONGEST_TICKET else found[0].decode(errors="replace")


#: Newest declared losses that are shown.
_LOSSES_SHOWN = 50


def examined(
    link: Link, keys: Keys, lease_ms: int, sources: SourceSelection | None, of_master: Sequence[DoctorFinding] = ()
) -> dict[str, Any]:
    """Return the document of `usher doctor --json`, with findings ``of_master``."""
    facts = collect(link, keys, lease_ms, sources)
    return {"asked_ms": wall_ms(), **report(redacted(link.url), facts, [*examine(facts), *of_master])}


def stream_row(link: Link, keys: Keys, retention: Retention) -> dict[str, Any]:
    """Return, of the ticket stream, its readers, what may be cut and why, and whose checkpoints there are."""
    facts = Trimming(link, keys).facts()
    beside = {keys.runs: "run log", keys.dead: "dead letters"}
    streamer, length = link.all_of([("GET", LogKeys(keys.stream).leader), ("XLEN", keys.stream)])
    now_ms, memory = look_at_memory(link)
    grows = read_growth(link, keys.stream, length, facts.span, now_ms, memory)
    losses, *seen = link.pipeline(
        [losses_command(keys, _LOSSES_SHOWN), *(("XINFO", "STREAM", name) for name in beside)]
    )
    others = [
        {"name": name, "what": what, "entries": of.get(b"length", 0)}
        | {"last": of.get(b"last-generated-id", b"").decode() or None}
        for (name, what), of in zip(beside.items(), map(stream_facts, seen), strict=True)
    ]
    archived_only, wished = retention.archived_only, retention.wishes(facts, now_ms)
    decision = decide(facts, archived_only=archived_only, wished=wished)
    return retained(keys.stream, facts, decision, archived_only) | {
        "entries": length,
        "growth": None if grows is None else describe(grows),
        "days_left": None if grows is None else grows.days_left,
        "memory": None if memory is None else memory._asdict() | {"share": memory.share},
        "losses": [loss.document() for loss in parse_losses(losses)],
        "streamer": (streamer or b"").decode(errors="replace").partition(" ")[2] or None,
        "others": others,
    }


def retained(
    stream: str, facts: RetentionFacts, decision: Cut | Nothing | Refused, archived_only: bool
) -> dict[str, Any]:
    """Return, for programs, who reads a stream, and what may be cut of it."""
    now_ms, span, cut = wall_ms(), facts.span, decision if isinstance(decision, Cut) else None
    ages_s = {name: round((now_ms - noted_ms) / 1000, 1) for name, _, noted_ms in facts.checkpoints}
    rows = [
        one._asdict()
        | {"keeps_from": one.keeps_from.decode()}
        | {"noted_s_ago": ages_s[one.name] if one.kind == "checkpoint" else None}
        for one in readers(facts, archived_only=archived_only)
    ]
    return {
        "stream": stream,
        "first_id": span.first.decode() if span is not None and span.first else None,
        "last_id": span.last_generated.decode() if span is not None else None,
        "readers": rows,
        "decision": type(decision).__name__.lower(),
        "floor": cut and cut.floor.decode(),
        "kept_for": cut and f"{cut.because.kind} {cut.because.name}",
        "why": decision.why,
        "problems": list(decision.problems) if isinstance(decision, Refused) else [],
    }
