"""Heartbeat: it renews the lease every third of its life, as long as the program makes progress.

A lease that was lost or revoked is never taken up again: the process leaves, and its successor is a new incarnation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble
from usher.common.base.log import event
from usher.common.redis.client import Link
from usher.common.runtime.service import Service
from usher.consumer.handlers.message import OwnLease
from usher.consumer.lifecycle.owner_scripts import OwnerScripts

log = logging.getLogger(__name__)

#: A renewal that failed is tried again after this part of the lease.
_RETRY_PART = 0.1


class Heartbeat(Service):
    """The service that keeps the lease. It calls ``on_lost`` once, when the lease cannot be kept."""

    name = "beat"

    def __init__(
        self,
        link: Link,
        steps: OwnerScripts,
        lease: OwnLease,
        works: Callable[[], bool],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._link = link
        self._steps = steps
        self._lease = lease
        self._works = works
        self._on_lost = on_lost
        self.stalls_after_s = max(10.0, lease.lease_s)

    def run_once(self) -> float:
        if not self._works():
            event(log, "lease_not_renewed", level=logging.WARNING, why="the program makes no progress")
            return self._retry_s()
        start = b"-"
        while start:  # each call extends the lease, and touches some of the pending entries
            sent_s = now_s()
            try:
                renewal = self._steps.renew(int(self._lease.lease_s * 1000), start)
            except RedisTrouble as trouble:
                event(log, "lease_not_renewed", level=logging.WARNING, why=str(trouble))
                return self._retry_s()
            if renewal.state in ("", "revoked"):
                self._lost("it was revoked" if renewal.state else "it had ended")
                return self._lease.lease_s
            self._lease.renewed(sent_s)
            self.made_progress()
            start = renewal.following
        return self._lease.lease_s / 3

    def _retry_s(self) -> float:
        return self._lease.lease_s * _RETRY_PART  # the lease guard decides when it is too late

    def _lost(self, why: str) -> None:
        self._lease.end()
        self._on_lost(f"the lease is lost: {why}")

    def on_end(self) -> None:
        self._link.close()
