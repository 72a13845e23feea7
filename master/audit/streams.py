"""Select the streams of a run: names, and patterns of names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.endpoints import CLUSTER, mode
from usher.common.redis.replies import pairs

_GLOB = frozenset("*?[")


def is_pattern(name: str) -> bool:
    """Return True when a name may stand for several streams.

    >>> is_pattern("orders"), is_pattern("tickets:*")
    (False, True)
    """
    return bool(_GLOB.intersection(name))


def expand(url: str, names: Sequence[str], group: str) -> tuple[str, ...]:
    """Return the selected streams: a name is itself; a pattern is every stream it matches that has ``group``. Each
    once, in order.

    Raises StartRefused when a pattern matches none, or cannot be looked for.
    """
    if not any(map(is_pattern, names)):
        return tuple(dict.fromkeys(names))
    link = Link(url, "usher:audit", timeout_s=30.0)
    try:
        found = [
            stream for name in names for stream in (_matching(link, url, name, group) if is_pattern(name) else [name])
        ]
    except (RedisTrouble, CommandRefused) as trouble:
        raise StartRefused(f"USHER_REDIS_URL: {trouble}") from trouble
    finally:
        link.close()
    return tuple(dict.fromkeys(found))


def _matching(link: Link, url: str, pattern: str, group: str) -> list[str]:
    if link.call("EXISTS", pattern):
        return [pattern]  # a stream may have a name like "what?"
    if mode(url) == CLUSTER:
        raise StartRefused(
            f"--streams: in a cluster the streams of a pattern lie on several servers: name each ({pattern!r})"
        )
    found = sorted(key.decode() for key in _scanned(link, pattern) if _has_group(link, key, group))
    if not found:
        raise StartRefused(f"--streams: no stream with the group {group} matches {pattern!r}")
    return found


def _scanned(link: Link, pattern: str) -> Iterator[bytes]:
    cursor = b"0"
    while True:
        cursor, keys = link.call("SCAN", cursor, "MATCH", pattern, "COUNT", 5000, "TYPE", "stream")
        yield from set(keys)
        if bytes(cursor) == b"0":
            return


def _has_group(link: Link, stream: bytes, group: str) -> bool:
    """Return True when the stream has the group. This leaves out inboxes, run logs and dead letters: they have no
    group."""
    try:
        return any(row[b"name"] == group.encode() for row in map(pairs, link.call("XINFO", "GROUPS", stream)))
    except CommandRefused:  # deleted meanwhile
        return False
