"""drain.lua: an incarnation says that it takes no more hand-overs."""

from __future__ import annotations

import pytest

from tests.hands import OwnershipLost
from tests.integration.factories import LEASE_MS, World, plan


def test_after_it_nothing_is_handed_over_any_more(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    more = world.parked(leader, b"T")
    a.steps.drain(LEASE_MS)
    assert world.lease(a) == b"draining"
    assert leader.turn(plan(a, {b"T": more}, {b"T": world.head(b"T")})) is None, "it hears of it first"
    assert leader.changed == {(b"consumer", a.name)}


def test_the_lease_is_extended_and_still_ends(world: World) -> None:
    a = world.join("a")
    a.steps.drain(2 * LEASE_MS)
    assert LEASE_MS < world.link.call("PTTL", world.keys.lease(a.incarnation)) <= 2 * LEASE_MS


def test_draining_twice_is_as_good_as_once(world: World) -> None:
    a = world.join("a")
    a.steps.drain(LEASE_MS)
    with world.unchanged():
        a.steps.drain(LEASE_MS)


def test_a_lease_that_has_ended_is_not_brought_back(world: World) -> None:
    a = world.join("a")
    world.end_lease(a)
    with world.unchanged(), pytest.raises(OwnershipLost):
        a.steps.drain(LEASE_MS)


def test_a_revoked_lease_stays_revoked_and_is_not_extended(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    leader.revoke(a.incarnation)
    a.steps.drain(10 * LEASE_MS)
    assert world.lease(a) == b"revoked"
    assert 0 < world.link.call("PTTL", world.keys.lease(a.incarnation)) <= LEASE_MS


def test_a_revoked_lease_about_to_end_does_not_become_one_without_an_end(world: World) -> None:
    a = world.join("a")
    for state in ("revoked", "live"):
        for _ in range(100):
            world.link.call("SET", world.keys.lease(a.incarnation), state, "PX", 1)
            try:
                a.steps.drain(1)
            except OwnershipLost:
                pass  # it had ended by then
            assert world.link.call("PTTL", world.keys.lease(a.incarnation)) != -1
