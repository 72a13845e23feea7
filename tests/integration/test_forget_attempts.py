"""Attempts of messages that are over go, however they ended; those of all others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.actors import Stage
from tests.integration.factories import World, bury
from tests.integration.memory import full_memory
from tests.integration.test_charge import attempts
from usher.common.base.errors import Fenced, GroupMissing
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.keys import HALTED
from usher.consumer.lifecycle.owner_scripts import Buried, Letter
from usher.master.leader.leader_scripts import LeaderScripts


def forget(world: World, leader: LeaderScripts, count: int = 100, noted: str = "") -> list[bytes]:
    noted = noted or world.keys.attempts
    cursor, gone = leader.forget_attempts(noted, b"0", count)
    while cursor != b"0":
        cursor, more = leader.forget_attempts(noted, cursor, count)
        gone += more
    return sorted(gone)


def test_what_is_pending_for_anybody_keeps_its_attempts(world: World) -> None:
    leader, owner = world.elect(), world.join("a")
    owned = world.owned(leader, owner, b"T", b"1-1", b"2-1")
    parked, halted = world.parked(leader, b"U", b"3-1", b"4-1")
    world.make_idle(HALTED, 0, halted)
    for entry_id in (*owned, parked, halted, b"99-1", b"100-1"):
        world.link.call("HSET", world.keys.attempts, entry_id, "1 1 0 0")
    assert forget(world, leader) == [b"100-1", b"99-1"]
    assert set(attempts(world)) == {*owned, parked, halted}


def test_a_message_whose_body_was_deleted_leaves_nothing_behind(world: World) -> None:
    leader, owner = world.elect(), world.join("a")
    first, second = world.owned(leader, owner, b"T", b"1-1", b"2-1")
    owner.steps.charge({first: Attempts(1, 1), second: Attempts(1, 1)})
    world.delete(first)
    assert bury(owner.steps, Letter(b"T", first, "body_gone", "", 1, 1, 2)) is Buried.OK
    world.link.call("HSET", world.keys.attempts, first, "1 1 0 0")  # as one of the leader's steps would have left it
    assert forget(world, leader) == [first]
    assert attempts(world) == {second: Attempts(1, 1)}


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_page_by_page_all_is_looked_at(world: World, count: int) -> None:
    leader = world.elect()
    [parked] = world.parked(leader, b"T")
    noted = [part for entry_id in (*(b"%d-9" % n for n in range(3000)), parked) for part in (entry_id, b"1 1 0 0")]
    world.link.call("HSET", world.keys.attempts, *noted)
    assert len(forget(world, leader, count)) == 3000
    assert set(attempts(world)) == {parked}


def test_who_does_not_lead_forgets_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    world.link.call("HSET", world.keys.attempts, "99-1", 1)
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.forget_attempts(world.keys.attempts, b"0", 100)


def test_while_the_group_is_gone_nothing_is_forgotten(world: World) -> None:
    leader = world.elect()
    world.link.call("HSET", world.keys.attempts, "99-1", 1)
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    with world.unchanged(), pytest.raises(GroupMissing):
        leader.forget_attempts(world.keys.attempts, b"0", 100)
    world.make_group()


def test_what_comes_again_after_the_group_was_lost_keeps_its_attempts(world: World) -> None:
    """Its consumer has died of it, and nobody is there to whom it could be handed: the group was not given it yet."""
    leader, owner = world.elect(), world.join("a")
    first, second = world.owned(leader, owner, b"T", b"1-1", b"2-1")
    owner.steps.charge({first: Attempts(2, 1, 1), second: Attempts(1, 1)})
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    world.make_group()
    assert forget(world, leader) == []
    assert set(attempts(world)) == {first, second}
    world.delete(second)
    assert forget(world, leader) == [second]
    world.apart_because = "the group was lost"


def test_errors_go_as_attempts_do(world: World) -> None:
    leader, owner = world.elect(), world.join("a")
    [first] = world.owned(leader, owner, b"T", b"1-1")
    for field in (first, b"t" + first, b"h" + first, b"99-1", b"t99-1", b"h99-1", b"somebody's"):
        world.link.call("HSET", world.keys.errors, field, "x")
    assert forget(world, leader, noted=world.keys.errors) == [b"99-1", b"h99-1", b"somebody's", b"t99-1"]
    assert sorted(world.link.call("HKEYS", world.keys.errors)) == [first, b"h" + first, b"t" + first]


def test_it_works_at_full_memory(world: World) -> None:
    leader = world.elect()
    world.link.call("HSET", world.keys.attempts, "99-1", 1)
    with full_memory(world.link):
        assert forget(world, leader) == [b"99-1"]


def test_the_janitor_of_the_leader_does_it_in_passing(any_redis_url: str) -> None:
    with Stage(any_redis_url) as stage:
        m = stage.leader()
        stage.link.call("HSET", stage.keys.attempts, "99-1", 1)
        stage.link.call("HSET", stage.keys.errors, "99-1", "{}")
        stage.link.all_of([("XADD", stage.keys.dead, "*", "a", "b")] * 600)  # they are counted anew beside it
        m.reap()
        assert attempts(stage.world) == {}
        m.reap()
        assert stage.link.call("HLEN", stage.keys.errors) == 0
