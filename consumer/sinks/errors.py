"""The translation of database errors for a handler: after a passing error the message is tried again, uncharged."""

from __future__ import annotations

import random
import threading

from usher.common.base.clock import now_s
from usher.common.sql.alchemy import sa
from usher.common.sql.errors import PassingCause, driver_message, passing, sqlstate
from usher.consumer.sinks.outcomes import SinkMisused, SinkNotNow

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
