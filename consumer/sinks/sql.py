"""Exactly-once effects in SQLite or PostgreSQL: fence, uid and the handler's own statements are one transaction.

::

    from usher import SqlSink

    sink = SqlSink("postgresql+psycopg://localhost/shop")      # or any SQLAlchemy engine
    sink.create_tables()                                       # once; or put sink.ddl() into your migrations

    @sink.exactly_once                                         # the handler that USHER_HANDLER names
    def handle(message, session):
        session.execute(text("UPDATE accounts SET total = total + :n WHERE id = :id"),
                        {"n": int(message.fields["amount"]), "id": message.ticket_id})

    def handle(message):                                       # or, when only a part of it must be exactly once
        with sink.transaction(message) as session:
            session.execute(...)

Outcomes
--------
==============================================  ====================================================================
the uid is known in this ticket (a repeat)      counts as done: ``exactly_once`` does not call the function; in the
                                                ``with`` form the first use of the session ends the block quietly,
                                                and the handler goes on behind it
a higher fence was seen (we are a zombie)       StaleFence; nothing is stored, the ticket belongs to its new owner
the function raises                             everything is rolled back, and the message is tried again as usual
deadlock, serialization failure, lock timeout   SinkNotNow: everything is rolled back; the consumer starts the
                                                message again soon, uncharged. Nothing is retried in here: a handler
                                                only ever sees a new attempt
a statement_timeout that ends our statements    SinkNotNow; one that ends the function's is an error like any other
the database is away                            SinkNotNow; the ticket waits, others go on; this never makes the
                                                message a dead letter
the connection breaks at the COMMIT             SinkNotNow, since the result is unknown; the next try finds the uid,
                                                or stores the effect
a rehearsal (``message.is_rehearsal``)          the statements run, whatever uid and fence are stored, and all is
                                                rolled back at the end (except numbers that a sequence has given
                                                out); until then it holds its locks like any other transaction
==============================================  ====================================================================

Isolation
---------
READ COMMITTED (PostgreSQL's default) is enough, since no read decides anything: the fence's row is written first, with
the condition in the statement (``ON CONFLICT ... DO UPDATE ... WHERE fence <= :fence``). That locks the row of the
ticket until the end of the transaction, and a transaction that waited for it compares with what was committed
meanwhile. REPEATABLE READ and SERIALIZABLE work too, with more SinkNotNow. SQLite's writers take turns anyway.

A zombie that stands still *inside* its transaction holds that lock, and the new owner of the ticket waits for it. Let
PostgreSQL end it: ``create_engine(url, connect_args={"options": "-c idle_in_transaction_session_timeout=30s -c
lock_timeout=10s"})``. SQLite is a file, with no server to do that: all its writers wait until the zombie wakes up or is
killed.

The cost is two more statements in the transaction (two round trips), and one row per message for as long as it is kept.

Retention
---------
Uids and fences are removed when they are older than ``keep_s`` seconds (7 days), uids also beyond ``keep_most``, a few
now and then after a transaction, by the database's clock. A repeat that comes later is handled again; so keep them for
longer than the longest time after which a message can come again: its age in the stream, the last resend of a producer
or an outbox, a dead letter's redrive. A uid counts within its ticket. A message without a ``uid`` field has its stream
id as uid, which recognises the same entry again, but not a second one that a producer sent.

One ``name`` per use: two handlers (or streams) that keep their effects in one database must not share what they have
seen.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from usher.common.base.callables import unawaitable_reason, unfinished_kind
from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.common.runtime.fork_guard import ForkGuard
from usher.common.sql.alchemy import sa
from usher.common.sql.engine import postgres_args
from usher.common.sql.errors import PassingCause, driver_message, passing, sqlstate
from usher.consumer.sinks.outcomes import Duplicate, Marked, SinkMisused, SinkNotNow, fenced_ticket, is_rehearsal
from usher.consumer.sinks.tables import SinkTables

_UNDEFINED_TABLE = "42P01"
#: Class of the SQLSTATEs of a server whose disk or memory is full, or that has no free connection.
_SHORT = "53"
#: Contention is over in a moment; a server that is away must not be asked by every ticket at once.
_CONTENTION_S = (0.02, 0.2)
_AWAY_S = (0.5, 2.0)
#: Most questions a second of all tickets of a sink together to a server that stays away; but none of them waits longer
#: than the second value, in seconds, nor longer than the server has been away.
_ASKS_PER_S = 20
_LONGEST_S = 30.0
_RNG = random.Random()  # not the shared one: a handler may seed that, and all processes would ask in step


class Away:
    """The schedule by which the messages of a sink ask again for a database that is away. Threads may share it.

    With a constant pause a few thousand tickets would ask a thousand times a second, for hours: that takes a core, and
    a log line each time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s: float | None = None
        self._last_due_s = 0.0

    def pause_s(self) -> float:
        with self._lock:
            now = now_s()
            self._since_s = self._since_s or now
            pause = max(_RNG.uniform(*_AWAY_S), self._last_due_s + 1 / _ASKS_PER_S - now)
            longest = min(_LONGEST_S, max(_AWAY_S[1], now - self._since_s))
            if pause > longest:
                return _RNG.uniform(longest / 2, longest)
            self._last_due_s = now + pause
            return pause

    def over(self) -> None:
        """Reset: a transaction was committed."""
        if self._since_s is not None:
            with self._lock:
                self._since_s, self._last_due_s = None, 0.0


def translated(error: Exception, away: Away) -> Exception:
    """Return the error to raise instead of ``error``, which the database or its driver raised."""
    state = ""
    if isinstance(error, sa.exc.DBAPIError):
        told, state = driver_message(error), sqlstate(error)
        if (state == _UNDEFINED_TABLE and "usher_" in told) or told.startswith("no such table: usher_"):
            return SinkMisused(
                f"{told}: call sink.create_tables() once, or run what sink.ddl() prints in your migrations"
            )
    found = passing(error)
    if found is None:
        return error
    lasts = found.why is PassingCause.AWAY or state.startswith(_SHORT)
    return SinkNotNow(f"{found.why.value}: {found.told}", away.pause_s() if lasts else _RNG.uniform(*_CONTENTION_S))


log = logging.getLogger(__name__)

WEEK_S = 7 * 86_400.0
#: Old rows are looked for once in so many transactions of a process, and at most so many are removed then: more than
#: were added meanwhile.
PRUNE_EVERY = 500
PRUNE_AT_ONCE = 1000

M = TypeVar("M", bound=Marked)


class SqlSink:
    """Exactly-once effects through one SQLAlchemy engine (see the module). Threads may share it.

    ``name``: one per use, see the module. ``keep_s``: seconds for which uids and fences are kept; ``keep_most``: most
    uids kept, None for no bound. Raises SinkMisused for databases other than PostgreSQL and SQLite.
    """

    def __init__(
        self,
        engine: sa.Engine | str,
        name: str = "default",
        *,
        keep_s: float = WEEK_S,
        keep_most: int | None = None,
        schema: str | None = None,
    ) -> None:
        self.engine = _engine_of(engine) if isinstance(engine, str) else engine
        if not isinstance(self.engine, sa.Engine) or self.engine.dialect.is_async:
            raise SinkMisused(
                "SqlSink takes a URL or an Engine of a plain driver; for an AsyncEngine there is"
                " usher.consumer.sinks.sql_async.AsyncSqlSink"
            )
        self._tables = SinkTables(self.engine.dialect.name, name, schema)
        self._keep_s = keep_s
        self._keep_most = keep_most
        self._away = Away()
        self._turns = itertools.count(1)
        self._checked = False

    @property
    def metadata(self) -> sa.MetaData:
        """Return the tables for a migration tool that compares them (Alembic's ``target_metadata``)."""
        return self._tables.metadata

    def create_tables(self) -> None:
        """Create the sink's tables where they are missing; safe in many processes at once. Later versions only add
        columns with a default."""
        with plain_errors(self._away), self.engine.begin() as connection:
            self._tables.create(connection)

    def ddl(self) -> str:
        """Return the statements of ``create_tables`` as text, in this engine's dialect."""
        return self._tables.ddl(self.engine.dialect)

    @contextlib.contextmanager
    def transaction(self, message: Marked) -> Iterator[sa.orm.Session]:
        """Give a session in the transaction that also holds the fence and the uid; it is committed at the end of the
        block, unless the block raises.

        For a repeat the block ends at the first use of the session. In a rehearsal (``message.is_rehearsal``) the block
        runs whatever is stored, and all of it is rolled back at its end. Raises StaleFence, SinkNotNow and SinkMisused.
        """
        with self._admitted(message) as session:
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
            with self._admitted(message) as session:
                if session is not None:
                    check_done(handle(message, session))

        handle_once.__signature__ = ONE_MESSAGE  # type: ignore[attr-defined]
        return handle_once

    def prune(self, at_once: int = PRUNE_AT_ONCE) -> int:
        """Remove up to ``at_once`` rows of each table that need not be kept, and return how many. The sink calls it by
        itself now and then."""
        with plain_errors(self._away), self.engine.begin() as connection:
            return self._tables.prune(connection, self._keep_s, self._keep_most, at_once)

    @contextlib.contextmanager
    def _admitted(self, message: Marked) -> Iterator[sa.orm.Session | None]:
        """Give a session, or None for a repeat."""
        with plain_errors(self._away), self.engine.connect() as connection, connection.begin() as transaction:
            rehearses = is_rehearsal(message)
            is_new = self._tables.begin_rehearsal(connection) if rehearses else self._tables.admit(connection, message)
            if not self._checked:
                self._tables.check_transactional(connection)
                self._checked = True
            if rehearses:
                self._tables.mark_rehearsal(connection)
            if not is_new:
                with ForkGuard():
                    yield None  # the fence is stored nevertheless
            else:
                with session_in(connection) as session:
                    with ForkGuard():  # forked children would commit, or roll back, on our connection
                        yield session
                    session.commit()  # flushes pending objects; the transaction does not belong to the session
                if not transaction.is_active:
                    raise SinkMisused(ENDED_INSIDE)
                self._tables.check_unbroken(connection)
                if rehearses:
                    self._tables.end_rehearsal(connection)
                    transaction.rollback()
                    return
        if next(self._turns) % PRUNE_EVERY == 0:
            self._prune_quietly()

    def _prune_quietly(self) -> None:
        """Prune, and only log an error: the effect is stored, so the message must not fail any more."""
        try:
            self.prune()
        except Exception as problem:
            event(log, "sink_prune_failed", level=logging.WARNING, error=f"{type(problem).__name__}: {problem}"[:500])


ENDED_INSIDE = (
    "the sink's transaction was ended inside of it; leave commit and rollback to the sink, and raise to undo everything"
)
#: load_handler checks it: one argument, whatever the decorated function takes.
ONE_MESSAGE = inspect.Signature([inspect.Parameter("message", inspect.Parameter.POSITIONAL_OR_KEYWORD)])


def _engine_of(url: str) -> sa.Engine:
    made = sa.engine.make_url(url)
    return sa.create_engine(made, connect_args=postgres_args(made))


def session_in(connection: sa.Connection) -> sa.orm.Session:
    """Return a session whose commit() does not end the transaction: that belongs to the sink."""
    return sa.orm.Session(bind=connection, join_transaction_mode="rollback_only")


def check_done(result: object) -> None:
    """Raise SinkMisused, inside the transaction, when the uid would be stored without the effect."""
    if kind := unfinished_kind(result):
        raise SinkMisused(
            f"the handler returned {kind!r}, so nothing of the message was done, and nothing is stored: let it wait for"
            " the result itself"
        )


@contextlib.contextmanager
def plain_errors(away: Away) -> Iterator[None]:
    """Raise database errors as SinkNotNow or SinkMisused, where they are that."""
    try:
        yield
        away.over()
    except sa.exc.SQLAlchemyError as error:
        told = translated(error, away)
        if told is error:
            raise
        raise told from error


class _NotAgain:
    """A stand-in for the session of a repeat: any use raises Duplicate."""

    def __init__(self, message: Marked) -> None:
        self._usher_message = message

    def __getattr__(self, name: str) -> Any:
        raise Duplicate(
            f"the effect of {self._usher_message.uid!r} of ticket {fenced_ticket(self._usher_message)!r} is stored"
            " already"
        )

    # Python looks these up on the class: ``with session:``, ``row in session`` and ``list(session)`` are uses too.

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")

    def __exit__(self, *ended: object) -> None:
        """Do nothing: it is never called, but ``with`` requires it."""

    def __contains__(self, row: object) -> bool:
        return bool(self.__getattr__("__contains__"))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__getattr__("__iter__"))
