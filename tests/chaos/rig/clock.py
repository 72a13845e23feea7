"""A clock of Redis that can be set: a small library between the server and libc, compiled on this machine."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")


def compiler() -> str:
    """The C compiler of this machine; "" if there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or ""


class SteppedClock:
    """The clock of one server. ``environ`` is for its process; ``step`` sets it at once, as a person or NTP may."""

    def __init__(self, folder: Path) -> None:
        library, self._file = folder / "clock.so", folder / "clock"
        subprocess.run(
            [compiler(), "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE)], check=True, capture_output=True
        )
        self.ahead_s = 0
        self._file.write_bytes(struct.pack("l", 0))
        self.environ: Mapping[str, str] = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """Set it forward, or back."""
        self.ahead_s += seconds
        descriptor = os.open(self._file, os.O_WRONLY)
        try:
            os.pwrite(descriptor, struct.pack("l", self.ahead_s), 0)  # one write: the server never sees half of it
        finally:
            os.close(descriptor)
