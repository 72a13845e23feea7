"""sweep.lua: XAUTOCLAIM finds what nobody looked for and leaves the living alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from unittest import mock

import pytest

from tests.integration.factories import NASTY_TICKETS, TRICKY_IDS, World, fetch
from tests.integration.rewound import set_back
from usher.common.base.errors import Fenced, GroupMissing
from usher.master.leader.entries import PeekedEntry
from usher.master.leader.leader_scripts import LeaderScripts, Swept
from usher.master.policy.board.board import Board
from usher.master.recovery.repairs import IdleSweep

_IDLE_MS = 100_000
_LIMIT_MS = 50_000


def _sweep(leader: LeaderScripts, known: Sequence[str] = (), cursor: bytes = b"0-0", count: int = 100) -> Swept:
    return leader.sweep(known, _LIMIT_MS, cursor, count)


def _stray(
    world: World, leader: LeaderScripts, ticket: bytes, *ids: bytes, owner: str = "stranger", idle_ms: int = _IDLE_MS
) -> list[bytes]:
    """Entries that were handed to somebody whom we do not know."""
    made = world.parked(leader, ticket, *ids)
    world.make_idle(owner, idle_ms, *made)
    return made


def test_while_nobody_has_anything_redis_is_not_asked_but_a_pass_goes_to_its_end() -> None:
    sweep, nobody, asked = IdleSweep(_LIMIT_MS, 5.0), Board(10), mock.Mock(losses=None)
    asked.sweep.return_value = Swept(b"0-0", [], [])
    assert not sweep.turn(nobody, asked, [], 1.0, [], has_any=False)
    assert (sweep.wait_s(1.0), asked.sweep.called) == (5.0, False)
    sweep._cursor = b"7-0"
    sweep.turn(nobody, asked, [], 6.0, [], has_any=False)
    assert asked.sweep.called


def test_what_a_stranger_left_comes_to_master_with_its_ticket_and_former_owner(world: World) -> None:
    leader = world.elect()
    ids = _stray(world, leader, b"T", *TRICKY_IDS)
    assert _sweep(leader) == Swept(b"0-0", [(PeekedEntry(entry_id, b"T"), b"stranger") for entry_id in ids], [])
    assert world.pending() == {b"master": ids}
    assert set(world.deliveries().values()) == {1}, "a sweep is no delivery"


def test_the_same_call_twice_finds_nothing_more(world: World) -> None:
    """The reply was lost: what was swept is under ``master``, and a new epoch finds it there."""
    leader = world.elect()
    ids = _stray(world, leader, b"T", b"1-1", b"2-1")
    _sweep(leader)
    with world.unchanged():
        assert _sweep(leader).strays == []
    assert [found.id for found in leader.read_parked(None, 10).found] == ids


def test_what_is_not_idle_for_long_is_left_where_it_is(world: World) -> None:
    leader = world.elect()
    _stray(world, leader, b"T", idle_ms=_LIMIT_MS // 2)
    with world.unchanged():
        assert _sweep(leader).strays == []
    world.apart_because = "a stranger has something"


def test_what_was_delivered_before_the_clock_was_set_back_waits_no_longer(world: World) -> None:
    leader = world.elect()
    ids = _stray(world, leader, b"T", *TRICKY_IDS, idle_ms=0)
    set_back(world.link, world.keys.stream, 3_600_000)
    assert _sweep(leader).strays == []
    time.sleep(0.2)
    assert [found.id for found, _ in leader.sweep((), 150, b"0-0", 100).strays] == ids
    assert set(world.deliveries().values()) == {1}


def test_a_known_owner_with_a_lease_keeps_everything_however_idle(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1") + world.owned(leader, b, b"U", b"3-1")
    world.make_idle(a.incarnation, _IDLE_MS, *ids[:2])
    world.make_idle(b.incarnation, _IDLE_MS, *ids[2:])
    b.steps.drain(60_000)
    with world.unchanged():
        assert _sweep(leader, [a.incarnation, b.incarnation]) == Swept(b"0-0", [], [])
    leader.revoke(a.incarnation)
    with world.unchanged():
        assert _sweep(leader, [b.incarnation, a.incarnation]) == Swept(b"0-0", [], [])


def test_a_known_owner_without_a_lease_keeps_nothing(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    mine, theirs = world.owned(leader, a, b"T"), world.owned(leader, b, b"U")
    world.make_idle(a.incarnation, _IDLE_MS, *mine)
    world.make_idle(b.incarnation, _IDLE_MS, *theirs)
    world.end_lease(a)
    assert _sweep(leader, [a.incarnation, b.incarnation]).strays == [(PeekedEntry(mine[0], b"T"), a.name)]
    assert world.pending() == {b"master": mine, b.name: theirs}
    world.apart_because = "the record of a dead owner stays until the end of its recovery"


def test_after_a_sweep_of_a_dead_owner_the_end_of_its_recovery_names_what_was_swept(world: World) -> None:
    """Whoever frees the ticket must know of it before anything later of the ticket is planned."""
    leader, a = world.elect(), world.join("a")
    swept = world.owned(leader, a, b"T", b"1-1")
    world.make_idle(a.incarnation, _IDLE_MS, *swept)
    left = world.owned(leader, a, b"T", b"2-1")
    world.end_lease(a)
    _sweep(leader, [a.incarnation])
    assert [found.id for found in leader.take_back(a.incarnation, 10).found] == left
    assert leader.left_behind(a.incarnation, [(b"T", swept + left)]) == [(one, b"T") for one in swept + left]
    assert world.state() == ({b"master": swept + left}, {}, [])


def test_what_somebody_took_by_hand_from_a_living_owner_goes_back_to_it(world: World) -> None:
    """It has it, and acknowledges it; under ``master`` it would be handed over once more."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.make_idle("stranger", _IDLE_MS, ids[0])
    assert _sweep(leader, [a.incarnation]).strays == []
    assert world.pending() == {a.name: ids}
    a.steps.ack(ids)
    assert world.state() == ({}, {}, [])


def test_reserved_names_keep_what_they_have(world: World) -> None:
    leader = world.elect()
    parked = _stray(world, leader, b"T", owner="master")
    halted = _stray(world, leader, b"U", owner="halted")
    with world.unchanged():
        assert _sweep(leader) == Swept(b"0-0", [], [])
    assert world.pending() == {b"master": parked, b"halted": halted}


def test_a_deposed_leader_sweeps_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    _stray(world, leader, b"T")
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        _sweep(leader)
    world.apart_because = "a stranger has something"


def test_the_cursor_reaches_what_lies_behind_many_entries_of_the_living(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T", *[b"%d-1" % n for n in range(1, 101)])
    ids = _stray(world, leader, b"U", b"200-1", b"201-1")
    found, cursor, calls = [], b"0-0", 0
    while calls == 0 or cursor != b"0-0":
        swept = _sweep(leader, [a.incarnation], cursor, count=3)
        found += [stray.id for stray, _ in swept.strays]
        cursor, calls = swept.cursor, calls + 1
    assert found == ids
    assert calls == 4, "ten times as many entries as are claimed are looked at per call"


@pytest.mark.parametrize("idle", [True, False])
def test_a_page_that_the_living_fill_gives_everything_back(world: World, idle: bool) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", *TRICKY_IDS)
    if idle:
        world.make_idle(a.incarnation, _IDLE_MS, *ids)
    cursor = b"0-0"
    with world.unchanged():
        for _ in range(20):
            cursor = _sweep(leader, [a.incarnation], cursor, count=2).cursor
            assert world.broken() == []


@pytest.mark.parametrize("ticket", NASTY_TICKETS)
def test_a_ticket_is_any_bytes(world: World, ticket: bytes) -> None:
    leader = world.elect()
    [entry_id] = _stray(world, leader, ticket)
    assert _sweep(leader).strays == [(PeekedEntry(entry_id, ticket), b"stranger")]


def test_an_owner_is_any_bytes(world: World) -> None:
    leader = world.elect()
    [entry_id] = world.parked(leader, b"T")
    owner = b"\xff\0 \n%S"
    world.make_idle(owner, _IDLE_MS, entry_id)
    assert _sweep(leader).strays == [(PeekedEntry(entry_id, b"T"), owner)]


def test_a_stray_without_its_body_is_a_dead_letter_once(world: World) -> None:
    leader = world.elect()
    first, second = _stray(world, leader, b"T", b"1-1", b"2-1")
    world.delete(first)
    assert _sweep(leader) == Swept(b"0-0", [(PeekedEntry(second, b"T"), b"stranger")], [first])
    assert _sweep(leader) == Swept(b"0-0", [], [])
    assert world.pending() == {b"master": [second]}
    assert world.state().letters() == [(first, b"", b"body_gone")]
    assert world.dead()[0][b"usher-owner"] == b"stranger"


def _is_idle(world: World) -> dict[bytes, bool]:
    return {entry_id: idle_ms >= _IDLE_MS for entry_id, _, idle_ms, _ in world.pending_rows()}


def test_where_somebody_looks_after_everything_nothing_is_touched(world: World) -> None:
    """Of a million parked entries each touch would be a line in the append-only file, and nobody could tell for how
    long they wait."""
    leader, a = world.elect(), world.join("a")
    mine, parked, halted = world.owned(leader, a, b"T"), world.parked(leader, b"P"), world.parked(leader, b"H")
    for owner, ids in ((a.name, mine), (b"master", parked), (b"halted", halted)):
        world.make_idle(owner, _IDLE_MS, *ids)
    _sweep(leader, [a.incarnation])
    assert set(_is_idle(world).values()) == {True}
    stray = _stray(world, leader, b"S")
    assert [found.id for found, _ in _sweep(leader, [a.incarnation]).strays] == stray


def test_where_a_body_is_gone_what_a_living_owner_has_behind_the_page_stays_its_own(world: World) -> None:
    """From 7.0 on, what was just delivered and has lost its body is dropped before XAUTOCLAIM looks, which then looks
    one entry further."""
    leader, a = world.elect(), world.join("a")
    [gone] = _stray(world, leader, b"G", b"1-1", idle_ms=0)
    set_back(world.link, world.keys.stream, 3_600_000)
    ids = _stray(world, leader, b"S", b"2-1")
    waiting = world.parked(leader, b"P", *[b"%d-1" % n for n in range(3, 21)])
    mine = world.owned(leader, a, b"T", b"21-1")
    world.make_idle(a.name, _IDLE_MS, *mine)
    world.delete(gone)
    assert [found.id for found, _ in _sweep(leader, [a.incarnation], count=2).strays] == ids
    assert (world.pending()[a.name], world.pending()[b"master"]) == (mine, ids + waiting)
    if b"stranger" in world.pending():
        world.apart_because = "before 7.0 it has what has no body until that is idle for long"


def test_where_a_body_is_gone_a_stray_behind_the_page_is_not_passed_over(world: World) -> None:
    leader = world.elect()
    [gone] = _stray(world, leader, b"G", b"1-1", idle_ms=0)
    set_back(world.link, world.keys.stream, 3_600_000)
    world.parked(leader, b"P", *[b"%d-1" % n for n in range(2, 21)])
    ids = _stray(world, leader, b"S", b"21-1")
    world.delete(gone)
    first = _sweep(leader, count=2)
    found = [*first.strays, *(_sweep(leader, cursor=first.cursor, count=2).strays if first.cursor != b"0-0" else ())]
    assert [found.id for found, _ in found] == ids
    if b"stranger" in world.pending():
        world.apart_because = "before 7.0 it has what has no body until that is idle for long"


@pytest.mark.parametrize("owner", ["master", "halted"])
def test_a_parked_or_halted_entry_without_its_body_is_never_dropped_without_a_letter(world: World, owner: str) -> None:
    """From 7.0 on XAUTOCLAIM drops it, however fresh it is; before, it stays, and whoever gets it finds no body."""
    leader = world.elect()
    [entry_id] = _stray(world, leader, b"T", owner=owner, idle_ms=0)
    world.delete(entry_id)
    swept = _sweep(leader)
    if world.claiming_drops_the_bodiless:
        assert swept.gone == [entry_id]
        assert world.pending() == {}
        assert world.state().letters() == [(entry_id, b"", b"body_gone")]
        assert world.dead()[0][b"usher-owner"] == owner.encode()
    else:
        assert swept.gone == []
        assert world.pending() == {owner.encode(): [entry_id]}


def test_what_a_living_owner_has_without_its_body_stays_its_own_to_end(world: World) -> None:
    """From 7.0 on the pending list loses it; the index still names it, and the owner's acknowledgement takes it from
    there."""
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.delete(first)
    record = world.stream.record_of(b"T")
    assert _sweep(leader, [a.incarnation]) == Swept(b"0-0", [], [])
    assert world.pending() == {a.name: [second] if world.claiming_drops_the_bodiless else [first, second]}
    assert world.stream.record_of(b"T") == record
    assert world.dead() == []
    a.steps.ack([first])
    assert world.pending() == {a.name: [second]}


def test_thousands_are_found_in_one_call(world: World) -> None:
    leader = world.elect()
    ids = world.send_many([b"T"] * 5000)
    fetch(leader, 10_000)
    world.make_idle("stranger", _IDLE_MS, *ids)
    assert [stray.id for stray, _ in _sweep(leader, count=6000).strays] == ids


def test_thousands_of_consumers_may_be_known(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T")
    world.make_idle(a.incarnation, _IDLE_MS, *ids)
    known = [f"x:{n}" for n in range(9000)]
    with world.unchanged():
        assert _sweep(leader, [*known, a.incarnation]).strays == []


def test_a_group_that_is_gone_is_said_to_be_gone(world: World) -> None:
    leader = world.elect()
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    with pytest.raises(GroupMissing):
        _sweep(leader)
    world.make_group()
