"""Writing a history: one JSON object per line, one ``write`` per line, appended, so that a writer may be killed at any
moment."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_ns() -> int:
    """Nanoseconds on the one clock of all records: comparable between processes, never back, counts suspend."""
    return time.clock_gettime_ns(_CLOCK)


class HistoryWriter:
    """Appends records to the history. May be used by many threads and many processes at a time."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, k: str, **facts: Any) -> None:
        os.write(self._descriptor, (json.dumps({"k": k, **facts}) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)
