"""What a leader did, as numbers for /metrics. Kept by the dispatcher's thread, a few additions per batch; read by
whoever is asked."""

from __future__ import annotations

import time
from collections.abc import Callable

from usher.common.runtime.histograms import LONG_US, DurationHistogram
from usher.master.policy.board.plans import HandOverPlan, HandOverReply

#: Messages of a batch whose waiting time is looked at, so that a batch of a thousand costs no more than one of ten.
_SAMPLED = 16


class LeaderCounters:
    """Counts since the start of the process, whichever epochs it led in."""

    def __init__(self) -> None:
        self.adoptions = 0
        self.handed_over = 0
        self.batches = 0
        self.lost = 0
        self.calls = DurationHistogram()
        self.waits = DurationHistogram(LONG_US)
        self.recoveries = DurationHistogram(LONG_US)
        #: Called with what was handed over, and when the call began (nanoseconds since the epoch): for tracing, if
        #: there is any.
        self.on_handed_over: Callable[[HandOverPlan, int], None] | None = None

    def hand_over(self, plan: HandOverPlan, reply: HandOverReply, began_ns: int) -> None:
        """A hand_over call was answered."""
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
        """A lost consumer's entries are back, that many seconds after its loss was noticed."""
        self.recoveries.add([int(seconds * 1_000_000)])
