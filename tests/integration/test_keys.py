"""Keys: one rule for what names a ticket, whichever door a program uses: str, bytes, int, UUID; all else is refused."""

from __future__ import annotations

import asyncio
import decimal
import math
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.factories import World
from tests.outboxes import Outbox
from usher import (
    AsyncProducer,
    LoopOptions,
    Outgoing,
    Producer,
    RedisGuard,
    RouterOptions,
    SqlSink,
    batch,
    handler,
    write_to_outbox,
)
from usher.common.outbox.store import OutboxMisused
from usher.common.protocol.keys import LogKeys
from usher.common.protocol.message import ticket_key
from usher.consumer.sinks.outcomes import SinkMisused
from usher.testing import message

np = pytest.importorskip("numpy")
_OWN, _UUID = type("Own", (str,), {"__str__": lambda self: "another"})("42"), uuid.UUID(int=42)
_BYTES = type("Bytes", (bytes,), {"__bytes__": lambda self: b"another"})(b"42")
_KEYS = [("42", b"42"), (b"42", b"42"), (42, b"42"), (_OWN, b"42"), (_BYTES, b"42"), (_UUID, str(_UUID).encode())]
_NO_KEYS = [
    *(None, True, 4.2, math.nan, bytearray(b"42"), memoryview(b"42"), decimal.Decimal(42), (1, 2), object()),
    *(np.int64(42), np.bool_(True), np.float64("nan")),
]
_STREAM = "ticket_stream"


def _send(world: World, key: Any) -> None:
    Producer(world.link, _STREAM).send(key, {"a": "b"})


def _send_many(world: World, key: Any) -> None:
    Producer(world.link, _STREAM, dedup_s=60).send_many([Outgoing(key, {"a": "b"}, uid=uuid.uuid4())])


def _send_later(world: World, key: Any) -> None:
    Producer(world.link, _STREAM).send(key, {"a": "b"}, due_ms=Producer.ms_from_now(60))


def _send_async(world: World, key: Any) -> None:
    async def send() -> None:
        producer = AsyncProducer(world.link, _STREAM)
        await producer.send(key, {"a": "b"})
        await producer.close()

    asyncio.run(send())


@pytest.mark.parametrize("door", [_send, _send_many, _send_later, _send_async])
def test_a_producer_takes_keys_and_nothing_else(world: World, door: Callable[[World, Any], None]) -> None:
    with world.unchanged():
        for wrong in _NO_KEYS:
            with pytest.raises(TypeError, match=f"ticket_id is of type {type(wrong).__name__}: give a str"):
                door(world, wrong)
    for key, name in _KEYS:
        door(world, key)
        stream = LogKeys(_STREAM).delayed if door is _send_later else _STREAM
        assert name in world.link.call("XREVRANGE", stream, "+", "-", "COUNT", 1)[0][1]


@pytest.mark.parametrize("wrong", _NO_KEYS[1:])
def test_a_uid_and_the_name_of_a_field_are_keys_too(world: World, wrong: Any) -> None:
    producer = Producer(world.link, _STREAM)
    with world.unchanged():
        for fields, uid in (({"a": "b"}, wrong), ({"uid": wrong}, None)):
            with pytest.raises(TypeError, match="give a str, bytes, int or UUID"):
                producer.send("42", fields, uid)


@pytest.mark.parametrize("value", [None, True, math.nan, math.inf, memoryview(b"x"), {"a": 1}, np.int64(1)])
def test_a_value_that_would_mean_something_else_is_refused(world: World, value: Any) -> None:
    with world.unchanged(), pytest.raises((TypeError, ValueError), match="the field 'note' is"):
        Producer(world.link, _STREAM).send("42", {"note": value})


def test_names_are_texts_or_bytes_alike(world: World) -> None:
    producer = Producer(world.link, _STREAM, dedup_s=60)
    first = producer.send("42", {b"uid": b"7", b"a": "b"})  # type: ignore[dict-item]
    assert producer.send("42", {"uid": 7}) == first
    with pytest.raises(ValueError, match="give it as due_ms"):
        producer.send("42", {b"due_ms": "1"}, due_ms=Producer.ms_from_now(1))  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="have one name"):
        producer.send("42", {"a": 1, b"a": 2})  # type: ignore[dict-item]


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_number_that_is_none_is_refused(world: World, seconds: float) -> None:
    for options in ({"dedup_s": seconds}, {"patience_s": math.nan}):
        with pytest.raises(ValueError, match="must be"):
            Producer(world.link, _STREAM, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number of seconds"):
        Producer.ms_from_now(seconds)
    for due_ms in (seconds, True, "1790000000000"):
        with pytest.raises(ValueError, match="due_ms is a time in milliseconds"):
            Producer(world.link, _STREAM).send("42", {"a": "b"}, due_ms=due_ms)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_an_option_that_is_no_number_is_refused_where_it_is_given(wrong: float) -> None:
    refusals: list[Callable[[], object]] = [
        *(lambda name=name: LoopOptions(**{name: wrong}) for name in ("block_s", "retry_s", "idle_s", "max_attempts")),
        lambda: RouterOptions(sweep_seconds=-wrong if wrong > 0 else wrong),
        lambda: RedisGuard("redis://x", keep_s=wrong),
        lambda: SqlSink(sa.create_engine("sqlite://"), keep_s=wrong),
        lambda: handler(rate=wrong),
        lambda: batch(wait_s=wrong),
    ]
    for refused in refusals:
        with pytest.raises((ValueError, SinkMisused)):
            refused()


def test_the_outbox_takes_the_same_keys(sqlite_outbox: Outbox) -> None:
    with sqlite_outbox.engine.begin() as connection:
        for wrong in _NO_KEYS:
            with pytest.raises(OutboxMisused, match=f"ticket_id is of type {type(wrong).__name__}: give a str"):
                write_to_outbox(connection, ticket_id=wrong, action="a", object="o")
        for key, _ in _KEYS:
            write_to_outbox(connection, ticket_id=key, action="a", object="o", uid=uuid.uuid4())
        staged = connection.execute(sa.text("SELECT ticket_id FROM staged_log_records ORDER BY id")).scalars()
        assert [one.encode() for one in staged] == [name for _, name in _KEYS]


def test_the_kit_takes_the_same_keys() -> None:
    assert [message(key).ticket_id.encode() for key, _ in _KEYS] == [name for _, name in _KEYS]
    for wrong in _NO_KEYS:
        with pytest.raises(TypeError):
            message(wrong)
    assert ticket_key("K\u00f6ln") == "K\u00f6ln".encode()
