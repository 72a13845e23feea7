"""An outbox table of the application's own: its rows are taken, in its transaction, and what cannot be read is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.outboxes import Hand, Outbox, entries
from usher.common.base.errors import StartRefused
from usher.common.outbox.store import OutboxStore
from usher.common.outbox.taken_table import TakenTable, taken_table
from usher.common.redis.client import Link
from usher.common.sql.alchemy import sa
from usher.master.settings import StreamerSettings
from usher.master.streamer.streamer import Pace

_DEBEZIUM = {
    "postgresql": "CREATE TABLE outboxevent (id UUID PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype VARCHAR(255),"
    " aggregateid VARCHAR(255), type VARCHAR(255), payload JSONB, timestamp BIGINT)",
    "sqlite": "CREATE TABLE outboxevent (id TEXT PRIMARY KEY DEFAULT (lower(hex(randomblob(16)))), aggregatetype TEXT,"
    " aggregateid TEXT, type TEXT, payload TEXT, timestamp BIGINT)",
}
_INSERT = "INSERT INTO outboxevent (aggregatetype, aggregateid, type, payload, timestamp) VALUES (:t, :id, :type, :payload, :at)"


def debezium(**changed: Any) -> TakenTable:
    settings = StreamerSettings(outbox_from="outboxevent", **changed)
    made = taken_table(settings.outbox_from, settings.outbox_columns, settings.outbox_from_rows == "keep")
    assert made is not None
    return made


def happened(outbox: Outbox, *events: tuple[str | None, str | None, str | None]) -> None:
    """In one transaction: aggregate's id, type, payload."""
    with outbox.engine.begin() as connection:
        for at, (aggregate, kind, payload) in enumerate(events):
            values = {"t": "order", "id": aggregate, "type": kind, "payload": payload, "at": -at}
            connection.execute(sa.text(_INSERT), values)


def taking(outbox: Outbox, taken: TakenTable, order_by: str = "") -> int:
    store = OutboxStore(outbox.url, taken=taken)
    try:
        left = store.take(order_by)
        store.check()
        return left
    finally:
        store.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def outbox_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """MySQL's triggers do less: test_outbox_mysql.py."""
    postgres = request.param == "postgresql"
    return str(request.getfixturevalue("postgres_schema_url")) if postgres else f"sqlite:///{tmp_path / 'outbox.db'}"


@pytest.fixture
def events(outbox: Outbox) -> Outbox:
    """An outbox beside a table as Debezium has it, in each database."""
    with outbox.engine.begin() as connection:
        connection.execute(sa.text(_DEBEZIUM[outbox.store.dialect]))
    return outbox


def test_rows_of_debeziums_table_become_messages(events: Outbox, hands: Callable[..., Hand], link: Link) -> None:
    assert taking(events, debezium()) == 0
    happened(events, ("42", "paid", '{"amount": 12.5}'), ("7", "sold", None))
    with events.engine.connect() as connection:
        values = {"t": "order", "id": "1", "type": "paid", "payload": "{}", "at": 0}
        connection.execute(sa.text(_INSERT), values)
        connection.rollback()
    hands(events).turn()
    sent = entries(link)
    assert [
        (one[b"ticket_id"], one[b"action"], one[b"object"], json.loads(one[b"data"]), bool(one[b"uid"])) for one in sent
    ] == [(b"42", b"paid", b"order", {"amount": 12.5}, True), (b"7", b"sold", b"order", None, True)]
    assert events.scalar("SELECT count(*) FROM outboxevent") == 0


def test_rows_may_stay_for_others_who_read_them(events: Outbox) -> None:
    taking(events, debezium(outbox_from_rows="keep"))
    happened(events, ("42", "paid", "{}"))
    ids = events.rows("SELECT CAST(id AS TEXT) FROM outboxevent")
    assert ids == events.rows("SELECT uid FROM staged_log_records")


@pytest.mark.parametrize(
    ("event", "why"),
    [((None, "paid", "{}"), "aggregateid is NULL"), (("42", None, "1"), "type is NULL")],
)
def test_what_cannot_be_read_is_set_aside_as_it_is(
    events: Outbox, hands: Callable[..., Hand], link: Link, event: tuple[Any, Any, Any], why: str
) -> None:
    taking(events, debezium())
    happened(events, event, ("42", "sold", "{}"))
    hands(events).turn()
    assert [one[b"action"] for one in entries(link)] == [b"sold"]
    [(reason, ticket, data)] = events.rows("SELECT reason, ticket_id, CAST(data AS TEXT) FROM refused_log_records")
    assert (reason, ticket) == (f"unreadable: {why}", event[0] or "")
    assert {"aggregateid", "type", "payload"} <= set(json.loads(data))


def test_a_payload_that_is_no_json_parks_its_ticket_where_rows_park(
    outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    with outbox.engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE mine (number INTEGER PRIMARY KEY, whose TEXT, what TEXT, text TEXT)"))
    columns = "uid=number,ticket_id=whose,action=what,object=what,data=text"
    taken = taken_table("mine", columns, keeps=False)
    assert taken is not None
    taking(outbox, taken)
    with outbox.engine.begin() as connection:
        for number, whose, text in ((1, "42", "{'no': 'json'}"), (2, "42", "{}"), (3, "7", '{"n": 1}')):
            connection.execute(
                sa.text("INSERT INTO mine VALUES (:n, :whose, 'paid', :text)"),
                {"n": number, "whose": whose, "text": text},
            )
    hands(outbox, pace=Pace(poll_s=0.01, parks=True)).turn(2)
    assert [(one[b"ticket_id"], one[b"uid"]) for one in entries(link)] == [(b"7", b"3")]
    assert outbox.rows("SELECT reason, ticket_id FROM refused_log_records") == [("unreadable: text is no JSON", "42")]


def test_what_stood_there_before_is_told_or_taken_in_the_order_asked_for(events: Outbox) -> None:
    happened(events, ("42", "third", "{}"), ("42", "second", "{}"), ("42", "first", "{}"))
    assert taking(events, debezium(), order_by="timestamp") == 0
    happened(events, ("42", "fourth", "{}"))
    assert events.rows("SELECT action FROM staged_log_records ORDER BY id") == [
        ("first",),
        ("second",),
        ("third",),
        ("fourth",),
    ]
    assert events.scalar("SELECT count(*) FROM outboxevent") == 0
    with pytest.raises(StartRefused, match="taken already"):
        taking(events, debezium(), order_by="timestamp")


def test_what_stood_there_before_and_is_left_is_counted(events: Outbox) -> None:
    happened(events, ("42", "old", "{}"))
    assert taking(events, debezium()) == 1
    assert taking(events, debezium(outbox_from_rows="keep")) == 0  # known already
    assert events.scalar("SELECT count(*) FROM staged_log_records") == 0


def test_a_streamer_does_not_start_where_rows_are_not_taken_as_its_settings_say(events: Outbox) -> None:
    store = OutboxStore(events.url, taken=debezium())
    with pytest.raises(StartRefused, match="not taken"):
        store.check()
    store.close()
    taking(events, debezium())
    other = OutboxStore(events.url, taken=debezium(outbox_from_rows="keep"))
    with pytest.raises(StartRefused, match="not taken"):
        other.check()
    other.take()
    other.check()
    other.close()
    happened(events, ("42", "once", "{}"))
    assert events.scalar("SELECT count(*) FROM staged_log_records") == 1


def test_a_column_that_is_not_there_is_told_when_the_trigger_is_made(events: Outbox) -> None:
    with pytest.raises(sa.exc.SQLAlchemyError, match="reference"):
        taking(events, debezium(outbox_columns="uid=id,ticket_id=reference,action=type,object=type,data=payload"))
    happened(events, ("42", "goes on", "{}"))


def test_who_may_insert_needs_no_right_to_the_outbox(request: pytest.FixtureRequest) -> None:
    outbox: Outbox = request.getfixturevalue("postgres_outbox")
    role = f"app_{outbox.url[-6:]}"
    with outbox.engine.begin() as connection:
        connection.execute(sa.text(_DEBEZIUM["postgresql"]))
        connection.execute(sa.text(f"CREATE ROLE {role}"))
        connection.execute(sa.text(f"GRANT USAGE ON SCHEMA {outbox.scalar('SELECT current_schema()')} TO {role}"))
        connection.execute(sa.text(f"GRANT INSERT ON outboxevent TO {role}"))
    taking(outbox, debezium())
    with outbox.engine.begin() as connection:
        connection.execute(sa.text(f"SET LOCAL ROLE {role}"))
        connection.execute(sa.text(_INSERT), {"t": "order", "id": "42", "type": "paid", "payload": "{}", "at": 0})
    assert outbox.rows("SELECT ticket_id FROM staged_log_records") == [("42",)]


@pytest.mark.parametrize(
    ("table", "columns", "told"),
    [
        ("a; DROP TABLE b", "uid=id,ticket_id=t,action=a,object=o,data=d", "no name of a table"),
        ("events", "uid=id,ticket_id=t,action=a,object=o", "a column for each"),
        ("events", "uid=id,ticket_id=t,action=a,object=o,data=d,data=e", "a column for each"),
        ("events", "uid=id,ticket_id=t,action=a,object=o,data='d'", "a column for each"),
    ],
)
def test_names_that_are_none_are_refused(table: str, columns: str, told: str) -> None:
    with pytest.raises(StartRefused, match=told):
        taken_table(table, columns, keeps=False)
