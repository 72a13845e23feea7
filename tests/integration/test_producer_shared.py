"""common/sending/producer.py: one Producer for all threads of a process and for what it forks, and what the values of
fields may be."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import os
import threading
import traceback
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.factories import World
from tests.proxy import Proxy
from usher import AsyncProducer, Link, Producer

STREAM = "ticket_stream"


def sends(producer: Producer, url: str, who: str, count: int) -> list[str]:
    """Send, and look each time whether the answer is the id of what was sent: the ids of those that were not."""
    wrong = []
    own = Link(url, f"test:{who}")
    for number in range(count):
        sent = producer.send(who, {"text": f"{who}-{number}"})
        [[_, fields]] = own.call("XRANGE", STREAM, sent, sent)
        if f"{who}-{number}".encode() not in fields:
            wrong.append(sent)
    own.close()
    return wrong


def in_child(work: Callable[[], bool]) -> int:
    """The exit code of a child that does it: 0 when it was true."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        code = 0 if work() else 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


async def sends_within(url: str) -> None:
    async with AsyncProducer(url) as producer:
        await producer.send("T", {})


def test_with_closes_the_connection(link: Link, redis_url: str) -> None:
    with Link(redis_url, "test:within") as own, Producer(redis_url) as producer:
        assert own.call("XLEN", STREAM) == 0 < len(producer.send("T", {}))
        assert b"name=test:within" in (open_ones := link.call("CLIENT", "LIST")) and b"usher:producer" in open_ones
    asyncio.run(sends_within(redis_url))
    assert link.call("XLEN", STREAM) == 2
    assert not any(name in link.call("CLIENT", "LIST") for name in (b"test:within", b"usher:producer"))


@pytest.mark.parametrize("names", [{"stream": ""}, {"ticket_field": ""}])
def test_a_producer_without_a_name_of_its_stream_or_field_is_refused(names: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="empty"):
        Producer("redis://...", **names)


def test_threads_that_share_one_get_each_their_own_answers(link: Link, redis_url: str) -> None:
    producer = Producer(link)
    wrong: list[str] = []
    threads = [
        threading.Thread(target=lambda who=f"t{n}": wrong.extend(sends(producer, redis_url, who, 100)))
        for n in range(4)
    ]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert link.call("XLEN", STREAM) == 400


def test_a_forked_child_does_not_read_the_replies_of_its_parent(redis_url: str) -> None:
    producer = Producer(Link(redis_url, "test:parent"))
    producer.send("parent", {"text": "first"})
    children: list[int] = []
    threads = [
        threading.Thread(
            target=lambda who=f"c{n}": children.append(in_child(lambda: not sends(producer, redis_url, who, 50)))
        )  # type: ignore[misc]
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    wrong = sends(producer, redis_url, "parent", 50)
    for thread in threads:
        thread.join(60)
    assert (children, wrong) == ([0, 0], [])
    assert producer._link.connections == 1, "the parent's connection goes on"


def test_a_child_that_is_forked_while_a_thread_sends_is_not_held_up(redis_url: str) -> None:
    producer = Producer(Link(redis_url, "test:parent"), patience_s=0)
    producer.send("parent", {"text": "first"})
    with producer._locks[os.getpid()]:  # as another thread that waits for Redis
        forked: list[int] = []
        thread = threading.Thread(
            target=lambda: forked.append(in_child(lambda: bool(producer.send("child", {"text": "hello"})))), daemon=True
        )
        thread.start()
        thread.join(20)
    assert forked == [0]


def test_a_child_that_is_forked_while_a_thread_connects_does_not_read_the_replies_to_its_greeting(
    redis_url: str,
) -> None:
    """Those were taken for the answers to what the child sent."""
    forked: list[int] = []

    def while_it_is_greeted(chunk: bytes) -> bytes:
        if not forked:
            forked.append(-1)
            forked[0] = in_child(lambda: not sends(producer, redis_url, "child", 3))
        return chunk

    with Proxy(redis_url, while_it_is_greeted) as proxy:
        producer = Producer(Link(proxy.url, "test:parent", timeout_s=2.0), patience_s=0)
        assert sends(producer, redis_url, "parent", 3) == []
    assert forked == [0]


class Colour(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


def test_an_enum_is_sent_as_its_value(world: World) -> None:
    Producer(world.link).send("42", {"colour": Colour.RED, "number": Number.ONE, "price": 1.5})
    [[_, fields]] = world.link.call("XRANGE", STREAM, "-", "+")
    assert fields == [b"ticket_id", b"42", b"colour", b"red", b"number", b"1", b"price", b"1.5"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *(
            (None, "NoneType"),
            ({"a": 1}, "dict"),
            ([1], "list"),
            (bytearray(b"x"), "bytearray"),
            (uuid.UUID(int=1), "UUID"),
        ),
        *(
            (decimal.Decimal("1.50"), "Decimal"),
            (datetime.date(2026, 11, 25), "date"),
            (datetime.datetime(2026, 11, 25), "datetime"),
        ),
    ],
)
def test_what_has_no_text_of_its_own_is_refused_by_the_name_of_its_field(world: World, value: Any, kind: str) -> None:
    with pytest.raises(
        TypeError, match=f"the field 'note' is of type {kind}: give str, bytes, int or float .str.value. of a UUID"
    ):
        Producer(world.link).send("42", {"note": value})
    assert world.link.call("XLEN", STREAM) == 0
