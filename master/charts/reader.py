"""Read the charts, on any master."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.policy import charts
from usher.master.policy.charts import RINGS, Ring


class ChartSpan(NamedTuple):
    """A length of time that is shown, and the ring that has its points."""

    label: str
    ring: Ring
    length_ms: int


SPANS = {
    "1h": ChartSpan("1 hour", RINGS[0], 3_600_000),
    "24h": ChartSpan("24 hours", RINGS[1], 86_400_000),
    "7d": ChartSpan("7 days", RINGS[2], 7 * 86_400_000),
}


class ChartReader:
    """Reads the points of one ticket stream over a link of its own. Safe for many threads, one at a time."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link  # guarded by the lock
        self._keys = keys
        self._lock = threading.Lock()

    def read(self, span: ChartSpan) -> tuple[int, list[dict[str, Any]]]:
        """Return Redis' time in ms, and the points of this span up to then, oldest first. Raises RedisTrouble."""
        with self._lock:
            moment = self._link.call("TIME")
            now_ms = int(moment[0]) * 1000 + int(moment[1]) // 1000
            since_ms = now_ms - span.length_ms
            fields = span.ring.fields(since_ms, now_ms)
            values = self._link.call("HMGET", self._keys.charts, *fields)
        found = [one for value in values if (one := charts.decode(value)) is not None]
        return now_ms, sorted(
            (one for one in found if span.ring.begin(since_ms) <= one["t"] <= now_ms), key=lambda one: int(one["t"])
        )

    def close(self) -> None:
        self._link.close()
