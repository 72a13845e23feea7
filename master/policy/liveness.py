"""Liveness: decides what silence on health URLs means. Pure.

The lease in Redis is the authority on life; the health check finds processes that live but do not work or cannot be
reached. It can be wrong in one big way: when the master's own network is the trouble, every consumer looks dead. So
most are never revoked at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class HealthVerdict:
    """Incarnations whose lease is to be revoked now, and whether the silence of most was put down to our own
    network."""

    revoke: tuple[str, ...]
    own_network: bool


def judge(failures: Mapping[str, int], limit: int) -> HealthVerdict:
    """Decide from the number of health answers in a row that each living incarnation failed to give.

    ==============================  =======================================
    silent (failures >= limit)      verdict
    ==============================  =======================================
    none                            nothing
    at most half of all             revoke them
    the only consumer there is      revoke it (nothing to compare with)
    more than half                  nothing; our own network is the suspect
    ==============================  =======================================

    >>> judge({"a:1": 5, "b:1": 0}, 5).revoke
    ('a:1',)
    """
    silent = tuple(sorted(name for name, count in failures.items() if count >= limit))
    if len(silent) > max(1, len(failures) // 2):
        return HealthVerdict((), True)
    return HealthVerdict(silent, False)
