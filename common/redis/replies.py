"""Reply shapes of Redis Streams, in one place: bare replies in, named values out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import hiredis

from usher.common.base.errors import GroupMissing
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import GroupPosition, Span, rank
from usher.common.redis.client import CommandRefused, Link, checked

#: Stricter than lua/includes/records.lua: records that this accepts are accepted there too.
_RECORD = re.compile(rb"[^\s]+ (?:0|[1-9][0-9]{0,19})(?: [0-9]{1,20}-[0-9]{1,20})+")


#: Pending entries looked at by one command.
_PENDING = 2000
_ORDER = [b"order", b"ticket", b"id"]
_GIVEN = [b"fence", b"parts"]
_RECALLED = [b"recall"]


class Entry(NamedTuple):
    """An entry as Redis sends it: ``fields`` is the flat list of names and values, or None when the body is gone."""

    id: bytes
    fields: list[bytes] | None


class HandOver(NamedTuple):
    """The part of an inbox record that hands over one ticket."""

    ticket: bytes
    fence: int
    ids: list[bytes]


class Order(NamedTuple):
    """An operator's order about a message (lua/operations/order.lua). ``what``: retry, give_up or cancel."""

    what: str
    ticket: bytes
    id: bytes


class InboxRecord(NamedTuple):
    """A record of an inbox: hand-overs, an order, or a recall. ``recalled``: tickets that the leader wants back, under
    their fences, with the ids that they had then. A record of an unknown form has nothing of these.

    ``given``: of each ticket its name, its fence (empty: that of the record), and its entries, [id, name, value, ...]:
    without names where the body did not come along. With a body, nobody was given it before."""

    id: bytes
    given: Sequence[list[Any]] = ()
    size: int = 0  # bytes of ``given``
    fence: int = 0
    order: Order | None = None
    recalled: Sequence[HandOver] = ()

    @property
    def parts(self) -> list[HandOver]:
        return [
            HandOver(ticket, int(own or self.fence), [one[0] for one in entries])
            for ticket, own, *entries in self.given
        ]


class TicketRecord(NamedTuple):
    """A ticket's record in the index (lua/includes/records.lua)."""

    owner: bytes
    fence: int
    ids: list[bytes]


def cut_unread(group: Mapping[bytes, Any], stream: Mapping[bytes, Any], counted: bytes | None) -> int:
    """Do the same as lua/includes/bodies.lua, with the facts of XINFO GROUPS and XINFO STREAM: how many entries are
    gone that the group was not given, as far as this can be known. ``counted``: those that are mishaps already (lua:
    count_cut), and are left out."""
    read, first = group.get(b"entries-read"), stream[b"first-entry"]
    if read is None or (first and rank(first[0]) <= rank(group[b"last-delivered-id"])):
        return 0
    here = cut_at(counted, group[b"last-delivered-id"])[0]
    return max(0, int(stream[b"entries-added"] - read - stream[b"length"]) - here)


def cut_at(counted: bytes | None, position: bytes) -> tuple[int, int]:
    """Return how many entries were cut unread (lua: count_cut) at this position of the group, which Redis counts as
    read with its next read, and below it."""
    at, number, of_all = (counted or b"0-0 0 0").split()
    here = int(number) if at == position else 0
    return here, int(of_all) - here


def parse_record(value: bytes) -> TicketRecord:
    if _RECORD.fullmatch(value) is None:
        raise ValueError("not a record")
    owner, fence, *ids = value.split(b" ")
    owner.decode()  # a name that is not UTF-8 is not ours
    return TicketRecord(owner, int(fence), ids)


def record_or_none(value: bytes | None) -> TicketRecord | None:
    try:
        return None if value is None else parse_record(value)
    except ValueError:
        return None


def parse_inbox(reply: Any) -> Iterator[InboxRecord]:
    for record_id, fields in reply[0][1] if reply else ():
        names = fields[::2]
        if names == _ORDER:
            yield InboxRecord(record_id, order=Order(fields[1].decode(), fields[3], fields[5]))
            continue
        try:
            if names == _GIVEN:
                yield InboxRecord(record_id, _unpacked(fields[3]), len(fields[3]), int(fields[1]))
            elif names == _RECALLED:
                yield InboxRecord(record_id, recalled=InboxRecord(record_id, _unpacked(fields[1])).parts)
            else:
                yield InboxRecord(record_id)
        except (hiredis.HiredisError, TypeError, ValueError):
            yield InboxRecord(record_id)


def _unpacked(packed: bytes) -> list[list[Any]]:
    """Return what ``pack_parts`` packed. Raises HiredisError, TypeError, ValueError."""
    reader = hiredis.Reader()
    reader.feed(packed)
    parts: list[list[Any]] = reader.gets()
    if not all(type(part) is list and len(part) > 2 for part in parts):
        raise ValueError("not parts")
    return parts


#: Packs an entry for ``pack_part``: a tuple of id, name, value, ...
pack_entry = hiredis.pack_command


def pack_part(ticket: bytes, fence: bytes, entries: Sequence[bytes]) -> bytes:
    """Pack a ticket's part of a hand-over (``InboxRecord.given``), with its packed entries."""
    head = b"*%d\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (2 + len(entries), len(ticket), ticket, len(fence), fence)
    return head + b"".join(entries)


def pack_parts(parts: Sequence[bytes]) -> bytes:
    """Pack the parts of a record: nested RESP arrays."""
    return b"*%d\r\n%b" % (len(parts), b"".join(parts))


def read_command(stream: str, after: bytes, block_ms: int | None, count: int = 100) -> tuple[Any, ...]:
    """Return the XREAD of a stream above ``after``; with ``block_ms`` None it does not wait. It consumes nothing."""
    block = () if block_ms is None else ("BLOCK", block_ms)
    return ("XREAD", "COUNT", count, *block, "STREAMS", stream, after)


def read_own_command(keys: Keys, incarnation: str, after: bytes, count: int) -> tuple[Any, ...]:
    """Return the XREADGROUP of an incarnation's own pending list above ``after``. It never waits, and counts as a
    delivery: read only what is needed."""
    return ("XREADGROUP", "GROUP", keys.group, incarnation, "COUNT", count, "STREAMS", keys.stream, after)


def parse_own(reply: Any) -> list[Entry]:
    return [Entry(entry_id, fields) for entry_id, fields in reply[0][1]] if reply else []


def redis_ms(link: Link) -> int:
    seconds, micros = link.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def found_entries(
    link: Link, command: str, stream: str, start: str | bytes, end: str | bytes, at_once: int, *wanted: str | bytes
) -> Iterator[tuple[int, list[bytes], bytes, bool]]:
    """Look through a stream page by page (find_entries.lua, which says what is ``wanted``). Yield how many entries a
    page had, what was found there, its last id (b"": it had none), and whether it was the last page."""
    while True:
        count, last, found, is_all = link.run("find_entries", (stream,), (command, start, end, at_once, *wanted))
        yield count, found, last, bool(is_all)
        if is_all:
            return
        start = b"(" + last if last else start


def facts_of(link: Link, stream: str) -> dict[bytes, Any]:
    return stream_facts(link.pipeline([("XINFO", "STREAM", stream)])[0])


def stream_facts(reply: Any) -> dict[bytes, Any]:
    """Return what a reply to XINFO STREAM says, {} where there is no such key. Raises other errors."""
    if isinstance(reply, CommandRefused) and "no such key" in str(reply):
        return {}
    return pairs(*checked([reply]))


def scanned(link: Link, key: str, count: int = 1000) -> Iterator[list[bytes]]:
    """Yield the fields and values of a hash by HSCAN: what changes meanwhile may come twice, or not at all."""
    cursor = None
    while cursor != b"0":
        cursor, fields = link.call("HSCAN", key, cursor or b"0", "COUNT", count)
        yield fields


def span_of(link: Link, stream: str) -> Span | None:
    """Ask for the span of a stream; None when it is missing. The last id stays when its entry is deleted or trimmed."""
    facts = facts_of(link, stream)
    return parse_span(facts) if facts else None


def parse_span(facts: Mapping[bytes, Any]) -> Span:
    return Span(first_of(facts), facts[b"last-generated-id"])


def first_of(facts: Mapping[bytes, Any]) -> bytes | None:
    first = facts.get(b"first-entry")
    return first[0] if first else None


class TicketStream:
    """Plain reads of one ticket stream and its group, over a link of the caller's thread."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def create_group(self, start: bytes) -> bool:
        """Create the stream and its group, which has read up to ``start``; return False if the group was there."""
        options: list[tuple[Any, ...]] = [()]
        facts = facts_of(self._link, self._keys.stream) or {b"entries-added": 0, b"length": 0}
        first = first_of(facts)
        if b"entries-added" in facts and (first is None or rank(first) > rank(start)):
            # How many entries are gone before a group that begins at ``start``: so what is cut before it has read
            # anything is counted too (lua/includes/group.lua: cut_unread).
            options.insert(0, ("ENTRIESREAD", int(facts[b"entries-added"] - facts[b"length"])))
        for option in options:
            try:
                self._link.call("XGROUP", "CREATE", self._keys.stream, self._keys.group, start, "MKSTREAM", *option)
                return True
            except CommandRefused as refused:
                if "BUSYGROUP" in str(refused):
                    return False
                if not option:  # else it is Redis 6.2, which does not know it
                    raise
        return True

    def saved_position(self) -> GroupPosition | None:
        saved = pairs(self._link.call("HGETALL", self._keys.position))
        if b"delivered" not in saved:
            return None
        return GroupPosition(saved[b"delivered"], saved[b"oldest_pending"] or None)

    def last_delivered(self) -> bytes:
        return bytes(self.group_facts()[b"last-delivered-id"])

    def highest_pending(self) -> bytes | None:
        """Return the highest id in the pending list of our group; it is above the last delivered id when an operator
        has set the group back. Raises GroupMissing."""
        highest: bytes | None = self._link.call("XPENDING", self._keys.stream, self._keys.group)[2]
        return highest

    def group_facts(self) -> dict[bytes, Any]:
        """Return what ``group_of`` tells of our group. Raises GroupMissing."""
        groups, taken = self._link.pipeline([("XINFO", "GROUPS", self._keys.stream), ("GET", self._keys.taken)])
        facts = group_of(groups, self._keys.group, taken)
        if facts is None:
            why = f": {groups}" if isinstance(groups, Exception) else f" has no group {self._keys.group}"
            raise GroupMissing(f"stream {self._keys.stream}{why}")
        return facts

    def pending_counts(self) -> dict[bytes, int]:
        """Return how many entries are pending for each name in the group."""
        rows = self._link.call("XINFO", "CONSUMERS", self._keys.stream, self._keys.group)
        return {row[b"name"]: row[b"pending"] for row in map(pairs, rows)}

    def pending_of(self, name: str | bytes, start: bytes = b"-", end: bytes = b"+") -> Iterator[bytes]:
        """Yield the ids that are pending for a name, page by page. Raises GroupMissing."""
        while True:
            rows = self._link.call("XPENDING", self._keys.stream, self._keys.group, start, end, _PENDING, name)
            yield from (row[0] for row in rows)
            if len(rows) < _PENDING:
                return
            start = b"(" + rows[-1][0]

    def in_processing(self, record: TicketRecord | None) -> TicketRecord | None:
        """Return a record with what is not over of it. None: all is, or it was None."""
        if record is None or b":" not in record.owner:
            return record
        first, last = min(record.ids, key=rank), max(record.ids, key=rank)
        with contextlib.suppress(GroupMissing):
            pending = set(self.pending_of(record.owner, first, last))
            record = record._replace(ids=[one for one in record.ids if one in pending])
        return record if record.ids else None

    def records(self, count: int = 1000) -> Iterator[tuple[bytes, TicketRecord | None]]:
        """Yield every record of the index, by HSCAN; a record that changes meanwhile may come twice or in either state.
        None: it cannot be parsed."""
        for fields in scanned(self._link, self._keys.tickets, count):
            yield from zip(fields[::2], map(record_or_none, fields[1::2]), strict=True)

    def record_of(self, ticket: bytes) -> TicketRecord | None:
        return record_or_none(self._link.call("HGET", self._keys.tickets, ticket))


def group_of(groups: Any, name: str, taken: Any) -> dict[bytes, Any] | None:
    """Find a group's facts in a reply of XINFO GROUPS, which may be an error; None: there is no such group, or no
    stream. Raises other errors. ``taken``: the value of ``Keys.taken``: what the leader has read and not handed over
    yet counts as not given to the group, for only the leader's memory has it."""
    if isinstance(groups, (CommandRefused, GroupMissing)):
        return None
    checked([groups, taken])
    facts = next((facts for facts in map(pairs, groups) if facts[b"name"] == name.encode()), None)
    last, _, read = (taken or b"").partition(b" ")
    if facts is None or not last or rank(last) >= rank(facts[b"last-delivered-id"]):
        return facts
    before, lag = facts.get(b"entries-read"), facts.get(b"lag")
    facts |= {b"last-delivered-id": last, b"lag": None}
    if read and before is not None and lag is not None:
        facts |= {b"entries-read": int(read), b"lag": lag + before - int(read)}
    return facts


def pairs(flat: Sequence[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def leases_command(keys: Keys, incarnations: Sequence[str]) -> tuple[str, ...]:
    return "MGET", *map(keys.lease, incarnations), *map(keys.unproven, incarnations)


def parse_leases(reply: Sequence[bytes | None]) -> list[str]:
    """Parse the reply: live, starting (the lease was not renewed yet, and its holder gets nothing), draining, revoked,
    or "" without a lease.

    >>> parse_leases([b"live", b"live", b"draining", None, None, b"1", b"1", b"1"])
    ['live', 'starting', 'draining', '']
    """
    half = len(reply) // 2
    return [
        "starting" if mark and state == b"live" else (state or b"").decode(errors="replace")
        for state, mark in zip(reply[:half], reply[half:], strict=True)
    ]
