"""Copies of a record that a log consumer knows: by its uid, also where that is its stream id, and however often it
comes."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.gathered import Gathered
from tests.outboxes import STREAM, Outbox, read_all, send
from usher.common.outbox.log_consumer import LogConsumer
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.operations.shelves import DeadLetters

KEYS = Keys(STREAM, "g")


def test_a_record_without_a_uid_whose_dead_letter_is_redriven_is_seen_once(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    """It comes again with its former id as its uid. Who has begun behind it sees it for the first time then."""
    link.call("XGROUP", "CREATE", STREAM, "g", "$", "MKSTREAM")
    [entry_id] = send(link, "")
    consumer, late = consumers(outbox), consumers(outbox, "late", start=b"+")
    read_all(consumer)
    read_all(late)
    letter = ("usher-id", entry_id, "usher-ticket", "T", "usher-fields", 2, "ticket_id", "T", "data", "{}")
    [redriven] = DeadLetters(link, KEYS).redrive([link.call("XADD", KEYS.dead, "*", *letter)])
    assert redriven.word == "added"
    for one in (consumer, late):
        read_all(one)
        assert one.state()[1]["uids"] == [entry_id.decode()]


def test_how_far_back_a_record_is_known_counts_from_its_last_copy(
    outbox: Outbox, consumers: Callable[..., LogConsumer], link: Link
) -> None:
    """A batch whose rows cannot be removed is sent again at every restart of Redis, each time behind what others have
    added meanwhile."""
    for _ in range(4):
        send(link, "a", *("" for _ in range(15)))
    consumer = consumers(outbox, batch=5, remember=20)
    read_all(consumer)
    assert consumer.state()[1]["uids"].count("a") == 1
    assert outbox.scalar("SELECT count(*) FROM consumer_uids") <= 30, "and it is forgotten like any other"


def test_in_a_work_stream_records_are_known_by_source_and_uid(outbox: Outbox, redis_url: str, link: Link) -> None:
    """Producers of different sources need not know of each other. What is redriven there is known by where it came
    from."""
    gathered = Gathered(link)
    for source, uid in (("a", "order-7"), ("b", "order-7"), ("a", "order-7"), ("b", "")):
        link.call(
            "XADD", source, f"{link.call('XLEN', source) + 1}-1", "ticket_id", "42", *(("uid", uid) if uid else ())
        )
    gathered.stream.create_group(b"0-0")
    gathered.gather("a", "b")
    with LogConsumer("one", gathered.keys.stream, outbox.engine, redis_url=redis_url) as consumer:
        read_all(consumer)
        letter = (
            "usher-id",
            "1-1",
            "usher-ticket",
            "b/42",
            "usher-fields",
            2,
            "usher_from",
            "2-1 2 b",
            "usher_ticket",
            "b/42",
        )
        [redriven] = DeadLetters(link, gathered.keys).redrive([link.call("XADD", gathered.keys.dead, "*", *letter)])
        assert redriven.word == "added"
        read_all(consumer)
        assert sorted(consumer.state()[1]["uids"]) == ["a/order-7", "b/2-1", "b/order-7"]
