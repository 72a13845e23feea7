"""From the start of a handler that ends its process to its dead letter, over journals, scripts, lanes and successors;
on a real Redis."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.actors import ConsumerActor, MasterActor, Run, Stage, Trouble
from tests.integration.test_charge import attempts
from usher.common.base.errors import GiveUp, RetryLater
from usher.common.protocol.attempts import Attempts
from usher.consumer.lifecycle.crash_report import note_crash
from usher.consumer.lifecycle.journal import read_journal
from usher.consumer.policy.quarantine import Isolation

T, U, V = b"T", b"U", b"V"


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


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


def test_after_a_crash_in_company_suspects_run_one_at_a_time_beside_the_others(stage: Stage, process: Process) -> None:
    first, second = hand_over(stage, process, T, U)
    assert {process.begin().message.ticket, process.begin().message.ticket} == {T, U}
    process.crash()
    assert known(stage) == {first: Attempts(1, 0, 1), second: Attempts(1, 0, 1)}
    [third] = hand_over(stage, process, V)
    running = [process.begin(), process.begin()]
    assert {run.message.stream_id for run in running} == {first, third}
    assert process.now.start() is None, "the second suspect waits"
    for run in running:
        run.succeed()
    assert process.now.start() is None, "Redis does not have the success of the first yet"
    process.now.flush()
    assert process.begin().message.stream_id == second
    process.now.runs[0].succeed()
    process.now.flush()
    assert known(stage) == {}


def test_the_second_time_it_runs_alone_and_its_start_is_in_redis_first(stage: Stage, process: Process) -> None:
    first, second = hand_over(stage, process, T, U)
    process.begin(), process.begin()
    process.crash()
    process.begin()
    [third] = hand_over(stage, process, V)
    process.begin()
    process.crash()
    assert known(stage) == {first: Attempts(2, 0, 2), second: Attempts(1, 0, 1), third: Attempts(1, 0, 1)}
    found = []
    for _ in range(20):
        run = process.now.start()
        if run is not None:
            found.append(run)
            if run.message.stream_id == first:
                break
            run.succeed()
    alone = found[-1]
    assert (alone.message.stream_id, alone.message.attempt) == (first, 3)
    assert known(stage)[first] == Attempts(3, 3, 2), "before anything of it can happen"
    assert process.now.start() is None
    alone.succeed()
    assert process.now.start() is None, "until Redis has its success: the next one may be the killer"
    process.now.flush()
    process.now.work()
    assert known(stage) == {}
    assert stage.world.dead() == []


def test_one_that_survives_alone_by_raising_is_charged_with_that_and_no_crash(stage: Stage, process: Process) -> None:
    [first] = hand_over(stage, process, T)
    stage.link.call("HSET", stage.keys.attempts, first, "2 0 2 0")
    process.crash()
    hand_over(stage, process, U)
    alone = process.begin()
    if alone.message.stream_id != first:
        alone.succeed()
        alone = process.begin()
    assert alone.message.attempt == 3
    alone.fail(ValueError("no"))
    assert process.now.start() is None
    process.now.flush()
    assert known(stage)[first] == Attempts(3, 1)
    process.now.work()
    assert stage.world.dead() == []


@pytest.mark.parametrize("trouble", list(Trouble))
def test_alone_it_does_not_start_unless_redis_has_said_that_its_start_is_noted(
    stage: Stage, process: Process, trouble: Trouble
) -> None:
    [first] = hand_over(stage, process, T)
    stage.link.call("HSET", stage.keys.attempts, first, "2 0 2 0")
    process.crash()
    process.now.link.troubles["charge"] = trouble
    for _ in range(5):
        assert process.now.start() is None
    assert not stage.history.starts
    lane = process.now.lanes._board.lanes[T]
    assert lane.isolation is Isolation.TOGETHER, "others run until the next try"
    process.now.lanes._board.wake_due(1e12)
    process.begin().succeed()
    process.now.flush()
    assert known(stage) == {}


def test_alone_it_waits_for_a_group_that_was_lost_to_be_there_again(stage: Stage, process: Process) -> None:
    first, second = hand_over(stage, process, T, T)
    stage.link.call("HSET", stage.keys.attempts, first, "2 0 2 0")
    process.crash()
    stage.link.call("XGROUP", "DESTROY", stage.keys.stream, stage.keys.group)
    for _ in range(5):
        assert process.now.start() is None
    process._master.settle()
    process.now.lanes._board.wake_due(1e12)
    stage.finish(process._master, [process.now])
    stage.check_done(T, [first, second])
    assert known(stage) == {}


def test_alone_it_does_not_start_when_it_is_not_ours_any_more(stage: Stage, process: Process) -> None:
    [first] = hand_over(stage, process, T)
    stage.link.call("HSET", stage.keys.attempts, first, "2 0 2 0")
    process.crash()
    stage.link.call("XACK", stage.keys.stream, stage.keys.group, first)
    for _ in range(5):
        assert process.now.start() is None
    process.now.flush()
    assert process.now.lanes.load() == (0, 0)
    assert not stage.world.dead()
    stage.world.apart_because = "somebody acknowledged it behind our back"


def run_alone(stage: Stage, process: Process, value: str) -> Run:
    """A message of which Redis knows ``value``; its handler runs."""
    [first] = hand_over(stage, process, T)
    stage.link.call("HSET", stage.keys.attempts, first, value)
    process.crash()
    return process.begin()


@pytest.mark.parametrize(("value", "cut_off"), [("2 0 2 0", Attempts(3, 0, 2)), ("3 1 0 3", Attempts(4, 1, 0, 3))])
@pytest.mark.parametrize("is_told", [True, False], ids=["given back", "by the journal"])
def test_alone_and_cut_off_for_a_known_reason_it_is_not_charged(
    stage: Stage, process: Process, value: str, cut_off: Attempts, is_told: bool
) -> None:
    """A drain whose grace is over, a lost lease, another Redis: only the first of them can still tell Redis itself."""
    alone = run_alone(stage, process, value)
    first = alone.message.stream_id
    assert known(stage)[first] == cut_off.blamed()
    process.now.journal.explain()
    if is_told:
        process.now.starts.give_back(process.now.steps)
        assert known(stage)[first] == cut_off
    process.crash()
    assert known(stage)[first] == cut_off
    process.begin().succeed()
    process.now.flush()
    assert known(stage) == {}
    assert stage.world.dead() == []


@pytest.mark.parametrize("trouble", ["connection", "lease"])
def test_what_cannot_be_given_back_holds_up_nothing(stage: Stage, process: Process, trouble: str) -> None:
    first = run_alone(stage, process, "2 0 2 0").message.stream_id
    if trouble == "lease":
        stage.end_lease(process.now)
    else:
        process.now.link.troubles["charge"] = Trouble.NEVER_SENT
    process.now.starts.give_back(process.now.steps)
    assert known(stage)[first] == Attempts(3, 3, 2)


def test_what_has_ended_is_not_given_back(stage: Stage, process: Process) -> None:
    alone = run_alone(stage, process, "2 0 2 0")
    alone.fail(ValueError("no"))
    process.now.flush()
    process.now.starts.give_back(process.now.steps)
    assert known(stage) == {alone.message.stream_id: Attempts(3, 1)}


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
            run.fail(ValueError("no"))
        process.now.lanes._board.wake_due(1e12)
    process.now.flush()
    assert known(stage) == dict.fromkeys(ids, Attempts(2, 2))
    assert process.now.acker.is_flushed


def test_counts_that_redis_will_not_take_hold_up_no_acknowledgement(stage: Stage, process: Process) -> None:
    first, _ = hand_over(stage, process, T, U)
    stage.link.call("RPUSH", stage.keys.attempts, "somebody else's")
    for run in [process.begin(), process.begin()]:
        if run.message.stream_id == first:
            run.fail(ValueError("no"))
        else:
            run.succeed()
    with pytest.raises(
        Exception, match="WRONGTYPE"
    ):  # of the acknowledgement, which has happened: asked again, it is over
        process.now.flush()
    assert stage.world.pending() == {process.now.name: [first]}
    process.now.flush()
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
        if run is not None and run.message.stream_id == killer:
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
    else:
        assert max_attempts <= starts[killer] <= max_attempts + 3, "three losses come first, which may have been starts"
    assert not stage.history.overlaps
