"""resign.lua: the leader gives its lease up, and never somebody else's."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.factories import World
from usher.master.leader.leader_scripts import LeaderScripts


def _resign(world: World, epoch: int) -> bytes:
    return bytes(world.scripts.run("resign", (world.keys.leader,), (str(epoch),)))


def test_after_a_resignation_the_next_one_is_elected_at_once_under_a_higher_epoch(world: World) -> None:
    leader = world.elect()
    assert _resign(world, leader.epoch) == b"OK"
    assert world.link.call("EXISTS", world.keys.leader) == 0
    assert world.elect("http://two").epoch > leader.epoch


def test_resigning_twice_is_refused_the_second_time(world: World) -> None:
    leader = world.elect()
    _resign(world, leader.epoch)
    with world.unchanged():
        assert _resign(world, leader.epoch) == b"FENCED"


def test_a_late_resignation_does_not_take_the_lease_of_a_successor(
    world: World, depose: Callable[[LeaderScripts], None]
) -> None:
    leader = world.elect()
    depose(leader)
    with world.unchanged():
        assert _resign(world, leader.epoch) == b"FENCED"
