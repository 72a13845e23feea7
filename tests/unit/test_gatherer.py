"""What the gatherer and its watch do in time: pauses before a full work stream, and news of which nobody had said
anything."""

from __future__ import annotations

import pytest

from usher.common.base.errors import RedisTrouble
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis import tracking
from usher.common.redis.client import Link
from usher.common.redis.tracking import ChangeEar
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
    monkeypatch.setattr(gatherer, "_every_s", 30.0)
    monkeypatch.setattr(gatherer, "_pages", lambda: iter(did.append("look") or ()))  # type: ignore[func-returns-value]
    monkeypatch.setattr(gatherer.rounds, "take", lambda: did.append("turn"))
    gatherer.run_once()
    gatherer.run_once()
    gatherer.look_at_all()
    gatherer.run_once()
    monkeypatch.setattr(gatherer.rounds, "take", lambda: Turn((b"a",), 1))
    with pytest.raises(RedisTrouble):
        gatherer.run_once()  # nobody answers its link
    monkeypatch.setattr(gatherer.rounds, "take", lambda: did.append("turn"))
    gatherer.run_once()
    assert did == ["look", "turn", "turn", "look", "turn", "look", "turn"]


class Heard(ChangeEar):
    """Stand in for a connection: say, turn by turn, what Redis would."""

    says: list[bytes] | None = []

    def listen(self) -> list[bytes] | None:
        return self.says


@pytest.fixture
def ear(gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch) -> Heard:
    monkeypatch.setattr(tracking, "_SAID_WITHIN_S", -1.0)

    def heard(changed: list[bytes] | None) -> None:
        if changed is None:
            gatherer.look_at_all()
        else:
            gatherer.changed(changed)

    made = Heard("redis://127.0.0.1:1", "test", [], heard, lambda why: gatherer.poll())
    gatherer.on_unsaid = made.unsaid
    return made


def test_sources_that_are_heard_after_all_do_not_count_as_lost(gatherer: Gatherer, ear: Heard) -> None:
    for _ in range(10):
        gatherer.on_unsaid([b"a"])
        ear.says = []
        ear.run_once()
        ear.says = [b"a"]
        ear.run_once()
    assert not ear.why


@pytest.mark.parametrize("lost", [[b"a", b"b", b"c"], [b"a", b"a", b"a"]])
def test_what_is_never_heard_of_is_asked_for_although_others_are(
    gatherer: Gatherer, ear: Heard, lost: list[bytes]
) -> None:
    for source in lost:
        assert not ear.why
        gatherer.on_unsaid([source])
        ear.says = [b"d"]
        ear.run_once()
    assert ear.why


def test_what_a_sweep_finds_in_the_moment_in_which_it_is_said_does_not_count_as_lost(
    gatherer: Gatherer, ear: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gatherer.changed

    def found_just_before(sources: list[bytes]) -> None:
        if sources:
            gatherer.on_unsaid(sources)  # the gatherer's own thread, which was not told yet
        real(sources)

    monkeypatch.setattr(gatherer, "changed", found_just_before)
    for ear.says in ([b"a"], [], [b"b"], [], [b"c"], []):
        ear.run_once()
    assert not ear.why


def test_what_was_found_before_a_new_connection_does_not_count_as_lost_after_it(
    gatherer: Gatherer, ear: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gatherer.look_at_all

    def found_just_before() -> None:
        gatherer.on_unsaid([b"a", b"b", b"c"])
        real()

    monkeypatch.setattr(gatherer, "look_at_all", found_just_before)
    for ear.says in (None, [b"d"], [b"d"]):
        ear.run_once()
    assert not ear.why


def test_entries_that_may_have_been_lost_while_a_group_was_gone_are_told(
    gatherer: Gatherer, caplog: pytest.LogCaptureFixture
) -> None:
    told = {b"a": "made 3-1 6-1", b"b": "made 3-1"}
    gatherer._say({source: TurnResult(TurnOutcome.OVER, 5, words) for source, words in told.items()}, {})
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings] == ["source_entries_lost"]
