"""free_tickets.lua: the end of a recovery; a record goes only when nothing stands behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import LEASE_MS, NASTY_TICKETS, Owner, World
from usher.common.base.errors import Fenced
from usher.master.leader.leader_scripts import LeaderScripts


def _recovering(world: World, *tickets: bytes) -> tuple[LeaderScripts, Owner]:
    """A dead incarnation whose list is empty, and which still has records: their entries lost their bodies."""
    leader, a = world.elect(), world.join("a")
    for ticket in tickets:
        world.delete(*world.owned(leader, a, ticket))
    world.end_lease(a)
    while leader.take_back(a.incarnation, 100).last:
        pass
    return leader, a


def test_the_records_of_a_dead_incarnation_go(world: World) -> None:
    leader, a = _recovering(world, b"T", b"U")
    assert leader.free_tickets(a.incarnation, [(b"T", []), (b"U", []), (b"never seen", [])]) == ([], [])
    assert world.state().index == {}


def test_the_same_call_twice_finds_nothing_to_do(world: World) -> None:
    leader, a = _recovering(world, b"T")
    leader.free_tickets(a.incarnation, [(b"T", [])])
    with world.unchanged():
        assert leader.free_tickets(a.incarnation, [(b"T", [])]) == ([], [])


def test_while_something_is_pending_for_it_nothing_is_freed(world: World) -> None:
    leader, a = _recovering(world, b"T")
    b = world.join("b")
    [entry_id] = world.owned(leader, b, b"U")
    world.make_idle(a.incarnation, 0, entry_id)
    with world.unchanged():
        assert leader.free_tickets(a.incarnation, [(b"T", [])]) is None
    world.make_idle(b.incarnation, 0, entry_id)
    leader.free_tickets(a.incarnation, [(b"T", [])])


def test_while_its_lease_lives_nothing_is_freed(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    for change in (lambda: None, lambda: a.steps.drain(60_000), lambda: leader.revoke(a.incarnation)):
        change()
        with world.unchanged():
            assert leader.free_tickets(a.incarnation, [(b"T", [])]) is None


def test_a_deposed_leader_frees_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader, a = _recovering(world, b"T")
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.free_tickets(a.incarnation, [(b"T", [])])
    world.apart_because = "the recovery did not come to its end"


def test_what_a_successor_or_a_drain_has_stays_and_is_named(world: World) -> None:
    leader, a = _recovering(world, b"T")
    b, c = world.join("b"), world.join("c")
    world.owned(leader, b, b"U")
    returned = world.owned(leader, c, b"V")
    c.steps.drain(60_000)
    world.give_back(c, {b"V": returned})
    before = world.state().index
    assert leader.free_tickets(a.incarnation, [(b"V", []), (b"T", []), (b"U", [])]) == ([b"V", b"U"], [])
    assert world.state().index == {ticket: before[ticket] for ticket in (b"U", b"V")}


@pytest.mark.parametrize("value", [b"", b"garbage", b"a:1", b"a:1 five 1-1", b"halted 5 1-1", b"\0"])
def test_a_record_that_nobody_can_read_or_that_is_halted_stays_and_is_named(world: World, value: bytes) -> None:
    leader, a = _recovering(world)
    world.spoil(b"T", value)
    assert leader.free_tickets(a.incarnation, [(b"T", [])]) == ([b"T"], [])
    assert world.state().index == {b"T": value}
    world.apart_because = "the record was written by hand"


def test_another_incarnation_of_the_same_name_is_somebody_else(world: World) -> None:
    leader, a = _recovering(world, b"T")
    successor = world.join("a")
    world.owned(leader, successor, b"U")
    assert leader.free_tickets(a.incarnation, [(b"T", []), (b"U", [])]) == ([b"U"], [])
    assert leader.free_tickets(a.incarnation[:-1], [(b"U", [])]) == ([b"U"], []), (
        "the beginning of a name is not the name"
    )


@pytest.mark.parametrize("ticket", NASTY_TICKETS)
def test_a_ticket_is_any_bytes(world: World, ticket: bytes) -> None:
    leader, a = _recovering(world, ticket)
    assert leader.free_tickets(a.incarnation, [(ticket, [])]) == ([], [])
    assert world.state().index == {}


def test_thousands_are_freed_in_one_call(world: World) -> None:
    leader, a = _recovering(world)
    names = [b"T%d" % n for n in range(9001)]
    value = a.name + b" 5 1-1"
    world.link.call("HSET", world.keys.tickets, *[part for name in names for part in (name, value)])
    assert leader.free_tickets(a.incarnation, [(name, []) for name in names]) == ([], [])
    assert world.state().index == {}


def test_a_group_consumer_that_was_reaped_has_an_empty_list(world: World) -> None:
    leader, a = _recovering(world, b"T")
    assert leader.reap(a.incarnation, "a", a.registration.dump())
    assert leader.free_tickets(a.incarnation, [(b"T", [])]) == ([], [])
    assert world.state().index == {}


def test_what_a_freed_record_still_names_and_is_under_master_unseen_is_told(world: World) -> None:
    """Somebody took it there behind the leader's back; it must be known before anything later of its ticket is
    planned."""
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    ids = world.owned(leader, a, b"T", b"1-1", b"1-10", b"1-11", b"2-1")
    others = world.owned(leader, b, b"U", b"3-1")
    world.make_idle(b"master", 0, b"1-1", b"1-11", *others)
    world.delete(b"1-10")
    world.end_lease(a)
    assert [found.id for found in leader.take_back(a.incarnation, 10).found] == [b"2-1"]
    assert leader.free_tickets(a.incarnation, [(b"T", []), (b"U", [])]) == (
        [b"U"],
        [(one, b"T") for one in (b"1-1", b"1-11", b"2-1")],
    )
    assert world.pending() == {b"master": [b"1-1", b"1-11", b"2-1", *others]}
    assert world.link.call("HKEYS", world.keys.tickets) == [b"U"]
    assert ids[0] == b"1-1"
    world.apart_because = "what another owner had was taken by hand"


def test_what_a_freed_record_still_names_is_a_dead_letter(world: World) -> None:
    """A body deleted while its owner lives, then the owner dies. From 7.0 on the owner's renewal drops the entry from
    the pending list, so the recovery never sees it, and the leader is the last that knows of it; before, taking it back
    has written the letter."""
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    world.delete(entry_id)
    world.make_idle_if_there(a.incarnation, LEASE_MS, entry_id)
    a.steps.renew(LEASE_MS)
    world.end_lease(a)
    while leader.take_back(a.incarnation, 100).last:
        pass
    assert leader.free_tickets(a.incarnation, [(b"T", [entry_id])]) == ([], [])
    assert world.state() == ({}, {}, world.dead())
    assert world.state().letters() == [(entry_id, b"T" if world.claiming_drops_the_bodiless else b"", b"body_gone")]
