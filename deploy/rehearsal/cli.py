"""``usher rehearse``: a dry run that calls a handler with existing messages, before they are redriven or the handler is
deployed; it changes nothing. ``usher replay``: messages that are over become new entries of their stream, in order per
ticket, one of each at a time, and what comes of them is compared.

Messages are dead letters, and entries that are still in the stream. A search for one ticket runs in Redis, newest
first, a bounded page at a time, until somebody ends it; the caller is told how far it is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import starmap
from typing import Any, NamedTuple

import click
import orjson
from pydantic import Field
from rich.text import Text

from usher.common.base.backoff import backoff_s
from usher.common.base.clock import CHANCE, now_s, wall_ms
from usher.common.base.durations import Number, option
from usher.common.base.errors import MessageUndecodable, RedisTrouble, ReplyUnknown, StartRefused
from usher.common.base.text import escape_control, pluralize
from usher.common.cli.progress import progress
from usher.common.protocol.attempts import NEVER, Attempts, decode
from usher.common.protocol.keys import HALTED, MASTER, Keys, uid_key
from usher.common.protocol.message import REPLAY_OF, REPLY_FIELD, UID_FIELD, check_ticket, first_value, ticket_value
from usher.common.protocol.registration import name_of
from usher.common.protocol.run_log import DONE as RAN_WELL
from usher.common.protocol.run_log import MERGED, RunRecord
from usher.common.protocol.run_log import decode as decode_runs
from usher.common.protocol.stream_id import is_id, milliseconds, rank
from usher.common.redis.client import Arg, CommandRefused, Link
from usher.common.redis.replies import found_entries, group_of, record_or_none
from usher.common.runtime.settings import CommonSettings, load, options, takes_json
from usher.common.runtime.signals import StopAsked, StopRequest
from usher.consumer.isolation.process import CallResult, HandlerProcess, How, Piece, ProcessSpec
from usher.master.cli.commands import place
from usher.master.cli.shared import asks, caller, configured, console, print_json, table, why_option
from usher.master.operations.action_log import FAILED, ActionLog, By, OperatorAction, counted
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.letters import DeadLetter, LetterFilter, also_for
from usher.master.verbs.verbs import LetterAsk
from usher.master.verbs.view import View

#: Reasons of letters whose message no handler was ever given, nor would be if it were redriven.
_FOR_NOBODY = frozenset({"no_ticket_id", "empty_ticket_id", "ticket_id_too_long", "ticket_id_not_utf8"})
_NOBODY = "no handler is ever given it ({})"
DEAD, DONE, HELD, HALT = "dead_letter", "done", "in_processing", "halted"
WAITING, ENDED, UNKNOWN, NOT_TRIED = "waiting", "ended", "unknown", "not_replayed"


class Before(NamedTuple):
    """The fate of a message until now. ``state``: one of the words above; ``told``: details, for people."""

    state: str
    told: str


_DONE = Before(DONE, "done")
_UNTOLD = Before(UNKNOWN, "over; the run log does not tell how")
_NOT_ADDED = Before(NOT_TRIED, "not added")


@dataclass
class Candidate:
    """A message that can be rehearsed or replayed, without its body. ``fence``: the highest one known of it, else 0;
    ``known``: its attempts, as its next start would find them; ``unfit``: why no handler can be given it, or "";
    ``run``: its last execution, as far as it is known. ``now``: how it ended this time, after ``took_s`` seconds, in a
    ``call`` of a handler, or as a new entry (``new_id``)."""

    message_id: bytes
    ticket: bytes
    before: Before
    letter: DeadLetter | None = None
    fence: int = 0
    known: Attempts = NEVER
    unfit: str = ""
    run: RunRecord | None = None
    now: Before = _NOT_ADDED
    took_s: float | None = None
    new_id: bytes = b""
    call: CallResult | None = None

    @property
    def is_over(self) -> bool:
        return not self.unfit and self.before.state in (DONE, ENDED, UNKNOWN)

    def learn(self, run: RunRecord | None) -> None:
        if run is not None:
            ended = Before(ENDED, f"over; {run.outcome.replace('_', ' ')} at its last start")
            merged = Before(DONE, f"done, merged into the run of {run.into or 'another one'}")
            self.before = {RAN_WELL: _DONE, MERGED: merged}.get(run.outcome, ended)
            self.fence, self.run = self.fence or run.fence, run

    def called(self, call: CallResult) -> Candidate:
        state = DONE if call.is_taken else NOT_TRIED if call.how == How.NOT_RUN else ENDED
        self.now, self.took_s, self.call = Before(state, call.told()), call.seconds, call
        return self

    @property
    def seconds(self) -> float | None:
        return None if self.run is None or not self.run.end_us else (self.run.end_us - self.run.start_us) / 1e6

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

    @property
    def comparison(self) -> str:
        states = (self.before.state, self.now.state)
        if UNKNOWN in states or self.now.state in (WAITING, HELD, NOT_TRIED):
            return "unknown"
        return "same" if (states[0] == DONE) == (states[1] == DONE) else "differs"

    def document(self) -> dict[str, Any]:
        call, letter = self.call, self.letter
        before = {"state": self.before.state, "told": self.before.told, "seconds": self.seconds}
        now = {"state": self.now.state, "told": self.now.told, "seconds": self.took_s}
        if call is not None:
            now |= asdict(call) | {"answer": [part.decode("latin-1") for part in call.answer or ()] or None}
        told: dict[str, Any] = {
            "letter_id": None if letter is None else self.id,
            "message_id": self.message_id.decode(errors="replace"),
            "ticket_id": _display_ticket(self.ticket),
            "fence": self.fence,
            "attempt": self.known.starts + 1,
            "before": before | ({} if letter is None else {"reason": letter.reason, "error": letter.error}),
            "new_id": self.new_id.decode() or None,
            "now": now,
            "comparison": self.comparison,
        }
        return told | ({} if call is None else {"taken": call.is_taken})

    def row(self) -> list[str | Text]:
        now = Text(self.now.told[:160], "green" if self.now.state == DONE else "red")
        kind = "message" if self.letter is None else "letter"
        shown = ["" if s is None else f"{s:.3f}" for s in (self.seconds, self.took_s)]
        return [kind, self.id, _display_ticket(self.ticket), self.before.told[:80], now, *shown]


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


def _display_ticket(ticket: bytes) -> str:
    return "" if ticket.startswith(b"\xff") else ticket.decode(errors="replace")


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


#: Most entries, or records of executions, looked at by one call: about a millisecond of Redis.
_ENTRIES_AT_ONCE, _RUNS_AT_ONCE = 1_000, 50
#: Entries read with their fields by one call.
_BODIES_AT_ONCE = 100
_ALL = 2**62
#: Longest search, in seconds, of the dead letters for some; and of the run log.
_LETTERS_S, _RUNS_S = 60.0, 5.0


class Candidates:
    """Finder of candidates, for one thread. ``on_page`` is called with what is being searched and how much of it has
    been, and may raise."""

    def __init__(self, link: Link, keys: Keys, ticket_field: str, on_page: Callable[[str, int], None]) -> None:
        self._link = link
        self._keys = keys
        self._field = ticket_field
        self._letters = DeadLetters(link, keys)
        self._on_page = on_page
        self._kept: dict[bytes, list[bytes]] = {}  # the fields of archived entries

    def named(self, letter_ids: Sequence[bytes], message_ids: Sequence[bytes]) -> list[Candidate]:
        """Find these letters, and the entries of the stream with these ids; those that became dead letters say so.
        Raises StartRefused, which names all that are not there."""
        letters = {one: self._letters.of_message(one) for one in letter_ids}
        bodies = {one: self._entry(one) for one in message_ids}
        wrong = [
            f"there is no dead letter {one.decode()}, nor one of a message {one.decode()} (usher dead list)"
            for one, letter in letters.items()
            if letter is None
        ]
        wrong += [
            f"{self._keys.stream} has no entry {one.decode()} (any more); is there a dead letter of it? (--letter)"
            for one, flat in bodies.items()
            if flat is None
        ]
        if wrong:
            raise StartRefused("nothing was rehearsed:\n  " + "\n  ".join(wrong))
        tickets = [(one, ticket_value(flat, self._field.encode())) for one, flat in bodies.items() if flat is not None]
        found = self.states(tickets)
        over = [one.id for one in found if one.before.state in (ENDED, HALT, UNKNOWN)]
        dead = self._letters.of_messages(over)
        return [
            *(of_letter(dead[one.id]) if one.id in dead else one for one in found),
            *(of_letter(letter) for letter in letters.values() if letter is not None),
        ]

    def matching(self, wanted: LetterFilter, most: int) -> list[Candidate]:
        return in_order(map(of_letter, self._letters.newest(wanted, None, most, _LETTERS_S).letters))

    def of_ticket(self, ticket: bytes, most: int) -> list[Candidate]:
        """Find the newest ``most`` messages of a ticket, in the order of the stream: its entries, and its dead
        letters."""
        ids = self._search(self._field, ticket, most)
        letters = list(map(of_letter, self._letters.newest(LetterFilter(ticket), None, most, _LETTERS_S).letters))
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
        Redis' no longer does. Raises StartRefused for more than ``most``: a part of them would be another replay."""
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
        for one in found:
            one.learn(runs.get(one.message_id))
        return found

    def _read(self, wanted: Wanted, most: int) -> Iterator[tuple[bytes, list[bytes]]]:
        looked_for = [*([] if wanted.ticket is None else [(self._field.encode(), wanted.ticket)]), *wanted.where]
        if looked_for:
            field, value = looked_for[0]
            enough = most + 1 if len(looked_for) == 1 else _ALL
            found = self._search(field, value, enough, wanted.first, wanted.last)
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
        self, field: str | bytes, value: bytes, most: int, first: bytes = b"-", last: bytes = b"+"
    ) -> list[bytes]:
        asked = (self._keys.stream, last, first, _ENTRIES_AT_ONCE, field, value)
        return [*itertools.islice(self._pages("entries looked at", *asked), most)]

    def _pages(self, what: str, *asked: Any) -> Iterator[bytes]:
        """Yield what is found in a part of a stream, newest first."""
        looked_at = 0
        for count, found, _, _ in found_entries(self._link, "XREVRANGE", *asked):
            looked_at += count
            self._on_page(what, looked_at)
            yield from found

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
        for candidate in found:
            candidate.learn(runs.get(candidate.message_id))
        return found

    def _runs_of(self, entries: Iterable[tuple[bytes, bytes]]) -> dict[bytes, RunRecord]:
        found: dict[bytes, RunRecord] = {}
        missing: dict[str, set[bytes]] = {}
        for one, ticket in entries:
            missing.setdefault(ticket.decode(), set()).add(one)
        what, ends_s = "records of executions looked at", now_s() + _RUNS_S
        for text, ids in missing.items():
            wanted = "batch", orjson.dumps(text), "part"
            for record in self._pages(what, self._keys.runs, "+", "-", _RUNS_AT_ONCE, *wanted):
                for run in reversed(list(decode_runs(record))):
                    if run.id.encode() in ids:
                        found.setdefault(run.id.encode(), run)
                if ids <= found.keys() or now_s() > ends_s:
                    break
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


#: How long Redis remembers that a replay has added a message, in ms: within a day it goes on where it was cut off.
_KNOWN_MS = 86_400_000
#: Tickets that a replay has messages of in the stream at a time.
_AT_ONCE = 100
#: Seconds between two looks at what became of them: while something ends, and after a while of nothing.
_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0
#: Most names and values: more do not fit on Lua's stack.
_MOST_VALUES = 7000
_TRIES = 6


@dataclass
class Replay:
    """A replay, known by its name: who gives the same one again goes on. ``rate``: most messages a second; ``check`` is
    called at each turn, and may raise; ``done`` is filled as it goes."""

    link: Link
    keys: Keys
    finder: Candidates
    name: str
    rate: float
    same_uid: bool
    check: Callable[[int], object]
    done: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queues: dict[bytes, deque[Candidate]] = {}
        self._running: dict[bytes, Candidate] = {}  # by the new id

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Replay these messages, which are in the order of the stream. Raises what ``Link.call`` and ``check`` raise;
        ``done`` and ``open`` then tell how far it came."""
        for one in candidates:
            self._queues.setdefault(one.ticket, deque()).append(one)
        began_s, added, pause_s = now_s(), 0, _LOOK_S
        while self._queues or self._running:
            self.check(len(self.done))
            allowed = 1 + int((now_s() - began_s) * self.rate) - added
            most = max(1, int(self.rate * pause_s))  # what a stall kept back does not come at once
            now_added = self._add(min(allowed, most, _AT_ONCE - len(self._running)))
            added += now_added
            pause_s = _LOOK_S if self._look() or now_added else min(2 * pause_s, _LONGEST_LOOK_S)
            if self._queues or self._running:
                time.sleep(pause_s)

    def open(self) -> list[Candidate]:
        for one in self._running.values():
            one.now = Before(WAITING, "added; not over yet")
        return [*self._running.values(), *(one for queue in self._queues.values() for one in queue)]

    def _add(self, most: int) -> int:
        busy, before = {one.ticket for one in self._running.values()}, len(self._running)
        for ticket in [ticket for ticket in self._queues if ticket not in busy][: max(0, most)]:
            one = self._queues[ticket][0]
            flat = self.finder.body(one)
            if flat is None or len(flat) > _MOST_VALUES:
                self._stop(ticket, "its fields are gone" if flat is None else "it has too many fields")
                continue
            one.new_id = self._sent(one, flat)
            self._running[one.new_id] = one
            self._queues[ticket].popleft()
            if not self._queues[ticket]:
                del self._queues[ticket]
        return len(self._running) - before

    def _sent(self, one: Candidate, flat: list[bytes]) -> bytes:
        """Add an entry, once, and return its id: Redis knows the uid when an answer is lost, and when this name is
        given again."""
        stream, (uid, fields) = self.keys.stream, again(flat, one.message_id, self.name, self.same_uid)
        for failures in range(1, _TRIES + 1):
            try:
                keys = (stream, stream, stream, uid_key(stream, uid))
                [[new_id, _]], _ = self.link.run("send", keys, (_KNOWN_MS, 0, "", 0, len(fields), *fields))
                return bytes(new_id)
            except ReplyUnknown:
                if failures == _TRIES:
                    raise
                time.sleep(backoff_s(failures, 0.1, 2.0, CHANCE))
        raise AssertionError("not reached")

    def _look(self) -> int:
        if not self._running:
            return 0
        ended = 0
        for seen in self.finder.states([(new_id, one.ticket) for new_id, one in self._running.items()]):
            if seen.before.state in (WAITING, HELD):
                continue
            one = self._running.pop(seen.message_id)
            one.now, one.took_s = seen.before, seen.seconds
            self.done.append(one)
            ended += 1
            if seen.before.state not in (DONE, UNKNOWN) and one.ticket in self._queues:
                self._stop(one.ticket, f"behind {one.id}, which was not done")
        return ended

    def _stop(self, ticket: bytes, why: str) -> None:
        for one in self._queues.pop(ticket):
            one.now = Before(NOT_TRIED, why)
            self.done.append(one)


_LAST = 100
_NOTHING_SAID = 2
_FILTERS = ("reason", "error", "older_than_s", "younger_than_s")
_HELP = """Call HANDLER (module:function) with existing messages, and say how each call ends: a dry run. Redis is only
read: nothing is acknowledged, counted or redriven, no master is needed, and whatever runs goes on.

\b
  usher rehearse shop:handle --letter 1700000000000-0    does the mended handler take this dead letter?
  usher rehearse shop:handle --error KeyError            ... and all that were given up with a KeyError?
  usher rehearse shop:handle --ticket 42                 all messages of a ticket: letters, and entries of the stream
  usher rehearse shop:handle --message 1700000000000-0   one entry of the stream, whatever became of it

SQL statements that the handler runs through SqlSink and AsyncSqlSink are rolled back, whatever tokens and uids are
stored; until then they hold their locks. RedisGuard does nothing, and the headers of the HTTP sink tell the service.
EVERYTHING ELSE THAT THE HANDLER DOES IS REAL, unless it asks `message.is_rehearsal`; so the command asks first.
Messages come one by one (a batch handler gets lists of one, absorb() gives nothing), and each meets the data as stored
now, without the effects of the messages before it.

The handler runs in a process of its own, in this folder and environment. What it prints goes to stderr. A call that
runs past its deadline (@handler(deadline_s=...), else USHER_HANDLER_SECONDS, else 60 s) is ended and reported as hung;
one that ends its process is reported too.

Exit code 0: all were taken. 1: some were not. 2: nothing can be said, and why. 130: Ctrl-C.
"""
_WARNING = (
    "Usher's SQL sinks roll back, RedisGuard does nothing. All else that the handler does is REAL (HTTP, mail, files, a"
    " database of its own), unless it asks message.is_rehearsal."
)


class RehearseSettings(CommonSettings):
    handler_seconds: float = Field(
        0.0, ge=0, description="Longest that one call may take; its process is ended then. 0: 60 s."
    )


def _ids(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> list[bytes]:
    for text in given:
        if not is_id(text):
            raise click.UsageError(f"{text!r} is not an id: an id looks like 1526919030474-55")
    return [text.encode() for text in dict.fromkeys(given)]


@click.command(help=_HELP)
@click.argument("handler", envvar="USHER_HANDLER")
@option(
    "--letter letter_ids",
    "This dead letter, or that of the message with this id; repeatable.",
    multiple=True,
    callback=_ids,
    metavar="ID",
)
@option(
    "--message message_ids", "This entry of the (work) stream; repeatable.", multiple=True, callback=_ids, metavar="ID"
)
@option(
    "--ticket",
    "All that is there of this ticket; with a filter or --all its letters only. Of several streams: STREAM/ID.",
    metavar="ID",
)
@option("--all everything", "All dead letters that the filters let through.", is_flag=True)
@asks(LetterAsk, _FILTERS)
@option(
    "--last",
    f"Of a ticket, or of letters that fit, the newest N. [default: {_LAST}]",
    click.IntRange(1, 10_000),
    metavar="N",
)
@option("--yes", "Do not ask.", is_flag=True)
@takes_json
@options(RehearseSettings)
def rehearse(flags: dict[str, Any], handler: str, yes: bool, as_json: bool, **given: Any) -> None:
    module, colon, name = handler.partition(":")
    if not (module and colon and name):
        raise StartRefused(f"HANDLER must look like module:function (it is {handler!r})")
    wanted = _wanted_letters(given)
    if as_json and not yes:
        raise click.UsageError("--json does not ask: pass --yes too")
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(f"stdin is not a terminal: pass --yes. {_WARNING}")
    settings = load(RehearseSettings, os.environ, flags)
    with configured(flags, "rehearse") as at:
        finder, candidates = _searched(at, settings, lambda finder: _found(finder, given, wanted, at))
        if not yes:
            many = pluralize(len(candidates), "message")
            click.echo(f"{handler} is called with {many}, one by one. {_WARNING}", err=True)
            if not click.confirm("Go on?", err=True):
                sys.exit(_NOTHING_SAID)
        done, code = _rehearse(finder, candidates, at, handler, settings)
    _print_rehearsals(handler, done, len(candidates), as_json)
    sys.exit(code)


def _wanted_letters(given: dict[str, Any]) -> LetterFilter | None:
    """Return the filter of letters, if one is given. Raises click.UsageError when it is not clear which messages are
    meant."""
    is_named, of_ticket = bool(given["letter_ids"] or given["message_ids"]), given["ticket"] is not None
    is_filtered = given["everything"] or any(given[name] not in (None, "") for name in _FILTERS)
    if not (is_named or of_ticket or is_filtered):
        raise click.UsageError(
            "say which messages: --letter ID, --message ID, --ticket ID, or dead letters by --error, --reason, age, or"
            " --all"
        )
    if is_named and (of_ticket or is_filtered or given["last"]):
        raise click.UsageError("--letter and --message name messages; --ticket, --last and filters do not go with them")
    named = {name: given[name] for name in ("ticket", *_FILTERS)}
    return LetterAsk.model_construct(**named).meant() if is_filtered else None


def _searched(
    at: View, settings: RehearseSettings, search: Callable[[Candidates], list[Candidate]]
) -> tuple[Candidates, list[Candidate]]:
    with StopRequest() as stop, progress(is_counted=False) as show:

        def on_page(what: str, count: int) -> None:
            stop.check()
            show(f"{what}: {count:,}", 0, 0)

        finder = Candidates(at.link, at.keys, settings.work_ticket_field, on_page)
        return finder, search(finder)


def _found(finder: Candidates, given: dict[str, Any], wanted: LetterFilter | None, at: View) -> list[Candidate]:
    """Find the selected messages, in the order of the stream. Raises StartRefused when a named one does not exist, or
    none matches."""
    most = given["last"] or _LAST
    if wanted is not None:
        found = finder.matching(wanted, most)
        nothing = "no dead letter matches (usher dead list)"
    elif given["ticket"] is not None:
        ticket = given["ticket"].encode("utf-8", "surrogateescape")
        found = finder.of_ticket(ticket, most)
        hint = "; of several streams a ticket is called STREAM/ID" if at.settings.by_stream else ""
        nothing = (
            f"of ticket {ticket.decode(errors='replace')!r} nothing is in {at.keys.stream}, nor in the dead"
            f" letters{hint}"
        )
    else:
        found, nothing = in_order(finder.named(given["letter_ids"], given["message_ids"])), ""
    if not found:
        raise StartRefused(f"nothing to rehearse: {nothing}")
    return found


def _rehearse(
    finder: Candidates, candidates: Sequence[Candidate], at: View, handler: str, settings: RehearseSettings
) -> tuple[list[Candidate], int]:
    """Call the handler with one message after another; return those that it was called with, and the exit code."""
    done = list[Candidate]()
    log, secrets = (settings.log_level, settings.log_format), tuple(filter(None, settings.secrets))
    play = ProcessSpec(handler, at.keys.stream, settings.sources is not None, settings.handler_seconds, log, secrets)
    with StopRequest() as stop, progress() as show:
        process = HandlerProcess(play, stop.check)
        try:
            with process:
                for one in candidates:
                    stop.check()
                    show(one.id, len(done), len(candidates))
                    done.append(one.called(_run(finder, one, process)))
        except StopAsked:
            return done, stop.exit_code
        except StartRefused as refused:  # its module could be imported before, and no longer can
            if not done:
                raise
            process.notes.append(str(refused))
            return done, 1
        finally:
            for note in process.notes:
                click.echo("usher: " + escape_control(note, kept="\n"), err=True)
    return done, int(not all(one.now.state == DONE for one in done))


def _run(finder: Candidates, one: Candidate, process: HandlerProcess) -> CallResult:
    if one.unfit:
        return CallResult(How.NOT_RUN, one.unfit)
    try:
        try:
            body = finder.body(one)
        except RedisTrouble:  # Redis may have closed a connection that was idle while a handler ran
            body = finder.body(one)
    except (RedisTrouble, CommandRefused) as trouble:  # the results of the others are shown all the same
        return CallResult(How.NOT_RUN, f"Redis: {trouble}")
    if body is None:
        return CallResult(How.NOT_RUN, "its fields are no longer complete anywhere")
    return process.run(one.piece(body))


def _print_tried(title: str, tried: Sequence[Candidate]) -> None:
    columns = ("", "id", "ticket", "before", "now", "seconds before", "seconds")
    rows = [one.row() for one in tried]
    console().print(table(title, columns, rows, numbers=columns[-2:], ids=("", "id", *columns[-2:])))


def _print_rehearsals(handler: str, done: Sequence[Candidate], asked: int, as_json: bool) -> None:
    taken, runs = [one for one in done if one.now.state == DONE], [one.run for one in done]
    ids = [one.id for one in taken if one.letter is not None]
    command = " ".join(["usher dead redrive", *ids]) if ids else None
    merged = sum(run is not None and run.outcome == MERGED for run in runs)
    if as_json:
        counts = {"messages": asked, "taken": len(taken), "not_taken": len(done) - len(taken), "merged": merged}
        counts["not_tried"] = asked - len(done)
        print_json({"handler": handler, **counts, "rehearsals": [one.document() for one in done], "redrive": command})
        return
    _print_tried(f"Rehearsal of {handler}", done)
    if asked == 1 and done and done[0].call is not None and (traceback := done[0].call.traceback.rstrip()):
        click.echo(escape_control(traceback, kept="\n"))
    left = f", {asked - len(done):,} not tried" if len(done) < asked else ""
    left += f"; {merged:,} had been merged into other runs, and ran alone now" if merged else ""
    click.echo(f"{len(taken):,} of {pluralize(asked, 'message')} taken{left}; nothing was acknowledged or redriven")
    if command is not None:
        click.echo(command)


# ---- replay ----------------------------------------------------------------------------------------------------------

_REPLAY_HELP = """Replay messages that are over: as new messages of the stream, or into a shadow handler.

\b
  usher replay --ticket 42 --since 2h --why "bug 7"           run them again
  usher replay --since 2026-11-21T10:00 --until 2026-11-21T11:00 --where kind=ride --preview
  usher replay --ticket 42 --into shop.shadow:handle          only call another handler, as `usher rehearse` does

Messages are added to the end of the stream, where every group gets them: in order per ticket, and one of a ticket only
when the one before it is done, under the fence of the ticket's owner then. Behind one that is not done the rest of its
ticket is left alone. Each has a uid of its own, so its effect happens again also where a sink knows the original
(--same-uid: only where it is missing), and the field usher_replay_of. What is new of a ticket meanwhile comes in
between. Given the same --name within a day, a replay that was cut off goes on.

It then compares: how the original ended (run log, or archive), and how this time. Messages that wait, run or are halted
are left out; so are dead letters that never were in the stream (`usher dead redrive`).

Exit code 0: all were done. 1: some were not. 2: it could not begin, or not go on, and why. 130: Ctrl-C.
"""
_SHOWN = 20
_LATEST = b"18446744073709551615"


@click.command(help=_REPLAY_HELP)
@option("--ticket", "Only messages of this ticket.", metavar="ID")
@option("--since", "From here on: an id, a time, or an age such as 2h.", metavar="TIME")
@option("--until", "Up to here. [default: now]", metavar="TIME")
@option(
    "--where",
    "Only those with this value; a field of JSON as payload.kind; repeatable.",
    multiple=True,
    metavar="FIELD=VALUE",
)
@option("--archive", "Folder, or URL, of an archive to take them from (usher audit archive --bodies).", metavar="PLACE")
@option("--into", "Call this handler (module:function) instead; its sinks roll back.", metavar="HANDLER")
@option("--rate", "Most messages added per second.", Number(min=0.1), 100.0)
@option("--most", "Refuse more than these.", click.IntRange(1, 100_000), 1000)
@click.option("--name", default="", metavar="NAME", help="Name of this replay. [default: made of the time]")
@option("--same-uid", "With the uids of the originals: sinks that have an effect keep it.", is_flag=True)
@why_option("; needed unless nothing is added")
@option("--preview", "Only say what would be replayed.", is_flag=True)
@option("--yes", "Do not ask.", is_flag=True)
@takes_json
@options(RehearseSettings)
def replay(flags: dict[str, Any], into: str | None, why: str, preview: bool, yes: bool, **given: Any) -> None:
    by, is_shown = caller(why), not given["as_json"]
    wanted = _wanted(given)
    if not (why or into or preview):
        raise click.UsageError("--why: say why, for the action log")
    if not (yes or preview) and not (is_shown and sys.stdin.isatty()):
        raise click.UsageError("there is nobody to ask: pass --yes, or --preview")
    settings = load(RehearseSettings, os.environ, flags)
    with configured(flags, "replay") as at:
        if settings.sources is not None and not into:
            raise StartRefused("USHER_TICKET_STREAM: of several streams nothing is replayed, but --into a handler")
        finder, found = _searched(at, settings, lambda finder: _chosen(finder, at, wanted, given))
        over = [one for one in found if one.is_over]
        if is_shown:
            _tell_preview(over, len(found) - len(over), [] if into else DeadLetters(at.link, at.keys).other_groups())
        if preview or not over:
            if not is_shown:
                print_json({"messages": len(over), "left_out": len(found) - len(over), "ids": [one.id for one in over]})
            return
        if not yes and not click.confirm(f"Replay {pluralize(len(over), 'message')}?", err=True):
            sys.exit(_NOTHING_SAID)
        if into:
            done, code = _rehearse(finder, over, at, into, settings)
        else:
            done, code = _added_again(finder, over, at, wanted, by, given)
    _print_replay(done, given["as_json"])
    sys.exit(code)


def _wanted(given: dict[str, Any]) -> Wanted:
    if given["ticket"] is None and given["since"] is None:
        raise click.UsageError("say which messages: --ticket ID, --since TIME")
    where = []
    for text in given["where"]:
        name, equals, value = text.encode("utf-8", "surrogateescape").partition(b"=")
        if not (name and equals):
            raise click.UsageError(f"--where {text!r} must look like FIELD=VALUE")
        where.append((name, value))
    now_ms = wall_ms()
    first, last = (place(given[name] or edge, now_ms).encode() for name, edge in (("since", "-"), ("until", "+")))
    first = {b"-": b"0-0", b"+": _LATEST + b"-0"}.get(first, first if b"-" in first else first + b"-0")
    last = {b"-": b"0-0", b"+": _LATEST}.get(last, last)
    ticket = None if given["ticket"] is None else given["ticket"].encode("utf-8", "surrogateescape")
    return Wanted(first, last if b"-" in last else last + b"-" + _LATEST, ticket, tuple(where))


def _chosen(finder: Candidates, at: View, wanted: Wanted, given: dict[str, Any]) -> list[Candidate]:
    if given["archive"] is None:
        return finder.chosen(wanted, given["most"])
    from usher.master.audit.archive import data_sets, locked  # pyarrow is an extra
    from usher.master.audit.engine import quoted
    from usher.master.audit.settings import archive_at

    folder = archive_at(given["archive"], at.settings.state_folder / "audit")
    entries, runs, _ = data_sets(folder, at.keys)
    between = f"ms BETWEEN {milliseconds(wanted.first)} AND {min(milliseconds(wanted.last), 2**63 - 1)}"
    of_ticket = "" if given["ticket"] is None else f" AND ticket = {quoted([given['ticket']])}"

    def last_runs(ids: Sequence[bytes]) -> dict[bytes, RunRecord]:
        names, of = ", ".join(RunRecord._fields[:-3]), f"id IN ({quoted(one.decode() for one in ids)})"
        rows = runs.rows(names, of) if runs.last() else ()
        found = sorted(starmap(RunRecord, rows), key=lambda run: (run.fence, run.start_us))
        return {run.id.encode(): run for run in found}

    with locked(folder):
        rows = ((one.encode(), raw) for one, raw in entries.rows("id, raw", between + of_ticket, wanted.first))
        return finder.chosen(wanted, given["most"], rows, last_runs)


def _tell_preview(over: Sequence[Candidate], left_out: int, others: list[str]) -> None:
    if left_out:
        click.echo(f"{left_out:,} left out: they wait, run, are halted, or are for no handler", err=True)
    if not over:
        click.echo("nothing to replay: no message that is over fits")
        return
    tickets, first, last = len({one.ticket for one in over}), over[0].id, over[-1].id
    click.echo(f"{pluralize(len(over), 'message')} of {pluralize(tickets, 'ticket')}, from {first} to {last}", err=True)
    if also := also_for(others):
        click.echo(f"they will be new messages: {also}", err=True)


def _added_again(
    finder: Candidates, over: Sequence[Candidate], at: View, wanted: Wanted, by: By, given: dict[str, Any]
) -> tuple[list[Candidate], int]:
    name = given["name"] or f"replay-{wall_ms()}"
    click.echo(f"this replay is called {name}; --name {name} goes on with it", err=True)
    code, failed = 0, FAILED
    action = OperatorAction(by, "replay", f"{pluralize(len(over), 'message')} of {wanted.told()}, as {name}")
    ActionLog(at.link, at.keys).note(action, "begun")  # who did it is known whatever ends this process
    with StopRequest() as stop, progress() as show:

        def check(done: int) -> None:
            stop.check()
            show(f"{done:,} of {len(over):,} over", done, len(over))

        run = Replay(at.link, at.keys, finder, name, given["rate"], given["same_uid"], check)
        try:
            run.run(over)
            failed = ""
        except StopAsked:
            code, failed = stop.exit_code, ""
        except (RedisTrouble, CommandRefused) as trouble:  # what it has done is told all the same
            code = _NOTHING_SAID
            click.echo(f"usher: it could not go on (--name {name} does): {escape_control(str(trouble))}", err=True)
        finally:
            ended = [*run.done, *run.open()]
            with (
                contextlib.suppress(RedisTrouble, CommandRefused) if code == _NOTHING_SAID else contextlib.nullcontext()
            ):
                ActionLog(at.link, at.keys).note(action, counted(one.now.state for one in ended) + failed)
    return ended, code or int(any(one.now.state != DONE for one in ended))


def _print_replay(done: Sequence[Candidate], as_json: bool) -> None:
    counts = Counter(one.comparison for one in done)
    if as_json:
        print_json({"messages": len(done), **counts, "replayed": [one.document() for one in done]})
        return
    if shown := [one for one in done if one.comparison != "same"]:
        _print_tried("What ended otherwise, or is not known", shown[:_SHOWN])
        if len(shown) > _SHOWN:
            click.echo(f"  and {len(shown) - _SHOWN:,} more; --json has all")
    told = ", ".join(f"{counts[word]:,} {meaning}" for word, meaning in _MEANINGS.items())
    click.echo(f"{pluralize(len(done), 'message')}: {told}")


_MEANINGS = {"same": "ended as before", "differs": "otherwise", "unknown": "not known, of before or of now"}
