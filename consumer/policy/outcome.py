"""Executions that ended, for how long they wait for more on their way to Redis, and the decision that follows a
failure. Pure: randomness is an argument."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from usher.common.base.backoff import backoff_s
from usher.common.base.errors import LONGEST_WAIT_S, GiveUp, Invalid, RetryLater
from usher.common.base.text import format_error
from usher.common.protocol.attempts import CLEARED, CUT_OFF, GIVEN_UP, NEVER, Attempts
from usher.common.protocol.last_error import NotedError


@dataclass(frozen=True)
class RetryPolicy:
    """The attempts and waits for messages whose handler raised. Times in seconds."""

    max_attempts: int
    base_s: float
    cap_s: float


@dataclass(frozen=True)
class Bury:
    """The decision to make the message a dead letter. Details that are only for people are not compared."""

    reason: str
    error: str
    error_type: str = field(default="", compare=False)
    traceback: str = field(default="", compare=False)
    at: str = field(default="", compare=False)
    noted: bytes = field(default=b"", compare=False)  # the error as it stays noted while its ticket is halted


#: Reason of the dead letter of a message that an operator gave up.
OPERATOR = "operator"
#: And of one that waited when somebody cleared its ticket.
CLEARED_OUT = "cleared"
#: A wait of so many seconds, or more, is not spent here: the ticket is given back, with the time at which it is due.
#: Less is not worth the two hand-overs.
PUT_OFF_S = 2.0


def unended(known: Attempts) -> Bury:
    """Return the dead letter of a message whose attempts are used up before it starts, with the reason as far as it is
    known. The process that made its last start is gone.

    A loss is not a crash: the owner is gone, and it is not known whether the handler ran then.

    >>> unended(Attempts(starts=4, failures=4, crashes=2)).error
    'its process ended while its handler ran (handler_crashed or handler_stuck in the logs)'
    """
    if known.failures == CLEARED:
        return Bury(CLEARED_OUT, "it waited when its ticket was cleared (`usher actions` says by whom, and why)")
    if known.is_given_up:
        return Bury(OPERATOR, "an operator gave it up (`usher actions` says who, and why)")
    if known.crashes:
        error = f"{CUT_OFF} (handler_crashed or handler_stuck in the logs)"
    else:
        error = "its last start failed (see the logs), and its process ended before the dead letter was written"
    return Bury("attempts_exhausted", error)


def decide(raised: BaseException, failures: int, policy: RetryPolicy, rng: random.Random) -> float | Bury:
    """Return what follows from ``raised``, when ``failures`` starts of the message have ended badly, this one included:
    its dead letter, or after how many seconds it starts again; its ticket waits.

    ==================  ====================  =================================
    the handler raised  attempts left         decision
    ==================  ====================  =================================
    anything            given up by operator  Bury("operator")
    Invalid             any                   Bury("invalid")
    GiveUp              any                   Bury("gave_up")
    RetryLater          any                   the wait that it asked for
    anything else       yes                   a backoff
    anything else       no                    Bury("attempts_exhausted")
    ==================  ====================  =================================
    """
    error = format_error(raised)
    if failures >= GIVEN_UP:
        return Bury(OPERATOR, error)
    if isinstance(raised, GiveUp):
        return Bury("invalid" if isinstance(raised, Invalid) else "gave_up", error)
    if isinstance(raised, RetryLater):
        return min(max(0.0, float(raised.after_s)), LONGEST_WAIT_S)
    if failures >= policy.max_attempts:
        return Bury("attempts_exhausted", error)
    return backoff_s(max(1, failures), policy.base_s, policy.cap_s, rng)


#: Number of tickets above which those are forgotten whose next start is not held back any more.
_MANY = 1000


class TicketPace:
    """Times before which nothing more of a ticket starts. May be used by many threads: a ticket has one runner at a
    time, and what two of them forget is the same.

    >>> pace = TicketPace(0.5)
    >>> pace.began(b"T", 10.0)
    >>> pace.due_s(b"T", 10.2), pace.due_s(b"U", 10.2), pace.due_s(b"T", 13.0)
    (12.0, 10.2, 13.0)
    """

    def __init__(self, rate: float) -> None:
        self._every_s = 1 / rate
        self._next_s: dict[bytes, float] = {}
        self._most = _MANY

    def due_s(self, ticket: bytes, now_s: float) -> float:
        """Return when a message of the ticket may start: ``now_s``, or a later time, at which to ask again."""
        return max(now_s, self._next_s.get(ticket, now_s))

    def began(self, ticket: bytes, now_s: float) -> None:
        if len(self._next_s) >= self._most:
            self._next_s = {name: at_s for name, at_s in [*self._next_s.items()] if at_s > now_s}
            self._most = max(_MANY, 2 * len(self._next_s))
        self._next_s[ticket] = now_s + self._every_s


class Settling:
    """Times before which a ticket does not begin: ``settle_s`` after its last message, ``most_s`` after the first that
    was seen here. Times between messages are those of their ids, so no clocks are compared.

    >>> settling = Settling(0.5, 2.0)
    >>> settling.due_s(b"T", b"1000-0", 10.0), settling.due_s(b"T", b"1300-0", 10.5)
    (10.5, 10.8)
    >>> settling.due_s(b"T", b"1300-0", 10.8)
    10.8
    """

    def __init__(self, settle_s: float, most_s: float) -> None:
        self._settle_s, self._most_s = settle_s, most_s
        self._seen: dict[bytes, tuple[int, float, float]] = {}  # the last one's time, as its id and this clock tell it
        self._most = _MANY

    def due_s(self, ticket: bytes, last_id: bytes, now_s: float) -> float:
        """Return when the ticket may begin: ``now_s``, or a later time, at which to ask again."""
        last_ms = int(last_id.partition(b"-")[0])
        before_ms, came_s, first_s = self._seen.pop(ticket, (last_ms, now_s, now_s))
        came_s = min(now_s, came_s + (last_ms - before_ms) / 1000)
        due_s = min(came_s + self._settle_s, first_s + self._most_s)
        if due_s <= now_s:
            return now_s
        if len(self._seen) >= self._most:  # tickets that went elsewhere while they waited
            self._seen = {name: one for name, one in [*self._seen.items()] if one[2] > now_s - 2 * self._most_s}
            self._most = max(_MANY, 2 * len(self._seen))
        self._seen[ticket] = last_ms, came_s, first_s
        return due_s


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
    """An execution that ended, as it was then. Times are microseconds since the epoch. Of one that did not succeed:
    ``outcome`` (a word of common/protocol/run_log.py), the message's attempts after it, and its error; None where a
    dead letter tells that."""

    ticket: bytes
    stream_id: bytes
    fence: int
    attempt: int
    start_us: int
    end_us: int
    flat: Sequence[bytes] = ()
    interrupted: bool = False
    outcome: str = ""
    known: Attempts = NEVER
    error: NotedError | None = None
