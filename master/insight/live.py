"""Live views: what goes on, as it happens, from Redis alone, so that a standby can show it too.

The live overview is the state of the whole system for the page, read once for everybody who watches. While a page is
open, it is read once a second and closely: stuck tickets, live consumers. Otherwise it is read every other second, in
one round trip, so that a page finds rates when it opens; more rarely while nothing moves. Open pages ask again every
two seconds; that is how they learn in time that there is no news. ``usher stuck`` takes two looks of its own.

The feed serves all followers of tickets. Three streams (ticket stream, run log, dead letters) are read on, once for all
who are at the same place, and the index is looked at for the followed tickets, a few times a second while there are
followers. A follower that comes back with a position first gets the events it has missed.

Events, as server-sent events: ``entry`` (it was added to the ticket stream), ``hand_over`` (to a consumer, under a
fence), ``attempt`` (one that failed) and ``completed``, both with times, from the run log, ``dead_letter``, ``state``
(handed_over, returned, put_off, paused, halted, idle; with the ``rule`` that holds), ``gap`` (events in between are no
longer there). ``time_ms`` of each: when it happened; when it was seen, if only the index tells; for a gap, since when
something is missing.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import GroupMissing, RedisTrouble
from usher.common.base.log import WARNING, event
from usher.common.doctor.judgements import INFO_COMMANDS, memory_share, write_trouble
from usher.common.protocol.keys import MASTER, Keys, LogKeys
from usher.common.protocol.message import as_mapping, first_value, ticket_value
from usher.common.protocol.mishaps import MISHAPS, losses_command, parse_losses
from usher.common.protocol.registration import name_of
from usher.common.protocol.run_log import DONE, MERGED
from usher.common.protocol.run_log import decode as decode_runs
from usher.common.protocol.sources import SCOPED_TICKET_FIELD
from usher.common.protocol.stream_id import ZERO, is_id, milliseconds, rank
from usher.common.protocol.ticket_states import TicketState
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import Entry, first_of, pairs
from usher.common.runtime.service import Service
from usher.master.insight.stats import stream_sums, tickets_of
from usher.master.insight.status import Scan, consumer_rows, look_at, ticket_row
from usher.master.membership.registry import STATES
from usher.master.operations.live_rules import read_rules
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.board.plans import Parked
from usher.master.policy.explain.explain import (
    OK,
    STUCK_MS,
    Looked,
    TicketGroups,
    alarms,
    describe,
    level_of,
    since_ms,
)
from usher.master.policy.letters import SUDDEN_MS
from usher.master.policy.rates import Sample, is_still, rates, sample_of
from usher.master.policy.rules import Rule, Rulebook, Target
from usher.master.policy.states import Queue, Seen
from usher.master.policy.ticket_filter import TicketFilter

if TYPE_CHECKING:  # commands that look do without a web server
    from usher.common.http.push import LiveStream, LiveStreams

#: Records read by one call; and the most entries that are looked at under ``master``, at first and where it goes on.
_COUNT, _PARKED, _FURTHER = 1000, 50, 500
#: By ticket, its first message, and when that was seen to move on; 0: never.
_Standing = dict[bytes, tuple[bytes, int]]


class StuckTickets:
    """The tickets that stand still, are retried or halted, in groups of those in the same trouble; and how many tickets
    each owner has. Belongs to one thread. ``in_memory``: what this master knows of a ticket's parked messages, when it
    leads.

    A scan of an index of a million tickets takes seconds: so each turn scans one slice, and groups are those of the
    last full scan. Until there was one, they have what was found so far. Where a scan takes several turns, a ticket
    that has not failed, and whose consumer lives, stands still when two scans have found the same first message: it may
    be old, and yet have its turn just now."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        ticket_field: str,
        in_memory: Callable[[bytes], Parked | None] = lambda ticket: None,
    ) -> None:
        self._link, self._keys, self._field, self._in_memory = link, keys, ticket_field, in_memory
        self._waiting: Counter[bytes] = Counter()  # by ticket: entries seen under ``master``
        self._start, self._reached = b"-", b""  # where those begin, and how far they go; b"": to the end
        self._all_waiting, self._under_master = False, 0
        self.forget()

    def forget(self) -> None:
        self._owned: Mapping[bytes, int] | None = None  # None: the first full scan is not over
        self._groups, self._named = TicketGroups(), 0  # entries under ``master`` that records name
        self._stood, self._parked_stood = _Standing(), _Standing()
        self._begin_scan()

    def _begin_scan(self) -> None:
        self._cursor: bytes | None = None
        self._counted: Counter[bytes] = Counter()
        self._counting, self._naming, self._standing = TicketGroups(), 0, _Standing()

    def owned_by(self, incarnation: str) -> int | None:
        """Return how many tickets in processing the incarnation has, as of the last full scan; None before there was
        one."""
        return None if self._owned is None else self._owned.get(incarnation.encode(), 0)

    def look(
        self,
        most: float,
        tickets: int,
        states: Mapping[str, str],
        rules: Rulebook,
        now_ms: int,
        queue: Queue | None = None,
    ) -> list[dict[str, Any]]:
        """Look at ``most`` more records of ``tickets``, or up to the end, and return the groups. ``queue``: what only
        waits for its turn."""
        waiting, looked_at = self._pending(), 0
        while looked_at < most:
            self._cursor, flat = self._link.call("HSCAN", self._keys.tickets, self._cursor or b"0", "COUNT", _COUNT)
            looked_at += max(1, len(flat) // 2)
            scan = Scan(self._link, self._keys, pairs(flat))
            self._counted.update(scan.words)
            for one in look_at(self._link, self._keys, scan, scan.readable, TicketFilter(), states):
                self._naming += one.under_master
                self._add(one, self._counting, self._stood, self._standing, now_ms, tickets <= most)
            if self._cursor == b"0":
                self._owned, self._groups, self._named = dict(self._counted), self._counting, self._naming
                self._stood = self._standing
                self._begin_scan()
                break
        groups, standing = (self._groups if self._owned is not None else self._counting).copied(), _Standing()
        records = self._link.call("HMGET", self._keys.tickets, *waiting) if waiting else []
        alone = [ticket for ticket, record in zip(waiting, records, strict=True) if record is None]
        if not alone:  # all of these are put off, or behind others: look further the next time
            self._start = b"(" + self._reached if self._reached else b"-"
        for ticket in alone:
            rule = rules.of(ticket)
            seen = Seen(rule=rule, queue=queue.text if queue is not None and rule is None else "")
            one = Looked(ticket, b" 0 " + b" ".join(waiting[ticket]), seen, None)
            self._add(one, groups, self._parked_stood, standing, now_ms, True, self._all_waiting)
        self._parked_stood = standing
        return groups.told(self._under_master <= self._named, self._owned is not None)

    def _add(
        self,
        one: Looked,
        groups: TicketGroups,
        stood: _Standing,
        standing: _Standing,
        now_ms: int,
        at_once: bool,
        are_all: bool = True,
    ) -> None:
        """Add a ticket that is stuck. ``stood``: what seemed to stand at the look before; ``at_once``: what was not
        looked at before is added, too; ``are_all``: no such tickets may be left out."""
        first, (head, moved_ms) = one.head, stood.get(one.ticket, (b"", 0))
        moved_ms = now_ms if head not in (b"", first) else moved_ms
        since = since_ms(one, moved_ms, now_ms)
        if since == now_ms and not moved_ms:
            moved_ms = now_ms  # nobody knows since when: since it was seen
        is_old, at_once = now_ms - since >= STUCK_MS, at_once or one.seen.lease == "lost"
        if is_old or moved_ms:
            standing[one.ticket] = first, moved_ms
        if one.has_failed or (is_old and (head or at_once)):
            groups.add(describe(one, since, self._parked_of(one.ticket), now_ms), are_all)

    def _pending(self) -> dict[bytes, list[bytes]]:
        """Return what waits longest under the master, by ticket; of tickets that are in the index too it is behind
        another message."""
        stream, group, found = self._keys.stream, self._keys.group, dict[bytes, list[bytes]]()
        most = _PARKED if self._start == b"-" else _FURTHER
        try:
            by_name = dict(self._link.call("XPENDING", stream, group)[3] or ())
            asked = ("XPENDING", stream, group, self._start, "+", most, MASTER)
            ids = [row[0] for row in self._link.call(*asked)] if MASTER in by_name else []
        except GroupMissing:
            by_name, ids = {}, []
        self._reached = ids[-1] if len(ids) == most else b""
        for entry_id, ticket in tickets_of(self._link, self._keys, self._field, ids):
            found.setdefault(ticket, []).append(entry_id)
        self._waiting = Counter({ticket: len(some) for ticket, some in found.items()})
        # Entries whose bodies were deleted count there but are not found here.
        self._under_master = int(by_name.get(MASTER, 0))
        self._all_waiting = self._under_master <= self._waiting.total()
        return found

    def _parked_of(self, ticket: bytes) -> Parked:
        """Return the ticket's parked messages as far as entries under ``master`` were looked at; otherwise what the
        leader knows, when it is this master."""
        seen = Parked(self._waiting[ticket], self._all_waiting)
        known = None if seen.is_exact else self._in_memory(ticket)
        if known is None:
            return seen
        return known if known.is_exact else Parked(max(known.messages, seen.messages), False)


#: Seconds between two looks: while a page is open, while none is, and while nothing moves either; and how long a page
#: counts as open after it was asked for.
_EVERY_S, _IDLE_EVERY_S, _STILL_EVERY_S, _LOOKS_FOR_S = 1.0, 2.0, 30.0, 10.0
#: Seconds that a page waits for a fresh look; a later one reaches it as an event anyway.
_PATIENCE_S = 0.2
#: Newest declared losses that are looked at, and tenants that are told of.
_LOSSES, _TENANTS = 10, 8
#: The most entries counted for the lag where Redis does not know it (before 7.0): while a page is open, and otherwise.
#: Each one blocks Redis for 2 us.
_MOST_COUNTED, _MOST_COUNTED_UNSEEN = 20_000, 4_000
_BROAD = (Target.STREAM, Target.EVERYTHING)


class LiveOverview(Service):
    """The service behind the live pages. ``parked_of``, ``by_tenant``: how much this master has parked of a ticket, and
    how many messages of each tenant are unfinished and were handed over so far, in memory, when it leads."""

    name = "pulse"
    stalls_after_s = 3 * _STILL_EVERY_S

    def __init__(
        self,
        link: Link,
        keys: Keys,
        ticket_field: str,
        lease_ms: int,
        parked_of: Callable[[bytes], Parked | None] = lambda ticket: None,
        by_tenant: Callable[[], Mapping[str, tuple[int, int]]] = dict,
    ) -> None:
        super().__init__()
        self._link, self._letters, self._keys = link, DeadLetters(link, keys), keys
        self._lease_ms, self._by_tenant = lease_ms, by_tenant
        self._given: deque[tuple[int, Mapping[str, tuple[int, int]]]] = deque(maxlen=5)
        self.queue: Queue | None = None
        #: Called while nobody looks: lists need not be kept.
        self.on_rest: Callable[[], None] = lambda: None
        self.at_once: float = 5_000  # records of the index looked at in a turn
        self._tickets = StuckTickets(link, keys, ticket_field, parked_of)
        self._samples: deque[Sample] = deque(maxlen=5)
        self._told: list[Any] = []  # what Redis said of the stream and its groups at the last look
        self._fresh = threading.Condition()
        self._looked_s = 0.0
        self._closely_s = self._watched_s = 0.0
        self._rows: list[dict[str, Any]] = []
        self._rules = Rulebook(())
        self._snapshot = _nothing_yet(keys)

    # -- from other threads

    def snapshot(self, patience_s: float = _PATIENCE_S) -> dict[str, Any]:
        """Return the last snapshot, at most a few seconds old. One that is older, or whose successor failed, is
        ``stale``, says why, and calls nothing OK. The first one may take longer."""
        self._look()
        with self._fresh:
            if now_s() - self._closely_s > 2 * _IDLE_EVERY_S:
                self.wake()
                self._fresh.wait(patience_s if self._closely_s else 4 * patience_s)
            is_late = now_s() - max(self._closely_s, self._watched_s) > 2 * _IDLE_EVERY_S
        if self.trouble is None and not is_late:
            return self._snapshot
        trouble = (self.trouble or "").partition(": ")[2]
        why = f"Redis does not answer{trouble and f' ({trouble})'}; this page shows an earlier state"
        return self._snapshot | {
            "stale": why,
            "alarms": [one for one in self._snapshot["alarms"] if one["level"] != OK],
        }

    @property
    def last(self) -> dict[str, Any]:
        return self._snapshot

    def consumers(self) -> list[dict[str, Any]]:
        """Return all registered consumers, by name, and names in the group that hold entries without being
        registered."""
        self.snapshot()
        return list(self._rows)

    def _look(self) -> None:
        if not self._is_watched:
            self._watched_s = now_s()
            self.wake()
        self._looked_s = now_s()

    @property
    def _is_watched(self) -> bool:
        return now_s() - self._looked_s < _LOOKS_FOR_S

    # -- the turn

    def run_once(self) -> float:
        began_s, watched = now_s(), self._is_watched
        if not watched:
            self._tickets.forget()
            self.on_rest()
        if not watched and self._stands_still():
            return _STILL_EVERY_S
        seen = self._take_sample(_MOST_COUNTED if watched else _MOST_COUNTED_UNSEEN)
        tenants = self._look_at_tenants(seen["time_ms"], bool(seen["parked"]))
        self.queue = Queue.of(seen, tenants)
        seen["queue"] = self.queue and self.queue._asdict() | {"text": self.queue.text}
        most = sorted(tenants.items(), key=lambda one: -one[1][0])[:_TENANTS]
        seen["tenants"] = [
            {"name": name, "waiting": waiting, "about_ms": 1000 * waiting / per_second if per_second else None}
            for name, (waiting, per_second) in most
            if waiting
        ]
        if watched:
            states = self._look_at_consumers(seen)
            about = seen["tickets"], states, self._rules, seen["time_ms"], self.queue
            groups = self._tickets.look(self.at_once, *about)
            seen["groups"] = [group | {"level": level_of(group, seen["time_ms"])} for group in groups]
            for row in self._rows:
                row["tickets"] = self._tickets.owned_by(row["incarnation"])
            losses, *told = self._link.pipeline([losses_command(self._keys, _LOSSES), *INFO_COMMANDS])
            seen["losses"] = [loss.document() for loss in parse_losses(losses)]
            trouble, share = write_trouble(*told), memory_share(*told)
            seen["memory_share"] = None if share is None else round(share, 2)
            seen["write_trouble"] = None if trouble is None else trouble._asdict()
            counts = self._letters.counts(*(seen["time_ms"] - ms for ms in SUDDEN_MS))
            seen["letters"], seen["sudden"], seen["letters_wrong"] = counts.groups, counts.sudden, counts.wrong
            seen["alarms"] = alarms(seen)
        with self._fresh:
            self._snapshot = seen if watched else self._snapshot | seen
            if watched:
                self._closely_s = now_s()
            self._fresh.notify_all()
        every_s = _EVERY_S if self._is_watched else _STILL_EVERY_S if is_still(self._samples) else _IDLE_EVERY_S
        return max(0.05, every_s - (now_s() - began_s))

    def _stands_still(self) -> bool:
        """Return whether nothing has moved since the last look: two commands tell."""
        if not is_still(self._samples):
            return False
        stream = self._keys.stream
        if self._link.pipeline([("XLEN", stream), ("XINFO", "GROUPS", stream)]) != self._told:
            return False
        self.queue = None
        self._samples.append(self._samples[-1]._replace(time_ms=wall_ms()))
        return True

    def _take_sample(self, most_counted: int) -> dict[str, Any]:
        began_s = now_s()
        seen = stream_sums(self._link, self._keys, most_counted)
        seen["look_ms"] = round(1000 * (now_s() - began_s), 1)
        del seen["rules"], seen["behind"], seen["delivered"]
        self._by_name, self._told = seen.pop("by_name"), seen.pop("told")
        lowest = seen.pop("oldest")
        self._samples.append(sample_of(seen))
        del seen["read"]
        sent, done = rates(list(self._samples))
        told = {"oldest_ms": milliseconds(lowest) if lowest else None, "sent_per_second": sent, "done_per_second": done}
        return seen | told | {"delayed": seen["delayed"]["messages"]}

    def _look_at_tenants(self, now_ms: int, some_wait: bool) -> dict[str, tuple[int, float]]:
        """Return how many messages of each tenant are unfinished, and how many are handed over per second."""
        self._given.append((now_ms, self._by_tenant() if some_wait else {}))
        (before_ms, before), (_, now) = self._given[0], self._given[-1]
        seconds = max(0.001, (now_ms - before_ms) / 1000)
        since = {name: given - before.get(name, (0, given))[1] for name, (_, given) in now.items()}
        return {name: (now[name][0], max(0, count) / seconds) for name, count in since.items()}

    def _look_at_consumers(self, seen: dict[str, Any]) -> dict[str, str]:
        rules = self._rules = read_rules(self._link, self._keys)
        of_tickets = [rule for rule in rules.rules if rule.target is not Target.CONSUMER]
        broad = [rule.told() for rule in of_tickets if rule.target in _BROAD]
        held = {name.decode(errors="replace"): count for name, count in self._by_name.items()}
        rows = []
        for row in consumer_rows(self._link, self._keys, rules, held):
            left_ms, is_alive = row.pop("lease_ms"), row["state"] != "lost"
            beat_ms = max(0, self._lease_ms - left_ms) if is_alive else None
            tickets = self._tickets.owned_by(row["incarnation"])
            rows.append({"slots": None, "capacity": None} | row | {"beat_ms": beat_ms, "tickets": tickets})
        self._rows = rows
        states = {row["incarnation"]: str(row["state"]) for row in rows}
        seen["rules"], seen["broad_rules"] = len(of_tickets), broad
        seen["consumers"] = {state: list(states.values()).count(state) for state in STATES}
        seen["living"] = sum(seen["consumers"][state] for state in ("live", "paused", "draining"))
        return states


def _nothing_yet(keys: Keys) -> dict[str, Any]:
    unknown = (
        "entries lag pending parked halted tickets retrying dead_letters delayed living sent_per_second done_per_second"
        " write_trouble oldest_ms leader_url epoch"
    )
    known = {"time_ms": 0, "stream": keys.stream, "group": keys.group, "has_group": True, "lag_is_exact": True}
    rows: dict[str, Any] = {"mishaps": dict.fromkeys(MISHAPS, 0), "tenants": []}
    rows |= {"groups": [], "alarms": [], "letters": [], "look_ms": None}
    return {**dict.fromkeys(unknown.split()), **known, **rows}


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
    for run in decode_runs(record):
        ticket = run.ticket.encode()
        if ticket in wanted:
            facts = run._asdict()
            # A run log that also has executions that failed says so in their outcome.
            name = "completed" if run.outcome in (DONE, MERGED) else "attempt"
            # An execution that ended with its process could not say when.
            ended = {"time_ms": run.end_us // 1000 if run.end_us else milliseconds(entry_id)}
            ids = {"ticket_id": facts.pop("ticket"), "message_id": facts.pop("id")}
            yield Event(ticket, name, ids | ended | facts)


def followed_row(ticket: bytes, value: bytes | None, rule: Rule | None) -> dict[str, Any]:
    """Return a ticket as its followers see it. One without an owner is ``paused`` by a rule, though the index may know
    nothing of it, which has records only of what is handed over: its parked messages are not looked for, so that is
    said also when none waits."""
    row = {"message_ids": [], **ticket_row(ticket, value, rule)}
    return row | ({"rule": rule.told()} if rule is not None else {})


def changes(ticket: bytes, before: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Event]:
    """Yield what has changed between two rows of a ticket, as pages show them."""
    handed = before["message_ids"] if before.get("fence") == row.get("fence") else ()
    if row["state"] == TicketState.HANDED_OVER and (fresh := [one for one in row["message_ids"] if one not in handed]):
        facts = {name: row[name] for name in ("ticket_id", "owner", "consumer_name", "fence")}
        yield Event(ticket, "hand_over", {**facts, "message_ids": fresh})
    if (row["state"], row.get("rule")) != (before["state"], before.get("rule")):
        yield Event(ticket, "state", dict(row))


#: Seconds between two looks at the index for followed tickets.
_LOOK_S = 0.2
#: Seconds between two positions sent to a follower, so that it need not go back far, and to test its connection.
_POSITION_S = 10.0
#: Entries of a page.
_PAGE = 500
#: Bytes on their way to a follower, above which it gets no more of what it has missed: far below the bound at which it
#: counts as not reading.
_ENOUGH_BYTES = 65_536
_EMPTY_S = 5.0
#: Tickets whose rules are kept: a thousand patterns are not matched several times a second.
_RULED = 10_000


@dataclass(eq=False)
class Follower:
    """A follower of one ticket. ``position``: the last id it has of each source, None: what comes from now on is next;
    ``behind``: it came back, and has not everything yet; ``with_fields``: it may see the contents of messages."""

    ticket: bytes
    position: list[bytes] | None
    with_fields: bool
    behind: bool = False
    greeted: bool = False
    live: LiveStream = field(init=False)


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
        self._followers: dict[bytes, dict[Follower, None]] = {}
        self._seen: dict[bytes, Mapping[str, Any]] = {}  # the last row of each
        self._values: dict[bytes, tuple[bytes | None, str]] = {}  # the records and rules that _seen was made of
        self._book, self._rule_of = Rulebook(), lru_cache(_RULED)(Rulebook().of)
        self._look_at_s = 0.0
        self._positions_at_s = 0.0

    # -- from other threads

    def follow(self, who: str, ticket: bytes, position: list[bytes] | None, with_fields: bool) -> LiveStream:
        """Begin an answer with the events of ``ticket`` from now on, and first those missed since ``position``. Raises
        Problem."""
        follower = Follower(ticket, position, with_fields, behind=position is not None)
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
        if follower.behind:
            self.wake()

    def _post(self, what: str, follower: Follower) -> None:
        self._mailbox.append((what, follower))
        self.wake()

    # -- the turn

    def run_once(self) -> float:
        for _ in range(len(self._mailbox)):
            self._take(*self._mailbox.popleft())
        if not self._followers:
            self._seen.clear()
            self._values.clear()
            return _EMPTY_S
        more = [self._pass_on(group) for group in self._groups()]
        now = now_s()
        if now >= self._look_at_s:
            self._look_at_s = now + _LOOK_S
            self._look()
        if now >= self._positions_at_s:
            self._positions_at_s = now + _POSITION_S
            self._tell_positions()
        return 0.0 if any(more) else _LOOK_S

    def on_end(self) -> None:
        self._link.close()

    # -- its parts

    def _take(self, what: str, one: Follower) -> None:
        if what == "came":
            if not one.live.closed:
                self._followers.setdefault(one.ticket, {})[one] = None
                self._tell_again(one.ticket)
            return
        followers = self._followers.get(one.ticket, {})
        followers.pop(one, None)
        if not followers:
            self._followers.pop(one.ticket, None)
            self._seen.pop(one.ticket, None)
            self._values.pop(one.ticket, None)

    def _tell_again(self, ticket: bytes) -> None:
        """Let the next look, which is at once, send the state of a ticket, changed or not."""
        self._values.pop(ticket, None)
        self._look_at_s = 0.0

    def _groups(self) -> list[list[Follower]]:
        """Return the followers by their positions: most are where the streams end. Those that are behind get on as fast
        as they read."""
        everybody = [one for followers in self._followers.values() for one in followers]
        if fresh := [one for one in everybody if one.position is None]:
            ends = [bytes(facts.get(b"last-generated-id", ZERO)) for facts in self._facts()]
            for one in fresh:
                one.position = list(ends)
        groups = defaultdict[tuple[Any, ...], list[Follower]](list)
        for one in everybody:
            if not one.behind or one.live.unwritten <= _ENOUGH_BYTES:
                groups[(one.behind, *(one.position or ()))].append(one)
        return list(groups.values())

    def _pass_on(self, group: Sequence[Follower]) -> bool:
        """Send followers at one position what comes next: a page of each source, in the order of time, up to where all
        of them are known. Returns True when there is more to be read at once."""
        behind, position = group[0].behind, list(group[0].position or ())
        if behind and (
            gone := [at for at, facts in enumerate(self._facts()) if self._is_gone(at, position[at], facts)]
        ):
            for follower in group:
                # All that is there comes next; so the gap is sent once.
                follower.position = [ZERO if at in gone else last for at, last in enumerate(position)]
                self._send(follower, [_gap(follower.ticket, at, position[at]) for at in gone])
            return True
        asked = zip(self._streams, position, strict=True)
        replies = self._ask([("XRANGE", key, b"(" + last, "+", "COUNT", _PAGE) for key, last in asked])
        pages = [[Entry(*entry) for entry in page or ()] for page in replies]
        known_to = min((rank(page[-1].id) for page in pages if len(page) == _PAGE), default=math.inf)
        new = [(rank(entry.id), source, entry) for source, page in enumerate(pages) for entry in page]
        wanted = defaultdict[bytes, list[Follower]](list)
        for follower in group:
            wanted[follower.ticket].append(follower)
        for at, source, entry in sorted(new, key=lambda one: one[:2]):
            if at > known_to:
                break
            position[source] = entry.id
            self._dispatch(source, entry, wanted, position)
        for follower in [one for some in wanted.values() for one in some]:
            follower.position = list(position)
            if behind and known_to == math.inf:
                follower.behind = False
                self._tell_again(follower.ticket)
        return known_to < math.inf

    def _dispatch(
        self, source: int, entry: Entry, wanted: dict[bytes, list[Follower]], position: Sequence[bytes]
    ) -> None:
        """Send the events of an entry; who is behind and has enough on its way is wanted no more."""
        found = self._events(source, entry, wanted)
        for ticket in {one.ticket for one in found}:
            mine = [one for one in found if one.ticket == ticket]
            if source == RUNS and not wanted[ticket][0].behind:
                mine = [*self._handed_meanwhile(ticket, mine), *mine]
            for follower in wanted[ticket]:
                follower.position = list(position)
                self._send(follower, mine)
            wanted[ticket] = [one for one in wanted[ticket] if not one.behind or one.live.unwritten <= _ENOUGH_BYTES]
            if not wanted[ticket]:
                del wanted[ticket]

    def _events(self, source: int, entry: Entry, wanted: Any) -> list[Event]:
        try:
            return list(events_of(source, entry.id, entry.fields or (), self._field, wanted))
        except (ValueError, KeyError, TypeError):
            event("entry_unreadable", level=WARNING, source=SOURCES[source], entry=entry.id)
            return []

    def _handed_meanwhile(self, ticket: bytes, completed: Sequence[Event]) -> list[Event]:
        """Return the hand-overs of messages that were done before a look at the index has seen them."""
        handed = self._seen.get(ticket, {"message_ids": ()})["message_ids"]
        return [
            Event(
                ticket,
                "hand_over",
                {"ticket_id": ran["ticket_id"], "owner": ran["consumer"], "consumer_name": name_of(ran["consumer"])}
                | {"fence": ran["fence"], "time_ms": ran["start_us"] // 1000, "message_ids": [ran["message_id"]]},
            )
            for ran in (one.data for one in completed)
            if ran["message_id"] not in handed
        ]

    def _send(self, follower: Follower, events: Sequence[Event]) -> None:
        for one in events:
            one.data.setdefault("time_ms", wall_ms())
        events = events if follower.with_fields else list(map(without_fields, events))
        frames = [frame(one) for one in events[:-1]]
        frames += [frame(one, position_text(follower.position or ())) for one in events[-1:]]
        follower.live.send(b"".join(frames))

    def _is_gone(self, source: int, last: bytes, facts: Mapping[bytes, Any]) -> bool:
        """Return True when entries after ``last`` may be gone of a source with these facts; or all of an earlier stream
        of that name, which a position above all ids is from."""
        if last == ZERO:
            return False
        first, end = first_of(facts), facts.get(b"last-generated-id", ZERO)
        if first is None or rank(last) > rank(end):
            return rank(last) != rank(end)
        # The leader trims the work stream all the time, but its ids are numbered without gaps.
        numbers = [int(one.partition(b"-")[2]) for one in (last, first)]
        is_next = source == ENTRIES and self._field == SCOPED_TICKET_FIELD and numbers[1] == numbers[0] + 1
        return rank(first) > rank(last) and not is_next

    def _facts(self) -> list[dict[bytes, Any]]:
        return [pairs(facts or ()) for facts in self._ask([("XINFO", "STREAM", key) for key in self._streams])]

    def _ask(self, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
        """Return replies; None where there is no such stream, or none that can be read now."""
        replies = self._link.pipeline(commands)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, CommandRefused):
                raise reply
        return [None if isinstance(reply, CommandRefused) else reply for reply in replies]

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
            # Skip tickets that are as they were before: most are.
            looked = zip(some, held, strict=True)
            for ticket, now in looked:
                if self._values.get(ticket) != now:
                    self._values[ticket] = now
                    self._tell_state(ticket, followed_row(ticket, now[0], self._rule_of(ticket)))

    def _tell_state(self, ticket: bytes, row: Mapping[str, Any]) -> None:
        before, self._seen[ticket] = self._seen.get(ticket), row
        news = list(changes(ticket, before, row)) if before is not None else []
        for follower in self._followers[ticket]:
            if follower.behind:
                continue
            if not follower.greeted:
                follower.greeted = True
                self._send(follower, [Event(ticket, "state", dict(row))])
            elif news:
                self._send(follower, news)

    def _tell_positions(self) -> None:
        for followers in self._followers.values():
            for follower in followers:
                follower.live.send(f"id: {position_text(follower.position or ())}\n\n".encode())


def _gap(ticket: bytes, source: int, last: bytes) -> Event:
    facts = {"ticket_id": ticket.decode(errors="replace"), "time_ms": milliseconds(last)}
    return Event(ticket, "gap", facts | {"source": SOURCES[source], "after": last.decode()})
