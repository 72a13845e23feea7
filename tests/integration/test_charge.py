"""charge.lua: attempts that failed, that are about to be killed with their process, or that are about to begin where
nobody would learn of it."""

from __future__ import annotations

import pytest

from tests.integration.factories import Owner, World
from tests.integration.memory import full_memory
from usher.common.base.clock import wall_ms
from usher.common.base.errors import OwnershipLost
from usher.common.protocol.attempts import Attempts, decode
from usher.common.protocol.last_error import LastError, NotedError, encode
from usher.common.redis.replies import pairs
from usher.master.leader.leader_scripts import LeaderScripts


def attempts(world: World) -> dict[bytes, Attempts]:
    return {
        entry_id: decode(value) for entry_id, value in pairs(world.link.call("HGETALL", world.keys.attempts)).items()
    }


@pytest.fixture
def leader(world: World) -> LeaderScripts:
    return world.elect()


@pytest.fixture
def owner(world: World, leader: LeaderScripts) -> Owner:
    """It has 1-1, 1-10 and 2-1."""
    owner = world.join("a", lock="boot:1:2:100")
    world.owned(leader, owner, b"T", b"1-1", b"1-10", b"2-1")
    return owner


def test_attempts_are_noted_by_message(world: World, owner: Owner) -> None:
    owner.steps.charge({b"1-1": Attempts(1, 1), b"1-10": Attempts(3, 2, 1, 1)})
    assert attempts(world) == {b"1-1": Attempts(1, 1), b"1-10": Attempts(3, 2, 1, 1)}


def test_a_later_attempt_takes_the_place_of_an_earlier_one_and_neighbours_are_not_charged(
    world: World, owner: Owner
) -> None:
    owner.steps.charge({b"1-1": Attempts(3, 3, 2), b"2-1": Attempts(1, 1)})
    owner.steps.charge({b"1-1": Attempts(3, 1)})
    assert attempts(world) == {b"1-1": Attempts(3, 1), b"2-1": Attempts(1, 1)}


def test_the_same_call_twice_counts_once_and_is_in_the_run_log_once(world: World, owner: Owner) -> None:
    owner.steps.charge({b"1-1": Attempts(2, 1)}, b"run", 100)
    with world.unchanged():
        owner.steps.charge({b"1-1": Attempts(2, 1)}, b"run", 100)
    assert [pairs(fields) for _, fields in world.link.call("XRANGE", world.keys.runs, "-", "+")] == [{b"batch": b"run"}]


def test_what_is_not_pending_for_it_is_not_noted(world: World, leader: LeaderScripts, owner: Owner) -> None:
    """Acknowledged, never heard of, parked, or another's: the field would stay for ever, or be wrong."""
    other = world.join("b")
    world.owned(leader, other, b"U", b"5-1")
    world.parked(leader, b"V", b"6-1")
    owner.steps.ack([b"1-1"])
    gone = dict.fromkeys((b"1-1", b"5-1", b"6-1", b"99-1"), Attempts(1, 1))
    with world.unchanged():
        owner.steps.charge(gone, b"run", 100)
    owner.steps.charge({b"1-1": Attempts(1, 1), b"1-10": Attempts(1, 1)})
    assert set(attempts(world)) == {b"1-10"}


def test_while_the_group_is_gone_nothing_is_noted_and_nothing_is_held_up(world: World, owner: Owner) -> None:
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    owner.steps.charge({b"1-1": Attempts(1, 1)}, b"run", 100)
    assert attempts(world) == {}
    world.apart_because = "the group is gone"
    world.make_group()


def test_after_the_end_of_its_lease_an_owner_charges_nothing(world: World, owner: Owner) -> None:
    world.end_lease(owner)
    with world.unchanged(), pytest.raises(OwnershipLost):
        owner.steps.charge({b"1-1": Attempts(1, 1)})


def test_a_successor_of_the_same_name_does_not_let_the_former_incarnation_charge(world: World, owner: Owner) -> None:
    world.join("a", lock="boot:1:2:200")
    with world.unchanged(), pytest.raises(OwnershipLost):
        owner.steps.charge({b"1-1": Attempts(1, 1)})


@pytest.mark.parametrize("state", ["draining", "revoked"])
def test_while_its_lease_lives_an_owner_charges_also_when_it_is_leaving(
    world: World, leader: LeaderScripts, owner: Owner, state: str
) -> None:
    """Until the lease has ended nobody else can have started the message."""
    if state == "draining":
        owner.steps.drain(60_000)
    else:
        leader.revoke(owner.incarnation)
    owner.steps.charge({b"1-1": Attempts(1, 1)})
    assert attempts(world) == {b"1-1": Attempts(1, 1)}


def test_attempts_go_with_the_acknowledgement(world: World, owner: Owner) -> None:
    owner.steps.charge({b"1-1": Attempts(1, 1), b"1-10": Attempts(2, 2)})
    owner.steps.ack([b"1-1"])
    assert attempts(world) == {b"1-10": Attempts(2, 2)}


def test_hundreds_at_once(world: World, leader: LeaderScripts) -> None:
    owner = world.join("a")
    ids = world.owned(
        leader, owner, b"T", *[b"%d-1" % n for n in range(1, 1025)]
    )  # as many as handlers can run at once
    owner.steps.charge(dict.fromkeys(ids, Attempts(1, 1)))
    assert set(attempts(world)) == set(ids)


def test_it_works_at_full_memory(world: World, owner: Owner) -> None:
    """A hanging handler must not live for ever because nothing can be noted."""
    owner.steps.charge({b"1-1": Attempts(1, 1)})
    with full_memory(world.link):
        owner.steps.charge({b"1-1": Attempts(2, 2), b"2-1": Attempts(1, 1)}, b"run", 100)
    assert attempts(world) == {b"1-1": Attempts(2, 2), b"2-1": Attempts(1, 1)}


def test_the_last_error_is_kept_and_stays_when_a_call_brings_none(world: World, owner: Owner) -> None:
    owner.steps.charge({b"1-1": Attempts(1, 1)}, errors={b"1-1": NotedError(b"first", b"trace")})
    owner.steps.charge({b"1-1": Attempts(2, 2)}, errors={b"1-1": NotedError(b"second", b"")})
    owner.steps.charge({b"1-1": Attempts(3, 2)})
    assert pairs(world.link.call("HGETALL", world.keys.errors)) == {b"1-1": b"second"}
    new = LastError("KeyError: 1", "KeyError", "a.py:1", at_ms=wall_ms())
    owner.steps.charge({b"1-1": Attempts(3, 2)}, errors={b"1-1": encode(new, "trace")})
    later = new._replace(at_ms=new.at_ms + 9000)
    owner.steps.charge({b"1-1": Attempts(4, 3)}, errors={b"1-1": encode(later, "")})
    assert owner.steps.some_errors() == [later._replace(since_ms=new.at_ms)], "its first failure does not move"


def test_errors_of_very_many_messages_are_kept_without_tracebacks_and_then_not_at_all(
    world: World, owner: Owner
) -> None:
    def fill(until: int) -> None:
        have = world.link.call("HLEN", world.keys.errors)
        world.link.call("HSET", world.keys.errors, *[part for n in range(have, until) for part in (b"x%d" % n, b"{}")])

    error = NotedError(b"{}", b"trace")
    fill(10_000)
    owner.steps.charge({b"1-1": Attempts(1, 1)}, errors={b"1-1": error})
    assert world.link.call("HMGET", world.keys.errors, "1-1", "t1-1") == [b"{}", None]
    fill(50_000)
    owner.steps.charge(
        {b"1-1": Attempts(2, 2), b"1-10": Attempts(1, 1)}, errors={b"1-1": NotedError(b"new", b""), b"1-10": error}
    )
    assert world.link.call("HMGET", world.keys.errors, "1-1", "1-10") == [b"new", None]
    assert attempts(world) == {b"1-1": Attempts(2, 2), b"1-10": Attempts(1, 1)}


def test_errors_of_others_are_not_kept(world: World, leader: LeaderScripts, owner: Owner) -> None:
    other = world.join("b")
    world.owned(leader, other, b"U", b"5-1")
    owner.steps.charge({b"5-1": Attempts(1, 1)}, errors={b"5-1": NotedError(b"{}", b"trace")})
    assert world.link.call("EXISTS", world.keys.errors) == 0


def test_executions_stay_with_their_message_the_first_and_the_last_and_go_into_its_letter(
    world: World, owner: Owner
) -> None:
    for number in [*range(1, 16), 15]:  # the last reply was lost
        noted = {b"1-1": NotedError(runs=b"run %d" % number)}
        owner.steps.charge({b"1-1": Attempts(number, number)}, b"run", 100, noted, 1)
    kept = b"\n".join(b"run %d" % number for number in (1, *range(5, 16)))
    assert world.link.call("HGETALL", world.keys.errors) == [b"h1-1", kept]
    assert world.link.call("HGETALL", world.keys.failures) == [b"failed", b"15"]
    world.give_up(owner, b"T", "skip")
    assert world.dead()[0][b"usher-history"] == kept
    owner.steps.charge({b"1-10": Attempts(1, 1)}, errors={b"1-10": NotedError(b"{}", b"trace", b"run")})
    owner.steps.ack([b"1-10"])
    assert world.link.call("EXISTS", world.keys.errors) == 0
