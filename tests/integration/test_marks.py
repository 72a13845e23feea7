"""Tenants and priorities come with whatever the leader looks at: what is new, what it is told of, what is parked, taken
back or swept; and a takeover learns them for what consumers have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import FIELD, World, read
from usher.common.protocol.marks import Mark, MarkFields
from usher.master.leader.entries import LONGEST_MARK, MarkReader, PeekedEntry
from usher.master.leader.leader_scripts import LeaderScripts

_FIELDS = MarkFields("customer", "priority")


def _leader(world: World, fields: MarkFields = _FIELDS, longest: int = 0) -> LeaderScripts:
    world.link.call("DEL", world.keys.leader)
    epoch = world.elect().epoch
    return LeaderScripts(world.scripts, world.keys, epoch, FIELD, longest, marks=MarkReader(fields))


def _send(world: World) -> list[bytes]:
    return [
        world.add(b"1-1", b"customer", b"a", FIELD, b"T", b"priority", b"7", b"customer", b"later ones do not count"),
        world.add(b"2-1", FIELD, b"U"),
        world.add(b"3-1", FIELD, b"V", b"priority", b""),
        world.add(b"4-1", b"customer", b"c" * 1000, b"priority", b"urgent"),
        world.add(b"5-1", FIELD, b"", b"customer", b"b"),
    ]


_EXPECTED = [
    PeekedEntry(b"1-1", b"T", 0, b"a", b"7"),
    PeekedEntry(b"2-1", b"U"),
    PeekedEntry(b"3-1", b"V"),
    PeekedEntry(b"4-1", None, 0, b"c" * LONGEST_MARK, b"urgent"),
    PeekedEntry(b"5-1", b"", 0, b"b"),
]


def test_they_come_with_what_is_read(world: World) -> None:
    _send(world)
    assert read(_leader(world), 100).found == _EXPECTED


def test_who_asks_for_none_gets_none(world: World) -> None:
    _send(world)
    leader = _leader(world, MarkFields())
    assert read(leader, 2).found == [PeekedEntry(b"1-1", b"T"), (b"2-1", b"U")]
    assert leader.marks.read(read(leader, 5).found) == ()


def test_of_what_is_too_large_they_do_not_matter(world: World) -> None:
    world.add(b"1-1", b"customer", b"a", FIELD, b"T", b"body", b"x" * 100)
    leader = _leader(world, longest=50)
    [found] = read(leader, 10).found
    assert isinstance(found, PeekedEntry)
    assert found.size > 50


def _parked(world: World, leader: LeaderScripts) -> list[PeekedEntry]:
    world.link.call("XREADGROUP", "GROUP", world.keys.group, "master", "STREAMS", world.keys.stream, ">")
    return leader.read_parked(None, 10).found


def _taken_back(world: World, leader: LeaderScripts) -> list[PeekedEntry]:
    a = world.join("a")
    world.link.call("XREADGROUP", "GROUP", world.keys.group, a.incarnation, "STREAMS", world.keys.stream, ">")
    world.end_lease(a)
    return leader.take_back(a.incarnation, 10).found


def _swept(world: World, leader: LeaderScripts) -> list[PeekedEntry]:
    living = world.join("b")
    world.link.call("XREADGROUP", "GROUP", world.keys.group, "stranger", "STREAMS", world.keys.stream, ">")
    return [found for found, _ in leader.sweep([living.incarnation], 0, b"0-0", 100).strays]


@pytest.mark.parametrize("page", [_parked, _taken_back, _swept])
def test_every_page_brings_them(world: World, page: Callable[[World, LeaderScripts], list[PeekedEntry]]) -> None:
    _send(world)
    assert page(world, _leader(world)) == _EXPECTED


def test_an_entry_with_marks_goes_back_to_its_living_owner_by_the_sweep(world: World) -> None:
    leader, a = _leader(world), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    world.link.call("XDEL", world.keys.stream, entry_id)
    world.add(b"9-1", FIELD, b"U", b"customer", b"x")
    world.link.call("XREADGROUP", "GROUP", world.keys.group, "stranger", "STREAMS", world.keys.stream, ">")
    world.link.call("HSET", world.keys.tickets, b"U", b"%s 5 9-1" % a.name)
    swept = leader.sweep([a.incarnation], 0, b"0-0", 100)
    assert (swept.strays, world.pending()[a.name][-1]) == ([], b"9-1")


def test_a_priority_that_cannot_be_read_counts_as_the_least_and_is_counted(world: World) -> None:
    _send(world)
    leader = _leader(world)
    marks = leader.marks.read(read(leader, 100).found)
    assert [(mark.tenant, mark.priority) for mark in marks] == [
        (b"a", 7), (b"", 0), (b"", 0), (b"c" * 128, 0), (b"b", 0)
    ]  # fmt: skip
    assert leader.marks.unreadable == 1


@pytest.mark.parametrize(
    ("fields", "tenant"), [(_FIELDS, b"a"), (MarkFields("@ticket:-"), b"acme"), (MarkFields("", "priority"), None)]
)
def test_of_what_consumers_have_the_tenant_is_read(world: World, fields: MarkFields, tenant: bytes | None) -> None:
    world.add(b"1-1", FIELD, b"acme-1", b"customer", b"a")
    leader = _leader(world, fields)
    told = leader.tenants_of([(b"1-1", b"acme-1")]) if leader.marks.tells_tenants else ()
    assert list(told) == ([] if tenant is None else [Mark(b"1-1", b"acme-1", tenant, 0)])


@pytest.mark.parametrize(
    ("fields", "ticket", "value", "tenant"),
    [
        (MarkFields("@stream"), b"orders:7/T", b"17-1 9 orders:7", b"orders:7"),
        (MarkFields("@stream"), b"T", b"17-1 0 a b", b"a b"),
        (MarkFields("@ticket:/"), b"acme/1/2", b"", b"acme"),
        (MarkFields("@ticket:/"), b"acme", b"", b""),
        (MarkFields("@ticket:/", by_stream=True), b"a/b/acme/1", b"17-1 4 a/b", b"acme"),
        (MarkFields("@ticket:::"), b"acme::1", b"", b"acme"),
    ],
)
def test_tenants_that_no_field_names(fields: MarkFields, ticket: bytes, value: bytes, tenant: bytes) -> None:
    assert fields.read(b"1-0", ticket, value, b"").tenant == tenant
