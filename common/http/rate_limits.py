"""Limit the rate of requests by token buckets per credential and address (429 with Retry-After beyond).

The limits are for faulty programs, not for attackers with many addresses. A refused report of acknowledgements costs
only speed; a refused registration is retried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from flask import g, request

from usher.common.base.clock import now_s
from usher.common.http.problem import Problem
from usher.common.http.token_buckets import KeyedTokenBuckets

View = TypeVar("View", bound=Callable[..., Any])


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
