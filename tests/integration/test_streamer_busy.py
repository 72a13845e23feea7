"""A database that answers and does not do it: a batch is sent once, however long that lasts, whatever the lease."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.test_streamer_trouble import _program
from tests.outboxes import Hand, Outbox, uids, until
from usher.common.base.errors import SqlBusy, SqlTrouble
from usher.common.outbox.rows import Refusal
from usher.common.outbox.store import OutboxStore
from usher.common.redis.client import Link


@contextlib.contextmanager
def _two_streamers(url: str, redis_url: str, lease_s: float) -> Iterator[list[Any]]:
    programs = [_program(url, redis_url, lease_s=lease_s) for _ in range(2)]
    try:
        for program in programs:
            program.start()
        yield programs
    finally:
        for program in programs:
            program.stop()


@pytest.mark.parametrize(
    ("lease_s", "options"),
    [(1.5, ""), (3.0, "%20-cstatement_timeout%3D200ms")],
    ids=["short lease", "statement_timeout"],
)
def test_a_held_row_is_sent_once_also(
    postgres_outbox: Outbox, redis_url: str, link: Link, lease_s: float, options: str
) -> None:
    """The pauses between tries are longer than the lease may be; and statement_timeout may end the wait before
    lock_timeout does."""
    written = postgres_outbox.stage_many(3)
    with contextlib.ExitStack() as stack:
        with postgres_outbox.engine.begin() as holder:
            holder.execute(sa.text("SELECT id FROM staged_log_records LIMIT 1 FOR UPDATE"))
            stack.enter_context(_two_streamers(postgres_outbox.url + options, redis_url, lease_s))
            until(lambda: uids(link))
            time.sleep(8)  # the pauses grow up to two seconds
        until(lambda: postgres_outbox.store.waiting()[0] == 0)
        assert uids(link) == written


def test_a_sqlite_that_somebody_writes_to_for_longer_than_the_lease_gets_its_batch_sent_once(
    sqlite_outbox: Outbox, redis_url: str, link: Link
) -> None:
    written = sqlite_outbox.stage_many(3)
    with contextlib.ExitStack() as stack:
        with contextlib.closing(sqlite3.connect(sqlite_outbox.engine.url.database or "")) as holder:
            holder.execute("BEGIN IMMEDIATE")
            stack.enter_context(_two_streamers(sqlite_outbox.url, redis_url, 1.0))
            until(lambda: uids(link))
            time.sleep(5)
        until(lambda: sqlite_outbox.store.waiting()[0] == 0)
        assert uids(link) == written


def test_a_timeout_of_sqlite_that_its_url_gives_is_kept(sqlite_outbox: Outbox) -> None:
    store = OutboxStore(f"{sqlite_outbox.url}?timeout=7")
    with store._single.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 7000
    store.close()


def test_a_full_disk_is_no_reason_for_another_streamer_to_send_the_same_again(sqlite_outbox: Outbox) -> None:
    """He would find it full as well."""
    sqlite_outbox.stage_many(1)
    [row] = sqlite_outbox.store.batch(1)
    with sqlite_outbox.store._single.connect() as connection:  # the pool gives it again
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(SqlBusy, match="full"):
        sqlite_outbox.store.set_aside([Refusal(row.id, "x" * 100_000, False)])


@pytest.fixture
def read_only_url(postgres_outbox: Outbox) -> Iterator[str]:
    """Of somebody who may only read, until ``default_transaction_read_only`` is reset and he comes anew."""
    role = f"role_{os.urandom(4).hex()}"
    with postgres_outbox.engine.begin() as connection:
        connection.execute(sa.text(f"CREATE ROLE {role} LOGIN SUPERUSER"))
        connection.execute(sa.text(f"ALTER ROLE {role} SET default_transaction_read_only = on"))
    yield sa.engine.make_url(postgres_outbox.url).set(username=role).render_as_string(hide_password=False)
    with postgres_outbox.engine.begin() as connection:
        connection.execute(sa.text(f"DROP ROLE {role}"))


def test_a_database_that_only_reads_gets_nothing_sent(
    postgres_outbox: Outbox, read_only_url: str, hands: Callable[..., Hand], link: Link
) -> None:
    """Its disk is nearly full, or it is a standby: a copy more at each lease, for as long as that lasts."""
    written = postgres_outbox.stage_many(3)
    hand = hands(Outbox(read_only_url, postgres_outbox.engine, postgres_outbox.store))
    with pytest.raises(SqlTrouble, match="takes no writes") as told:
        hand.turn()
    assert not isinstance(told.value, SqlBusy), "a streamer that has another way there goes on"
    assert uids(link) == []
    other = hands(postgres_outbox, holder="two", lead=False)
    hand.lead.lost(hand.lead.epoch or 0)
    hand.elector.on_end()
    link.call("DEL", hand.keys.leader)
    other.elect()
    other.turn(2)
    assert uids(link) == written


def test_nothing_is_left_open_between_removing_rows_and_making_it_last(postgres_outbox: Outbox) -> None:
    """Who is cut off there would hold its rows until PostgreSQL misses him: two hours, by default."""
    postgres_outbox.stage_many(1)
    [row] = postgres_outbox.store.batch(1)
    states: list[str] = []

    @sa.event.listens_for(postgres_outbox.store._engine, "after_cursor_execute")
    def look(connection: sa.Connection, *_: object) -> None:
        states.append(connection.connection.driver_connection.info.transaction_status.name)  # type: ignore[union-attr]

    postgres_outbox.store.remove([(row.id, row.uid)])
    assert states == ["IDLE"]
    assert postgres_outbox.store.waiting() == (0, 0)
    with postgres_outbox.store._engine.connect() as connection:
        assert connection.scalar(sa.text("SHOW lock_timeout")) == "0"


def test_uids_of_any_characters_are_found_again(outbox: Outbox) -> None:
    with outbox.engine.begin() as connection:
        for uid in (
            "a'b",
            "a\\b",
            "\u00fc\u20ac\U0001f600",
            "trail  ",
            'q"q',
            "{x,y}",
            "NULL",
            "\\N",
            "%s :ids $1",
            "e\u0301",
            "x" * 256,
        ):
            connection.execute(
                sa.text(
                    "INSERT INTO staged_log_records (uid, ticket_id, action, object, data) VALUES (:uid, 'T', 'a', 'o',"
                    " '{}')"
                ),
                {"uid": uid},
            )
    outbox.store.remove([(row.id, row.uid) for row in outbox.store.batch(100)])
    assert outbox.store.waiting() == (0, 0)
