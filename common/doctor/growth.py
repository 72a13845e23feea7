"""Tell how full Redis' memory is, how fast the ticket stream grows, and for how long there is room. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

#: Share of the memory from which it is time to act; when all of it is used, sends are refused.
NEARLY_FULL = 0.8
_DAY_S = 86_400
#: Shortest time over which a rate says anything.
_LEAST_MS = 60_000


class MemoryUse(NamedTuple):
    """Bytes used, and the most there may be: maxmemory, else the memory of the machine (``is_set`` False)."""

    used: int
    limit: int
    is_set: bool

    @property
    def share(self) -> float:
        return self.used / self.limit


class Growth(NamedTuple):
    """Entries per second, bytes of each, and the days until memory is full if none of them goes; None: not known."""

    per_second: float
    entry_bytes: float | None
    days_left: float | None

    @property
    def bytes_per_day(self) -> float:
        return _DAY_S * self.per_second * (self.entry_bytes or 0.0)


def info_lines(reply: bytes) -> dict[str, str]:
    """Return the ``name:value`` lines of INFO and CLUSTER INFO.

    >>> info_lines(b"# Memory\\r\\nmaxmemory:0\\r\\n")
    {'maxmemory': '0'}
    """
    return dict(line.split(":", 1) for line in reply.decode(errors="replace").splitlines() if ":" in line)


def info_of(*replies: Any) -> dict[str, str]:
    return {name: value for reply in replies if isinstance(reply, bytes) for name, value in info_lines(reply).items()}


def memory_of(*replies: Any) -> MemoryUse | None:
    info = info_of(*replies)
    used, uncounted, limit, machine = (
        int(info.get(name) or 0)
        for name in ("used_memory", "mem_not_counted_for_evict", "maxmemory", "total_system_memory")
    )
    return MemoryUse(used - uncounted, limit or machine, limit > 0) if used and (limit or machine) else None


def memory_share(*replies: Any) -> float | None:
    memory = memory_of(*replies)
    return None if memory is None else memory.share


def growth(
    entries: int, first_ms: int, now_ms: int, stream_bytes: int | None, memory: MemoryUse | None
) -> Growth | None:
    """Return how fast a stream grows that has ``entries`` since ``first_ms``; None when that is too short ago."""
    if not entries or now_ms - first_ms < _LEAST_MS:
        return None
    told = Growth(1000 * entries / (now_ms - first_ms), None if stream_bytes is None else stream_bytes / entries, None)
    if memory is None or not told.bytes_per_day:
        return told
    return told._replace(days_left=max(0, memory.limit - memory.used) / told.bytes_per_day)


def describe(grows: Growth) -> str:
    """Return the growth in words.

    >>> describe(Growth(1000.0, 119.6, 0.5))
    '9.62 GiB a day: 1,000.0 messages per second, 120 bytes each'
    """
    if grows.entry_bytes is None:
        return f"{grows.per_second:,.1f} messages per second"
    day, unit = grows.bytes_per_day / 2**20, "MiB"
    if day >= 1024:
        day, unit = day / 1024, "GiB"
    return f"{day:,.2f} {unit} a day: {grows.per_second:,.1f} messages per second, {grows.entry_bytes:,.0f} bytes each"
