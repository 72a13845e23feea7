"""note_repeats.lua: up to where a group that was made again is given what it was given before, noted for the leader
only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import World
from tests.integration.memory import full_memory
from usher.common.base.errors import Fenced
from usher.common.protocol.stream_id import GroupPosition
from usher.master.leader.leader_scripts import LeaderScripts


def test_what_is_noted_is_read_again_until_the_group_is_past_it(world: World) -> None:
    leader = world.elect()
    assert world.stream.repeats_until() is None
    leader.note_repeats(b"5-1")
    assert world.stream.repeats_until() == b"5-1"
    leader.note_repeats(None)
    assert world.stream.repeats_until() is None
    with world.unchanged():
        leader.note_repeats(None)


@pytest.mark.parametrize(("low", "high"), [(b"9-1", b"10-0"), (b"10-9", b"10-10"), (b"1-18446744073709551615", b"2-0")])
def test_a_higher_note_stays(world: World, low: bytes, high: bytes) -> None:
    """The group was lost again while it was given what it had lost before. Ids are compared as numbers."""
    leader = world.elect()
    leader.note_repeats(low)
    leader.note_repeats(high)
    for again in (low, high):
        with world.unchanged():
            leader.note_repeats(again)
    assert world.stream.repeats_until() == high


def test_the_saved_position_and_the_note_leave_each_other_alone(world: World) -> None:
    leader = world.elect()
    leader.note_repeats(b"5-1")
    [entry_id] = world.parked(leader, b"T", b"1-1")
    leader.save_position()
    assert world.stream.repeats_until() == b"5-1"
    leader.note_repeats(None)
    assert world.stream.saved_position() == GroupPosition(entry_id, entry_id)


@pytest.mark.parametrize("until", [None, b"9-1"])
def test_a_deposed_leader_notes_nothing_and_clears_nothing(
    world: World, depose: Callable[[LeaderScripts], None], until: bytes | None
) -> None:
    leader = world.elect()
    leader.note_repeats(b"5-1")
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.note_repeats(until)


def test_it_needs_no_group(world: World) -> None:
    """It is noted before the group is made again."""
    leader = world.elect()
    world.link.call("DEL", world.keys.stream)
    leader.note_repeats(b"5-1")
    assert world.stream.repeats_until() == b"5-1"
    world.make_group()


def test_a_key_of_another_type_in_its_place_spoils_nothing_else(world: World) -> None:
    leader = world.elect()
    world.link.call("SET", world.keys.position, "somebody else's")
    for until in (None, b"5-1"):
        with world.unchanged(), pytest.raises(Exception, match="WRONGTYPE"):
            leader.note_repeats(until)


def test_it_works_at_full_memory(world: World) -> None:
    leader = world.elect()
    with full_memory(world.link):
        leader.note_repeats(b"5-1")
        assert world.stream.repeats_until() == b"5-1"
        leader.note_repeats(None)
    assert world.stream.repeats_until() is None
