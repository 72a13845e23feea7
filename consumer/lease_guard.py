"""Lease guard: ends the process when the lease can have ended, whatever the heartbeat is waiting for. It makes no calls itself."""

from __future__ import annotations

from collections.abc import Callable

from common.service import Service
from consumer.context import OwnLease

#: How often it looks, as a part of the lease.
_LOOK_PART = 0.05


class LeaseGuard(Service):
    """Between two renewals the heartbeat may hang in Redis for longer than the lease; handlers must not run on beside a new owner."""

    name = "guard"

    def __init__(self, lease: OwnLease, on_lost: Callable[[str], None]) -> None:
        super().__init__()
        self._lease = lease
        self._on_lost = on_lost

    def run_once(self) -> float:
        if not self._lease.holds():
            self._lease.end()
            self._on_lost("the lease could not be renewed in time")
        return self._lease.lease_s * _LOOK_PART
