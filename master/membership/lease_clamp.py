"""Lease clamp: shortens leases that last longer than any that was given. The clock of Redis was set back since they
were given; they get the longest time that may be left.

A living consumer renews its lease soon, so this is for one that died just before: its tickets, and its name, would wait
for as long as the clock was set back. Shortening is right whoever does it and whatever happens meanwhile: nobody trusts
the lease for longer than it was given for, and from now on that time runs. So it needs no script and no epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from usher.common.base.log import event
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import Registration
from usher.common.redis.client import CommandRefused, Link
from usher.common.runtime.settings import LONGEST_OWNER_LEASE_S

log = logging.getLogger(__name__)


def clamp_leases(link: Link, keys: Keys, registrations: Sequence[Registration], lease_ms: int) -> None:
    """Clamp the leases of these registrations, which were read before. ``lease_ms``: the lease that this master gives.
    Raises what ``Link.call`` raises."""
    if not registrations:
        return
    # The longest lease was noted before these were registered, and only grows.
    commands = [
        ("HMGET", keys.counters, "lease", "lease_since"),
        *(("PTTL", keys.lease(one.incarnation)) for one in registrations),
    ]
    (noted, since), *left = link.all_of(commands)
    for registration, left_ms in zip(registrations, left, strict=True):
        longest_ms = _longest_ms(registration.generation, noted, since, lease_ms)
        if left_ms > longest_ms:
            event(
                log,
                "lease_too_long",
                level=logging.WARNING,
                consumer=registration.incarnation,
                left_ms=left_ms,
                longest_ms=longest_ms,
            )
            try:
                link.call("PEXPIRE", keys.lease(registration.incarnation), longest_ms)
            except CommandRefused:  # this user lacks the right
                return


def _longest_ms(generation: int, noted: bytes | None, since: bytes | None, lease_ms: int) -> int:
    """Return the longest life, in ms, of the lease of an incarnation. Masters of a former version did not note what
    they gave.

    >>> _longest_ms(8, b"20000", b"7", 10_000), _longest_ms(6, b"20000", b"7", 10_000)
    (20000, 3600000)
    >>> _longest_ms(8, None, None, 10_000)
    3600000
    """
    if noted is None or since is None or generation < int(since):
        return 1000 * LONGEST_OWNER_LEASE_S
    return max(int(noted), lease_ms)
