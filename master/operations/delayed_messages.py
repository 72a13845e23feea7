"""Delayed messages for people: lists which wait and for when, and drops some. It needs no leader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import EntryView, ticket_value
from usher.common.protocol.stream_id import from_rank, rank
from usher.common.redis.client import Link

#: Messages read by one call.
_PAGE = 200


class Waiting(NamedTuple):
    """Count of the delayed messages that wait, and when the first of them is due, in ms since the epoch; None: that is
    unknown, or none waits."""

    messages: int
    first_ms: int | None


class Delayed(NamedTuple):
    """A delayed message: ``ticket`` is "" if it names none."""

    id: str
    due_ms: int
    ticket: str
    fields: dict[str, str]


def waiting_commands(keys: Keys) -> list[tuple[str | int, ...]]:
    """Return the commands whose replies ``waiting_of`` parses."""
    log = LogKeys(keys.stream)
    return [("XLEN", log.delayed), ("ZRANGE", log.due, 0, 0, "WITHSCORES")]


def waiting_of(count: Any, first: Any) -> Waiting:
    """Parse the replies of ``waiting_commands``. None wait where Redis does not let us look: the rights are newer than
    many an ACL."""
    if isinstance(count, Exception) or isinstance(first, Exception):
        return Waiting(0, None)
    return Waiting(count, int(float(first[1])) if first else None)


class DelayedView:
    """The delayed messages of one ticket stream. Used by one thread."""

    def __init__(self, link: Link, keys: Keys, ticket_field: str) -> None:
        self._link = link
        self._keys = keys
        self._log = LogKeys(keys.stream)
        self._field = ticket_field.encode()

    def waiting(self) -> Waiting:
        return waiting_of(*self._link.all_of(waiting_commands(self._keys)))

    def unsorted(self) -> int:
        """Count the messages that the leader has not put in order yet."""
        count, known = self._link.all_of([("XLEN", self._log.delayed), ("ZCARD", self._log.due)])
        return max(0, count - known)

    def all(self, ticket: str | None = None) -> Iterator[Delayed]:
        """Yield the messages that are in order, earliest first. While others are sent, a message that stays is yielded
        once, or not at all."""
        seen = 0
        while page := self._link.call("ZRANGE", self._log.due, seen, seen + _PAGE - 1, "WITHSCORES"):
            members, scores = page[::2], page[1::2]
            bodies = self._link.all_of([("XRANGE", self._log.delayed, member, member) for member in members])
            seen += len(members)
            for member, score, found in zip(members, scores, bodies, strict=True):
                shown = self._ticket_of(found[0][1]) if found else ""
                if found and ticket in (None, shown):
                    entry = EntryView(from_rank(rank(member)), found[0][1])
                    yield Delayed(entry.id, int(float(score)), shown, entry.fields)

    def ids(self, ticket: str | None = None) -> Iterator[str]:
        """Yield the ids of all messages that wait, including those that are not in order yet."""
        start = "-"
        while page := self._link.call("XRANGE", self._log.delayed, start, "+", "COUNT", _PAGE):
            yield from (
                entry_id.decode() for entry_id, flat in page if ticket is None or self._ticket_of(flat) == ticket
            )
            if len(page) < _PAGE:
                return  # above the highest possible id there is no range
            start = f"({page[-1][0].decode()}"

    def _ticket_of(self, flat: Sequence[bytes]) -> str:
        return (ticket_value(flat, self._field) or b"").decode("utf-8", "surrogateescape")

    def drop(self, ids: Sequence[str]) -> int:
        """Delete these messages (at least one). Return how many there were; a message that is being sent at this moment
        is not among them: it is taken out once. Should only the first of the two commands happen, due_delayed does the
        other one."""
        gone, _ = self._link.all_of([("XDEL", self._log.delayed, *ids), ("ZREM", self._log.due, *map(member_of, ids))])
        return int(gone)


def member_of(entry_id: str) -> str:
    """Return the member of ``LogKeys.due`` for an entry of ``LogKeys.delayed`` (lua/sending/due_delayed.lua).

    >>> member_of("1700000000000-7")
    '00000001700000000000-00000000000000000007'
    """
    milliseconds, _, sequence = entry_id.partition("-")
    return f"{milliseconds:0>20}-{sequence:0>20}"
