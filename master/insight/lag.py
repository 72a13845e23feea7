"""GroupLag: how many entries of a ticket stream its group has not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from usher.common.redis.scripts import ScriptRunner

#: Entries counted by one call, where Redis does not know the lag (before 7.0).
_PAGE = 2000


class GroupLag(NamedTuple):
    """A group's lag in entries. ``is_exact`` False: there are more."""

    entries: int
    is_exact: bool


def lag_of(scripts: ScriptRunner, stream: str, group: Mapping[bytes, Any] | None, entries: int, most: int) -> GroupLag:
    """Return the lag of a group with these facts (XINFO GROUPS; None: there is no group) on a stream of ``entries``.
    Where Redis does not know the lag, count up to about ``most``. Raises what ``Link.call`` raises."""
    if group is None:
        return GroupLag(entries, True)
    if group.get(b"lag") is not None:
        return GroupLag(int(group[b"lag"]), True)
    last, counted = group[b"last-delivered-id"], 0
    while counted < most:
        count, last, is_all = scripts.run("count_above", (stream,), (last, _PAGE))
        counted += count
        if is_all:
            return GroupLag(counted, True)
    return GroupLag(counted, False)
