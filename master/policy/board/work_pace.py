"""WorkPace: decides how many messages a consumer is given at a time, in seconds of its own work. Pure.

What has been handed over stays where it is until it is done or recalled, however many consumers start afterwards. So a
consumer is given about as much as it finishes in ``work_s`` seconds, and never less than keeps its handlers busy.
"""

from __future__ import annotations

import math

#: Tickets that a consumer may have per handler slot, however slow it is: one runs, one is ready to run.
_TICKETS_PER_SLOT = 2
#: Slow start: for each message that is finished, the window may grow by so many.
_GROWTH = 3


class WorkPace:
    """The window of one consumer, which follows the rate at which it finishes messages while it has any.

    The rate is the quotient of two sums that decay alike, with ``work_s`` as their time constant: messages finished,
    and seconds with work.
    """

    __slots__ = ("_busy_s", "_capacity", "_finished", "_since_s", "_work_s", "tickets", "window")

    def __init__(self, slots: int, capacity: int, work_s: float) -> None:
        """Begin a pace. ``slots``: handlers that run at once. ``capacity``: most messages, whatever the rate.
        ``work_s``: infinite for no other bound than the capacity."""
        self.tickets = _TICKETS_PER_SLOT * slots
        self._capacity = capacity
        self._work_s = work_s
        self._finished = self._busy_s = 0.0
        self._since_s: float | None = None  # it has work whose begin nobody saw: at a takeover
        #: Messages that the consumer may have.
        self.window = capacity if work_s == math.inf else min(capacity, self.tickets)

    def began(self, now_s: float) -> None:
        """Note that the consumer, which had nothing, is given something: seconds before it count for nothing."""
        self._since_s = now_s

    def finished(self, count: int, now_s: float) -> None:
        """Note that so many messages were finished since the last call, or since ``began``."""
        if self._work_s == math.inf:
            return
        since_s, self._since_s = self._since_s, now_s
        if since_s is None:
            return
        busy_s = max(0.0, now_s - since_s)
        decay = math.exp(-busy_s / self._work_s)
        self._finished = self._finished * decay + count
        self._busy_s = self._busy_s * decay + busy_s
        done_s = self._busy_s / self._finished  # per message
        target = self._capacity if done_s * self._capacity <= self._work_s else int(self._work_s / done_s)
        self.window = min(self._capacity, max(self.tickets, min(target, self.window + _GROWTH * count)))
