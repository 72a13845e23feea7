"""hand_over.lua takes the news of a peek, or it does nothing at all: when the epoch, the rules, or the group are not
what they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from tests.integration.factories import Owner, World, plan, read
from tests.integration.memory import full_memory
from usher.common.base.errors import Fenced, GroupMissing, NotNow
from usher.common.redis.replies import pairs
from usher.master.leader.leader_scripts import LeaderScripts, RulesMoved
from usher.master.policy.board.plans import NOTHING

_ALL = [b"%d-1" % number for number in range(1, 6)]  # the entries of _calls


def _position(world: World) -> bytes:
    """The last id that the group was given."""
    [group] = [pairs(one) for one in world.link.call("XINFO", "GROUPS", world.keys.stream)]
    return bytes(group[b"last-delivered-id"])


def _stranger_reads(world: World) -> None:
    world.link.call("XREADGROUP", "GROUP", world.keys.group, "stranger", "COUNT", 1, "STREAMS", world.keys.stream, ">")


def _calls(world: World, leader: LeaderScripts, a: Owner) -> list[Callable[[], object]]:
    """The ways to take news: all planned, a part of them, none of them, with old ones, for an owner that goes on."""
    world.owned(leader, a, b"O", b"1-1")
    parked, new, other = world.parked(leader, b"P", b"2-1"), world.send(b"T", b"3-1", b"4-1"), world.send(b"O", b"5-1")
    news, head = read(leader, 100), {b"O": world.head(b"O")}
    made = ({b"T": new, b"O": other}, {b"T": new[:1]}, {}, {b"P": parked, b"T": new}, {b"O": other})
    return [lambda parts=parts: leader.hand_over(plan(a, parts, head), news) for parts in made]  # type: ignore[misc]


def test_a_leader_that_does_not_know_the_rules_takes_nothing(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    calls = _calls(world, leader, a)
    world.link.call("HSET", world.keys.counters, "rules", "7")
    for call in calls:
        with world.unchanged(), pytest.raises(RulesMoved):
            call()


def test_a_deposed_leader_takes_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader, a = world.elect(), world.join("a")
    calls = _calls(world, leader, a)
    depose(leader)
    for call in calls:
        with world.unchanged(), pytest.raises(Fenced):
            call()


@pytest.mark.parametrize("gone", ["group", "stream", "group of a stream that others read"])
def test_a_group_that_is_gone_is_said_to_be_gone_and_nothing_happens(world: World, gone: str) -> None:
    leader, a = world.elect(), world.join("a")
    calls = _calls(world, leader, a)
    if gone == "stream":
        world.link.call("DEL", world.keys.stream)
    else:
        world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
        if gone != "group":
            world.link.call("XGROUP", "CREATE", world.keys.stream, "other", "2-1")
    for call in calls:
        with world.unchanged(), pytest.raises(GroupMissing):
            call()
    world.make_group()
    world.link.call("DEL", world.keys.tickets)


def test_a_plan_of_old_entries_alone_does_not_care_where_the_group_is(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    parked, new = world.parked(leader, b"T", b"1-1"), world.send(b"T", b"2-1")
    _stranger_reads(world)
    leader.hand_over(plan(a, {b"T": parked}))
    assert world.pending() == {a.name: parked, b"stranger": new}
    world.apart_because = "a stranger has something"


def test_nothing_of_no_news_changes_nothing(world: World) -> None:
    leader = world.elect()
    world.parked(leader, b"T")
    with world.unchanged():
        assert leader.hand_over(NOTHING, read(leader, 10)).targets == ()


# ---- full memory ----


@pytest.mark.parametrize("which", range(5))
def test_when_memory_is_full_news_are_taken_whole_or_not_at_all(world: World, which: int) -> None:
    """What needs a fence is refused; the rest may be refused as well, and then it works later."""
    leader, a = world.elect(), world.join("a")
    call = _calls(world, leader, a)[which]
    before = world.everything()
    with full_memory(world.link), contextlib.suppress(NotNow):
        call()
        assert which in (2, 4), "a new owner's fence needs memory"
    if world.everything() == before:
        call()
    ids = [one for ids in world.pending().values() for one in ids]
    assert (sorted(ids), _position(world)) == (_ALL, b"5-1")
    assert {part.ticket: part.ids for part in world.inbox(a)[1:]} == {
        ticket: [one for one in record.ids if one != b"1-1"]
        for ticket in (b"O", b"T", b"P")
        if (record := world.record(ticket)) is not None and record.ids != [b"1-1"]
    }
