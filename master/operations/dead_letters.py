"""Dead letters in Redis: reads them page by page, redrives and drops them in batches. Any master can, and so can the
commands: it needs no leader.

Every step is one script (``redrive.lua``) that takes the letter out together with its effect, so a call whose reply was
lost may be repeated: letters that were done are ``gone`` then. A leader learns from Redis of a ticket that may move
(``usher.master.dispatch.events``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from usher.common.base.clock import now_s
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import first_value
from usher.common.protocol.stream_id import milliseconds, rank
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import pairs
from usher.common.redis.scripts import ScriptRunner
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
        self._scripts = ScriptRunner(link)
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
            (is_all, rows, reached), *more = self._scripts.run_each("read_letters", keys, asked)
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
        pages = self._scripts.run_each("read_letters", (self._keys.dead, self._keys.letters), asked)
        found = (parse_letter(*row) for _, rows, _ in pages for row in rows)
        return {letter.message_id.decode(): letter for letter in found}

    def counts(self, *since_ms: int) -> LetterCounts:
        """Count all letters by kind, without reading any. ``since_ms``: where times begin of which they are counted
        apart, each later than the one before."""
        return parse_counts(self._scripts.run("count_letters", (self._keys.dead, self._keys.letters), since_ms))

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
        pages = self._scripts.run_each("read_letters", (self._keys.dead, self._keys.letters), asked)
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
            leader, *answers = self._scripts.run("redrive", script_keys, (keys.group, step, *left, *more))
            self.leader_url = bytes(leader).decode().partition(" ")[2]
            results += [
                StepResult(letter_id, word.decode().lower(), *rest)
                for letter_id, (word, *rest) in zip(left, answers, strict=False)
            ]
        return results
