"""What follows from how a handler ended. Pure: randomness is an argument."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from usher.common.base.backoff import backoff_s
from usher.common.base.errors import GiveUp, RetryLater
from usher.common.base.text import format_error
from usher.common.protocol.attempts import CUT_OFF, RAN_PAST, Attempts


@dataclass(frozen=True)
class RetryPolicy:
    """Attempts and waits for messages whose handler raised."""

    max_attempts: int
    base_s: float
    cap_s: float


@dataclass(frozen=True)
class TryAgain:
    """Start the message again after ``wait_s``; its ticket waits."""

    wait_s: float


@dataclass(frozen=True)
class Bury:
    """The message becomes a dead letter. What tells a person more than ``error`` does is no part of the decision."""

    reason: str
    error: str
    error_type: str = field(default="", compare=False)
    traceback: str = field(default="", compare=False)


#: Longest wait that can be asked for, of ten years: longer ones are no times.
_LONGEST_WAIT_S = 10 * 365 * 86_400.0


def unended(known: Attempts) -> Bury:
    """Of a message whose attempts are used up before it starts: why, as far as that is known. The process that made its
    last start is gone.

    A loss is no crash: the owner is gone, and whether the handler ran then is not known.

    >>> unended(Attempts(starts=4, failures=4, crashes=2)).error
    'its process ended while its handler ran (handler_crashed or handler_stuck in the logs)'
    """
    if known.crashes:
        error = f"{CUT_OFF} (handler_crashed or handler_stuck in the logs)"
    else:  # what hung alone is charged as a plain failure; what raised would have left its own letter, had its process lived a moment longer
        error = (
            f"{RAN_PAST} (handler_stuck in the logs), or its process ended before the end of its last start was stored"
        )
    return Bury("attempts_exhausted", error)


def decide(raised: BaseException, failures: int, policy: RetryPolicy, rng: random.Random) -> TryAgain | Bury:
    """What follows from ``raised``, when ``failures`` starts of the message ended badly so far, this one included.

    ==================  ====================  =================================
    the handler raised  attempts left         decision
    ==================  ====================  =================================
    GiveUp              any                   Bury("gave_up")
    RetryLater          any                   TryAgain after what it asked for
    anything else       yes                   TryAgain with backoff
    anything else       no                    Bury("attempts_exhausted")
    ==================  ====================  =================================
    """
    error = format_error(raised)
    if isinstance(raised, GiveUp):
        return Bury("gave_up", error)
    if isinstance(raised, RetryLater):
        return TryAgain(min(max(0.0, float(raised.after_s)), _LONGEST_WAIT_S))
    if failures >= policy.max_attempts:
        return Bury("attempts_exhausted", error)
    return TryAgain(backoff_s(failures, policy.base_s, policy.cap_s, rng))
