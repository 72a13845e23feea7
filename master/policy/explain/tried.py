"""Tell how often a message was tried, and in what that ended last: one form for lists, pages and explanations. Pure."""

from __future__ import annotations

from typing import Any

from usher.common.base.text import pluralize, time_of_day
from usher.common.protocol.attempts import CUT_OFF, NEVER, Attempts
from usher.common.protocol.last_error import LastError


def tried(known: Attempts, error: LastError | None) -> dict[str, Any]:
    """Return, for a row, the starts (``attempts``), how many of them are charged of ``max_attempts``, and the last
    error; None for what is not known."""
    error = last_error(known, error)
    if known == NEVER and error is not None:
        known = Attempts(error.starts, error.charged)
    return {
        "attempts": known.starts,
        "charged": known.failures,
        "max_attempts": (error.most if error is not None else 0) or None,
        "last_error": None if error is None else error._asdict() | {"told": error.told},
    }


def told_alike(error: LastError | None) -> str:
    """Say that a ticket waits because others fail like it; "" for one that does not."""
    if error is None or not error.alike:
        return ""
    many = pluralize(error.alike, "ticket fails", "tickets fail alike")
    since = f"{many} since {time_of_day(error.since_ms)}, {error.told}"
    return f"waits, uncharged: {since}; one at a time is tried, a second after the other, on each consumer"


def last_error(known: Attempts, error: LastError | None) -> LastError | None:
    """Return the error of the last start. Nothing is noted where a start ended with its process."""
    if known.crashes and (error is None or error.starts < known.starts):
        most, first_ms = (error.most, error.since_ms) if error is not None else (0, 0)
        return LastError(CUT_OFF, starts=known.starts, charged=known.failures, most=most, since_ms=first_ms)
    return error
