"""Clocks, and chance. Decisions get the time as an argument; only loops read one."""

from __future__ import annotations

import random
import time

#: CLOCK_BOOTTIME counts suspend, CLOCK_MONOTONIC does not: a lease must run on while the machine sleeps.
_LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Return seconds on a clock that never goes back and counts suspend; comparable between processes of one machine
    and boot."""
    return time.clock_gettime(_LEASE_CLOCK)


def moment_ns() -> int:
    return time.clock_gettime_ns(_LEASE_CLOCK)


#: Of pauses, say: nobody's seed makes two processes alike, and no fork does.
CHANCE = random.SystemRandom()
#: What the wall clock was ahead of that clock when this owner began, and looked at it, once for all its runs.
_ahead_ns = time.time_ns() - moment_ns()


def anchor() -> None:
    global _ahead_ns
    _ahead_ns = time.time_ns() - moment_ns()


def run_us() -> int:
    """Return microseconds since the epoch for the times of runs. They never go back: who sets the clock moves no run of
    an owner beside another one of it, so how far an owner's clock is ahead of Redis' is one number."""
    return (time.clock_gettime_ns(_LEASE_CLOCK) + _ahead_ns) // 1000


def wall_ms() -> int:
    """Return milliseconds since the epoch, for people and records; never for deadlines."""
    return time.time_ns() // 1_000_000
