"""Vitals: the sums that /metrics and /api/lag tell, read from a real Redis in each of its states."""

from __future__ import annotations

import time

import pytest

from tests.integration.factories import World, hand_over, plan
from tests.integration.memory import full_memory
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.insight.stats import StreamStatsReader, lag_document
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.policy.rules import Rule, RuleAction, Target


def test_what_waits_where_is_told_apart(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    owned = world.parked(leader, b"T")
    hand_over(leader, plan(a, {b"T": owned}))
    world.parked(leader, b"U")
    world.parked(leader, b"V")
    world.send(b"W")
    world.end_lease(b)
    world.join("c", renews=False)
    seen = StreamStatsReader(world.link, world.keys).read()
    assert (seen["entries"], seen["lag"], seen["lag_is_exact"], seen["pending"]) == (4, 1, True, 3)
    assert (seen["parked"], seen["halted"], seen["tickets"], seen["unfinished"]) == (2, 0, 1, 4)
    assert {name: (load["state"], load["pending"]) for name, load in seen["consumers"].items()} == {
        "a": ("live", 1),
        "b": ("lost", 0),
        "c": ("starting", 0),
    }
    assert seen["epoch"]
    assert lag_document(seen) | {"time_ms": 0, "oldest_seconds": 0} == {
        "lag": 1,
        "lag_is_exact": True,
        "pending": 3,
        "unfinished": 4,
        "takeable": 4,  # the leader has not said yet what others could take
        "oldest_seconds": 0,
        "consumers": 1,
        "slots": 8,
        "time_ms": 0,
    }


def test_what_another_consumer_could_take_is_what_the_leader_noted_and_what_nobody_has_read(world: World) -> None:
    leader = world.elect()
    world.parked(leader, b"U", b"1-1", b"2-1")
    world.send(b"W")
    leader.save_position(1)
    seen = StreamStatsReader(world.link, world.keys).read()
    assert (lag_document(seen)["takeable"], seen["unfinished"]) == (2, 3)


@pytest.mark.parametrize("is_read", [False, True])
def test_the_oldest_message_is_the_oldest_that_is_not_done(world: World, is_read: bool) -> None:
    leader = world.elect()
    hour_ago, minute_ago = (b"%d-1" % (int(time.time() - age_s) * 1000) for age_s in (3600, 60))
    if is_read:
        world.parked(leader, b"T", hour_ago)
    else:
        world.send(b"T", hour_ago)
    world.send(b"U", minute_ago)
    seen = StreamStatsReader(world.link, world.keys).read()
    assert 3590 < seen["oldest_s"] < 3700
    assert seen["lag"] == 2 - is_read


def test_what_waits_for_somebody_does_not_make_the_oldest_that_should_move_older(world: World) -> None:
    """A night in which one ticket is halted, or paused, and all else is done must wake nobody."""
    leader, a = world.elect(), world.join("a")
    hour_ago, minute_ago = (int(time.time() - age_s) * 1000 for age_s in (3600, 60))
    world.owned(leader, a, b"T", b"%d-1" % hour_ago)
    assert 3590 < StreamStatsReader(world.link, world.keys).read()["oldest_unheld_s"] < 3700
    world.give_up(a, b"T", "halt")
    world.parked(leader, b"T", b"%d-2" % hour_ago)
    seen = StreamStatsReader(world.link, world.keys).read()
    assert (seen["halted"], seen["parked"], seen["oldest_s"] > 3590, seen["oldest_unheld_s"]) == (1, 1, True, 0.0)
    world.send(b"U", b"%d-1" % minute_ago)
    assert 50 < StreamStatsReader(world.link, world.keys).read()["oldest_unheld_s"] < 150, (
        "what is not read is held by nobody"
    )


def pause(world: World, target: Target, value: str = "") -> None:
    LiveRules(world.link, world.keys).set(Rule(target, value, RuleAction.PAUSE, None, "", ""), By("ann", "cli"))


@pytest.mark.parametrize("target", [Target.TICKET, Target.EVERYTHING])
def test_a_pause_holds_what_is_parked_and_that_of_everything_what_is_not_read(world: World, target: Target) -> None:
    leader = world.elect()
    now_ms = int(time.time()) * 1000
    world.parked(leader, b"T", b"%d-1" % (now_ms - 3_600_000))
    pause(world, target, "T" if target is Target.TICKET else "")
    assert StreamStatsReader(world.link, world.keys).read()["oldest_unheld_s"] == 0
    world.send(b"T" if target is Target.EVERYTHING else b"U", b"%d-1" % (now_ms - 120_000))
    assert (StreamStatsReader(world.link, world.keys).read()["oldest_unheld_s"] == 0) == (target is Target.EVERYTHING)


def test_a_redis_whose_memory_is_full_is_told_although_no_program_has_met_it(world: World) -> None:
    """Only producers have; these are not ours."""
    assert not StreamStatsReader(world.link, world.keys).read()["refuses_writes"]
    with full_memory(world.link):
        assert StreamStatsReader(world.link, world.keys).read()["refuses_writes"]


def test_a_lost_group_and_a_lost_stream_are_all_lag_or_nothing(world: World) -> None:
    world.send(b"T")
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    seen = StreamStatsReader(world.link, world.keys).read()
    assert (seen["lag"], seen["pending"], seen["oldest_s"] > 0) == (1, 0, True)
    world.link.call("DEL", world.keys.stream)
    assert StreamStatsReader(world.link, world.keys).read()["lag"] == 0
    world.make_group()


def test_a_lag_beyond_what_is_counted_says_so_where_redis_does_not_know(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("usher.master.insight.stats._MOST_COUNTED", 4)
    monkeypatch.setattr("usher.master.insight.stats._PAGE", 2)
    for _ in range(9):
        world.send(b"T")
    seen = StreamStatsReader(world.link, world.keys).read()
    assert (seen["lag"], seen["lag_is_exact"]) in ((4, False), (9, True))
    assert seen["lag_is_exact"] == world.claiming_drops_the_bodiless, "Redis 7 knows it"


def test_entries_that_were_cut_unread_are_gone_and_wait_for_nobody(valkey_url: str) -> None:
    """Redis counts them in the lag until the next entry is read: producers that heed a limit would wait for ever."""
    link, keys = Link(valkey_url, "test"), Keys("cut", "g")
    link.call("DEL", keys.stream)
    link.call("XGROUP", "CREATE", keys.stream, keys.group, "0", "MKSTREAM")
    link.pipeline([("XADD", keys.stream, "*", "ticket_id", "T")] * 6)
    link.call("XREADGROUP", "GROUP", keys.group, "master", "COUNT", 1, "STREAMS", keys.stream, ">")
    assert StreamStatsReader(link, keys).read()["lag"] == 5
    link.call("XTRIM", keys.stream, "MAXLEN", 0)
    reader = StreamStatsReader(link, keys)
    assert reader.read()["lag"] == 0
    link.call("DEL", keys.stream)
