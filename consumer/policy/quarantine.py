"""Quarantine: the company in which a message that may have ended its process runs again, and the messages to charge
when a process has ended. Pure.

A crash among many running handlers proves nothing against any of them, so none is charged at first. Its suspects run
again with less and less company until the next crash has one possible cause. Neighbours leave quarantine by surviving,
the killer by using up its attempts.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from usher.common.protocol.attempts import Attempts

#: Losses (owners that ended without a journal) after which a message runs alone, with its start in Redis first.
_MOST_LOSSES = 3
#: Crashes (unexplained ends of its process) after which it does so too.
_MOST_CRASHES = 2


class Isolation(enum.IntEnum):
    """The isolation in which a message runs: the higher, the less may run in its process beside it."""

    TOGETHER = 0  # anything
    ONE_SUSPECT = 1  # anything but another suspect
    ALONE = 2  # nothing, and its start is written to Redis first


def isolation(known: Attempts, max_attempts: int) -> Isolation:
    """Return the isolation that a message needs, by the attempts that Redis knows of.

    =====================================  =============
    crashes                                answer
    =====================================  =============
    none                                   TOGETHER
    one                                    ONE_SUSPECT
    two, or none is left to find out with  ALONE
    =====================================  =============

    Three losses, the rougher count where there was no journal, count like two crashes.
    """
    if known.losses >= _MOST_LOSSES or known.crashes >= _MOST_CRASHES:
        return Isolation.ALONE
    if not known.crashes:
        return Isolation.TOGETHER
    is_last = min(known.starts, known.failures + known.crashes) + 1 >= max_attempts
    return Isolation.ALONE if is_last else Isolation.ONE_SUSPECT


class Left(NamedTuple):
    """A start that had not ended when its process did. ``before``: the message's attempts, this start included.

    ``is_blamed``: the process itself noted that it ends because of this one. ``start_us``: microseconds since the
    epoch.
    """

    ticket: bytes
    stream_id: bytes
    fence: int
    before: Attempts
    start_us: int
    is_blamed: bool


def charges(left: Sequence[Left], is_explained: bool) -> list[tuple[Left, Attempts]]:
    """Return the attempts to note for the starts that a process left. ``is_explained``: it ended for a reason that it
    knew.

    =======================  ==================================================================================
    the end                  is charged to
    =======================  ==================================================================================
    explained                those that are blamed; the others were only in the way, and get back what was
                             charged before they started
    not, one start was left  that one: nothing else ran that could have ended the process
    not, several were left   none; all of them are suspects
    =======================  ==================================================================================
    """
    if is_explained:
        return [
            (one, one.before._replace(failures=one.before.failures + one.is_blamed))
            for one in left
            if one.is_blamed or one.before.crashes or one.before.losses
        ]
    suspected = [(one, one.before._replace(crashes=one.before.crashes + 1)) for one in left]
    if len(left) == 1:
        return [(one, attempts._replace(failures=one.before.blamed().failures)) for one, attempts in suspected]
    return suspected
