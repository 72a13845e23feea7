"""A consumer that the masters refuse: it says why, and ends if waiting cannot help."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.crew import Crew

pytestmark = pytest.mark.process


def test_a_consumer_whose_health_url_no_master_may_ask_ends_with_the_reason(folder: Path, redis_url: str) -> None:
    with Crew(folder, redis_url) as crew:
        crew.start_master()
        crew.start_consumer("c1", "usher.deploy.demo.handlers:record", USHER_ADVERTISE_URL="http://10.9.8.7:1")
        assert crew.processes.pop("c1").wait(30) == 2
        told = (crew.logs / "c1").read_text()
        assert "registration_refused" in told and "health_url: " in told and "USHER_HEALTH_HOSTS" in told
        assert "consumer_refused" in (crew.logs / "master-1").read_text()
