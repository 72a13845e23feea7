"""share.lua: each shard of the sources has one holder, and every master that runs has its even part."""

from __future__ import annotations

import time

import pytest

from tests.integration.gathered import Gathered
from tests.integration.routers import until
from usher.common.protocol.sources import SHARDS
from usher.common.redis.client import Link

ALL = set(range(SHARDS))


@pytest.fixture
def world(link: Link) -> Gathered:
    made = Gathered(link)
    link.call("DEL", made.keys.shares)
    return made


def _holders(world: Gathered) -> dict[bytes, bytes]:
    flat = world.link.call("HGETALL", world.keys.shares)
    return {field: holder for field, holder in zip(flat[::2], flat[1::2], strict=True) if field.startswith(b"shard ")}


@pytest.mark.parametrize("masters", [1, 2, 3, 5, SHARDS + 1])
def test_all_shards_are_held_and_evenly_after_two_beats(world: Gathered, masters: int) -> None:
    names = [f"m{number}" for number in range(masters)]
    held: dict[str, set[int]] = {}
    for _ in range(2):
        for name in names:
            held[name] = world.share(name)
            others = [shards for other, shards in held.items() if other != name]
            if len(held) == masters:
                assert len(_holders(world)) <= SHARDS
            assert all(
                world.link.call("HGET", world.keys.shares, f"shard {shard}") == name.encode() for shard in held[name]
            ), others
    held = {name: world.share(name) for name in names}
    assert set().union(*held.values()) == ALL and sum(map(len, held.values())) == SHARDS
    assert max(map(len, held.values())) - min(map(len, held.values())) <= 1


def test_a_master_that_comes_takes_nothing_that_is_held_until_it_is_given_up(world: Gathered) -> None:
    assert world.share("a") == ALL
    assert world.share("b") == set()
    mine = world.share("a")
    assert len(mine) == SHARDS // 2
    assert world.share("b") == ALL - mine


def test_the_shards_of_one_that_stops_are_free_at_once(world: Gathered) -> None:
    for name in "abab":
        world.share(name)
    assert world.share("a", lease_ms=0) == set()
    assert world.share("b") == ALL


def test_a_master_that_said_so_before_the_clock_was_set_back_is_not_heard_of_any_more(world: Gathered) -> None:
    assert world.share("a", lease_ms=7_200_000) == ALL
    assert world.share("b") == ALL


def test_the_shards_of_one_that_is_not_heard_of_are_free_when_its_time_is_over(world: Gathered) -> None:
    world.share("a", lease_ms=300)
    assert world.share("b") == set()
    until(lambda: world.share("b") == ALL)
    assert world.share("a", lease_ms=300) == set(), "and not taken back behind the other's back"


def test_at_full_memory_masters_keep_their_shares(world: Gathered, link: Link) -> None:
    world.share("a", lease_ms=300)
    link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        time.sleep(0.2)
        assert world.share("a", lease_ms=60_000) == ALL
        assert world.share("b") == set()
    finally:
        link.call("CONFIG", "SET", "maxmemory", 0)
