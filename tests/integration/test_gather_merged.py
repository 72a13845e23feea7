"""gather.lua and share.lua where a ticket may have entries in several streams (USHER_TICKET_SCOPE=group): what is there
is merged by id, each entry exactly once, and one master does it for all."""

from __future__ import annotations

import itertools
import logging
import random

import pytest

from tests.integration.gathered import Gathered, outcomes
from tests.integration.routers import until
from tests.integration.test_gathering import running
from usher.common.protocol.sources import SHARDS
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Link
from usher.common.redis.scripts import source

log = logging.getLogger(__name__)
ALL = set(range(SHARDS))


@pytest.fixture
def world(link: Link) -> Gathered:
    return Gathered(link, "group")


def came(world: Gathered) -> list[tuple[str, bytes]]:
    """(source, id in it) of what was gathered, in the order of the work stream."""
    origins = [entry.fields[1].split(b" ", 2) for entry in world.entries() if entry.fields]
    return [(name.decode(), entry_id) for entry_id, _, name in origins]


def by_id(sent: dict[str, list[bytes]]) -> list[tuple[str, bytes]]:
    return sorted(((name, one) for name, ids in sent.items() for one in ids), key=lambda sent: (rank(sent[1]), sent[0]))


def test_a_burst_over_several_streams_comes_in_the_order_of_its_ids(world: Gathered) -> None:
    """1,500 messages, each in any of three streams, by calls of a thousand at most: no neighbours are swapped."""
    rng = random.Random(7)
    sent: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
    for number in range(1500):
        name = rng.choice("abc")
        sent[name] += world.send(name, f"{1000 + number // 4}-{number % 4}")
    world.stream.create_group(b"0-0")
    calls = 0
    while any(outcome != "OVER" for outcome, _ in outcomes(world.gather(*sent, quantum=333))):
        world.read()
        calls += 1
    ids = [rank(one) for _, one in came(world)]
    swapped = sum(later < earlier for earlier, later in itertools.pairwise(ids))
    assert (swapped, calls) == (0, 1)
    assert came(world) == by_id(sent)
    assert {name: world.position(name) for name in sent} == {name: ids[-1] for name, ids in sent.items()}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_there_when_calls_come_is_merged_and_each_entry_comes_once(world: Gathered, seed: int) -> None:
    """Sizes, bounds and the streams' lengths differ; what is sent meanwhile comes in the order of its ids too, since
    ids grow with time."""
    rng = random.Random(seed)
    names = [f"s{number}" for number in range(rng.choice((2, 3, 9)))]
    sent: dict[str, list[bytes]] = {name: [] for name in names}
    world.stream.create_group(b"0-0")
    number = 0
    for _ in range(12):
        for _ in range(rng.choice((0, 1, 20, 150))):
            number += rng.choice((0, 0, 1, 7))
            name = rng.choice(names)
            while sent[name] and rank(sent[name][-1]) >> 64 == number + 1:
                number += 1
            body = "x" * rng.choice((1, 10, 100_000 if seed % 4 == 0 else 1000))
            one = world.link.call("XADD", name, f"{number + 1}-{rng.randrange(3)}", "ticket_id", "42", "body", body)
            sent[name].append(one)
        number += 1  # what comes later has a higher id than all that is there
        for _ in range(rng.choice((1, 2))):
            world.gather(*rng.sample(names, len(names)), most=rng.choice((3, 50, 1000)))
            if rng.random() < 0.7:
                world.read()
    while any(outcome != "OVER" for outcome, _ in outcomes(world.gather(*names))):
        world.read()
    assert world.all_moved() == {name: ids for name, ids in sent.items() if ids}
    assert came(world) == by_id(sent)


def test_entries_of_the_same_id_come_by_the_names_of_their_streams_whoever_is_asked_first(world: Gathered) -> None:
    for name in ("b", "c", "a"):
        world.send(name, "5-1", "5-2")
    world.gather("c", "a", "b")
    assert came(world) == [(name, one) for one in (b"5-1", b"5-2") for name in "abc"]


def test_ids_are_compared_as_numbers_up_to_the_highest(world: Gathered) -> None:
    ids = ["9-0", "10-0", "99-18446744073709551615", "100-0", "18446744073709551615-18446744073709551615"]
    sent = {"a": world.send("a", *ids[::2]), "b": world.send("b", *ids[1::2])}
    world.gather("a", "b")
    assert came(world) == by_id(sent)
    assert outcomes(world.gather("a", "b")) == [("OVER", 0), ("OVER", 0)]


def test_an_entry_with_a_lower_id_that_comes_after_the_merge_comes_after_it(world: Gathered) -> None:
    world.send("a", "5-1", "9-1")
    world.gather("a", "b")
    world.send("b", "7-1")
    world.gather("a", "b")
    assert came(world) == [("a", b"5-1"), ("a", b"9-1"), ("b", b"7-1")]


def test_large_entries_come_a_few_at_a_time_and_in_order(world: Gathered) -> None:
    sent: dict[str, list[bytes]] = {"a": [], "b": []}
    for number in range(1, 31):
        name = "ab"[number % 2]
        sent[name] += [world.link.call("XADD", name, f"{number}-1", "ticket_id", "T", "body", b"x" * 1_000_000)]
    moved = []
    while not moved or moved[-1]:
        moved.append(sum(count for _, count in outcomes(world.gather("a", "b"))))
    assert max(moved) <= 8 and min(moved[:-1]) > 0
    assert came(world) == by_id(sent)


def test_an_entry_larger_than_a_call_may_read_is_moved_all_the_same(world: Gathered) -> None:
    sent = {"a": world.send("a", "2-1"), "b": []}
    sent["b"].append(world.link.call("XADD", "b", "1-1", "ticket_id", "T", "body", b"x" * 9_000_000))
    for _ in range(3):
        world.gather("b", "a")
    assert came(world) == by_id(sent)


def test_who_is_refused_stays_behind_its_own_and_the_others_go_on(world: Gathered, link: Link) -> None:
    """XADD is refused for every entry of one source (as if its body were none that the work stream could take)."""
    sent = {"a": world.send("a", "1-1", "3-1"), "b": world.send("b", "2-1", "4-1"), "c": world.send("c", "5-1")}
    refusing = source("gather").replace(
        "added = redis.pcall('XADD', work, new, unpack(entry))",
        "added = of.source == 'b' and {err = 'no'} or redis.pcall('XADD', work, new, unpack(entry))",
    )
    told = world.gather("a", "b", "c", text=refusing)
    assert outcomes(told) == [("OVER", 2), ("REFUSED", 0), ("OVER", 1)]
    assert (told[1].words, rank(world.position("b")) < rank(b"2-1")) == ("no", True)
    world.gather("a", "b", "c")
    assert world.all_moved() == sent


def test_an_entry_with_too_many_fields_has_its_place_among_the_dead_letters_alone(world: Gathered) -> None:
    large = [word for number in range(4000) for word in (f"f{number}", "v")]
    world.send("a", "1-1", "3-1")
    world.link.call("XADD", "b", "2-1", "ticket_id", "T", *large)
    told = world.gather("a", "b")
    assert [(one.outcome.value, one.moved, one.words) for one in told] == [
        ("OVER", 2, "made 0-0"),
        ("OVER", 1, "made 0-0, cut 1"),
    ]
    assert (came(world), world.link.call("XLEN", world.keys.dead)) == ([("a", b"1-1"), ("a", b"3-1")], 1)


def _share(world: Gathered, holder: str, says: str = '{"gathers_all":true}', lease_ms: int = 60_000) -> set[int]:
    args = (holder, lease_ms, SHARDS, says, 600_000)
    _, *shards = world.scripts.run("share", (world.keys.shares,), args)
    return set(map(int, shards))


@pytest.mark.parametrize("names", [("x", "y", "z"), ("z", "y", "x")])
def test_one_master_has_all_shards_and_the_next_one_when_it_is_gone(world: Gathered, names: tuple[str, ...]) -> None:
    world.link.call("DEL", world.keys.shares)
    for _ in range(2):
        held = {name: _share(world, name) for name in names}
    assert held == {"x": ALL, "y": set(), "z": set()}
    _share(world, "x", lease_ms=0)
    assert (_share(world, "z"), _share(world, "y")) == (set(), ALL)
    _share(world, "y", lease_ms=100)
    until(lambda: _share(world, "z") == ALL)


@pytest.mark.parametrize("old", ["a", "m"])
def test_beside_a_master_of_a_former_version_no_shard_stays_without_a_holder(world: Gathered, old: str) -> None:
    world.link.call("DEL", world.keys.shares)
    for _ in range(3):
        held = [_share(world, old, "{}"), *(_share(world, name) for name in "hz")]
    assert set().union(*held) == ALL and sum(map(len, held)) == SHARDS
    assert held[0] and held[1] and not held[2]
    _share(world, old, "{}", lease_ms=0)
    assert [_share(world, name) for name in "zh"] == [set(), ALL]


def test_a_burst_while_masters_gather_comes_in_the_order_of_its_milliseconds(world: Gathered, redis_url: str) -> None:
    """Two masters, of which one gathers everything; a producer that sends to three streams as fast as it can."""
    world.link.call("DEL", world.keys.shares)
    rng = random.Random(3)
    sent: dict[str, list[bytes]] = {"t:a": [], "t:b": [], "t:c": []}
    with running(redis_url, ticket_scope="group"), running(redis_url, ticket_scope="group"):
        for _ in range(100):
            names = [rng.choice(sorted(sent)) for _ in range(15)]
            ids = world.link.pipeline([("XADD", name, "*", "ticket_id", "42") for name in names])
            for name, one in zip(names, ids, strict=True):
                sent[name].append(one)
        until(lambda: len(world.entries()) == 1500)
    assert world.all_moved() == sent
    order = [rank(one) for _, one in came(world)]
    log.info("neighbours swapped: %d of 1499", sum(b < a for a, b in itertools.pairwise(order)))
    times = [one >> 64 for one in order]
    assert times == sorted(times)
