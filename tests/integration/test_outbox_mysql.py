"""The parts of the outbox that only MySQL has: the locks that keep the order of a ticket, its texts, and a table of the
application's that is taken."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.outboxes import STREAM, Hand, Outbox, entries, made_outbox, until
from usher.common.base.errors import SqlBusy, SqlTrouble
from usher.common.outbox.log_consumer import LogConsumer, stored_states
from usher.common.outbox.store import (
    LogRecord,
    OutboxMisused,
    OutboxStore,
    check_dialect,
    write_all_to_outbox,
    write_to_outbox,
)
from usher.common.redis.client import Link
from usher.common.sql.alchemy import passing, sa

_WRITERS, _COMMITS, _TICKETS = 6, 60, 3


@pytest.fixture
def own(mysql_url: str) -> Iterator[Outbox]:
    made = made_outbox(mysql_url)
    yield made
    made.close()


def _waiting(own: Outbox) -> bool:
    return bool(own.scalar("SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"))


def _staged(own: Outbox) -> list[tuple[Any, ...]]:
    return own.rows("SELECT ticket_id, action FROM staged_log_records ORDER BY id")


def test_rows_of_one_statement_take_their_ids_one_by_one_behind_who_committed_before(own: Outbox) -> None:
    """InnoDB gives a statement of several rows all its AUTO_INCREMENT values at its first row: the second one's would
    be lower than that of a transaction which has it wait, and commits first."""
    with own.engine.connect() as first, own.engine.connect() as both:
        write_to_outbox(first, ticket_id="T2", action="first", object="o")

        def write_both() -> None:
            write_all_to_outbox(both, [LogRecord("T1", "second", "o"), LogRecord("T2", "second", "o")])
            both.commit()

        thread = threading.Thread(target=write_both)
        thread.start()
        until(lambda: _waiting(own), "the second one did not wait")
        write_to_outbox(first, ticket_id="T2", action="first again", object="o")
        first.commit()
        thread.join(30)
        assert not thread.is_alive()
    assert [action for ticket, action in _staged(own) if ticket == "T2"] == ["first", "first again", "second"]


def test_nothing_is_written_without_its_lock(own: Outbox) -> None:
    with own.engine.begin() as somebody:
        somebody.execute(sa.text("DELETE FROM usher_outbox_locks"))
    with own.engine.connect() as writer, pytest.raises(sa.exc.DBAPIError, match="usher_outbox_locks lacks rows"):
        write_to_outbox(writer, ticket_id="T", action="1", object="o")
    assert _staged(own) == []


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_with_an_older_snapshot_goes_on_behind_the_one_it_waited_for(own: Outbox, isolation: str) -> None:
    engine = own.engine.execution_options(isolation_level=isolation)
    with engine.connect() as first, engine.connect() as second:
        second.execute(sa.text("SELECT count(*) FROM checkpoints"))  # its snapshot
        write_to_outbox(first, ticket_id="T", action="1", object="o")
        first.commit()
        write_to_outbox(second, ticket_id="T", action="2", object="o")
        second.commit()
    assert _staged(own) == [("T", "1"), ("T", "2")]


def test_messages_of_a_ticket_are_in_the_order_of_its_commits_while_many_write_and_roll_back(
    own: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    """Each transaction writes its records first, and takes a number of the ticket then, which others wait for: in the
    stream they are in the order of these numbers, none left out."""
    with own.engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE counts (ticket INT PRIMARY KEY, n INT NOT NULL) ENGINE = InnoDB"))
        connection.execute(sa.text("INSERT INTO counts VALUES (0, 0), (1, 0), (2, 0)"))
        connection.execute(
            sa.text("CREATE TABLE told (uid VARCHAR(40) PRIMARY KEY, ticket INT, n INT) ENGINE = InnoDB")
        )

    def write(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(_COMMITS):
            with own.engine.connect() as connection:
                for ticket in sorted(rng.sample(range(_TICKETS), rng.randint(1, _TICKETS))):
                    uid = write_to_outbox(connection, ticket_id=str(ticket), action="count", object="o")
                    connection.execute(sa.text("UPDATE counts SET n = n + 1 WHERE ticket = :t"), {"t": ticket})
                    told = "INSERT INTO told SELECT :uid, ticket, n FROM counts WHERE ticket = :t"
                    connection.execute(sa.text(told), {"uid": uid, "t": ticket})
                if rng.random() < 0.2:
                    connection.rollback()
                else:
                    connection.commit()

    hand = hands(own, batch_rows=5)
    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(_WRITERS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        hand.turn()
    while own.store.waiting()[0]:
        hand.turn()
    found = entries(link)
    for ticket in range(_TICKETS):
        sent = [entry[b"uid"].decode() for entry in found if entry[b"ticket_id"] == b"%d" % ticket]
        assert sent == [uid for (uid,) in own.rows(f"SELECT uid FROM told WHERE ticket = {ticket} ORDER BY n")]
        assert len(sent) > _COMMITS
    assert own.scalar("SELECT count(*) FROM usher_outbox_ids") == 0


def test_a_row_that_somebody_holds_is_not_waited_for_longer_than_a_moment(
    own: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    own.stage(LogRecord("T", "a", "o"))
    hand = hands(own)
    with own.engine.connect() as other:
        other.execute(sa.text("SELECT id FROM staged_log_records FOR UPDATE"))
        with pytest.raises(SqlBusy, match="Lock wait timeout"):
            hand.turn()
        other.rollback()
    hand.turn()
    assert (len(entries(link)), own.store.waiting()) == (1, (0, 0))


@pytest.mark.parametrize("count", [1, 3, 40])
def test_what_others_are_writing_keeps_no_other_ticket_back(
    own: Outbox, hands: Callable[..., Hand], link: Link, count: int
) -> None:
    own.stage_many(count)
    hand = hands(own)
    with own.engine.connect() as other:
        write_to_outbox(other, ticket_id="another", action="a", object="o")
        hand.turn()
        assert (len(entries(link)), own.store.waiting()[0]) == (count, 0)
        other.rollback()


def test_what_the_database_rolls_back_within_a_batch_is_not_taken_for_done(
    own: Outbox, hands: Callable[..., Hand], consumers: Callable[..., LogConsumer]
) -> None:
    """InnoDB's deadlock rolls back the whole transaction; who swallows it goes on in a new one, without knowing."""
    own.stage(LogRecord("T", "a", "o"))
    hands(own).turn()
    with own.engine.begin() as sql:
        sql.execute(sa.text("CREATE TABLE effects (n INT)"))
    consumer = consumers(own)

    def handle(records: Any, state: dict[str, Any], sql: sa.Connection) -> None:
        sql.execute(sa.text("INSERT INTO effects VALUES (1)"))
        if swallows:
            sql.exec_driver_sql("ROLLBACK")
            sql.execute(sa.text("INSERT INTO effects VALUES (2)"))
        state["runs"] = state.get("runs", 0) + 1

    for swallows in (True, False):
        with pytest.raises(SqlTrouble, match="rolled this batch back") if swallows else contextlib.nullcontext():
            consumer.step(handle)
    assert own.rows("SELECT n FROM effects") == [(1,)]
    assert consumer.state()[1] == {"runs": 1}
    assert stored_states(own.url, "", STREAM)[0][::2] == ("one", {"runs": 1}), "a name is text, though MySQL has bytes"


def test_a_savepoint_that_went_with_a_deadlock_is_an_error_that_passes(own: Outbox) -> None:
    with own.engine.connect() as sql:
        nested = sql.begin_nested()
        sql.exec_driver_sql("ROLLBACK")
        with pytest.raises(sa.exc.DBAPIError) as raised:
            nested.rollback()
    told = passing(raised.value)
    assert told is not None and not told.is_away


def test_names_that_differ_by_case_or_a_blank_are_two(
    own: Outbox, hands: Callable[..., Hand], consumers: Callable[..., LogConsumer]
) -> None:
    """Not so for MySQL's usual comparison of texts: it would take a record for a repeat, and leave it out."""
    names = ["a", "A", "a ", "ä", "a\u0308"]
    own.stage(*(LogRecord("T", "a", "o", uid=name) for name in names))
    hands(own).turn()
    found: list[str] = []
    for consumer in (consumers(own, "one"), consumers(own, "One")):
        consumer.step(lambda records, state, sql: found.extend(record.uid for record in records))
    assert found == names * 2


def test_a_server_that_is_read_only_gets_nothing_sent(own: Outbox, hands: Callable[..., Hand], link: Link) -> None:
    own.stage(LogRecord("T", "a", "o"))
    hand = hands(own)
    with own.engine.connect() as admin:
        admin.execute(sa.text("SET GLOBAL read_only = 1"))
        try:
            with pytest.raises(SqlTrouble, match="takes no writes"):
                hand.turn()
        finally:
            admin.execute(sa.text("SET GLOBAL read_only = 0"))
    assert entries(link) == []
    hand.turn()
    assert len(entries(link)) == 1


def test_a_url_of_mariadb_is_one_and_an_engine_of_its_dialect_is_told_what_to_be(mysql_url: str) -> None:
    store = OutboxStore(mysql_url.replace("mysql+", "mariadb+"))
    assert (store.dialect, store.migrate(), store.migrate()) == ("mysql", True, False)
    store.close()
    with pytest.raises(OutboxMisused, match="this one is for mariadb, by pymysql"):
        check_dialect(sa.create_engine(mysql_url.replace("mysql+", "mariadb+")))
