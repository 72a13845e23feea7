"""The two tables of a SQL sink, and the statements on them. No connection is opened here.

As ``SqlSink.ddl()`` prints it for PostgreSQL::

    CREATE TABLE IF NOT EXISTS usher_fences (
        sink TEXT NOT NULL, ticket TEXT NOT NULL, fence BIGINT NOT NULL, at_s BIGINT NOT NULL,
        PRIMARY KEY (sink, ticket));
    CREATE TABLE IF NOT EXISTS usher_uids (
        sink TEXT NOT NULL, ticket TEXT NOT NULL, uid TEXT NOT NULL, at_s BIGINT NOT NULL,
        PRIMARY KEY (sink, ticket, uid));
    CREATE INDEX IF NOT EXISTS usher_fences_at ON usher_fences (sink, at_s);
    CREATE INDEX IF NOT EXISTS usher_uids_at ON usher_uids (sink, at_s);

``at_s`` is a time of the database's own clock, in seconds since the epoch: old rows are removed by one clock, however
wrong the consumers' clocks are.
"""

from __future__ import annotations

import hashlib
from typing import Any

from usher.common.base.extras import how_to_install
from usher.common.sql.alchemy import sa
from usher.common.sql.errors import CANCELED, driver_message, is_autocommit, sqlstate
from usher.consumer.sinks.outcomes import Marked, SinkMisused, SinkNotNow, StaleFence, fenced_ticket

#: Longest text that is stored as it is. Longer or odd ones (NUL, which PostgreSQL refuses; bytes that are not UTF-8)
#: are stored as their digest.
_LONGEST_TEXT = 256
_DIGEST = "sha256:"
#: For pg_advisory_xact_lock: creating tables that may be there is not safe against itself in PostgreSQL.
_CREATING = 0x75736865720001
#: Seconds until the next try after a statement of ours that took too long, and was cancelled.
_CANCELED_S = 0.5
#: A savepoint that is gone if the transaction of a rehearsal was ended in a way that neither SQLAlchemy nor the sink
#: sees: a COMMIT as SQL, or the driver's own.
_SAVEPOINT = "usher_rehearsal"
_NO_SUCH_SAVEPOINT = "3B001"


class SinkTables:
    """The tables of all sinks of one database schema; ``name`` tells the sinks apart. The methods run in the caller's
    transaction."""

    def __init__(self, dialect: str, name: str, schema: str | None) -> None:
        if dialect not in ("postgresql", "sqlite"):
            raise SinkMisused(f"SqlSink works on PostgreSQL and SQLite; this engine is for {dialect}")
        self._is_postgres = dialect == "postgresql"
        self._name = name
        self.metadata = sa.MetaData(schema=schema)
        text, number = sa.Text, sa.BigInteger
        self._fences = sa.Table(
            "usher_fences",
            self.metadata,
            sa.Column("sink", text, primary_key=True),
            sa.Column("ticket", text, primary_key=True),
            sa.Column("fence", number, nullable=False),
            sa.Column("at_s", number, nullable=False),
            sa.Index("usher_fences_at", "sink", "at_s"),
        )
        self._uids = sa.Table(
            "usher_uids",
            self.metadata,
            sa.Column("sink", text, primary_key=True),
            sa.Column("ticket", text, primary_key=True),
            sa.Column("uid", text, primary_key=True),
            sa.Column("at_s", number, nullable=False),
            sa.Index("usher_uids_at", "sink", "at_s"),
        )
        self._now = sa.cast(
            sa.extract("epoch", sa.func.now()) if self._is_postgres else sa.func.strftime("%s", "now"), number
        )
        self._take_fence, self._take_uid = self._statements()

    def _statements(self) -> tuple[Any, Any]:
        insert: Any = sa.dialects.postgresql.insert if self._is_postgres else sa.dialects.sqlite.insert
        own = {"sink": self._name, "ticket": sa.bindparam("ticket"), "at_s": self._now}
        fence = insert(self._fences).values(**own, fence=sa.bindparam("fence"))
        fence = fence.on_conflict_do_update(
            index_elements=["sink", "ticket"],
            set_={"fence": fence.excluded.fence, "at_s": fence.excluded.at_s},
            where=self._fences.c.fence <= fence.excluded.fence,
        )
        uid = insert(self._uids).values(**own, uid=sa.bindparam("uid")).on_conflict_do_nothing()
        counted = {"preserve_rowcount": True}
        return fence.execution_options(**counted), uid.execution_options(**counted)

    def admit(self, connection: sa.Connection, message: Marked) -> bool:
        """Run the first statements of a transaction. Return True when the effect may follow, False when it is stored
        already. Raises StaleFence, and SinkNotNow when the statements were cancelled.

        The fence's row comes first because it is the lock of its ticket: from here to the end of the transaction any
        other transaction with this ticket waits, and then sees what we left. A look without the lock would be true at
        its time and wrong at the commit.
        """
        ticket = storable(fenced_ticket(message))
        try:
            if ticket and not _wrote(connection.execute(self._take_fence, {"ticket": ticket, "fence": message.fence})):
                raise StaleFence(message)
            return _wrote(connection.execute(self._take_uid, {"ticket": ticket, "uid": storable(message.uid)}))
        except sa.exc.DBAPIError as error:
            if sqlstate(error) != CANCELED:
                raise
            # These two statements only wait, for a zombie or for a slow disk: that is not the message's fault.
            raise SinkNotNow(f"before the handler was called: {driver_message(error)}", _CANCELED_S) from error

    def begin_rehearsal(self, connection: sa.Connection) -> bool:
        """Start the transaction of a rehearsal, in place of ``admit``. It looks at no fence and no uid, so that stored
        messages can be rehearsed. Return True.

        It changes no row, but it is a write: SQLite begins its transaction only with a write, and a CREATE TABLE before
        it would stay. Missing tables and an engine in AUTOCOMMIT mode show before the effect.
        """
        connection.execute(sa.delete(self._fences).where(sa.false()))
        connection.execute(sa.delete(self._uids).where(sa.false()))
        return True

    def mark_rehearsal(self, connection: sa.Connection) -> None:
        """Set the savepoint, once it is known that a transaction runs: without one, SQLite would begin one with
        this."""
        connection.execute(sa.text(f"SAVEPOINT {_SAVEPOINT}"))

    def end_rehearsal(self, connection: sa.Connection) -> None:
        """Check a rehearsal before its rollback. Raise the errors that the commit would, for constraints that
        PostgreSQL checks only then; and SinkMisused when there is nothing to roll back any more."""
        try:
            connection.execute(sa.text(f"RELEASE SAVEPOINT {_SAVEPOINT}"))
        except sa.exc.DBAPIError as error:
            if sqlstate(error) != _NO_SUCH_SAVEPOINT and "no such savepoint" not in str(error.orig):
                raise
            raise SinkMisused(
                "the sink's transaction was ended inside of it by the handler itself, so what it ran before that may be"
                " STORED, although this is a rehearsal; leave commit and rollback to the sink"
            ) from error
        if self._is_postgres:
            connection.execute(sa.text("SET CONSTRAINTS ALL IMMEDIATE"))

    def check_transactional(self, connection: sa.Connection) -> None:
        """Raise SinkMisused when each statement is a transaction of its own. Call it after the first write of a
        transaction."""
        if is_autocommit(connection):
            raise SinkMisused(
                "the engine is in AUTOCOMMIT mode, in which fencing token, uid and effect are three transactions; leave"
                " isolation_level out"
            )

    def check_unbroken(self, connection: sa.Connection) -> None:
        """Raise SinkMisused when a statement of this transaction has failed. PostgreSQL answers COMMIT with a rollback
        then, and no driver calls it an error."""
        if not self._is_postgres:
            return
        status = getattr(getattr(connection.connection.dbapi_connection, "info", None), "transaction_status", None)
        if status is None:
            connection.execute(sa.text("SELECT 1"))  # refused in a failed transaction
        elif int(status) == 3:  # libpq's PQTRANS_INERROR
            raise SinkMisused(
                "a statement failed inside the sink's transaction and the handler went on: nothing of it can be stored"
                " any more; let the error out, or use `with session.begin_nested()` around what may fail"
            )

    def create(self, connection: sa.Connection) -> None:
        """Create the tables and indexes that are missing."""
        if self._is_postgres:
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _CREATING})
        for statement in self._creation():
            connection.execute(statement)

    def ddl(self, dialect: sa.Dialect) -> str:
        """Return the statements of ``create`` as text, for migrations."""
        return "".join(f"{str(statement.compile(dialect=dialect)).strip()};\n" for statement in self._creation())

    def _creation(self) -> list[Any]:
        tables = self.metadata.sorted_tables
        made: list[Any] = [sa.schema.CreateTable(table, if_not_exists=True) for table in tables]
        return made + [sa.schema.CreateIndex(index, if_not_exists=True) for table in tables for index in table.indexes]

    def prune(self, connection: sa.Connection, keep_s: float, keep_most: int | None, at_once: int) -> int:
        """Remove at most ``at_once`` rows of each table that are older than ``keep_s`` seconds, and uids beyond
        ``keep_most`` (to the second; if the clock went back, not before it is where it was). Return how many."""
        removed = 0
        for table in (self._fences, self._uids):
            is_ours = table.c.sink == self._name
            too_old = table.c.at_s < self._now - int(keep_s)
            if table is self._uids and keep_most is not None:
                youngest_first = sa.select(table.c.at_s).where(is_ours).order_by(table.c.at_s.desc())
                beyond = table.c.at_s < youngest_first.offset(max(0, keep_most - 1)).limit(1).scalar_subquery()
                # While there are rows of a future time, the clock has gone back (a failover), and it is unknown which
                # rows are the newest.
                too_old = sa.or_(too_old, sa.and_(beyond, youngest_first.limit(1).scalar_subquery() <= self._now))
            keys = sa.tuple_(*table.primary_key.columns)
            # Locked rows are skipped: a ticket that comes back at this moment keeps its fence.
            picked = sa.select(*table.primary_key.columns).where(is_ours, too_old).order_by(table.c.at_s).limit(at_once)
            removed += connection.execute(
                sa.delete(table).where(keys.in_(picked.with_for_update(skip_locked=True)))
            ).rowcount
        return removed


def _wrote(result: Any) -> bool:
    """Return whether the statement wrote its row. Raises SinkMisused where that is unknown: taken for a repeat, the
    message would be done without its effect, and a lower fence would pass. SQLAlchemy before 2.0.28 reports -1 for an
    INSERT."""
    count = result.rowcount
    if count not in (0, 1):
        raise SinkMisused(
            f"SQLAlchemy {sa.__version__} reports {count} written rows where 0 or 1 is expected, so nothing is stored;"
            " 2.0.28 or later is needed: " + how_to_install("sql")
        )
    return bool(count)


def storable(text: str) -> str:
    """Return ``text`` in a form that any database can store in a key: itself, or its digest. Different texts stay
    different."""
    octets = text.encode("utf-8", "surrogateescape")
    is_plain = "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)
    if is_plain and len(octets) <= _LONGEST_TEXT and not text.startswith(_DIGEST):
        return text
    return _DIGEST + hashlib.sha256(octets).hexdigest()
