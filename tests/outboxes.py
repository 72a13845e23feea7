"""An outbox in each database, and a streamer that turns by hand: fixtures, and what tests ask of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.postgres import Postgres
from usher.common.outbox.log_consumer import LogConsumer, Record
from usher.common.outbox.rows import queries
from usher.common.outbox.store import LogRecord, OutboxStore, open_engine, write_all_to_outbox
from usher.common.protocol.keys import LogKeys
from usher.common.redis.client import Link
from usher.common.redis.replies import Entry
from usher.common.sql.alchemy import sa
from usher.master.leader.elector import Elector, Lead
from usher.master.settings import StreamerSettings
from usher.master.streamer.program import Streamer

STREAM = "log"
LEASE_MS = 60_000


@dataclass
class Outbox:
    """An outbox with its tables, and an engine for whoever plays the application."""

    url: str
    engine: sa.Engine
    store: OutboxStore

    def stage(self, *records: LogRecord) -> list[str]:
        """In a transaction of their own."""
        with self.engine.begin() as connection:
            return write_all_to_outbox(connection, records)

    def stage_many(self, count: int, tickets: int = 7) -> list[str]:
        return self.stage(*(LogRecord(f"T{n % tickets}", "create", "ride", {"n": n}) for n in range(count)))

    def stage_odd(self, **columns: str) -> None:
        """As another program may, without a look at it."""
        row = {"uid": "x" * 257, "ticket_id": "T", "action": "a", "object": "o", "data": "{}"} | columns
        with self.engine.begin() as connection:
            connection.execute(sa.text(queries("sqlite")["write"]), row)

    def scalar(self, query: str) -> Any:
        with self.engine.connect() as connection:
            return connection.scalar(sa.text(query))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(query))]

    def close(self) -> None:
        self.engine.dispose()
        self.store.close()


class Hand:
    """A streamer whose turns the test makes; with its lease and its links."""

    def __init__(self, url: str, redis_url: str, holder: str = "one", batch_rows: int = 999, **given: Any) -> None:
        self.keys = LogKeys(STREAM)
        self.lead = Lead()
        self.elector = Elector(Link(redis_url, "test:elect"), self.keys, self.lead, holder, LEASE_MS, lambda: True)
        self.store = OutboxStore(url)
        link, settings = Link(redis_url, "test:stream"), StreamerSettings(**given)
        self.streamer = Streamer(link, self.keys, self.lead, self.store, settings, batch_rows)
        self.streamer.poll_s = 0.01

    def elect(self) -> int | None:
        self.elector.run_once()
        return self.lead.epoch

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.streamer.run_once()

    def close(self) -> None:
        self.elector._link.close()
        self.streamer.on_end()


@pytest.fixture
def hands(redis_url: str) -> Iterator[Callable[..., Hand]]:
    """Makes streamers that lead, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(outbox: Outbox, url: str = redis_url, *, lead: bool = True, **options: Any) -> Hand:
            hand = Hand(outbox.url, url, **options)
            stack.callback(hand.close)
            if lead:
                assert hand.elect() is not None
            return hand

        yield make


@pytest.fixture
def postgres_schema_url(postgres: Postgres) -> str:
    """URL of an empty schema in the one database of this run."""
    return new_schema(postgres)


def new_schema(postgres: Postgres) -> str:
    """URL of an empty schema: a database of its own for each test costs most of a second."""
    name = f"test_{os.urandom(6).hex()}"
    engine = sa.create_engine(postgres.url(), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text(f"CREATE SCHEMA {name}"))
    return f"{postgres.url()}&options=-csearch_path%3D{name}"


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def outbox_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'outbox.db'}"
    return str(request.getfixturevalue({"postgresql": "postgres_schema_url", "mysql": "mysql_url"}[request.param]))


def made_outbox(url: str) -> Outbox:
    store = OutboxStore(url)
    store.migrate()
    return Outbox(url, open_engine(url, "test"), store)


@pytest.fixture
def outbox(outbox_url: str) -> Iterator[Outbox]:
    """Once in each database."""
    made = made_outbox(outbox_url)
    yield made
    made.close()


@pytest.fixture
def postgres_outbox(postgres_schema_url: str) -> Iterator[Outbox]:
    made = made_outbox(postgres_schema_url)
    yield made
    made.close()


@pytest.fixture
def sqlite_outbox(tmp_path: Path) -> Iterator[Outbox]:
    made = made_outbox(f"sqlite:///{tmp_path / 'outbox.db'}")
    yield made
    made.close()


def entries(link: Link, stream: str = STREAM) -> list[dict[bytes, bytes]]:
    """The fields of all entries, in order."""
    found = [Entry(*entry) for entry in link.call("XRANGE", stream, "-", "+")]
    return [dict(zip(entry.fields[::2], entry.fields[1::2], strict=True)) for entry in found if entry.fields]


def uids(link: Link, stream: str = STREAM) -> list[str]:
    return [fields[b"uid"].decode() for fields in entries(link, stream)]


def until(condition: Any, what: str = "", patience_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline_s, what or "it did not come true"
        time.sleep(0.02)


def add(records: list[Record], state: dict[str, Any], sql: sa.Connection) -> None:
    """A handler: counts, adds up ``n``, and keeps the uids in order."""
    state["count"] = state.get("count", 0) + len(records)
    state["uids"] = state.get("uids", []) + [record.uid for record in records]


@pytest.fixture
def consumers(redis_url: str) -> Iterator[Callable[..., LogConsumer]]:
    """Makes log consumers, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(outbox: Outbox, name: str = "one", **options: Any) -> LogConsumer:
            return stack.enter_context(LogConsumer(name, STREAM, outbox.engine, redis_url=redis_url, **options))

        yield make


def send(link: Link, *names: str) -> list[bytes]:
    """Messages with these uids; "" is one without."""
    return [
        link.call("XADD", STREAM, "*", "ticket_id", "T", *(("uid", name) if name else ()), "data", "{}")
        for name in names
    ]


def read_all(consumer: LogConsumer, handle: Any = add) -> None:
    """All that is there now."""
    while consumer.step(handle):
        pass


def noted_id(link: Link, name: str = "one") -> bytes:
    """Up to where a log consumer has told those who trim."""
    return bytes(link.call("HGET", LogKeys(STREAM).checkpoints, name)).split()[1]
