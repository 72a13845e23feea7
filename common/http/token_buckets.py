"""Token buckets by key, for limits per caller."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

#: Most buckets that are kept. A forgotten bucket is full again.
_MOST_BUCKETS = 10_000


class KeyedTokenBuckets:
    """Token buckets by key; each fills at ``per_s`` up to ``most``, and every take removes one token. Called from
    several threads."""

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s = per_s
        self._most = max(1.0, most)
        # Guarded by self._lock: key -> level, and when it was so.
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait_s(self, key: Hashable, now: float) -> float:
        """Return the seconds until a token is there; 0.0 when one is."""
        with self._lock:
            level, then = self._levels.get(key, (self._most, now))
        level = min(self._most, level + (now - then) * self._per_s)
        return 0.0 if level >= 1.0 else (1.0 - level) / self._per_s

    def take(self, key: Hashable, now: float) -> float:
        """Take a token; return 0.0 on success, else the seconds until one is there."""
        with self._lock:
            level, then = self._levels.pop(key, (self._most, now))
            level = min(self._most, level + (now - then) * self._per_s)
            taken = level >= 1.0
            self._levels[key] = (level - taken, now)
            if len(self._levels) > _MOST_BUCKETS:
                self._levels.popitem(last=False)
        return 0.0 if taken else (1.0 - level) / self._per_s
