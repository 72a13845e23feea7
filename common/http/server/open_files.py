"""Share the files that this process may open: connections and live subscriptions leave enough for the rest of the
program, without which no connection to Redis could be opened."""

from __future__ import annotations

import resource

#: Files for the rest of the program, where there are so many.
_OTHERS = 512


def shares(connections: int, subscriptions: int, files: int) -> tuple[int, int]:
    """Return how many connections and subscriptions fit, if ``files`` may be open. Where there are few, up to a half is
    for the rest, and subscriptions leave a half of the others to connections.

    >>> shares(1024, 5000, 100_000), shares(1024, 5000, 4096), shares(1024, 5000, 256), shares(256, 0, 768)
    ((1024, 5000), (1024, 2560), (64, 64), (256, 0))
    """
    room = files - (_OTHERS if files >= connections + subscriptions + _OTHERS else min(_OTHERS, files // 2))
    connections = min(connections, max(room // 2, room - subscriptions))
    return connections, min(subscriptions, room - connections)


def within_open_files(connections: int, subscriptions: int) -> tuple[int, int]:
    """Allow this process as many open files as it needs, or as it may have, and return how many connections and
    subscriptions fit. The usual limit of 1,024 is one for select(), which nobody uses here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + subscriptions + _OTHERS
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return shares(connections, subscriptions, allowed)
