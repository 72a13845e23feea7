"""gather.lua when something is wrong: nothing lost, nothing twice, each trouble with its name, and the other sources go
on."""

from __future__ import annotations

import pytest

from tests.integration.gathered import Gathered, outcomes
from usher.common.base.errors import NotNow
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.scripts import source
from usher.master.operations.trimming import StillNeeded, Trimming
from usher.master.policy.trim import Cut, Refused, decide


@pytest.fixture
def world(link: Link) -> Gathered:
    return Gathered(link)


def _state(world: Gathered, *sources: str) -> list[object]:
    keys = world.keys
    groups = world.link.pipeline([("XINFO", "GROUPS", name) for name in sources])
    return [groups, world.entries(), world.link.call("HGETALL", keys.gathered), world.link.call("EXISTS", keys.dead)]


def test_at_full_memory_nothing_moves_and_it_goes_on_when_there_is_room(world: Gathered, link: Link) -> None:
    sent = world.send("a", "1-1", "1-2")
    world.gather("a")
    sent += world.send("a", "2-1")
    before = _state(world, "a")
    link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(NotNow) as refused:
            world.gather("a")
        assert refused.value.kind == "OOM"
        assert _state(world, "a") == before
    finally:
        link.call("CONFIG", "SET", "maxmemory", 0)
    world.gather("a")
    assert world.moved("a") == sent


@pytest.mark.parametrize("spoilt", ["stream", "gathered", "dead"])
def test_a_key_of_another_type_stops_it_before_anything_has_changed(world: Gathered, link: Link, spoilt: str) -> None:
    world.send("a", "1-1")
    link.call("XGROUP", "CREATE", "a", "g", "0")
    key = getattr(world.keys, spoilt)
    link.call("SET", key, "x")
    with pytest.raises(CommandRefused, match="WRONGTYPE"):
        world.gather("a")
    assert world.position("a") == b"0-0"
    link.call("DEL", key)
    world.gather("a")
    assert world.moved("a") == [b"1-1"]


def test_a_source_that_is_no_stream_is_told_and_the_others_go_on(world: Gathered, link: Link) -> None:
    link.call("SET", "text", "x")
    link.call("HSET", "hash", "f", "v")
    world.send("a", "1-1")
    assert outcomes(world.gather("text", "hash", "a")) == [("NOT_A_STREAM", 0), ("NOT_A_STREAM", 0), ("OVER", 1)]
    link.call("DEL", "text")
    sent = world.send("text", "1-1")
    assert outcomes(world.gather("text")) == [("OVER", 1)]
    assert world.moved("text") == sent


@pytest.mark.parametrize("ids", [("1-1", "1-2"), ("9-1",), ("5-1", "5-2", "9-9")])
def test_a_source_that_was_deleted_and_made_again_is_taken_in_from_its_beginning(
    world: Gathered, link: Link, ids: tuple[str, ...]
) -> None:
    before = world.send("a", "5-1", "5-2")
    world.gather("a")
    link.call("DEL", "a")
    assert outcomes(world.gather("a")) == [("GONE", 0)]
    after = world.send("a", *ids)
    [told] = world.gather("a")
    assert (told.moved, told.words) == (len(ids), "made 0-0")
    assert world.moved("a") == before + after


def test_a_source_that_was_deleted_and_made_again_unseen_with_lower_ids_is_taken_in_from_its_beginning(
    world: Gathered, link: Link
) -> None:
    world.send("a", "5-1", "5-2")
    world.gather("a")
    link.call("DEL", "a")
    world.send("a", "1-1", "2-1")
    assert world.gather("a")[0].words == "made 0-0"
    assert world.moved("a") == [b"5-1", b"5-2", b"1-1", b"2-1"]


def test_a_source_in_whose_place_another_stream_was_put_unseen_is_taken_in_from_its_beginning(
    world: Gathered, link: Link
) -> None:
    world.send("a", "1-1", "5-1", "10-1")
    world.gather("a")
    sent = world.send("b", "2-1", "6-1", "12-1")
    link.call("RENAME", "b", "a")
    assert outcomes(world.gather("a")) == [("OVER", 3)]
    assert world.moved("a")[3:] == sent
    assert world.position("a") == b"12-1"


def test_a_group_that_was_destroyed_goes_on_exactly_where_it_was(world: Gathered, link: Link) -> None:
    sent = world.send("a", "5-1", "5-2")
    world.gather("a")
    sent += world.send("a", "6-1")
    link.call("XGROUP", "DESTROY", "a", "g")
    assert world.gather("a")[0].words == "made 5-2"
    assert world.moved("a") == sent
    link.call("XGROUP", "DESTROY", "a", "g")
    assert outcomes(world.gather("a")) == [("OVER", 0)], "nothing twice, also when nothing is new"
    assert world.position("a") == b"6-1"


def test_a_source_whose_group_is_gone_for_a_moment_is_not_trimmed_beyond_what_was_gathered(
    world: Gathered, link: Link
) -> None:
    sent = world.send("a", *(f"{number}-1" for number in range(1, 301)))
    link.call("XGROUP", "CREATE", "a", "other", "300-1")  # it has read everything
    world.gather("a", most=100)
    link.call("XGROUP", "DESTROY", "a", "g")
    trimming = Trimming(link, Keys("a", "g"))
    decided = decide(trimming.facts())
    assert isinstance(decided, Refused) and "group g is gone, and would read again from 100-1" in decided.problems[0]
    with pytest.raises(StillNeeded, match="saved position of group g"):
        list(trimming.cut(b"300-1"))
    assert world.gather("a")[0].words == "made 100-1"
    assert world.moved("a") == sent
    decided = decide(trimming.facts())
    assert isinstance(decided, Cut) and decided.floor == b"300-1"


@pytest.mark.parametrize(("first", "words"), [("3-1", "made 3-1"), ("6-1", "made 3-1 6-1"), ("9-1", "made 3-1 8-1")])
def test_what_somebody_else_has_trimmed_while_the_group_was_gone_is_told(
    world: Gathered, link: Link, first: str, words: str
) -> None:
    sent = world.send("a", *(f"{number}-1" for number in range(1, 9)))
    world.gather("a", most=3)
    link.call("XGROUP", "DESTROY", "a", "g")
    link.call("XTRIM", "a", "MINID", first)
    assert world.gather("a")[0].words == words
    assert world.moved("a") == [*sent[:3], *sent[max(3, int(first[0]) - 1) :]]
    link.call("XGROUP", "DESTROY", "a", "g")
    link.call("XTRIM", "a", "MAXLEN", 0)
    assert world.gather("a")[0].words == ("made 8-1" if first < "9-1" else "made 3-1 8-1"), (
        "if it had moved them all, nothing is lost"
    )


def test_nothing_is_left_of_a_source_that_was_deleted(world: Gathered, link: Link) -> None:
    world.send("a", "5-1")
    world.gather("a")
    assert link.call("HGETALL", LogKeys("a").groups) == [b"g", b"5-1"]
    link.call("DEL", "a")
    world.gather("a")
    assert link.call("EXISTS", LogKeys("a").groups) == 0
    assert b"a" not in link.call("HGETALL", world.keys.gathered)


def test_where_the_position_cannot_be_noted_nothing_moves_and_the_others_go_on(world: Gathered, link: Link) -> None:
    for name in ("a", "b"):
        world.send(name, "1-1")
        link.call("XGROUP", "CREATE", name, "g", "0")
    link.call("SET", LogKeys("a").groups, "x")
    before = _state(world, "a")
    refused, _ = world.gather("a", "b")
    assert (refused.outcome.value, "WRONGTYPE" in refused.words) == ("REFUSED", True)
    assert (_state(world, "a")[0], world.all_moved()) == (before[0], {"b": [b"1-1"]})


def test_a_group_beyond_the_last_id_of_its_stream_is_told_because_nothing_would_ever_come(
    world: Gathered, link: Link
) -> None:
    world.send("a", "5-1")
    world.gather("a")
    link.call("XGROUP", "SETID", "a", "g", "99-0")
    world.send("a", "6-1")
    [told] = world.gather("a")
    assert (told.outcome.value, told.words) == ("AHEAD", "99-0")
    link.call("XGROUP", "SETID", "a", "g", "5-1")
    assert outcomes(world.gather("a")) == [("OVER", 1)]


def test_an_entry_with_the_highest_possible_id_is_moved_and_its_stream_is_done(world: Gathered) -> None:
    sent = world.send("a", "5-1", "18446744073709551615-18446744073709551615")
    assert outcomes(world.gather("a")) == [("OVER", 2)]
    assert outcomes(world.gather("a")) == [("OVER", 0)]
    assert world.moved("a") == sent


def test_what_is_pending_from_before_a_stream_was_gathered_must_be_done_first(world: Gathered, link: Link) -> None:
    sent = world.send("a", "1-1", "1-2")
    link.call("XGROUP", "CREATE", "a", "g", "0")
    link.call("XREADGROUP", "GROUP", "g", "c:1", "COUNT", 1, "STREAMS", "a", ">")
    assert outcomes(world.gather("a")) == [("BEFORE", 0)]
    assert world.position("a") == b"1-1"
    link.call("XACK", "a", "g", "1-1")
    assert outcomes(world.gather("a")) == [("OVER", 1)]
    assert world.moved("a") == sent[1:]


def test_who_may_not_write_the_work_stream_loses_nothing(world: Gathered, link: Link) -> None:
    sent = world.send("a", "5-0", "5-1")
    link.call("ACL", "SETUSER", "limited", "on", ">x", "~*", "+@all", "-xadd")
    try:
        with Link(link.url, "test:limited") as limited:
            limited.call("AUTH", "limited", "x")
            with pytest.raises(CommandRefused):
                [told] = world.gather("a", link=limited)
                raise CommandRefused(told.words)
            assert world.entries() == []
            assert world.position("a") in (b"4-18446744073709551615", b"0-0")
    finally:
        link.call("ACL", "DELUSER", "limited")
    world.gather("a")
    assert world.moved("a") == sent


@pytest.mark.parametrize("fails_at", [1, 2, 3, 5])
def test_whichever_add_fails_in_the_middle_what_was_not_added_is_still_new(world: Gathered, fails_at: int) -> None:
    sent = world.send("a", "1000-0", "1000-1", "2000-0", "2000-1", "18446744073709551615-0")
    text = source("gather")
    failing = f"(seq + 1 == {fails_at} and function() return {{err = 'ERR made to fail'}} end or redis.pcall)"
    broken = text.replace("redis.pcall('XADD', work", f"{failing}('XADD', work")
    assert broken != text
    [told] = world.gather("a", text=broken)
    assert (told.outcome.value, told.moved, told.words) == ("REFUSED", fails_at - 1, "ERR made to fail")
    assert world.moved("a") == sent[: fails_at - 1]
    world.gather("a")
    assert world.moved("a") == sent


def test_a_work_stream_that_was_deleted_begins_anew_and_what_was_gathered_is_not_gathered_again(
    world: Gathered, link: Link
) -> None:
    world.send("a", "1-1")
    world.gather("a")
    link.call("DEL", world.keys.stream)
    sent = world.send("a", "1-2")
    assert outcomes(world.gather("a")) == [("OVER", 1)]
    assert world.moved("a") == sent
