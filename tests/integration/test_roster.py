"""The roster: who is registered, and who of them lives; read by the leader only, in two commands whatever their number."""

from __future__ import annotations

from master.elector import Lead
from master.roster import Member, RosterReader, read_roster
from tests.integration.factories import World


def _calls(world: World) -> dict[str, int]:
    """Commands of Redis so far, but for the one that asks."""
    lines = world.link.call("INFO", "commandstats").decode().splitlines()
    facts = {line.partition(":")[0].removeprefix("cmdstat_"): line.partition("calls=")[2].partition(",")[0] for line in lines if "calls=" in line}
    return {name: int(calls) for name, calls in facts.items() if name != "info"}


def test_many_consumers_are_read_in_two_commands_and_each_has_the_state_of_its_lease(world: World) -> None:
    living, draining, dead = world.join("a"), world.join("b"), world.join("c")
    world.link.call("SET", world.keys.lease(draining.incarnation), "draining", "KEEPTTL")
    world.end_lease(dead)
    before = _calls(world)
    members = read_roster(world.link, world.keys)
    after = _calls(world)
    assert {name: member.state for name, member in members.items()} == {
        living.incarnation: "live",
        draining.incarnation: "draining",
        dead.incarnation: "",
    }
    assert sum(after.values()) - sum(before.values()) == 2


def test_nobody_registered_is_an_empty_roster(world: World) -> None:
    assert read_roster(world.link, world.keys) == {}


def test_only_who_leads_looks(world: World) -> None:
    told: list[dict[str, Member]] = []
    lead = Lead()
    reader = RosterReader(world.link, world.keys, lead, 0.5, told.append)
    before = _calls(world)
    assert reader.run_once() == 0.5
    assert (told, _calls(world)) == ([], before)
    lead._set(7, None)
    reader.run_once()
    assert told == [{}]
