"""charge.lua: the attempts of messages whose handlers hang survive the process that is about to be killed."""

from __future__ import annotations

import pytest

from common.errors import OwnershipLost
from common.streams import pairs
from tests.integration.factories import World
from tests.integration.memory import full_memory


def attempts(world: World) -> dict[bytes, bytes]:
    return pairs(world.link.call("HGETALL", world.keys.attempts))


def test_attempts_are_noted_by_message(world: World) -> None:
    owner = world.join("a")
    owner.steps.charge({b"1-1": 1, b"1-10": 3})
    assert attempts(world) == {b"1-1": b"1", b"1-10": b"3"}


def test_a_later_attempt_takes_the_place_of_an_earlier_one_and_neighbours_are_not_charged(world: World) -> None:
    owner = world.join("a")
    owner.steps.charge({b"1-1": 1, b"2-1": 1})
    owner.steps.charge({b"1-1": 2})
    assert attempts(world) == {b"1-1": b"2", b"2-1": b"1"}


def test_the_same_call_twice_counts_once(world: World) -> None:
    owner = world.join("a")
    owner.steps.charge({b"1-1": 2})
    with world.unchanged():
        owner.steps.charge({b"1-1": 2})


def test_after_the_end_of_its_lease_an_owner_charges_nothing(world: World) -> None:
    owner = world.join("a")
    world.end_lease(owner)
    with world.unchanged(), pytest.raises(OwnershipLost):
        owner.steps.charge({b"1-1": 1})


def test_a_successor_of_the_same_name_does_not_let_the_former_incarnation_charge(world: World) -> None:
    former = world.join("a", lock="boot:1:2:1")
    world.join("a", lock="boot:1:2:2")
    with world.unchanged(), pytest.raises(OwnershipLost):
        former.steps.charge({b"1-1": 1})


@pytest.mark.parametrize("state", ["draining", "revoked"])
def test_while_its_lease_lives_an_owner_charges_also_when_it_is_leaving(world: World, state: str) -> None:
    """Until the lease has ended nobody else can have started the message."""
    owner = world.join("a")
    if state == "draining":
        owner.steps.drain(60_000)
    else:
        world.elect().revoke(owner.incarnation)
    owner.steps.charge({b"1-1": 1})
    assert attempts(world) == {b"1-1": b"1"}


def test_attempts_go_with_the_acknowledgement(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    first, second = world.owned(leader, owner, b"T", b"1-1", b"2-1")
    owner.steps.charge({first: 1, second: 2})
    owner.steps.ack({b"T": [first]}, b"", 0)
    assert attempts(world) == {second: b"2"}


def test_hundreds_at_once(world: World) -> None:
    owner = world.join("a")
    many = {b"%d-1" % n: 1 for n in range(1024)}  # as many as handlers can run at once
    owner.steps.charge(many)
    assert set(attempts(world)) == set(many)


def test_it_works_at_full_memory(world: World) -> None:
    """A hanging handler must not live for ever because nothing can be noted."""
    owner = world.join("a")
    owner.steps.charge({b"1-1": 1})
    with full_memory(world.link):
        owner.steps.charge({b"1-1": 2, b"2-1": 1})
    assert attempts(world) == {b"1-1": b"2", b"2-1": b"1"}
