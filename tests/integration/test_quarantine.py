"""From the start of a handler that ends its process to its dead letter, over journals, scripts, lanes and successors;
on a real Redis."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

from tests.integration.actors import ConsumerActor, MasterActor, Run, Stage, Trouble
from tests.integration.test_charge import attempts
from usher.common.base.errors import GiveUp, RetryLater
from usher.common.protocol.attempts import Attempts
from usher.consumer.execution.lanes import Lane
from usher.consumer.handlers.message import Message
from usher.consumer.isolation.process import CallResult, How, Piece
from usher.consumer.lifecycle.journal import read_journal
from usher.consumer.lifecycle.process_ending import note_crash

T, U, V = b"T", b"U", b"V"


class Process:
    """A consumer that comes back after each crash, as the next incarnation of its name on the same machine."""

    def __init__(self, stage: Stage, master: MasterActor, journal: Path | None, max_attempts: int = 3) -> None:
        self._stage = stage
        self._master = master
        self._journal = journal
        self._max_attempts = max_attempts
        self.crashes = 0
        self.start()

    def start(self) -> None:
        self.now: ConsumerActor = self._stage.consumer("a", max_attempts=self._max_attempts, journal=self._journal)
        self._master.settle()
        self.now.read()

    def crash(self) -> None:
        self.crashes += 1
        self.now.crash()
        former = read_journal(self._journal, "") if self._journal is not None else None
        if former is not None:
            assert former.incarnation == self.now.incarnation
            note_crash(self._stage.world.scripts, self._stage.keys, former, 1000)
        self._stage.end_lease(self.now)
        self.start()

    def begin(self) -> Run:
        """The next start. A lane may have to be taken twice: a suspect is set apart first."""
        for _ in range(10):
            if (run := self.now.start()) is not None:
                return run
        raise AssertionError("nothing starts")


@pytest.fixture
def process(stage: Stage, tmp_path: Path) -> Process:
    return Process(stage, stage.leader(), tmp_path / "a.journal")


def known(stage: Stage) -> dict[bytes, Attempts]:
    return attempts(stage.world)


def hand_over(stage: Stage, process: Process, *tickets: bytes) -> list[bytes]:
    sent = [stage.send(ticket)[0] for ticket in tickets]
    process._master.settle()
    process.now.read()
    return sent


def test_after_a_crash_in_company_suspects_run_in_child_processes_and_nobody_waits_for_them(
    stage: Stage, process: Process
) -> None:
    first, second = hand_over(stage, process, T, U)
    assert {process.begin().message.ticket, process.begin().message.ticket} == {T, U}
    process.crash()
    assert known(stage) == {first: Attempts(1, 0, 1), second: Attempts(1, 0, 1)}
    [third] = hand_over(stage, process, V)
    running = [process.begin() for _ in range(3)]
    assert {run.message.stream_id: run.is_apart for run in running} == {first: True, second: True, third: False}
    for run in running:
        run.succeed()
    process.now.flush()
    assert known(stage) == {}
    assert stage.world.dead() == []


@pytest.mark.parametrize("crashes", [1, 2, 3])
@pytest.mark.parametrize("has_journal", [True, False], ids=["journal", "no journal"])
def test_a_success_whose_acknowledgement_does_not_arrive_is_never_a_letter(
    stage: Stage, tmp_path: Path, crashes: int, has_journal: bool
) -> None:
    """Its last allowed attempt returned; then its process, the link or Redis ended before the acknowledgement."""
    process = Process(stage, stage.leader(), tmp_path / "a.journal" if has_journal else None)
    [first] = hand_over(stage, process, T)
    stage.link.call("HSET", stage.keys.attempts, first, f"2 0 {crashes} {0 if has_journal else 3}")
    process.crash()
    process.begin().succeed()
    process.crash()
    for _ in range(10):
        if (run := process.now.start()) is not None:
            run.succeed()
        process.now.flush()
    assert stage.world.dead() == []
    assert known(stage) == {}
    assert stage.world.pending() == {}
    assert stage.history.ids(T) == [first] * 2


@pytest.mark.parametrize("trouble", list(Trouble))
@pytest.mark.parametrize("has_journal", [True, False], ids=["journal", "no journal"])
def test_a_start_that_did_not_happen_is_not_charged(
    stage: Stage, tmp_path: Path, trouble: Trouble, has_journal: bool
) -> None:
    """The reply of what is noted ahead of it is lost, and the lease ends: it has all of its attempts still."""
    process = Process(stage, stage.leader(), tmp_path / "a.journal" if has_journal else None)
    [first] = hand_over(stage, process, T)
    stage.link.call("HSET", stage.keys.attempts, first, "2 0 2 3")
    process.crash()
    process.now.link.troubles["charge"] = trouble
    process.now.start()  # noted, or not
    before = len(stage.history.ids(T))
    process.crash()
    for _ in range(10):
        if (run := process.now.start()) is not None:
            run.die()
        process.now.lanes.wake_due(1e12)
        process.now.flush()
    [letter] = stage.world.dead()
    assert letter[b"usher-id"] == first
    assert len(stage.history.ids(T)) > before, "it is started again, and not buried unheard"


def test_the_end_of_the_consumer_charges_nobody_also_who_ran_by_itself_at_its_last_attempt(
    stage: Stage, process: Process
) -> None:
    """Its handler may have returned a moment before."""
    [first] = hand_over(stage, process, T)
    stage.link.call("HSET", stage.keys.attempts, first, "2 2 0 0")
    process.crash()
    process.begin()
    process.crash()
    assert known(stage)[first] == Attempts(3, 2, 1)
    run = process.begin()
    assert run.is_apart
    run.succeed()
    process.now.flush()
    assert stage.world.dead() == []


def test_a_child_that_ends_is_charged_with_the_ends_before_unless_it_had_run_others(
    stage: Stage, process: Process
) -> None:
    [first] = hand_over(stage, process, T)
    process.begin()
    process.crash()
    process.begin().die(is_blamed=False)
    process.now.flush()
    assert known(stage)[first] == Attempts(2, 0, 2)
    process.now.lanes.wake_due(1e12)
    process.begin().die()
    process.now.flush()
    [letter] = stage.world.dead()
    assert (letter[b"usher-attempts"], letter[b"usher-error"]) == (b"3", b"its process ended while its handler ran")
    assert known(stage) == {}


class _Gone:
    """A child that ends before it takes the message."""

    is_fresh = True

    def run(self, _piece: Piece) -> CallResult:
        return CallResult(How.NOT_RUN, "ended")

    def end(self, gently: bool) -> None:
        pass

    notes: ClassVar[list[str]] = []


def test_a_start_whose_child_ended_before_it_was_none(
    stage: Stage, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    [first] = hand_over(stage, process, T)
    process.begin()
    process.crash()
    worker = process.now.suspects
    monkeypatch.setattr(worker, "_begun", lambda _fresh: _Gone())
    assert process.now.executor.admit(*next_of(process), 1) is False, "it is set apart"
    for _ in range(2):
        worker.run_once()
        process.now.flush()
        assert known(stage)[first] == Attempts(1, 0, 1)
        process.now.lanes.wake_due(1e12)
        process.now.executor.admit(*next_of(process), 1)
    assert process.now.executor.refused_children == 2
    assert stage.world.dead() == []
    run = process.begin()
    assert (run.message.attempt, run.is_apart) == (2, True)
    run.succeed()
    process.now.flush()
    assert known(stage) == {}


def next_of(process: Process) -> tuple[Lane, Message]:
    lane = process.now.lanes.take_now()
    assert lane is not None
    message = process.now.executor.next_message(lane)
    assert message is not None
    return lane, message


def test_one_that_survives_by_raising_is_charged_with_that_and_no_suspect_any_more(
    stage: Stage, process: Process
) -> None:
    [first] = hand_over(stage, process, T)
    stage.link.call("HSET", stage.keys.attempts, first, "2 0 2 0")
    process.crash()
    alone = process.begin()
    assert (alone.message.attempt, alone.is_apart) == (3, True)
    alone.fail(ValueError("no"))
    process.now.flush()
    assert known(stage)[first] == Attempts(3, 1)
    assert not process.begin().is_apart


def test_who_takes_its_consumer_along_from_a_child_too_is_given_up_in_the_end(stage: Stage, process: Process) -> None:
    """The kernel ends the whole container, for example. Nobody sees it, so it is given up later than others."""
    [first] = hand_over(stage, process, T)
    for _ in range(5):
        process.begin()
        process.crash()
    assert known(stage)[first] == Attempts(5, 0, 5)
    assert process.now.start() is None
    process.now.flush()
    [letter] = stage.world.dead()
    assert letter[b"usher-id"] == first
    assert letter[b"usher-error"].startswith(b"its process ended while its handler ran")


def test_where_no_journal_is_left_such_a_start_is_in_redis_before_it_happens(stage: Stage) -> None:
    process = Process(stage, stage.leader(), None)
    [first] = hand_over(stage, process, T)
    for _ in range(3):
        assert not process.begin().is_apart
        process.crash()
    assert known(stage)[first] == Attempts(losses=3)
    for ends in range(1, 6):
        assert process.begin().is_apart
        assert known(stage)[first] == Attempts(ends, 0, ends, 2 + ends)
        process.crash()
    process.now.start()
    process.now.flush()
    assert [letter[b"usher-id"] for letter in stage.world.dead()] == [first]


def test_cut_off_for_a_known_reason_it_is_no_more_suspect_than_before(stage: Stage, process: Process) -> None:
    [first] = hand_over(stage, process, T)
    stage.link.call("HSET", stage.keys.attempts, first, "2 0 2 0")
    process.crash()
    process.begin()
    process.now.journal.explain()
    process.crash()
    assert known(stage)[first] == Attempts(2, 0, 2)


def test_failures_survive_the_process_and_a_request_to_be_called_later_is_none(stage: Stage, process: Process) -> None:
    first, second, third = hand_over(stage, process, T, U, V)
    for run in [process.begin() for _ in range(3)]:
        problem = {first: ValueError("no"), second: RetryLater(0), third: GiveUp("never")}[run.message.stream_id]
        run.fail(problem)
    process.now.flush()
    assert known(stage) == {first: Attempts(1, 1), second: Attempts(1, 0)}
    process.crash()
    assert known(stage) == {first: Attempts(1, 1), second: Attempts(1, 0)}, "nothing ran"
    runs = [process.begin(), process.begin()]
    assert {(run.message.stream_id, run.message.attempt, run.message.failures) for run in runs} == {
        (first, 2, 1),
        (second, 2, 0),
    }


def test_a_note_whose_reply_is_lost_goes_again_and_is_there_once(stage: Stage, process: Process) -> None:
    [first] = hand_over(stage, process, T)
    process.begin().fail(ValueError("no"))
    process.now.link.troubles["charge"] = Trouble.REPLY_LOST
    with pytest.raises(Exception, match="charge"):
        process.now.flush()
    assert not process.now.acker.is_flushed
    process.now.flush()
    assert process.now.acker.is_flushed
    assert known(stage) == {first: Attempts(1, 1)}
    assert stage.link.call("XLEN", stage.keys.runs) == 1


def test_of_many_failures_at_once_redis_gets_the_last_count_and_nothing_waits(stage: Stage, process: Process) -> None:
    ids = hand_over(stage, process, *[b"T%d" % n for n in range(8)])
    for _ in range(2):
        for run in [process.begin() for _ in ids]:
            run.fail(RetryLater(0.0))
        process.now.lanes.wake_due(1e12)
    process.now.flush()
    assert known(stage) == dict.fromkeys(ids, Attempts(2))
    assert process.now.acker.is_flushed


def test_counts_that_redis_will_not_take_hold_up_no_acknowledgement(stage: Stage, process: Process) -> None:
    first, _ = hand_over(stage, process, T, U)
    stage.link.call("RPUSH", stage.keys.attempts, "somebody else's")
    for run in [process.begin(), process.begin()]:
        if run.message.stream_id == first:
            run.fail(ValueError("no"))
        else:
            run.succeed()
    process.now.flush()
    assert stage.world.pending() == {process.now.name: [first]}
    assert process.now.acker.is_flushed
    stage.link.call("DEL", stage.keys.attempts)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_journal", [True, False], ids=["journal", "no journal"])
def test_exactly_the_killer_is_given_up_whatever_ran_beside_it(
    stage: Stage, tmp_path: Path, seed: int, has_journal: bool
) -> None:
    """And everybody else is done without a charge, although processes end again and again while they run."""
    rng = random.Random(seed)
    max_attempts = rng.choice([2, 3, 5])
    process = Process(stage, stage.leader(), tmp_path / "a.journal" if has_journal else None, max_attempts)
    ids = hand_over(stage, process, *[b"T%d" % rng.randrange(8) for _ in range(24)])
    killer = rng.choice(ids)
    for _ in range(2000):
        if process.crashes > 40 or not stage.world.pending():
            break
        run = process.now.start() if len(process.now.runs) < 4 else None
        process.now.lanes.wake_due(1e12)
        if run is not None and run.message.stream_id == killer:
            if run.is_apart:
                run.die()
            else:
                process.crash()
        elif run is None or rng.random() < 0.5:
            if process.now.runs:
                rng.choice(process.now.runs).succeed()
            process.now.flush()
            process._master.turn(*process.now.reports())
            process._master.settle(turns=1)
            process.now.read()
    starts = Counter(stage.history.ids_of_all())
    [letter] = stage.world.dead()
    assert letter[b"usher-id"] == killer
    assert stage.history.succeeded == set(ids) - {killer}
    assert known(stage) == {}
    assert stage.world.pending() == {}
    if has_journal:
        assert starts[killer] == max_attempts
        assert int(letter[b"usher-attempts"]) == max_attempts
        assert process.crashes == 1, "it took its consumer along only once"
    else:
        assert max_attempts <= starts[killer] <= max_attempts + 3, "three losses come first, which may have been starts"
    assert not stage.history.overlaps
