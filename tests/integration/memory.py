"""A Redis whose memory is full: commands that would need more are refused with OOM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from usher import Link


@contextlib.contextmanager
def full_memory(link: Link) -> Iterator[None]:
    """Inside, the server has used up its ``maxmemory``."""
    link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        yield
    finally:
        link.call("CONFIG", "SET", "maxmemory", 0)
