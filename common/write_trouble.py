"""Whether Redis refuses writes, seen without writing anything: from two sections of INFO."""

from __future__ import annotations

from typing import Any, NamedTuple

#: What ``write_trouble`` reads the replies of. Sections, one by one: several in one command only Redis 7 knows.
INFO_COMMANDS = (("INFO", "persistence"), ("INFO", "memory"))


class WriteTrouble(NamedTuple):
    """``is_certain``: Redis refuses writes; else it does unless it was told otherwise."""

    text: str
    is_certain: bool


def info_lines(reply: bytes) -> dict[str, str]:
    """The ``name:value`` lines of INFO and CLUSTER INFO.

    >>> info_lines(b"# Memory\\r\\nmaxmemory:0\\r\\n")
    {'maxmemory': '0'}
    """
    return dict(line.split(":", 1) for line in reply.decode(errors="replace").splitlines() if ":" in line)


def write_trouble(persistence: Any, memory: Any) -> WriteTrouble | None:
    """What the replies of ``INFO_COMMANDS`` say against writing; None when nothing does, or Redis does not tell this user."""
    told = {name: value for reply in (persistence, memory) if isinstance(reply, bytes) for name, value in info_lines(reply).items()}
    if told.get("aof_enabled") == "1" and told.get("aof_last_write_status", "ok") != "ok":
        return WriteTrouble("Redis refuses writes: it cannot write its append-only file (is its disk full?)", True)
    if told.get("rdb_last_bgsave_status", "ok") != "ok":
        return WriteTrouble("Redis refuses writes where it takes snapshots: the last one failed (is its disk full?)", False)
    limit, used = int(told.get("maxmemory", 0)), int(told.get("used_memory", 0)) - int(told.get("mem_not_counted_for_evict", 0))
    if 0 < limit <= used and told.get("maxmemory_policy") == "noeviction":
        return WriteTrouble("Redis refuses what needs memory: all of its maxmemory is used; nothing can be sent or handed over", True)
    return None
