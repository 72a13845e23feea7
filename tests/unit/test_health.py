from __future__ import annotations

from dataclasses import dataclass

import pytest

from usher.common.runtime.service import Health, judge, stalled


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
        (Seen(), ()),
        (Seen(last_turn_s=92.0), ()),
        (Seen(alive=False), ("intake is not running",)),
        (Seen(alive=False, trouble="NotNow: no"), ("intake is not running",)),
        (Seen(last_turn_s=91.5), ("intake made no progress for 10.5 s",)),
        (Seen(last_turn_s=91.5, trouble="NotNow: no"), ("intake made no progress for 10.5 s",)),
        (Seen(trouble="NotNow: Redis is loading"), ("intake: NotNow: Redis is loading",)),
    ],
)
def test_each_row_of_the_table(service: Seen, reasons: tuple[str, ...]) -> None:
    assert judge([service], now_s=102.0) == Health(reasons)


def test_a_program_is_well_only_if_all_its_services_are() -> None:
    assert judge([Seen(), Seen(name="beat")], 102.0).ok
    sick = judge([Seen(alive=False), Seen(name="beat", trouble="late")], 102.0)
    assert not sick.ok
    assert sick.reasons == ("intake is not running", "beat: late")


def test_services_stand_still_when_no_turn_ended_for_a_lease_longer_than_health_allows() -> None:
    assert stalled([Seen(), Seen(last_turn_s=None), Seen(last_turn_s=89.0)], now_s=102.0, lease_s=3.0) == ""
    told = stalled([Seen(last_turn_s=88.5), Seen(name="beat", alive=False, last_turn_s=80.0)], 102.0, 3.0)
    assert told == "intake made no progress for 13.5 s; beat made no progress for 22.0 s"
