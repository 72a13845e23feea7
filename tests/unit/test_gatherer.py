"""What the gatherer and its watch do in time: pauses before a full work stream, and news of which nobody had said
anything."""

from __future__ import annotations

import pytest

from usher.common.base.errors import RedisTrouble
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.master.policy.fair_queue import Turn, TurnOutcome, TurnResult
from usher.master.sources.gatherer import Gatherer


@pytest.fixture
def gatherer() -> Gatherer:
    link = Link("redis://127.0.0.1:1", "test")  # never connected
    return Gatherer(link, Keys("usher:{g}", "g"), SourceSelection.parse("a,b,c,d"), "ticket_id", 1000)


def test_a_full_work_stream_that_stands_still_is_asked_more_and_more_rarely(
    gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(gatherer._stop, "wait", pauses.append)
    for _ in range(20):
        gatherer._next_pause_s(True, b"5-1")
    assert pauses == sorted(pauses) and pauses[0] <= 0.01
    assert all(pause <= sum(pauses[:at]) + 0.01 for at, pause in enumerate(pauses)), (
        "no longer than it stood still already"
    )
    assert 1.0 <= pauses[-1] <= 2.0
    gatherer._next_pause_s(True, b"6-1")
    assert pauses[-1] <= 0.01, "it moves"


def test_new_names_are_looked_for_before_the_first_turn_after_a_gap(
    gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    monkeypatch.setattr(gatherer, "look_for_new", lambda _link, _asker: did.append("look"))
    monkeypatch.setattr(gatherer._rounds, "take", lambda: did.append("turn"))
    gatherer.run_once()
    gatherer.run_once()
    gatherer.look_at_all()
    gatherer.run_once()
    monkeypatch.setattr(gatherer._rounds, "take", lambda: Turn((b"a",), 1))
    with pytest.raises(RedisTrouble):
        gatherer.run_once()  # nobody answers its link
    monkeypatch.setattr(gatherer._rounds, "take", lambda: did.append("turn"))
    gatherer.run_once()
    assert did == ["look", "turn", "turn", "look", "turn", "look", "turn"]


def test_entries_that_may_have_been_lost_while_a_group_was_gone_are_told(
    gatherer: Gatherer, caplog: pytest.LogCaptureFixture
) -> None:
    gatherer._say(
        [(b"a", TurnResult(TurnOutcome.OVER, 5, "made 3-1 6-1")), (b"b", TurnResult(TurnOutcome.OVER, 5, "made 3-1"))]
    )
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings] == ["source_entries_lost"]
