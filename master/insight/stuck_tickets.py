"""Stuck tickets: those that stand still or are in trouble, read from the index. The oldest of them are rows; all that
have failed or are halted are counted by group, pass by pass over the whole index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from usher.common.protocol.attempts import Attempts, decode
from usher.common.protocol.keys import HALTED, Keys
from usher.common.protocol.last_error import LastError
from usher.common.protocol.last_error import decode as decode_error
from usher.common.redis.client import Link
from usher.master.insight.formatting import ticket_url, visible
from usher.master.insight.index_scan import IndexScan
from usher.master.policy.board.views import Parked
from usher.master.policy.explain.stuck import Head, StuckContext, describe, named_under_master, stuck_rows
from usher.master.policy.explain.ticket_groups import TicketGroups
from usher.master.policy.rules import Rulebook

#: Rows of the oldest tickets.
MOST = 50
#: What was counted is forgotten when nobody has looked for so long.
_FORGOTTEN_AFTER_MS = 60_000


class StuckTickets:
    """A scan for stuck tickets that goes on turn by turn. Belongs to one thread. ``in_memory``: what this master knows
    of a ticket's parked messages, when it leads."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        ticket_field: str,
        in_memory: Callable[[bytes], Parked | None] = lambda ticket: None,
    ) -> None:
        self._link = link
        self._keys = keys
        self._in_memory = in_memory
        self._scan = IndexScan(link, keys, ticket_field)
        self._counting, self._counted = TicketGroups(), TicketGroups()
        self._advanced_ms = 0
        # Entries under ``master`` that records name, of this pass and of the last one; and all that were there.
        self._naming = self._named = self._under_master = 0
        self.owned_by = self._scan.owned_by

    def advance(self, most: float, has_troubles: bool, states: Mapping[str, str], rules: Rulebook, now_ms: int) -> None:
        """Look at ``most`` more records, or up to the end. ``has_troubles``: any attempts or errors are noted."""
        if now_ms - self._advanced_ms > _FORGOTTEN_AFTER_MS:
            self._scan.begin_again()
            self._counting, self._counted = TicketGroups(), TicketGroups()
            self._naming = self._named = 0
        self._advanced_ms = now_ms
        for page in self._scan.advance(most):
            self._naming += sum(map(named_under_master, page))
            heads = page if has_troubles else [head for head in page if head.owner == HALTED]
            attempts, errors = self._noted(heads)
            troubled = [head for head in heads if head.owner == HALTED or head.id in attempts or head.id in errors]
            seen = self._context(troubled, states, rules, attempts, errors)
            for head in troubled:
                self._counting.add(_shown(describe(head, seen, now_ms)))
            if self._scan.is_between:
                self._counting, self._counted = TicketGroups(), self._counting
                self._naming, self._named = 0, self._naming

    def rows(self, under_master: int, states: Mapping[str, str], rules: Rulebook, now_ms: int) -> list[dict[str, Any]]:
        """Return the oldest tickets that are stuck, as they are now. ``under_master``: how many entries are pending
        there."""
        self._under_master = under_master
        heads = self._scan.heads(now_ms, under_master)
        seen = self._context(heads, states, rules, *self._noted(heads))
        return list(map(_shown, stuck_rows(heads, seen, now_ms, MOST)))

    def groups(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups of the last pass, and of these rows."""
        rows = list(rows)
        return self._counted.merged(rows, self._under_master <= self._named, len(rows) < MOST)

    def _context(
        self,
        heads: Iterable[Head],
        states: Mapping[str, str],
        rules: Rulebook,
        attempts: Mapping[bytes, Attempts],
        errors: Mapping[bytes, LastError],
    ) -> StuckContext:
        parked = {head.ticket: self._parked_of(head.ticket) for head in heads}
        return StuckContext(attempts, states, self._scan.moved_ms, parked, rules, errors)

    def _noted(self, heads: Iterable[Head]) -> tuple[dict[bytes, Attempts], dict[bytes, LastError]]:
        """Return attempts and last errors by message."""
        ids = [head.id for head in heads]
        hashes = (self._keys.attempts, self._keys.errors) if ids else ()
        noted, told = self._link.all_of([("HMGET", key, *ids) for key in hashes]) or ((), ())
        read = {one: decode_error(value) for one, value in zip(ids, told, strict=True) if value is not None}
        attempts = {one: decode(value) for one, value in zip(ids, noted, strict=True) if value is not None}
        return attempts, {one: error for one, error in read.items() if error is not None}

    def _parked_of(self, ticket: bytes) -> Parked:
        """Return the ticket's parked messages from Redis, as far as they were looked at; otherwise what the leader
        knows, when it is this master."""
        seen = self._scan.parked_of(ticket)
        known = None if seen.is_exact else self._in_memory(ticket)
        if known is None:
            return seen
        return known if known.is_exact else Parked(max(known.messages, seen.messages), False)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"shown": visible(row["ticket_id"], 120), "href": ticket_url(row["ticket_id"])}
