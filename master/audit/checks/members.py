"""Judge the names in a group, and what is left of some that are not in it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from usher.common.protocol.keys import HALTED, MASTER
from usher.common.protocol.owner_words import is_given_back
from usher.common.protocol.registration import NAME
from usher.master.audit.checks.findings import RESERVED, AuditThresholds, Example

_NUMBER = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True)
class GroupMember:
    """A name in the group, or only an inbox or a lease of one. ``oldest_idle_ms``: the longest idle time of its pending
    entries, 0 without; ``idle_ms``: its own idle time; ``registered``: its consumer is, as this or another incarnation;
    ``is_named``: like an incarnation that there may have been."""

    stream: str
    name: str
    pending: int
    oldest_idle_ms: int
    idle_ms: int
    lives: bool
    in_group: bool = True
    registered: bool = True
    is_named: bool = True


def is_incarnation(name: str) -> bool:
    """Return True when an owner of this name is looked at as an incarnation (``name:generation``)."""
    return ":" in name


def was_named(name: str, last_generation: int) -> bool:
    """Return True when there may have been an incarnation of this name: generations are counted for all consumers.

    >>> was_named("c1:7", 9), was_named("c1:10", 9), was_named("celery@host:worker", 9)
    (True, False, False)
    """
    consumer, _, generation = name.rpartition(":")
    return bool(NAME.fullmatch(consumer)) and bool(_NUMBER.fullmatch(generation)) and int(generation) <= last_generation


def judge_members(members: Iterable[GroupMember], limits: AuditThresholds) -> Iterator[tuple[str, int, Example]]:
    """Yield (check, number of entries, example) for each member that breaks a rule."""
    for member in members:
        if member.name not in RESERVED and (found := _judge(member, limits)):
            check, count, detail = found
            yield check, count, Example(member.stream, owner=member.name, detail=detail)


def _judge(member: GroupMember, limits: AuditThresholds) -> tuple[str, int, str] | None:
    held = f"{member.pending:,} pending, the oldest idle for {member.oldest_idle_ms / 1000:.0f} s"
    if not member.in_group and member.lives:
        return None if member.registered else ("lease_orphan", 1, "a lease, but neither registered nor in the group")
    if not member.in_group:
        return "key_leaked", 1, "an inbox, but neither a lease nor a name in the group"
    if not (is_incarnation(member.name) and member.is_named):
        return ("stranger_owns", member.pending, held) if member.pending else None
    if member.lives:
        return None if member.registered else ("unregistered", 1, held)
    if member.pending:
        return ("owner_dead", member.pending, held) if member.oldest_idle_ms > limits.owner_idle_ms else None
    if member.idle_ms > limits.reaped_ms:
        return "consumer_leaked", 1, f"no lease, idle for {member.idle_ms / 1000:.0f} s"
    return None


def index_agrees(owner: str, recorded: str) -> bool:
    """Return True when a pending entry's owner is the one that its ticket's record allows."""
    if recorded == HALTED.decode():
        return owner in RESERVED
    is_parked = is_given_back(recorded.encode())
    return owner == (MASTER.decode() if is_parked else recorded)
