"""elect.lua: one leader at a time, under an epoch that only grows."""

from __future__ import annotations

import time

import pytest

from tests.integration.factories import LEASE_MS, World
from tests.integration.routers import until


def _elect(world: World, url: str, succeed: str = "", lease_ms: int = LEASE_MS) -> list[bytes]:
    return list(world.scripts.run("elect", (world.keys.leader, world.keys.counters), (url, lease_ms, succeed)))


def test_the_first_one_is_elected_and_its_lease_has_an_end(world: World) -> None:
    answer, epoch = _elect(world, "http://one")
    assert answer == b"ELECTED"
    assert world.link.call("GET", world.keys.leader) == epoch + b" http://one"
    assert 0 < world.link.call("PTTL", world.keys.leader) <= LEASE_MS
    assert world.link.call("HGET", world.keys.counters, "epoch") == epoch


def test_while_somebody_leads_nobody_else_is_elected(world: World) -> None:
    _, epoch = _elect(world, "http://one")
    with world.unchanged():
        answer, held, left_ms = _elect(world, "http://two")
    assert (answer, held) == (b"HELD", epoch + b" http://one")
    assert 0 < int(left_ms) <= LEASE_MS


def test_a_leader_succeeds_itself_under_a_higher_epoch(world: World) -> None:
    _, epoch = _elect(world, "http://one")
    answer, next_epoch = _elect(world, "http://one", succeed=epoch.decode())
    assert answer == b"ELECTED"
    assert int(next_epoch) > int(epoch)


def test_a_call_that_was_delayed_and_wins_nothing_any_more_is_refused(world: World) -> None:
    """The same succession twice: the second one names an epoch that is over."""
    _, epoch = _elect(world, "http://one")
    _, second = _elect(world, "http://one", succeed=epoch.decode())
    with world.unchanged():
        assert _elect(world, "http://one", succeed=epoch.decode())[:2] == [b"HELD", second + b" http://one"]


def test_nobody_succeeds_an_epoch_that_is_the_beginning_of_the_held_one(world: World) -> None:
    _, epoch = _elect(world, "http://one")
    for part in (epoch[:-1].decode(), epoch[:1].decode(), f"{epoch.decode()} http", " "):
        with world.unchanged():
            assert _elect(world, "http://two", succeed=part)[0] == b"HELD"


def test_after_the_end_of_the_lease_the_next_one_is_elected(world: World) -> None:
    _, epoch = _elect(world, "http://one", lease_ms=20)
    until(lambda: not world.link.call("EXISTS", world.keys.leader))
    answer, next_epoch = _elect(world, "http://two")
    assert answer == b"ELECTED"
    assert int(next_epoch) > int(epoch)


def test_epochs_grow_even_when_redis_lost_its_tail(world: World) -> None:
    """A restored copy of the counters must not make an epoch be issued twice: the clock pulls the number up."""
    _, first = _elect(world, "http://one")
    world.link.call("HSET", world.keys.counters, "epoch", int(first) - 5000)
    world.link.call("DEL", world.keys.leader)
    time.sleep(0.002)
    _, second = _elect(world, "http://two")
    assert int(second) > int(first)


def test_epochs_grow_when_the_clock_goes_back(world: World) -> None:
    far = (1 << 52) + 12345
    world.link.call("HSET", world.keys.counters, "epoch", far)
    assert _elect(world, "http://one") == [b"ELECTED", b"%d" % (far + 1)]


def test_an_epoch_is_written_with_all_its_digits(world: World) -> None:
    """Lua's own tostring() would round it to 14 digits and issue the same epoch again and again."""
    _, epoch = _elect(world, "http://one")
    assert epoch.isdigit()
    assert len(epoch) == 16


def test_counters_that_are_no_number_elect_nobody(world: World) -> None:
    world.link.call("HSET", world.keys.counters, "epoch", "garbage")
    with world.unchanged(), pytest.raises(Exception, match="arithmetic|nil|number"):
        _elect(world, "http://one")
