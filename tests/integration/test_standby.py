"""What a standby costs while it waits: one plain look at the lead, and nobody is woken by what was known."""

from __future__ import annotations

import pytest

from tests.integration.factories import LEASE_MS, World, spent
from usher.master.dispatch.events import ChangeWatch
from usher.master.leader.elector import Elector, Lead


def _elector(world: World) -> tuple[Elector, Lead, list[str | None]]:
    """A standby, and the leaders of which it told."""
    lead, told = Lead(), list[str | None]()
    lead.on_change = lambda: told.append(lead.leader_url)
    return Elector(world.link, world.keys, lead, "http://two", LEASE_MS, lambda: True), lead, told


def test_a_standby_looks_when_the_lease_could_end_and_tells_once_who_leads(world: World) -> None:
    world.elect("abc http://one")
    elector, lead, told = _elector(world)
    elector.run_once()
    assert spent(world.link, elector.run_once) == {"pttl": 1}
    world.link.call("PEXPIRE", world.keys.leader, 700)
    assert 0.1 < elector.run_once() <= 0.701
    assert (lead.epoch, told) == (None, ["http://one"])


def test_it_is_elected_at_the_first_look_at_which_nobody_leads(world: World) -> None:
    world.elect("abc http://one")
    elector, lead, told = _elector(world)
    elector.run_once()
    world.link.call("DEL", world.keys.leader)
    elector.run_once()
    assert lead.epoch is not None
    assert told == ["http://one", "http://two"]


def test_of_a_new_leader_elsewhere_it_hears_and_tells(world: World) -> None:
    world.elect("abc http://one")
    elector, _, told = _elector(world)
    changes = ChangeWatch(world.link, world.keys.changed, lambda heard: None)
    changes.on_leader = elector.wake
    elector.run_once()
    world.link.call("DEL", world.keys.leader)
    third = Elector(world.link, world.keys, Lead(), "http://three", LEASE_MS, lambda: True)
    third.run_once()
    changes.look(None)
    elector.run_once()
    assert told == ["http://one", "http://three"]


def test_a_lead_whose_lease_lasts_longer_than_any_lease_is_succeeded(world: World) -> None:
    """Its holder died, and Redis' clock was set back by two hours: nobody would lead for as long."""
    former = world.elect("abc http://one")
    elector, lead, told = _elector(world)
    elector.run_once()
    assert lead.epoch is None
    world.link.call("PEXPIRE", world.keys.leader, 7_200_000)
    elector.run_once()
    assert lead.epoch is not None
    assert lead.epoch > former.epoch
    assert told == ["http://one", "http://two"]
    assert world.link.call("PTTL", world.keys.leader) <= LEASE_MS


def test_its_own_lease_of_a_lost_reply_is_succeeded(world: World) -> None:
    elector, lead, _ = _elector(world)
    elector.run_once()
    former = lead.epoch
    assert former is not None
    lead.lost(former)
    elector.run_once()
    assert lead.epoch is not None
    assert lead.epoch > former


def test_that_it_stands_by_and_behind_whom_is_logged_once_of_each_leader(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "usher.master.leader.elector")
    world.elect("abc http://one")
    elector, _, _ = _elector(world)
    for _ in range(3):
        elector.run_once()
    assert [record.getMessage() for record in caplog.records] == ["standby"]
    assert "why" not in caplog.records[0].__dict__["facts"]
