"""Long leases: a lease that lasts longer than any that was given is of a clock of Redis that was set back since; it is
shortened to what may be left.

A consumer that lives renews its lease soon, so this is for one that died just before: its tickets, and its name, would
wait for as long as the step. To shorten it so is right whoever does it and whatever happens meanwhile: nobody believes
in its lease for longer than it was given for, and from now on that time runs. So it needs no script and no epoch.
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
    """``registrations``: read before. ``lease_ms``: what this master gives. Raises what ``Link.call`` raises."""
    if not registrations:
        return
    # What was given to these was noted before they were registered, and only grows.
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
            except CommandRefused:  # a user without the right
                return


def _longest_ms(generation: int, noted: bytes | None, since: bytes | None, lease_ms: int) -> int:
    """Longest life of the lease of an incarnation. Masters of a former version did not note what they gave.

    >>> _longest_ms(8, b"20000", b"7", 10_000), _longest_ms(6, b"20000", b"7", 10_000), _longest_ms(8, None, None, 10_000)
    (20000, 3600000, 3600000)
    """
    if noted is None or since is None or generation < int(since):
        return 1000 * LONGEST_OWNER_LEASE_S
    return max(int(noted), lease_ms)
