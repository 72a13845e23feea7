"""find_entries.lua: looking for what belongs to a ticket, bodies stay in Redis."""

from __future__ import annotations

from tests.integration.factories import TRICKY_IDS, World

T, U = b"T", b"U"


def find(world: World, ticket: bytes, start: str = "+", most: int = 100) -> list[object]:
    args = ("XREVRANGE", start, "-", most, "ticket_id", ticket)
    return list(world.scripts.run("find_entries", (world.keys.stream,), args))


def find_runs(world: World, text: bytes, start: bytes | str = "+", most: int = 10) -> list[object]:
    args = ("XREVRANGE", start, "-", most, "batch", text, "part")
    return list(world.scripts.run("find_entries", (world.keys.runs,), args))


def test_entries_of_the_ticket_are_found_newest_first_page_by_page(world: World) -> None:
    ids = world.send(T, *TRICKY_IDS)
    world.send(U)
    assert find(world, T) == [len(ids) + 1, ids[0], ids[::-1], 1]
    assert find(world, T, most=2) == [2, ids[-1], [ids[-1]], 0]
    assert find(world, T, f"({ids[-1].decode()}", 1) == [1, ids[-2], [ids[-2]], 0]


def test_a_part_of_an_id_and_a_later_field_are_no_match(world: World) -> None:
    world.send(b"T1", b"1-1")
    world.add(b"2-1", "ticket_id", "U", "ticket_id", "T1")
    assert find(world, b"T")[2] == []
    assert find(world, b"T1")[2] == [b"1-1"]


def test_nothing_there_gives_nothing(world: World) -> None:
    world.link.call("DEL", world.keys.stream)
    assert find(world, T) == [0, b"", [], 1]
    assert find_runs(world, b'"T"') == [0, b"", [], 1]
    world.make_group()


def test_records_of_the_run_log_are_found_by_a_text_that_is_no_pattern(world: World) -> None:
    for record in (b'{"tickets":["a.c"]}', b'{"tickets":["abc"]}', b'{"tickets":["%a"]}'):
        world.link.call("XADD", world.keys.runs, "*", "batch", record)
    count, last, found, _ = find_runs(world, b'"a.c"')
    assert (count, found) == (3, [b'{"tickets":["a.c"]}'])
    assert find_runs(world, b'"%a"', most=1)[2] == [b'{"tickets":["%a"]}']
    assert find_runs(world, b'"%a"', b"(" + last, 1) == [0, b"", [], 1]
