"""What an application writes: with its transaction or not at all, in the order of the commits, and only what can become
a message."""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tests.outboxes import Outbox, until
from tests.rules import ROOT
from usher.common.base.errors import SqlTrouble, StartRefused
from usher.common.outbox.log_consumer import LogConsumer
from usher.common.outbox.rows import queries, schema
from usher.common.outbox.store import (
    LogRecord,
    OutboxMisused,
    OutboxStore,
    write_all_to_outbox,
    write_to_outbox,
)
from usher.common.sql.alchemy import commits_by_itself, driver_of
from usher.consumer.sinks.outcomes import SinkMisused
from usher.consumer.sinks.sql import SqlSink
from usher.consumer.sinks.sql_async import AsyncSqlSink


def _staged(outbox: Outbox) -> list[tuple[object, ...]]:
    data = "data" if outbox.engine.dialect.name == "mysql" else "CAST(data AS TEXT)"
    return outbox.rows(f"SELECT ticket_id, action, object, {data} FROM staged_log_records ORDER BY id")


def test_the_record_is_there_with_the_commit_and_not_with_a_rollback(outbox: Outbox) -> None:
    with outbox.engine.connect() as connection:
        write_to_outbox(connection, ticket_id="1", action="create", object="ride", data={"n": 1})
        connection.rollback()
        write_to_outbox(connection, ticket_id="2", action="create", object="ride", data={"n": 2})
        connection.commit()
    for session in (Session(outbox.engine), scoped_session(sessionmaker(outbox.engine))):
        write_to_outbox(session, ticket_id="3", action="create", object="ride")
        session.rollback()
        write_to_outbox(session, ticket_id="4", action="create", object="ride")
        session.commit()
        session.close()
    assert _staged(outbox) == [("2", "create", "ride", '{"n":2}'), *[("4", "create", "ride", "{}")] * 2]


def test_a_driver_of_its_own_will_do(outbox: Outbox) -> None:
    raw = outbox.engine.raw_connection()
    try:
        driver = raw.driver_connection
        uid = write_to_outbox(driver, ticket_id="1", action="a", object="100% :data", data={"n": "ä"})
        driver.rollback()
        assert (
            write_to_outbox(driver, ticket_id="2", action="a", object="100% :data", data={"n": "ä"}, uid="mine")
            == "mine"
            != uid
        )
        driver.commit()
    finally:
        raw.close()
    assert _staged(outbox) == [("2", "a", "100% :data", '{"n":"ä"}')]


def test_plain_sql_gets_a_uid_from_the_database(outbox: Outbox) -> None:
    with outbox.engine.begin() as connection:
        for _ in range(2):
            connection.execute(
                sa.text("INSERT INTO staged_log_records (ticket_id, action, object) VALUES ('1', 'a', 'o')")
            )
    [(first,), (second,)] = outbox.rows("SELECT uid FROM staged_log_records")
    assert len(str(first)) >= 32
    assert first != second


@pytest.mark.parametrize(
    "record",
    [
        LogRecord("", "a", "o"),
        LogRecord("x" * 257, "a", "o"),
        LogRecord("\ud800", "a", "o"),
        LogRecord("1", "\ud800", "o"),
        LogRecord("1", "a", "o", object()),
        LogRecord("1", "a", "o", {"n": 2**70}),
        LogRecord("1", "a", "o", {"n": [1.0, None, math.nan]}),
        LogRecord("1", "a", "o", -math.inf),
        LogRecord("1", "a", "o", uid="x" * 257),
        LogRecord(None, "a", "o"),  # type: ignore[arg-type]
    ],
)
def test_what_could_become_no_message_is_refused_before_it_is_written(sqlite_outbox: Outbox, record: LogRecord) -> None:
    with sqlite_outbox.engine.begin() as connection, pytest.raises(OutboxMisused, match="cannot become a message"):
        write_all_to_outbox(connection, [LogRecord("1", "a", "o"), record])
    assert _staged(sqlite_outbox) == []


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"ticket_id": 4.2}, "float"),
        ({"ticket_id": memoryview(b"42")}, "memoryview"),
        ({"action": None}, "NoneType"),
        ({"uid": bytearray(b"7")}, "bytearray"),
    ],
)
def test_what_is_no_text_is_named(sqlite_outbox: Outbox, wrong: dict[str, Any], kind: str) -> None:
    [name] = wrong
    with (
        sqlite_outbox.engine.begin() as connection,
        pytest.raises(OutboxMisused, match=f"{name} is of type {kind}: give a str"),
    ):
        write_to_outbox(connection, **({"ticket_id": "42", "action": "a", "object": "o"} | wrong))
    assert _staged(sqlite_outbox) == []


def test_what_is_no_transaction_is_refused(sqlite_outbox: Outbox, tmp_path: Path) -> None:
    plain = sqlite3.connect(tmp_path / "outbox.db")
    cursor, maker, asynchronous = (
        plain.cursor(),
        sessionmaker(sqlite_outbox.engine),
        create_async_engine("postgresql+psycopg://u@h/d").connect(),
    )
    for wrong in (sqlite_outbox.engine, maker, asynchronous, cursor, threading.Lock(), None):
        with pytest.raises(OutboxMisused):
            write_to_outbox(wrong, ticket_id="1", action="a", object="o")
    plain.close()
    assert _staged(sqlite_outbox) == []


def test_in_autocommit_mode_nothing_is_written(outbox: Outbox) -> None:
    """Else the record would be there, and stay when the rows that it tells of are rolled back."""
    careless = sa.create_engine(outbox.url, isolation_level="AUTOCOMMIT")
    with careless.connect() as connection, Session(careless) as session:
        for wrong in (connection, session, connection.connection.driver_connection):
            with pytest.raises(OutboxMisused, match="in AUTOCOMMIT mode.*Leave out isolation_level"):
                write_to_outbox(wrong, ticket_id="1", action="a", object="o")
    careless.dispose()
    assert _staged(outbox) == []


def test_a_transaction_that_was_begun_by_hand_in_autocommit_mode_is_one(outbox: Outbox) -> None:
    """psycopg's ``with connection.transaction()``, sqlite3's BEGIN, and what SQLAlchemy's documentation says of
    SQLite's savepoints."""
    careless = sa.create_engine(outbox.url, isolation_level="AUTOCOMMIT")
    with careless.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.cursor().execute("BEGIN")
        write_to_outbox(driver, ticket_id="1", action="a", object="o")
        driver.cursor().execute("ROLLBACK")
    sa.event.listen(careless, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    with careless.connect() as connection:
        write_to_outbox(connection, ticket_id="2", action="a", object="o")
        connection.connection.driver_connection.cursor().execute("COMMIT")
    careless.dispose()
    assert [row[0] for row in _staged(outbox)] == ["2"]


def test_aiosqlite_in_autocommit_mode_is_noticed(sqlite_outbox: Outbox) -> None:
    """By the writer, and by what asks after its first write: log consumers and sinks."""
    pytest.importorskip("aiosqlite")

    def careless(own: sa.Connection) -> bool:
        with pytest.raises(OutboxMisused, match="in AUTOCOMMIT mode"):
            write_to_outbox(own, ticket_id="1", action="a", object="o")
        own.execute(sa.text("DELETE FROM staged_log_records"))
        return commits_by_itself(driver_of(own))

    async def work(**options: Any) -> None:
        engine = create_async_engine(sqlite_outbox.url.replace("sqlite:", "sqlite+aiosqlite:"), **options)
        async with engine.connect() as connection:
            if options:
                assert await connection.run_sync(careless)
            else:
                await connection.run_sync(lambda own: write_to_outbox(own, ticket_id="2", action="a", object="o"))
                assert not await connection.run_sync(lambda own: commits_by_itself(driver_of(own)))
        await engine.dispose()

    asyncio.run(work(isolation_level="AUTOCOMMIT"))
    asyncio.run(work())
    assert _staged(sqlite_outbox) == []


def test_what_is_no_engine_of_a_plain_driver_is_refused_with_the_way_out(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"
    waits = create_async_engine(url)
    with pytest.raises(OutboxMisused, match="await connection.run_sync"):
        write_to_outbox(waits, ticket_id="1", action="a", object="o")
    for given, told in (
        (waits, "not asynchronous.*this is a AsyncEngine"),
        (url, "not asynchronous.*by aiosqlite"),
        (None, "NoneType"),
    ):
        with pytest.raises(OutboxMisused, match=told):
            LogConsumer("one", "s", given)  # type: ignore[arg-type]
    for given in (waits, url, None):
        with pytest.raises(
            SinkMisused, match="for an AsyncEngine there is usher.consumer.sinks.sql_async.AsyncSqlSink"
        ):
            SqlSink(given)  # type: ignore[arg-type]
    for given in (sa.create_engine("sqlite://"), url):
        with pytest.raises(SinkMisused, match="for an Engine or a URL there is usher.consumer.sinks.sql.SqlSink"):
            AsyncSqlSink(given)  # type: ignore[arg-type]


def test_an_asynchronous_connection_of_a_driver_is_refused(postgres_outbox: Outbox) -> None:
    """What it would be asked, nobody would await: a uid, and no record."""

    async def work() -> None:
        url = postgres_outbox.engine.url
        asked = {"dbname": url.database, "user": url.username, **url.query}
        async with await psycopg.AsyncConnection.connect(**asked) as connection:
            with pytest.raises(OutboxMisused, match="asynchronous"):
                write_to_outbox(connection, ticket_id="1", action="a", object="o")

    asyncio.run(work())
    assert _staged(postgres_outbox) == []


def test_an_asynchronous_session_writes_through_its_own(postgres_outbox: Outbox) -> None:
    async def work() -> None:
        engine = create_async_engine(postgres_outbox.url)
        async with AsyncSession(engine) as session:
            await session.run_sync(lambda own: write_to_outbox(own, ticket_id="1", action="a", object="o"))
            await session.rollback()
            await session.run_sync(lambda own: write_to_outbox(own, ticket_id="2", action="a", object="o"))
            await session.commit()
        await engine.dispose()

    asyncio.run(work())
    assert [row[0] for row in _staged(postgres_outbox)] == ["2"]


def test_a_subclass_of_sqlites_connection_will_do(sqlite_outbox: Outbox, tmp_path: Path) -> None:
    class Own(sqlite3.Connection):
        pass

    connection = sqlite3.connect(tmp_path / "outbox.db", factory=Own)
    with connection:
        write_to_outbox(connection, ticket_id="1", action="a", object="o")
    connection.close()
    assert len(_staged(sqlite_outbox)) == 1


# ---- the schema ----


def test_a_migration_is_made_once_also_by_several_at_once(outbox_url: str) -> None:
    stores = [OutboxStore(outbox_url) for _ in range(3)]
    done: list[bool] = []
    threads = [threading.Thread(target=lambda store=store: done.append(store.migrate())) for store in stores]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [False, False, True]
    for store in stores:
        store.check()
        store.close()


def test_a_database_without_the_tables_is_refused_with_the_way_out(outbox_url: str) -> None:
    store = OutboxStore(outbox_url)
    with pytest.raises(StartRefused, match=r"USHER_OUTBOX_URL: it has no outbox .* `usher streamer --migrate`"):
        store.check()
    store.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nonsense", "USHER_OUTBOX_URL cannot be used"),
        ("oracle://u@h/d", "USHER_OUTBOX_URL cannot be used|PostgreSQL, MySQL"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, told: str) -> None:
    with pytest.raises((StartRefused, OutboxMisused), match=told):
        OutboxStore(url)


def test_a_database_that_is_away_is_refused_at_the_start_and_waited_for_later(tmp_path: Path) -> None:
    store = OutboxStore(f"postgresql+psycopg://nobody@/none?host={tmp_path}")
    with pytest.raises(
        StartRefused, match="USHER_OUTBOX_URL: the database cannot be used: .*No such file or directory"
    ):
        store.check()
    with pytest.raises(SqlTrouble, match="reading the outbox"):
        store.batch(10)
    store.close()


def test_what_the_url_says_of_waiting_for_sqlites_lock_goes_before_ours(sqlite_outbox: Outbox) -> None:
    store = OutboxStore(f"{sqlite_outbox.url}?timeout=0.1")
    began_s = time.monotonic()
    with sqlite_outbox.engine.connect() as other:
        other.execute(sa.text("BEGIN EXCLUSIVE"))
        with pytest.raises(SqlTrouble, match="locked"):
            store.batch(1)
        other.rollback()
    assert time.monotonic() - began_s < 10
    store.close()


# ---- order in PostgreSQL ----


def test_a_ticket_that_another_transaction_has_written_is_waited_for(postgres_outbox: Outbox) -> None:
    engine = postgres_outbox.engine
    with engine.connect() as first, engine.connect() as second:
        second.execute(sa.text("SELECT 1"))  # its transaction began before
        write_to_outbox(first, ticket_id="T", action="1", object="o")
        second.execute(sa.text("SET lock_timeout = '300ms'"))
        write_to_outbox(second, ticket_id="other", action="free", object="o")
        with pytest.raises(sa.exc.OperationalError, match="lock timeout"):
            write_to_outbox(second, ticket_id="T", action="2", object="o")
        second.rollback()
        first.commit()
        write_to_outbox(second, ticket_id="T", action="2", object="o")
        second.commit()
    assert [row[1] for row in _staged(postgres_outbox)] == ["1", "2"]


def test_ids_of_a_ticket_are_in_commit_order_whoever_began_first(postgres_outbox: Outbox) -> None:
    """The second writer has its turn in the sequence only when the first one has committed."""
    engine = postgres_outbox.engine
    with engine.connect() as first:
        write_to_outbox(first, ticket_id="T", action="1", object="o")

        def write_second() -> None:
            with engine.begin() as second:
                write_to_outbox(second, ticket_id="T", action="2", object="o")

        thread = threading.Thread(target=write_second)
        thread.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        until(lambda: postgres_outbox.scalar(waiting), "the second one did not wait")
        write_to_outbox(first, ticket_id="T", action="1 again", object="o")
        first.commit()
        thread.join(30)
        assert not thread.is_alive()
    assert [row[1] for row in _staged(postgres_outbox)] == ["1", "1 again", "2"]


def test_a_bulk_load_takes_no_locks_if_it_says_so(postgres_outbox: Outbox) -> None:
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    with postgres_outbox.engine.begin() as connection:
        connection.execute(sa.text("SET LOCAL usher.outbox_lock = 'off'"))
        write_all_to_outbox(connection, [LogRecord(f"T{n}", "a", "o") for n in range(50)])
        assert connection.scalar(sa.text(locks)) == 0
    with postgres_outbox.engine.begin() as connection:
        write_all_to_outbox(connection, [LogRecord(f"T{n % 5}", "a", "o") for n in range(50)])
        assert connection.scalar(sa.text(locks)) == 5


def test_an_application_needs_no_more_rights_than_the_schema_says(postgres_outbox: Outbox) -> None:
    role, name = f"role_{os.urandom(4).hex()}", postgres_outbox.url.rpartition("%3D")[2]
    [grants] = [line.removeprefix("--") for line in schema("postgresql").splitlines() if "GRANT" in line]
    with postgres_outbox.engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {name} TO {role}")
        connection.exec_driver_sql(grants.replace("TO app", f"TO {role}"))
    application = sa.create_engine(sa.engine.make_url(postgres_outbox.url).set(username=role))
    try:
        with application.begin() as connection:
            write_to_outbox(connection, ticket_id="T", action="a", object="o")
        assert len(_staged(postgres_outbox)) == 1
    finally:
        application.dispose()
        with postgres_outbox.engine.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_look_and_a_removal_touch_their_own_rows_when_the_statistics_say_that_there_are_none(
    postgres_outbox: Outbox,
) -> None:
    """As when they were made while everything was sent: joins of all rows with all rows came of it, for seconds."""
    postgres_outbox.stage_many(3000)
    with postgres_outbox.engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM staged_log_records"))
    with postgres_outbox.engine.begin() as connection:
        connection.execute(sa.text("ANALYZE staged_log_records"))
    postgres_outbox.stage_many(3000)
    read = postgres_outbox.store.batch(100)
    values: dict[str, Any] = {"count": 100, "bytes": 1 << 20}
    values |= {"ids": [row.id for row in read], "uids": [row.uid for row in read]}
    for name in ("batch", "remove"):
        with postgres_outbox.engine.begin() as connection:
            asked = sa.text("EXPLAIN (ANALYZE, FORMAT JSON) " + queries("postgresql")[name])
            [plan] = connection.execute(asked, values).scalar_one()
        assert _most_rows(plan["Plan"]) <= 100, name
    assert postgres_outbox.scalar("SELECT count(*) FROM staged_log_records") == 2900


def _most_rows(plan: dict[str, Any]) -> int:
    """Return the most rows of the outbox that one scan of a plan has read, in all its loops."""
    own = 0
    if plan.get("Relation Name") == "staged_log_records" and "Scan" in plan["Node Type"]:
        own = plan["Actual Loops"] * (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0))
    return max([own, *map(_most_rows, plan.get("Plans", []))])


def test_the_trigger_of_the_page_stages_the_rows_of_a_table_that_is_there_already(postgres_outbox: Outbox) -> None:
    page = (ROOT / "docs" / "outbox.md").read_text()
    trigger = page.partition("```sql\n")[2].partition("```")[0]
    table = "CREATE TABLE outboxevent (id UUID, aggregatetype TEXT, aggregateid TEXT, type TEXT, payload TEXT);"
    row = "INSERT INTO outboxevent VALUES (gen_random_uuid(), 'order', '42', 'paid', '{\"amount\": 12.5}')"
    with postgres_outbox.engine.execution_options(no_parameters=True).begin() as connection:
        for statement in (table + trigger, row):
            connection.exec_driver_sql(statement)
    columns = "SELECT ticket_id, action, object, data FROM staged_log_records"
    assert postgres_outbox.rows(columns) == [("42", "paid", "order", {"amount": 12.5})]
    assert postgres_outbox.scalar("SELECT count(*) FROM outboxevent") == 0
