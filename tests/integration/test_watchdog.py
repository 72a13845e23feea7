"""The watchdog's charges, from a call that hangs to the dead letter of what made it hang; on a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.actors import Stage, Trouble
from tests.integration.test_quarantine import Process, T, U, V, hand_over, known
from usher.common.protocol.attempts import Attempts
from usher.consumer.execution.batch_pool import BatchCall, BatchCollector
from usher.consumer.execution.watchdog import Watchdog
from usher.consumer.handlers.decorators import BatchOptions

_BATCH = BatchOptions(10, 0.0, 2)


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


class BatchProcess(Process):
    """A consumer of a batch handler with a deadline; each crash is one that its watchdog makes."""

    def start(self) -> None:
        super().start()
        self.now.executor._limit_s = 1000.0
        self._gatherer = BatchCollector(self.now.lanes, _BATCH)

    def call(self) -> BatchCall:
        """The next call. A lane may have to be taken twice: a suspect is set apart first."""
        for _ in range(20):
            lanes = self._gatherer.take(0.0)
            if lanes and (call := BatchCall(self.now.executor, lanes, _BATCH)).messages:
                return call
        raise AssertionError("nothing starts")

    def hang(self, call: BatchCall) -> None:
        """The call runs past its deadline."""
        for message in call.messages:
            message.deadline = 0.0
        actor, said = self.now, list[str]()
        running, limit_s, run_log_length = actor.executor.running, 1.0, 0
        watch = (
            actor.link,
            actor.steps,
            lambda: list(running.values()),
            lambda: True,
            actor.journal,
            limit_s,
            run_log_length,
        )
        Watchdog(*watch, said.append).run_once()
        assert said == [f"{len(call.messages)} handler(s) ran past USHER_HANDLER_SECONDS"]
        self.crash()


@pytest.mark.parametrize("max_attempts", [1, 2])
@pytest.mark.parametrize("has_journal", [True, False], ids=["journal", "no journal"])
def test_of_a_call_that_hangs_only_the_culprit_is_charged(
    stage: Stage, tmp_path: Path, has_journal: bool, max_attempts: int
) -> None:
    process = BatchProcess(stage, stage.leader(), tmp_path / "a.journal" if has_journal else None, max_attempts)
    ids = hand_over(stage, process, T, U, U, V)
    culprit = ids[3]
    call = process.call()
    assert len(call.messages) == 4
    process.hang(call)
    assert {entry_id: value._replace(losses=0) for entry_id, value in known(stage).items()} == dict.fromkeys(
        ids, Attempts(1, 0, 1)
    )
    hung = 0
    for _ in range(20):
        if not stage.world.pending() or stage.world.dead():
            break
        call = process.call()
        [message] = call.messages
        if message.stream_id == culprit:
            process.hang(call)
            hung += 1
            if hung == max_attempts:
                break
        else:
            call.end(None, None)
            process.now.flush()
    stage.finish(process._master, [process.now])
    [letter] = stage.world.dead()
    assert letter[b"usher-id"] == culprit
    assert hung == max_attempts
    assert not stage.world.pending()
    assert known(stage) == {}


def test_what_redis_does_not_hear_of_such_a_call_charges_nobody(stage: Stage, tmp_path: Path) -> None:
    process = BatchProcess(stage, stage.leader(), tmp_path / "a.journal")
    hand_over(stage, process, T, U)
    process.now.link.troubles["charge"] = Trouble.NEVER_SENT
    process.hang(process.call())
    assert known(stage) == {}
    call = process.call()
    call.end(None, None)
    process.now.flush()
    [first] = hand_over(stage, process, T)
    process.now.link.troubles["charge"] = Trouble.NEVER_SENT
    process.hang(process.call())
    assert known(stage) == {first: Attempts(1, 1)}, "of a call of one the journal says it"


def test_a_handler_that_raises_just_then_is_charged_for_one_failure(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the log says that it hangs, which may take as long as whoever reads the log likes."""
    process = BatchProcess(stage, stage.leader(), None, 5)
    [entry_id] = hand_over(stage, process, T)
    call = process.call()
    monkeypatch.setattr(
        "usher.consumer.execution.watchdog.event",
        lambda *_, **facts: call.end(None, ValueError("late")) if "ticket" in facts else None,
    )
    process.hang(call)
    assert known(stage)[entry_id]._replace(losses=0) == Attempts(1, 1)
