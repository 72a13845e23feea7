"""Idle sweep: finds pending entries that no living consumer works on, with XAUTOCLAIM, and takes them in.

It has no thread: the dispatcher gives it turns, because it changes the board. A sweep on a thread of its own could
bring a ticket's older entries to ``master`` unseen, while the dispatcher hands over a newer one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from usher.common.base.log import event
from usher.master.leader.leader_scripts import LeaderScripts, Rejected
from usher.master.leader.validation import partition_entries
from usher.master.policy.board.board import Board

log = logging.getLogger(__name__)

#: COUNT of XAUTOCLAIM, which looks at ten times as many entries per call; so the dispatcher stops for a millisecond,
#: not for a second.
_COUNT = 100
#: Least time between two steps: a million parked entries must not keep the dispatcher busy looking at them.
_STEP_S = 0.02


class IdleSweep:
    """Sweep through the pending list with a cursor, one step per turn; a pass begins every ``every_s`` seconds."""

    def __init__(self, min_idle_ms: int, every_s: float) -> None:
        self._min_idle_ms = min_idle_ms
        self._every_s = every_s
        self._cursor = b"0-0"
        self._next_s = 0.0

    def turn(
        self, board: Board, steps: LeaderScripts, known: Sequence[str], now_s: float, rejected: list[Rejected]
    ) -> bool:
        """Take one step, if one is due. Return True when it found something to plan. Entries that can be handed to no
        consumer are added to ``rejected``."""
        if now_s < self._next_s:
            return False
        swept = steps.sweep(known, self._min_idle_ms, self._cursor, _COUNT)
        self._cursor = swept.cursor
        if swept.strays:
            former = sorted({owner.decode(errors="replace") for _, owner in swept.strays})
            event(
                log, "orphaned_entries_found", level=logging.WARNING, count=len(swept.strays), former=",".join(former)
            )
            strays = [found for found, _ in swept.strays]
            usable, unusable = partition_entries(strays)
            board.take_in(usable)
            board.learn(steps.marks.read(strays))
            rejected += unusable
        if swept.gone:
            event(log, "pending_entries_deleted", level=logging.WARNING, count=len(swept.gone), first=swept.gone[0])
        self._next_s = now_s + (self._every_s if swept.cursor == b"0-0" else _STEP_S)
        return bool(swept.strays)

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next step is due."""
        return max(0.0, self._next_s - now_s)
