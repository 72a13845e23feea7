"""Limit the rate of requests by token buckets per credential and address, that of guesses per address (429 with
Retry-After beyond), and that of lines in the log about them.

The limits are for faulty programs, not for attackers with many addresses. A refused report of acknowledgements costs
only speed; a refused registration is retried.
"""

from __future__ import annotations

import ipaddress
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from flask import g

from usher.common.base.clock import now_s
from usher.common.http.problem import Problem
from usher.common.http.proxies import parse_address

#: Most buckets that are kept. A forgotten bucket is full again.
_MOST_BUCKETS = 10_000
#: Wrong tokens of an address that are looked up at once, and then in a second; and the most tokens that are remembered.
GUESSES_AT_ONCE, _GUESSES_PER_S, _MOST_HEARD = 60, 1.0, 10_000
#: Lines about wrong tokens of an address, and of all addresses: so many at once, and then in a second.
LINES_AT_ONCE, _LINES_PER_S, LINES_OF_ALL_AT_ONCE, _LINES_OF_ALL_PER_S = 10, 0.1, 60, 1.0
#: Whoever has an address of IPv6 has a network of them, of at least this length.
_OWN_NETWORK = 64

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

    def put_back(self, key: Hashable) -> None:
        """Put back a token that was taken."""
        with self._lock:
            if key in self._levels:
                level, then = self._levels[key]
                self._levels[key] = (min(self._most, level + 1.0), then)

    def left(self, key: Hashable, now: float) -> int:
        """Return how many tokens there are."""
        with self._lock:
            level, then = self._levels.get(key, (self._most, now))
            return int(min(self._most, level + (now - then) * self._per_s))


class GuessLimit:
    """The limit of wrong tokens by address: beyond it, no further token from there is looked up, right or wrong. Called
    from several threads.

    Free are those that were looked up before: what was right from there goes on, and a program with an old token, which
    sends it again and again, uses nothing up. So who shares an address with others can go on guessing what those use:
    the length of tokens is what protects them.
    """

    def __init__(self) -> None:
        self._buckets = KeyedTokenBuckets(_GUESSES_PER_S, GUESSES_AT_ONCE)
        self._lock = threading.Lock()
        # Guarded by self._lock: (network, seal of the token); apart, so that guesses push out no right ones.
        self._right, self._wrong = (OrderedDict[tuple[Hashable, str], None]() for _ in range(2))

    def ask(self, address: str, seal: str) -> float | None:
        """Return the seconds until a token may be looked up, 0.0: now, and None: now, and it is free. What is looked up
        is ``note``d."""
        place = _network(address)
        with self._lock:
            for heard in (self._right, self._wrong):
                if (place, seal) in heard:
                    heard.move_to_end((place, seal))
                    return None
        return self._buckets.take(place, now_s())

    def note(self, address: str, seal: str, *, is_right: bool, was_free: bool) -> int:
        """Note what was looked up. Return how many wrong ones more from there are looked up at once."""
        place = _network(address)
        if is_right and not was_free:
            self._buckets.put_back(place)
        with self._lock:
            heard = self._right if is_right else self._wrong
            heard[place, seal] = None
            if len(heard) > _MOST_HEARD:
                heard.popitem(last=False)
        return self._buckets.left(place, now_s())


class Refusals:
    """The number of refusals, and which of them the log tells of: the first ones of each address, and few in all,
    however many come. Called from several threads."""

    def __init__(self) -> None:
        self._lines = KeyedTokenBuckets(_LINES_PER_S, LINES_AT_ONCE)
        self._lines_of_all = KeyedTokenBuckets(_LINES_OF_ALL_PER_S, LINES_OF_ALL_AT_ONCE)
        self._lock = threading.Lock()
        self.number = 0  # Guarded by self._lock; as is
        self._told = 0  # how many there were when a line was written.

    def count(self) -> None:
        """Count one that has no line of its own; the next line has it among those that were left out."""
        with self._lock:
            self.number += 1

    def tell(self, address: str) -> int | None:
        """Count one. Return None if no line is to tell of it, else how many before it were left out."""
        now = now_s()
        may = not self._lines.take(_network(address), now) and not self._lines_of_all.take("", now)
        with self._lock:
            self.number += 1
            left_out = self.number - self._told - 1
            self._told = self.number if may else self._told
        return left_out if may else None


def _network(address: str) -> Hashable:
    """Return what the one who has the address has others of, too.

    >>> _network("2001:db8::1:2"), _network("10.0.0.1")
    (IPv6Network('2001:db8::/64'), '10.0.0.1')
    """
    found = parse_address(address)
    return address if found is None or found.version == 4 else ipaddress.ip_network((found, _OWN_NETWORK), strict=False)


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
        key = (g.who, g.address)
        wait_s = self._all.take(key, now_s())
        if not wait_s and hasattr(view, "usher_rarely"):
            wait_s = self._rare.take(key, now_s())
        if wait_s:
            raise Problem(429, "too_many_requests", "ask less often", headers={"Retry-After": str(math.ceil(wait_s))})
