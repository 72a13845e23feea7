"""fetch.lua: new entries come under ``master``, for the leader only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.errors import Fenced, GroupMissing
from common.message import LONGEST_TICKET
from master.leader_steps import Found, LeaderSteps
from tests.integration.factories import NASTY_TICKETS, TRICKY_IDS, World, fetch


def test_new_entries_are_pending_under_master_and_come_in_stream_order(world: World) -> None:
    leader = world.elect()
    ids = world.send(b"T", *TRICKY_IDS)
    assert fetch(leader, 100) == [Found(entry_id, b"T") for entry_id in ids]
    assert world.pending() == {b"master": ids}
    assert fetch(leader, 100) == []


def test_no_more_are_read_than_asked_for(world: World) -> None:
    leader = world.elect()
    ids = world.send(b"T", *TRICKY_IDS)
    assert [found.id for found in fetch(leader, 3)] == ids[:3]
    assert [found.id for found in fetch(leader, 100)] == ids[3:]


def test_large_entries_come_a_few_at_a_time_and_in_order(world: World) -> None:
    leader = world.elect()
    ids = [world.add(b"%d-1" % number, "ticket_id", "T", "body", b"x" * (1_000_000 if number % 50 else 10)) for number in range(1, 41)]
    ids += world.send_many([b"U"] * 2000)
    pages = []
    while page := fetch(leader, 500):
        pages.append([found.id for found in page])
    assert [entry_id for page_ids in pages for entry_id in page_ids] == ids
    assert max(len(page_ids) for page_ids in pages[:4]) <= 17, "at most twice what is meant by enough"
    assert len(pages) <= 12
    assert world.pending() == {b"master": ids}


def test_a_lost_reply_costs_nothing_what_was_read_is_found_under_master(world: World) -> None:
    leader = world.elect()
    ids = world.send(b"T", *TRICKY_IDS)
    fetch(leader, 4)
    fetch(leader, 100)
    assert [found.id for found in leader.read_parked(None, 100).found] == ids


def test_a_deposed_leader_reads_nothing(world: World, depose: Callable[[LeaderSteps], None]) -> None:
    leader = world.elect()
    world.send(b"T")
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        fetch(leader, 10)
    assert world.pending() == {}


@pytest.mark.parametrize("ticket", NASTY_TICKETS)
def test_a_ticket_is_any_bytes(world: World, ticket: bytes) -> None:
    leader = world.elect()
    [entry_id] = world.send(ticket)
    assert fetch(leader, 10) == [Found(entry_id, ticket)]


def test_an_entry_without_the_field_has_no_ticket(world: World) -> None:
    leader = world.elect()
    ids = [world.add(b"1-1", "other", "1"), world.add(b"2-1", "", ""), world.add(b"3-1", "x", "ticket_id")]
    assert fetch(leader, 10) == [Found(entry_id, None) for entry_id in ids]


def test_an_empty_ticket_is_not_the_same_as_none(world: World) -> None:
    leader = world.elect()
    assert fetch(leader, 10) == []
    [entry_id] = world.send(b"")
    assert fetch(leader, 10) == [Found(entry_id, b"")]


def test_of_several_fields_of_that_name_the_first_counts(world: World) -> None:
    leader = world.elect()
    world.add(b"1-1", "body", "x", "ticket_id", "first", "ticket_id", "second")
    assert fetch(leader, 10) == [Found(b"1-1", b"first")]


def test_a_value_that_looks_like_the_field_name_is_no_field(world: World) -> None:
    leader = world.elect()
    world.add(b"1-1", "a", "ticket_id", "ticket_id", "T")
    assert fetch(leader, 10) == [Found(b"1-1", b"T")]


def test_of_a_ticket_that_is_too_long_one_byte_more_than_allowed_travels(world: World) -> None:
    leader = world.elect()
    world.send(b"x" * LONGEST_TICKET, b"1-1")
    world.send(b"x" * 1_000_000, b"2-1")
    assert [len(found.ticket or b"") for found in fetch(leader, 10)] == [LONGEST_TICKET, LONGEST_TICKET + 1]


def test_thousands_come_in_one_call(world: World) -> None:
    leader = world.elect()
    ids = world.send_many([b"T%d" % n for n in range(9000)])
    assert [found.id for found in fetch(leader, 10_000)] == ids


def test_an_entry_of_thousands_of_fields_comes(world: World) -> None:
    leader = world.elect()
    world.add(b"1-1", *[b"f%d" % n for n in range(20_000)], "ticket_id", "T")
    assert fetch(leader, 10) == [Found(b"1-1", b"T")]


def test_an_entry_that_was_deleted_before_it_was_read_does_not_come(world: World) -> None:
    leader = world.elect()
    first, second = world.send(b"T", b"1-1", b"2-1")
    world.delete(first)
    assert fetch(leader, 10) == [Found(second, b"T")]


def test_a_group_that_is_gone_is_said_to_be_gone(world: World) -> None:
    leader = world.elect()
    world.send(b"T")
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    with pytest.raises(GroupMissing):
        fetch(leader, 10)
    world.make_group()


def test_a_stream_that_is_gone_is_a_group_that_is_gone(world: World) -> None:
    leader = world.elect()
    world.link.call("DEL", world.keys.stream)
    with pytest.raises(GroupMissing):
        fetch(leader, 10)
    world.make_group()
