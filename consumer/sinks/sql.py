"""Exactly-once effects in SQLite or PostgreSQL: fence, uid and the handler's own statements are one transaction.

::

    sink = SqlSink("postgresql+psycopg://localhost/shop")      # or any SQLAlchemy engine
    sink.create_tables()                                       # once; or put sink.ddl() into your migrations

    @sink.exactly_once                                         # the handler that USHER_HANDLER names
    def handle(message, session):
        session.execute(...)

    def handle(message):                                       # or, when only a part of it must be exactly once
        with sink.transaction(message) as session:
            session.execute(...)

docs/sinks.md has the outcomes, the isolation that it needs, what it costs, and how long uids are kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from usher.common.base.callables import check_done, unawaitable_reason
from usher.common.base.log import WARNING, event
from usher.common.runtime.fork_guard import ForkGuard
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
from usher.consumer.sinks.outcomes import (
    Duplicate,
    Marked,
    SinkMisused,
    SinkNotNow,
    StaleFence,
    fenced_ticket,
    is_rehearsal,
)

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


WEEK_S = 7 * 86_400.0
#: Old rows are looked for once in so many transactions of a process, and at most so many are removed then: more than
#: were added meanwhile.
PRUNE_EVERY = 500
PRUNE_AT_ONCE = 1000

M = TypeVar("M", bound=Marked)


class SinkSteps:
    """The steps of the sinks for plain and for ``async def`` handlers, on a plain engine: the latter takes them in a
    greenlet, in which a driver's waits are the event loop's. All of one database schema share its tables; ``name``
    tells them apart."""

    def __init__(self, engine: sa.Engine, name: str, keep_s: float) -> None:
        self.engine, dialect = engine, engine.dialect
        if dialect.name not in ("postgresql", "sqlite"):
            raise SinkMisused(f"SqlSink works on PostgreSQL and SQLite; this engine is for {dialect.name}")
        if not abs(keep_s) < 1e12:
            raise SinkMisused(f"keep_s is a number of seconds (it is {keep_s})")
        self._dialect, self._is_postgres = dialect, dialect.name == "postgresql"
        self._name, self._keep_s = name, keep_s
        self._turns, self._checked = itertools.count(1), False
        self.metadata = sa.MetaData()
        number = sa.BigInteger
        self._fences = self._table("usher_fences", sa.Column("fence", number, nullable=False))
        self._uids = self._table("usher_uids", sa.Column("uid", sa.Text, primary_key=True))
        self._now = sa.cast(
            sa.extract("epoch", sa.func.now()) if self._is_postgres else sa.func.strftime("%s", "now"), number
        )
        self._take_fence, self._take_uid = self._statements()

    def _table(self, name: str, column: sa.Column[Any]) -> sa.Table:
        keys = [sa.Column(key, sa.Text, primary_key=True) for key in ("sink", "ticket")]
        at_s = sa.Column("at_s", sa.BigInteger, nullable=False)
        return sa.Table(name, self.metadata, *keys, column, at_s, sa.Index(f"{name}_at", "sink", "at_s"))

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
        return fence.returning(self._fences.c.fence), uid.returning(self._uids.c.uid)  # one row each, if written

    def _admit(self, connection: sa.Connection, message: Marked) -> bool:
        """Run the first statements of a transaction. Return True when the effect may follow, False when it is stored
        already. Raises StaleFence, and SinkNotNow when the statements were cancelled.

        The fence's row comes first because it is the lock of its ticket: from here to the end of the transaction any
        other transaction with this ticket waits, and then sees what we left. A look without the lock would be true at
        its time and wrong at the commit.
        """
        ticket = storable(fenced_ticket(message))
        try:
            fence, uid = {"ticket": ticket, "fence": message.fence}, {"ticket": ticket, "uid": storable(message.uid)}
            if ticket and connection.execute(self._take_fence, fence).first() is None:
                raise StaleFence(message)
            return connection.execute(self._take_uid, uid).first() is not None
        except sa.exc.DBAPIError as error:
            if sqlstate(error) != CANCELED:
                raise
            # These two statements only wait, for a zombie or for a slow disk: that is not the message's fault.
            raise SinkNotNow(_CANCELED_S, f"before the handler was called: {driver_message(error)}") from error

    def _enter(self, connection: sa.Connection, message: Marked) -> bool:
        """Begin the sink's transaction; return True when the effect may follow.

        A rehearsal looks at no fence and no uid, so that stored messages can be rehearsed. It changes no row, but
        writes: SQLite begins its transaction only with a write, and a CREATE TABLE before it would stay. Missing tables
        and an engine in AUTOCOMMIT mode show before the effect; and the savepoint is set once it is known that a
        transaction runs: without one, SQLite would begin one with this.
        """
        rehearses = is_rehearsal(message)
        if rehearses:
            connection.execute(sa.delete(self._fences).where(sa.false()))
            connection.execute(sa.delete(self._uids).where(sa.false()))
        is_new = rehearses or self._admit(connection, message)
        if not self._checked and commits_by_itself(driver_of(connection)):
            raise SinkMisused(
                "the engine is in AUTOCOMMIT mode, in which fencing token, uid and effect are three transactions; leave"
                " isolation_level out"
            )
        self._checked = True
        if rehearses:
            connection.execute(sa.text(f"SAVEPOINT {_SAVEPOINT}"))
        return is_new

    def _end_rehearsal(self, connection: sa.Connection) -> None:
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

    def _check_unbroken(self, connection: sa.Connection) -> None:
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

    @contextlib.contextmanager
    def admitted(self, message: Marked) -> Iterator[sa.orm.Session | None]:
        """Give a session in the transaction that also holds fence and uid; None for a repeat."""
        with plain_errors(), self.engine.connect() as connection, connection.begin() as transaction:
            if not self._enter(connection, message):
                with ForkGuard():
                    yield None  # the fence is stored nevertheless
            else:
                # commit() flushes pending objects; the transaction does not belong to the session.
                with sa.orm.Session(bind=connection, join_transaction_mode="rollback_only") as session:
                    with ForkGuard():  # forked children would commit, or roll back, on our connection
                        yield session
                    session.commit()
                if not transaction.is_active:
                    raise SinkMisused(
                        "the sink's transaction was ended inside of it; leave commit and rollback to the sink, and"
                        " raise to undo everything"
                    )
                self._check_unbroken(connection)
                if is_rehearsal(message):
                    self._end_rehearsal(connection)
                    transaction.rollback()
                    return
        if next(self._turns) % PRUNE_EVERY == 0:
            try:
                self.prune()
            except Exception as problem:  # the effect is stored, so the message must not fail any more
                event("sink_prune_failed", level=WARNING, error=f"{type(problem).__name__}: {problem}"[:500])

    def create_tables(self) -> None:
        """Create the sink's tables where they are missing; safe in many processes at once. Later versions only add
        columns with a default."""
        with plain_errors(), self.engine.begin() as connection:
            if self._is_postgres:
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _CREATING})
            for statement in self._creation():
                connection.execute(statement)

    def ddl(self) -> str:
        return "".join(f"{str(one.compile(dialect=self._dialect)).strip()};\n" for one in self._creation())

    def _creation(self) -> list[Any]:
        tables = self.metadata.sorted_tables
        made: list[Any] = [sa.schema.CreateTable(table, if_not_exists=True) for table in tables]
        return made + [sa.schema.CreateIndex(index, if_not_exists=True) for table in tables for index in table.indexes]

    def prune(self, at_once: int = PRUNE_AT_ONCE) -> int:
        """Remove up to ``at_once`` rows of each table that need not be kept, and return how many. The sink does it by
        itself now and then."""
        removed = 0
        with plain_errors(), self.engine.begin() as connection:
            for table in (self._fences, self._uids):
                too_old = table.c.at_s < self._now - int(self._keep_s)
                columns = table.primary_key.columns
                picked = sa.select(*columns).where(table.c.sink == self._name, too_old).order_by(table.c.at_s)
                # Locked rows are skipped: a ticket that comes back at this moment keeps its fence.
                picked = picked.limit(at_once).with_for_update(skip_locked=True)
                removed += connection.execute(sa.delete(table).where(sa.tuple_(*columns).in_(picked))).rowcount
        return removed


def storable(text: str) -> str:
    """Return ``text`` in a form that any database can store in a key: itself, or its digest. Different texts stay
    different."""
    octets = text.encode("utf-8", "surrogateescape")
    is_plain = "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)
    if is_plain and len(octets) <= _LONGEST_TEXT and not text.startswith(_DIGEST):
        return text
    return _DIGEST + hashlib.sha256(octets).hexdigest()


_UNDEFINED_TABLE = "42P01"
#: Class of the SQLSTATEs of a server whose disk or memory is full, or that has no free connection.
_SHORT = "53"
#: Contention is over in a moment; for a server that is away the consumer finds a pause (consumer/execution/outages.py).
_CONTENTION_S, _AWAY_S = (0.02, 0.2), (0.5, 2.0)
_RNG = random.Random()  # not the shared one: a handler may seed that, and all processes would ask in step


class SqlSink(SinkSteps):
    """Exactly-once effects through one SQLAlchemy engine (see the module). Threads may share it.

    ``name``: one per use, see the module. ``keep_s``: seconds for which uids and fences are kept. Raises SinkMisused
    for databases other than PostgreSQL and SQLite.
    """

    def __init__(self, engine: sa.Engine | str, name: str = "default", *, keep_s: float = WEEK_S) -> None:
        if isinstance(engine, str):
            made = sa.engine.make_url(engine)
            # No bound on the pool: it has as many connections as handlers run at a time.
            pool = {"pool_size": 0} if made.get_backend_name() == "postgresql" else {}
            engine = sa.create_engine(made, connect_args=postgres_args(made), **pool)
        if not isinstance(engine, sa.Engine) or engine.dialect.is_async:
            raise SinkMisused(
                "SqlSink takes a URL or an Engine of a plain driver; for an AsyncEngine there is"
                " usher.consumer.sinks.sql_async.AsyncSqlSink"
            )
        super().__init__(engine, name, keep_s)

    @contextlib.contextmanager
    def transaction(self, message: Marked) -> Iterator[sa.orm.Session]:
        """Give a session in the transaction that also holds the fence and the uid; it is committed at the end of the
        block, unless the block raises.

        For a repeat the block ends at the first use of the session. In a rehearsal (``message.is_rehearsal``) the block
        runs whatever is stored, and all of it is rolled back at its end. Raises StaleFence, SinkNotNow and SinkMisused.
        """
        with self.admitted(message) as session:
            if session is not None:
                yield session
                return
            try:
                yield cast("sa.orm.Session", _NotAgain(message))
            except Duplicate:
                pass  # its effect is stored

    def exactly_once(self, handle: Callable[[M, sa.orm.Session], Any]) -> Callable[[M], None]:
        """Make ``handle(message, session)`` a handler of one argument that runs in ``transaction``, and never for a
        repeat. A decorator; raises SinkMisused for a function that cannot run so."""
        if inspect.iscoroutinefunction(handle):
            raise SinkMisused("this handler is `async def`: use usher.consumer.sinks.sql_async.AsyncSqlSink")
        if kind := unawaitable_reason(handle):
            raise SinkMisused(f"this handler is {kind}")

        @functools.wraps(handle)
        def handle_once(message: M) -> None:
            with self.admitted(message) as session:
                if session is not None:
                    check_done(handle(message, session), SinkMisused, WAIT)

        handle_once.__signature__ = ONE_MESSAGE  # type: ignore[attr-defined]
        return handle_once


#: Checked inside the transaction, so that no uid is stored without the effect.
WAIT = "let it wait for the result itself"
#: load_handler checks it: one argument, whatever the decorated function takes.
ONE_MESSAGE = inspect.Signature([inspect.Parameter("message", inspect.Parameter.POSITIONAL_OR_KEYWORD)])


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise database errors as SinkNotNow or SinkMisused, where they are that."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        state = ""
        if isinstance(error, sa.exc.DBAPIError):
            told, state = driver_message(error), sqlstate(error)
            if (state == _UNDEFINED_TABLE and "usher_" in told) or told.startswith("no such table: usher_"):
                raise SinkMisused(
                    f"{told}: call sink.create_tables() once, or run what sink.ddl() prints in your migrations"
                ) from error
        found = passing(error)
        if found is None:
            raise
        lasts = found.is_away or state.startswith(_SHORT)
        pause_s = _RNG.uniform(*(_AWAY_S if lasts else _CONTENTION_S))
        how = "cannot be reached: the transaction may or may not have happened" if found.is_away else "is busy"
        raise SinkNotNow(pause_s, f"the database {how} ({found.told})", lasts) from error


class _NotAgain:
    """A stand-in for the session of a repeat: any use raises Duplicate."""

    def __init__(self, message: Marked) -> None:
        self._usher_message = message

    def __getattr__(self, name: str) -> Any:
        raise Duplicate(
            f"the effect of {self._usher_message.uid!r} of ticket {fenced_ticket(self._usher_message)!r} is stored"
            " already"
        )

    def __enter__(self, *_: object) -> Any:
        return self.__getattr__("")

    # Python looks these up on the class: ``with session:``, ``row in session`` and ``list(session)`` are uses too.
    __contains__ = __iter__ = __exit__ = __enter__
