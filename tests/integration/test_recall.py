"""recall.lua: an incarnation is asked to give tickets back, by a record in its inbox that names what it may have
started."""

from __future__ import annotations

import pytest

from tests.integration.factories import NASTY_TICKETS, World
from usher.common.base.errors import Fenced
from usher.common.redis.replies import pairs


def last_record(world: World, incarnation: str) -> dict[bytes, bytes]:
    [(_, fields)] = world.link.call("XREVRANGE", world.keys.inbox(incarnation), "+", "-", "COUNT", 1)
    return pairs(fields)


def test_the_record_names_each_ticket_with_its_fence_and_all_ids_of_its_record(world: World) -> None:
    leader, a = world.elect(), world.join()
    world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.owned(leader, a, b"U", b"3-1")
    fences = {ticket: world.head(ticket).split()[1] for ticket in (b"T", b"U")}
    before = world.state()
    assert leader.recall(a.incarnation, list(fences.items())) == []
    assert last_record(world, a.incarnation) == {
        b"recall": b"1",
        b"between": b"\n",
        b"tickets": b"T\nU",
        b"ids": b"%s 1-1 2-1\n%s 3-1" % (fences[b"T"], fences[b"U"]),
    }
    assert world.state() == before, "asking changes nothing"


def test_names_of_any_kind_can_be_told_apart(world: World) -> None:
    leader, a = world.elect(), world.join()
    for number, ticket in enumerate(NASTY_TICKETS, 1):
        world.owned(leader, a, ticket, b"%d-1" % number)
    fences = [(ticket, world.head(ticket).split()[1]) for ticket in NASTY_TICKETS]
    assert leader.recall(a.incarnation, fences) == []
    record = last_record(world, a.incarnation)
    assert record[b"tickets"].split(record[b"between"]) == list(NASTY_TICKETS)


def test_what_it_has_no_more_or_has_under_another_fence_is_not_asked_for(world: World) -> None:
    """The head has changed since the leader last looked: given back, done, or handed over anew."""
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    world.owned(leader, a, b"mine", b"1-1")
    world.owned(leader, b, b"theirs", b"2-1")
    done = world.owned(leader, a, b"done", b"3-1")
    a.steps.ack(done)
    world.parked(leader, b"waits", b"4-1")
    world.spoil(b"waits", b"waits@99999999999999 5 4-1")
    fence = world.head(b"mine").split()[1]
    asked = [(b"mine", fence), (b"mine", b"1"), (b"theirs", fence), (b"done", fence), (b"waits", b"5"), (b"none", b"1")]
    assert leader.recall(a.incarnation, asked) == [b"mine", b"theirs", b"done", b"waits", b"none"]
    assert last_record(world, a.incarnation)[b"tickets"] == b"mine"
    with world.unchanged():
        assert leader.recall(a.incarnation, [(b"done", fence)]) == [b"done"]


@pytest.mark.parametrize("state", ["LOST", "DRAINING", "REVOKED"])
def test_one_that_does_not_take_work_is_not_asked_and_a_dead_inbox_stays_dead(world: World, state: str) -> None:
    leader, a = world.elect(), world.join()
    world.owned(leader, a, b"T", b"1-1")
    fence = world.head(b"T").split()[1]
    world.refuse(leader, a, state)
    if state == "LOST":
        while leader.take_back(a.incarnation, 10).size:
            pass
    with world.unchanged():
        assert leader.recall(a.incarnation, [(b"T", fence)]) == [b"T"]
    assert (state == "LOST") == (world.link.call("EXISTS", world.keys.inbox(a.incarnation)) == 0)


def test_a_former_leader_asks_for_nothing(world: World) -> None:
    """Its late command, whose reply it never heard, is refused."""
    late, a = world.elect(), world.join()
    world.owned(late, a, b"T", b"1-1")
    world.elect("http://two", str(late.epoch))
    with world.unchanged(), pytest.raises(Fenced):
        late.recall(a.incarnation, [(b"T", world.head(b"T").split()[1])])


def test_asking_twice_is_two_records_of_one_question(world: World) -> None:
    """The reply was lost, and the new epoch asks again."""
    leader, a = world.elect(), world.join()
    world.owned(leader, a, b"T", b"1-1")
    fence = world.head(b"T").split()[1]
    leader.recall(a.incarnation, [(b"T", fence)])
    first = last_record(world, a.incarnation)
    leader.recall(a.incarnation, [(b"T", fence)])
    assert last_record(world, a.incarnation) == first
