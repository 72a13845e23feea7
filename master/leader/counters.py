"""Counters of what a leader did, for /metrics. The dispatcher's thread keeps them, at a few additions per batch; any
thread may read them."""

from __future__ import annotations

import time
from collections.abc import Callable

from usher.common.runtime.histograms import LONG_US, DurationHistogram
from usher.master.policy.board.plans import HandOverPlan, HandOverReply

#: Messages per batch whose waiting time is measured, so that a batch of a thousand costs no more than one of ten.
_SAMPLED = 16


class LeaderCounters:
    """Counts since the start of the process, over all epochs in which it led."""

    def __init__(self) -> None:
        self.adoptions = 0
        self.handed_over = 0
        self.batches = 0
        self.lost = 0
        self.recalled = 0
        self.came_back = 0
        self.calls = DurationHistogram()
        self.waits = DurationHistogram(LONG_US)
        self.recoveries = DurationHistogram(LONG_US)
        #: Called with the plan that was handed over and the time at which the call began (nanoseconds since the epoch):
        #: for tracing, if it is on.
        self.on_handed_over: Callable[[HandOverPlan, int], None] | None = None

    def hand_over(self, plan: HandOverPlan, reply: HandOverReply, began_ns: int) -> None:
        """Count a hand_over call that was answered."""
        now_ns = time.time_ns()
        parts = [
            part
            for target, answer in zip(plan.targets, reply.targets, strict=True)
            if answer.state == "OK"
            for part in target.parts
        ]
        self.handed_over += sum(len(part.ids) for part in parts)
        self.batches += 1
        self.calls.add([(now_ns - began_ns) // 1000])
        step = len(parts) // _SAMPLED + 1
        self.waits.add([now_ns // 1000 - 1000 * int(part.ids[0].partition(b"-")[0]) for part in parts[::step]])
        if self.on_handed_over is not None:
            self.on_handed_over(plan, began_ns)

    def recovered(self, seconds: float) -> None:
        """Count a lost consumer whose entries are back, this many seconds after its loss was noticed."""
        self.recoveries.add([int(seconds * 1_000_000)])
