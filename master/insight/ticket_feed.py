"""Live subscriptions to tickets: one feed per master serves all followers, from Redis alone, so a standby can do it
too.

Three streams (ticket stream, run log, dead letters) are read on once for all, and the index is looked at for the
followed tickets, a few times a second while there are followers. A follower that comes back with a position first gets
the events it has missed.

Events, as server-sent events: ``entry`` (it was added to the ticket stream), ``hand_over`` (to a consumer, under a
fence), ``attempt`` (one that failed, or attempts that a message is charged), ``completed`` (with times, from the run
log), ``dead_letter``, ``state`` (handed_over, returned, put_off, paused, halted, idle; with the ``rule`` that holds),
``gap`` (events in between are no longer there). ``time_ms`` of each: when it happened; when it was seen, if only the
index tells; for a gap, the time from which something is missing.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import RedisTrouble
from usher.common.base.log import WARNING, event
from usher.common.http.push import LiveStream, LiveStreams
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import as_mapping, first_value, ticket_value
from usher.common.protocol.run_log import DONE, MERGED, decode
from usher.common.protocol.sources import SCOPED_TICKET_FIELD
from usher.common.protocol.stream_id import ZERO, is_id, milliseconds, rank, sequence
from usher.common.protocol.ticket_states import TicketState
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import Entry, pairs
from usher.common.runtime.service import Service
from usher.master.insight.status import ticket_row
from usher.master.operations.live_rules import read_rules
from usher.master.policy.rules import Rule, Rulebook
from usher.master.policy.states import Seen, ticket_state

#: The streams that events come from, in the order of their places in a position.
SOURCES = ("entries", "runs", "dead")
ENTRIES, RUNS, DEAD = range(len(SOURCES))
#: Bytes of an entry's fields above which they are left out.
_MOST_SHOWN = 65_536
#: Most tickets that are searched for in a record before it is decoded: most records have none of them.
_FEW = 16
_POSITION = re.compile(r"[0-9]{1,20}-[0-9]{1,20}(?:_[0-9]{1,20}-[0-9]{1,20}){2}")
_BEGINNING = "_".join([ZERO.decode()] * len(SOURCES))


class Event(NamedTuple):
    """An event: ``name`` and document, for the followers of ``ticket``."""

    ticket: bytes
    name: str
    data: dict[str, Any]


def without_fields(event: Event) -> Event:
    """Return the event for followers who may not see what messages say, nor the texts of errors."""
    hidden = ("fields", "error")
    return event._replace(data={name: value for name, value in event.data.items() if name not in hidden})


def parse_position(text: str) -> list[bytes]:
    """Parse an event's ``id`` into ids: how far, in each source, a follower has come. ``0``: nowhere yet. Raises
    ValueError.

    >>> parse_position("5-1_7-0_0-0")
    [b'5-1', b'7-0', b'0-0']
    """
    text = _BEGINNING if text == "0" else text
    if not _POSITION.fullmatch(text) or not all(map(is_id, text.split("_"))):
        raise ValueError("must be the id of an event, or 0 for all that is still there")
    return [part.encode() for part in text.split("_")]


def position_text(ids: Sequence[bytes]) -> str:
    return b"_".join(ids).decode()


def frame(event: Event, position: str = "") -> bytes:
    """Encode an event for the wire. Only the last event of an entry has a position: a follower that lost the others
    then gets all of them again."""
    head = f"id: {position}\n" if position else ""
    return f"{head}event: {event.name}\ndata: ".encode() + _dump(event.data) + b"\n\n"


def _dump(data: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(data)
    except TypeError:  # text that was not UTF-8
        return orjson.dumps(
            {name: repr(value) if isinstance(value, (str, dict)) else value for name, value in data.items()}
        )


def events_of(
    source: int, entry_id: bytes, fields: Sequence[bytes], ticket_field: bytes, wanted: Collection[bytes]
) -> Iterator[Event]:
    """Yield the events of an entry of a source for the followers of the ``wanted`` tickets."""
    if source == RUNS:
        yield from _completed(entry_id, fields, wanted)
        return
    ticket = ticket_value(fields, ticket_field if source == ENTRIES else b"usher-ticket")
    if ticket is None or ticket not in wanted:
        return
    data: dict[str, Any] = {"ticket_id": ticket.decode(errors="replace"), "time_ms": milliseconds(entry_id)}
    if source == ENTRIES:
        data["message_id"] = entry_id.decode()
        if sum(map(len, fields)) <= _MOST_SHOWN:
            data["fields"] = as_mapping(fields)
        yield Event(ticket, "entry", data)
        return
    for name in ("id", "reason", "error", "error-type", "at", "attempts", "owner"):
        value = first_value(fields, f"usher-{name}".encode())
        if value is not None:
            data["message_id" if name == "id" else name.replace("-", "_")] = value.decode(errors="replace")
    yield Event(ticket, "dead_letter", data)


def _completed(entry_id: bytes, fields: Sequence[bytes], wanted: Collection[bytes]) -> Iterator[Event]:
    record = first_value(fields, b"batch")
    texts = [orjson.dumps(ticket.decode("utf-8", "replace")) for ticket in wanted] if len(wanted) <= _FEW else []
    if record is None or (texts and not any(text in record for text in texts)):
        return
    for run in decode(record):
        ticket = run.ticket.encode()
        if ticket in wanted:
            facts = run._asdict()
            # A run log that also has executions that failed says so in their outcome.
            name = "completed" if run.outcome in (DONE, MERGED) else "attempt"
            # An execution that ended with its process could not say when.
            ended = {"time_ms": run.end_us // 1000 if run.end_us else milliseconds(entry_id)}
            ids = {"ticket_id": facts.pop("ticket"), "message_id": facts.pop("id")}
            yield Event(ticket, name, ids | ended | facts)


class TicketSnapshot(NamedTuple):
    """The last view of a ticket: its row (as pages show it), and the attempts of its messages."""

    row: Mapping[str, Any]
    attempts: Mapping[str, int]


def idle(ticket: bytes) -> dict[str, Any]:
    return {"ticket_id": ticket.decode(errors="replace"), "state": TicketState.IDLE, "message_ids": []}


def ruled(row: dict[str, Any], rule: Rule | None) -> dict[str, Any]:
    """Return the row with the rule that holds: a ticket without an owner is ``paused`` by one, though the index, which
    has records only of what is handed over, may know nothing of it. Its parked messages are not looked for here, so the
    rule is shown also when none waits."""
    if rule is None:
        return row
    kind = {TicketState.IDLE: "", TicketState.RETURNED: "returned"}.get(row["state"], "owned")
    is_held = ticket_state(Seen(kind, rule=rule)).name is TicketState.PAUSED
    return row | ({"state": TicketState.PAUSED} if is_held else {}) | {"rule": rule.told()}


def changes(ticket: bytes, before: TicketSnapshot, now: TicketSnapshot) -> Iterator[Event]:
    row = now.row
    handed = before.row["message_ids"] if before.row.get("fence") == row.get("fence") else ()
    if row["state"] == TicketState.HANDED_OVER and (fresh := [one for one in row["message_ids"] if one not in handed]):
        facts = {name: row[name] for name in ("ticket_id", "owner", "consumer_name", "fence")}
        yield Event(ticket, "hand_over", {**facts, "message_ids": fresh})
    if (row["state"], row.get("rule")) != (before.row["state"], before.row.get("rule")):
        yield Event(ticket, "state", dict(row))
    for message_id, attempts in now.attempts.items():
        if before.attempts.get(message_id) != attempts:
            facts = {"ticket_id": row["ticket_id"], "message_id": message_id, "attempts": attempts}
            yield Event(ticket, "attempt", facts)


#: Seconds between two looks at the index for followed tickets.
_LOOK_S = 0.2
#: Seconds between two positions sent to a follower, so that it need not go back far, and to test its connection.
_POSITION_S = 10.0
#: Entries of a page; and the pages of a stream that one turn reads.
_PAGE, _PAGES = 500, 8
#: Bytes on their way to a follower, above which it gets no more of what it has missed: far below the bound at which it
#: counts as not reading.
_ENOUGH_BYTES = 65_536
_EMPTY_S = 5.0
#: Tickets whose rules are kept: a thousand patterns are not matched several times a second.
_RULED = 10_000


@dataclass(eq=False)
class Follower:
    """A follower of one ticket. ``position``: the last id it has of each source; ``behind``: the sources of which it
    has not everything yet; ``waits``: it gets no more of these before what it was sent is written; ``with_fields``: it
    may see the contents of messages."""

    ticket: bytes
    position: list[bytes] | None
    with_fields: bool
    live: LiveStream | None = None
    behind: set[int] = field(default_factory=set)
    greeted: bool = False
    waits: bool = False


class TicketFeed(Service):
    """The service behind ``/events``. All its fields below the mailbox belong to its thread."""

    name = "feed"

    def __init__(self, link: Link, keys: Keys, ticket_field: str, streams: LiveStreams) -> None:
        super().__init__()
        self._link, self._keys = link, keys
        self._streams = (keys.stream, keys.runs, keys.dead)
        self._field = ticket_field.encode()
        self._live = streams
        self._mailbox: deque[tuple[str, Follower]] = deque()
        self._heads: list[bytes] = []  # of each stream the last entry that was read; none while nobody follows
        self._followers: dict[bytes, dict[Follower, None]] = {}
        self._behind: deque[Follower] = deque()
        self._seen: dict[bytes, TicketSnapshot] = {}
        self._values: dict[bytes, tuple[bytes | None, str]] = {}  # the records and rules that _seen was made of
        self._book, self._rule_of = Rulebook(), lru_cache(_RULED)(Rulebook().of)
        self._look_at_s = 0.0
        self._positions_at_s = 0.0

    # -- from other threads

    def follow(self, who: str, ticket: bytes, position: list[bytes] | None, with_fields: bool) -> LiveStream:
        """Begin an answer with the events of ``ticket`` from now on, and first those missed since ``position``. Raises
        Problem."""
        follower = Follower(ticket, position, with_fields)
        follower.live = self._live.open(who, lambda: self._post("left", follower), lambda: self._written(follower))
        self._post("came", follower)
        return follower.live

    def follow_message(self, who: str, uid: str, last: str) -> LiveStream:
        """Begin an answer with what the handler of a message tells, behind the entry ``last``. Raises Problem."""
        stream = self._keys.stream
        if self._field == SCOPED_TICKET_FIELD:  # a handler's uid, where several streams are taken in
            stream, _, uid = uid.partition("/")
        live = self._live.open(who, lambda: None)
        key = LogKeys(stream).followed(uid.encode()).removesuffix(b" 0")
        live.response.response = self._told(live, key, last.encode())
        return live

    def _told(self, live: LiveStream, key: bytes, last: bytes) -> Iterator[bytes]:
        """Yield what comes until the result, or until the reader has gone, which a write shows."""
        link = Link(self._link.url, "master:answers")
        with suppress(RedisTrouble), closing(link):  # after a trouble it comes back, and says where it was
            while not live.closed:
                yield b":\n\n"
                read = ("XREAD", "COUNT", 100, "BLOCK", int(1000 * _EMPTY_S), "STREAMS", key, last)
                for last, flat in (link.call(*read, block_s=_EMPTY_S) or [[key, []]])[0][1]:
                    told = pairs(flat)
                    what = b"failed" if b"failed" in told else b"progress" if b"part" in told else b"result"
                    code = "latin-1" if b"bytes" in told else "utf-8"  # a letter for each byte
                    data: dict[str, Any] = {name.decode(): one.decode(code, "replace") for name, one in told.items()}
                    if b"json" in told:
                        data["json"] = orjson.Fragment(told[b"json"])
                    yield b"id: %b\nevent: %b\ndata: %b\n\n" % (last, what, orjson.dumps(data))
                    if what != b"progress":
                        return

    def _written(self, follower: Follower) -> None:
        if follower.waits:
            self.wake()

    def _post(self, what: str, follower: Follower) -> None:
        self._mailbox.append((what, follower))
        self.wake()

    # -- the turn

    def run_once(self) -> float:
        for _ in range(len(self._mailbox)):
            self._read(*self._mailbox.popleft())
        if not self._followers:
            self._rest()
            return _EMPTY_S
        self._heads = self._heads or [self._last_id(key) for key in self._streams]
        more = [self._read_on(source) for source in range(len(self._streams))]
        more += [self._catch_up(self._behind.popleft()) for _ in range(len(self._behind))]
        now = now_s()
        if now >= self._look_at_s:
            self._look_at_s = now + _LOOK_S
            self._look()
        if now >= self._positions_at_s:
            self._positions_at_s = now + _POSITION_S
            self._tell_positions()
        return 0.0 if any(more) else _LOOK_S

    def on_end(self) -> None:
        self._rest()
        self._link.close()

    def _last_id(self, key: str) -> bytes:
        try:
            facts = pairs(self._link.call("XINFO", "STREAM", key))
        except CommandRefused:
            return ZERO  # there is none yet
        return bytes(facts[b"last-generated-id"])

    def _rest(self) -> None:
        self._heads = []
        self._seen.clear()
        self._values.clear()

    def _read_on(self, source: int) -> bool:
        """Read what came into a stream. Return True when there is more to be read at once."""
        for _ in range(_PAGES):
            _, page = self._page(source, self._heads[source])
            self._dispatch(source, page)
            if len(page) < _PAGE:
                return False
        return True

    # -- its parts

    def _read(self, what: str, one: Follower) -> None:
        if what == "came":
            self._join(one)
            return
        if one in self._behind:
            self._behind.remove(one)
        followers = self._followers.get(one.ticket, {})
        followers.pop(one, None)
        if not followers:
            self._followers.pop(one.ticket, None)
            self._seen.pop(one.ticket, None)
            self._values.pop(one.ticket, None)

    def _dispatch(self, source: int, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._heads[source] = entry.id
            found = list(self._events(source, entry, self._followers))
            for ticket in {one.ticket for one in found}:
                mine = [one for one in found if one.ticket == ticket]
                if source == SOURCES.index("runs"):
                    mine = [*self._handed_meanwhile(ticket, mine), *mine]
                for follower in self._followers[ticket]:
                    if source not in follower.behind:
                        self._send(follower, mine)

    def _events(self, source: int, entry: Entry, wanted: Any) -> list[Event]:
        try:
            return list(events_of(source, entry.id, entry.fields or (), self._field, wanted))
        except (ValueError, KeyError, TypeError):
            event("entry_unreadable", level=WARNING, source=SOURCES[source], entry=entry.id)
            return []

    def _handed_meanwhile(self, ticket: bytes, completed: Sequence[Event]) -> list[Event]:
        known = self._seen.get(ticket)
        handed = known.row["message_ids"] if known is not None else ()
        return [
            Event(ticket, "hand_over", _hand_over_of(one.data))
            for one in completed
            if one.data["message_id"] not in handed
        ]

    def _send(self, follower: Follower, events: Sequence[Event]) -> None:
        assert follower.live is not None
        for one in events:
            one.data.setdefault("time_ms", wall_ms())
        position = position_text(self._position_of(follower))
        events = events if follower.with_fields else list(map(without_fields, events))
        frames = [frame(one) for one in events[:-1]] + [frame(one, position) for one in events[-1:]]
        follower.live.send(b"".join(frames))

    def _position_of(self, follower: Follower) -> list[bytes]:
        own = follower.position or self._heads
        return [own[source] if source in follower.behind else head for source, head in enumerate(self._heads)]

    def _join(self, follower: Follower) -> None:
        assert follower.live is not None
        if follower.live.closed:
            return
        self._followers.setdefault(follower.ticket, {})[follower] = None
        self._values.pop(follower.ticket, None)  # forces the state to be sent, changed or not
        self._look_at_s = 0.0
        if follower.position is not None:
            follower.behind = set(range(len(SOURCES)))
            self._behind.append(follower)

    def _catch_up(self, follower: Follower) -> bool:
        """Send a follower what it has missed, one page of each source that it is behind with, in the order of time: up
        to where all of them are known, and as fast as it reads. Returns True when there is more to be read at once."""
        assert follower.live is not None
        assert follower.position is not None
        if follower.live.closed:
            return False
        follower.waits = True  # before the look: a follower that reads everything meanwhile posts that
        if follower.live.unwritten > _ENOUGH_BYTES:
            self._behind.append(follower)
            return False
        follower.waits = False
        try:
            pages = self._pages(follower)
        except RedisTrouble:
            self._behind.append(follower)
            raise
        known_to = min((rank(page[-1].id) for page in pages.values() if len(page) == _PAGE), default=math.inf)
        missed = [(rank(entry.id), source, entry) for source, page in pages.items() for entry in page]
        for at, source, entry in sorted(missed, key=lambda one: one[:2]):
            if at > known_to:
                break
            if at > rank(self._heads[source]):
                continue  # arrives as a new entry
            follower.position[source] = entry.id
            if found := self._events(source, entry, (follower.ticket,)):
                self._send(follower, found)
                if follower.live.unwritten > _ENOUGH_BYTES:
                    known_to = at - 1  # another source may have one at the same time
                    break
        for source, page in pages.items():
            reached = rank(page[-1].id) if page else 0
            if reached <= known_to and (len(page) < _PAGE or reached >= rank(self._heads[source])):
                follower.behind.discard(source)
        if follower.behind:
            self._behind.append(follower)
        else:
            self._values.pop(follower.ticket, None)  # forces the state to be sent now
            self._look_at_s = 0.0
        return not follower.behind.isdisjoint(pages)

    def _pages(self, follower: Follower) -> dict[int, list[Entry]]:
        """Return the next page of each source that a follower is behind with, and send a gap event where entries are
        gone that it had not seen. A source of which it has more than was read here gives no page: another master was
        faster."""
        assert follower.position is not None
        pages = {}
        for source in sorted(follower.behind):
            last = follower.position[source]
            is_ahead = rank(last) > rank(self._heads[source])
            if is_ahead and rank(last) <= rank(self._last_id(self._streams[source])):
                continue
            # A position above all ids is from an earlier stream of that name: nothing in the present one may be missed.
            first, pages[source] = self._page(source, ZERO if is_ahead else last)
            if is_ahead or (last != ZERO and self._is_gone(source, last, first)):
                self._send(follower, [_gap(follower.ticket, source, last)])
                follower.position[source] = ZERO  # the gap is sent once, even if nothing of this page is sent yet
        return pages

    def _is_gone(self, source: int, last: bytes, first: bytes | None) -> bool:
        """Return True when entries after ``last`` may be gone. ``first``: the id that the source begins with; None: it
        is empty."""
        if first is None:
            return rank(self._heads[source]) > rank(last)
        # The leader trims the work stream all the time, but its ids are numbered without gaps.
        if SOURCES[source] == "entries" and self._field == SCOPED_TICKET_FIELD:
            return rank(first) > rank(last) and sequence(first) != sequence(last) + 1
        return rank(first) > rank(last)

    def _page(self, source: int, last: bytes) -> tuple[bytes | None, list[Entry]]:
        key = self._streams[source]
        replies = self._link.pipeline(
            [("XRANGE", key, "-", "+", "COUNT", 1), ("XRANGE", key, b"(" + last, "+", "COUNT", _PAGE)]
        )
        for reply in replies:
            if isinstance(reply, CommandRefused):
                return None, []
            if isinstance(reply, Exception):
                raise reply
        first, page = replies
        return (first[0][0] if first else None), [Entry(*entry) for entry in page]

    # -- the index

    def _look(self) -> None:
        tickets = list(self._followers)
        for at in range(0, len(tickets), 1000):
            some = tickets[at : at + 1000]
            asked: list[tuple[str | bytes, ...]] = [
                ("HMGET", self._keys.tickets, *some),
                ("HGET", self._keys.counters, "rules"),
            ]
            values, version = self._link.all_of(asked)
            if (version or b"") != self._book.version:
                self._book = read_rules(self._link, self._keys)
                self._rule_of = lru_cache(_RULED)(self._book.of)
            held = [
                (value, rule.told() if (rule := self._rule_of(ticket)) is not None else "")
                for ticket, value in zip(some, values, strict=True)
            ]
            # Skip tickets that are idle and were so before: most are.
            looked = zip(some, held, strict=True)
            busy = [(ticket, now) for ticket, now in looked if now[0] is not None or self._values.get(ticket) != now]
            rows = [self._row(ticket, value) for ticket, (value, _) in busy]
            attempts = self._attempts([one for row in rows for one in row["message_ids"]])
            # Not before: if Redis does not answer, the next look has to send these changes.
            self._values.update(busy)
            for (ticket, _), row in zip(busy, rows, strict=True):
                self._tell_state(
                    ticket, TicketSnapshot(row, {one: attempts[one] for one in row["message_ids"] if one in attempts})
                )

    def _row(self, ticket: bytes, value: bytes | None) -> dict[str, Any]:
        row = idle(ticket) if value is None else {"message_ids": [], **ticket_row(ticket, value)}
        return ruled(row, self._rule_of(ticket))

    def _attempts(self, message_ids: Sequence[str]) -> dict[str, int]:
        if not message_ids:
            return {}
        values = self._link.call("HMGET", self._keys.attempts, *message_ids)
        counts = [(value or b"").partition(b" ")[0] for value in values]
        return {one: int(count) for one, count in zip(message_ids, counts, strict=True) if count.isdigit()}

    def _tell_state(self, ticket: bytes, now: TicketSnapshot) -> None:
        before, self._seen[ticket] = self._seen.get(ticket), now
        news = list(changes(ticket, before, now)) if before is not None else []
        for follower in self._followers[ticket]:
            if follower.behind:
                continue
            if not follower.greeted:
                follower.greeted = True
                self._send(follower, [Event(ticket, "state", dict(now.row))])
            elif news:
                self._send(follower, news)

    def _tell_positions(self) -> None:
        for followers in self._followers.values():
            for follower in followers:
                assert follower.live is not None
                follower.live.send(f"id: {position_text(self._position_of(follower))}\n\n".encode())


def _gap(ticket: bytes, source: int, last: bytes) -> Event:
    facts = {"ticket_id": ticket.decode(errors="replace"), "time_ms": milliseconds(last)}
    return Event(ticket, "gap", facts | {"source": SOURCES[source], "after": last.decode()})


def _hand_over_of(completed: dict[str, Any]) -> dict[str, Any]:
    owner = str(completed["consumer"])
    facts = {"ticket_id": completed["ticket_id"], "owner": owner, "consumer_name": owner.rpartition(":")[0]}
    facts |= {"fence": completed["fence"]}
    return {**facts, "time_ms": completed["start_us"] // 1000, "message_ids": [completed["message_id"]]}
