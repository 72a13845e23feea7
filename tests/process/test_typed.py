"""A project of its own that is checked with ``mypy --strict`` finds the types of what the documents name (py.typed)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOP = """
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from usher import (
    NOW, AsyncProducer, AsyncSqlSink, GiveUp, Link, LogConsumer, LoopOptions, Message, MessageReadingLoop, Outgoing, PartialFailure,
    Producer, Record, RedisGuard, ReliableStream, RetryLater, Sent, SqlSink, StreamMessage, StreamRouter, batch, handler,
    Invalid, Router, around, reader_name, write_to_outbox,
)
from usher.consumer.sinks.http import headers, received, refuse_by_status
from usher.consumer.sinks.redis_guard import Outcome
from usher.testing import Kit, message


@handler(max_attempts=3, backoff_s=1, deadline_s=30)
def handle(message: Message) -> None:
    named: tuple[str, str, bytes, int, int, float | None] = (
        message.ticket_id, message.uid, message.body, message.fence, message.attempt, message.deadline
    )
    if not message.still_mine() or message.is_rehearsal:
        raise GiveUp("no") if named else RetryLater(after_s=3)
    refuse_by_status(message, len(headers(message)))


@batch(most=100, wait_s=0.01, per_ticket=1)
def many(messages: list[Message]) -> dict[Message, str]:
    if not messages:
        raise PartialFailure({})
    return {message: "not stored" for message in messages}


@dataclass
class Order:
    number: int


def timed(one: Message) -> Iterator[None]:
    yield


router = around(timed)(handler(max_attempts=3)(Router()))


@router.on("kind", "paid")
def paid(order: Order, one: Message) -> None:
    if order.number < 0:
        raise Invalid("no such order")


async def sends_later() -> str:
    return await AsyncProducer("redis://...").send("42", {"n": 1})


def test_shop(usher_kit: type[Kit]) -> None:
    paid(Order(3), message("42", kind="paid", attempt=2))
    kit = Kit("redis://...", router, max_attempts=3)
    kit.send("42", kind="paid")
    told: tuple[list[float | None], list[str]] = (
        [call.retry_in_s for call in kit.run(for_s=10)], [letter.reason for letter in kit.given_up]
    )
    assert told


def with_sinks(sink: SqlSink, other: AsyncSqlSink, guard: RedisGuard) -> None:
    @handler(max_attempts=3)
    @sink.exactly_once
    def stored(message: Message, session: Session) -> None:
        session.execute(text("SELECT 1"))

    @other.exactly_once
    async def stored_too(message: Message, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))

    def guarded(message: Message) -> bool:
        with sink.transaction(received({})) as session:
            write_to_outbox(session, ticket_id="42", action="create", object="ride", data={"id": 7})
        return guard.apply(message, ("INCRBY", "total", 5)).outcome is Outcome.APPLIED


def sends(link: Link) -> list[Sent]:
    producer = Producer(link, "ticket_stream")
    producer.send("42", {"text": "hello", "n": 3, "price": 1.5})
    return producer.send_many([Outgoing("42", {"raw": b"x"}, uid="order-7")], due_ms=producer.ms_from_now(600))


def reads(message: StreamMessage) -> None:
    message.fields, message.body, message.uid, message.attempt


def totals(records: Sequence[Record], state: dict[str, int], sql: object) -> None:
    state["total"] = state.get("total", 0) + sum(record.json()["distance"] for record in records)


def runs(consumer: LogConsumer, link: Link) -> None:
    consumer.run(totals)
    ReliableStream(link, "payments", "billing", reader_name()).read_new(10, None)
    with MessageReadingLoop("redis://...", "payments", "billing", reads, LoopOptions(threads=4)) as loop:
        loop.wait()
    for entry in StreamRouter("redis://...").subscribe("tickets:42", last_id=NOW):
        print(entry.id, entry.fields)
"""


@pytest.mark.slow
@pytest.mark.process
def test_what_the_documents_name_has_types_for_a_strict_check(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    # On the path of the interpreter Usher counts as installed: its types are taken only if it says that it has some.
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "shop.py"]
    checked = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert (checked.returncode, checked.stdout.strip()) == (0, "Success: no issues found in 1 source file")
