"""How a ticket stream stands: how many entries its group has not read, and its other sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from usher.common.base.clock import wall_ms
from usher.common.protocol.keys import HALTED, MASTER, Keys, LogKeys
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.mishaps import mishaps_command, parse_mishaps
from usher.common.redis.client import Link
from usher.common.redis.replies import cut_at, group_of, pairs
from usher.common.redis.scripts import ScriptRunner
from usher.master.leader.elector import parse_held
from usher.master.operations.delayed_messages import waiting_commands, waiting_of

#: Entries counted by one call, where Redis does not know the lag (before 7.0); and entries whose tickets it reads.
_PAGE, _HEADS = 2000, 500


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
        count, last, _, is_all = scripts.run("find_entries", (stream,), ("XRANGE", b"(" + last, "+", _PAGE, ""))
        counted += count
        if is_all:
            return GroupLag(counted, True)
    return GroupLag(counted, False)


def _read(group: Mapping[bytes, Any] | None, cut: bytes | None) -> int | None:
    """Return how many entries the group was given: Redis counts those that were cut before as read."""
    read = None if group is None else group.get(b"entries-read")
    return None if group is None or read is None else int(read) - cut_at(cut, group[b"last-delivered-id"])[1]


def stream_sums(link: Link, scripts: ScriptRunner, keys: Keys, most: int) -> dict[str, Any]:
    """Read the sums of a stream in one round trip, plus those that it takes to count the lag up to ``most`` where Redis
    does not know it. ``by_name``: pending entries of each name in the group; ``oldest``: the id of the first one;
    ``delivered``: the last id that the group was given; ``behind``: who has so much waiting that producers are told to
    wait, ``<group>`` or ``<group>/<tenant>``."""
    counts: list[tuple[str, ...]] = [("XLEN", name) for name in (keys.stream, keys.dead)]
    counts += [("HLEN", name) for name in (keys.tickets, keys.attempts, keys.errors, keys.rules)]
    counts += [("GET", keys.leader), ("HGET", keys.counters, f"cut_at {keys.stream}"), ("GET", keys.taken)]
    of_group = [("XINFO", "GROUPS", keys.stream), ("XPENDING", keys.stream, keys.group)]
    more = [mishaps_command(keys), ("HGETALL", LogKeys(keys.stream).behind), *waiting_commands(keys)]
    replies = link.pipeline([*counts, *of_group, *more])
    for reply in replies[: len(counts)]:
        if isinstance(reply, Exception):
            raise reply
    entries, dead, tickets, retrying, errors, rules, leader, cut, taken, groups, pending, *told_of = replies
    mishaps, behind, *delayed = told_of
    group, held = group_of(groups, keys.group, taken), parse_held(leader)
    total, lowest, _, owners = (0, None, None, ()) if isinstance(pending, Exception) else pending
    by_name = {bytes(name): int(count) for name, count in owners or ()}
    lag = lag_of(scripts, keys.stream, group, entries, most)
    told = {} if isinstance(behind, Exception) else pairs(behind)
    seen: dict[str, Any] = {"told": [entries, groups], "time_ms": wall_ms(), "stream": keys.stream, "group": keys.group}
    seen |= {"has_group": group is not None, "leader_url": held.url, "epoch": held.epoch, "read": _read(group, cut)}
    seen |= {"delivered": bytes(group[b"last-delivered-id"]) if group else b"0-0"}
    seen |= {"entries": entries, "lag": lag.entries, "lag_is_exact": lag.is_exact, "tickets": tickets, "rules": rules}
    seen |= {"pending": total, "parked": by_name.get(MASTER, 0), "halted": by_name.get(HALTED, 0), "by_name": by_name}
    seen |= {"oldest": bytes(lowest) if lowest else None, "retrying": retrying, "errors": errors, "dead_letters": dead}
    seen |= {"delayed": waiting_of(*delayed)._asdict(), "mishaps": parse_mishaps(mishaps)._asdict()}
    return seen | {"behind": {name.decode(errors="replace"): int(number) for name, number in told.items()}}


def tickets_of(scripts: ScriptRunner, keys: Keys, field: str, ids: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield ids of entries with their tickets; those without one, or without a body, are left out."""
    ids = iter(ids)
    while some := list(islice(ids, _HEADS)):
        while some:  # fewer are answered where bodies are large
            values = scripts.run("read_fields", (keys.stream,), (LONGEST_TICKET, "", 1, field, *some))
            found = ((one, value) for one, (value,) in zip(some, values, strict=False) if value)
            yield from ((one, ticket) for one, (ticket, size) in found if size <= LONGEST_TICKET)
            some = some[len(values) :]
