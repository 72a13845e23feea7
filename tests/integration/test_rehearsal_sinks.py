"""In a rehearsal the sinks' effects are really tried and never stored."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.sinks import Mark, accounts, add, async_sink, rows
from usher.common.redis.client import Link
from usher.consumer.handlers.message import Message, message_type
from usher.consumer.sinks.http import headers, received
from usher.consumer.sinks.outcomes import SinkMisused
from usher.consumer.sinks.redis_guard import Outcome, RedisGuard
from usher.consumer.sinks.sql import SqlSink


@dataclass(frozen=True)
class Trial(Mark):
    """A mark of a rehearsal."""

    is_rehearsal: ClassVar[bool] = True


def test_a_message_says_so_by_its_class() -> None:
    assert not Message.is_rehearsal
    assert not message_type("s", is_gathered=True).is_rehearsal
    assert message_type("s", is_gathered=True, is_rehearsal=True).is_rehearsal


def test_the_statements_run_and_neither_effect_nor_uid_nor_fence_is_stored(engine: sa.Engine, sink: SqlSink) -> None:
    calls = []

    @sink.exactly_once
    def handle(mark: Mark, session: Session) -> None:
        add(mark, session)
        calls.append(session.scalar(sa.text("SELECT total FROM accounts WHERE id = :id"), {"id": mark.ticket_id}))

    handle(Trial("T", "a", 9, 5))
    with sink.transaction(Trial("T", "a", 9, 5)) as session:
        add(Trial("T", "a", 9, 5), session)
    assert (calls, accounts(engine), rows(engine, "usher_uids"), rows(engine, "usher_fences")) == ([5], {}, 0, 0)
    handle(Mark("T", "a", 1, 5))
    assert accounts(engine) == {"T": 5}, "a lower fence than that of the rehearsal, which is nobody's"
    handle(Trial("T", "a", 0, 5))
    assert calls == [5, 5, 10], "it is called although the uid is stored and the fence is an old one"
    assert (accounts(engine), rows(engine, "usher_uids")) == ({"T": 5}, 1)


def test_what_the_database_refuses_is_refused_in_a_rehearsal_too(engine: sa.Engine, sink: SqlSink) -> None:
    with pytest.raises(sa.exc.IntegrityError), sink.transaction(Trial("T", "a", 1)) as session:
        session.execute(sa.text("INSERT INTO accounts VALUES ('T', NULL)"))
    if engine.dialect.name == "postgresql":
        with engine.begin() as connection:
            connection.execute(
                sa.text("CREATE TABLE parts (id TEXT REFERENCES accounts DEFERRABLE INITIALLY DEFERRED)")
            )
        with pytest.raises(sa.exc.IntegrityError), sink.transaction(Trial("T", "a", 1)) as session:
            session.execute(sa.text("INSERT INTO parts VALUES ('nobody')"))


def test_what_would_end_the_transaction_by_itself_stays_inside_of_it(engine: sa.Engine, sink: SqlSink) -> None:
    """SQLite begins a transaction with its first write only: a table that is made before that would stay."""
    with sink.transaction(Trial("T", "a", 1)) as session:
        session.execute(sa.text("CREATE TABLE made (id TEXT)"))
    assert not sa.inspect(engine).has_table("made")
    with pytest.raises(SinkMisused, match="was ended inside of it"), sink.transaction(Trial("T", "a", 1)) as session:
        add(Trial("T", "a", 1), session)
        session.rollback()


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("by_driver", [False, True])
def test_an_effect_that_the_handler_itself_has_committed_is_told(
    engine: sa.Engine, sink: SqlSink, by_driver: bool, goes_on: bool
) -> None:
    """Neither SQLAlchemy nor the sink sees that, and the rehearsal said that it was taken, and nothing came of it."""
    mark = Trial("T", "a", 1)
    with (
        pytest.raises(SinkMisused, match="may be STORED, although this is a rehearsal"),
        sink.transaction(mark) as session,
    ):
        add(mark, session)
        if by_driver:
            session.connection().connection.commit()
        else:
            session.execute(sa.text("COMMIT"))
        if goes_on:
            add(mark, session)
    assert accounts(engine) == {"T": 1}
    with sink.transaction(mark) as session:
        with session.begin_nested():
            add(mark, session)
        session.commit()
    assert accounts(engine) == {"T": 1}


def test_where_nothing_could_be_rolled_back_nothing_runs(engine: sa.Engine) -> None:
    for made, told in (
        (SqlSink(engine, "x"), "create_tables"),
        (SqlSink(engine.execution_options(isolation_level="AUTOCOMMIT")), "AUTOCOMMIT"),
    ):
        with pytest.raises(SinkMisused, match=told), made.transaction(Trial("T", "a", 1)):
            pytest.fail("the block ran")
        SqlSink(engine).create_tables()


def test_the_async_sink_rolls_back_too(postgres_url: str) -> None:
    async def story() -> list[int]:
        async with async_sink(postgres_url) as made:

            @made.exactly_once
            async def handle(mark: Mark, session: AsyncSession) -> None:
                await session.execute(sa.text("INSERT INTO accounts VALUES (:id, 1)"), {"id": mark.ticket_id})

            counts = []
            for mark in (Trial("T", "a", 9), Mark("T", "a", 1)):
                await handle(mark)
                async with made.engine.connect() as connection:
                    counts.append(
                        await connection.scalar(
                            sa.text("SELECT (SELECT count(*) FROM accounts) + (SELECT count(*) FROM usher_uids)")
                        )
                        or 0
                    )
            return counts

    assert asyncio.run(story()) == [0, 2]


def test_the_guard_applies_nothing_and_says_so(redis_url: str, link: Link) -> None:
    guard = RedisGuard(redis_url)
    assert guard.apply(Trial("T", "a", 9), ("INCR", "n")) == (Outcome.REHEARSED, [])
    with pytest.raises(SinkMisused):
        guard.apply(Trial("T", "a", 9), ("RPUSH", "n", *range(8000)))
    assert link.call("DBSIZE") == 0
    assert guard.apply(Mark("T", "a", 1), ("INCR", "n")).outcome is Outcome.APPLIED
    guard.close()


def test_a_service_hears_of_it_and_rolls_back(engine: sa.Engine, sink: SqlSink) -> None:
    sent = headers(Trial("T", "a", 9))
    assert received(sent).is_rehearsal
    assert not received(headers(Mark("T", "a", 9))).is_rehearsal
    with sink.transaction(received(sent)) as session:
        add(Trial("T", "a", 9), session)
    assert accounts(engine) == {}
