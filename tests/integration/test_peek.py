"""peek.lua: the leader sees what comes next, and changes nothing by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import FIELD, TRICKY_IDS, World, fetch
from tests.integration.memory import full_memory
from usher.common.base.errors import Fenced, GroupMissing, NotNow
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.stream_id import rank
from usher.master.leader.entries import NewEntries, PeekedEntry
from usher.master.leader.leader_scripts import LeaderScripts

_BEGIN = b"0-0"


def test_to_look_changes_nothing_and_to_look_again_shows_the_same(world: World) -> None:
    leader = world.elect()
    world.send(b"T", *TRICKY_IDS[:5])
    before = world.link.call("XINFO", "GROUPS", world.keys.stream)
    with world.unchanged():
        assert leader.peek(100) == leader.peek(100)
        assert leader.peek(3).found == leader.peek(5).found[:3]
    assert world.link.call("XINFO", "GROUPS", world.keys.stream) == before, "there is no consumer `master` either"


@pytest.mark.parametrize("position", [b"1-11", b"50-0", b"99-8", b"1000-0", b"18446744073709551-0"])
def test_the_position_may_be_an_id_that_no_entry_has(world: World, position: bytes) -> None:
    leader = world.elect()
    ids = world.send(b"T", *TRICKY_IDS)
    world.link.call("XGROUP", "SETID", world.keys.stream, world.keys.group, position)
    news = leader.peek(100)
    assert (news.position, [found.id for found in news.found]) == (
        position,
        [one for one in ids if rank(one) > rank(position)],
    )


def test_who_asked_for_as_many_as_there_are_is_not_told_that_these_are_all(world: World) -> None:
    """It may look once more for nothing, but it never waits for a bell while there is something."""
    leader = world.elect()
    ids = world.send(b"T", *TRICKY_IDS)
    assert leader.peek(len(ids)).is_all is False
    assert leader.peek(len(ids) + 1).is_all is True
    fetch(leader, len(ids))
    assert leader.peek(1) == NewEntries(ids[-1], [], True)


def test_large_entries_come_a_few_at_a_time_and_in_order(world: World) -> None:
    leader = world.elect()
    ids = [
        world.add(b"%d-1" % number, "ticket_id", "T", "body", b"x" * (1_000_000 if number % 50 else 10))
        for number in range(1, 41)
    ]
    ids += world.send_many([b"U"] * 2000)
    pages = []
    while page := fetch(leader, 500):
        pages.append([found.id for found in page])
    assert [entry_id for page_ids in pages for entry_id in page_ids] == ids
    assert max(len(page_ids) for page_ids in pages[:4]) <= 17, "at most twice what is meant by enough"
    assert len(pages) <= 12
    assert world.pending() == {b"master": ids}


def test_one_entry_larger_than_enough_comes_alone_and_is_not_stuck(world: World) -> None:
    leader = world.elect()
    ids = [world.add(b"%d-1" % number, FIELD, "T", "body", b"x" * 9_000_000) for number in range(1, 4)]
    news = leader.peek(100)
    assert ([found.id for found in news.found], news.is_all) == (ids[:1], False)
    fetch(leader, 100)
    assert [found.id for found in leader.peek(100).found] == ids[1:2]


def test_an_entry_that_is_larger_than_allowed_says_how_large(world: World) -> None:
    leader = LeaderScripts(world.scripts, world.keys, world.elect().epoch, FIELD, longest_message=100)
    world.add(b"1-1", FIELD, "T", "body", b"x" * 50)
    world.add(b"2-1", FIELD, "T", "body", b"x" * 1000)
    small, large = leader.peek(10).found
    assert small == PeekedEntry(b"1-1", b"T")
    assert (large.id, large.ticket) == (b"2-1", b"T")
    assert large.size >= 1000


def test_how_large_they_are_together_is_told(world: World) -> None:
    leader = world.elect()
    world.add(b"1-1", FIELD, "T", "body", b"x" * 1000)
    assert leader.peek(10).size == len(FIELD) + 1 + len("body") + 1000
    world.add(b"2-1", FIELD, "T", "body", b"x" * 1000)
    assert leader.peek(10).size == 2 * leader.peek(1).size


def test_a_deposed_leader_sees_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    world.send(b"T")
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.peek(10)


def test_an_entry_without_the_field_has_no_ticket(world: World) -> None:
    leader = world.elect()
    ids = [world.add(b"1-1", "other", "1"), world.add(b"2-1", "", ""), world.add(b"3-1", "x", "ticket_id")]
    assert leader.peek(10).found == [PeekedEntry(entry_id, None) for entry_id in ids]


def test_an_empty_ticket_is_not_the_same_as_none(world: World) -> None:
    leader = world.elect()
    assert leader.peek(10).found == []
    [entry_id] = world.send(b"")
    assert leader.peek(10).found == [PeekedEntry(entry_id, b"")]


def test_of_a_ticket_that_is_too_long_one_byte_more_than_allowed_travels(world: World) -> None:
    leader = world.elect()
    world.send(b"x" * LONGEST_TICKET, b"1-1")
    world.send(b"x" * 1_000_000, b"2-1")
    assert [len(found.ticket or b"") for found in leader.peek(10).found] == [LONGEST_TICKET, LONGEST_TICKET + 1]


def test_an_entry_of_thousands_of_fields_is_seen(world: World) -> None:
    leader = world.elect()
    world.add(b"1-1", *[b"f%d" % n for n in range(20_000)], "ticket_id", "T")
    assert leader.peek(10).found == [PeekedEntry(b"1-1", b"T")]


def test_the_group_of_another_program_is_not_looked_at(world: World) -> None:
    leader = world.elect()
    ids = world.send(b"T", b"1-1", b"2-1")
    for other, start in (("a", "1-1"), ("z", "$")):
        world.link.call("XGROUP", "CREATE", world.keys.stream, other, start)
    assert leader.peek(10) == NewEntries(_BEGIN, [PeekedEntry(entry_id, b"T") for entry_id in ids], True)


def test_to_look_when_memory_is_full_shows_the_same_or_is_refused_for_the_moment(world: World) -> None:
    leader = world.elect()
    world.send(b"T", b"1-1", b"2-1")
    seen = leader.peek(10)
    with full_memory(world.link), world.unchanged():
        try:
            assert leader.peek(10) == seen
        except NotNow as refused:
            assert refused.kind == "OOM"
    assert leader.peek(10) == seen


def test_a_group_that_is_gone_is_said_to_be_gone(world: World) -> None:
    leader = world.elect()
    world.send(b"T")
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    with world.unchanged(), pytest.raises(GroupMissing):
        leader.peek(10)
    world.link.call("XGROUP", "CREATE", world.keys.stream, "other", "0")
    with world.unchanged(), pytest.raises(GroupMissing):
        leader.peek(10)
    world.make_group()


@pytest.mark.parametrize("how", ["an entry has it", "the group was set there"])
def test_above_the_highest_id_there_is_nothing(world: World, how: str) -> None:
    """A group that is read with XREADGROUP is simply at its end there."""
    highest = b"18446744073709551615-18446744073709551615"
    leader = world.elect()
    if how == "an entry has it":
        ids = [*world.send(b"T", *TRICKY_IDS[:7]), world.link.call("XADD", world.keys.stream, highest, FIELD, "T")]
        assert [found.id for found in leader.peek(100).found] == ids
        fetch(leader, 100)
    else:
        world.link.call("XGROUP", "SETID", world.keys.stream, world.keys.group, highest)
    assert leader.peek(100) == NewEntries(highest, [], True)
