"""Dead letters and delayed messages in Redis, for people: read page by page; letters are redriven and dropped, delayed
messages moved and dropped, in batches. Any master can, and so can the commands: it needs no leader, except that it is
the leader who sends what is due.

Every step with letters is one script (``redrive.lua``) that takes the letter out together with its effect, so a call
whose reply was lost may be repeated: letters that were done are ``gone`` then. A leader learns from Redis of a ticket
that may move (``usher.master.dispatch.events``).
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from usher.common.base.clock import now_s
from usher.common.base.text import pluralize
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import DUE_FIELD, FOR_FIELD, LONGEST_TICKET, first_value, ticket_value
from usher.common.protocol.stream_id import ZERO, from_rank, is_id, milliseconds, rank
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import pairs, redis_ms
from usher.master.operations.action_log import StepResult
from usher.master.policy.letters import (
    HALT,
    DeadLetter,
    LetterCounts,
    LetterFilter,
    parse_counts,
    parse_letter,
    split_letter,
)

#: Letters read, redriven or dropped by one script call.
PAGE = 200
AT_ONCE = 100
#: Seconds after which the search for one page of an answer ends; few among many may match.
_WITHIN_S = 1.0
#: The newest letters of a ticket among which the one that it waits for is looked for.
_OF_A_TICKET = 20


class LetterPage(NamedTuple):
    """Letters that match, and the id to go on from; None at the end."""

    letters: list[DeadLetter]
    cursor: bytes | None


class DeadLetters:
    def __init__(self, link: Link, keys: Keys, ticket_field: str = "") -> None:
        self._link, self._keys, self.ticket_field = link, keys, ticket_field.encode()
        #: URL of the leader at the last redrive or drop; "": nobody led, so nothing moves before somebody does.
        self.leader_url = ""

    def last_id(self) -> bytes:
        """Return the id of the newest letter, ``0-0`` when there never was one: a bound for "all there are now"."""
        newest = self._link.call("XREVRANGE", self._keys.dead, "+", "-", "COUNT", 1)
        return bytes(newest[0][0]) if newest else b"0-0"

    def page(self, wanted: LetterFilter, after: bytes | None, limit: int, until: bytes | None = None) -> LetterPage:
        """Return up to ``limit`` letters that match, oldest first, above id ``after`` and not above ``until``; fewer
        when many do not match."""
        start, end = wanted.start if after is None else b"(" + after, wanted.end
        if until is not None and (wanted.before_ms is None or wanted.before_ms >= milliseconds(until)):
            end = until
        return self._page(wanted, start, end, limit, "", _WITHIN_S)

    def newest(self, wanted: LetterFilter, below: bytes | None, limit: int, within_s: float) -> LetterPage:
        """Return up to ``limit`` letters that match, newest first, below id ``below``; fewer when many do not match and
        ``within_s`` seconds are over."""
        end = wanted.end if below is None else b"(" + below
        return self._page(wanted, wanted.start, end, limit, "newest", within_s)

    def _page(
        self, wanted: LetterFilter, start: bytes, end: bytes, limit: int, newest: str, within_s: float
    ) -> LetterPage:
        keys, found, ends_s = (self._keys.dead, self._keys.letters), list[DeadLetter](), now_s() + within_s
        count = PAGE if wanted.reason or wanted.error or wanted.policy else min(PAGE, max(1, limit))
        own_id = None if wanted.group or b"(" in start + end else wanted.id
        own = [(own_id, own_id, 1, "", b"")] if own_id else []  # it may be a letter's
        while True:
            asked = [(start, end, count, newest, wanted.begin), *own]
            (is_all, rows, reached), *more = self._link.run_each("read_letters", keys, asked)
            for row in {row[0]: row for row in (*rows, *(one for answer in more for one in answer[1]))}.values():
                if wanted.fits(letter := parse_letter(*row)):
                    found.append(letter)
                    if len(found) == limit:
                        return LetterPage(found, letter.id)
            if is_all or now_s() > ends_s:
                return LetterPage(found, None if is_all else bytes(reached))
            start, end, own = (start, b"(" + reached, []) if newest else (b"(" + reached, end, [])

    def of_message(self, message_id: bytes) -> DeadLetter | None:
        """Return the newest letter of a message, or the letter that has this id itself."""
        return next(iter(self.newest(LetterFilter(id=message_id), None, 1, 0.0).letters), None)

    def of_messages(self, ids: Iterable[str]) -> dict[str, DeadLetter]:
        """Return the newest letter of each of these messages that has one."""
        asked = [("-", "+", 1, "newest", LetterFilter(id=one.encode()).begin) for one in ids]
        pages = self._link.run_each("read_letters", (self._keys.dead, self._keys.letters), asked)
        found = (parse_letter(*row) for _, rows, _ in pages for row in rows)
        return {letter.message_id.decode(): letter for letter in found}

    def counts(self, *since_ms: int) -> LetterCounts:
        """Count all letters by kind, without reading any. ``since_ms``: where times begin of which they are counted
        apart, each later than the one before."""
        return parse_counts(self._link.run("count_letters", (self._keys.dead, self._keys.letters), since_ms))

    def all(self, wanted: LetterFilter, until: bytes) -> Iterator[list[DeadLetter]]:
        """Yield pages of all letters that match, up to the letter ``until``; letters written meanwhile are not
        included."""
        cursor: bytes | None = None
        while True:
            letters, cursor = self.page(wanted, cursor, AT_ONCE, until)
            if letters:
                yield letters
            if cursor is None:
                return

    def get(self, letter_id: bytes) -> tuple[DeadLetter, list[bytes]] | None:
        """Return a letter and its message's fields, as a flat list of names and values; None when it is not there."""
        found = self._link.call("XRANGE", self._keys.dead, letter_id, letter_id)
        if not found:
            return None
        head, fields = split_letter(found[0][1])
        return parse_letter(letter_id, head), fields

    def other_groups(self) -> list[str]:
        """Return the other groups of the stream: what a redrive adds to its end is new to each of them too."""
        try:
            found = self._link.call("XINFO", "GROUPS", self._keys.stream)
        except CommandRefused as refused:
            if "no such key" in str(refused):
                return []
            raise
        names = sorted(bytes(pairs(one)[b"name"]).decode(errors="replace") for one in found)
        # Without the own group nothing is redriven; the error about it comes later.
        return [name for name in names if name != self._keys.group] if self._keys.group in names else []

    def parked_for(self, tickets: Iterable[bytes]) -> dict[bytes, DeadLetter]:
        """Return the letters that these halted tickets wait for, by ticket."""
        asked = [("-", "+", _OF_A_TICKET, "newest", LetterFilter(ticket).begin) for ticket in tickets]
        pages = self._link.run_each("read_letters", (self._keys.dead, self._keys.letters), asked)
        found = (parse_letter(*row) for _, rows, _ in pages for row in reversed(rows))
        return {letter.ticket: letter for letter in found if letter.policy == HALT}

    def overtaken(self, first: Mapping[bytes, bytes], within_s: float) -> tuple[int, bool]:
        """Count the tickets of which the stream has messages behind these; False: not all was looked at in time."""
        until_s, last, found = now_s() + within_s, min(first.values(), key=rank, default=b"-"), set[bytes]()
        while first and (rows := self._link.call("XRANGE", self._keys.stream, b"(" + last, "+", "COUNT", PAGE)):
            last = rows[-1][0]
            for entry_id, fields in rows:
                ticket = first_value(fields or (), self.ticket_field) or b""
                if rank(entry_id) > rank(first.get(ticket, last)):
                    found.add(ticket)
            if now_s() > until_s:
                return len(found), False
        return len(found), True

    def redrive(self, ids: Sequence[bytes]) -> list[StepResult]:
        """Make messages of these letters again, in this order. At most ``AT_ONCE`` letters, which is one script
        call."""
        return self._act("redrive", ids)

    def edit(self, letter_id: bytes, fields: Sequence[bytes]) -> StepResult:
        """Send a message with these fields in place of a letter's, at the end of its ticket."""
        return self._act("edit", [letter_id], fields)[0]

    def drop(self, ids: Sequence[bytes]) -> list[StepResult]:
        """Delete these letters; a ticket that waits for one goes on without it. At most ``AT_ONCE`` letters."""
        return self._act("drop", ids)

    def change(self, what: str, ids: Sequence[bytes]) -> Iterator[StepResult]:
        step = self.redrive if what == "redrive" else self.drop
        for at in range(0, len(ids), AT_ONCE):
            yield from step(ids[at : at + AT_ONCE])

    def _act(self, step: str, ids: Sequence[bytes], more: Sequence[str | bytes] = ()) -> list[StepResult]:
        assert len(ids) <= AT_ONCE
        keys = self._keys
        script_keys: list[str] = [keys.stream, keys.tickets, keys.dead, keys.attempts, keys.changed, keys.leader]
        script_keys += [LogKeys(keys.stream).delayed, keys.errors, keys.recounted, keys.letters]
        results: list[StepResult] = []
        while len(results) < len(ids):
            left = ids[len(results) :]
            leader, *answers = self._link.run("redrive", script_keys, (keys.group, step, *left, *more))
            self.leader_url = bytes(leader).decode().partition(" ")[2]
            results += [
                StepResult(letter_id, word.decode().lower(), *rest)
                for letter_id, (word, *rest) in zip(left, answers, strict=False)
            ]
        return results


#: Messages read by one call.
_PAGE = 200
#: Most messages that one call of a step changes.
_MOVED_AT_ONCE = 200
#: Messages whose bodies are read together.
_BODIES = 20
#: Fields of a message that a row has; bytes of a name or value; and characters of a ticket or stream.
_FIELDS_SHOWN, _BYTES_SHOWN, _NAME_SHOWN = 8, 120, 2 * LONGEST_TICKET
#: A time as Redis writes it.
_TIME = re.compile(r"[0-9]{1,16}(?:\.[0-9]{1,16})?")
#: The latest time to which a message may be moved, from now: later is a slip of the pen.
_LATEST_YEARS = 10
_YEAR_MS = 365 * 86_400_000
#: What an operator does, as the action log calls it. They differ from the words for dead letters, by which the audit
#: knows what it cannot prove (master/audit/checks/letters.py).
SEND_NOW, MOVE, DROP = "send_delayed_now", "move_delayed", "drop_delayed"


@dataclass(frozen=True)
class DelayedRow:
    """A delayed message for a list. ``due_ms``: when it is sent, by Redis' clock. ``fields``: the beginnings of the
    first of its ``field_count`` fields, without those whose values stand beside them (``due_ms``, ``stream``, ticket);
    null for viewers, who may not see what messages say. ``cursor``: where a page begins that goes on behind it."""

    id: str
    due_ms: int
    ticket_id: str
    stream: str
    bytes: int
    field_count: int
    fields: list[tuple[str, str]] | None
    cursor: str


class DelayedPage(NamedTuple):
    """A page of delayed messages, the earliest first. ``cursor``: where the next one begins; None at the end."""

    rows: list[DelayedRow]
    cursor: str | None


def waiting_commands(keys: Keys) -> list[tuple[str | int, ...]]:
    log = LogKeys(keys.stream)
    return [("XLEN", log.delayed), ("ZRANGE", log.due, 0, 0, "WITHSCORES")]


def waiting_of(count: Any, first: Any) -> dict[str, int | None]:
    """Return, from the replies of ``waiting_commands``, how many ``messages`` wait, and when the first of them is due,
    in ms since the epoch; None: that is unknown, or none waits. None wait where Redis does not let us look: the rights
    are newer than many an ACL."""
    if isinstance(count, Exception) or isinstance(first, Exception):
        return {"messages": 0, "first_ms": None}
    return {"messages": count, "first_ms": int(float(first[1])) if first else None}


def check_due(due_ms: int, now_ms: int) -> None:
    """Raise ValueError, with a sentence, if no message may be moved to this time.

    >>> check_due(1_700_000_000_000, 1_700_000_000_001)
    Traceback (most recent call last):
    ValueError: that time is over: send them now, or give a later one
    """
    if due_ms <= now_ms:
        raise ValueError("that time is over: send them now, or give a later one")
    if due_ms > now_ms + _LATEST_YEARS * _YEAR_MS:
        raise ValueError(f"that is more than {_LATEST_YEARS} years ahead: give an earlier time, or drop them")


class DelayedView:
    """The delayed messages of one ticket stream."""

    def __init__(self, link: Link, keys: Keys, ticket_field: str, by_stream: bool = False) -> None:
        """Keep the parts. ``by_stream``: tickets of several streams are called STREAM/ID."""
        self._link, self._keys, self._log = link, keys, LogKeys(keys.stream)
        self._field = ticket_field.encode()
        self._by_stream = by_stream

    def counts(self) -> dict[str, Any]:
        """Return how many messages wait (``waiting``), of which ``unsorted`` are in no list yet: no leader has put them
        in order; and when the first one is due (``first_ms``, see ``waiting_of``)."""
        *told, known = self._link.all_of([*waiting_commands(self._keys), ("ZCARD", self._log.due)])
        seen = waiting_of(*told)
        return {"waiting": told[0], "unsorted": max(0, told[0] - known), "first_ms": seen["first_ms"]}

    def now_ms(self) -> int:
        return redis_ms(self._link)

    # -- lists

    def page(self, after: str | None, most: int, ticket: str = "", within_s: float = 1.0) -> DelayedPage:
        """Return up to ``most`` messages that are in order, of this ticket or ("") of all, behind the cursor of a page
        before; with a cursor and fewer of them when the time is over. Raises ValueError for what is no cursor."""
        cursor, rows, ends_s = after, list[DelayedRow](), now_s() + within_s
        while True:
            is_all, cursor, found = self._read(cursor, _PAGE if ticket else min(_PAGE, most - len(rows)), ticket)
            rows += found
            if len(rows) > most:
                return DelayedPage(rows[:most], rows[most - 1].cursor)
            if is_all:
                return DelayedPage(rows, None)
            if len(rows) == most or now_s() > ends_s:
                return DelayedPage(rows, cursor)

    def chosen(self, ids: Sequence[str]) -> list[DelayedRow]:
        """Return those of these messages that wait and are in order, the earliest first."""
        members = [member_of(entry_id) for entry_id in ids]
        times = self._link.all_of([("ZSCORE", self._log.due, member) for member in members])
        waiting = [(one.encode(), time) for one, time in zip(members, times, strict=True) if time is not None]
        return [*self._rows(sorted(waiting, key=_order))]

    def _read(self, after: str | None, most: int, ticket: str) -> tuple[bool, str | None, list[DelayedRow]]:
        """Look at up to ``most`` behind a cursor. Return whether there are no more, the cursor behind the last one, and
        the rows. Places shift while others are sent: so we look from a page before the cursor on, and leave out what is
        not behind it."""
        due, place, behind = self._log.due, 0, (-math.inf, b"")
        if after is not None:
            time, entry_id = _parse_cursor(after)
            behind = (float(time), member_of(entry_id).encode())
            questions = [("ZSCORE", due, behind[1]), ("ZRANK", due, behind[1]), ("ZCOUNT", due, "-inf", f"({time}")]
            its_time, its_place, earlier = self._link.all_of(questions)
            place = its_place if its_time is not None and float(its_time) == behind[0] else earlier
            place = max(0, place - _PAGE)
        while True:
            flat = self._link.call("ZRANGE", due, place, place + _PAGE + most, "WITHSCORES")
            timed = [one for one in zip(flat[::2], flat[1::2], strict=True) if _order(one) > behind]
            is_end, is_all = len(flat) // 2 <= _PAGE + most, len(timed) <= most
            if timed or is_end:
                timed = timed[:most]
                rows = [row for row in self._rows(timed) if ticket in ("", row.ticket_id)]
                return is_end and is_all, _cursor(timed[-1][1], timed[-1][0]) if timed else after, rows
            place += most

    def _rows(self, timed: Sequence[tuple[bytes, bytes]]) -> Iterator[DelayedRow]:
        """Yield the rows of these members, each with its time. Their bodies come a few at a time: they may be large."""
        elsewhere = (DUE_FIELD, FOR_FIELD, self._field)
        for at in range(0, len(timed), _BODIES):
            some = timed[at : at + _BODIES]
            bodies = self._link.all_of([("XRANGE", self._log.delayed, member, member) for member, _ in some])
            for (member, time), found in zip(some, bodies, strict=True):
                if not found:
                    continue  # deleted by hand
                flat, cursor = found[0][1], _cursor(time, member)
                first = zip(flat[: 2 * _FIELDS_SHOWN : 2], flat[1 : 2 * _FIELDS_SHOWN : 2], strict=True)
                fields = [(_beginning(name), _beginning(value)) for name, value in first if name not in elsewhere]
                stream = (first_value(flat, FOR_FIELD) or b"").decode(errors="replace")[:_NAME_SHOWN]
                facts = (self._ticket_of(flat)[:_NAME_SHOWN], stream, sum(map(len, flat)), len(flat) // 2)
                yield DelayedRow(cursor.partition("_")[2], int(float(time)), *facts, fields, cursor)

    def last_id(self) -> bytes:
        newest = self._link.call("XREVRANGE", self._log.delayed, "+", "-", "COUNT", 1)
        return bytes(newest[0][0]) if newest else ZERO

    def every(self, ticket: str | None = None) -> Iterator[tuple[str, str]]:
        """Yield id and ticket of all messages that wait, including those that are not in order yet."""
        start = "-"
        while True:
            page = self._link.call("XRANGE", self._log.delayed, start, "+", "COUNT", _PAGE)
            named = ((entry_id.decode(), self._ticket_of(flat)) for entry_id, flat in page)
            yield from ((entry_id, of) for entry_id, of in named if ticket in (None, of))
            if len(page) < _PAGE:
                return  # above the highest possible id there is no range
            start = f"({page[-1][0].decode()}"

    def _ticket_of(self, flat: Sequence[bytes]) -> str:
        named = ticket_value(flat, self._field) or b""
        stream = first_value(flat, FOR_FIELD) or b""
        named = b"%b/%b" % (stream, named) if self._by_stream and named else named
        return named.decode("utf-8", "surrogateescape")

    # -- what operators do

    def move(self, ids: Sequence[str], due_ms: int | None) -> Iterator[StepResult]:
        """Make these messages due at that time, or (None) now, by Redis' clock: the leading master sends them then, in
        the order of their times. Yield what happened to each. Raises what ``Link.call`` raises; a repeat does no
        harm.

        They keep their order wherever this ends: what comes earlier than before is moved from the front on, then what
        comes later from the back on."""
        at_ms = self.now_ms() if due_ms is None else due_ms
        scores = self._link.all_of([("ZSCORE", self._log.due, member_of(entry_id)) for entry_id in ids])
        ordered = sorted(
            (float(score or 0), rank(entry_id.encode()), entry_id) for entry_id, score in zip(ids, scores, strict=True)
        )
        numbered = [(number, entry_id) for number, (_, _, entry_id) in enumerate(ordered)]
        later = sum(score <= at_ms for score, _, _ in ordered)
        for some, step in ((numbered[later:], 1), (numbered[:later][::-1], -1)):
            while some:
                chunk = [entry_id for _, entry_id in some[:_MOVED_AT_ONCE]]
                results = self._run(chunk, at_ms, some[0][0], step)
                some = some[len(results) :]
                yield from results

    def drop(self, ids: Sequence[str]) -> Iterator[StepResult]:
        for at in range(0, len(ids), _MOVED_AT_ONCE):
            yield from self._run(ids[at : at + _MOVED_AT_ONCE], "", 0, 1)

    def _run(self, ids: Sequence[str], *first: str | int) -> list[StepResult]:
        keys = (self._log.delayed, self._log.due, self._log.due_until)
        until, *words = self._link.run("move_delayed", keys, (*first, *map(member_of, ids)))
        told = [StepResult(one.encode(), word.decode().lower()) for one, word in zip(ids, words, strict=False)]
        last = rank(until or ZERO)  # of those that were ever there
        return [one._replace(word="unknown") if one.word == "gone" and rank(one.id) > last else one for one in told]


def chosen_delayed(count: int, first: str, due_ms: int | None) -> str:
    """Describe the messages that an action was done to, and the time to which they were moved."""
    moved = "" if due_ms is None else datetime.datetime.fromtimestamp(due_ms / 1000, datetime.UTC).isoformat()
    return f"{pluralize(count, 'delayed message')}, from {first}" + (f", to {moved}" if moved else "")


def _order(timed: tuple[bytes, bytes]) -> tuple[float, bytes]:
    return float(timed[1]), timed[0]


def _beginning(part: bytes) -> str:
    return part[:_BYTES_SHOWN].decode("utf-8", "backslashreplace")


def _cursor(time: bytes, member: bytes) -> str:
    return f"{time.decode()}_{from_rank(rank(member)).decode()}"


def _parse_cursor(cursor: str | None) -> tuple[str, str]:
    if cursor is None:
        return "", ""
    time, _, entry_id = cursor.partition("_")
    if not _TIME.fullmatch(time) or not is_id(entry_id):
        raise ValueError("not a cursor of this list")
    return time, entry_id


def member_of(entry_id: str) -> str:
    """Return the member of ``LogKeys.due`` for an entry of ``LogKeys.delayed`` (lua/sending/due_delayed.lua).

    >>> member_of("1700000000000-7")
    '00000001700000000000-00000000000000000007'
    """
    milliseconds, _, sequence = entry_id.partition("-")
    return f"{milliseconds:0>20}-{sequence:0>20}"
