"""Executions that ended, on their way to Redis; and for how long they wait for more. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from usher.common.protocol.attempts import Attempts
from usher.common.protocol.last_error import NotedError

#: Number of messages that is worth a call; with fewer the acker waits for more.
_WORTH_A_CALL = 200
#: A ticket window that lasts for the whole wait, even for a ticket with tens of thousands of messages a second.
_WIDE_WINDOW = 256


def linger(flush_s: float, strict: bool, spare: int, ticket_window: int) -> tuple[float, int]:
    """Return for how long finished messages wait for their acknowledgement, from the last write on, and how many of
    them wait for no more. ``spare``: messages that the consumer may have beyond those that run; ``ticket_window``: most
    messages of one ticket. The leader hands more over when it hears that half of them are done.

    >>> linger(0.02, False, 1992, 512), linger(0.02, True, 12, 512)
    ((0.02, 200), (0.005, 6))
    """
    is_waited_for = strict or ticket_window < _WIDE_WINDOW
    return flush_s / 4 if is_waited_for else flush_s, max(1, min(_WORTH_A_CALL, spare // 2))


class Finished(NamedTuple):
    """An execution that ended, as it was then. Times are microseconds since the epoch."""

    ticket: bytes
    stream_id: bytes
    fence: int
    attempt: int
    start_us: int
    end_us: int
    flat: Sequence[bytes] = ()
    interrupted: bool = False


class FailedAttempt(NamedTuple):
    """A start that did not end in success, and the message's attempts after it. ``outcome`` is a word of
    common/protocol/run_log.py. ``error``: None where a dead letter tells it."""

    run: Finished
    outcome: str
    attempts: Attempts
    error: NotedError | None = None
