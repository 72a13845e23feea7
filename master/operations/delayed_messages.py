"""Delayed messages for people: shows which wait and for when, makes some due at another time or now, and drops some. It
needs no leader, except that it is the leader who sends what is due."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from usher.common.base.clock import now_s
from usher.common.base.text import pluralize
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import DUE_FIELD, FOR_FIELD, first_value, ticket_value
from usher.common.protocol.stream_id import ZERO, from_rank, is_id, rank
from usher.common.redis.client import Link
from usher.common.redis.replies import redis_ms
from usher.common.redis.scripts import ScriptRunner
from usher.master.operations.action_log import StepResult

#: Messages read by one call.
_PAGE = 200
#: Most messages that one call of a step changes.
AT_ONCE = 200
#: Fields of a message that a row has, and bytes of a name or value.
_FIELDS_SHOWN, _BYTES_SHOWN = 8, 120
#: A time as Redis writes it.
_TIME = re.compile(r"[0-9]{1,16}(?:\.[0-9]{1,16})?")
#: The latest time to which a message may be moved, from now: later is a slip of the pen.
_LATEST_YEARS = 10
_YEAR_MS = 365 * 86_400_000
#: What an operator does, as the action log calls it. They differ from the words for dead letters, by which the audit
#: knows what it cannot prove (master/audit/checks/letters.py).
SEND_NOW, MOVE, DROP = "send_delayed_now", "move_delayed", "drop_delayed"


class Waiting(NamedTuple):
    """Count of the delayed messages that wait, and when the first of them is due, in ms since the epoch; None: that is
    unknown, or none waits."""

    messages: int
    first_ms: int | None


class DelayedRow(NamedTuple):
    """A delayed message for a list: ``fields`` are the first of its ``field_count``, each cut to its beginning, without
    those whose values stand beside them (``due_ms``, ``stream``, ticket). ``cursor``: where a page begins that goes on
    behind it."""

    id: str
    due_ms: int
    ticket_id: str
    stream: str
    bytes: int
    field_count: int
    fields: list[tuple[str, str]]
    cursor: str


class DelayedPage(NamedTuple):
    """A page of delayed messages, the earliest first. ``cursor``: where the next one begins; None at the end."""

    rows: list[DelayedRow]
    cursor: str | None


def waiting_commands(keys: Keys) -> list[tuple[str | int, ...]]:
    log = LogKeys(keys.stream)
    return [("XLEN", log.delayed), ("ZRANGE", log.due, 0, 0, "WITHSCORES")]


def waiting_of(count: Any, first: Any) -> Waiting:
    """Parse the replies of ``waiting_commands``. None wait where Redis does not let us look: the rights are newer than
    many an ACL."""
    if isinstance(count, Exception) or isinstance(first, Exception):
        return Waiting(0, None)
    return Waiting(count, int(float(first[1])) if first else None)


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
        self._link, self._scripts, self._keys, self._log = link, ScriptRunner(link), keys, LogKeys(keys.stream)
        self._field = ticket_field.encode()
        self._by_stream = by_stream

    def waiting(self) -> Waiting:
        return waiting_of(*self._link.all_of(waiting_commands(self._keys)))

    def unsorted(self) -> int:
        count, known = self._link.all_of([("XLEN", self._log.delayed), ("ZCARD", self._log.due)])
        return max(0, count - known)

    def now_ms(self) -> int:
        return redis_ms(self._link)

    # -- lists

    def page(self, after: str | None, most: int, ticket: str = "", within_s: float = 1.0) -> DelayedPage:
        """Return up to ``most`` messages that are in order, of this ticket or ("") of all, behind the cursor of a page
        before; with a cursor and fewer of them when the time is over. Raises ValueError for what is no cursor."""
        cursor, rows, ends_s = after, list[DelayedRow](), now_s() + within_s
        while True:
            is_all, last, found = self._read(cursor, _PAGE if ticket else min(_PAGE, most - len(rows)), ticket)
            cursor = _cursor(*last) if last[1] else cursor
            rows += found
            if len(rows) > most:
                return DelayedPage(rows[:most], rows[most - 1].cursor)
            if is_all:
                return DelayedPage(rows, None)
            if len(rows) == most or now_s() > ends_s:
                return DelayedPage(rows, cursor)

    def chosen(self, ids: Sequence[str]) -> list[DelayedRow]:
        """Return those of these messages that wait and are in order, the earliest first."""
        rows, left = list[DelayedRow](), [member_of(entry_id) for entry_id in ids]
        while left:
            is_all, (_, member), found = self._read(None, len(left), "", left)
            rows += found
            left = [] if is_all else left[left.index(member.decode()) + 1 :]
        return sorted(rows, key=lambda row: (float(row.cursor.partition("_")[0]), rank(row.id.encode())))

    def _read(
        self, after: str | None, most: int, ticket: str, members: Sequence[str] = ()
    ) -> tuple[bool, tuple[bytes, bytes], list[DelayedRow]]:
        time, entry_id = _parse_cursor(after)
        behind = (time, member_of(entry_id) if entry_id else "", most, _FIELDS_SHOWN, _BYTES_SHOWN)
        of_ticket = (self._field, ticket.encode("utf-8", "surrogateescape"), "1" if self._by_stream else "")
        is_all, *last, rows = self._scripts.run(
            "read_delayed", (self._log.delayed, self._log.due), (*behind, *of_ticket, *members)
        )
        return bool(is_all), (last[0], last[1]), [_row(self._field, *row) for row in rows]

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
                chunk = [entry_id for _, entry_id in some[:AT_ONCE]]
                results = self._run(chunk, at_ms, some[0][0], step)
                some = some[len(results) :]
                yield from results

    def drop(self, ids: Sequence[str]) -> Iterator[StepResult]:
        for at in range(0, len(ids), AT_ONCE):
            yield from self._run(ids[at : at + AT_ONCE], "", 0, 1)

    def _run(self, ids: Sequence[str], *first: str | int) -> list[StepResult]:
        keys = (self._log.delayed, self._log.due, self._log.due_until)
        until, *words = self._scripts.run("move_delayed", keys, (*first, *map(member_of, ids)))
        told = [StepResult(one.encode(), word.decode().lower()) for one, word in zip(ids, words, strict=False)]
        last = rank(until or ZERO)  # of those that were ever there
        return [one._replace(word="unknown") if one.word == "gone" and rank(one.id) > last else one for one in told]


def chosen_delayed(count: int, first: str, due_ms: int | None) -> str:
    """Describe the messages that an action was done to, and the time to which they were moved."""
    moved = "" if due_ms is None else datetime.datetime.fromtimestamp(due_ms / 1000, datetime.UTC).isoformat()
    return f"{pluralize(count, 'delayed message')}, from {first}" + (f", to {moved}" if moved else "")


def _row(
    ticket_field: bytes,
    member: bytes,
    time: bytes,
    stream: bytes,
    ticket: bytes,
    size: int,
    field_count: int,
    first: list[bytes],
) -> DelayedRow:
    texts = [part.decode("utf-8", "backslashreplace") for part in first]
    cursor = _cursor(time, member)
    elsewhere = (DUE_FIELD.decode(), FOR_FIELD.decode(), ticket_field.decode())
    fields = [(name, value) for name, value in zip(texts[::2], texts[1::2], strict=True) if name not in elsewhere]
    facts = (ticket.decode("utf-8", "surrogateescape"), stream.decode(errors="replace"), size, field_count)
    return DelayedRow(cursor.partition("_")[2], int(float(time)), *facts, fields, cursor)


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
