"""Check Redis at the start of a long-running program."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, RedisTrouble, StartRefused
from usher.common.base.log import event
from usher.common.redis.client import AUTH, REFUSED, Link, check_reachable

log = logging.getLogger(__name__)

#: Round trips that a lease must outlast. Its first renewal goes over a new connection (TCP, TLS, password, name, two
#: questions about the server) and sends its script twice.
_ROUND_TRIPS = 12
_PINGS = 5


def check_at_start(url: str, leases_s: Mapping[str, float]) -> None:
    """Call ``check_reachable``, but only log a Redis that is away: it may come up later than the program, which until
    then is alive and not ready. ``leases_s``: the leases that the program is to keep there, by setting.

    Raises StartRefused for faults that waiting does not mend: Redis refuses us, is too old, or too far for a lease.
    """
    try:
        check_reachable(url)
    except StartRefused as refused:
        cause = refused.__cause__
        if not isinstance(cause, NotNow) or cause.kind in (AUTH, REFUSED):
            raise
        event(log, "redis_unreachable", level=logging.WARNING, why=str(refused), means="waiting for it")
        return
    with contextlib.suppress(RedisTrouble):
        check_leases(url, leases_s)


def check_leases(url: str, leases_s: Mapping[str, float]) -> None:
    """Raise StartRefused unless Redis is near enough to keep these leases, by setting; RedisTrouble when it is away."""
    link, took_s = Link(url, "usher:check"), []
    try:
        link.call("PING")
        for _ in range(_PINGS):
            sent_s = now_s()
            link.call("PING")
            took_s.append(now_s() - sent_s)
    finally:
        link.close()
    for setting, lease_s in leases_s.items():
        if (shortest_s := _ROUND_TRIPS * min(took_s)) > lease_s:
            raise StartRefused(
                f"{setting}: a lease of {lease_s:g} s would be lost before it is renewed: the way to Redis and back"
                f" takes {1000 * min(took_s):.0f} ms here, and a lease must last {_ROUND_TRIPS} times as long: set"
                f" {max(shortest_s, 0.1):.1f} or more"
            )
