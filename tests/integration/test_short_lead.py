"""The shortest leader leases that may be set: a leader that has nothing to do keeps the lead, and one that is stuck
loses it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from tests.integration.routers import until
from tests.nightly import more
from usher.common.observability.metrics import Metrics
from usher.common.redis.client import Link
from usher.master.assembly.program import LeaderServices, MasterContext
from usher.master.leader.elector import Elector
from usher.master.settings import MasterSettings

_IDLE_S = 3.5


@pytest.fixture(params=[0.5, *more(0.6, 1.0)])
def lead(request: pytest.FixtureRequest, redis_url: str, link: Link) -> Iterator[tuple[LeaderServices, Elector]]:
    """A master that leads an empty stream, with all of its threads."""
    leading = LeaderServices(
        MasterContext(MasterSettings(redis_url=redis_url, leader_lease_seconds=request.param), redis_url), Metrics()
    )
    elector = leading.elector("http://one")
    services = [*leading.services, elector]
    for service in services:
        service.start()
    yield leading, elector
    for service in services:
        service.stop()
    assert [service.name for service in services if not service.join(5.0)] == []
    leading.close()


def test_an_idle_leader_keeps_the_lead(lead: tuple[LeaderServices, Elector], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    leading, elector = lead
    time.sleep(_IDLE_S)
    assert (elector.elections, leading.dispatcher.counts.adoptions) == (1, 1)
    assert leading.dispatcher.leads
    assert "leadership_not_renewed" not in caplog.text


def test_a_leader_that_is_stuck_loses_the_lead(lead: tuple[LeaderServices, Elector], link: Link) -> None:
    leading, elector = lead
    let_go = threading.Event()
    until(lambda: leading.dispatcher.leads)
    leading.dispatcher._take_events = lambda: let_go.wait(20.0)  # type: ignore[assignment,method-assign]
    try:
        until(lambda: not link.call("EXISTS", leading._place.keys.leader))
        assert elector._not_extended is not None
    finally:
        let_go.set()
