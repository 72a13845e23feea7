"""The live overview: the state of the whole system for the page, read once for everybody who watches.

While a page is open, it is read once a second and closely: stuck tickets, live consumers. Otherwise it is read every
other second, in one round trip, so that a page finds a history when it opens; more rarely while nothing moves. Open
pages ask again every two seconds; that is how they learn in time that there is no news. ``usher stuck`` takes two
looks of its own.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import GroupMissing
from usher.common.doctor.judgements import INFO_COMMANDS, memory_share, write_trouble
from usher.common.protocol.attempts import Attempts, decode
from usher.common.protocol.keys import HALTED, MASTER, Keys
from usher.common.protocol.last_error import LastError
from usher.common.protocol.last_error import decode as decode_error
from usher.common.protocol.mishaps import Mishaps, losses_command, parse_losses
from usher.common.protocol.mishaps import told as told_of
from usher.common.protocol.stream_id import milliseconds, rank
from usher.common.redis.client import Link
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.service import Service
from usher.master.insight.formatting import ticket_url, visible
from usher.master.insight.stats import stream_sums, tickets_of
from usher.master.insight.status import consumer_rows
from usher.master.membership.registry import STATES
from usher.master.operations.live_rules import read_rules
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.board.plans import Parked
from usher.master.policy.explain.explain import (
    OK,
    Head,
    StuckContext,
    TicketGroups,
    alarms,
    describe,
    level_of,
    named_under_master,
    oldest,
    parse_head,
    since_ms,
    stuck_rows,
)
from usher.master.policy.letters import SUDDEN_MS
from usher.master.policy.rates import Sample, is_still, point, rates, sample_of
from usher.master.policy.rules import Rulebook, Target
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
                self._counting.add(describe(head, seen, now_ms))
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
        found = self._groups.merged(rows, self._under_master <= self._named, MOST)
        return [group | {"rows": list(map(_shown, group["rows"]))} for group in found]

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


#: Seconds between two looks: while a page is open, while none is, and while nothing moves either; and how long a page
#: counts as open after it was asked for.
_EVERY_S, _IDLE_EVERY_S, _STILL_EVERY_S, _LOOKS_FOR_S = 1.0, 2.0, 30.0, 10.0
#: Seconds that a page waits for a fresh look; a later one reaches it as an event anyway.
_PATIENCE_S = 0.2
#: Points of the history: ten to twenty minutes, or more where nothing moved.
_HISTORY = 600
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
        self._link, self._scripts, self._letters, self._keys = link, ScriptRunner(link), DeadLetters(link, keys), keys
        self._lease_ms, self._by_tenant = lease_ms, by_tenant
        self._given: deque[tuple[int, Mapping[str, tuple[int, int]]]] = deque(maxlen=5)
        self.queue: Queue | None = None
        #: Called while nobody looks: lists need not be kept.
        self.on_rest: Callable[[], None] = lambda: None
        self.at_once: float = 5_000  # records of the index looked at in a turn
        self._tickets = StuckTickets(link, keys, ticket_field, parked_of)
        self._samples: deque[Sample] = deque(maxlen=5)
        self._told: list[Any] = []  # what Redis said of the stream and its groups at the last look
        self._history: deque[list[float | None]] = deque(maxlen=_HISTORY)
        self._fresh = threading.Condition()
        self._looked_s = 0.0
        self._closely_s = self._watched_s = 0.0
        self._rows: dict[str, dict[str, Any]] = {}
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
        return [row for _, row in sorted(self._rows.items())]

    def history(self) -> list[list[float | None]]:
        """Return rows of (milliseconds, sent/s, done/s, lag, age of the oldest in s), oldest first; None where a value
        is unknown."""
        return list(self._history)

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
            has_troubles = bool(seen["retrying"] or seen["errors"])
            self._tickets.advance(self.at_once, has_troubles, states, self._rules, seen["time_ms"])
            for incarnation, row in self._rows.items():
                row["tickets"] = self._tickets.owned_by(incarnation)
            losses, *told = self._link.pipeline([losses_command(self._keys, _LOSSES), *INFO_COMMANDS])
            seen["losses"] = [told_of(loss) for loss in parse_losses(losses)]
            trouble, share = write_trouble(*told), memory_share(*told)
            seen["memory_share"] = None if share is None else round(share, 2)
            seen["write_trouble"] = None if trouble is None else trouble._asdict()
            rows = self._tickets.rows(states, self._rules, seen["time_ms"], self.queue)
            groups = self._tickets.groups(rows)
            seen["groups"] = [group | {"level": level_of(group, seen["time_ms"])} for group in groups]
            seen["stuck"] = rows
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
        """Return whether nothing has moved since the last look, and add that to the history: two commands tell."""
        if not is_still(self._samples):
            return False
        stream = self._keys.stream
        if self._link.pipeline([("XLEN", stream), ("XINFO", "GROUPS", stream)]) != self._told:
            return False
        now_ms, seen, self.queue = wall_ms(), self._snapshot, None
        self._samples.append(self._samples[-1]._replace(time_ms=now_ms))
        self._history.append(point(now_ms, *rates(list(self._samples)), seen["lag"], seen["oldest_ms"]))
        return True

    def _take_sample(self, most_counted: int) -> dict[str, Any]:
        began_s = now_s()
        seen = stream_sums(self._link, self._scripts, self._keys, most_counted)
        seen["look_ms"] = round(1000 * (now_s() - began_s), 1)
        del seen["rules"], seen["behind"], seen["delivered"]
        self._by_name, self._told = seen.pop("by_name"), seen.pop("told")
        lowest = seen.pop("oldest")
        self._samples.append(sample_of(seen))
        del seen["read"]
        sent, done = rates(list(self._samples))
        oldest_ms = milliseconds(lowest) if lowest else None
        self._history.append(point(seen["time_ms"], sent, done, seen["lag"], oldest_ms))
        told = {"oldest_ms": oldest_ms, "sent_per_second": sent, "done_per_second": done}
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
        rows = {}
        for row in consumer_rows(self._link, self._keys, rules, held):
            left_ms, is_alive = row.pop("lease_ms"), row["state"] != "lost"
            beat_ms = max(0, self._lease_ms - left_ms) if is_alive else None
            rows[row["incarnation"]] = {"slots": None, "capacity": None} | row | {"beat_ms": beat_ms}
            rows[row["incarnation"]]["tickets"] = self._tickets.owned_by(row["incarnation"])
        self._rows = rows
        states = {incarnation: str(row["state"]) for incarnation, row in rows.items()}
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
    rows: dict[str, Any] = {"mishaps": Mishaps()._asdict(), "tenants": []}
    rows |= {"stuck": [], "groups": [], "alarms": [], "letters": [], "look_ms": None}
    return {**dict.fromkeys(unknown.split()), **known, **rows}
