"""SQLAlchemy, from the extra ``sql``: all other modules take ``sa`` from here, so that a missing extra is named. And
what we know of databases: how to connect to PostgreSQL, and which errors pass (the transaction did not happen, or its
outcome is unknown), and so are worth a retry; all others say that a statement is wrong, and stays wrong for ever."""

from __future__ import annotations

import sqlite3
from typing import Any, NamedTuple

from usher.common.base.extras import how_to_install

try:
    import sqlalchemy as sa

    # So that sa.orm and sa.dialects are there.
    import sqlalchemy.dialects.postgresql
    import sqlalchemy.dialects.sqlite
    import sqlalchemy.orm
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"the outbox and SQL sinks need SQLAlchemy: {how_to_install('sql')} (with PostgreSQL: '.[postgres]', with"
        " MySQL: '.[mysql]')",
        name=missing.name,
    ) from None

__all__ = ["sa"]


#: Options by which libpq notices that a server has vanished: it waits 5 s for a connection, and after that 15 to 25 s
#: for a sign of life.
_WAITS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


def postgres_args(url: sa.engine.URL) -> dict[str, Any]:
    """Return ``connect_args`` for create_engine; timeouts in the URL win over ours. {} for other databases.

    Prepared statements are off: a pooler that gives each transaction another server connection (PgBouncer) finds none
    there, or one that another client has prepared under the same name. A URL cannot ask psycopg for that.
    """
    if url.get_backend_name() != "postgresql":
        return {}
    driver = url.get_dialect().driver
    waits = (
        {name: value for name, value in _WAITS.items() if name not in url.query}
        if driver in ("psycopg", "psycopg2")
        else {}
    )
    return waits | ({"prepare_threshold": None} if driver == "psycopg" else {})


#: SQLSTATEs (PostgreSQL, appendix A) after which the whole transaction is worth a retry: serialization, deadlock, lock
#: timeout, the server stops or starts, no connection is free, the disk or the memory is full, an idle session was
#: ended.
_AGAIN = frozenset(
    {"40001", "40P01", "55P03", "57P01", "57P02", "57P03", "57P05", "53100", "53200", "53300", "25P03", "25P04"}
)
_CONNECTION = "08"
#: A statement was ended: by statement_timeout, or by an administrator.
CANCELED = "57014"
#: libpq's PQTRANS_IDLE: no transaction is open.
_IDLE = 0
#: The server takes no writes: it is a standby (a failover under way), or was set so because its disk is nearly full.
#: Treated as SQLite's read-only file.
_READ_ONLY = "25006"
#: Error numbers of MySQL and MariaDB that pass: deadlock, lock timeout, a row changed since the snapshot, the memory
#: for locks is full, another server of the group was faster.
_MYSQL_AGAIN = frozenset({1213, 1205, 1020, 1206, 3101})
#: The server stops, takes no more connections (of this user) or no writes, is not ready (Galera), its disk or memory is
#: full, the connection is gone or was killed.
_MYSQL_AWAY = frozenset(
    {1021, 1037, 1038, 1040, 1041, 1047, 1053, 1114, 1158, 1159, 1160, 1161, 1203, 1226, 1290, 1792, 1836, 1927, 4031}
)
#: A savepoint that is not there, if the text says so: a deadlock has rolled back all of the transaction.
_MYSQL_NO_SAVEPOINT = 1305
#: A statement was ended: KILL QUERY, max_execution_time, MariaDB's max_statement_time.
_MYSQL_CANCELED = frozenset({1317, 3024, 1969})
#: SERVER_STATUS_IN_TRANS of the protocol.
_MYSQL_IN_TRANSACTION = 1
#: SQLite's: others hold a lock; a file cannot be used now.
_SQLITE_AGAIN = ("SQLITE_BUSY", "SQLITE_LOCKED")
_SQLITE_AWAY = ("SQLITE_IOERR", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PROTOCOL")


def driver_of(connection: sa.Connection) -> Any:
    """Return the driver's connection, which knows about transactions. For aiosqlite, SQLAlchemy's wrapper in between
    does not."""
    pooled = connection.connection
    return pooled.driver_connection if connection.dialect.name == "sqlite" else pooled.dbapi_connection


def commits_by_itself(driver: Any) -> bool:
    """Return True if the next statement over a driver's connection would be a transaction of its own. Ask before it."""
    if hasattr(driver, "in_transaction"):  # sqlite3, aiosqlite
        # From Python 3.12 on True, False, or a number that says that isolation_level decides.
        mode = getattr(driver, "autocommit", None)
        return not driver.in_transaction and (mode is True or (mode is not False and driver.isolation_level is None))
    if hasattr(driver, "get_autocommit"):  # PyMySQL, mysqlclient
        return bool(driver.get_autocommit()) and not getattr(driver, "server_status", 0) & _MYSQL_IN_TRANSACTION
    # psycopg: a transaction may have been begun in spite of autocommit.
    status = getattr(getattr(driver, "info", None), "transaction_status", None)
    return bool(getattr(driver, "autocommit", False)) and (status is None or int(status) == _IDLE)


class Passing(NamedTuple):
    """Why an error passes. A database that is away must not be asked by all clients at once; anything else is over in
    a moment."""

    told: str
    is_away: bool = False


def passing(error: BaseException) -> Passing | None:
    """Classify an error that the database, its driver or its pool raised; None when it does not pass."""
    if isinstance(error, sa.exc.TimeoutError):
        return Passing(f"no connection of the pool is free: {error}")
    if not isinstance(error, sa.exc.DBAPIError):
        return None
    told, state, is_gone = driver_message(error), sqlstate(error), error.connection_invalidated
    number, of_sqlite = mysql_number(error), getattr(error.orig, "sqlite_errorname", "")
    is_rolled_back = number == _MYSQL_NO_SAVEPOINT and "SAVEPOINT" in told
    is_over_soon = state in _AGAIN or number in _MYSQL_AGAIN or is_rolled_back or of_sqlite.startswith(_SQLITE_AGAIN)
    if is_over_soon and not is_gone:
        return Passing(f"({state}) {told}" if state else told)
    is_away = is_gone or state == _READ_ONLY or state.startswith(_CONNECTION) or of_sqlite.startswith(_SQLITE_AWAY)
    if number is not None:  # those of the client, from 2000 on, are all about the connection; 0: it is closed
        is_away |= number in _MYSQL_AWAY or 2000 <= number < 2100 or number == 0
    elif not state and not isinstance(error.orig, sqlite3.Error):  # libpq has none for one that could not be made
        is_away |= isinstance(error, sa.exc.OperationalError)
    return Passing(told, is_away=True) if is_away else None


def sqlstate(error: sa.exc.DBAPIError) -> str:
    """Return the SQLSTATE of an error; "" if it has none, and for MySQL's but for one that says CANCELED."""
    if mysql_number(error) in _MYSQL_CANCELED:
        return CANCELED
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None) or ""


def driver_message(error: BaseException) -> str:
    """Return the first line of the driver's message, without SQLAlchemy's additions."""
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


def mysql_number(error: sa.exc.DBAPIError) -> int | None:
    number = next(iter(getattr(error.orig, "args", ())), None)
    return number if isinstance(number, int) else None
