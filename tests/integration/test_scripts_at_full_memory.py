"""When memory is full, everything that frees something or keeps somebody alive works; what would need more is refused
whole.

Redis 6.2 lets a script through once it has made a write that needs no memory; from 7.0 on the script's first line says
what it may do. Either way the answer must be the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from tests.integration.factories import LEASE_MS, Owner, World, bury, fetch, hand_over, plan, read
from tests.integration.memory import full_memory
from usher.common.base.errors import NotNow
from usher.consumer.lifecycle.owner_scripts import Buried, GiveBack, Letter
from usher.master.leader.entries import Rejected
from usher.master.leader.leader_scripts import LeaderScripts


def _letter(entry_id: bytes) -> Letter:
    return Letter(b"T", entry_id, "gave_up", "", 1, 1, 2)


def test_an_owner_goes_on_living_and_acknowledging(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second, third, fourth = world.owned(leader, a, b"T", b"1-1", b"2-1", b"3-1", b"4-1")
    world.link.call("HSET", world.keys.attempts, first, 1)
    world.make_idle(a.incarnation, LEASE_MS, second)
    with full_memory(world.link):
        assert a.steps.renew(2 * LEASE_MS) == ("live", 4, b"")
        assert a.steps.extend(2 * LEASE_MS, LEASE_MS) == "live"
        a.steps.ack([first], b"run", 100)
        assert bury(a.steps, _letter(second)) is Buried.OK
        a.steps.ack([third, fourth], b"run", 100)
    assert world.link.call("XLEN", world.keys.runs) == 2
    assert world.state().letters() == [(second, b"T", b"gave_up")]
    assert (world.pending(), world.state().index) == ({}, {})


def test_a_message_is_given_up_although_its_body_is_gone(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    world.delete(entry_id)
    with full_memory(world.link):
        assert bury(a.steps, _letter(entry_id)) is Buried.OK
    assert world.state().letters() == [(entry_id, b"T", b"body_gone")]


def test_an_owner_can_leave(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.delete(first)
    with full_memory(world.link):
        a.steps.drain(LEASE_MS)
        assert world.lease(a) == b"draining"
        assert world.give_back(a, {b"T": [first, second]}) == []
        assert a.steps.deregister()
    assert world.pending()[b"master"][-1] == second
    assert world.head(b"T").startswith(b"returned ")


def test_a_leader_is_elected_and_goes_on_leading(world: World) -> None:
    with full_memory(world.link):
        leader = world.elect()
        assert world.link.call("GETEX", world.keys.leader, "PX", 2 * LEASE_MS).startswith(b"%d " % leader.epoch)
        leader = world.elect(succeed=str(leader.epoch))
        of_lead = (world.keys.leader, world.keys.counters)
        assert world.scripts.run("elect", of_lead, ("", 0, str(leader.epoch))) == [b"RESIGNED"]
        assert world.elect("http://two").epoch > leader.epoch


def test_the_dead_are_recovered_and_forgotten(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    alone = world.owned(leader, a, b"U", b"3-1")
    world.delete(second, *alone)
    with full_memory(world.link):
        assert leader.revoke(a.incarnation)
        assert world.lease(a) == b"revoked"
        assert 0 < world.link.call("PTTL", world.keys.lease(a.incarnation)) <= LEASE_MS
        world.end_lease(a)
        while leader.take_back(a.incarnation, 1).last:
            pass
        assert leader.left_behind(a.incarnation, [(b"T", [first, second])]) == [(first, b"T")]
        assert leader.reap(a.incarnation, "a", a.registration.dump())
    assert world.pending() == {b"master": [first]}
    assert [entry_id for entry_id, _, _ in world.state().letters()] == [second, *alone]
    assert world.link.call("HLEN", world.keys.consumers) == 0


def test_a_part_of_a_dead_owners_ticket_is_taken_back(world: World) -> None:
    """The record is written again, shorter."""
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.end_lease(a)
    with full_memory(world.link):
        assert [found.id for found in leader.take_back(a.incarnation, 1).found] == [first]
    assert world.pending() == {b"master": [first], a.name: [second]}


def test_strays_are_found_and_what_is_parked_is_read(world: World) -> None:
    leader = world.elect()
    first, second, third, fourth = world.parked(leader, b"T", b"1-1", b"2-1", b"3-1", b"4-1")
    world.make_idle("stranger", 100_000, second, third)
    world.delete(first, third)
    with full_memory(world.link):
        assert [found.id for found in leader.read_parked(None, 100).found] == [fourth]
        swept = leader.sweep([], 50_000, b"0-0", 100)
        assert ([stray.id for stray, _ in swept.strays], swept.gone) == ([second], [third])
    assert world.pending() == {b"master": [second, fourth]}
    assert len(world.dead()) == 2


def test_an_audit_looks_again(world: World) -> None:
    """Where Redis takes no MULTI. All that is known of a ticket's entries, and nothing of what is not there."""
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.link.call("HSET", world.keys.attempts, first, 3)
    keys = (world.keys.stream, world.keys.tickets, world.keys.attempts)
    with full_memory(world.link):
        record, *rows = world.scripts.run("look_again", keys, (world.keys.group, b"T", first, second))
        nothing = world.scripts.run("look_again", keys, (world.keys.group, b"U", "9-9", "what"))
    assert record == b"%s %s %s" % (world.head(b"T"), first, second)
    assert [(owner, deliveries, tried) for owner, _, deliveries, tried in rows] == [
        (a.name, 1, b"3"),
        (a.name, 1, None),
    ]
    assert all(0 <= idle_ms < 60_000 for _, idle_ms, *_ in rows)
    assert nothing == [None, [None, 0, 0, None], [None, 0, 0, None]]


def test_what_nobody_can_use_becomes_a_dead_letter(world: World) -> None:
    leader = world.elect()
    first, second = world.parked(leader, b"", b"1-1", b"2-1")
    world.delete(second)
    with full_memory(world.link):
        assert leader.reject([Rejected(first, b"", "empty_ticket_id"), Rejected(second, b"", "empty_ticket_id")]) == 2
    assert world.pending() == {}
    assert len(world.dead()) == 2


def test_a_hand_over_to_a_new_owner_is_refused_whole(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    world.owned(leader, a, b"T")
    going_on, new = world.parked(leader, b"T"), world.parked(leader, b"U")
    for parts in ({b"U": new}, {b"T": going_on, b"U": new}, {b"U": new, b"T": going_on}):
        with full_memory(world.link), world.unchanged(), pytest.raises(NotNow) as refused:
            hand_over(leader, plan(a, parts, {b"T": world.head(b"T")}))
        assert refused.value.kind == "OOM"
    hand_over(leader, plan(a, {b"T": going_on, b"U": new}, {b"T": world.head(b"T")}))
    assert world.pending()[a.name][1:] == [*going_on, *new], "and then it works"
    assert world.inbox(b) == []


def test_a_hand_over_to_an_owner_that_goes_on_happens_whole_or_not_at_all(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first = world.owned(leader, a, b"T")
    more = world.parked(leader, b"T")
    head = world.head(b"T")
    with full_memory(world.link), contextlib.suppress(NotNow):
        hand_over(leader, plan(a, {b"T": more}, {b"T": head}))
    parted = ({a.name: first, b"master": more}, 1)
    assert (world.pending(), len(world.inbox(a))) in [parted, ({a.name: first + more}, 2)]


def test_new_entries_are_taken_whole_or_not_at_all(world: World) -> None:
    leader = world.elect()
    ids = world.send(b"T", b"1-1", b"2-1")
    with full_memory(world.link), contextlib.suppress(NotNow):
        fetch(leader, 10)
    leader.begin()  # as the next leader does
    assert (world.pending(), read(leader, 1).found) in [({}, [(ids[0], b"T")]), ({b"master": ids}, [])]


def test_new_entries_for_a_new_owner_are_not_taken_at_all(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second = world.send(b"T", b"1-1", b"2-1")
    news = read(leader, 10)
    with full_memory(world.link), world.unchanged(), pytest.raises(NotNow) as refused:
        hand_over(leader, plan(a, {b"T": [first]}), news)
    assert refused.value.kind == "OOM"
    hand_over(leader, plan(a, {b"T": [first]}), news)
    assert world.pending() == {a.name: [first], b"master": [second]}


def test_a_new_consumer_is_refused_and_leaves_no_trace(world: World) -> None:
    with full_memory(world.link), world.unchanged(), pytest.raises(NotNow) as refused:
        world.join("a")
    assert refused.value.kind == "OOM"


def test_the_index_of_the_letters_is_not_made_anew(world: World) -> None:
    leader = world.elect()
    world.link.call("XADD", world.keys.dead, "*", "usher-id", "1-1")
    world.link.call("SET", world.keys.letters, "x")
    with full_memory(world.link), world.unchanged(), pytest.raises(NotNow) as refused:
        leader.recount_letters(b"", 10)
    assert refused.value.kind == "OOM"
    assert leader.recount_letters(b"", 10) == b""


@pytest.mark.parametrize("losing", ["lease", "epoch"])
def test_who_has_lost_is_told_so_and_changes_nothing(world: World, losing: str) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    world.end_lease(a)
    world.link.call("DEL", world.keys.leader)
    with full_memory(world.link), world.unchanged():
        for call in _owner_calls(a, ids) if losing == "lease" else _leader_calls(leader, a):
            with pytest.raises(Exception, match="lease|another master leads"):
                call()


def _owner_calls(a: Owner, ids: list[bytes]) -> list[Callable[[], object]]:
    return [
        lambda: a.steps.ack(ids, b"run", 100),
        lambda: bury(a.steps, _letter(ids[0])),
        lambda: a.steps.drain(LEASE_MS),
        lambda: a.steps.give_back([GiveBack(b"T", 1, ids)]),
        a.steps.deregister,
    ]


def _leader_calls(leader: LeaderScripts, a: Owner) -> list[Callable[[], object]]:
    return [
        lambda: leader.read_parked(None, 10),
        lambda: leader.reject([Rejected(b"1-1", b"", "x")]),
        lambda: leader.take_back(a.incarnation, 10),
        lambda: leader.left_behind(a.incarnation, [(b"T", [b"9-1"])]),
        lambda: leader.sweep([], 0, b"0-0", 10),
        lambda: leader.revoke(a.incarnation),
        lambda: leader.reap(a.incarnation, "a", b""),
    ]
