"""How a lead is held, and how it is given up (elect.lua): only the epoch that leads extends the lease, or gives it up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import World, spent
from usher.common.base.clock import now_s
from usher.master.leader import elector as elector_module
from usher.master.leader.elector import Elector, Lead
from usher.master.leader.leader_scripts import LeaderScripts

_LEASE_MS = 90_000


def _leading(world: World) -> tuple[Elector, Lead]:
    """An elector that was elected just now."""
    lead = Lead()
    elector = Elector(world.link, world.keys, lead, "http://one", _LEASE_MS, lambda: True)
    elector.run_once()
    assert lead.epoch is not None
    return elector, lead


def _left_ms(world: World) -> int:
    return int(world.link.call("PTTL", world.keys.leader))


def _resign(world: World, epoch: int) -> bytes:
    return bytes(world.scripts.run("elect", (world.keys.leader, world.keys.counters), ("http://one", 0, str(epoch)))[0])


def test_the_leader_extends_its_lease_by_one_command(world: World) -> None:
    elector, lead = _leading(world)
    value, epoch = world.link.call("GET", world.keys.leader), lead.epoch
    world.link.call("PEXPIRE", world.keys.leader, 1000)
    assert spent(world.link, elector.run_once) == {"getex": 1}
    assert 60_000 < _left_ms(world) <= _LEASE_MS
    assert (world.link.call("GET", world.keys.leader), lead.epoch) == (value, epoch)


def test_who_does_not_lead_any_more_takes_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    depose(leader)
    left_ms = _left_ms(world)
    with world.unchanged():
        assert _resign(world, leader.epoch) in (b"HELD", b"RESIGNED")  # the latter where nobody leads
    assert _left_ms(world) <= left_ms


@pytest.mark.parametrize("held", [None, b"%d http://one", b"%d1 http://one", b"1%d http://one", b"http://one", b"%d"])
def test_whatever_else_the_key_holds_is_the_end_of_the_epoch(world: World, held: bytes | None) -> None:
    elector, lead = _leading(world)
    epoch, value = lead.epoch, held and held.replace(b"%d", b"%d" % (lead.epoch or 0))
    world.link.call("DEL", world.keys.leader)
    if value is not None:
        world.link.call("SET", world.keys.leader, value, "PX", 1000)
    elector.run_once()
    assert (lead.epoch == epoch) is (held in (b"%d http://one", b"%d"))
    assert world.link.call("GET", world.keys.leader) == value


def test_who_may_have_lost_the_lead_by_its_own_clock_extends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still for longer than its lease: another leads, or did until a moment ago."""
    elector, lead = _leading(world)
    world.link.call("DEL", world.keys.leader)
    world.elect("abc http://two")
    world.link.call("PEXPIRE", world.keys.leader, 500)
    monkeypatch.setattr(elector_module, "now_s", lambda: now_s() + _LEASE_MS / 1000)
    assert spent(world.link, elector.run_once) == {}
    assert lead.epoch is None
    assert _left_ms(world) <= 500


def test_after_a_resignation_the_next_one_is_elected_at_once_under_a_higher_epoch(world: World) -> None:
    leader = world.elect()
    assert _resign(world, leader.epoch) == b"RESIGNED"
    assert world.link.call("EXISTS", world.keys.leader) == 0
    assert world.elect("http://two").epoch > leader.epoch
