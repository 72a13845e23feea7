"""What tests of sinks share: marked messages, databases of both kinds, and a table of accounts that shows every
effect."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from usher.consumer.sinks.sql import SqlSink
from usher.consumer.sinks.sql_async import AsyncSqlSink


@dataclass(frozen=True)
class Mark:
    """A message, as a sink sees it; ``n`` is what it adds."""

    ticket_id: str
    uid: str
    fence: int
    n: int = 1


def add(mark: Mark, session: Session) -> None:
    """The effect: not idempotent, on purpose."""
    session.execute(
        sa.text(
            "INSERT INTO accounts VALUES (:id, :n) ON CONFLICT (id) DO UPDATE SET total = accounts.total +"
            " excluded.total"
        ),
        {"id": mark.ticket_id, "n": mark.n},
    )


@contextlib.asynccontextmanager
async def async_sink(url: str) -> AsyncIterator[AsyncSqlSink]:
    """A sink on an asynchronous engine, with its tables and the accounts."""
    engine = create_async_engine(url)
    made = AsyncSqlSink(engine)
    await made.create_tables()
    async with engine.begin() as connection:
        await connection.execute(sa.text("CREATE TABLE accounts (id TEXT PRIMARY KEY, total BIGINT NOT NULL)"))
    try:
        yield made
    finally:
        await engine.dispose()


def accounts(engine: sa.Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {row.id: row.total for row in connection.execute(sa.text("SELECT id, total FROM accounts"))}


def rows(engine: sa.Engine, table: str) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(sa.text(f"SELECT count(*) FROM {table}")) or 0)


@contextlib.contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory, where there is such a place: SQLite waits for the disk several times per commit, and no test
    cuts the power."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="usher-", dir=place) as folder:
        yield Path(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of an empty database of each kind."""
    if request.param == "postgresql":
        yield request.getfixturevalue("postgres_url")
        return
    with quick_folder() as folder:
        yield f"sqlite:///{folder}/effects.db"


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    """With the table of accounts in it."""
    made = sa.create_engine(database_url)
    with made.begin() as connection:
        connection.execute(sa.text("CREATE TABLE accounts (id TEXT PRIMARY KEY, total BIGINT NOT NULL)"))
    yield made
    made.dispose()


@pytest.fixture
def sink(engine: sa.Engine) -> SqlSink:
    made = SqlSink(engine)
    made.create_tables()
    return made
