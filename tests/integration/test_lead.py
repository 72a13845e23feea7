"""hold_lead.lua, resign.lua: only the epoch that leads extends the lease, or gives it up; nobody does for others."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.factories import World
from usher.master.leader.leader_scripts import LeaderScripts


def _hold(world: World, epoch: int | str, lease_ms: int = 90_000) -> bytes:
    return bytes(world.scripts.run("hold_lead", (world.keys.leader,), (str(epoch), lease_ms)))


def _resign(world: World, epoch: int) -> bytes:
    return bytes(world.scripts.run("resign", (world.keys.leader,), (str(epoch),)))


def test_the_leader_extends_its_lease(world: World) -> None:
    leader = world.elect()
    value = world.link.call("GET", world.keys.leader)
    assert _hold(world, leader.epoch) == b"OK"
    assert _hold(world, leader.epoch) == b"OK", "the reply to the first one was lost"
    assert 60_000 < world.link.call("PTTL", world.keys.leader) <= 90_000
    assert world.link.call("GET", world.keys.leader) == value


def test_who_does_not_lead_any_more_takes_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    depose(leader)
    left_ms = world.link.call("PTTL", world.keys.leader)
    with world.unchanged():
        assert _hold(world, leader.epoch) == b"FENCED"
        assert _resign(world, leader.epoch) == b"FENCED"
    assert world.link.call("PTTL", world.keys.leader) <= left_ms


def test_a_part_of_the_epoch_is_not_the_epoch(world: World) -> None:
    epoch = str(world.elect().epoch)
    for wrong in (epoch[:-1], epoch + "0", epoch[1:], "", " ", f"{epoch} http"):
        with world.unchanged():
            assert _hold(world, wrong) == b"FENCED"


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
