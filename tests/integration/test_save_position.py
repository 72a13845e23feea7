"""save_position.lua: how far the group is, noted outside of the group, for the leader only."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.integration.factories import TRICKY_IDS, World
from tests.integration.memory import full_memory
from usher.common.base.errors import Fenced, GroupMissing
from usher.common.protocol.keys import LogKeys
from usher.common.protocol.stream_id import GroupPosition, rank
from usher.master.leader.leader_scripts import LeaderScripts


def test_nothing_was_ever_read(world: World) -> None:
    leader = world.elect()
    world.send(b"T", *TRICKY_IDS)
    assert leader.save_position() == GroupPosition(b"0-0", None)
    assert world.stream.saved_position() == GroupPosition(b"0-0", None)


def test_all_that_was_read_is_done(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    ids = world.owned(leader, owner, b"T", *TRICKY_IDS)
    owner.steps.ack(ids)
    assert leader.save_position() == GroupPosition(ids[-1], None)
    assert world.stream.saved_position() == GroupPosition(ids[-1], None)


def test_the_oldest_pending_one_is_the_lowest_id_whoever_has_it(world: World) -> None:
    """Ids are compared as numbers: 1-10 is above 1-2. What an owner has counts like what is parked."""
    leader = world.elect()
    owner = world.join("a")
    ids = world.owned(leader, owner, b"T", *TRICKY_IDS)
    world.parked(leader, b"U", b"18446744073709551-18446744073709551614")
    for left in range(1, len(ids)):
        owner.steps.ack([ids[left - 1]])
        assert leader.save_position() == GroupPosition(b"18446744073709551-18446744073709551614", ids[left])
        assert rank(ids[left]) > rank(ids[left - 1])


def test_it_follows_the_group_and_forgets_what_is_no_longer_pending(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    [first] = world.owned(leader, owner, b"T")
    leader.save_position()
    assert world.stream.saved_position() == GroupPosition(first, first)
    owner.steps.ack([first])
    leader.save_position()
    assert world.stream.saved_position() == GroupPosition(first, None)


def test_for_those_who_trim_it_is_the_lowest_id_that_would_be_read_again(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    groups = LogKeys(world.keys.stream).groups

    def kept() -> bytes:
        leader.save_position()
        return bytes(world.link.call("HGET", groups, world.keys.group))

    assert kept() == b"0-0"
    ids = world.owned(leader, owner, b"T", *TRICKY_IDS)
    for done, left in itertools.pairwise(ids):
        assert kept() == done
        owner.steps.ack([done])
        assert kept() == left
    world.link.call("XGROUP", "SETID", world.keys.stream, world.keys.group, "5-5")
    assert kept() == b"5-5", "set back by hand, below what is pending"
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    with pytest.raises(GroupMissing):
        leader.save_position()
    assert world.link.call("HGET", groups, world.keys.group) == b"5-5"
    world.make_group()
    world.apart_because = "the group is another one"


def test_doing_it_again_changes_nothing(world: World) -> None:
    leader = world.elect()
    world.parked(leader, b"T", *TRICKY_IDS)
    leader.save_position()
    with world.unchanged():
        leader.save_position()


def test_a_deposed_leader_saves_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    """A late call of an old leader would put the position back below what its successor has noted."""
    leader = world.elect()
    world.parked(leader, b"T")
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.save_position()
    assert world.stream.saved_position() is None


def test_of_several_groups_it_is_ours(world: World) -> None:
    leader = world.elect()
    world.link.call("XGROUP", "CREATE", world.keys.stream, "a-group-before", "0")
    world.link.call("XGROUP", "CREATE", world.keys.stream, "z-group-after", "0")
    [entry_id] = world.parked(leader, b"T", b"5-1")
    world.send(b"T", b"6-1")
    world.link.call("XREADGROUP", "GROUP", "z-group-after", "them", "STREAMS", world.keys.stream, ">")
    assert leader.save_position() == GroupPosition(entry_id, entry_id)


@pytest.mark.parametrize("lost", ["the group", "the stream"])
def test_without_the_group_the_saved_position_stays_as_it_was(world: World, lost: str) -> None:
    """It is what the group is made again from."""
    leader = world.elect()
    [entry_id] = world.parked(leader, b"T")
    leader.save_position()
    if lost == "the group":
        world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    else:
        world.link.call("DEL", world.keys.stream)
    with pytest.raises(GroupMissing):
        leader.save_position()
    assert world.stream.saved_position() == GroupPosition(entry_id, entry_id)
    world.make_group()


def test_a_key_of_another_type_in_its_place_spoils_nothing_else(world: World) -> None:
    leader = world.elect()
    world.parked(leader, b"T")
    world.link.call("SET", world.keys.position, "somebody else's")
    with world.unchanged(), pytest.raises(Exception, match="WRONGTYPE"):
        leader.save_position()


def test_it_works_at_full_memory(world: World) -> None:
    leader = world.elect()
    [entry_id] = world.parked(leader, b"T")
    with full_memory(world.link):
        leader.save_position()
    assert world.stream.saved_position() == GroupPosition(entry_id, entry_id)
