"""Live subscriptions to tickets: one feed per master serves all followers, from Redis alone, so a standby can do it
too.

Three streams (ticket stream, run log, dead letters) are read on once for all, and the index is looked at for the
followed tickets, a few times a second while there are followers. A follower that comes back with a position first gets
the events it has missed.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import orjson

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import RedisTrouble
from usher.common.base.log import event
from usher.common.http.push import LiveStream, LiveStreams
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.sources import SCOPED_TICKET_FIELD
from usher.common.protocol.stream_id import ZERO, milliseconds, rank, sequence
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import Entry, pairs
from usher.common.runtime.service import Service
from usher.master.insight.status import ticket_row
from usher.master.operations.live_rules import read_rules
from usher.master.policy.explain.ticket_events import (
    SOURCES,
    Event,
    TicketSnapshot,
    changes,
    events_of,
    frame,
    idle,
    position_text,
    ruled,
    without_fields,
)
from usher.master.policy.rules import Rule, Rulebook

log = logging.getLogger(__name__)

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


class Follower:
    """A follower of one ticket. ``position``: the last id it has of each source; ``behind``: the sources of which it
    has not everything yet; ``waits``: it gets no more of these before what it was sent is written; ``with_fields``: it
    may see the contents of messages."""

    __slots__ = ("behind", "greeted", "live", "position", "ticket", "waits", "with_fields")

    def __init__(self, ticket: bytes, position: list[bytes] | None, with_fields: bool) -> None:
        self.ticket, self.with_fields = ticket, with_fields
        self.live: LiveStream | None = None
        self.position = position
        self.behind: set[int] = set()
        self.greeted, self.waits = False, False


class RuleWatch:
    """The rules of one ticket stream, read anew and matched anew only when they have changed. Belongs to one thread."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link, self._keys, self._book = link, keys, Rulebook()
        # By ticket: a thousand patterns are not matched several times a second.
        self._known: dict[bytes, Rule | None] = {}

    @property
    def command(self) -> tuple[str, ...]:
        """The command that asks for the version, to be sent along with another one."""
        return ("HGET", self._keys.counters, "rules")

    def heard(self, version: bytes | None) -> None:
        """Note the version that ``command`` returned, and read the rules if it is new. Raises what ``Link.call``
        raises."""
        if (version or b"") != self._book.version:
            self._book = read_rules(self._link, self._keys)
            self._known.clear()

    def of(self, ticket: bytes) -> Rule | None:
        if ticket not in self._known:
            self._known[ticket] = self._book.of(ticket)
        return self._known[ticket]

    def forget(self, ticket: bytes) -> None:
        self._known.pop(ticket, None)


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
        self._rules = RuleWatch(link, keys)
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
            self._rules.forget(one.ticket)

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
            event(log, "entry_unreadable", level=logging.WARNING, source=SOURCES[source], entry=entry.id)
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
            values, version = self._link.all_of([("HMGET", self._keys.tickets, *some), self._rules.command])
            self._rules.heard(version)
            held = [
                (value, rule.told() if (rule := self._rules.of(ticket)) is not None else "")
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
        return ruled(row, self._rules.of(ticket))

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
