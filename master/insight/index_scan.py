"""Scan the index of tickets in processing slice by slice: the oldest heads, and how many tickets each owner has.

A scan of all of a million tickets would take seconds. So each turn scans one slice, and heads that seemed old are read
again, exactly. The owners of the oldest pending entries are asked for as well, so that the oldest tickets are shown
before the first full scan is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from usher.common.protocol.keys import MASTER, Keys
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.redis.client import Link
from usher.common.redis.scripts import ScriptRunner
from usher.master.policy.board.views import Parked
from usher.master.policy.explain.stuck import Head, oldest, parse_head, since_ms

_COUNT = 1000
#: The most old heads that are remembered, and the most parked and pending entries that are looked at.
_KEPT, _PARKED, _PENDING = 200, 50, 100


class IndexScan:
    """A scan of the index that goes on turn by turn. Belongs to one thread."""

    def __init__(self, link: Link, keys: Keys, ticket_field: str) -> None:
        self._link = link
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self._field = ticket_field
        self._cursor: bytes | None = None
        self._found: list[Head] = []
        self._counted: Counter[bytes] = Counter()
        self._candidates: dict[bytes, Head] = {}
        self._moved_ms: dict[bytes, int] = {}
        self._owned: Mapping[bytes, int] | None = None  # None: the first full scan is not over
        self._waiting: Counter[bytes] = Counter()  # by ticket: entries seen under ``master``
        self._all_waiting = False

    def owned_by(self, incarnation: str) -> int | None:
        """Return how many tickets in processing the incarnation has, as of the last full scan; None before there was
        one."""
        return None if self._owned is None else self._owned.get(incarnation.encode(), 0)

    @property
    def moved_ms(self) -> Mapping[bytes, int]:
        """Return, by head, when it became the head, as far as that was seen."""
        return self._moved_ms

    def parked_of(self, ticket: bytes) -> Parked:
        """Return the ticket's entries seen under ``master`` when ``heads`` was last called. Exact while all entries
        there are looked at."""
        return Parked(self._waiting[ticket], self._all_waiting)

    @property
    def is_between(self) -> bool:
        """Return whether one pass is over, and the next one has not begun."""
        return self._cursor is None

    def advance(self, most: float) -> Iterator[list[Head]]:
        """Look at ``most`` more records, or up to the end, and yield their heads page by page."""
        looked_at = 0
        while looked_at < most:
            cursor, flat = self._link.call("HSCAN", self._keys.tickets, self._cursor or b"0", "COUNT", _COUNT)
            page = [head for at in range(0, len(flat), 2) if (head := parse_head(flat[at], flat[at + 1])) is not None]
            self._counted.update(head.owner for head in page)
            looked_at += max(1, len(flat) // 2)
            self._found = oldest([*self._found, *page], _KEPT)
            self._cursor = bytes(cursor)
            is_over = self._cursor == b"0"
            if is_over:
                self._end_of_pass()
            yield page
            if is_over:
                return

    def _end_of_pass(self) -> None:
        # Keep the former candidates: comparing shows which heads have moved on.
        self._candidates = {head.ticket: head for head in self._found} | self._candidates
        self._owned = dict(self._counted)
        self._found, self._counted, self._cursor = [], Counter(), None

    def begin_again(self) -> None:
        """Begin a first pass: what former ones have counted is old."""
        self._found, self._counted, self._cursor, self._owned = [], Counter(), None, None

    def heads(self, now_ms: int, under_master: int) -> list[Head]:
        """Return the oldest heads as they are now, parked ones among them. ``under_master``: how many entries are
        pending there."""
        before = {head.ticket: head for head in self._found} | self._candidates
        asked = list(dict.fromkeys([*before, *self._pending(b"", _PENDING)[1][1::2]]))
        values = self._link.call("HMGET", self._keys.tickets, *asked) if asked else []
        now: dict[bytes, Head] = {}
        for ticket, value in zip(asked, values, strict=True):
            head = None if value is None else parse_head(ticket, value)
            if head is None:
                continue
            if ticket in before and head.id != before[ticket].id:
                self._moved_ms[head.id] = now_ms
            now[ticket] = head
        for head in self._parked(under_master):
            if head.ticket not in now:
                now[head.ticket] = head
        kept = oldest(now.values(), _KEPT)
        self._candidates = {head.ticket: head for head in kept if head.owner}
        moved_ms = {head.id: self._moved_ms.get(head.id, 0) for head in kept}
        # Note heads that stand since now or since an unknown time, so that the next look knows them.
        moved_ms |= {head.id: now_ms for head in kept if since_ms(head, moved_ms[head.id], now_ms) == now_ms}
        self._moved_ms = {entry_id: ms for entry_id, ms in moved_ms.items() if ms}
        return kept

    def _pending(self, name: bytes, most: int) -> tuple[bool, list[bytes]]:
        """Return whether there are no more, and id and ticket, by turns, of the oldest entries that are pending for the
        name."""
        args = (self._keys.group, name, most, self._field, LONGEST_TICKET)
        is_all, flat = self._scripts.run("pending_heads", (self._keys.stream,), args)
        return bool(is_all), flat

    def _parked(self, under_master: int) -> list[Head]:
        """Return the oldest entries pending under the master, one of each ticket; those of tickets that are in the
        index too are behind another message."""
        is_all, flat = self._pending(MASTER, _PARKED)
        first: dict[bytes, Head] = {}
        for at in range(0, len(flat), 2):
            entry_id, ticket = flat[at], flat[at + 1]
            known = first.get(ticket)
            first[ticket] = Head(ticket, b"", 0, known.id if known else entry_id, known.size + 1 if known else 1)
        self._waiting = Counter({ticket: head.size for ticket, head in first.items()})
        # Entries whose bodies were deleted count there but are not found here.
        self._all_waiting = is_all and under_master <= len(flat) // 2
        records = self._link.call("HMGET", self._keys.tickets, *first) if first else []
        return [head for head, record in zip(first.values(), records, strict=True) if record is None]
