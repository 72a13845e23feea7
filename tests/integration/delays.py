"""Delayed messages as producers add them and as the leader sends them, for tests."""

from __future__ import annotations

from tests.integration.factories import World
from usher.common.protocol.keys import LogKeys
from usher.master.leader.leader_scripts import LeaderScripts

#: Long ago, and long after this test.
PAST, FUTURE = 1_000, 4_000_000_000_000


def log_keys(world: World) -> LogKeys:
    return LogKeys(world.keys.stream)


def delay(world: World, ticket: bytes, due: object, *more: object, key: str = "") -> bytes:
    """Add a delayed message, as anybody can."""
    entry_id: bytes = world.link.call(
        "XADD", key or log_keys(world).delayed, "*", "due_ms", due, "ticket_id", ticket, *more
    )
    return entry_id


def now_ms(world: World) -> int:
    seconds, microseconds = world.link.call("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def sent(world: World, stream: str = "") -> list[bytes]:
    """Tickets in the stream, in its order."""
    entries = world.link.call("XRANGE", stream or world.keys.stream, "-", "+")
    return [dict(zip(flat[::2], flat[1::2], strict=True))[b"ticket_id"] for _, flat in entries]


def send_due(world: World, leader: LeaderScripts) -> list[bytes | str]:
    told: list[bytes | str] = []
    while (look := leader.due_delayed(100)).due or look.wait_ms == 0:
        told += leader.send_delayed([(one, world.keys.stream) for one in look.due], 60_000)
    return told


def left(world: World) -> int:
    return int(world.link.call("XLEN", log_keys(world).delayed))
