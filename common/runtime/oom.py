"""The kernel's count of processes that it has ended for want of memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_COUNTS = Path("/proc/vmstat")
_KILLS = re.compile(r"^oom_kill ([0-9]+)$", re.MULTILINE)


def oom_kills() -> int | None:
    """Return how many it were since the machine started, in all of its containers; None where the kernel does not
    say."""
    with contextlib.suppress(OSError):
        found = _KILLS.search(_COUNTS.read_text(encoding="ascii"))
        return int(found[1]) if found is not None else None
    return None
