"""rejoin.lua: after the group was lost and made again, entries that owners still have go back to their owners."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import NASTY_TICKETS, TRICKY_IDS, World, fetch, hand_over, plan
from tests.integration.memory import full_memory
from usher.common.base.errors import Fenced
from usher.master.leader.leader_scripts import LeaderScripts


def lose_the_group(world: World, start: str = "0") -> None:
    """Somebody destroyed the group; the leader made it again at ``start``."""
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    world.link.call("XGROUP", "CREATE", world.keys.stream, world.keys.group, start)


def test_entries_go_back_to_the_owner_that_has_them_in_processing(world: World) -> None:
    leader = world.elect()
    a, b = world.join("a"), world.join("b")
    mine, yours = world.owned(leader, a, b"T", b"1-1", b"3-1"), world.owned(leader, b, b"U", b"4-1")
    before = world.state()
    lose_the_group(world)
    assert [found.id for found in fetch(leader, 10)] == [*mine, *yours]
    assert leader.rejoin([*((b"T", entry_id) for entry_id in mine), (b"U", yours[0])]).over == []
    assert world.state() == before, "as if nothing had happened"


def test_index_inbox_and_fence_stay_as_they_were(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    [entry_id] = world.owned(leader, owner, b"T")
    record, inbox = world.record(b"T"), world.inbox(owner)
    lose_the_group(world)
    fetch(leader, 10)
    leader.rejoin([(b"T", entry_id)])
    assert (world.record(b"T"), world.inbox(owner)) == (record, inbox)


def test_the_owner_can_acknowledge_as_if_nothing_had_happened(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    ids = world.owned(leader, owner, b"T", *TRICKY_IDS)
    lose_the_group(world)
    fetch(leader, 100)
    assert leader.rejoin((b"T", entry_id) for entry_id in ids).over == []
    answer = owner.steps.ack({b"T": ids}, b"", 0)
    assert (answer.done, answer.stale) == ({b"T": ids}, [])
    assert world.pending() == {}
    assert world.record(b"T") is None


def test_what_its_owner_acknowledged_meanwhile_was_done(world: World) -> None:
    """Its acknowledgement found no group, so the entry comes again; handed over now, it would run behind the second
    one."""
    leader = world.elect()
    owner = world.join("a")
    first, second = world.owned(leader, owner, b"T", b"1-1", b"2-1")
    lose_the_group(world)
    owner.steps.ack({b"T": [first]}, b"", 0)
    fetch(leader, 10)
    assert leader.rejoin([(b"T", first), (b"T", second)]) == ([], [first])
    assert world.pending() == {owner.name: [second]}


def test_what_is_below_all_that_the_owner_has_was_done_also_when_it_has_nothing_pending_yet(world: World) -> None:
    """Pages of what repeats come one after the other; ids are compared as numbers, and need not be in order in a
    record."""
    leader = world.elect()
    owner = world.join("a")
    ids = world.owned(leader, owner, b"T", b"8-1", b"9-1", b"9-2", b"9-10", b"10-1", b"11-1")
    owner.steps.ack({b"T": ids[:3]}, b"", 0)
    world.spoil(b"T", world.head(b"T") + b" 11-1 9-10 10-1")
    lose_the_group(world)
    fetch(leader, 3)
    assert leader.rejoin((b"T", entry_id) for entry_id in ids[:3]) == ([], ids[:3])
    assert world.pending() == {}
    fetch(leader, 3)
    assert leader.rejoin((b"T", entry_id) for entry_id in ids[3:]) == ([], [])
    assert world.pending() == {owner.name: ids[3:]}


@pytest.mark.parametrize(
    ("has", "made_done"),
    [
        (b"500-1", False),  # the stream was deleted and came back with lower ids, or all that the owner has was trimmed
        (b"500-1 501-1", False),
        (b"500-1 30-1", True),  # of both streams
        (b"30-1 20-1", True),
    ],
)
def test_a_record_that_is_older_than_the_stream_makes_nothing_done(world: World, has: bytes, made_done: bool) -> None:
    """What runs late is better than what never runs."""
    leader = world.elect()
    owner = world.join("a")
    world.spoil(b"T", b"%s 5 %s" % (owner.name, has))
    sent = world.send(b"T", b"10-1", b"20-1", b"30-1")
    first = sent[:1]
    assert [found.id for found in fetch(leader, 1)] == first
    assert leader.rejoin([(b"T", first[0])]) == (([], first) if made_done else (first, []))
    assert world.pending() == ({} if made_done else {b"master": first})
    world.apart_because = "the record is of another stream"


def test_of_a_ticket_that_is_halted_what_is_below_was_done_too(world: World) -> None:
    leader = world.elect()
    first, second = world.parked(leader, b"T", b"1-1", b"2-1")
    world.spoil(b"T", b"halted 5 2-1")
    lose_the_group(world)
    fetch(leader, 10)
    assert leader.rejoin([(b"T", first), (b"T", second)]) == ([], [first])
    assert world.pending() == {b"halted": [second]}


def test_a_ticket_that_nobody_has_any_more_is_over(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    [entry_id] = world.owned(leader, owner, b"T")
    lose_the_group(world)
    owner.steps.ack({b"T": [entry_id]}, b"", 0)
    fetch(leader, 10)
    with world.unchanged():
        assert leader.rejoin([(b"T", entry_id)]).over == [entry_id]


def test_a_later_entry_of_the_ticket_that_the_owner_has_not_is_over(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    [first] = world.owned(leader, owner, b"T", b"1-1")
    [later] = world.send(b"T", b"2-1")
    lose_the_group(world)
    fetch(leader, 10)
    assert leader.rejoin([(b"T", first), (b"T", later)]).over == [later]


def test_an_id_that_is_the_beginning_or_the_end_of_one_in_processing_is_another_one(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    ids = world.owned(leader, owner, b"T", b"11-10")
    others = world.send(b"T", b"11-11", b"111-1")
    lose_the_group(world)
    fetch(leader, 10)
    assert leader.rejoin((b"T", entry_id) for entry_id in (b"11-1", b"1-10", *others)) == (others, [b"11-1", b"1-10"])
    assert leader.rejoin([(b"T", ids[0])]).over == []


def test_a_returned_ticket_belongs_to_nobody_its_entries_stay_under_master(world: World) -> None:
    """A drain gave it back before the group was lost: entries under ``master`` are just where they should be."""
    leader = world.elect()
    owner = world.join("a")
    ids = world.owned(leader, owner, b"T", b"1-1", b"2-1")
    owner.steps.drain(60_000)
    assert world.give_back(owner, {b"T": ids}) == []
    lose_the_group(world)
    fetch(leader, 10)
    with world.unchanged():
        assert leader.rejoin((b"T", entry_id) for entry_id in ids).over == ids


def test_a_deposed_leader_gives_nobody_anything(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    owner = world.join("a")
    [entry_id] = world.owned(leader, owner, b"T")
    lose_the_group(world)
    fetch(leader, 10)
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.rejoin([(b"T", entry_id)])
    world.apart_because = "the successor has not adopted yet"


def test_the_same_call_twice_is_fine(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    [entry_id] = world.owned(leader, owner, b"T")
    lose_the_group(world)
    fetch(leader, 10)
    leader.rejoin([(b"T", entry_id)])
    with world.unchanged():
        assert leader.rejoin([(b"T", entry_id)]).over == []


def test_entries_are_not_counted_as_delivered_once_more(world: World) -> None:
    leader = world.elect()
    [entry_id] = world.owned(leader, world.join("a"), b"T")
    lose_the_group(world)
    fetch(leader, 10)
    before = world.deliveries()
    leader.rejoin([(b"T", entry_id)])
    assert world.deliveries() == before


@pytest.mark.parametrize("ticket", NASTY_TICKETS)
def test_a_ticket_is_any_bytes(world: World, ticket: bytes) -> None:
    leader = world.elect()
    owner = world.join("a")
    [entry_id] = world.owned(leader, owner, ticket)
    lose_the_group(world)
    fetch(leader, 10)
    assert leader.rejoin([(ticket, entry_id)]).over == []
    assert world.pending() == {owner.name: [entry_id]}


def test_thousands_go_back_in_one_call(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    tickets = [b"T%d" % n for n in range(2000)]
    ids = world.send_many(tickets)
    fetch(leader, 10_000)
    hand_over(leader, plan(owner, {ticket: [entry_id] for ticket, entry_id in zip(tickets, ids, strict=True)}))
    lose_the_group(world)
    fetch(leader, 10_000)
    assert leader.rejoin(zip(tickets, ids, strict=True)).over == []
    assert world.pending() == {owner.name: ids}


def test_a_record_that_cannot_be_read_gives_nobody_anything(world: World) -> None:
    leader = world.elect()
    [entry_id] = world.owned(leader, world.join("a"), b"T")
    world.spoil(b"T", b"garbage")
    lose_the_group(world)
    fetch(leader, 10)
    with world.unchanged():
        assert leader.rejoin([(b"T", entry_id)]).over == [entry_id]
    world.apart_because = "the record is garbage"


def test_an_owner_whose_lease_has_ended_gets_them_too_and_recovery_takes_them_back(world: World) -> None:
    """Whether it lives is not this step's question: what it has in processing is taken back from it like everything
    else."""
    leader = world.elect()
    owner = world.join("a")
    [entry_id] = world.owned(leader, owner, b"T")
    world.end_lease(owner)
    lose_the_group(world)
    fetch(leader, 10)
    assert leader.rejoin([(b"T", entry_id)]).over == []
    page = leader.take_back(owner.incarnation, 10)
    assert [found.id for found in page.found] == [entry_id]
    assert world.pending() == {b"master": [entry_id]}


def test_an_entry_whose_body_is_gone_is_still_its_owners(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    first, second = world.owned(leader, owner, b"T", b"1-1", b"2-1")
    lose_the_group(world)
    fetch(leader, 10)
    world.delete(first)
    assert leader.rejoin([(b"T", first), (b"T", second)]).over == []
    assert world.record(b"T") is not None
    assert second in world.pending()[owner.name]
    world.apart_because = (
        "Redis 7 drops an entry without a body when it is claimed" if world.claiming_drops_the_bodiless else ""
    )


def test_it_works_at_full_memory(world: World) -> None:
    leader = world.elect()
    owner = world.join("a")
    [entry_id] = world.owned(leader, owner, b"T")
    lose_the_group(world)
    fetch(leader, 10)
    with full_memory(world.link):
        assert leader.rejoin([(b"T", entry_id)]).over == []
    assert world.pending() == {owner.name: [entry_id]}
