"""take_back.lua: what a new epoch starts from, page by page, in id order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import NASTY_TICKETS, TRICKY_IDS, World, fetch
from usher.common.base.errors import Fenced
from usher.common.protocol.message import LONGEST_TICKET
from usher.master.leader.entries import PeekedEntry
from usher.master.leader.leader_scripts import LeaderScripts


def _all(leader: LeaderScripts, count: int) -> list[bytes]:
    ids: list[bytes] = []
    after = None
    while True:
        page = leader.read_parked(after, count)
        ids += [found.id for found in page.found]
        if page.last is None:
            return ids
        after = page.last


@pytest.mark.parametrize("count", [1, 2, 3, len(TRICKY_IDS), 100])
def test_pages_bring_everything_once_in_the_order_of_the_stream_not_of_the_text(world: World, count: int) -> None:
    leader = world.elect()
    ids = world.parked(leader, b"T", *TRICKY_IDS)
    with world.unchanged():
        assert _all(leader, count) == ids


def test_what_owners_have_is_not_in_it(world: World) -> None:
    leader = world.elect()
    world.owned(leader, world.join("a"), b"mine")
    parked = world.parked(leader, b"T")
    assert _all(leader, 10) == parked


def test_reading_is_no_delivery(world: World) -> None:
    leader = world.elect()
    [entry_id] = world.parked(leader, b"T")
    for _ in range(3):
        leader.read_parked(None, 10)
    assert world.deliveries() == {entry_id: 1}


def test_nothing_parked_is_one_empty_page(world: World) -> None:
    assert world.elect().read_parked(None, 10) == (None, [], [])


def test_a_deposed_leader_reads_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    first, _ = world.parked(leader, b"T", b"1-1", b"2-1")
    world.delete(first)
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.read_parked(None, 10)


def test_an_entry_whose_body_is_gone_becomes_a_dead_letter_once(world: World) -> None:
    leader = world.elect()
    first, second, third = world.parked(leader, b"T", b"1-1", b"2-1", b"3-1")
    world.delete(first, third)
    assert leader.read_parked(None, 10) == (third, [PeekedEntry(second, b"T")], [first, third])
    assert leader.read_parked(None, 10) == (second, [PeekedEntry(second, b"T")], []), (
        "the reply was lost and the page is read again"
    )
    assert world.state().letters() == [(first, b"", b"body_gone"), (third, b"", b"body_gone")]
    assert world.pending() == {b"master": [second]}


def test_a_page_of_bodies_that_are_all_gone_is_not_the_last_page(world: World) -> None:
    leader = world.elect()
    first, second, third = world.parked(leader, b"T", b"1-1", b"2-1", b"3-1")
    world.delete(first, second)
    assert _all(leader, 1) == [third]


@pytest.mark.parametrize("ticket", NASTY_TICKETS)
def test_a_ticket_is_any_bytes(world: World, ticket: bytes) -> None:
    leader = world.elect()
    [entry_id] = world.parked(leader, ticket)
    assert leader.read_parked(None, 10).found == [PeekedEntry(entry_id, ticket)]


def test_tickets_that_nobody_can_use_come_as_they_were_seen_but_cut(world: World) -> None:
    leader = world.elect()
    world.add(b"1-1", "other", "x")
    world.send(b"", b"2-1")
    world.send(b"x" * 100_000, b"3-1")
    seen = fetch(leader, 10)
    page = leader.read_parked(None, 10)
    assert page.found[:2] == seen[:2]
    assert [found.ticket for found in page.found] == [None, b"", b"x" * (LONGEST_TICKET + 1)]


def test_thousands_come_in_one_page(world: World) -> None:
    leader = world.elect()
    ids = world.send_many([b"T%d" % n for n in range(9000)])
    fetch(leader, 10_000)
    assert _all(leader, 9000) == ids


def test_thousands_of_lost_bodies_become_dead_letters_in_one_call(world: World) -> None:
    leader = world.elect()
    ids = world.send_many([b"T"] * 4500)
    fetch(leader, 10_000)
    world.delete(*ids)
    assert leader.read_parked(None, 5000).gone == ids
    assert world.pending() == {}
    assert len(world.dead()) == 4500
