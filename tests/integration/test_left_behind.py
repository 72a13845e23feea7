"""The end of a recovery: what a dead incarnation had, and did not come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import LEASE_MS, World, bury
from usher.common.base.errors import Fenced
from usher.consumer.lifecycle.owner_scripts import Letter
from usher.master.leader.entries import Rejected
from usher.master.leader.leader_scripts import LeaderScripts


def test_what_somebody_took_to_master_unseen_is_told(world: World) -> None:
    """Behind the leader's back; it must be known before anything later of its ticket is planned."""
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    ids = world.owned(leader, a, b"T", b"1-1", b"1-10", b"1-11", b"2-1")
    others = world.owned(leader, b, b"U", b"3-1")
    world.make_idle(b"master", 0, b"1-1", b"1-11")
    world.make_idle(b"stranger", 0, *others)
    world.delete(b"1-10")
    world.end_lease(a)
    assert [found.id for found in leader.take_back(a.incarnation, 10).found] == [b"2-1"]
    held = [(b"T", ids), (b"U", others)]
    assert leader.left_behind(a.incarnation, held) == [(one, b"T") for one in (b"1-1", b"1-11", b"2-1")]
    assert world.pending() == {b"master": [b"1-1", b"1-11", b"2-1"], b"stranger": others}
    world.apart_because = "what another owner had was taken by hand"


@pytest.mark.parametrize("is_told", [False, True])
def test_what_redis_has_dropped_is_a_dead_letter_once_and_what_is_over_is_none(world: World, is_told: bool) -> None:
    """A body deleted while its owner lives, which then dies. From 7.0 on its renewal drops the entry, so that the leader
    is the last that knows of it; before, taking it back has written the letter."""
    leader, a = world.elect(), world.join("a")
    over, entry_id = world.owned(leader, a, b"T", b"1-1", b"2-1")
    a.steps.ack([over])
    world.delete(entry_id)
    world.make_idle_if_there(a.incarnation, LEASE_MS, entry_id)
    a.steps.renew(LEASE_MS)
    if is_told:
        bury(a.steps, Letter(b"T", entry_id, "gave_up", "", 1, 1, 2))
    world.end_lease(a)
    while leader.take_back(a.incarnation, 100).last:
        pass
    for _ in range(2):
        assert leader.left_behind(a.incarnation, [(b"T", [over, entry_id])]) == []
    ticket = b"T" if is_told or world.claiming_drops_the_bodiless else b""
    assert world.state().letters() == [(entry_id, ticket, b"body_gone")]
    assert world.dead()[0][b"usher-owner"] == a.name


def test_a_deposed_leader_writes_no_letter(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader, a = world.elect(), world.join("a")
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.left_behind(a.incarnation, [(b"T", [b"1-1"])])


def test_of_what_a_dead_one_had_nothing_that_is_there_is_rejected(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    held = world.owned(leader, a, b"T")
    held += world.parked(leader, b"U")
    with world.unchanged():
        assert leader.reject([Rejected(one, b"T", "body_gone") for one in held], "x:1") == 2
