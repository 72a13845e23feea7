"""Candidates: finds messages that can be rehearsed: dead letters, and entries that are still in the stream. It only
reads.

A search for one ticket runs in Redis, newest first, a bounded page at a time, and not for ever; the caller is told how
far it went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import StartRefused
from usher.common.protocol.attempts import NEVER, Attempts, decode
from usher.common.protocol.keys import HALTED, MASTER, Keys
from usher.common.protocol.message import ticket_value
from usher.common.protocol.registration import name_of
from usher.common.protocol.run_log import DONE as RAN_WELL
from usher.common.protocol.run_log import STALE, RunRecord
from usher.common.protocol.run_log import decode as decode_runs
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Arg, Link
from usher.common.redis.replies import TicketRecord, group_of, parse_record
from usher.common.redis.scripts import ScriptRunner
from usher.deploy.rehearsal.selection import (
    DONE,
    ENDED,
    HALT,
    HELD,
    UNKNOWN,
    WAITING,
    Before,
    Candidate,
    Wanted,
    in_order,
    of_letter,
    unfit_of,
)
from usher.master.operations.dead_letters import DeadLetters
from usher.master.policy.letters import DeadLetter, LetterFilter, parse_letter

#: Most entries, or records of executions, looked at by one call: about a millisecond of Redis.
_ENTRIES_AT_ONCE, _RUNS_AT_ONCE = 1_000, 50
#: Entries read with their fields by one call.
_BODIES_AT_ONCE = 100
_ALL = 2**62
#: Longest search, in seconds, of one stream for a ticket; of the run log; and of the dead letters for that of one
#: message.
_SEARCH_S, _RUNS_S, _LETTER_S = 60.0, 5.0, 2.0


class Named(NamedTuple):
    """Messages found by their ids, and the ids for which there is none."""

    found: list[Candidate]
    missing: list[bytes]


class _Known(NamedTuple):
    """Redis' knowledge of entries: how far the group was given the stream, and for each entry its attempts, owner and
    ticket's record."""

    delivered: bytes | None
    attempts: dict[bytes, Attempts]
    owners: dict[bytes, bytes]
    records: dict[bytes, TicketRecord]


class Candidates:
    """Finder of candidates, for one thread. ``on_page`` is called with what is being searched and how much of it has
    been, and may raise."""

    def __init__(self, link: Link, keys: Keys, ticket_field: str, on_page: Callable[[str, int], None]) -> None:
        self._link = link
        self._keys = keys
        self._field = ticket_field
        self._scripts = ScriptRunner(link)
        self._letters = DeadLetters(link, keys)
        self._on_page = on_page
        #: What was not searched, as sentences.
        self.notes: list[str] = []
        self._kept: dict[bytes, list[bytes]] = {}  # the fields of archived entries

    def letters(self, ids: Sequence[bytes]) -> Named:
        """Find the letters with these ids, or of the messages with these ids."""
        found, missing = [], []
        for letter_id, letter in zip(ids, self._heads(ids), strict=True):
            for one in [letter] if letter is not None else self._letters.where("id", letter_id, 1, _LETTER_S).letters:
                found.append(_of_letter(one))
                break
            else:
                missing.append(letter_id)
        return Named(found, missing)

    def matching(self, wanted: LetterFilter, most: int) -> list[Candidate]:
        """Find the newest ``most`` letters that match a filter."""
        found: list[DeadLetter] = []
        below: bytes | None = None
        while len(found) < most:
            some, below = self._letters.newest(wanted, below, most - len(found), 0.2)
            found += some
            self._on_page("dead letters found", len(found))
            if below is None:
                break
        return in_order(map(_of_letter, found))

    def messages(self, ids: Sequence[bytes]) -> Named:
        """Find the entries of the stream with these ids; those that became dead letters say so."""
        entries, missing = [], []
        for entry_id in ids:
            flat = self._entry(entry_id)
            if flat is None:
                missing.append(entry_id)
            else:
                entries.append((entry_id, ticket_value(flat, self._field.encode())))
        found = self.states(entries)
        return Named(
            [self._with_letter(one) if one.before.state in (ENDED, HALT, UNKNOWN) else one for one in found], missing
        )

    def of_ticket(self, ticket: bytes, most: int) -> list[Candidate]:
        """Find the newest ``most`` messages of a ticket, in the order of the stream: its entries, and its dead
        letters."""
        ids = self._search("entries looked at", self._keys.stream, self._field, ticket, most)
        letter_ids = self._search("dead letters looked at", self._keys.dead, "usher-ticket", ticket, most)
        letters = [_of_letter(letter) for letter in self._heads(letter_ids) if letter is not None]
        dead = {one.message_id for one in letters}
        return in_order([*letters, *self.states([(one, ticket) for one in ids if one not in dead])], most)

    def chosen(self, wanted: Wanted, most: int) -> list[Candidate]:
        """Find the entries of the stream that are wanted, in its order. Raises StartRefused for more than ``most``, and
        for a search that did not come to its end: a part of them would be another replay."""
        entries: list[tuple[bytes, bytes | None]] = []
        for entry_id, flat in self._read(wanted, most):
            if wanted.fits(flat):
                entries.append((entry_id, ticket_value(flat, self._field.encode())))
            self._check_most(entries, most)
        return self.states(entries)

    def archived(
        self,
        wanted: Wanted,
        rows: Iterable[tuple[bytes, list[bytes]]],
        runs_of: Callable[[list[bytes]], dict[bytes, RunRecord]],
        most: int,
    ) -> list[Candidate]:
        """Find the entries that are wanted among those of an archive, whose run log may know what Redis' no longer
        does. Raises StartRefused for more than ``most``."""
        entries: list[tuple[bytes, bytes | None]] = []
        span = range(rank(wanted.first), rank(wanted.last) + 1)
        for entry_id, flat in rows:
            ticket = ticket_value(flat, self._field.encode())
            if rank(entry_id) in span and wanted.ticket in (None, ticket) and wanted.fits(flat):
                entries.append((entry_id, ticket))
                self._kept[entry_id] = flat
            self._check_most(entries, most)
        found = self.states(sorted(entries, key=lambda entry: rank(entry[0])))
        runs = runs_of([one.message_id for one in found if one.before.state == UNKNOWN])
        return [
            replace(one, before=_how_it_ended(run), run=run) if (run := runs.get(one.message_id)) is not None else one
            for one in found
        ]

    def _read(self, wanted: Wanted, most: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield entries that may be wanted, in order; where there is something to look for, Redis looks."""
        looked_for = [*([] if wanted.ticket is None else [(self._field.encode(), wanted.ticket)]), *wanted.where]
        if looked_for:
            field, value = looked_for[0]
            enough = most + 1 if len(looked_for) == 1 else _ALL
            found = self._search(
                "entries looked at", self._keys.stream, field, value, enough, (wanted.first, wanted.last)
            )
            if self.notes:
                raise StartRefused(f"nothing is replayed: {self.notes[-1]}; give --since")
            if len(looked_for) == 1:
                self._check_most(found, most)
            for one in reversed(found):
                if (flat := self._entry(one)) is not None:
                    yield one, flat
            return
        start, looked_at = wanted.first, 0
        while page := self._link.call("XRANGE", self._keys.stream, start, wanted.last, "COUNT", _BODIES_AT_ONCE):
            yield from page
            start = b"(" + page[-1][0]
            looked_at += len(page)
            self._on_page("entries looked at", looked_at)

    def _check_most(self, found: Sequence[Any], most: int) -> None:
        if len(found) > most:
            raise StartRefused(f"more than {most:,} messages are meant: narrow it down, or give --most")

    def body(self, one: Candidate) -> list[bytes] | None:
        """Return the message's fields; None when they are not (or no longer) complete anywhere."""
        if one.message_id in self._kept:
            return self._kept[one.message_id]
        if one.letter is None:
            return self._entry(one.message_id)
        found = self._letters.get(one.letter.id)
        if found is None:
            return None
        letter, fields = found
        return fields if fields and not letter.cut else self._entry(one.message_id)

    # ---- letters -----------------------------------------------------------------------------------------------------

    def _heads(self, ids: Sequence[bytes]) -> list[DeadLetter | None]:
        rows = self._scripts.run_each("read_letters", (self._keys.dead,), [(one, one, 1, "") for one in ids])
        return [parse_letter(*row[0]) if row else None for _, row in rows]

    def _with_letter(self, one: Candidate) -> Candidate:
        letters = self._letters.where("id", one.message_id, 1, _LETTER_S).letters
        return _of_letter(letters[0]) if letters else one

    # ---- entries -----------------------------------------------------------------------------------------------------

    def _entry(self, entry_id: bytes) -> list[bytes] | None:
        found = self._link.call("XRANGE", self._keys.stream, entry_id, entry_id)
        return found[0][1] if found else None

    def _search(
        self,
        what: str,
        key: str,
        field: str | bytes,
        value: bytes,
        most: int,
        span: tuple[bytes, bytes] = (b"0-0", b"+"),
    ) -> list[bytes]:
        """Return the ids of the newest ``most`` entries of a stream, between two ids, whose ``field`` is ``value``."""
        found: list[bytes] = []
        floor, start, looked_at, ends_s = rank(span[0]), span[1].decode(), 0, now_s() + _SEARCH_S
        while True:
            count, last, some, is_all = self._scripts.run(
                "find_entries", (key,), (field, value, start, _ENTRIES_AT_ONCE)
            )
            found += (one for one in some if rank(one) >= floor)
            looked_at += count
            self._on_page(what, looked_at)
            if is_all or len(found) >= most or rank(last) < floor:
                return found[:most]
            start = f"({last.decode()}"
            if now_s() > ends_s:
                self.notes.append(
                    f"{key} was searched from its end down to {last.decode()}, which took {_SEARCH_S:g} s; older"
                    " entries were not"
                )
                return found

    def states(self, entries: Sequence[tuple[bytes, bytes | None]]) -> list[Candidate]:
        """Make candidates of (id, ticket id as it is in the entry): what has become of each until now."""
        if not entries:
            return []
        named = [(one, ticket or b"", unfit_of(ticket)) for one, ticket in entries]
        known = self._known([one for one, _, _ in named], list(dict.fromkeys(ticket for _, ticket, _ in named)))
        over = [(one, ticket) for one, ticket, unfit in named if not unfit and _state(one, known) is None]
        runs = self._runs_of(over)
        made = []
        for one, ticket, unfit in named:
            record = known.records.get(ticket)
            fence = record.fence if record is not None and one in record.ids else runs[one].fence if one in runs else 0
            before = _state(one, known) or _how_it_ended(runs.get(one))
            made.append(
                Candidate(one, ticket, before, None, fence, known.attempts.get(one, NEVER), unfit, runs.get(one))
            )
        return made

    def _known(self, ids: list[bytes], tickets: list[bytes]) -> _Known:
        keys = self._keys
        stored: list[tuple[Arg, ...]] = [
            ("XINFO", "GROUPS", keys.stream),
            ("HMGET", keys.attempts, *ids),
            ("HMGET", keys.tickets, *tickets),
        ]
        groups, attempts, values, *pending = self._link.pipeline(
            [*stored, *(("XPENDING", keys.stream, keys.group, one, one, 1) for one in ids)]
        )
        for reply in (attempts, values):
            if isinstance(reply, Exception):
                raise reply
        return _Known(
            _delivered(groups, keys.group),
            {one: decode(value) for one, value in zip(ids, attempts, strict=True) if value is not None},
            {
                one: rows[0][1]
                for one, rows in zip(ids, pending, strict=True)
                if not isinstance(rows, Exception) and rows
            },
            {
                ticket: record
                for ticket, value in zip(tickets, values, strict=True)
                if (record := _record(value)) is not None
            },
        )

    def _runs_of(self, entries: Iterable[tuple[bytes, bytes]]) -> dict[bytes, RunRecord]:
        """Return the last run of each of these (id, ticket), as far as the run log is searched in time."""
        found: dict[bytes, RunRecord] = {}
        missing: dict[str, set[bytes]] = {}
        for one, ticket in entries:
            missing.setdefault(ticket.decode(), set()).add(one)
        looked_at, ends_s = 0, now_s() + _RUNS_S
        for text, ids in missing.items():
            start = "+"
            while not ids <= found.keys():
                count, last, records, is_all = self._scripts.run(
                    "find_runs", (self._keys.runs,), (orjson.dumps(text), start, _RUNS_AT_ONCE)
                )
                for run in (run for record in records for run in reversed(list(decode_runs(record)))):
                    if run.id.encode() in ids and run.outcome != STALE:  # a stale run was not the last word
                        found.setdefault(run.id.encode(), run)
                looked_at += count
                self._on_page("records of executions looked at", looked_at)
                if is_all or now_s() > ends_s:
                    break
                start = f"({last.decode()}"
        return found


def _of_letter(letter: DeadLetter) -> Candidate:
    return of_letter(letter, letter.ticket)


def _state(entry_id: bytes, known: _Known) -> Before | None:
    """Return the state of an entry that is not over; None when it is."""
    owner = known.owners.get(entry_id)
    if owner == HALTED:
        return Before(HALT, "halted: its ticket waits for an operator")
    if owner == MASTER:
        return Before(WAITING, "read, and not handed over")
    if owner is not None:
        return Before(HELD, f"in processing by {name_of(owner.decode(errors='replace'))}")
    if known.delivered is None or rank(entry_id) > rank(known.delivered):
        return Before(WAITING, "not read yet")
    return None


def _how_it_ended(run: RunRecord | None) -> Before:
    if run is None:
        return Before(UNKNOWN, "over; the run log does not tell how")
    return (
        Before(DONE)
        if run.outcome == RAN_WELL
        else Before(ENDED, f"over; {run.outcome.replace('_', ' ')} at its last start")
    )


def _delivered(reply: Any, group: str) -> bytes | None:
    facts = group_of(reply, group)
    return None if facts is None else facts[b"last-delivered-id"]


def _record(value: bytes | None) -> TicketRecord | None:
    try:
        return None if value is None else parse_record(value)
    except ValueError:
        return None
