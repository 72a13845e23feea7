"""How often somebody may ask: token buckets per credential and address (429 with Retry-After beyond).

They are there for programs gone wrong, not for whoever means harm and has many addresses. A report of acknowledgements
that is refused costs speed only, a registration is tried again.
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

#: KeyedTokenBuckets that are kept. One that was forgotten is full again.
_MOST_BUCKETS = 10_000

View = TypeVar("View", bound=Callable[..., Any])


class KeyedTokenBuckets:
    """A bucket per key; it fills at ``per_s`` up to ``most``, and every take empties it by one. Called from several
    threads."""

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s = per_s
        self._most = max(1.0, most)
        self._levels: OrderedDict[Hashable, tuple[float, float]] = (
            OrderedDict()
        )  # key -> level, when; guarded by self._lock
        self._lock = threading.Lock()

    def take(self, key: Hashable, now: float) -> float:
        """0.0 when one could be taken, else the seconds until one can be."""
        with self._lock:
            level, then = self._levels.pop(key, (self._most, now))
            level = min(self._most, level + (now - then) * self._per_s)
            taken = level >= 1.0
            self._levels[key] = (level - taken, now)
            if len(self._levels) > _MOST_BUCKETS:
                self._levels.popitem(last=False)
        return 0.0 if taken else (1.0 - level) / self._per_s


def rarely(view: View) -> View:
    """Decorator of a view that is asked for seldom: it counts against the limit per minute as well."""
    view.usher_rarely = True  # type: ignore[attr-defined]
    return view


class RateLimits:
    """``per_s`` requests of each credential from each address, of these ``per_minute`` to views that are marked with
    ``rarely``."""

    def __init__(self, per_s: float, per_minute: float) -> None:
        self._all = KeyedTokenBuckets(per_s, per_s)
        self._rare = KeyedTokenBuckets(per_minute / 60, per_minute)

    def count(self, view: object) -> None:
        """Count the request that is being answered. Raises Problem 429."""
        key = (g.who, request.remote_addr)
        wait_s = self._all.take(key, now_s())
        if not wait_s and hasattr(view, "usher_rarely"):
            wait_s = self._rare.take(key, now_s())
        if wait_s:
            raise Problem(429, "too_many_requests", "ask less often", headers={"Retry-After": str(math.ceil(wait_s))})
