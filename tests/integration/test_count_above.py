"""find_entries.lua: how many entries lie above an id, page by page; only numbers travel."""

from __future__ import annotations

from typing import Any

from tests.integration.factories import TRICKY_IDS, World


def _count(world: World, above: bytes, most: int) -> list[Any]:
    args = ("XRANGE", b"(" + above, "+", most, "")
    count, last, _, is_all = world.scripts.run("find_entries", (world.keys.stream,), args)
    return [count, last or above, is_all]


def test_the_id_itself_is_not_counted_and_the_order_is_that_of_numbers(world: World) -> None:
    ids = world.send(b"T", *TRICKY_IDS)
    for at, entry_id in enumerate(ids):
        assert _count(world, entry_id, 100) == [len(ids) - at - 1, ids[-1], 1]
    assert _count(world, b"999-9", 100) == [3, ids[-1], 1], "an id that is not in the stream is a place all the same"


def test_pages_add_up(world: World) -> None:
    ids = world.send_many([b"T"] * 25)
    last, counted = b"0-0", 0
    is_all = 0
    while not is_all:
        count, last, is_all = _count(world, last, 7)
        counted += count
    assert (counted, last) == (25, ids[-1])


def test_large_bodies_are_counted_a_few_at_a_time_and_not_sent(world: World) -> None:
    for n in range(20):
        world.add(b"%d-1" % (n + 1), "body", b"x" * 500_000)
    count, last, is_all = _count(world, b"0-0", 100)
    assert (count, last, is_all) == (9, b"9-1", 0), "4 MiB are reached"
    assert _count(world, last, 100)[0] == 9
    assert _count(world, b"18-1", 100) == [2, b"20-1", 1]
