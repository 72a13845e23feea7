"""hold_lead.lua: only the epoch that leads extends the lease."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.factories import World
from usher.master.leader.leader_scripts import LeaderScripts


def _hold(world: World, epoch: int | str, lease_ms: int = 90_000) -> bytes:
    return bytes(world.scripts.run("hold_lead", (world.keys.leader,), (str(epoch), lease_ms)))


def test_the_leader_extends_its_lease(world: World) -> None:
    leader = world.elect()
    value = world.link.call("GET", world.keys.leader)
    assert _hold(world, leader.epoch) == b"OK"
    assert _hold(world, leader.epoch) == b"OK", "the reply to the first one was lost"
    assert 60_000 < world.link.call("PTTL", world.keys.leader) <= 90_000
    assert world.link.call("GET", world.keys.leader) == value


def test_who_does_not_lead_any_more_extends_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    depose(leader)
    left_ms = world.link.call("PTTL", world.keys.leader)
    with world.unchanged():
        assert _hold(world, leader.epoch) == b"FENCED"
    assert world.link.call("PTTL", world.keys.leader) <= left_ms


def test_a_part_of_the_epoch_is_not_the_epoch(world: World) -> None:
    epoch = str(world.elect().epoch)
    for wrong in (epoch[:-1], epoch + "0", epoch[1:], "", " ", f"{epoch} http"):
        with world.unchanged():
            assert _hold(world, wrong) == b"FENCED"
