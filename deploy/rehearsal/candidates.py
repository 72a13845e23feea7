"""Candidates: finds messages that can be rehearsed: dead letters, and entries that are still in the stream. It only
reads.

A search for one ticket runs in Redis, newest first, a bounded page at a time, and not for ever; the caller is told how
far it went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import MessageUndecodable, StartRefused
from usher.common.protocol.attempts import NEVER, Attempts, decode
from usher.common.protocol.keys import HALTED, MASTER, Keys
from usher.common.protocol.message import REPLAY_OF, REPLY_FIELD, UID_FIELD, check_ticket, first_value, ticket_value
from usher.common.protocol.registration import name_of
from usher.common.protocol.run_log import DONE as RAN_WELL
from usher.common.protocol.run_log import MERGED, RunRecord
from usher.common.protocol.run_log import decode as decode_runs
from usher.common.protocol.stream_id import is_id, rank
from usher.common.redis.client import Arg, Link
from usher.common.redis.replies import group_of, record_or_none
from usher.common.redis.scripts import ScriptRunner
from usher.consumer.isolation.process import NOT_RUN, CallResult, Piece
from usher.master.operations.dead_letters import DeadLetters
from usher.master.policy.letters import DeadLetter, LetterFilter

#: Reasons of letters whose message no handler was ever given, nor would be if it were redriven.
_FOR_NOBODY = frozenset({"no_ticket_id", "empty_ticket_id", "ticket_id_too_long", "ticket_id_not_utf8"})
_NOBODY = "no handler is ever given it ({})"
DEAD, DONE, HELD, HALT = "dead_letter", "done", "in_processing", "halted"
WAITING, ENDED, UNKNOWN = "waiting", "ended", "unknown"


class Before(NamedTuple):
    """The fate of a message until now. ``state``: one of the words above; ``told``: details, for people."""

    state: str
    told: str


_DONE = Before(DONE, "done")
_UNTOLD = Before(UNKNOWN, "over; the run log does not tell how")


@dataclass(frozen=True)
class Candidate:
    """A message that can be rehearsed, without its body. ``fence``: the highest one known of it, else 0; ``known``: its
    attempts, as its next start would find them; ``unfit``: why no handler can be given it, or ""; ``run``: its last
    execution, as far as it is known."""

    message_id: bytes
    ticket: bytes
    before: Before
    letter: DeadLetter | None = None
    fence: int = 0
    known: Attempts = NEVER
    unfit: str = ""
    run: RunRecord | None = None

    @property
    def is_over(self) -> bool:
        return not self.unfit and self.before.state in (DONE, ENDED, UNKNOWN)

    def with_run(self, run: RunRecord | None) -> Candidate:
        if run is None:
            return self
        ended = Before(ENDED, f"over; {run.outcome.replace('_', ' ')} at its last start")
        merged = Before(DONE, f"done, merged into the run of {run.into or 'another one'}")
        before = {RAN_WELL: _DONE, MERGED: merged}.get(run.outcome, ended)
        return replace(self, before=before, fence=self.fence or run.fence, run=run)

    @property
    def id(self) -> str:
        return (self.letter.id if self.letter is not None else self.message_id).decode(errors="replace")

    @property
    def place(self) -> int:
        """Return its place in the order of the stream; for the letter of something that never was an entry, the
        letter's place."""
        own = self.message_id.decode(errors="replace")
        return rank(self.message_id) if is_id(own) or self.letter is None else rank(self.letter.id)

    def piece(self, flat: Sequence[bytes]) -> Piece:
        return Piece(self.ticket, self.message_id, self.fence, (*self.known,), tuple(flat))


def of_letter(letter: DeadLetter) -> Candidate:
    reason = letter.reason.replace("_", " ")
    why = f"{reason}: {letter.error}" if letter.error else reason
    before = Before(DEAD, f"{why} (halted)" if letter.policy == "halt" else why)
    unfit = _NOBODY.format(letter.reason) if letter.reason in _FOR_NOBODY else unfit_of(letter.ticket or None)
    return Candidate(letter.message_id, letter.ticket, before, letter, letter.fence, NEVER, unfit)


def unfit_of(ticket: bytes | None) -> str:
    """Return why no handler can be given a message of this ticket (None: it has none), or ""."""
    try:
        check_ticket(ticket)
    except MessageUndecodable as why:
        return _NOBODY.format(why.reason)
    return ""


def in_order(candidates: Iterable[Candidate], most: int | None = None) -> list[Candidate]:
    """Put candidates in the order of the stream, each message once (its letter says more than its entry); only the
    newest ``most``."""
    found: dict[bytes, Candidate] = {}
    for one in candidates:
        if one.message_id not in found or found[one.message_id].letter is None:
            found[one.message_id] = one
    ordered = sorted(found.values(), key=lambda one: one.place)
    return ordered if most is None else ordered[-most:]


class Rehearsed(NamedTuple):
    candidate: Candidate
    now: CallResult

    def document(self) -> dict[str, Any]:
        one = self.candidate
        return {
            "letter_id": None if one.letter is None else one.letter.id.decode(errors="replace"),
            "message_id": one.message_id.decode(errors="replace"),
            "ticket_id": _display_ticket(one.ticket),
            "fence": one.fence,
            "attempt": one.known.starts + 1,
            "before": {"state": one.before.state, "told": one.before.told}
            | ({"reason": one.letter.reason, "error": one.letter.error} if one.letter is not None else {}),
            "now": asdict(self.now),
            "taken": self.now.is_taken,
        }

    def row(self) -> tuple[str, str, str, str, str, str]:
        one, now = self.candidate, self.now
        kind = "message" if one.letter is None else "letter"
        return kind, one.id, _display_ticket(one.ticket), one.before.told[:80], now.told()[:160], f"{now.seconds:.3f}"


def _display_ticket(ticket: bytes) -> str:
    return "" if ticket.startswith(b"\xff") else ticket.decode(errors="replace")


def redrive_command(done: Sequence[Rehearsed]) -> str | None:
    ids = [one.candidate.letter.id.decode() for one in done if one.now.is_taken and one.candidate.letter is not None]
    return " ".join(["usher", "dead", "redrive", *ids]) if ids else None


# ---- replay ----------------------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """Selection of entries to replay: between two ids, both included, of a ticket (None: of all), with these values."""

    first: bytes
    last: bytes
    ticket: bytes | None
    where: tuple[tuple[bytes, bytes], ...]

    def fits(self, flat: Sequence[bytes]) -> bool:
        """Return True when a message's fields have the values, and it is no copy that a replay added: one that goes on
        finds those of its first part."""
        return first_value(flat, REPLAY_OF) is None and all(
            ticket_value(flat, name) == value for name, value in self.where
        )

    def told(self) -> str:
        """Describe the selection, for people.

        >>> Wanted(b"0-0", b"9-0", b"42", ((b"kind", b"ride"),)).told()
        'ticket 42, kind=ride, from 0-0 to 9-0'
        """
        parts = [] if self.ticket is None else [f"ticket {self.ticket.decode(errors='replace')}"]
        parts += [b"=".join(one).decode(errors="replace") for one in self.where]
        return ", ".join([*parts, f"from {self.first.decode()} to {self.last.decode()}"])


NOT_REPLAYED = "not_replayed"


def again(flat: Sequence[bytes], entry_id: bytes, name: str, same_uid: bool) -> tuple[bytes, list[bytes]]:
    """Return the uid under which a replay knows that it has added a message, and the fields of its new entry. The new
    entry has that uid, or with ``same_uid`` the original's, by which sinks that have its effect know it.

    >>> again([b"ticket_id", b"42", b"uid", b"order-7"], b"5-1", "fix", False)
    (b'order-7@fix', [b'ticket_id', b'42', b'uid', b'order-7@fix', b'usher_replay_of', b'5-1'])
    """
    former = first_value(flat, UID_FIELD) or entry_id
    uid = former + b"@" + name.encode()
    kept = [
        part
        for pair in zip(flat[::2], flat[1::2], strict=True)
        if pair[0] not in (UID_FIELD, REPLAY_OF, REPLY_FIELD)
        for part in pair
    ]
    return uid, [*kept, UID_FIELD, former if same_uid else uid, REPLAY_OF, entry_id]


class Replayed(NamedTuple):
    """A message, its new entry (b"": none), and what came of that."""

    candidate: Candidate
    new_id: bytes
    now: Before
    seconds: float | None = None

    @property
    def comparison(self) -> str:
        states = (self.candidate.before.state, self.now.state)
        if UNKNOWN in states or self.now.state in (WAITING, HELD, NOT_REPLAYED):
            return "unknown"
        return "same" if (states[0] == DONE) == (states[1] == DONE) else "differs"

    def document(self) -> dict[str, Any]:
        one = self.candidate
        return {
            "message_id": one.message_id.decode(),
            "ticket_id": _display_ticket(one.ticket),
            "before": {"state": one.before.state, "told": one.before.told, "seconds": seconds_of(one.run)},
            "new_id": self.new_id.decode() or None,
            "now": {"state": self.now.state, "told": self.now.told, "seconds": self.seconds},
            "comparison": self.comparison,
        }

    def row(self) -> tuple[str, ...]:
        one, seconds = self.candidate, (seconds_of(self.candidate.run), self.seconds)
        words = (one.before.told[:80], self.now.told[:160])
        return one.id, _display_ticket(one.ticket), *words, *("" if s is None else f"{s:.3f}" for s in seconds)


def seconds_of(run: RunRecord | None) -> float | None:
    return None if run is None or not run.end_us else (run.end_us - run.start_us) / 1e6


def as_replayed(one: Rehearsed) -> Replayed:
    now = one.now
    before = _DONE if now.is_taken else Before(NOT_REPLAYED if now.how == NOT_RUN else ENDED, now.told())
    return Replayed(one.candidate, b"", before, now.seconds)


#: Most entries, or records of executions, looked at by one call: about a millisecond of Redis.
_ENTRIES_AT_ONCE, _RUNS_AT_ONCE = 1_000, 50
#: Entries read with their fields by one call.
_BODIES_AT_ONCE = 100
_ALL = 2**62
#: Longest search, in seconds, of one stream for a ticket; and of the run log.
_SEARCH_S, _RUNS_S = 60.0, 5.0


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

    def letters(self, ids: Sequence[bytes]) -> tuple[list[Candidate], list[bytes]]:
        found = {one: self._letters.of_message(one) for one in ids}
        return [of_letter(one) for one in found.values() if one], [one for one in ids if found[one] is None]

    def matching(self, wanted: LetterFilter, most: int) -> list[Candidate]:
        return in_order(map(of_letter, self._letters.newest(wanted, None, most, _SEARCH_S).letters))

    def messages(self, ids: Sequence[bytes]) -> tuple[list[Candidate], list[bytes]]:
        """Find the entries of the stream with these ids; those that became dead letters say so; and the ids for which
        there is none."""
        bodies = {entry_id: self._entry(entry_id) for entry_id in ids}
        found = self.states(
            [(one, ticket_value(flat, self._field.encode())) for one, flat in bodies.items() if flat is not None]
        )
        over = [one.message_id for one in found if one.before.state in (ENDED, HALT, UNKNOWN)]
        letters = {one: self._letters.of_message(one) for one in over}
        return [of_letter(letter) if (letter := letters.get(one.message_id)) else one for one in found], [
            one for one, flat in bodies.items() if flat is None
        ]

    def of_ticket(self, ticket: bytes, most: int) -> list[Candidate]:
        """Find the newest ``most`` messages of a ticket, in the order of the stream: its entries, and its dead
        letters."""
        ids = self._search("entries looked at", self._keys.stream, self._field, ticket, most)
        letters = list(map(of_letter, self._letters.newest(LetterFilter(ticket), None, most, _SEARCH_S).letters))
        dead = {one.message_id for one in letters}
        return in_order([*letters, *self.states([(one, ticket) for one in ids if one not in dead])], most)

    def chosen(
        self,
        wanted: Wanted,
        most: int,
        archived: Iterable[tuple[bytes, list[bytes]]] | None = None,
        runs_of: Callable[[list[bytes]], dict[bytes, RunRecord]] | None = None,
    ) -> list[Candidate]:
        """Find the entries of the stream that are wanted, in its order; or of an archive, whose run log may know what
        Redis' no longer does. Raises StartRefused for more than ``most``, and for a search that did not come to its
        end: a part of them would be another replay."""
        entries: list[tuple[bytes, bytes | None]] = []
        span = range(rank(wanted.first), rank(wanted.last) + 1)
        for entry_id, flat in self._read(wanted, most) if archived is None else archived:
            ticket = ticket_value(flat, self._field.encode())
            if rank(entry_id) in span and wanted.ticket in (None, ticket) and wanted.fits(flat):
                entries.append((entry_id, ticket))
                if archived is not None:
                    self._kept[entry_id] = flat
            self._check_most(entries, most)
        found = self.states(sorted(entries, key=lambda entry: rank(entry[0])))
        runs = runs_of([one.message_id for one in found if one.before.state == UNKNOWN]) if runs_of is not None else {}
        return [one.with_run(runs.get(one.message_id)) for one in found]

    def _read(self, wanted: Wanted, most: int) -> Iterator[tuple[bytes, list[bytes]]]:
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
        if one.message_id in self._kept:
            return self._kept[one.message_id]
        if one.letter is None:
            return self._entry(one.message_id)
        found = self._letters.get(one.letter.id)
        if found is None:
            return None
        letter, fields = found
        return fields if fields and not letter.cut else self._entry(one.message_id)

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
        found: list[bytes] = []
        floor, start, looked_at, ends_s = rank(span[0]), span[1].decode(), 0, now_s() + _SEARCH_S
        while True:
            args = ("XREVRANGE", start, "-", _ENTRIES_AT_ONCE, field, value)
            count, last, some, is_all = self._scripts.run("find_entries", (key,), args)
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
        if not entries:
            return []
        keys, tickets = self._keys, list(dict.fromkeys(ticket or b"" for _, ticket in entries))
        stored: list[tuple[Arg, ...]] = [
            ("XINFO", "GROUPS", keys.stream),
            ("HMGET", keys.attempts, *(one for one, _ in entries)),
            ("HMGET", keys.tickets, *tickets),
            ("GET", keys.taken),
        ]
        groups, attempts, values, taken, *pending = self._link.pipeline(
            [*stored, *(("XPENDING", keys.stream, keys.group, one, one, 1) for one, _ in entries)]
        )
        for reply in (attempts, values):
            if isinstance(reply, Exception):
                raise reply
        facts = group_of(groups, keys.group, taken)
        delivered = -1 if facts is None else rank(facts[b"last-delivered-id"])
        records = dict(zip(tickets, map(record_or_none, values), strict=True))
        found, over = [], []
        for (one, ticket), tries, rows in zip(entries, attempts, pending, strict=True):
            before = _state(one, None if isinstance(rows, Exception) or not rows else rows[0][1], delivered)
            record, unfit = records[ticket or b""], unfit_of(ticket)
            fence = record.fence if record is not None and one in record.ids else 0
            known = NEVER if tries is None else decode(tries)
            found.append(Candidate(one, ticket or b"", before or _UNTOLD, None, fence, known, unfit))
            if before is None and ticket is not None and not unfit:
                over.append((one, ticket))
        runs = self._runs_of(over)
        return [one.with_run(runs.get(one.message_id)) for one in found]

    def _runs_of(self, entries: Iterable[tuple[bytes, bytes]]) -> dict[bytes, RunRecord]:
        found: dict[bytes, RunRecord] = {}
        missing: dict[str, set[bytes]] = {}
        for one, ticket in entries:
            missing.setdefault(ticket.decode(), set()).add(one)
        looked_at, ends_s = 0, now_s() + _RUNS_S
        for text, ids in missing.items():
            start = "+"
            while not ids <= found.keys():
                args = ("XREVRANGE", start, "-", _RUNS_AT_ONCE, "batch", orjson.dumps(text), "part")
                count, last, records, is_all = self._scripts.run("find_entries", (self._keys.runs,), args)
                for run in (run for record in records for run in reversed(list(decode_runs(record)))):
                    if run.id.encode() in ids:
                        found.setdefault(run.id.encode(), run)
                looked_at += count
                self._on_page("records of executions looked at", looked_at)
                if is_all or now_s() > ends_s:
                    break
                start = f"({last.decode()}"
        return found


def _state(entry_id: bytes, owner: bytes | None, delivered: int) -> Before | None:
    """Return the state of an entry that is not over; None when it is. ``delivered``: rank of the last id that the group
    was given."""
    if owner == HALTED:
        return Before(HALT, "halted: its ticket waits for an operator")
    if owner == MASTER:
        return Before(WAITING, "read, and not handed over")
    if owner is not None:
        return Before(HELD, f"in processing by {name_of(owner.decode(errors='replace'))}")
    return Before(WAITING, "not read yet") if rank(entry_id) > delivered else None
