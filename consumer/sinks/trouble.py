"""What a handler's message becomes of an error of the database: one that passes lets it come again, uncharged."""

from __future__ import annotations

import random

import sqlalchemy as sa

from common.sql_trouble import Why, passing, plain, sqlstate
from consumer.sinks.outcomes import SinkMisused, SinkNotNow

_UNDEFINED_TABLE = "42P01"
#: Contention is over in a moment; a server that is away is not asked by every ticket at once.
_CONTENTION_S = (0.02, 0.2)
_AWAY_S = (0.5, 2.0)


def translated(error: Exception) -> Exception:
    """What to raise instead of ``error``, which the database or its driver raised."""
    if isinstance(error, sa.exc.DBAPIError):
        told = plain(error)
        if (sqlstate(error) == _UNDEFINED_TABLE and "usher_" in told) or told.startswith("no such table: usher_"):
            return SinkMisused(f"{told}: call sink.create_tables() once, or run what sink.ddl() prints in your migrations")
    found = passing(error)
    if found is None:
        return error
    return SinkNotNow(f"{found.why.value}: {found.told}", random.uniform(*(_AWAY_S if found.why is Why.AWAY else _CONTENTION_S)))
