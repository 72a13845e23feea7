"""A child that is forked inside of a transaction of ours ends there: it neither commits nor rolls back on its parent's
connection."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.outboxes import Outbox
from tests.sinks import Mark, accounts, add, async_sink
from usher import Link, LogConsumer, Record, SqlSink

_LEAKED = 99


def _returns() -> None: ...


def _raises() -> None:
    raise ValueError("in the child")


def _forked(end: Callable[[], None]) -> bool:
    """True in the child, which ends as ``end`` says; in the parent when it has."""
    if (pid := os.fork()) == 0:
        end()
        return True
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == {_returns: 0, _raises: 1}.get(end, 3)
    return False


def _kept_here(run: Callable[[], Any]) -> None:
    here = os.getpid()
    try:
        run()
    finally:
        if os.getpid() != here:
            os._exit(_LEAKED)


_ENDS = pytest.mark.parametrize("end", [_returns, _raises, lambda: sys.exit(3)])


@_ENDS
def test_of_a_sink(engine: sa.Engine, sink: SqlSink, end: Callable[[], None]) -> None:
    @sink.exactly_once
    def handle(mark: Mark, session: Session) -> None:
        add(mark, session)
        if not _forked(end):
            assert accounts(engine) == {}, "nothing is committed before the handler has ended"
            add(mark, session)

    _kept_here(lambda: handle(Mark("T", "a", 1)))
    assert accounts(engine) == {"T": 2}

    def repeat() -> None:
        with sink.transaction(Mark("T", "a", 1)):
            _forked(end)

    _kept_here(repeat)
    assert accounts(engine) == {"T": 2}


@_ENDS
def test_of_an_asynchronous_sink(postgres_url: str, end: Callable[[], None]) -> None:
    async def story() -> int:
        async with async_sink(postgres_url) as sink:

            @sink.exactly_once
            async def handle(mark: Mark, session: AsyncSession) -> None:
                await session.execute(sa.text("INSERT INTO accounts VALUES ('1', 1)"))
                if not _forked(end):
                    await session.execute(sa.text("INSERT INTO accounts VALUES ('2', 1)"))

            await handle(Mark("T", "a", 1))
            async with sink.engine.connect() as connection:
                count = await connection.scalar(sa.text("SELECT count(*) FROM accounts"))
            return int(count or 0)

    counts: list[int] = []
    _kept_here(lambda: counts.append(asyncio.run(story())))
    assert counts == [2]


@_ENDS
def test_of_a_log_consumer(outbox: Outbox, redis_url: str, link: Link, end: Callable[[], None]) -> None:
    def handle(records: list[Record], state: dict[str, Any], sql: sa.Connection) -> None:
        if not _forked(end):
            state["n"] = len(records)

    link.call("XADD", "log", "1-1", "ticket_id", "T")
    with LogConsumer("totals", "log", outbox.engine, redis_url=redis_url) as consumer:
        _kept_here(lambda: consumer.step(handle))
        assert consumer.state() == (b"1-1", {"n": 1})
