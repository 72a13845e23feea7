"""Dead letters in Redis: reads them page by page, redrives and drops them in batches. Any master can, and so can the
commands: it needs no leader.

Every step is one script (``redrive.lua``, ``drop_letters.lua``) that takes the letter out together with its effect, so
a call whose reply was lost may be repeated: letters that were done are ``gone`` then. A leader learns from Redis of a
ticket that may move (``usher.master.dispatch.events``).
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
from usher.master.operations.action_log import ActionLog, OperatorAction
from usher.master.policy.letters import HALT, DeadLetter, LetterFilter, parse_letter, split_letter

#: Letters read, redriven or dropped by one script call.
PAGE = 200
AT_ONCE = 100
#: Most letters looked at for one page of an answer; few among many may match.
_MOST_LOOKED_AT = 10_000
#: Letters that one script call searches for those of a ticket; and the newest letters of a ticket among which the one
#: that it waits for is looked for.
_FIND_AT_ONCE, _OF_A_TICKET = 1_000, 20


class LetterResult(NamedTuple):
    """The outcome for a letter: resumed, added (``message_id`` is the new message's), released, dropped; or gone, cut,
    held: nothing was done."""

    id: bytes
    word: str
    message_id: bytes = b""


class LetterPage(NamedTuple):
    """Letters that match, and the id to go on from; None at the end."""

    letters: list[DeadLetter]
    cursor: bytes | None


class DeadLetters:
    def __init__(self, link: Link, keys: Keys, ticket_field: str = "") -> None:
        self._link, self._keys, self._ticket_field = link, keys, ticket_field.encode()
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
        found: list[DeadLetter] = []
        looked_at = 0
        while looked_at < _MOST_LOOKED_AT:
            is_all, letters = self._read(wanted, after, min(PAGE, max(1, limit)), until)
            looked_at += len(letters)
            for letter in letters:
                after = letter.id
                if wanted.fits(letter):
                    found.append(letter)
                    if len(found) == limit:
                        return LetterPage(found, after)
            if is_all:
                return LetterPage(found, None)
        return LetterPage(found, after)

    def newest(self, wanted: LetterFilter, below: bytes | None, limit: int, within_s: float) -> LetterPage:
        """Return up to ``limit`` letters that match, newest first, below id ``below``; fewer when many do not match and
        ``within_s`` seconds are over."""
        found: list[DeadLetter] = []
        end, ends_s = wanted.end if below is None else b"(" + below, now_s() + within_s
        while True:
            is_all, letters = self._rows(wanted.start, end, PAGE, "newest")
            for letter in letters:
                if wanted.fits(letter):
                    found.append(letter)
                    if len(found) == limit:
                        return LetterPage(found, letter.id)
            if is_all:
                return LetterPage(found, None)
            end = b"(" + letters[-1].id
            if now_s() > ends_s:
                return LetterPage(found, end[1:])

    def where(self, field: str, value: bytes, most: int, within_s: float) -> LetterPage:
        """Return up to ``most`` letters, newest first, whose ``ticket`` or (message's) ``id`` is ``value``. The search
        runs in Redis: only matches travel."""
        found: list[bytes] = []
        start, ends_s = "+", now_s() + within_s
        while len(found) < most:
            _, last, some, is_all = self._scripts.run(
                "find_entries", (self._keys.dead,), (f"usher-{field}", value, start, _FIND_AT_ONCE)
            )
            found += some
            start = f"({last.decode()}"
            if is_all or now_s() > ends_s:
                break
        rows = self._scripts.run_each("read_letters", (self._keys.dead,), [(one, one, 1, "") for one in found[:most]])
        letters = [parse_letter(letter_id, head) for _, row in rows for letter_id, head in row]
        return LetterPage(letters, None if is_all and len(found) <= most else last)

    def _read(
        self, wanted: LetterFilter, after: bytes | None, count: int, until: bytes | None
    ) -> tuple[bool, list[DeadLetter]]:
        start = wanted.start if after is None else b"(" + after
        end = wanted.end
        if until is not None and (wanted.before_ms is None or wanted.before_ms >= milliseconds(until)):
            end = until
        return self._rows(start, end, count, "")

    def _rows(self, start: bytes, end: bytes, count: int, newest: str) -> tuple[bool, list[DeadLetter]]:
        is_all, rows = self._scripts.run("read_letters", (self._keys.dead,), (start, end, count, newest))
        return bool(is_all), [parse_letter(letter_id, head) for letter_id, head in rows]

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
        """Return the letters that these halted tickets wait for, by ticket, as far as they are among the newest of
        all."""
        missing, found = set(tickets), {}
        end = b"+"
        for _ in range(_MOST_LOOKED_AT // PAGE if missing else 0):
            is_all, letters = self._rows(b"-", end, PAGE, "newest")
            for letter in letters:
                if letter.policy == HALT and letter.ticket in missing:
                    missing.remove(letter.ticket)
                    found[letter.ticket] = letter
            if is_all or not missing:
                break
            end = b"(" + letters[-1].id
        return found

    def parked_of(self, ticket: bytes, within_s: float) -> tuple[DeadLetter | None, bool]:
        """Return the letter that one halted ticket waits for, if it is found within ``within_s`` seconds; and whether
        all letters were looked at."""
        page = self.where("ticket", ticket, _OF_A_TICKET, within_s)
        return next((letter for letter in page.letters if letter.policy == HALT), None), page.cursor is None

    def overtaken(self, first: Mapping[bytes, bytes], within_s: float) -> tuple[int, bool]:
        """Count the tickets of which the stream has messages behind these; False: not all was looked at in time."""
        until_s, last, found = now_s() + within_s, min(first.values(), key=rank, default=b"-"), set[bytes]()
        while first and (rows := self._link.call("XRANGE", self._keys.stream, b"(" + last, "+", "COUNT", PAGE)):
            last = rows[-1][0]
            for entry_id, fields in rows:
                ticket = first_value(fields or (), self._ticket_field) or b""
                if rank(entry_id) > rank(first.get(ticket, last)):
                    found.add(ticket)
            if now_s() > until_s:
                return len(found), False
        return len(found), True

    def redrive(self, ids: Sequence[bytes]) -> list[LetterResult]:
        """Make messages of these letters again, in this order. At most ``AT_ONCE`` letters, which is one script
        call."""
        return self._run("redrive", ids)

    def drop(self, ids: Sequence[bytes]) -> list[LetterResult]:
        """Delete these letters; a ticket that waits for one goes on without it. At most ``AT_ONCE`` letters."""
        return self._run("drop_letters", ids)

    def change(self, what: str, ids: Sequence[bytes]) -> Iterator[LetterResult]:
        step = self.redrive if what == "redrive" else self.drop
        for at in range(0, len(ids), AT_ONCE):
            yield from step(ids[at : at + AT_ONCE])

    def _run(self, step: str, ids: Sequence[bytes]) -> list[LetterResult]:
        assert len(ids) <= AT_ONCE
        keys = self._keys
        script_keys: list[str] = [keys.stream, keys.tickets, keys.dead, keys.attempts, keys.changed, keys.leader]
        if step == "redrive":
            script_keys += [LogKeys(keys.stream).delayed, keys.errors]
        results: list[LetterResult] = []
        while len(results) < len(ids):
            left = ids[len(results) :]
            leader, *answers = self._scripts.run(step, script_keys, (keys.group, *left))
            self.leader_url = bytes(leader).decode().partition(" ")[2]
            results += [
                LetterResult(letter_id, word.decode().lower(), *rest)
                for letter_id, (word, *rest) in zip(left, answers, strict=False)
            ]
        return results

    def note(self, action: OperatorAction, outcome: str) -> None:
        ActionLog(self._link, self._keys).note(action, outcome)
