"""deregister.lua: an incarnation with nothing left leaves, and takes its traces with it."""

from __future__ import annotations

import pytest

from tests.integration.factories import LEASE_MS, World
from usher.common.base.errors import GroupMissing, OwnershipLost


def _traces(world: World) -> list[bytes]:
    """Keys that an incarnation leaves behind, and its names in the group and in the roster."""
    keys = [
        key for key in world.link.call("KEYS", world.keys.prefix + "*:*:*") if b":lease:" in key or b":inbox:" in key
    ]
    names = [name for name in world.stream.pending_counts() if name != b"master"]
    return sorted([*keys, *names, *world.link.call("HKEYS", world.keys.consumers)])


def test_lease_inbox_group_consumer_and_registration_go(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    a.steps.ack(world.owned(leader, a, b"T"))
    assert len(_traces(world)) == 4
    assert a.steps.deregister()
    assert _traces(world) == []


def test_while_something_is_pending_nothing_happens(world: World) -> None:
    """Deleting a group consumer deletes its pending entries: they would never be delivered again."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    with world.unchanged():
        assert not a.steps.deregister()
    assert world.pending() == {a.name: ids}


def test_after_a_drain_that_gave_everything_back_it_may_leave(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    a.steps.drain(LEASE_MS)
    world.give_back(a, {b"T": ids})
    assert a.steps.deregister()
    assert world.pending() == {b"master": ids}
    assert world.head(b"T").startswith(b"returned ")


def test_leaving_twice_is_refused_the_second_time(world: World) -> None:
    """The reply was lost: it is gone, and told so."""
    a = world.join("a")
    a.steps.deregister()
    with world.unchanged(), pytest.raises(OwnershipLost):
        a.steps.deregister()


def test_without_a_lease_it_is_left_to_the_leader(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    a.steps.ack(world.owned(leader, a, b"T"))
    world.end_lease(a)
    with world.unchanged(), pytest.raises(OwnershipLost):
        a.steps.deregister()


def test_the_registration_of_a_successor_stays(world: World) -> None:
    a = world.join("a")
    world.link.call("HSET", world.keys.consumers, "a", b"somebody else")
    assert a.steps.deregister()
    assert world.link.call("HGET", world.keys.consumers, "a") == b"somebody else"


def test_a_group_that_is_gone_leaves_everything_as_it_was(world: World) -> None:
    a = world.join("a")
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    with world.unchanged(), pytest.raises(GroupMissing):
        a.steps.deregister()
    world.make_group()
