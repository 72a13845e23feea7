"""renew.lua: a living incarnation extends its lease and touches what it has pending, in one step."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from tests.integration.factories import LEASE_MS, Owner, World, fetch, spent
from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow
from usher.consumer.handlers.message import OwnLease
from usher.consumer.lifecycle.lease import Heartbeat


def _idle_ms(world: World) -> dict[bytes, int]:
    return {entry_id: idle_ms for entry_id, _, idle_ms, _ in world.pending_rows()}


_PLAINLY = pytest.mark.parametrize("plainly", [False, True], ids=["touching", "plainly"])


def _renew(owner: Owner, lease_ms: int, plainly: bool) -> str:
    return owner.steps.extend(lease_ms, LEASE_MS) if plainly else owner.steps.renew(lease_ms)[0]


@_PLAINLY
def test_the_lease_is_extended_and_keeps_its_state(world: World, plainly: bool) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    b.steps.drain(LEASE_MS)
    for owner, state in ((a, "live"), (b, "draining")):
        assert _renew(owner, 2 * LEASE_MS, plainly) == state
        assert world.lease(owner) == state.encode()
        assert LEASE_MS < world.link.call("PTTL", world.keys.lease(owner.incarnation)) <= 2 * LEASE_MS
    assert leader.epoch


@_PLAINLY
def test_a_lease_that_has_ended_is_not_brought_back_and_nothing_is_touched(world: World, plainly: bool) -> None:
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    world.make_idle(a.incarnation, 100_000, entry_id)
    world.end_lease(a)
    with world.unchanged():
        assert _renew(a, LEASE_MS, plainly) == ""
    assert _idle_ms(world)[entry_id] >= 100_000


def test_whatever_is_pending_is_touched_and_that_counts_as_no_delivery(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    old, young = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.make_idle(a.incarnation, LEASE_MS // 3, old)
    world.make_idle(a.incarnation, 6000, young)
    assert a.steps.renew(LEASE_MS) == ("live", 2, b"")
    assert max(_idle_ms(world).values()) < 5000
    assert world.deliveries() == {old: 1, young: 1}


def test_renewed_in_time_nothing_of_a_living_owner_ever_meets_the_sweep(world: World) -> None:
    """Renewals every third of the lease, of which one in three touches: the oldest that an entry gets before the lease
    itself ends is 5/3 of a lease, the sweep looks from 2 on."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    a.steps.renew(LEASE_MS)
    for _ in range(2):
        a.steps.extend(LEASE_MS, LEASE_MS)
    world.make_idle(a.incarnation, 5 * LEASE_MS // 3, *ids)  # the lease is at its end now
    with world.unchanged():
        assert leader.sweep([], 2 * LEASE_MS, b"0-0", 100).strays == []


def test_what_others_have_is_not_touched(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    theirs, parked = world.owned(leader, b, b"U"), world.parked(leader, b"V")
    world.make_idle(b.incarnation, 100_000, *theirs)
    world.make_idle(b"master", 100_000, *parked)
    assert a.steps.renew(LEASE_MS) == ("live", 0, b"")
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


def test_ids_whose_order_differs_as_text_are_all_touched(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = [
        *(b"%d-%d" % (ms, n) for ms in (999, 1000) for n in (1, 2, 9, 10, 99)),
        *(b"%d-1" % ms for ms in range(2000, 3200)),
    ]
    world.owned(leader, a, b"T", *ids)
    world.make_idle(a.incarnation, LEASE_MS, *ids)
    _, touched, following = a.steps.renew(LEASE_MS)
    assert touched + a.steps.renew(LEASE_MS, following)[1] == len(ids)


def test_without_a_group_the_lease_is_extended_all_the_same(world: World) -> None:
    a = world.join("a")
    world.link.call("DEL", world.keys.stream)
    assert a.steps.renew(2 * LEASE_MS) == ("live", 0, b"")
    assert world.link.call("PTTL", world.keys.lease(a.incarnation)) > LEASE_MS
    world.make_group()


def test_an_entry_whose_body_is_gone_is_still_the_owners_to_end(world: World) -> None:
    """From 7.0 on Redis drops it from the pending list; the index still names it."""
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.make_idle(a.incarnation, LEASE_MS, first, second)
    world.delete(first)
    record = world.stream.record_of(b"T")
    assert a.steps.renew(LEASE_MS)[0] == "live"
    assert world.pending() == {a.name: [second] if world.claiming_drops_the_bodiless else [first, second]}
    assert world.stream.record_of(b"T") == record
    a.steps.ack([first])
    assert world.pending() == {a.name: [second]}


def test_one_of_three_renewals_touches_and_the_first_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are one plain command. One that failed does not count."""
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    lost = list[str]()
    heart = Heartbeat(a.steps, OwnLease(LEASE_MS / 1000, now_s()), lambda: True, lost.append)
    touching = {"evalsha": 1, "getex": 1, "xpending": 1, "xclaim": 1}
    asked = [spent(world.link, heart.run_once) for _ in range(4)]
    assert asked == [touching, {"getex": 1}, {"getex": 1}, touching]
    for _ in range(2):
        heart.run_once()
    with monkeypatch.context() as patched:
        patched.setattr(a.steps, "renew", Mock(side_effect=NotNow("BUSY", "a script runs")))
        assert heart.run_once() == LEASE_MS / 10_000
    assert spent(world.link, heart.run_once) == touching
    world.end_lease(a)
    heart.run_once()
    assert lost == ["the lease is lost: it had ended"]
