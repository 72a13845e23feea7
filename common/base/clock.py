"""Clocks. Decisions get the time as an argument; only loops read one."""

from __future__ import annotations

import time

#: CLOCK_BOOTTIME counts suspend, CLOCK_MONOTONIC does not: a lease must run on while the machine sleeps.
_LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Return seconds on a clock that never goes back and counts suspend; comparable between processes of one machine
    and boot."""
    return time.clock_gettime(_LEASE_CLOCK)


def moment_ns() -> int:
    return time.clock_gettime_ns(_LEASE_CLOCK)


def wall_ms() -> int:
    """Return milliseconds since the epoch, for people and records; never for deadlines."""
    return time.time_ns() // 1_000_000
