"""The SQL side of the outbox: write records, open the database, manage its schema, turn its errors into ones that name
the cause; and the streamer's part: read batches, remove exactly what was confirmed, set aside rows that cannot become
messages. An application writes inside its own transaction::

    from usher import write_to_outbox

    with engine.begin() as connection:  # SQLAlchemy (asynchronous: await connection.run_sync(...))
        connection.execute(insert(rides).values(...))
        write_to_outbox(connection, ticket_id="42", action="create", object="ride", data={"id": 7, "distance": 12.5})

    with transaction.atomic():  # Django: django.db.connection; or any DB-API connection: sqlite3, psycopg, PyMySQL ...
        ride.save()
        write_to_outbox(connection, ticket_id="42", action="create", object="ride", data={...})

That begins, commits and rolls back nothing. Other languages: the INSERT at the top of queries.sql.

The order of one ticket's records is that of the commits: a trigger (PostgreSQL's, MySQL's) takes a lock per ticket
until the end of the transaction. If a record tells the state of a row ("balance is now 5"), lock that row first (SELECT
... FOR UPDATE), and everywhere in this order: two transactions that take both locks in opposite order end in the
database's deadlock error, and one of them has to begin again.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from usher.common.base.errors import MessageUndecodable, SqlBusy, SqlTrouble, StartRefused, UsherError
from usher.common.outbox.rows import (
    BATCH_BYTES,
    DIALECTS,
    Refusal,
    RefusedRow,
    Row,
    TicketRows,
    as_json,
    check_uid,
    queries,
    schema,
)
from usher.common.protocol.message import Key, key_bytes, ticket_key
from usher.common.sql.alchemy import (
    CANCELED,
    commits_by_itself,
    driver_message,
    driver_of,
    passing,
    postgres_args,
    sa,
    sqlstate,
)

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


def check_transactional(driver: Any) -> None:
    """Raise OutboxMisused when the next statement over a driver's connection would be a transaction of its own."""
    if commits_by_itself(driver):
        raise OutboxMisused(
            "this connection is in AUTOCOMMIT mode: each statement would be committed by itself, and stay when the rest"
            ' is rolled back. Leave out isolation_level (SQLAlchemy: "AUTOCOMMIT"; sqlite3: None) or autocommit=True,'
            " or begin a transaction first"
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
        is_busy = found is not None and (not found.is_away or _SQLITE_FULL in found.told)
        kind = SqlBusy if is_busy else canceled if was_canceled else SqlTrouble
        raise kind(f"{doing}: {found.told if found else driver_message(problem)}") from problem


def check_schema(engine: sa.Engine, setting: str) -> None:
    """Raise StartRefused unless the database answers and has an outbox."""
    try:
        with engine.connect() as connection:
            is_there = _is_migrated(connection)
    except sa.exc.SQLAlchemyError as problem:
        raise StartRefused(f"{setting}: the database cannot be used: {driver_message(problem)}") from problem
    if not is_there:
        raise StartRefused(
            f"{setting}: it has no outbox (staged_log_records); run `usher streamer --migrate`, or apply what `usher"
            " streamer --schema` prints"
        )


def _is_migrated(connection: sa.Connection) -> bool:
    return sa.inspect(connection).has_table("consumer_uids")  # the last one


#: Has a streamer wait for SQLite's one write lock for a moment only: its lease must not end meanwhile. Same as
#: lock_timeout in queries.sql; for MySQL see open_engine.
_IMPATIENT = sa.text("PRAGMA busy_timeout = 500")


class OutboxStore:
    """An outbox; used by one thread. ``setting`` is named in errors."""

    def __init__(self, url: str, setting: str = "USHER_OUTBOX_URL") -> None:
        self._single = open_engine(url, setting, streams=True)  # a turn with a dead connection is repeated
        self._setting = setting
        self._is_postgres = self._single.dialect.name == "postgresql"
        # On a connection of self._single one statement is a transaction; SQLite, which runs in this process, does not
        # need that. MySQL asks more often when a connection changes its mode, and so has single ones by default.
        self._engine = self._single
        if self._is_postgres:
            self._single = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        elif self.dialect == "mysql":
            self._engine = self._single.execution_options(isolation_level="READ COMMITTED")
        self._queries = {name: sa.text(query) for name, query in queries(self._engine.dialect.name).items()}

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    @property
    def identity(self) -> str:
        """Return a text that tells two databases apart and reveals nothing about either."""
        url = self._engine.url
        where = (
            os.path.realpath(url.database or "")
            if self.dialect == "sqlite"
            else f"{url.host} {url.port} {url.database} {dict(url.query)}"
        )
        return hashlib.sha256(where.encode()).hexdigest()[:12]

    def check(self) -> None:
        check_schema(self._engine, self._setting)

    def migrate(self) -> bool:
        """Make the tables, all or nothing (MySQL: to be repeated); safe in several processes at once. Returns False
        when they are there already. The connection takes no parameters: a percent sign stands for itself."""
        plain = self._engine.execution_options(no_parameters=True)
        with sql_trouble("migrating the outbox"), plain.connect() as connection:
            connection.exec_driver_sql(_BEGIN[self.dialect])
            try:
                is_missing = not _is_migrated(connection)
                block = schema(self.dialect).replace("DELIMITER //\n", "").replace(" //\nDELIMITER ;", ";")
                for statement in block.strip().split(";\n\n") if is_missing else ():
                    connection.exec_driver_sql(statement)
                connection.commit()
            except BaseException:
                connection.rollback()
                raise
            finally:
                if self.dialect == "mysql":
                    connection.invalidate()  # the lock is the session's
        return is_missing

    def batch(self, count: int) -> list[Row]:
        """Read the first ``count`` rows by id, as one snapshot, as under REPEATABLE READ: it is one statement. Raises
        SqlTrouble.

        A transaction around it would be two more answers of PostgreSQL to wait for, on the way of every row. From a
        database that takes no writes nothing is read: rows that cannot be removed would be sent again and again.
        """
        values = {"count": count, "bytes": BATCH_BYTES}
        with sql_trouble("reading the outbox"), self._single.connect() as connection:
            if self.dialect == "sqlite" and "timeout" not in self._engine.url.query:
                connection.execute(_IMPATIENT)
            rows: list[Row] = []
            size = 0
            for *columns, read_only in connection.execute(self._queries["batch"], values):
                if read_only == "on":
                    raise SqlTrouble(
                        "the database of the outbox takes no writes, so nothing is sent: it could not be removed"
                    )
                rows.append(Row(*columns))
                size += rows[-1].size
                if size >= BATCH_BYTES:
                    break
        return rows

    def remove(self, sent: Sequence[tuple[int, str]]) -> None:
        """Delete these rows, each by its id and uid; rows that are gone already are no error. Raises SqlTrouble.

        In PostgreSQL without a COMMIT of its own: a streamer that is cut off before it would hold the rows until the
        server misses it, in two hours.
        """
        if sent:
            with sql_trouble("removing sent rows", canceled=SqlBusy), self._single.begin() as connection:
                self._remove(connection, sent)

    def set_aside(self, refused: Sequence[Refusal]) -> None:
        """Move these rows to refused_log_records, each with its reason. Raises SqlTrouble."""
        with sql_trouble("setting rows aside", canceled=SqlBusy), self._engine.begin() as connection:
            connection.execute(self._queries["set_aside"], [one._asdict() for one in refused])
            self._remove(connection, [(one.id, None) for one in refused])

    def halted(self) -> int:
        with sql_trouble("counting the outbox"), self._single.connect() as connection:
            return int(connection.scalar(self._queries["halted"]) or 0)

    def waiting(self) -> tuple[int, int]:
        with sql_trouble("counting the outbox"), self._engine.connect() as connection:
            staged, refused = connection.execute(self._queries["waiting"]).one()
            return int(staged), int(refused)

    def of_ticket(self, ticket_id: str, most: int = 20) -> TicketRows:
        """Return what the outbox has of a ticket, up to ``most`` refused rows. Raises SqlTrouble, also where the role
        may not read them."""
        with sql_trouble("reading the outbox"), self._engine.connect() as connection:
            about = {"ticket_id": ticket_id}
            try:
                staged, first_id, since = connection.execute(self._queries["of_ticket"], about).one()
                refused = connection.execute(self._queries["refused_of_ticket"], {**about, "count": most}).all()
            except sa.exc.ProgrammingError as refusal:
                raise SqlTrouble(f"reading the outbox: {refusal.orig}") from refusal
            rows = tuple(RefusedRow(row.id, row.reason, _moment(row.refused_at), bool(row.halts)) for row in refused)
            return TicketRows(staged, first_id, _moment(since), rows)

    def close(self) -> None:
        self._engine.dispose()

    def _remove(self, connection: sa.Connection, rows: Sequence[tuple[int, str | None]]) -> None:
        ids, uids = zip(*rows, strict=True)
        values: Any = {"ids": list(ids), "uids": list(uids)}
        if self.dialect == "sqlite":
            values = [{"id": row_id} for row_id in ids]
        elif self.dialect == "mysql":
            sent = [(row_id, uid and uid.encode().hex()) for row_id, uid in rows]
            values = {"sent": orjson.dumps(sent).decode()}
        connection.execute(self._queries["remove"], values)


def _moment(value: Any) -> str:
    return str(value)[:19].replace("T", " ")


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
        check_transactional(driver_of(_begun(connection, statement)))
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
        check_transactional(connection)
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
