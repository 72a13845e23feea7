"""Heartbeat: it renews the lease every third of its life, as long as the program makes progress.

A lease that was lost or revoked is never taken up again: the process leaves, and its successor is a new incarnation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble
from usher.common.base.log import event
from usher.common.runtime.service import Service
from usher.consumer.handlers.message import OwnLease
from usher.consumer.lifecycle.owner_scripts import OwnerScripts

log = logging.getLogger(__name__)

#: A renewal that failed is tried again after this part of the lease.
_RETRY_PART = 0.1
#: So often one of the renewals, which are every third of the lease, also touches what is pending.
_TOUCHES = 3


class Heartbeat(Service):
    """The service that keeps the lease. It calls ``on_lost`` once, when the lease cannot be kept."""

    name = "beat"

    def __init__(
        self,
        steps: OwnerScripts,
        lease: OwnLease,
        works: Callable[[], bool],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._steps, self._link = steps, steps.link
        self._lease = lease
        self._works = works
        self._on_lost = on_lost
        self._renewals = 0
        self.stalls_after_s = max(10.0, lease.lease_s)

    def run_once(self) -> float:
        if not self._works():
            event(log, "lease_not_renewed", level=logging.WARNING, why="the program makes no progress")
            return self._retry_s()
        start = b"-"
        while start:  # each call extends the lease, and touches some of the pending entries
            sent_s = now_s()
            lease_ms, left_ms = int(1000 * self._lease.lease_s), int(1000 * (self._lease.ends_s - sent_s))
            try:
                if self._renewals % _TOUCHES:
                    state, start = self._steps.extend(lease_ms, left_ms), b""
                else:
                    state, _, start = self._steps.renew(lease_ms, start, left_ms)
            except RedisTrouble as trouble:
                event(log, "lease_not_renewed", level=logging.WARNING, why=str(trouble))
                return self._retry_s()
            if state in ("", "revoked"):
                self._lease.end()
                self._on_lost(f"the lease is lost: {'it was revoked' if state else 'it had ended'}")
                return self._lease.lease_s
            self._lease.renewed(sent_s)
            self.made_progress()
        self._renewals += 1
        return self._lease.lease_s / 3

    def _retry_s(self) -> float:
        return self._lease.lease_s * _RETRY_PART  # the lease guard decides when it is too late


#: Time between looks, as a part of the lease; it also looks when the lease ends. The clock of our waits stands still
#: while the machine sleeps, the lease's clock does not.
_LOOK_PART = 0.1


class LeaseGuard(Service):
    """The service that watches the end of the lease. The heartbeat may hang in a call to Redis for longer than the
    lease; handlers must not run on beside a new owner."""

    name = "guard"

    def __init__(self, lease: OwnLease, on_lost: Callable[[str], None]) -> None:
        super().__init__()
        self._lease = lease
        self._on_lost = on_lost

    def run_once(self) -> float:
        look_s, left_s = self._lease.lease_s * _LOOK_PART, self._lease.ends_s - now_s()
        if left_s > 0:
            return min(look_s, left_s)
        self._lease.end()
        self._on_lost("the lease could not be renewed in time")
        return look_s


#: No handler ended for so long: that is worth a word, unless it is usual here. It is told again at twice the time.
LONG_S = 60.0
#: Times the longest pause that ended by itself: so much longer is unusual.
_UNUSUAL = 3


_LOOK_S = 1.0


class ProgressWatch(Service):
    """The service that looks at the handlers from outside. ``handlers``: how many have ended so far, and how many
    run. Long ones are legitimate: nothing is done about them. ``look``: what else is looked at every second."""

    name = "progress"

    def __init__(self, handlers: Callable[[], tuple[int, int]], look: Callable[[], object]) -> None:
        super().__init__()
        self._handlers, self._look = handlers, look
        self._ended = 0
        self._since_s = now_s()
        self._usual_s = 0.0
        self._told_s = 0.0
        self.still_s = 0.0  # for how long no handler has ended, while some ran

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self._is_unusual:
            return ()
        return (f"no handler has ended for {self.still_s:.0f} s; {self._handlers()[1]} run",)

    @property
    def _is_unusual(self) -> bool:
        return self.still_s >= max(LONG_S, _UNUSUAL * self._usual_s)

    def run_once(self) -> float:
        self._look()
        (ended, running), now = self._handlers(), now_s()
        if ended != self._ended:
            self._usual_s = max(self._usual_s, self.still_s)
        if ended != self._ended or not running:
            self._ended, self._since_s, self._told_s = ended, now, 0.0
        self.still_s = now - self._since_s
        if self._is_unusual and self.still_s >= 2 * self._told_s:
            self._told_s = self.still_s
            way_out = "see what they wait for (py-spy dump, usher tickets explain); USHER_HANDLER_SECONDS bounds it"
            for_s = round(self.still_s)
            event(log, "handlers_stand_still", level=logging.WARNING, for_s=for_s, running=running, way_out=way_out)
        return _LOOK_S
