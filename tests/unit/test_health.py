"""Health, as the consumer's routes tell it; what is told while a server drains is in test_serving.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.doors import consumer_program
from usher.common.runtime.service import judge, stalled
from usher.consumer.web import create_app


@dataclass
class Seen:
    """A service as health sees it."""

    name: str = "intake"
    stalls_after_s: float = 10.0
    last_turn_s: float | None = 100.0
    alive: bool = True
    trouble: str | None = None


@pytest.mark.parametrize(
    ("service", "reasons"),
    [
        (Seen(), []),
        (Seen(last_turn_s=92.0), []),
        (Seen(alive=False), ["intake is not running"]),
        (Seen(alive=False, trouble="NotNow: no"), ["intake is not running"]),
        (Seen(last_turn_s=91.5), ["intake made no progress for 10.5 s"]),
        (Seen(last_turn_s=91.5, trouble="NotNow: no"), ["intake made no progress for 10.5 s"]),
        (Seen(trouble="NotNow: Redis is loading"), ["intake: NotNow: Redis is loading"]),
    ],
)
def test_a_consumer_is_well_only_if_all_its_services_are(service: Seen, reasons: list[str]) -> None:
    late = Seen(name="beat", trouble="late")
    for others, more in ([], []), ([Seen(name="beat")], []), ([late], ["beat: late"]):
        app = create_app(consumer_program(lambda others=others: judge([service, *others], 102.0), name="c1"))  # type: ignore[arg-type]
        why = {"status": "failing", "reasons": reasons + more} if reasons + more else {"status": "ok"}
        for path in ("/api/health", "/api/health/ready"):
            answered = app.test_client().get(path)
            assert (answered.status_code, answered.json) == (503 if reasons + more else 200, {**why, "name": "c1"})
        assert app.test_client().get("/api/health/live").json == {"status": "alive"}


def test_a_consumer_that_drains_is_alive_and_well_but_not_ready() -> None:
    program = consumer_program(lambda: judge([Seen()], 102.0))
    program.stopped = True
    client = create_app(program).test_client()  # type: ignore[arg-type]
    assert [client.get(f"/api/health{path}").status_code for path in ("", "/live", "/ready")] == [200, 200, 503]
    assert client.get("/api/health/ready").json == {"status": "draining"}


def test_services_stand_still_when_no_turn_ended_for_a_lease_longer_than_health_allows() -> None:
    assert stalled([Seen(), Seen(last_turn_s=None), Seen(last_turn_s=89.0)], now_s=102.0, lease_s=3.0) == ""
    told = stalled([Seen(last_turn_s=88.5), Seen(name="beat", alive=False, last_turn_s=80.0)], 102.0, 3.0)
    assert told == "intake made no progress for 13.5 s; beat made no progress for 22.0 s"
