"""When the lease guard looks, and what it does at the end of the lease."""

from __future__ import annotations

import pytest

from tests.clock import Clock, clock_of
from usher.consumer.handlers import message as context
from usher.consumer.handlers.message import OwnLease
from usher.consumer.lifecycle import lease_guard
from usher.consumer.lifecycle.lease_guard import LeaseGuard


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return clock_of(monkeypatch, lease_guard, context)


def test_it_looks_now_and_then_and_at_the_very_end_of_the_lease(clock: Clock) -> None:
    lost: list[str] = []
    lease = OwnLease(10.0, clock.s)
    guard = LeaseGuard(lease, lost.append)
    assert guard.run_once() == 1.0
    clock.s += 9.75
    assert guard.run_once() == pytest.approx(0.25)
    lease.renewed(clock.s)
    clock.s += 5
    assert guard.run_once() == 1.0
    assert not lost
    clock.s += 5
    assert guard.run_once() > 0
    assert lost == ["the lease could not be renewed in time"]
    assert not lease.holds()
