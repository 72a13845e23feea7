"""take_back.lua: what a dead incarnation had goes back to ``master``, page by page, in id order; index and pending list
change together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import NASTY_TICKETS, TRICKY_IDS, Owner, World
from usher.common.base.errors import Fenced
from usher.master.leader.entries import PeekedEntry
from usher.master.leader.leader_scripts import LeaderScripts


def _take_all(leader: LeaderScripts, owner: Owner, count: int) -> list[PeekedEntry]:
    found: list[PeekedEntry] = []
    while (page := leader.take_back(owner.incarnation, count)).last:
        found += page.found
    return found


@pytest.mark.parametrize("count", [1, 3, 100])
def test_everything_comes_back_in_the_order_of_the_stream_and_the_index_follows_page_by_page(
    world: World, count: int
) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *TRICKY_IDS)
    world.end_lease(a)
    found: list[PeekedEntry] = []
    while (page := leader.take_back(a.incarnation, count)).last:
        found += page.found
        assert world.broken() == []
    assert found == [PeekedEntry(entry_id, b"T") for entry_id in ids]
    assert world.state() == ({b"master": ids}, {}, [])


def test_taking_back_is_no_delivery(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    world.end_lease(a)
    _take_all(leader, a, 10)
    assert world.deliveries() == {entry_id: 1}


def test_the_pending_list_says_what_it_had_not_the_index(world: World) -> None:
    """The record names an entry that was taken from it meanwhile, and misses one that it has."""
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    third = world.owned(leader, a, b"U", b"3-1")
    world.make_idle(b"master", 0, first)
    world.link.call("HDEL", world.keys.tickets, b"U")
    world.end_lease(a)
    assert [found.id for found in _take_all(leader, a, 10)] == [second, *third]
    world.apart_because = "what the sweep took stays in the record until the end of the recovery"


def test_while_the_lease_lives_nothing_is_taken_whatever_its_state(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    for change in (lambda: None, lambda: a.steps.drain(60_000), lambda: leader.revoke(a.incarnation)):
        change()
        with world.unchanged():
            assert leader.take_back(a.incarnation, 10) is None


def test_a_deposed_leader_takes_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    world.end_lease(a)
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.take_back(a.incarnation, 10)


def test_the_same_call_twice_takes_the_next_page(world: World) -> None:
    """What the first one took is under ``master``: a lost reply costs nothing, a new epoch finds it there."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *TRICKY_IDS)
    world.end_lease(a)
    leader.take_back(a.incarnation, 4)
    assert [found.id for found in leader.take_back(a.incarnation, 100).found] == ids[4:]
    assert [found.id for found in leader.read_parked(None, 100).found] == ids


def test_what_others_have_is_not_touched(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    mine, theirs = world.owned(leader, a, b"T"), world.owned(leader, b, b"U")
    parked = world.parked(leader, b"V")
    world.end_lease(a)
    _take_all(leader, a, 10)
    assert world.pending() == {b.name: theirs, b"master": [*mine, *parked]}
    assert world.state().index.keys() == {b"U"}


def test_the_inbox_goes_with_the_last_page_so_that_a_lost_group_leaves_nothing_of_it(world: World) -> None:
    """A successor has its registration, and the new group does not have its name: reap would never hear of it."""
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T", *TRICKY_IDS)
    inbox = world.keys.inbox(a.incarnation)
    world.end_lease(a)
    leader.take_back(a.incarnation, 4)
    assert world.link.call("EXISTS", inbox) == 1, "there may be more to take back"
    _take_all(leader, a, 4)
    assert world.link.call("EXISTS", inbox) == 0
    with world.unchanged():
        assert leader.take_back(a.incarnation, 4) == (None, [], [])


def test_an_incarnation_that_never_was_has_nothing(world: World) -> None:
    leader = world.elect()
    with world.unchanged():
        assert leader.take_back("nobody:1", 10) == (None, [], [])


@pytest.mark.parametrize("value", [b"b:2 6 9-9", b"returned 5 1-1", b"halted 5 1-1", b"garbage", b"", b"a:1", b"\0"])
def test_a_record_that_another_one_has_or_nobody_can_read_stays_as_it_is(world: World, value: bytes) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1")
    world.spoil(b"T", value)
    world.end_lease(a)
    assert [found.id for found in _take_all(leader, a, 10)] == ids
    assert world.link.call("HGET", world.keys.tickets, b"T") == value
    if world.broken():
        world.apart_because = "the record was written by hand"


@pytest.mark.parametrize("ticket", NASTY_TICKETS)
def test_a_ticket_is_any_bytes(world: World, ticket: bytes) -> None:
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, ticket)
    world.end_lease(a)
    assert _take_all(leader, a, 10) == [PeekedEntry(entry_id, ticket)]
    assert world.state().index == {}


def test_an_entry_whose_body_is_gone_is_a_dead_letter_and_its_id_leaves_the_index_at_the_end_of_the_recovery(
    world: World,
) -> None:
    leader, a = world.elect(), world.join("a")
    first, second, third = world.owned(leader, a, b"T", b"1-1", b"2-1", b"3-1")
    alone = world.owned(leader, a, b"U", b"4-1")
    world.delete(first, third, *alone)
    world.end_lease(a)
    taken = alone[-1], [PeekedEntry(second, b"T")], [first, third, *alone]
    assert leader.take_back(a.incarnation, 10) == taken
    assert leader.take_back(a.incarnation, 10) == (None, [], [])
    assert world.pending() == {b"master": [second]}
    assert world.state().letters() == [(entry_id, b"", b"body_gone") for entry_id in (first, third, *alone)]
    assert {letter[b"usher-owner"] for letter in world.dead()} == {a.name}


def test_thousands_come_back_in_one_call(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *[b"%d-1" % n for n in range(1, 5001)])
    world.end_lease(a)
    page = leader.take_back(a.incarnation, 6000)
    assert [found.id for found in page.found] == ids
    assert world.state() == ({b"master": ids}, {}, [])


def test_after_an_acknowledgement_only_the_rest_comes_back(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *TRICKY_IDS)
    a.steps.ack(ids[:4])
    world.end_lease(a)
    assert [found.id for found in _take_all(leader, a, 3)] == ids[4:]


def test_when_the_letter_cannot_be_written_the_entry_stays_pending(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    world.delete(*ids)
    world.link.call("SET", world.keys.dead, "somebody else's")
    world.end_lease(a)
    with world.unchanged(), pytest.raises(Exception, match="WRONGTYPE"):
        leader.take_back(a.incarnation, 10)
