"""Lease guard: it ends the process when the lease can have ended, whatever the heartbeat is waiting for. It makes no
calls itself."""

from __future__ import annotations

from collections.abc import Callable

from usher.common.base.clock import now_s
from usher.common.runtime.service import Service
from usher.consumer.handlers.message import OwnLease

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
