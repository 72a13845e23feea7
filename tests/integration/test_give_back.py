"""give_back.lua: an owner returns tickets under their fences, each marked with what it was, and until when it waits."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.integration.factories import LEASE_MS, TRICKY_IDS, Owner, World, fetch, hand_over, plan
from usher.common.base.clock import now_s
from usher.consumer.lifecycle.owner_scripts import GiveBack
from usher.master.leader.leader_scripts import LeaderScripts


def _redis_ms(world: World) -> int:
    seconds, micros = world.link.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def _fence(world: World, ticket: bytes) -> int:
    return int(world.head(ticket).split()[1])


def _draining(
    world: World, ticket: bytes = b"T", ids: Sequence[bytes] = (b"1-1", b"2-1")
) -> tuple[LeaderScripts, Owner]:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, ticket, *ids)
    a.steps.drain(LEASE_MS)
    return leader, a


def test_the_entries_go_to_master_and_the_record_says_that_they_were_returned(world: World) -> None:
    _, a = _draining(world, ids=TRICKY_IDS)
    fence = int(world.head(b"T").split()[1])
    assert world.give_back(a, {b"T": TRICKY_IDS}) == []
    assert world.pending() == {b"master": list(TRICKY_IDS)}
    assert world.record(b"T") == (b"returned", fence, list(TRICKY_IDS))
    assert set(world.deliveries().values()) == {1}, "giving back is no delivery"


@pytest.mark.parametrize("state", ["live", "draining", "revoked"])
def test_while_there_is_a_lease_its_holder_may_give_back(world: World, state: str) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    if state == "draining":
        a.steps.drain(LEASE_MS)
    elif state == "revoked":
        leader.revoke(a.incarnation)
    assert world.give_back(a, {b"T": ids}) == []
    assert world.pending() == {b"master": ids}


def test_without_ids_all_that_the_record_names_goes_in_the_order_of_the_stream(world: World) -> None:
    """RECALL.md, R5: the caller may not have read the newest of them yet; it has closed the fence."""
    leader, a = world.elect(), world.join("a")
    early, late = world.parked(leader, b"T", b"999-10", b"1000-1")
    hand_over(leader, plan(a, {b"T": [late]}))
    hand_over(leader, plan(a, {b"T": [early]}, {b"T": world.head(b"T")}))
    fence = _fence(world, b"T")
    assert a.steps.give_back([GiveBack(b"T", fence)]) == [True]
    assert world.record(b"T") == (b"returned", fence, [early, late])
    assert world.pending() == {b"master": [early, late]}


def test_a_call_that_comes_again_does_not_give_back_what_was_handed_over_since(world: World) -> None:
    """RECALL.md, R1: the reply was lost, and the ticket came back to the same owner, under a later fence."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    call = GiveBack(b"T", _fence(world, b"T"))
    assert a.steps.give_back([call]) == [True]
    hand_over(leader, plan(a, {b"T": ids}, {b"T": world.head(b"T")}))
    with world.unchanged():
        assert a.steps.give_back([call, call._replace(due_s=now_s() + 1)]) == [False, False]
        assert a.steps.give_back([call._replace(fence=_fence(world, b"T") + 1)]) == [False]
    assert world.pending() == {a.name: ids}


def test_the_leader_is_told_of_what_was_given_back_and_of_nothing_else(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    for ticket in (b"T", b"U", b"V"):
        world.owned(leader, a, ticket)
    before = world.link.call("XLEN", world.keys.changed)
    calls = [GiveBack(ticket, _fence(world, ticket)) for ticket in (b"T", b"U", b"V")]
    calls[1] = calls[1]._replace(fence=1)
    assert a.steps.give_back(calls) == [True, False, True]
    told = world.link.call("XRANGE", world.keys.changed, "-", "+")[before:]
    assert [fields for _, fields in told] == [[b"ticket", b"T"], [b"ticket", b"V"]]


def test_a_ticket_that_is_to_wait_says_until_when_by_the_clock_of_redis(world: World) -> None:
    """RECALL.md, W1: in the same step, so that no leader reads a ticket that was given back and may go on at once."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    fence, earliest_ms = _fence(world, b"T"), _redis_ms(world)
    with world.unchanged():  # it does not wait: it is ours, and may run
        assert a.steps.give_back([GiveBack(b"T", fence, (b"on",))]) == [False]
    assert a.steps.give_back([GiveBack(b"T", fence, due_s=now_s() + 86_400)]) == [True]
    record = world.record(b"T")
    assert record is not None
    due_ms = int(record.owner.removeprefix(b"waits@"))
    assert 0 <= due_ms - 86_400_000 - earliest_ms <= _redis_ms(world) - earliest_ms + 2  # of two fractions
    assert (record.fence, record.ids, world.pending()) == (fence, ids, {b"master": ids})
    assert a.steps.give_back([GiveBack(b"T", fence, (b"on",))]) == [True]
    assert world.head(b"T") == b"returned %d" % fence


def test_a_ticket_of_which_all_lost_its_body_does_not_wait(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T", b"1-1")
    world.delete(b"1-1")
    assert a.steps.give_back([GiveBack(b"T", _fence(world, b"T"), due_s=now_s() + 1)]) == [True]
    assert (world.record(b"T") is None) == world.claiming_drops_the_bodiless


def test_what_is_over_stays_so(world: World) -> None:
    """The record names it still."""
    _, a = _draining(world, ids=(b"1-1", b"1-10"))
    a.steps.ack([b"1-1"])
    assert world.give_back(a, {b"T": [b"1-10"]}) == []
    assert world.pending() == {b"master": [b"1-10"]}
    record = world.record(b"T")
    assert record is not None
    assert (record.owner, record.ids) == (b"returned", [b"1-10"])


def test_a_ticket_whose_late_entry_was_handed_over_first_is_given_back_in_the_order_of_the_stream(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    early, late = world.parked(leader, b"T", b"999-10", b"1000-1")
    hand_over(leader, plan(a, {b"T": [late]}))
    hand_over(leader, plan(a, {b"T": [early]}, {b"T": world.head(b"T")}))
    a.steps.drain(LEASE_MS)
    assert world.give_back(a, {b"T": [early, late]}) == []
    record = world.record(b"T")
    assert record is not None
    assert record.ids == [early, late]


def test_what_others_have_or_nobody_has_is_kept(world: World) -> None:
    leader, a = _draining(world)
    b = world.join("b")
    theirs, parked = world.owned(leader, b, b"U"), world.parked(leader, b"V")
    with world.unchanged():
        assert world.give_back(a, {b"U": theirs, b"V": parked, b"W": [b"9-9"]}) == [b"U", b"V", b"W"]


@pytest.mark.parametrize("lost", [(b"1-1",), (b"2-1",), (b"1-1", b"2-1")])
@pytest.mark.parametrize("when", ["before", "dropped by a renewal before"])
def test_what_lost_its_body_is_named_only_if_it_is_still_pending(
    world: World, lost: tuple[bytes, ...], when: str
) -> None:
    """A `returned` record that names what is not pending would stop its ticket: nobody can hand that over."""
    leader, a = _draining(world)
    world.delete(*lost)
    if when == "dropped by a renewal before":
        world.make_idle_if_there(a.incarnation, LEASE_MS, b"1-1", b"2-1")
        a.steps.renew(LEASE_MS)
    assert world.give_back(a, {b"T": [b"1-1", b"2-1"]}) == []
    left = [entry_id for entry_id in (b"1-1", b"2-1") if entry_id not in lost or not world.claiming_drops_the_bodiless]
    record = world.record(b"T")
    assert (record.ids if record else []) == left
    assert world.pending() == ({b"master": left} if left else {})
    letters = [(entry_id, b"T", b"body_gone") for entry_id in lost] if world.claiming_drops_the_bodiless else []
    assert world.state().letters() == letters
    b = world.join("b")
    if left:
        hand_over(leader, plan(b, {b"T": left}, {b"T": world.head(b"T")}))


def test_thousands_are_given_back_in_one_call(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    names = [b"T%d" % n for n in range(4500)]
    ids = world.send_many(names)
    fetch(leader, 10_000)
    parts = {name: [entry_id] for name, entry_id in zip(names, ids, strict=True)}
    hand_over(leader, plan(a, parts))
    parts[b"many"] = world.owned(leader, a, b"many", *[b"%d-1" % n for n in range(10_001, 15_001)])
    a.steps.drain(LEASE_MS)
    world.link.call("CONFIG", "RESETSTAT")
    assert world.give_back(a, parts) == []
    assert world.pending().keys() == {b"master"}
    claims = re.search(r"cmdstat_xclaim:calls=(\d+)", world.link.call("INFO", "commandstats").decode())
    assert claims and int(claims[1]) == 4500 + 2, "a call for each ticket, and one more for each 4,000 of its ids"
