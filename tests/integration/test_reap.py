"""deregister.lua: a dead incarnation is forgotten once nothing is pending for it. Deleting a group consumer deletes its
pending entries too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import Owner, World, hand_over, plan
from usher.common.base.errors import Fenced
from usher.master.leader.elector import Lead
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.recovery.repairs import Janitor


def _reap(leader: LeaderScripts, owner: Owner, stored: bytes | None = None) -> bool:
    return leader.reap(
        owner.incarnation, owner.registration.name, owner.registration.dump() if stored is None else stored
    )


def _dead(world: World, leader: LeaderScripts) -> Owner:
    """A dead incarnation that left a group consumer, an inbox and a registration, and nothing pending."""
    a = world.join("a")
    a.steps.ack(world.owned(leader, a, b"T"))
    world.end_lease(a)
    return a


def _traces(world: World, owner: Owner) -> tuple[bool, bool, bool]:
    """Whether the group consumer, the inbox and the registration are there."""
    names = list(world.stream.pending_counts())
    link, keys = world.link, world.keys
    return (
        owner.name in names,
        link.call("EXISTS", keys.inbox(owner.incarnation)) == 1,
        link.call("HEXISTS", keys.consumers, "a") == 1,
    )


def test_group_consumer_inbox_and_registration_go(world: World) -> None:
    leader = world.elect()
    a = _dead(world, leader)
    assert _traces(world, a) == (True, True, True)
    assert _reap(leader, a)
    assert _traces(world, a) == (False, False, False)


def test_the_mark_of_one_that_never_renewed_goes_with_it(world: World) -> None:
    """It ends by itself as the lease does; a clock that is set back keeps it for as long as it was set back."""
    leader = world.elect()
    a = _dead(world, leader)
    world.link.call("SET", world.keys.unproven(a.incarnation), "1")
    assert _reap(leader, a)
    assert world.link.call("EXISTS", world.keys.unproven(a.incarnation)) == 0


def test_one_that_has_something_pending_is_not_reaped(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    world.end_lease(a)
    with world.unchanged():
        assert not _reap(leader, a)
    assert world.pending() == {a.name: ids}


def test_one_that_lives_is_not_reaped_in_whatever_state(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    for change in (lambda: None, lambda: a.steps.drain(60_000), lambda: leader.revoke(a.incarnation)):
        change()
        with world.unchanged():
            assert not _reap(leader, a)


def test_a_deposed_leader_reaps_nobody(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    a = _dead(world, leader)
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        _reap(leader, a)


def test_the_registration_of_a_successor_stays(world: World) -> None:
    leader = world.elect()
    a = _dead(world, leader)
    successor = world.join("a")
    assert _reap(leader, a)
    assert _traces(world, a) == (False, False, True)
    assert world.link.call("HGET", world.keys.consumers, "a") == successor.registration.dump()


def test_who_has_no_registration_to_name_takes_nobodys(world: World) -> None:
    leader = world.elect()
    a = _dead(world, leader)
    world.link.call("HSET", world.keys.consumers, "a", "")
    assert _reap(leader, a, b"")
    assert _traces(world, a) == (False, False, True)


def test_what_a_reaped_incarnation_is_given_is_taken_back_and_nothing_of_it_stays(world: World) -> None:
    leader = world.elect()
    a = _dead(world, leader)
    _reap(leader, a)
    ids = world.parked(leader, b"T")
    hand_over(leader, plan(a, {b"T": ids}))
    assert [[one.id for one in leader.take_back(a.incarnation, 10).found] for _ in range(2)] == [ids, []]
    assert _reap(leader, a, b"")
    assert _traces(world, a) == (False, False, False)


def test_the_janitor_leaves_alone_whom_the_dispatcher_still_goes_by(world: World) -> None:
    """Its registration is what tells a loss from a drain."""
    leader = world.elect()
    a = _dead(world, leader)
    in_use = {a.incarnation}
    lead = Lead()
    lead._set(leader.epoch, "http://one")
    janitor = Janitor(world.link, world.keys, lead, 1.0, in_use.__contains__)
    janitor.run_once()
    assert _traces(world, a) == (True, True, True)
    in_use.clear()
    janitor.run_once()
    assert _traces(world, a) == (False, False, False)
