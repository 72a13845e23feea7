"""The watchdog's charges, from a call that hangs to the dead letter of what made it hang; on a real Redis."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.actors import Stage, Trouble
from tests.integration.test_quarantine import Process, T, U, V, hand_over, known
from usher.common.protocol.attempts import Attempts
from usher.consumer.execution.pools import BatchCall, BatchCollector
from usher.consumer.execution.watchdog import Watchdog
from usher.consumer.handlers.decorators import BatchOptions
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.lifecycle.process_ending import ProcessEnding

_BATCH = BatchOptions(10, 0.0, 2)


class BatchProcess(Process):
    """A consumer of a batch handler with a deadline; each crash is one that its watchdog makes."""

    def start(self) -> None:
        super().start()
        self._gatherer = BatchCollector(self.now.executor, _BATCH)

    def call(self) -> BatchCall:
        """The next call. A lane may have to be taken twice: a suspect is set apart first."""
        for _ in range(20):
            lanes = self._gatherer.take_now()
            if lanes and (call := BatchCall(self.now.executor, lanes, _BATCH)).messages:
                return call
        raise AssertionError("nothing starts")

    def hang(self, call: BatchCall) -> None:
        """The call runs past its deadline."""
        actor, said = self.now, list[str]()
        ending = ProcessEnding(actor.steps, lambda: True, actor.journal, 0, said.append)
        Watchdog(ending, 2e-6).run_once()
        assert said == [f"{len(call.messages)} handler(s) ran past the deadline"]
        self.crash()


@pytest.mark.parametrize("max_attempts", [2, 3])
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
    hung = 1
    for _ in range(20):
        if not stage.world.pending() or stage.world.dead():
            break
        run = process.begin()
        assert run.is_apart
        if run.message.stream_id == culprit:
            run.die()
            hung += 1
        else:
            run.succeed()
        process.now.flush()
        process.now.lanes.wake_due(1e12)
    stage.finish(process._master, [process.now])
    [letter] = stage.world.dead()
    assert letter[b"usher-id"] == culprit
    assert hung == max_attempts
    assert not stage.world.pending()
    assert known(stage) == {}


def test_one_that_ran_past_its_deadline_and_returned_before_its_process_left_is_no_letter(
    stage: Stage, tmp_path: Path
) -> None:
    """At its last attempt; and the acknowledgement does not arrive."""
    process = BatchProcess(stage, stage.leader(), tmp_path / "a.journal", 1)
    [first] = hand_over(stage, process, T)
    process.hang(process.call())
    run = process.begin()
    run.succeed()
    process.now.flush()
    assert stage.world.dead() == []
    assert stage.history.ids(T) == [first]


def test_what_redis_does_not_hear_of_such_a_call_the_journal_says(stage: Stage, tmp_path: Path) -> None:
    process = BatchProcess(stage, stage.leader(), tmp_path / "a.journal")
    ids = hand_over(stage, process, T, U)
    process.now.link.troubles["charge"] = Trouble.NEVER_SENT
    process.hang(process.call())
    assert known(stage) == dict.fromkeys(ids, Attempts(1, 0, 1))


def test_a_handler_that_raises_just_then_is_counted_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the log says that it hangs, which may take as long as whoever reads the log likes."""
    process = BatchProcess(stage, stage.leader(), None, 5)
    [entry_id] = hand_over(stage, process, T)
    call = process.call()
    monkeypatch.setattr(
        "usher.consumer.execution.watchdog.event",
        lambda *_, **facts: call.end(None, ValueError("late")) if "ticket" in facts else None,
    )
    process.hang(call)
    assert known(stage)[entry_id]._replace(losses=0) == Attempts(1, 0, 1), "once, and not as a failure besides"


def test_time_in_which_nothing_could_run_is_given_back_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept_s, ended, journal = [100.0], [0.0], list[bytes](), Journal(None, "", "c:1", 2)
    monkeypatch.setattr("usher.consumer.execution.watchdog.run_us", lambda: int(1e6 * (now_s[0] + slept_s[0])))
    monkeypatch.setattr("usher.consumer.execution.watchdog.time.monotonic", lambda: now_s[0])
    ending: Any = SimpleNamespace(journal=journal, end=lambda hung, *_: ended.extend(one.stream_id for one in hung))
    watchdog = Watchdog(ending, 10.0)
    for entry_id, began_s in ((b"1-0", 95.0), (b"2-0", 106.5)):
        journal.started(Message(T, entry_id, 7, [], OwnLease(9.0, 0.0)), int(1e6 * began_s))
    for now_s[0] in (100.0, 107.0, 107.9, 108.8, 109.7, 110.6, 110.95):  # due at 101: 6 s were lost
        watchdog.run_once()
        assert not ended
    slept_s[0] = 3600.0  # the machine's, however long
    watchdog.run_once()
    assert not ended
    now_s[0] = 111.1
    watchdog.run_once()
    assert ended == [b"1-0"]
