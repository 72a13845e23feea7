"""Which errors of a database say "not now": the transaction did not happen, or nobody knows, and the same message is to come again."""

from __future__ import annotations

import random
import sqlite3

import sqlalchemy as sa

from consumer.sinks.outcomes import SinkMisused, SinkNotNow

#: SQLSTATEs (PostgreSQL, appendix A) after which the whole transaction is worth another try: serialization, deadlock, lock timeout,
#: the server stops or starts, no connection is free, the session was ended because it stood still.
_NOT_NOW = frozenset({"40001", "40P01", "55P03", "57P01", "57P02", "57P03", "57P05", "53300", "25P03", "25P04"})
_CONNECTION = "08"
_UNDEFINED_TABLE = "42P01"
#: Contention is over in a moment; a server that is away is not asked by every ticket at once.
_CONTENTION_S = (0.02, 0.2)
_AWAY_S = (0.5, 2.0)


def translated(error: Exception) -> Exception:
    """What to raise instead of ``error``, which the database or its driver raised."""
    if isinstance(error, sa.exc.TimeoutError):
        return SinkNotNow(f"no connection of the pool is free: {error}", random.uniform(*_CONTENTION_S))
    if not isinstance(error, sa.exc.DBAPIError):
        return error
    told = str(error.orig).strip().partition("\n")[0]
    state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None) or ""
    if (state == _UNDEFINED_TABLE and "usher_" in told) or told.startswith("no such table: usher_"):
        return SinkMisused(f"{told}: call sink.create_tables() once, or run what sink.ddl() prints in your migrations")
    if _is_busy(error.orig):
        return SinkNotNow(f"the database is locked by another transaction: {told}", random.uniform(*_CONTENTION_S))
    if state in _NOT_NOW and not error.connection_invalidated:
        return SinkNotNow(f"the database gave this transaction up ({state}): {told}", random.uniform(*_CONTENTION_S))
    is_away = error.connection_invalidated or state.startswith(_CONNECTION) or state in _NOT_NOW
    # libpq has no code for a connection that could not be made.
    if is_away or (isinstance(error, sa.exc.OperationalError) and not state and not isinstance(error.orig, sqlite3.Error)):
        return SinkNotNow(f"the database cannot be reached, and the last transaction may or may not have happened: {told}", random.uniform(*_AWAY_S))
    return error


def _is_busy(raised: BaseException | None) -> bool:
    if not isinstance(raised, sqlite3.OperationalError):
        return False
    name = getattr(raised, "sqlite_errorname", "")  # Python 3.11
    return name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or "is locked" in str(raised)
