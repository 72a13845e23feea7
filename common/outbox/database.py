"""The SQL side: open the database, manage its schema, and turn its errors into ones that name the cause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from usher.common.base.errors import SqlBusy, SqlTrouble, StartRefused, UsherError
from usher.common.outbox.rows import DIALECTS, queries, schema
from usher.common.sql.alchemy import sa
from usher.common.sql.engine import postgres_args
from usher.common.sql.errors import CANCELED, PassingCause, driver_message, is_autocommit, passing, sqlstate

#: Seconds that a writer waits for SQLite's one write lock.
_SQLITE_WAIT_S = 30.0
#: Seconds for which a streamer waits for an answer of MySQL, whose drivers have no other way to notice that it is gone.
_MYSQL_WAIT_S = 15
#: A row that somebody holds is waited for as long as MySQL can count: a lease must not end meanwhile.
_MYSQL_IMPATIENT = "SET SESSION innodb_lock_wait_timeout = 1"
#: SQLite's words for a full disk: other programs that open the file are short of the same disk.
_SQLITE_FULL = "disk is full"
_PLAIN = (
    "the outbox takes a URL, or what create_engine makes of it, of PostgreSQL, MySQL (and MariaDB) or SQLite, with a"
    " driver that is not asynchronous (postgresql+psycopg://..., mysql+pymysql://..., sqlite:///...)"
)
#: The version of the schema that this Usher needs.
VERSION = 1
#: For pg_advisory_xact_lock: two migrations at once.
_MIGRATING = 0x75736872650002
#: What each migration begins with: it waits there for others.
_BEGIN = {
    "sqlite": "BEGIN IMMEDIATE",
    "postgresql": f"SELECT pg_advisory_xact_lock({_MIGRATING})",
    "mysql": "SELECT get_lock(left(concat('usher_outbox ', database()), 64), 600)",
}


class OutboxMisused(UsherError):
    """The outbox cannot be used like this; the message says what to change."""


def open_engine(url: str, setting: str, *, streams: bool = False) -> sa.Engine:
    """Make an engine for an outbox; nothing is connected yet. Timeouts in the URL take precedence over ours.
    ``streams``: a server is not asked before each use whether the connection lives, and in MySQL each statement is a
    transaction. Raises StartRefused, naming ``setting``."""
    try:
        made = sa.engine.make_url(url)
        made = made.set(drivername=made.drivername.replace("mariadb", "mysql", 1))  # one dialect for both
        options = {"isolation_level": "AUTOCOMMIT"} if streams and made.get_backend_name() == "mysql" else {}
        engine = sa.create_engine(
            made,
            pool_pre_ping=not streams and made.get_backend_name() != "sqlite",
            connect_args=_waits(made, streams),
            **options,
        )
    except (sa.exc.ArgumentError, ModuleNotFoundError) as wrong:
        raise StartRefused(
            f"{setting} cannot be used: {wrong} (try sqlite:////absolute/path,"
            " postgresql+psycopg://user@host/database or mysql+pymysql://user@host/database)"
        ) from None
    check_dialect(engine)
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _any_bytes)
    return engine


def _waits(url: sa.engine.URL, streams: bool) -> dict[str, Any]:
    if url.get_backend_name() == "sqlite":
        return {} if "timeout" in url.query else {"timeout": _SQLITE_WAIT_S}
    if url.get_backend_name() == "mysql":
        waits: dict[str, Any] = {"connect_timeout": 5}
        if streams:
            waits |= {"read_timeout": _MYSQL_WAIT_S, "write_timeout": _MYSQL_WAIT_S, "init_command": _MYSQL_IMPATIENT}
        return {name: value for name, value in waits.items() if name not in url.query}
    return postgres_args(url)


def check_dialect(engine: Any) -> None:
    """Raise OutboxMisused for databases other than PostgreSQL, MySQL and SQLite, and for objects that are no
    synchronous engine."""
    if not isinstance(engine, sa.Engine):
        raise OutboxMisused(f"{_PLAIN}; this is a {type(engine).__name__}")
    if engine.dialect.is_async or engine.dialect.name not in DIALECTS:
        raise OutboxMisused(f"{_PLAIN}; this one is for {engine.dialect.name}, by {engine.dialect.driver}")


def _any_bytes(connection: Any, _record: object) -> None:
    """Let SQLite return any bytes as text: one bad row must not make its whole batch unreadable."""
    connection.text_factory = lambda value: value.decode("utf-8", "surrogateescape")


def check_transactional(connection: sa.Connection) -> None:
    """Raise OutboxMisused when each statement would be a transaction of its own. Call after the first write of a
    transaction."""
    if is_autocommit(connection):
        raise OutboxMisused(
            "this engine is in AUTOCOMMIT mode: effects, state, checkpoint would be several transactions; leave out"
            " isolation_level"
        )


@contextlib.contextmanager
def sql_trouble(doing: str, *, canceled: type[SqlTrouble] = SqlTrouble) -> Iterator[None]:
    """Turn errors of a database that is away, busy or in a deadlock into SqlTrouble: the action ``doing`` did not
    happen, or its outcome is unknown, and trying again is right. So is the end of a statement that took too long
    (statement_timeout): here no attempts are counted, and the database is slow only for now; it is raised as
    ``canceled``. Errors of a wrong statement stay as they are."""
    try:
        yield
    except sa.exc.SQLAlchemyError as problem:
        found = passing(problem)
        was_canceled = isinstance(problem, sa.exc.DBAPIError) and sqlstate(problem) == CANCELED
        # A PendingRollbackError hides the error that came before and was swallowed.
        if found is None and not was_canceled and not isinstance(problem, sa.exc.PendingRollbackError):
            raise
        is_busy = found is not None and (found.why is not PassingCause.AWAY or _SQLITE_FULL in found.told)
        kind = SqlBusy if is_busy else canceled if was_canceled else SqlTrouble
        raise kind(f"{doing}: {found.told if found else driver_message(problem)}") from problem


def check_schema(engine: sa.Engine, setting: str) -> None:
    """Raise StartRefused unless the database answers and has an outbox of this version or a later one."""
    try:
        with engine.connect() as connection:
            found = _schema_version(connection)
    except sa.exc.SQLAlchemyError as problem:
        raise StartRefused(f"{setting}: the database cannot be used: {driver_message(problem)}") from problem
    if found < VERSION:
        raise StartRefused(
            f"{setting}: it has no outbox (staged_log_records); run `usher streamer --migrate`, or apply what `usher"
            " streamer --schema` prints"
        )


def _schema_version(connection: sa.Connection) -> int:
    if not sa.inspect(connection).has_table("usher_outbox_version"):
        return 0
    return int(connection.scalar(sa.text(queries(connection.dialect.name)["version"])) or 0)


def migrate(engine: sa.Engine) -> bool:
    """Make the tables, all or nothing (MySQL: to be repeated); safe in several processes at once. Returns False when
    they are there already. The connection takes no parameters: a percent sign stands for itself."""
    check_dialect(engine)
    dialect = engine.dialect.name
    with sql_trouble("migrating the outbox"), engine.connect().execution_options(no_parameters=True) as connection:
        connection.exec_driver_sql(_BEGIN[dialect])
        try:
            is_missing = _schema_version(connection) < VERSION
            block = schema(dialect).replace("DELIMITER //\n", "").replace(" //\nDELIMITER ;", ";")
            for statement in block.strip().split(";\n\n") if is_missing else ():
                connection.exec_driver_sql(statement)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        finally:
            if dialect == "mysql":
                connection.invalidate()  # the lock is the session's
    return is_missing
