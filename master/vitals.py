"""Vitals: the few numbers that say how a ticket stream is, for /metrics and for whoever scales consumers.

Read from Redis alone, in two round trips (before Redis 7.0 the lag is counted in some more), and kept for a moment, so that it costs
the same however many ask.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from common.clock import now_s
from common.errors import GroupMissing
from common.keys import HALTED, MASTER, Keys
from common.redis_client import CommandRefused, Link
from common.registration import parse
from common.scripts import ScriptRunner
from common.stream_id import rank
from common.streams import pairs

#: How long an answer is good for.
_KEPT_S = 1.0
#: Entries counted for the lag where Redis does not know it (before 7.0), at most.
_MOST_COUNTED = 50_000
_PAGE = 5000


@dataclass(frozen=True)
class Load:
    """A registered consumer: ``state`` is live, draining, revoked or lost; ``pending`` its entries that are not acknowledged."""

    state: str
    pending: int
    slots: int
    capacity: int


@dataclass(frozen=True)
class Vitals:
    """Sums of one stream at one moment. ``lag``: entries not yet read by the group, at least that many unless ``lag_is_exact``.

    ``oldest_s``: age of the oldest message that is not done, by Redis' clock; 0: there is none. ``consumers``: by name.
    """

    entries: int = 0
    lag: int = 0
    lag_is_exact: bool = True
    pending: int = 0
    parked: int = 0
    halted: int = 0
    tickets: int = 0
    tried_before: int = 0
    dead_letters: int = 0
    oldest_s: float = 0.0
    led: bool = False
    consumers: dict[str, Load] = field(default_factory=dict)

    @property
    def handed_over(self) -> int:
        """Pending for consumers."""
        return max(0, self.pending - self.parked - self.halted)

    @property
    def unfinished(self) -> int:
        """All that is not done and not given up."""
        return self.lag + self.pending


class VitalsReader:
    """Reads them over a link of its own. May be used by many threads, one at a time."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link  # guarded by self._lock, and all below
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self._lock = threading.Lock()
        self._kept: tuple[float, Vitals] | None = None

    def read(self) -> Vitals:
        """The vitals of this second. Raises RedisTrouble."""
        with self._lock:
            if self._kept is None or now_s() - self._kept[0] > _KEPT_S:
                vitals = self._read()
                self._kept = (now_s(), vitals)
            return self._kept[1]

    def close(self) -> None:
        self._link.close()

    def _read(self) -> Vitals:
        keys = self._keys
        commands = [
            *(("XLEN", keys.stream), ("HLEN", keys.tickets), ("HLEN", keys.attempts), ("XLEN", keys.dead), ("EXISTS", keys.leader)),
            *(("TIME",), ("HGETALL", keys.consumers), ("XINFO", "GROUPS", keys.stream), ("XPENDING", keys.stream, keys.group)),
        ]
        *counts, moment, stored, groups, pending = self._link.pipeline(commands)
        for reply in (*counts, moment, stored):
            if isinstance(reply, Exception):
                raise reply
        entries, tickets, tried_before, dead, led = counts
        group = self._group(groups)
        summary = None if isinstance(pending, Exception) else pending
        by_owner = {name: int(count) for name, count in (summary[3] or ())} if summary else {}
        registered = _registered(stored)
        last = group[b"last-delivered-id"] if group else b"0-0"
        leases = [("GET", keys.lease(incarnation)) for incarnation, _, _, _ in registered]
        unread, *states = self._link.pipeline([("XRANGE", keys.stream, b"(" + last, "+", "COUNT", 1), *leases])
        oldest = [entry[0] for entry in unread] if isinstance(unread, list) else []
        if summary and summary[0]:
            oldest.append(summary[1])
        lag, exact = self._lag(group, entries, bool(oldest and isinstance(unread, list) and unread))
        now_ms = int(moment[0]) * 1000 + int(moment[1]) // 1000
        return Vitals(
            *(entries, lag, exact, summary[0] if summary else 0, by_owner.get(MASTER, 0), by_owner.get(HALTED, 0)),
            *(tickets, tried_before, dead, _age_s(oldest, now_ms), bool(led), _loads(registered, states, by_owner)),
        )

    def _group(self, groups: Any) -> dict[bytes, Any] | None:
        """Our group's facts; None while there is no stream, or no such group."""
        if isinstance(groups, (CommandRefused, GroupMissing)):
            return None
        if isinstance(groups, Exception):
            raise groups
        return next((facts for facts in map(pairs, groups) if facts[b"name"] == self._keys.group.encode()), None)

    def _lag(self, group: dict[bytes, Any] | None, entries: int, is_some: bool) -> tuple[int, bool]:
        if group is None:
            return entries, True
        if group.get(b"lag") is not None:
            return int(group[b"lag"]), True
        counted, last = 0, group[b"last-delivered-id"]
        while is_some and counted < _MOST_COUNTED:
            count, last = self._scripts.run("count_above", (self._keys.stream,), (last, _PAGE))
            counted += count
            is_some = count == _PAGE
        return counted, not is_some


def _registered(stored: Any) -> list[tuple[str, str, int, int]]:
    """(incarnation, name, slots, capacity) of everybody registered, by name; who cannot be read is left out (the roster logs that)."""
    found = []
    for name, value in pairs(stored).items():
        try:
            one = parse(name, value)
        except ValueError:
            continue
        found.append((one.incarnation, one.name, one.slots, one.capacity))
    return sorted(found, key=lambda row: row[1])


def _loads(registered: list[tuple[str, str, int, int]], states: list[Any], by_owner: dict[bytes, int]) -> dict[str, Load]:
    loads = {}
    for (incarnation, name, slots, capacity), state in zip(registered, states, strict=True):
        if isinstance(state, Exception):
            raise state
        loads[name] = Load((state or b"lost").decode(), by_owner.get(incarnation.encode(), 0), slots, capacity)
    return loads


def _age_s(ids: list[bytes], now_ms: int) -> float:
    """Age of the oldest of these entries; an id that somebody made up may lie in the future."""
    if not ids:
        return 0.0
    return max(0.0, (now_ms - (min(map(rank, ids)) >> 64)) / 1000)


def lag_document(vitals: Vitals) -> dict[str, Any]:
    """What ``GET /api/lag`` answers: plain numbers on the top level, for KEDA's metrics-api scaler and the like."""
    live = [load for load in vitals.consumers.values() if load.state == "live"]
    return {
        "lag": vitals.lag,
        "lag_is_exact": vitals.lag_is_exact,
        "pending": vitals.pending,
        "unfinished": vitals.unfinished,
        "oldest_seconds": round(vitals.oldest_s, 3),
        "consumers": len(live),
        "slots": sum(load.slots for load in live),
        "time_ms": time.time_ns() // 1_000_000,
    }
