"""The last error of an unfinished message, kept beside its attempts in ``...:noted:errors``. Pure.

A field per stream id holds the head, one JSON object, a field ``t`` and the id the end of the traceback, and a field
``h`` and the id the executions (common/protocol/run_log.py). All are bounded in bytes; where very many messages fail,
the script that writes them (lua/owner/charge.lua) keeps heads only, or nothing. Whoever reads an attempt without an
error shows that it is not known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from usher.common.protocol.attempts import CUT_OFF, ENDED, RAN_PAST

#: Bytes of an error's text, of its type or place, and of the end of its traceback.
_TEXT, _WORD, _TRACEBACK = 400, 200, 3000
#: Name of the error of a handler that ran past its deadline.
HUNG = "most likely hung"
#: First byte of the field that holds a traceback, and of that with executions.
TRACEBACK, RUNS = b"t", b"h"


class LastError(NamedTuple):
    """The error of one start. ``error``: type and text. ``at``: file and line of the handler's own frame. ``starts``:
    the number of the start that it ended; ``charged``: how many are charged, of ``most``; ``at_ms``: when it was, by
    the consumer's clock; ``since_ms``: when the message failed first (lua/owner/charge.lua keeps it). ``alike``: so
    many tickets failed alike since then, and wait uncharged; 0: not so."""

    error: str
    error_type: str = ""
    at: str = ""
    starts: int = 0
    charged: int = 0
    most: int = 0
    at_ms: int = 0
    alike: int = 0
    since_ms: int = 0

    @property
    def told(self) -> str:
        """Return what tells it from others, and what anybody may see: its name and place.

        >>> LastError("KeyError: 'x'", "KeyError", "shop/orders.py:41").told, LastError(f"{ENDED} (by hand)").told
        ('KeyError in shop/orders.py:41', 'an operator ended its run')
        """
        ended = ENDED if self.error.startswith(ENDED) else ""
        return told(error_name(self.error_type, self.error) or ended, self.at)


def error_name(error_type: str, error: str) -> str:
    """Return the name of an error: its type; for a message that hung or took its process with it, and so raised
    nothing, words for that."""
    if error_type:
        return error_type
    return CUT_OFF if error.startswith(CUT_OFF) else HUNG if error.startswith(RAN_PAST) else ""


def told(name: str, at: str) -> str:
    """Return name and place of an error; "" for one that has neither."""
    return f"{name or 'error'} in {at}" if at else name


class NotedError(NamedTuple):
    """An error as it is kept, and executions to be kept with it; each may be empty."""

    head: bytes = b""
    traceback: bytes = b""
    runs: bytes = b""


def encode(error: LastError, traceback: str = "") -> NotedError:
    """Return the values of an error, cut to what is kept."""
    cut = error._replace(
        error=_cut(error.error, _TEXT),
        error_type=_cut(error.error_type, _WORD),
        at=_cut(error.at, _WORD),
        since_ms=error.since_ms or error.at_ms,
    )
    whole = traceback.encode("utf-8", "backslashreplace")
    return NotedError(
        orjson.dumps(cut._asdict()), whole if len(whole) <= _TRACEBACK else b"...\n" + whole[-_TRACEBACK:]
    )


def decode(value: bytes | None) -> LastError | None:
    try:
        known: dict[str, Any] = orjson.loads(value or b"null")
        numbers = (int(known[name]) for name in ("starts", "charged", "most", "at_ms", "alike", "since_ms"))
        return LastError(str(known["error"]), str(known["error_type"]), str(known["at"]), *numbers)
    except (ValueError, TypeError, KeyError):
        return None


def _cut(text: str, most: int) -> str:
    return text.encode("utf-8", "backslashreplace")[:most].decode(errors="ignore")
