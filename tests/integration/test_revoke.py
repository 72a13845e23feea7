"""drain.lua: a consumer that does not answer loses the right to renew; its lease then ends by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.integration.factories import World
from usher.common.base.errors import Fenced
from usher.master.leader.leader_scripts import LeaderScripts


def test_a_revoked_lease_keeps_its_end_and_cannot_be_renewed(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    before_ms = world.link.call("PTTL", world.keys.lease(a.incarnation))
    assert leader.revoke(a.incarnation)
    assert world.lease(a) == b"revoked"
    assert 0 < world.link.call("PTTL", world.keys.lease(a.incarnation)) <= before_ms
    for less_ms, renew in (
        (1000, lambda left_ms: a.steps.renew(600_000, b"-", left_ms)[0]),
        (2000, partial(a.steps.extend, 600_000)),
    ):
        assert renew(before_ms - less_ms) == "revoked", "what it has left by its owner's clock"
        assert 0 < world.link.call("PTTL", world.keys.lease(a.incarnation)) <= before_ms - less_ms


def test_revoking_twice_is_as_good_as_once(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    leader.revoke(a.incarnation)
    with world.unchanged():
        assert leader.revoke(a.incarnation)


def test_until_its_lease_ends_a_revoked_owner_may_acknowledge_and_nothing_is_taken_from_it(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    leader.revoke(a.incarnation)
    assert leader.take_back(a.incarnation, 10) is None
    a.steps.ack(ids)


def test_a_lease_that_has_ended_is_not_brought_back(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.end_lease(a)
    with world.unchanged():
        assert not leader.revoke(a.incarnation)


def test_a_lease_about_to_end_does_not_become_one_without_an_end(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    for _ in range(200):
        world.link.call("SET", world.keys.lease(a.incarnation), "live", "PX", 1)
        leader.revoke(a.incarnation)
        assert world.link.call("PTTL", world.keys.lease(a.incarnation)) != -1


def test_a_deposed_leader_revokes_nobody(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader, a = world.elect(), world.join("a")
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.revoke(a.incarnation)
