"""due_delayed.lua and send_delayed.lua, and the producer: a delayed message comes into its stream when it is due,
once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from tests.integration.delays import FUTURE, PAST, delay, left, log_keys, now_ms, send_due, sent
from tests.integration.factories import World
from usher.common.base.errors import Fenced, NotNow
from usher.common.redis.client import CommandRefused
from usher.common.sending.producer import Outgoing, Producer
from usher.master.insight.stats import StreamStatsReader
from usher.master.leader.leader_scripts import Due, LeaderScripts
from usher.master.operations.shelves import DeadLetters, DelayedView, member_of
from usher.master.policy.letters import LetterFilter

# ---- the scripts ----


def test_what_is_due_is_sent_with_all_its_fields_and_what_is_not_stays(world: World) -> None:
    leader = world.elect()
    delay(world, b"A", PAST, "text", b"\xff\0", "text", "again")
    delay(world, b"B", FUTURE)
    [new_id] = send_due(world, leader)
    assert world.link.call("XRANGE", world.keys.stream, "-", "+") == [
        [new_id, [b"due_ms", b"%d" % PAST, b"ticket_id", b"A", b"text", b"\xff\0", b"text", b"again"]]
    ]
    assert left(world) == world.link.call("ZCARD", log_keys(world).due) == 1


def test_messages_are_sent_in_the_order_of_their_times_and_those_of_one_time_in_that_of_their_ids(world: World) -> None:
    leader, log = world.elect(), log_keys(world)
    for sequence in range(1, 13):  # as text 10 comes before 9
        world.link.call("XADD", log.delayed, f"5-{sequence}", "due_ms", 700, "ticket_id", f"same {sequence}")
    for due in (900, 500, 800):
        delay(world, b"%d" % due, due)
    send_due(world, leader)
    assert sent(world) == [b"500", *(b"same %d" % sequence for sequence in range(1, 13)), b"800", b"900"]


def test_the_next_one_is_told_by_the_clock_of_redis(world: World) -> None:
    leader = world.elect()
    assert leader.due_delayed(10) == (b"0-0", None, [], [])
    last = delay(world, b"A", now_ms(world) + 5000)
    delay(world, b"B", FUTURE)
    look = leader.due_delayed(10)
    assert look.wait_ms is not None and 4000 < look.wait_ms <= 5000
    assert (look.until > last, look.due) == (True, [])


def test_a_time_with_a_fraction_is_read(world: World) -> None:
    """As Python's time.time() * 1000 is."""
    leader, due_ms = world.elect(), now_ms(world) + 600_000
    delay(world, b"A", f"{due_ms}.25")
    delay(world, b"B", f"{due_ms + 1000}.0")
    assert send_due(world, leader) == []
    assert world.link.call("ZRANGE", log_keys(world).due, 0, -1, "WITHSCORES")[1::2] == [
        b"%d" % due_ms,
        b"%d" % (due_ms + 1000),
    ]


_NO_TIME = [
    ("soon", "no time"),
    ("", "no time"),
    ("-5", "no time"),
    ("+1795718874582", "no time"),
    (" 1795718874582", "no time"),
    ("1795718874582\n", "no time"),
    ("1.795718874582e+12", "no time"),
    ("1e300", "no time"),
    ("nan", "no time"),
    ("2026-11-27T10:00:00Z", "no time"),
    ("1_795_718_874_582", "no time"),
    ("1795718874582000", "no time"),  # microseconds
    ("1795718874", "seconds"),
    ("1795718874.5", "seconds"),
]


@pytest.mark.parametrize(("due", "why"), _NO_TIME)
def test_what_has_no_time_that_can_be_read_is_a_dead_letter_with_the_reason(world: World, due: str, why: str) -> None:
    """It was sent at once, without a word."""
    leader = world.elect()
    delayed_id = delay(world, b"A", due, "text", b"\xff")
    delay(world, b"B", PAST)
    look = leader.due_delayed(10)
    assert [(one, why in told.decode()) for one, told in look.unreadable] == [(delayed_id, True)]
    assert send_due(world, leader) != []
    assert (sent(world), left(world)) == ([b"B"], 0)
    letters = DeadLetters(world.link, world.keys)
    [letter] = letters.page(LetterFilter(), None, 10).letters
    assert (letter.reason, letter.ticket, letter.message_id) == ("unreadable_due_ms", b"A", delayed_id)
    assert why in letter.error and due.strip() in letter.error
    assert leader.due_delayed(10).unreadable == [], "once"
    [redriven] = letters.redrive([letter.id])
    assert redriven.word == "added"
    send_due(world, leader)
    assert sent(world) == [b"B", b"A"]
    fields = world.link.call("XREVRANGE", world.keys.stream, "+", "-", "COUNT", 1)[0][1]
    assert fields[2:] == [b"ticket_id", b"A", b"text", b"\xff"], "and no sink knows it by another id"


def test_one_without_a_time_is_a_dead_letter_and_a_redrive_sends_it(world: World) -> None:
    leader = world.elect()
    world.link.call("XADD", log_keys(world).delayed, "*", "ticket_id", "A")
    assert len(leader.due_delayed(10).unreadable) == 1
    letters = DeadLetters(world.link, world.keys)
    letters.redrive([letter.id for letter in letters.page(LetterFilter(), None, 10).letters])
    send_due(world, leader)
    assert (sent(world), left(world)) == ([b"A"], 0)


def test_a_time_of_1970_hides_nobody_who_is_late(world: World) -> None:
    leader = world.elect()
    delay(world, b"late", now_ms(world) - 100_000)
    delay(world, b"A", 0)
    leader.due_delayed(10)
    assert StreamStatsReader(world.link, world.keys).read()["late_s"] > 90.0


def test_large_ones_are_put_in_order_and_sent_a_few_at_a_time(world: World) -> None:
    for number in range(5):
        delay(world, b"%d" % number, PAST, "body", b"x" * 5_000_000)
    leader = world.elect()
    for known in range(1, 6):  # 4 MiB are reached: Redis does nothing else meanwhile
        assert leader.due_delayed(100)[1:] == (0, [], [])
        assert world.link.call("ZCARD", log_keys(world).due) == known
    assert len(leader.due_delayed(100).due) == 1
    send_due(world, leader)
    assert len(sent(world)) == 5


def test_a_call_whose_reply_was_lost_is_repeated_without_harm(world: World) -> None:
    leader = world.elect()
    delay(world, b"A", PAST)
    due = [(one, world.keys.stream) for one in leader.due_delayed(10).due]
    assert leader.send_delayed(due, 60_000) != [b""]
    assert leader.send_delayed(due, 60_000) == [b""]
    assert sent(world) == [b"A"]


def test_a_deposed_leader_neither_looks_nor_sends(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    delay(world, b"A", PAST)
    due = leader.due_delayed(10).due
    depose(leader)
    with world.unchanged():
        with pytest.raises(Fenced):
            leader.due_delayed(10)
        with pytest.raises(Fenced):
            leader.send_delayed([(one, world.keys.stream) for one in due], 60_000)
    assert left(world) == 1


def test_what_is_deleted_by_hand_is_not_sent_and_not_looked_at_again(world: World) -> None:
    leader, log = world.elect(), log_keys(world)
    first, second = delay(world, b"A", PAST), delay(world, b"B", PAST)
    due = leader.due_delayed(10).due
    world.link.call("XDEL", log.delayed, first)
    told = leader.send_delayed([(one, world.keys.stream) for one in due], 60_000)
    assert [new_id != b"" for new_id in told] == [False, True]
    world.link.call("XDEL", log.delayed, delay(world, b"C", PAST), second)
    assert leader.due_delayed(10).due == []
    assert (sent(world), world.link.call("EXISTS", log.due)) == ([b"B"], 0)


def test_a_stream_that_was_deleted_and_came_back_with_lower_ids_is_put_in_order_anew(world: World) -> None:
    leader, log = world.elect(), log_keys(world)
    world.link.call("XADD", log.delayed, "900-1", "due_ms", FUTURE, "ticket_id", "old")
    leader.due_delayed(10)
    world.link.call("DEL", log.delayed)
    world.link.call("XADD", log.delayed, "5-1", "due_ms", PAST, "ticket_id", "new")
    send_due(world, leader)
    assert sent(world) == [b"new"]
    assert world.link.call("EXISTS", log.due) == 0


def test_one_that_lies_before_what_was_put_in_order_is_sent_all_the_same(world: World) -> None:
    """The stream came back and has grown beyond its former end before anybody looked; or it was restored; or its order
    was deleted."""
    leader, log = world.elect(), log_keys(world)
    world.link.call("XADD", log.delayed, "900-1", "due_ms", FUTURE, "ticket_id", "old")
    leader.due_delayed(10)
    world.link.call("DEL", log.delayed)
    for entry_id, ticket in (("5-1", "A"), ("1000-1", "B")):
        world.link.call("XADD", log.delayed, entry_id, "due_ms", PAST, "ticket_id", ticket)
    copy = world.link.call("DUMP", log.delayed)
    send_due(world, leader)
    assert sent(world) == [b"A", b"B"]
    world.link.call("RESTORE", log.delayed, 0, copy, "REPLACE")
    leader.due_delayed(10)
    world.link.call("DEL", log.due)
    send_due(world, leader)
    assert (sent(world), left(world)) == ([b"A", b"B", b"A", b"B"], 0)


def test_behind_one_with_the_highest_id_of_all_everything_is_still_sent(world: World) -> None:
    leader, log = world.elect(), log_keys(world)
    delay(world, b"A", PAST)
    world.link.call("XADD", log.delayed, "18446744073709551615-18446744073709551615", "due_ms", PAST, "ticket_id", "B")
    send_due(world, leader)
    assert sent(world) == [b"A", b"B"]
    assert leader.due_delayed(10).wait_ms is None


def test_one_that_cannot_be_sent_holds_up_no_other_and_is_tried_again(world: World) -> None:
    leader, log = world.elect(), log_keys(world)
    world.link.call("SET", "text", "no stream")
    many = [part for number in range(3600) for part in (f"n{number}", "v")]
    for ticket, more in ((b"A", ()), (b"B", ()), (b"C", tuple(many)), (b"D", ())):
        delay(world, ticket, PAST, *more)
    streams = ["text", None, world.keys.stream, world.keys.stream]
    told = leader.send_delayed(list(zip(leader.due_delayed(10).due, streams, strict=True)), 50_000)
    assert [isinstance(one, str) for one in told] == [True, True, True, False]
    assert "WRONGTYPE" in str(told[0])
    assert told[1:3] == ["its field stream names none that is taken in", "it has more than 3500 fields"]
    assert sent(world) == [b"D"]
    look = leader.due_delayed(10)
    assert look.due == []
    assert look.wait_ms is not None and 40_000 < look.wait_ms <= 50_000
    assert world.link.call("XLEN", log.delayed) == 3, "none is lost"


def test_at_full_memory_nothing_is_sent_and_nothing_is_lost(world: World) -> None:
    leader = world.elect()
    delay(world, b"A", PAST)
    due = leader.due_delayed(10).due
    world.link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(NotNow, match="OOM|maxmemory"):
            leader.send_delayed([(one, world.keys.stream) for one in due], 60_000)
    finally:
        world.link.call("CONFIG", "SET", "maxmemory", 0)
    send_due(world, leader)
    assert sent(world) == [b"A"]


@pytest.mark.parametrize("key", ["delayed", "due", "due_until"])
def test_a_key_of_another_type_is_refused_before_anything_has_changed(world: World, key: str) -> None:
    leader, log = world.elect(), log_keys(world)
    due = Due(member_of("5-1").encode(), b"")
    if key != "delayed":
        world.link.call("XADD", log.delayed, "5-1", "due_ms", PAST, "ticket_id", "A")
    world.link.call("HSET", getattr(log, key), "a", "b")
    with world.unchanged():
        with pytest.raises(CommandRefused, match="WRONGTYPE"):
            leader.due_delayed(10)
        if key != "due_until":
            with contextlib.suppress(CommandRefused):
                assert leader.send_delayed([(due, world.keys.stream)], 60_000) == [b""]
    assert sent(world) == []


# ---- the producer ----


def test_a_producer_sends_for_later_and_a_repeat_is_added_once(world: World) -> None:
    producer = Producer(world.link, world.keys.stream, dedup_s=60)
    due_ms = producer.ms_from_now(3600)
    first = producer.send("42", {"text": "hello"}, uid="order-7", due_ms=due_ms)
    assert producer.send("42", {"text": "hello"}, uid="order-7", due_ms=due_ms) == first
    assert producer.send("42", {"text": "hello"}, uid="order-7") == first, "nor now"
    assert sent(world) == []
    world.elect().due_delayed(10)
    [row] = DelayedView(world.link, world.keys, "ticket_id").page(None, 9).rows
    assert (row.id, row.due_ms, row.ticket_id) == (first, due_ms, "42")
    assert row.fields == [("text", "hello"), ("uid", "order-7")]


def test_a_producer_refuses_what_is_no_time(world: World) -> None:
    producer = Producer(world.link, world.keys.stream)
    for wrong in (-1, 10**15, 1_795_718_874):
        with pytest.raises(ValueError, match="milliseconds since the epoch"):
            producer.send("42", {"text": "hello"}, due_ms=wrong)
    with pytest.raises(ValueError, match="give it as due_ms"):
        producer.send_many([Outgoing("42", {"due_ms": "5"})], due_ms=5)
    assert left(world) == 0
