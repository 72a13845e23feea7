"""Write records to the outbox, inside the application's own transaction::

    from usher import write_to_outbox

    with engine.begin() as connection:  # SQLAlchemy (asynchronous: await connection.run_sync(...))
        connection.execute(insert(rides).values(...))
        write_to_outbox(connection, ticket_id="42", action="create", object="ride", data={"id": 7, "distance": 12.5})

    with transaction.atomic():  # Django: django.db.connection; or any DB-API connection: sqlite3, psycopg, PyMySQL ...
        ride.save()
        write_to_outbox(connection, ticket_id="42", action="create", object="ride", data={...})

It begins, commits and rolls back nothing. Other languages: the INSERT at the top of queries.sql.

The order of one ticket's records is that of the commits: a trigger (PostgreSQL's, MySQL's) takes a lock per ticket
until the end of the transaction. If a record tells the state of a row ("balance is now 5"), lock that row first (SELECT
... FOR UPDATE), and everywhere in this order: two transactions that take both locks in opposite order end in the
database's deadlock error, and one of them has to begin again.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

from usher.common.base.errors import MessageUndecodable
from usher.common.outbox.rows import DIALECTS, as_json, check_uid, queries
from usher.common.outbox.store import OutboxMisused
from usher.common.protocol.message import Key, key_bytes, ticket_key
from usher.common.sql.alchemy import sa
from usher.common.sql.errors import commits_by_itself, driver_of


class LogRecord(NamedTuple):
    """A record to write. ``data`` is what orjson can encode, without NaN and Infinity, which JSON does not have;
    ``uid`` "" lets us choose one."""

    ticket_id: Key
    action: str
    object: str
    data: Any = None
    uid: Key = ""


def write_to_outbox(
    connection: Any, *, ticket_id: Key, action: str, object: str, data: Any = None, uid: Key = ""
) -> str:
    """Stage one record in the transaction of ``connection`` (DB-API, SQLAlchemy's Connection or Session, Django's);
    return its uid.

    Raises OutboxMisused, before anything is written, for a record that cannot become a message, and for a connection
    in AUTOCOMMIT mode.
    """
    [written] = write_all_to_outbox(connection, [LogRecord(ticket_id, action, object, data, uid)])
    return written


def write_all_to_outbox(connection: Any, records: Iterable[LogRecord]) -> list[str]:
    rows = [_row(record) for record in records]
    if not rows:
        return []
    if isinstance(connection, (sa.Connection, sa.orm.Session, sa.orm.scoped_session)):
        statement = sa.text(queries("sqlite")["write"])
        _check_transactional(driver_of(_begun(connection, statement)))
        connection.execute(statement, rows)
    else:
        _plain_write(connection, rows)
    return [row["uid"] for row in rows]


def _begun(connection: Any, statement: sa.TextClause) -> sa.Connection:
    """Return the connection that ``statement`` will run on, in its transaction, which may be begun by a listener to
    ``begin``."""
    if not isinstance(connection, sa.Connection):
        found: sa.Connection = connection.connection(bind_arguments={"clause": statement})
        return found
    if not connection.in_transaction():
        connection.begin()  # as its first statement would
    return connection


def _check_transactional(driver: Any) -> None:
    if commits_by_itself(driver):
        raise OutboxMisused(
            "this connection is in AUTOCOMMIT mode: the record would be committed by itself, and stay when your rows"
            ' are rolled back. Leave out isolation_level (SQLAlchemy: "AUTOCOMMIT"; sqlite3: None) or autocommit=True,'
            " or begin a transaction first"
        )


def _plain_write(connection: Any, rows: list[dict[str, str]]) -> None:
    style = _style(connection)
    if style is None:
        raise OutboxMisused(
            "write_to_outbox() wants the open connection or session of your transaction, so that the record rolls back"
            " with it; not what makes one, and no asynchronous one: await connection.run_sync(lambda own:"
            " write_to_outbox(own, ticket_id=...)), or run the INSERT of queries.sql yourself (this is a"
            f" {type(connection).__module__}.{type(connection).__name__})"
        )
    if not hasattr(connection, "in_atomic_block"):
        _check_transactional(connection)
    elif not connection.in_atomic_block and connection.get_autocommit():
        raise OutboxMisused(
            "this connection of Django is in no transaction: the record would be committed by itself. Write it within"
            " transaction.atomic()"
        )
    cursor = connection.cursor()
    query = queries("sqlite")["write"]
    for name in rows[0]:
        query = query.replace(f":{name}", style.format(name))
    cursor.executemany(query, rows)


def _style(connection: Any) -> str | None:
    if hasattr(connection, "in_atomic_block"):  # Django's
        return "%({})s" if connection.vendor in DIALECTS else None
    module = type(connection).__module__.partition(".")[0]
    # Nobody would await what is asked of an asynchronous one. Without cursor: a cursor, or something unrelated.
    if inspect.iscoroutinefunction(getattr(connection, "commit", None)) or not hasattr(connection, "cursor"):
        return None
    if module == "sqlite3" or any(base.__module__ == "sqlite3" for base in type(connection).__mro__):
        return ":{}"
    return "%({})s" if module in ("psycopg", "psycopg2", "psycopg2cffi", "pymysql", "MySQLdb") else None


def _row(record: LogRecord) -> dict[str, str]:
    for name, value in (("action", record.action), ("object", record.object)):
        if not isinstance(value, str):
            raise OutboxMisused(
                f"this record cannot become a message: {name} is of type {type(value).__name__}: give a str"
            )
    try:
        ticket_id = ticket_key(record.ticket_id).decode()
        uid = uuid.uuid4().hex if record.uid == "" else check_uid(key_bytes("uid", record.uid)).decode()
        record.action.encode()
        record.object.encode()
        data = as_json("data", {} if record.data is None else record.data).decode()
    except MessageUndecodable as refused:
        raise OutboxMisused(f"this record cannot become a message: {refused.reason}") from None
    except (TypeError, ValueError) as refused:
        raise OutboxMisused(f"this record cannot become a message: {refused}") from None
    return {"uid": uid, "ticket_id": ticket_id, "action": record.action, "object": record.object, "data": data}
