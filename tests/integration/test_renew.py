"""renew.lua: a living incarnation extends its lease and touches what it has pending, in one step."""

from __future__ import annotations

import pytest

from tests.integration.factories import LEASE_MS, World, fetch
from usher.common.protocol.keys import Keys
from usher.consumer.lifecycle.owner_scripts import Renewal


def _idle_ms(world: World) -> dict[bytes, int]:
    return {entry_id: idle_ms for entry_id, _, idle_ms, _ in world.pending_rows()}


def test_the_lease_is_extended_and_keeps_its_state(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    b.steps.drain(LEASE_MS)
    for owner, state in ((a, "live"), (b, "draining")):
        assert owner.steps.renew(2 * LEASE_MS) == Renewal(state, 0)
        assert world.lease(owner) == state.encode()
        assert LEASE_MS < world.link.call("PTTL", world.keys.lease(owner.incarnation)) <= 2 * LEASE_MS
    assert leader.epoch


def test_a_lease_that_has_ended_is_not_brought_back_and_nothing_is_touched(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    world.make_idle(a.incarnation, 100_000, entry_id)
    world.end_lease(a)
    with world.unchanged():
        assert a.steps.renew(LEASE_MS) == Renewal("", 0)
    assert _idle_ms(world)[entry_id] >= 100_000


def test_what_was_not_touched_for_a_third_of_the_lease_is_and_counts_as_no_delivery(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    old, young = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.make_idle(a.incarnation, LEASE_MS // 3, old)
    world.make_idle(a.incarnation, LEASE_MS // 3 - 5000, young)
    assert a.steps.renew(LEASE_MS) == Renewal("live", 1)
    idle_ms = _idle_ms(world)
    assert idle_ms[old] < 5000 < idle_ms[young]
    assert world.deliveries() == {old: 1, young: 1}


def test_renewed_in_time_nothing_of_a_living_owner_ever_meets_the_sweep(world: World) -> None:
    """Renewals every third of the lease: the oldest that an entry gets before the lease itself ends is 4/3 of a lease,
    the sweep looks from 2 on."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.make_idle(a.incarnation, LEASE_MS // 3 - 1000, *ids)
    a.steps.renew(LEASE_MS)
    world.make_idle(a.incarnation, LEASE_MS // 3 - 1000 + LEASE_MS, *ids)  # the lease is at its end now
    with world.unchanged():
        assert leader.sweep([], 2 * LEASE_MS, b"0-0", 100).strays == []


def test_what_others_have_is_not_touched(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    theirs, parked = world.owned(leader, b, b"U"), world.parked(leader, b"V")
    world.make_idle(b.incarnation, 100_000, *theirs)
    world.make_idle(b"master", 100_000, *parked)
    assert a.steps.renew(LEASE_MS) == Renewal("live", 0)
    assert min(_idle_ms(world).values()) >= 100_000


@pytest.mark.parametrize("count", [999, 1000, 1001, 5000])
def test_thousands_are_touched_page_by_page(world: World, count: int) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send_many([b"T"] * count)
    fetch(leader, 20_000)
    world.make_idle(a.incarnation, LEASE_MS, *ids)
    world.apart_because = "they were not handed over"
    touched, start = [], b"-"
    while start:
        _, some, start = a.steps.renew(LEASE_MS, start)
        touched.append(some)
    assert (sum(touched), max(touched)) == (count, min(count, 1000)), "Redis does nothing else meanwhile"
    assert max(_idle_ms(world).values()) < LEASE_MS // 3
    assert a.steps.renew(LEASE_MS) == Renewal("live", 0)


def test_ids_whose_order_differs_as_text_are_all_touched(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = [
        *(b"%d-%d" % (ms, n) for ms in (999, 1000) for n in (1, 2, 9, 10, 99)),
        *(b"%d-1" % ms for ms in range(2000, 3200)),
    ]
    world.owned(leader, a, b"T", *ids)
    world.make_idle(a.incarnation, LEASE_MS, *ids)
    first = a.steps.renew(LEASE_MS)
    assert first.touched + a.steps.renew(LEASE_MS, first.following).touched == len(ids)


def test_without_a_group_the_lease_is_extended_all_the_same(world: World) -> None:
    a = world.join("a")
    world.link.call("DEL", world.keys.stream)
    assert a.steps.renew(2 * LEASE_MS) == Renewal("live", 0)
    assert world.link.call("PTTL", world.keys.lease(a.incarnation)) > LEASE_MS
    world.make_group()


def test_an_entry_whose_body_is_gone_is_still_the_owners_to_end(world: World) -> None:
    """From 7.0 on Redis drops it from the pending list; the index still names it."""
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.make_idle(a.incarnation, LEASE_MS, first, second)
    world.delete(first)
    index = world.state().index
    assert a.steps.renew(LEASE_MS).state == "live"
    assert world.pending() == {a.name: [second] if world.claiming_drops_the_bodiless else [first, second]}
    assert world.state().index == index
    a.steps.ack([first])
    assert world.pending() == {a.name: [second]}


def test_keys_are_all_that_a_lease_is_known_by(world: World) -> None:
    """Another stream's incarnation of the same name is somebody else."""
    a = world.join("a")
    other = Keys("ticket_stream", "other")
    world.link.call("SET", other.lease(a.incarnation), "live", "PX", 1000)
    a.steps.renew(2 * LEASE_MS)
    assert world.link.call("PTTL", other.lease(a.incarnation)) <= 1000
