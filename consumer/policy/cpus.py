"""The choice of the CPU that a consumer keeps to (USHER_PIN_CPU)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection


def cpu_for(name: str, allowed: Collection[int]) -> int:
    """Return one of the CPUs that the consumer may use, ``allowed`` (not empty): consumer-1 gets the first, consumer-2
    the second, and so on in a circle, so that numbered consumers of one host share no CPU while there are enough. A
    name without a number gets any, always the same."""
    number = re.search(r"[0-9]+$", name)
    place = int(number[0]) - 1 if number else zlib.crc32(name.encode())
    return sorted(allowed)[place % len(allowed)]
