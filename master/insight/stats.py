"""How a ticket stream stands: how many entries its group has not read, and its other sums; the few numbers of it for
/metrics and for autoscalers; and the sign for producers that too much waits.

Read from Redis alone, in four round trips (before Redis 7.0 the lag is counted in some more), and kept for a moment,
so that the cost does not depend on how many ask.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Generic, NamedTuple, TypeVar

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import NotNow
from usher.common.base.log import WARNING, event
from usher.common.doctor.judgements import INFO_COMMANDS, memory_share, write_trouble
from usher.common.protocol.keys import HALTED, MASTER, Keys, LogKeys
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.mishaps import MISHAPS, parse_mishaps
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Arg, Link, checked
from usher.common.redis.replies import cut_at, found_entries, group_of, pairs
from usher.common.runtime.service import Service
from usher.master.leader.elector import Lead, parse_held
from usher.master.membership.registry import members_of, state_of
from usher.master.operations.live_rules import rulebook
from usher.master.operations.shelves import waiting_commands, waiting_of
from usher.master.policy.rules import RuleAction, Rulebook, Target

#: Entries counted by one call, where Redis does not know the lag (before 7.0); and entries whose tickets it reads.
_PAGE, _HEADS = 2000, 500


def lag_of(link: Link, stream: str, group: Mapping[bytes, Any] | None, entries: int, most: int) -> tuple[int, bool]:
    """Return the lag of a group with these facts (XINFO GROUPS; None: there is no group) on a stream of ``entries``;
    False: there are more. Where Redis does not know the lag, count up to about ``most``. Raises what ``Link.call``
    raises."""
    if group is None:
        return entries, True
    if group.get(b"lag") is not None:
        return int(group[b"lag"]), True
    counted, is_all, start = 0, True, b"(" + group[b"last-delivered-id"]
    for count, _, _, is_last in found_entries(link, "XRANGE", stream, start, "+", _PAGE, ""):
        counted, is_all = counted + count, is_last
        if counted >= most:
            break
    return counted, is_all


def _read(group: Mapping[bytes, Any] | None, cut: bytes | None) -> int | None:
    """Return how many entries the group was given: Redis counts those that were cut before as read."""
    read = None if group is None else group.get(b"entries-read")
    return None if group is None or read is None else int(read) - cut_at(cut, group[b"last-delivered-id"])[1]


def stream_sums(link: Link, keys: Keys, most: int) -> dict[str, Any]:
    """Read the sums of a stream in one round trip, plus those that it takes to count the lag up to ``most`` where Redis
    does not know it. ``by_name``: pending entries of each name in the group; ``oldest``: the id of the first one;
    ``delivered``: the last id that the group was given; ``behind``: who has so much waiting that producers are told to
    wait, ``<group>`` or ``<group>/<tenant>``."""
    counts: list[tuple[str, ...]] = [("XLEN", name) for name in (keys.stream, keys.dead)]
    counts += [("HLEN", name) for name in (keys.tickets, keys.attempts, keys.errors, keys.rules)]
    counts += [("GET", keys.leader), ("HGET", keys.counters, f"cut_at {keys.stream}"), ("GET", keys.taken)]
    of_group = [("XINFO", "GROUPS", keys.stream), ("XPENDING", keys.stream, keys.group)]
    more = [("HMGET", keys.counters, *MISHAPS), ("HGETALL", LogKeys(keys.stream).behind), *waiting_commands(keys)]
    replies = link.pipeline([*counts, *of_group, *more])
    checked(replies[: len(counts)])
    entries, dead, tickets, retrying, errors, rules, leader, cut, taken, groups, pending, *told_of = replies
    mishaps, behind, *delayed = told_of
    group, held = group_of(groups, keys.group, taken), parse_held(leader)
    total, lowest, _, owners = (0, None, None, ()) if isinstance(pending, Exception) else pending
    by_name = {bytes(name): int(count) for name, count in owners or ()}
    lag, is_exact = lag_of(link, keys.stream, group, entries, most)
    told = {} if isinstance(behind, Exception) else pairs(behind)
    seen: dict[str, Any] = {"time_ms": wall_ms(), "stream": keys.stream, "group": keys.group}
    seen |= {"has_group": group is not None, "leader_url": held.url, "epoch": held.epoch, "read": _read(group, cut)}
    seen |= {"delivered": bytes(group[b"last-delivered-id"]) if group else b"0-0"}
    seen |= {"entries": entries, "lag": lag, "lag_is_exact": is_exact, "tickets": tickets, "rules": rules}
    seen |= {"pending": total, "parked": by_name.get(MASTER, 0), "halted": by_name.get(HALTED, 0), "by_name": by_name}
    seen |= {"oldest": bytes(lowest) if lowest else None, "retrying": retrying, "errors": errors, "dead_letters": dead}
    seen |= {"delayed": waiting_of(*delayed), "mishaps": parse_mishaps(mishaps)}
    return seen | {"behind": {name.decode(errors="replace"): int(number) for name, number in told.items()}}


def tickets_of(link: Link, keys: Keys, field: str, ids: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield ids of entries with their tickets; those without one, or without a body, are left out."""
    ids = iter(ids)
    while some := list(islice(ids, _HEADS)):
        while some:  # fewer are answered where bodies are large
            values = link.run("read_fields", (keys.stream,), (LONGEST_TICKET, "", 1, field, *some))
            found = ((one, value) for one, (value,) in zip(some, values, strict=False) if value)
            yield from ((one, ticket) for one, (ticket, size) in found if size <= LONGEST_TICKET)
            some = some[len(values) :]


T = TypeVar("T")

#: Seconds for which an answer is kept.
_KEPT_S = 1.0
#: The most entries counted for the lag where Redis does not know it (before 7.0).
_MOST_COUNTED = 50_000


class Kept(Generic[T]):
    """Keeper of an answer for so many seconds, however many ask: who asks meanwhile waits for the same one."""

    def __init__(self, seconds: float, read: Callable[[], T]) -> None:
        self._seconds, self._read, self._lock = seconds, read, threading.Lock()
        self._known: tuple[float, T] | None = None

    def __call__(self) -> T:
        with self._lock:
            if self._known is None or now_s() - self._known[0] > self._seconds:
                found = self._read()
                self._known = (now_s(), found)
            return self._known[1]


class StreamStatsReader:
    """Reader of the sums of one stream at one moment (``stream_sums``), and of more of them: ``lag`` has what waits in
    the sources of a work stream, too (``sources``: ``StatusReader.sources``); ``unfinished``: lag and pending;
    ``takeable``: how many messages another consumer could take now: not those that run, wait for their time, a rule or
    an operator, or stand behind another of their ticket that runs, as the leader noted last.

    ``oldest_s``: age of the oldest unfinished message, by Redis' clock; 0: there is none. ``oldest_unheld_s``: the same
    without messages that wait for an operator: see ``_unheld``. ``late_s``: seconds since the first delayed message was
    due and not sent. ``consumers``: by name, each with its ``state`` (``usher.master.membership.registry.state_of``)
    and ``pending`` entries. ``refuses_writes``: memory or disk is full, or replicas are missing."""

    def __init__(self, link: Link, keys: Keys, sources: Callable[[], dict[str, Any] | None] = lambda: None) -> None:
        self._link, self._keys, self._sources = link, keys, sources
        self.read = Kept(_KEPT_S, self._read)

    def _read(self) -> dict[str, Any]:
        keys, link = self._keys, self._link
        seen = stream_sums(link, keys, _MOST_COUNTED)
        asked = [("TIME",), ("HGETALL", keys.consumers), ("HGETALL", keys.rules), ("HGET", keys.position, "takeable")]
        moment, stored, ruled, takeable = link.all_of(asked)
        rules, by_owner = rulebook(ruled), seen["by_name"]
        above = ("XRANGE", keys.stream, b"(" + seen["delivered"], "+", "COUNT", 1)
        *told, unread = link.pipeline([*INFO_COMMANDS, above])
        new, trouble = [entry[0] for entry in unread] if isinstance(unread, list) else [], write_trouble(*told)
        oldest = [*new, seen["oldest"]] if seen["oldest"] else new
        holds = {(rule.target is not Target.CONSUMER, rule.action) for rule in rules.rules}
        is_held = HALTED in by_owner or not holds.isdisjoint(((True, RuleAction.PAUSE), (True, RuleAction.SLOW)))
        unheld = self._unheld(new, by_owner, rules) if is_held else oldest
        sources = self._sources() or {"lag": 0, "lag_is_exact": True}
        now_ms, delayed = int(moment[0]) * 1000 + int(moment[1]) // 1000, seen["delayed"]
        # those that were cut unread count until the next is read
        lag = min(seen["lag"], seen["entries"]) + sources["lag"]
        seen |= {"lag": lag, "lag_is_exact": seen["lag_is_exact"] and sources["lag_is_exact"]}
        seen |= {"unfinished": lag + seen["pending"], "oldest_s": _age_s(oldest, now_ms)}
        known = lag + int(takeable) if isinstance(takeable, bytes) else seen["unfinished"]
        seen |= {"takeable": known, "oldest_unheld_s": _age_s(unheld, now_ms)}
        late_s = 0.0 if delayed["first_ms"] is None else max(0.0, (now_ms - delayed["first_ms"]) / 1000)
        seen |= {"refuses_writes": trouble is not None and trouble.is_certain, "memory_share": memory_share(*told)}
        members = sorted(members_of(link, keys, stored).items())
        seen["consumers"] = {
            one.registration.name: {"state": state_of(one, rules), "pending": by_owner.get(name.encode(), 0)}
            | {"slots": one.registration.slots}
            for name, one in members
        }
        return seen | {"late_s": late_s}

    def _unheld(self, new: list[bytes], by_owner: dict[bytes, int], rules: Rulebook) -> list[bytes]:
        """Return ids, among them the oldest that neither a halted ticket nor a rule holds back. Parked messages that
        are not held are unknown here; but one of them is behind an older message that is handed over, or waits for
        room, and then whatever takes the room is handed over."""
        owners = [name for name in by_owner if name not in (MASTER, HALTED)]
        pages = self._link.pipeline(
            [("XPENDING", self._keys.stream, self._keys.group, "-", "+", 1, name) for name in owners]
        )
        return ([] if rules.pauses_all else new) + [row[0] for page in pages if isinstance(page, list) for row in page]


def _age_s(ids: list[bytes], now_ms: int) -> float:
    """Return the age of the oldest of these entries, at least 0: an id that a producer made up may lie in the
    future."""
    if not ids:
        return 0.0
    return max(0.0, (now_ms - (min(map(rank, ids)) >> 64)) / 1000)


def lag_document(seen: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of ``GET /api/lag``: plain numbers on the top level, for KEDA's metrics-api scaler and the
    like."""
    live = [one for one in seen["consumers"].values() if one["state"] == "live"]
    names = ("lag", "lag_is_exact", "pending", "unfinished", "takeable")
    told = {name: seen[name] for name in names} | {"oldest_seconds": round(seen["oldest_s"], 3)}
    told |= {"consumers": len(live), "slots": sum(one["slots"] for one in live)}
    return told | {"time_ms": time.time_ns() // 1_000_000}


# -- rates, from samples


class Sample(NamedTuple):
    """Counts at a moment. ``lag`` None: not known exactly. ``read``: entries that the group was ever given, from Redis
    7.0 on."""

    time_ms: int
    entries: int
    lag: int | None
    pending: int
    read: int | None

    @property
    def sent(self) -> int | None:
        """Entries ever added, or those that the stream holds: only differences count."""
        return self.entries if self.read is None or self.lag is None else self.read + self.lag

    @property
    def done(self) -> int | None:
        if self.read is not None:
            return self.read - self.pending
        return None if self.lag is None else self.entries - self.lag - self.pending


def sample_of(seen: Mapping[str, Any]) -> Sample:
    lag = seen["lag"] if seen["lag_is_exact"] else None
    return Sample(seen["time_ms"], seen["entries"], lag, seen["pending"], seen["read"])


def rates(samples: Sequence[Sample]) -> tuple[float | None, float | None]:
    """Return (sent, done) per second over these samples; None where it is unknown.

    >>> rates([Sample(0, 100, 10, 5, None), Sample(2000, 300, 10, 5, None)])
    (100.0, 100.0)
    """
    if len(samples) < 2:
        return None, None
    first, last = samples[0], samples[-1]
    if (first.read is None, first.lag is None) != (last.read is None, last.lag is None):
        return None, None  # one counts all entries ever, the other those that are there
    seconds = max(0.001, (last.time_ms - first.time_ms) / 1000)
    return _per_second(first.sent, last.sent, seconds), _per_second(first.done, last.done, seconds)


def _per_second(first: int | None, last: int | None, seconds: float) -> float | None:
    """Return the difference per second; None also when the count went down: the stream was trimmed or made anew."""
    return None if first is None or last is None or last < first else round((last - first) / seconds, 1)


# -- who has so much waiting that producers are told to wait

#: Share of its limit below which one that was behind is so no more: else the sign would come and go with each message.
_FREE = 0.9


class BacklogLimits(NamedTuple):
    """Most messages that wait, of the stream and of each tenant; 0: no limit."""

    of_stream: int = 0
    of_tenant: int = 0

    def exceeded(self, waiting: int, tenants: Mapping[bytes, int], before: Mapping[bytes, int]) -> dict[bytes, int]:
        """Return who is behind, and with how many messages; b"" is the stream. ``before``: who was so until now.

        >>> BacklogLimits(100, 10).exceeded(95, {b"a": 10, b"b": 9}, {})
        {b'a': 10}
        >>> BacklogLimits(100, 10).exceeded(95, {b"a": 8, b"b": 9}, {b"": 100, b"b": 10})
        {b'': 95, b'b': 9}
        """
        counts = [(b"", waiting, self.of_stream)]
        counts += [(name, number, self.of_tenant) for name, number in tenants.items() if name]
        return {
            name: number
            for name, number, limit in counts
            if limit and number >= (limit * _FREE if name in before else limit)
        }


#: Seconds between two looks, and for which a sign lasts.
_EVERY_S, _LASTS_S = 1.0, 10.0
#: Tenants that a sign names at most, those with most first.
_MOST_TENANTS = 1000
#: Lines of the log about one look.
_TOLD = 10


class BacklogWatch(Service):
    """Tells producers that ask for it "not now" while more waits than the limits allow (USHER_BACKLOG_LIMIT,
    USHER_TENANT_BACKLOG_LIMIT), by one key, ``LogKeys.behind``, which any client may look at. It lasts for a few
    seconds: where no master leads any more it goes. ``waiting``: how many messages are unfinished; ``by_tenant``: of
    those that the leader has read."""

    name = "backlog"

    def __init__(
        self,
        link: Link,
        keys: Keys,
        lead: Lead,
        limits: BacklogLimits,
        waiting: Callable[[], int],
        by_tenant: Callable[[], Mapping[bytes, int]],
    ) -> None:
        super().__init__()
        self._link, self._keys, self._key = link, keys, LogKeys(keys.stream).behind
        self._lead, self._limits, self._waiting, self._by_tenant = lead, limits, waiting, by_tenant
        self.behind: dict[bytes, int] = {}
        self._said_s = 0.0

    def run_once(self) -> float:
        epoch = self._lead.epoch
        if epoch is None:
            self.behind = {}
            return _EVERY_S
        tenants = self._by_tenant() if self._limits.of_tenant else {}
        found = self._limits.exceeded(self._waiting(), tenants, self.behind)
        before, self.behind = self.behind, dict(sorted(found.items(), key=lambda one: -one[1])[:_MOST_TENANTS])
        for name in sorted(self.behind.keys() - before.keys())[:_TOLD]:
            event("backlog_limit_reached", level=WARNING, tenant=name, waiting=found[name])
        for name in sorted(before.keys() - self.behind.keys())[:_TOLD]:
            event("backlog_limit_left", level=WARNING, tenant=name)
        if self.behind or before or now_s() - self._said_s > _LASTS_S:
            self._say(epoch)
        return _EVERY_S

    def _say(self, epoch: int) -> None:
        """Tell producers; what other groups say stays. A sign never lasts without an end: so one that comes late, when
        another leads by then, does no harm."""
        key, group = self._key, self._keys.group.encode()
        now = {group + b"/" * bool(name) + name: number for name, number in self.behind.items()}
        try:
            held, told = self._link.all_of([("GET", self._keys.leader), ("HGETALL", key)])
            over = [one for one in told[::2] if (one == group or one.startswith(group + b"/")) and one not in now]
            signs = [("HSET", key, *chain.from_iterable(now.items())), ("PEXPIRE", key, int(_LASTS_S * 1000))]
            commands: list[tuple[Arg, ...]] = [("HDEL", key, *over)] * bool(over) + signs * bool(now)
            if parse_held(held).epoch == epoch:
                self._link.transaction(self._link.connections, commands)
        except NotNow as refused:  # full memory, which tells producers itself
            event("backlog_not_told", level=WARNING, why=str(refused))
        self._said_s = now_s()
