"""reject.lua: what can be handed to nobody ends as a dead letter, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import FIELD, World, fetch
from usher.common.base.errors import Fenced
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.redis.client import CommandRefused
from usher.master.leader.entries import PeekedEntry, Rejected, partition_entries
from usher.master.leader.leader_scripts import LeaderScripts


def test_a_rejected_entry_is_acknowledged_and_kept_with_its_reason_and_its_fields(world: World) -> None:
    leader = world.elect()
    world.add(b"1-1", "a", "1", "usher-id", "theirs", "a", b"\xff\x00")
    fetch(leader, 10)
    assert leader.reject([Rejected(b"1-1", b"shown", "no_ticket_id")]) == 1
    assert world.pending() == {}
    [(_, fields)] = world.link.call("XRANGE", world.keys.dead, "-", "+")
    head = dict(zip(fields[:16:2], fields[1:16:2], strict=True))
    assert (head[b"usher-id"], head[b"usher-ticket"], head[b"usher-reason"]) == (b"1-1", b"shown", b"no_ticket_id")
    assert (head[b"usher-owner"], head[b"usher-attempts"], head[b"usher-error"]) == (b"master", b"0", b"")
    assert head[b"usher-first-ms"] == head[b"usher-last-ms"]
    assert len(head[b"usher-first-ms"]) == 13
    assert b" ".join(fields[16:26:2]) == b"usher-policy usher-fence usher-error-type usher-traceback usher-fields"
    assert fields[26:] == [b"a", b"1", b"usher-id", b"theirs", b"a", b"\xff\x00"]


def test_the_same_call_twice_writes_one_letter(world: World) -> None:
    leader = world.elect()
    [entry_id] = world.parked(leader, b"")
    assert leader.reject([Rejected(entry_id, b"", "empty_ticket_id")]) == 1
    with world.unchanged():
        assert leader.reject([Rejected(entry_id, b"", "empty_ticket_id")]) == 1, "it is over"


def test_a_deposed_leader_rejects_nothing(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    [entry_id] = world.parked(leader, b"")
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.reject([Rejected(entry_id, b"", "empty_ticket_id")])


def test_what_an_owner_has_is_not_rejected(world: World) -> None:
    leader = world.elect()
    [entry_id] = world.owned(leader, world.join("a"), b"T")
    with world.unchanged():
        leader.reject([Rejected(entry_id, b"T", "no_ticket_id")])


def test_ids_that_were_never_read_or_never_existed_are_not_rejected(world: World) -> None:
    leader = world.elect()
    [unread] = world.send(b"")
    with world.unchanged():
        leader.reject([Rejected(unread, b"", "x"), Rejected(b"77-7", b"", "x")])


def test_an_entry_whose_body_is_gone_says_so(world: World) -> None:
    leader = world.elect()
    [entry_id] = world.parked(leader, b"")
    world.delete(entry_id)
    assert leader.reject([Rejected(entry_id, b"", "empty_ticket_id")]) == 1
    assert world.state().letters() == [(entry_id, b"", b"body_gone")]


def test_what_is_too_large_is_kept_cut_and_says_how_much_is_missing(world: World) -> None:
    leader = LeaderScripts(world.scripts, world.keys, world.elect().epoch, FIELD, 10_000)
    world.add(b"1-1", FIELD, "T", "body", b"x" * 9_000)
    world.add(b"2-1", FIELD, "T", "body", b"y" * 20_000_000, "note", "kept")
    world.add(b"3-1", FIELD, "T", *[part for n in range(3000) for part in (f"f{n}", "v")])
    world.add(b"4-1", "other", b"z" * 10_001)
    found = [*fetch(leader, 10), *fetch(leader, 10)]
    large = [PeekedEntry(b"2-1", b"T", 20_000_022), PeekedEntry(b"3-1", b"T", 16_900), PeekedEntry(b"4-1", b"", 10_006)]
    assert found == [PeekedEntry(b"1-1", b"T"), *large]
    assert leader.read_parked(None, 10).found + leader.read_parked(b"2-1", 10).found == found
    _, rejected = partition_entries(found)
    assert [(entry.id, entry.shown, entry.reason) for entry in rejected] == [
        (b"%d-1" % n, b"T" * (n < 4), b"too_large".decode()) for n in (2, 3, 4)
    ]
    assert [leader.reject(rejected), leader.reject(rejected[1:])] == [1, 2]
    big, many, _ = [fields for _, fields in world.link.call("XRANGE", world.keys.dead, "-", "+")]
    assert big[24:30] == [b"usher-values-cut", b"1", b"usher-bytes", b"20000022", b"usher-fields", b"3"]
    assert big[30:] == [b"ticket_id", b"T", b"body", b"y" * 1024, b"note", b"kept"]
    assert many[24:30] == [b"usher-fields-cut", b"2901", b"usher-bytes", b"16900", b"usher-fields", b"100"]
    assert len(many[30:]) == 200
    assert world.pending() == {b"master": [b"1-1"]}


def test_what_is_too_large_is_found_wherever_an_entry_comes_from(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    leader = LeaderScripts(world.scripts, world.keys, leader.epoch, FIELD, 20)
    [held] = world.owned(leader, a, b"T")
    strict = LeaderScripts(world.scripts, world.keys, leader.epoch, FIELD, 3)
    [stray] = world.parked(leader, b"U")
    world.make_idle("stranger", 100_000, stray)
    world.end_lease(a)
    assert [found.size > 3 for found in strict.take_back(a.incarnation, 10).found] == [True]
    assert [found.size > 3 for found, _ in strict.sweep([], 50_000, b"0-0", 10).strays] == [True]
    assert {found.id for found in strict.read_parked(None, 10).found if found.size} == {held, stray}


def test_all_kinds_of_unusable_tickets_end_as_letters_with_their_reason_and_others_do_not(world: World) -> None:
    leader = world.elect()
    world.add(b"1-1", "other", "x")
    world.send(b"", b"2-1")
    world.send(b"x" * (LONGEST_TICKET + 1), b"3-1")
    world.send(b"x" * 1_000_000, b"4-1")
    world.send(b"\xff\xfe", b"5-1")
    world.send(b"x" * LONGEST_TICKET, b"6-1")
    usable, rejected = partition_entries(fetch(leader, 10))
    assert leader.reject(rejected) == 5
    assert [(entry_id, reason) for entry_id, _, reason in world.state().letters()] == [
        (b"1-1", b"no_ticket_id"),
        (b"2-1", b"empty_ticket_id"),
        (b"3-1", b"ticket_id_too_long"),
        (b"4-1", b"ticket_id_too_long"),
        (b"5-1", b"ticket_id_not_utf8"),
    ]
    assert world.link.call("MEMORY", "USAGE", world.keys.dead, "SAMPLES", 0) < 20_000, "they are not kept whole"
    assert [entry_id for entry_id, _ in usable] == [b"6-1"]
    assert world.pending() == {b"master": [b"6-1"]}


def test_when_the_letter_cannot_be_written_the_entry_is_not_acknowledged(world: World) -> None:
    """A script is not rolled back: what could fail comes before what would lose the message."""
    leader = world.elect()
    [entry_id] = world.parked(leader, b"")
    world.link.call("XADD", world.keys.dead, "18446744073709551615-18446744073709551615", "the last", "possible id")
    with world.unchanged(), pytest.raises(CommandRefused):
        leader.reject([Rejected(entry_id, b"", "empty_ticket_id")])
