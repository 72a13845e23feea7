"""Stuck tickets: those that stand still or are in trouble, read from the index. The oldest of them are rows; all that
have failed or are halted are counted by group, pass by pass over the whole index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from usher.common.base.errors import GroupMissing
from usher.common.protocol.attempts import Attempts, decode
from usher.common.protocol.keys import HALTED, MASTER, Keys
from usher.common.protocol.last_error import LastError
from usher.common.protocol.last_error import decode as decode_error
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Link
from usher.common.redis.scripts import ScriptRunner
from usher.master.insight.formatting import ticket_url, visible
from usher.master.insight.lag import tickets_of
from usher.master.policy.board.plans import Parked
from usher.master.policy.explain.stuck import (
    Head,
    StuckContext,
    TicketGroups,
    describe,
    named_under_master,
    oldest,
    parse_head,
    since_ms,
    stuck_rows,
)
from usher.master.policy.rules import Rulebook
from usher.master.policy.states import Queue

#: Rows of the oldest tickets of each state.
MOST = 50
#: What was counted is forgotten when nobody has looked for so long.
_FORGOTTEN_AFTER_MS = 60_000
#: Records read by one call; the most old heads of each kind that are remembered; the most entries that are looked at
#: under ``master``, at first and where it goes on, and of all consumers.
_COUNT, _KEPT, _PARKED, _FURTHER, _PENDING = 1000, 100, 50, 500, 100


class StuckTickets:
    """A scan of the index of tickets in processing for those that are stuck, which goes on turn by turn: the oldest
    heads, how many tickets each owner has, and groups of those in trouble. Belongs to one thread. ``in_memory``: what
    this master knows of a ticket's parked messages, when it leads.

    A scan of all of a million tickets would take seconds. So each turn scans one slice, and heads that seemed old are
    read again, exactly. The oldest entries of each consumer are asked for as well, so that its oldest tickets are shown
    before the first full scan is over."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        ticket_field: str,
        in_memory: Callable[[bytes], Parked | None] = lambda ticket: None,
    ) -> None:
        self._link, self._keys, self._field, self._in_memory = link, keys, ticket_field, in_memory
        self._scripts = ScriptRunner(link)
        self._candidates: dict[bytes, Head] = {}
        self.moved_ms: Mapping[bytes, int] = {}
        self._waiting: Counter[bytes] = Counter()  # by ticket: entries seen under ``master``
        self._start, self._reached = b"-", b""  # where those begin, and how far they go; b"": to the end
        self._all_waiting = False
        self._advanced_ms = self._under_master = 0
        self._begin_again()

    def _begin_again(self) -> None:
        self._owned: Mapping[bytes, int] | None = None  # None: the first full scan is not over
        self._groups, self._named = TicketGroups(), 0  # entries under ``master`` that records name
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._cursor: bytes | None = None
        self._found: list[Head] = []
        self._counted: Counter[bytes] = Counter()
        self._counting, self._naming = TicketGroups(), 0

    def owned_by(self, incarnation: str) -> int | None:
        """Return how many tickets in processing the incarnation has, as of the last full scan; None before there was
        one."""
        return None if self._owned is None else self._owned.get(incarnation.encode(), 0)

    def advance(self, most: float, has_troubles: bool, states: Mapping[str, str], rules: Rulebook, now_ms: int) -> None:
        """Look at ``most`` more records, or up to the end. ``has_troubles``: any attempts or errors are noted."""
        if now_ms - self._advanced_ms > _FORGOTTEN_AFTER_MS:
            self._begin_again()
        self._advanced_ms, looked_at = now_ms, 0
        while looked_at < most:
            self._cursor, flat = self._link.call("HSCAN", self._keys.tickets, self._cursor or b"0", "COUNT", _COUNT)
            page = [head for at in range(0, len(flat), 2) if (head := parse_head(flat[at], flat[at + 1])) is not None]
            self._counted.update(head.owner for head in page)
            looked_at += max(1, len(flat) // 2)
            self._found = oldest([*self._found, *page], _KEPT)
            self._naming += sum(map(named_under_master, page))
            heads = page if has_troubles else [head for head in page if head.owner == HALTED]
            attempts, errors = self._noted(heads)
            troubled = [head for head in heads if head.owner == HALTED or head.id in attempts or head.id in errors]
            seen = self._context(troubled, states, rules, attempts, errors)
            for head in troubled:
                self._counting.add(_shown(describe(head, seen, now_ms)))
            if self._cursor == b"0":
                # Keep the former candidates: comparing shows which heads have moved on.
                self._candidates = {head.ticket: head for head in self._found} | self._candidates
                self._owned, self._groups, self._named = dict(self._counted), self._counting, self._naming
                self._begin_pass()
                return

    def rows(
        self, states: Mapping[str, str], rules: Rulebook, now_ms: int, queue: Queue | None = None
    ) -> list[dict[str, Any]]:
        """Return the oldest tickets that are stuck, as they are now. ``queue``: what of them only waits for its
        turn."""
        heads = self.heads(now_ms)
        seen = self._context(heads, states, rules, *self._noted(heads))
        seen = seen._replace(queue=queue.text if queue is not None else "")
        return list(map(_shown, stuck_rows(heads, seen, now_ms, MOST)))

    def groups(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._groups.merged(rows, self._under_master <= self._named, MOST)

    def heads(self, now_ms: int) -> list[Head]:
        """Return the oldest heads of each kind as they are now, parked ones among them."""
        before = {head.ticket: head for head in self._found} | self._candidates
        waiting, held = self._pending()
        asked = list(dict.fromkeys([*before, *waiting, *held]))
        values = self._link.call("HMGET", self._keys.tickets, *asked) if asked else []
        known, now = dict(self.moved_ms), dict[bytes, Head]()
        for ticket, value in zip(asked, values, strict=True):
            head = None if value is None else parse_head(ticket, value)
            if head is None:
                continue
            if ticket in before and head.id != before[ticket].id:
                known[head.id] = now_ms
            now[ticket] = head
        alone = waiting.keys() - {ticket for ticket, value in zip(asked, values, strict=True) if value is not None}
        now |= {ticket: waiting[ticket] for ticket in alone}
        if not alone:  # all of these are put off, or behind others: look further the next time
            self._start = b"(" + self._reached if self._reached else b"-"
        kept = oldest(now.values(), _KEPT)
        self._candidates = {head.ticket: head for head in kept if head.owner}
        moved_ms = {head.id: known.get(head.id, 0) for head in kept}
        # Note heads that stand since now or since an unknown time, so that the next look knows them.
        moved_ms |= {head.id: now_ms for head in kept if since_ms(head, moved_ms[head.id], now_ms) == now_ms}
        self.moved_ms = {entry_id: ms for entry_id, ms in moved_ms.items() if ms}
        return kept

    def _pending(self) -> tuple[dict[bytes, Head], list[bytes]]:
        """Return the heads of what waits longest under the master, by ticket; those of tickets that are in the index
        too are behind another message. And the tickets of the oldest entries of each other name in the group."""
        stream, group = self._keys.stream, self._keys.group
        try:
            by_name = {name: int(count) for name, count in self._link.call("XPENDING", stream, group)[3] or ()}
        except GroupMissing:
            by_name = {}
        each = max(1, _PENDING // max(1, len(by_name)))
        most = _PARKED if self._start == b"-" else _FURTHER
        asked: list[tuple[Any, ...]] = [
            ("XPENDING", stream, group, "-", "+", each, one) for one in by_name if one != MASTER
        ]
        asked += [("XPENDING", stream, group, self._start, "+", most, MASTER)] if MASTER in by_name else []
        rows = [row for page in self._link.all_of(asked) for row in page]
        under = {row[0] for row in rows if row[1] == MASTER}
        self._reached = max(under, key=rank) if len(under) == most else b""
        ids = [*sorted(under, key=rank), *sorted({row[0] for row in rows} - under, key=rank)[:_PENDING]]
        found, first = list(tickets_of(self._scripts, self._keys, self._field, ids)), dict[bytes, Head]()
        for entry_id, ticket in found:
            if entry_id in under:
                known = first.get(ticket, Head(ticket, b"", 0, entry_id, 0))
                first[ticket] = known._replace(size=known.size + 1)
        self._waiting = Counter({ticket: head.size for ticket, head in first.items()})
        # Entries whose bodies were deleted count there but are not found here.
        self._under_master = by_name.get(MASTER, 0)
        self._all_waiting = self._under_master <= self._waiting.total()
        return first, [ticket for entry_id, ticket in found if entry_id not in under]

    def _context(
        self,
        heads: Iterable[Head],
        states: Mapping[str, str],
        rules: Rulebook,
        attempts: Mapping[bytes, Attempts],
        errors: Mapping[bytes, LastError],
    ) -> StuckContext:
        parked = {head.ticket: self._parked_of(head.ticket) for head in heads}
        return StuckContext(attempts, states, self.moved_ms, parked, rules, errors)

    def _noted(self, heads: Iterable[Head]) -> tuple[dict[bytes, Attempts], dict[bytes, LastError]]:
        ids = [head.id for head in heads]
        hashes = (self._keys.attempts, self._keys.errors) if ids else ()
        noted, told = self._link.all_of([("HMGET", key, *ids) for key in hashes]) or ((), ())
        read = {one: decode_error(value) for one, value in zip(ids, told, strict=True) if value is not None}
        attempts = {one: decode(value) for one, value in zip(ids, noted, strict=True) if value is not None}
        return attempts, {one: error for one, error in read.items() if error is not None}

    def _parked_of(self, ticket: bytes) -> Parked:
        """Return the ticket's parked messages as far as entries under ``master`` were looked at; otherwise what the
        leader knows, when it is this master."""
        seen = Parked(self._waiting[ticket], self._all_waiting)
        known = None if seen.is_exact else self._in_memory(ticket)
        if known is None:
            return seen
        return known if known.is_exact else Parked(max(known.messages, seen.messages), False)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"shown": visible(row["ticket_id"], 120), "href": ticket_url(row["ticket_id"])}
