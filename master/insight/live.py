"""Live views: what goes on, as it happens, from Redis alone, so that a standby can show it too.

The live overview is the state of the whole system for the page, read once for everybody who watches. While a page is
open, it is read once a second and closely: stuck tickets, live consumers. Otherwise it is read every four minutes, in
one round trip, so that a page finds rates when it opens. Open pages ask again every two seconds; that is how they
learn in time that there is no news. ``usher stuck`` takes two looks of its own.

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
from usher.master.insight.stats import Sample, rates, sample_of, stream_sums, tickets_of
from usher.master.insight.status import Scan, consumer_rows, look_at, ticket_row
from usher.master.membership.registry import STATES
from usher.master.operations.live_rules import read_rules
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.board.plans import Parked
from usher.master.policy.explain import (
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
from usher.master.policy.rules import Rule, Rulebook, Target
from usher.master.policy.states import Queue, Seen, TicketFilter

if TYPE_CHECKING:  # commands that look do without a web server
    from usher.common.http.answers import LiveStream, LiveStreams

#: Records read by one call; and the most entries that are looked at under ``master``, at first and where it goes on.
_COUNT, _PARKED, _FURTHER = 1000, 50, 500


@dataclass
class _Look:
    """The findings of one look at tickets. ``standing``: by ticket that stands still, its first message, and when that
    was seen to move on (0: never); ``named``: entries under ``master`` that records name."""

    groups: TicketGroups = field(default_factory=TicketGroups)
    standing: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    owned: Counter[bytes] = field(default_factory=Counter)
    named: int = 0


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
        self._cursor, self._scan, self._parked = b"0", _Look(), _Look()
        self._last: _Look | None = None  # None: the first full scan is not over

    def owned_by(self, incarnation: str) -> int | None:
        """Return how many tickets in processing the incarnation has, as of the last full scan; None before there was
        one."""
        return None if self._last is None else self._last.owned[incarnation.encode()]

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
        waiting, looked_at, self._now_ms = self._pending(), 0, now_ms
        while looked_at < most:
            self._cursor, flat = self._link.call("HSCAN", self._keys.tickets, self._cursor, "COUNT", _COUNT)
            looked_at += max(1, len(flat) // 2)
            scan = Scan(self._link, self._keys, pairs(flat))
            self._scan.owned.update(scan.words)
            for one in look_at(self._link, self._keys, scan, scan.readable, TicketFilter(), states):
                self._scan.named += one.under_master
                self._add(one, self._scan, self._last or _Look(), tickets <= most)
            if self._cursor == b"0":
                self._last, self._scan = self._scan, _Look()
                break
        found = self._last or self._scan
        parked = _Look(found.groups.copied())
        records = self._link.call("HMGET", self._keys.tickets, *waiting) if waiting else []
        alone = [ticket for ticket, record in zip(waiting, records, strict=True) if record is None]
        if not alone:  # all of these are put off, or behind others: look further the next time
            self._start = b"(" + self._reached if self._reached else b"-"
        for ticket in alone:
            rule = rules.of(ticket)
            seen = Seen(rule=rule, queue=queue.text if queue is not None and rule is None else "")
            one = Looked(ticket, b" 0 " + b" ".join(waiting[ticket]), seen, None)
            self._add(one, parked, self._parked, True, self._all_waiting)
        self._parked = parked
        return parked.groups.told(self._under_master <= found.named, self._last is not None)

    def _add(self, one: Looked, into: _Look, before: _Look, at_once: bool, are_all: bool = True) -> None:
        """Add a ticket if it is stuck. ``before``: the former look; ``at_once``: what it has not looked at is added,
        too; ``are_all``: no such tickets may be left out."""
        now_ms = self._now_ms
        first, (head, moved_ms) = one.head, before.standing.get(one.ticket, (b"", 0))
        moved_ms = now_ms if head not in (b"", first) else moved_ms
        since = since_ms(one, moved_ms, now_ms)
        if since == now_ms and not moved_ms:
            moved_ms = now_ms  # nobody knows since when: since it was seen
        is_old, at_once = now_ms - since >= STUCK_MS, at_once or one.seen.lease == "lost"
        if is_old or moved_ms:
            into.standing[one.ticket] = first, moved_ms
        if one.has_failed or (is_old and (head or at_once)):
            into.groups.add(describe(one, since, self._parked_of(one.ticket), now_ms), are_all)

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


#: Seconds between two looks: while a page is open, and while none is; how long a page counts as open after it was asked
#: for; and the age of a snapshot that is stale.
_EVERY_S, _IDLE_EVERY_S, _LOOKS_FOR_S, _STALE_S = 1.0, 240.0, 10.0, 4.0
#: Seconds that a page waits for a fresh look; a later one reaches it as an event anyway.
_PATIENCE_S = 0.2
#: Newest declared losses that are looked at, and tenants that are told of.
_LOSSES, _TENANTS = 10, 8
#: The most entries counted for the lag where Redis does not know it (before 7.0). Each one blocks Redis for 2 us.
_MOST_COUNTED = 20_000
_BROAD = (Target.STREAM, Target.EVERYTHING)


class LiveOverview(Service):
    """The service behind the live pages. ``parked_of``, ``by_tenant``: how much this master has parked of a ticket, and
    how many messages of each tenant are unfinished and were handed over so far, in memory, when it leads."""

    name = "pulse"
    stalls_after_s = _IDLE_EVERY_S + 60

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
        if not self._is_watched:
            self._watched_s = now_s()
            self.wake()
        self._looked_s = now_s()
        with self._fresh:
            if now_s() - self._closely_s > _STALE_S:
                self.wake()
                self._fresh.wait(patience_s if self._closely_s else 4 * patience_s)
            is_late = now_s() - max(self._closely_s, self._watched_s) > _STALE_S
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
        self.snapshot()
        return list(self._rows)

    @property
    def _is_watched(self) -> bool:
        return now_s() - self._looked_s < _LOOKS_FOR_S

    # -- the turn

    def run_once(self) -> float:
        began_s = now_s()
        if not self._is_watched:
            self._tickets.forget()
            self.on_rest()
            self.queue = None
            self._samples.clear()  # rates are those since the last look
            self._given.clear()
            self._look_at_tenants(self._take_sample())
            return _IDLE_EVERY_S
        seen = self._take_sample()
        tenants = self._look_at_tenants(seen)
        self.queue = Queue.of(seen, tenants)
        seen["queue"] = self.queue and self.queue._asdict() | {"text": self.queue.text}
        most = sorted(tenants.items(), key=lambda one: -one[1][0])[:_TENANTS]
        seen["tenants"] = [
            {"name": name, "waiting": waiting, "about_ms": 1000 * waiting / per_second if per_second else None}
            for name, (waiting, per_second) in most
            if waiting
        ]
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
            self._snapshot, self._closely_s = seen, now_s()
            self._fresh.notify_all()
        return max(0.05, _EVERY_S - (now_s() - began_s))

    def _take_sample(self) -> dict[str, Any]:
        began_s = now_s()
        seen = stream_sums(self._link, self._keys, _MOST_COUNTED)
        seen["look_ms"] = round(1000 * (now_s() - began_s), 1)
        del seen["rules"], seen["behind"], seen["delivered"]
        self._by_name, lowest = seen.pop("by_name"), seen.pop("oldest")
        self._samples.append(sample_of(seen))
        del seen["read"]
        sent, done = rates(list(self._samples))
        told = {"oldest_ms": milliseconds(lowest) if lowest else None, "sent_per_second": sent, "done_per_second": done}
        return seen | told | {"delayed": seen["delayed"]["messages"]}

    def _look_at_tenants(self, seen: Mapping[str, Any]) -> dict[str, tuple[int, float]]:
        """Return how many messages of each tenant are unfinished, and how many are handed over per second."""
        now_ms = seen["time_ms"]
        self._given.append((now_ms, self._by_tenant() if seen["parked"] else {}))
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
    """The service behind ``/events``. All its fields below ``_came`` belong to its thread."""

    name = "feed"

    def __init__(self, link: Link, keys: Keys, ticket_field: str, streams: LiveStreams) -> None:
        super().__init__()
        self._link, self._keys = link, keys
        self._streams = (keys.stream, keys.runs, keys.dead)
        self._field = ticket_field.encode()
        self._live = streams
        self._came = deque[Follower]()
        self._followers: list[Follower] = []
        self._seen: dict[bytes, Mapping[str, Any]] = {}  # by followed ticket, its row at the last look
        self._book, self._rule_of = Rulebook(), lru_cache(_RULED)(Rulebook().of)
        self._look_at_s = 0.0
        self._positions_at_s = 0.0

    # -- from other threads

    def follow(self, who: str, ticket: bytes, position: list[bytes] | None, with_fields: bool) -> LiveStream:
        """Begin an answer with the events of ``ticket`` from now on, and first those missed since ``position``. Raises
        Problem."""
        follower = Follower(ticket, position, with_fields, behind=position is not None)
        follower.live = self._live.open(who, self.wake, lambda: self.wake() if follower.behind else None)
        self._came.append(follower)
        self.wake()
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

    # -- the turn

    def run_once(self) -> float:
        while self._came:
            self._followers.append(self._came.popleft())
            self._look_at_s = 0.0
        self._followers = [one for one in self._followers if not one.live.closed]
        if not self._followers:
            self._seen = {}
            return _EMPTY_S
        more = [self._pass_on(group) for group in self._groups()]
        now = now_s()
        if now >= self._look_at_s:
            self._look_at_s = now + _LOOK_S
            self._look()
        if now >= self._positions_at_s:
            self._positions_at_s = now + _POSITION_S
            for one in self._followers:
                one.live.send(f"id: {position_text(one.position or ())}\n\n".encode())
        return 0.0 if any(more) else _LOOK_S

    def on_end(self) -> None:
        self._link.close()

    # -- its parts

    def _groups(self) -> list[list[Follower]]:
        """Return the followers by their positions: most are where the streams end. Those that are behind get on as fast
        as they read."""
        if fresh := [one for one in self._followers if one.position is None]:
            ends = [bytes(facts.get(b"last-generated-id", ZERO)) for facts in self._facts()]
            for one in fresh:
                one.position = list(ends)
        groups = defaultdict[tuple[Any, ...], list[Follower]](list)
        for one in self._followers:
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
                self._look_at_s = 0.0
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
        if not events:
            return
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
        """Send each follower the state of its ticket, and then what changes in it."""
        by_ticket, before = defaultdict[bytes, list[Follower]](list), self._seen
        for one in self._followers:
            by_ticket[one.ticket].append(one)
        values, version = self._link.all_of(
            [("HMGET", self._keys.tickets, *by_ticket), ("HGET", self._keys.counters, "rules")]
        )
        if (version or b"") != self._book.version:
            self._book = read_rules(self._link, self._keys)
            self._rule_of = lru_cache(_RULED)(self._book.of)
        self._seen = {
            ticket: followed_row(ticket, value, self._rule_of(ticket))
            for ticket, value in zip(by_ticket, values, strict=True)
        }
        for ticket, row in self._seen.items():
            news = list(changes(ticket, before[ticket], row)) if ticket in before else []
            for one in by_ticket[ticket]:
                if not one.behind:
                    self._send(one, news if one.greeted else [Event(ticket, "state", dict(row))])
                    one.greeted = True


def _gap(ticket: bytes, source: int, last: bytes) -> Event:
    facts = {"ticket_id": ticket.decode(errors="replace"), "time_ms": milliseconds(last)}
    return Event(ticket, "gap", facts | {"source": SOURCES[source], "after": last.decode()})
