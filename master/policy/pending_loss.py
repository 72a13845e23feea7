"""Loss of pending entries (XACK, XGROUP DELCONSUMER by hand): decide from two counts whether somebody took entries out
of the pending list. Pure.

What the leader has in memory can be more than what is pending for a while, because acknowledgements come before their
reports; what is under ``master`` can not: nobody but the leader ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Missing(NamedTuple):
    """Number of entries under ``master`` that are gone for certain, and whether entries of other names may be."""

    under_master: int
    elsewhere: bool


def missing(parked: int, halted: int, in_flight: Mapping[str, int], pending: Mapping[str, int]) -> Missing:
    """Compare what memory has (``parked``: under ``master``; ``halted``: tickets that wait for an operator;
    ``in_flight``: by incarnation) with the numbers ``pending`` for each name of the group, which are of the same
    moment."""
    elsewhere = pending.get("halted", 0) < halted or any(
        pending.get(name, 0) < number for name, number in in_flight.items()
    )
    return Missing(max(0, parked - pending.get("master", 0)), elsewhere)
