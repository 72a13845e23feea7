"""Memory as the kernel sees it: how much there is, and how often it has ended a process for want of it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_COUNTS = Path("/proc/vmstat")
_KILLS = re.compile(r"^oom_kill ([0-9]+)$", re.MULTILINE)
#: The limit of this container, by cgroups of version 2 and 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def oom_kills() -> int | None:
    """Return how many it were since the machine started, in all of its containers; None where the kernel does not
    say."""
    with contextlib.suppress(OSError):
        found = _KILLS.search(_COUNTS.read_text(encoding="ascii"))
        return int(found[1]) if found is not None else None
    return None


def memory_of_machine() -> int:
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits)
