"""gather.lua: entries of many streams come into the work stream, in order, each exactly once, whoever asks and however
often."""

from __future__ import annotations

import pytest

from tests.integration.factories import TRICKY_IDS
from tests.integration.gathered import Gathered, outcomes
from usher.common.base.clock import now_s
from usher.common.protocol.attempts import NEVER
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs
from usher.consumer.handlers.message import OwnLease, message_type
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.fair_queue import TurnOutcome, TurnResult


@pytest.fixture
def world(link: Link) -> Gathered:
    return Gathered(link)


def test_entries_of_each_source_come_once_in_their_order_and_its_group_is_past_them(world: Gathered) -> None:
    a, b = world.send("a", *(one.decode() for one in TRICKY_IDS)), world.send("b", "5-1", "5-2")
    assert outcomes(world.gather("a", "b")) == [("OVER", len(a)), ("OVER", 2)]
    assert (world.moved("a"), world.moved("b")) == (a, b)
    assert (world.position("a"), world.position("b")) == (a[-1], b[-1])
    assert world.link.call("XPENDING", "a", "g")[0] == 0
    assert outcomes(world.gather("a", "b")) == [("OVER", 0), ("OVER", 0)], "a call whose reply was lost is made again"
    assert len(world.entries()) == len(a) + 2


def test_the_work_stream_has_whose_it_is_first_and_then_what_the_producer_sent(world: Gathered) -> None:
    world.link.call("XADD", "orders", "7-1", "uid", "u", "ticket_id", "42", "uid", "v", "ticket_id", "43")
    world.link.call("XADD", "orders", "7-2", "body", "no ticket")
    world.link.call("XADD", "orders", "7-3", "ticket_id", "")
    world.gather("orders")
    with_ticket, without, empty = (entry.fields for entry in world.entries())
    header = [b"usher_from", b"7-1 7 orders", b"usher_ticket", b"orders/42"]
    assert with_ticket == [*header, b"uid", b"u", b"ticket_id", b"42", b"uid", b"v", b"ticket_id", b"43"]
    assert without == [b"usher_from", b"7-2 0 orders", b"body", b"no ticket"]
    assert empty == [b"usher_from", b"7-3 0 orders", b"usher_ticket", b"", b"ticket_id", b""], (
        "it must be rejected as empty"
    )


def test_no_producer_can_name_another_ones_ticket(world: Gathered) -> None:
    world.link.call(
        "XADD",
        "evil",
        "1-1",
        "usher_ticket",
        "good/42",
        "usher_from",
        "1-1 5 good",
        "ticket_id",
        "1",
        "usher_ticket",
        "good/42",
    )
    world.link.call("XADD", "evil", "1-2", "usher_ticket", "good/42")
    world.gather("evil")
    assert [entry.fields for entry in world.entries()] == [
        [b"usher_from", b"1-1 5 evil", b"usher_ticket", b"evil/1", b"ticket_id", b"1"],
        [b"usher_from", b"1-2 0 evil"],
    ]


def test_the_same_ticket_id_in_two_sources_is_two_tickets_and_handlers_see_their_own(
    world: Gathered, link: Link
) -> None:
    tickets = [b"a/42", b"b/42"]
    link.call("XADD", "a", "1-1", "ticket_id", "42", "uid", "u")
    link.call("XADD", "b", "1-1", "ticket_id", "42")
    world.gather("a", "b")
    made = message_type(world.keys.stream, is_gathered=True)
    lease = OwnLease(10.0, now_s())
    messages = [
        made(entry.fields[3], entry.id, 1, entry.fields, lease, NEVER) for entry in world.entries() if entry.fields
    ]
    assert [message.ticket for message in messages] == tickets
    assert [message.scoped_ticket_id.encode() for message in messages] == tickets
    assert [(message.ticket_id, message.source, message.source_id, message.uid) for message in messages] == [
        ("42", "a", "1-1", "a/u"),
        ("42", "b", "1-1", "b/1-1"),
    ]
    assert messages[0].fields == {"ticket_id": "42", "uid": "u"}


def test_ids_count_the_entries_and_a_full_work_stream_takes_no_more(world: Gathered) -> None:
    sent = [*world.send("a", *(f"{number}-1" for number in range(1, 16)))]
    world.stream.create_group(b"0-0")
    assert outcomes(world.gather("a", "b", most=10)) == [("MORE", 10), ("FULL", 0)]
    assert [rank(entry.id) & 0xFFFF for entry in world.entries()] == list(range(1, 11))
    assert outcomes(world.gather("a", most=10)) == [("FULL", 0)]
    assert len(world.read(4)) == 4
    assert outcomes(world.gather("a", most=10)) == [("MORE", 4)]
    assert len(world.read()) == 10
    assert outcomes(world.gather("a", most=10)) == [("OVER", 1)]
    assert world.moved("a") == sent


def test_the_work_stream_is_not_full_of_what_was_trimmed_or_lost_with_its_group(world: Gathered) -> None:
    world.send("a", *(f"{number}-1" for number in range(1, 101)))
    assert outcomes(world.gather("a", most=20, quantum=50)) == [("MORE", 20)], "also before any master led"
    world.link.call("XTRIM", world.keys.stream, "MAXLEN", "=", 5)
    assert outcomes(world.gather("a", most=20, quantum=50)) == [("MORE", 15)]
    world.link.call("XTRIM", world.keys.stream, "MAXLEN", "=", 0)
    world.stream.create_group(b"0-0")
    assert outcomes(world.gather("a", most=20, quantum=50)) == [("MORE", 20)]
    world.link.call("DEL", world.keys.stream)
    assert outcomes(world.gather("a", most=20, quantum=50)) == [("MORE", 20)]
    assert [rank(entry.id) & 0xFFFF for entry in world.entries()] == list(range(1, 21))


@pytest.mark.parametrize(
    "theirs", ["99999999999999-0", "5000000000000-9007199254740992", "5000000000000-18446744073709551615"]
)
def test_an_entry_that_somebody_added_to_the_work_stream_does_not_stop_it(world: Gathered, theirs: str) -> None:
    world.link.call("XADD", world.keys.stream, theirs, "by", "hand")
    sent = world.send("a", "1-1", "1-2", "1-3")
    world.stream.create_group(b"0-0")
    assert outcomes(world.gather("a", most=2)) == [("MORE", 2)]
    assert len(world.read()) == 3
    assert outcomes(world.gather("a", most=2)) == [("OVER", 1)]
    assert world.moved("a") == sent
    ids = [rank(entry.id) for entry in world.entries()]
    assert ids == sorted(ids)


@pytest.mark.parametrize("is_first", [True, False])
def test_nothing_that_comes_later_gets_the_id_of_what_became_a_dead_letter(world: Gathered, is_first: bool) -> None:
    """Also in the same millisecond, when the entry with too many fields was the last of its call."""
    if not is_first:
        world.send("a", "1-1")
        world.gather("a")
        world.stream.create_group(b"0-0")
    before = len(world.entries())
    world.link.call(
        "XADD", "a", "2-1", "ticket_id", "T", *(part for number in range(4000) for part in (f"f{number}", "v"))
    )
    world.gather("a")
    [(_, letter)] = world.link.call("XRANGE", world.keys.dead, "-", "+")
    taken = dict(zip(letter[::2], letter[1::2], strict=True))[b"usher-id"]
    assert len(world.entries()) == before
    info = pairs(world.link.call("XINFO", "STREAM", world.keys.stream))
    assert info[b"last-generated-id"] == taken
    assert info.get(b"max-deleted-entry-id", b"0-0") == b"0-0", "nothing was deleted: the archive looks at that"
    world.send("a", "3-1")
    world.gather("a")
    assert rank(world.entries()[-1].id) & 0xFFFF == before + 2


def test_what_is_redriven_counts_as_one_entry_more(world: Gathered) -> None:
    world.send("a", *(f"{number}-1" for number in range(1, 8)))
    world.stream.create_group(b"0-0")
    world.gather("a")
    assert len(world.read()) == 7
    letter = (b"usher-id", b"1-1", b"usher-ticket", b"a/42", b"usher-fields", 1, b"usher_from", b"1-1 2 a")
    redriven = DeadLetters(world.link, world.keys).redrive(
        [world.link.call("XADD", world.keys.dead, "*", *letter) for _ in range(2)]
    )
    assert [one.word for one in redriven] == ["added", "added"]
    world.send("a", *(f"{number}-1" for number in range(10, 30)))
    assert outcomes(world.gather("a", most=10)) == [("MORE", 8)], "two of the ten are there"
    numbers = [rank(entry.id) & 0xFFFF for entry in world.entries()]
    assert numbers[7:] == list(range(8, 18))


def test_large_entries_come_a_few_at_a_time_because_redis_stands_still_meanwhile(world: Gathered) -> None:
    sent = [
        world.link.call("XADD", "a", f"{number}-1", "ticket_id", "T", "body", b"x" * 1_000_000)
        for number in range(1, 31)
    ]
    calls = []
    while not calls or calls[-1] != ("OVER", 0):
        calls += outcomes(world.gather("a"))
        assert len(calls) < 20
    assert max(moved for _, moved in calls) <= 17
    assert world.moved("a") == sent


def test_an_entry_with_more_fields_than_fit_becomes_a_dead_letter_and_the_others_go_on(world: Gathered) -> None:
    sent = world.send("a", "1-1")
    world.link.call(
        "XADD", "a", "2-1", "ticket_id", "T", *(part for number in range(4000) for part in (f"f{number}", "v"))
    )
    sent += world.send("a", "3-1")
    [told] = world.gather("a")
    assert (told.outcome.value, told.moved, told.words) == ("OVER", 3, "made 0-0, cut 1")
    assert world.moved("a") == sent
    [(_, letter)] = world.link.call("XRANGE", world.keys.dead, "-", "+")
    head = dict(zip(letter[::2], letter[1::2], strict=True))
    assert (head[b"usher-reason"], head[b"usher-ticket"], head[b"usher_from"]) == (
        b"too_many_fields",
        b"a/T",
        b"2-1 2 a",
    )
    assert int(head[b"usher-fields-cut"]) > 0
    [first, last] = world.entries()
    assert head[b"usher-id"] not in (first.id, last.id), "no entry has its id"


def test_all_entries_of_a_call_that_became_dead_letters_are_counted_and_what_else_there_was_is_told(
    world: Gathered,
) -> None:
    large = [word for n in range(3600) for word in (f"f{n}", "v")]
    for n in range(12):
        world.link.call("XADD", "a", f"{n + 1}-1", *large)
    assert world.gather("a") == [TurnResult(TurnOutcome.OVER, 12, "made 0-0, cut 12")]
    assert world.link.call("XLEN", world.keys.dead) == 12
