"""Limit the rate of requests by token buckets per credential and address (429 with Retry-After beyond).

The limits are for faulty programs, not for attackers with many addresses. A refused report of acknowledgements costs
only speed; a refused registration is retried.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from flask import g, request

from usher.common.base.clock import now_s
from usher.common.http.problem import Problem

#: Most buckets that are kept. A forgotten bucket is full again.
_MOST_BUCKETS = 10_000

View = TypeVar("View", bound=Callable[..., Any])


class KeyedTokenBuckets:
    """Token buckets by key; each fills at ``per_s`` up to ``most``, and every take removes one token. Called from
    several threads."""

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s = per_s
        self._most = max(1.0, most)
        # Guarded by self._lock: key -> level, and when it was so.
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

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


def rarely(view: View) -> View:
    """Decorate a view that is rarely needed: it also counts against the limit per minute."""
    view.usher_rarely = True  # type: ignore[attr-defined]
    return view


class RateLimits:
    """The limits: ``per_s`` requests of each credential from each address, and ``per_minute`` of them to views marked
    with ``rarely``."""

    def __init__(self, per_s: float, per_minute: float) -> None:
        self._all = KeyedTokenBuckets(per_s, per_s)
        self._rare = KeyedTokenBuckets(per_minute / 60, per_minute)

    def count(self, view: object) -> None:
        """Count the current request. Raises Problem 429."""
        key = (g.who, request.remote_addr)
        wait_s = self._all.take(key, now_s())
        if not wait_s and hasattr(view, "usher_rarely"):
            wait_s = self._rare.take(key, now_s())
        if wait_s:
            raise Problem(429, "too_many_requests", "ask less often", headers={"Retry-After": str(math.ceil(wait_s))})
