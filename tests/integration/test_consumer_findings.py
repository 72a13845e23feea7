"""Counter-examples in the consumer's path, found by reading it against itself, small enough to be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.integration.actors import ConsumerActor, Run, Stage, Trouble
from tests.integration.factories import LEASE_MS, plan
from tests.integration.factories import hand_over as _give
from tests.integration.test_charge import attempts
from tests.integration.test_quarantine import Process, hand_over
from usher.common.base.clock import now_s
from usher.common.base.errors import GiveUp, PartialFailure, ReplyUnknown, RetryLater
from usher.common.protocol.attempts import Attempts
from usher.common.redis.client import CommandRefused
from usher.consumer.execution.outages import Outage, Wait
from usher.consumer.execution.pools import BatchCall, BatchCollector
from usher.consumer.execution.watchdog import Watchdog
from usher.consumer.handlers.decorators import BatchOptions
from usher.consumer.lifecycle.process_ending import ProcessEnding
from usher.consumer.policy.outcome import Bury
from usher.master.policy.board.tickets import Standing

T, U = b"T", b"U"


def _started(consumer: ConsumerActor) -> Run:
    run = consumer.start()
    assert run is not None
    return run


class _Batches:
    """A consumer with a batch handler, of up to ten messages, that has read one message of each of these tickets."""

    def __init__(self, stage: Stage, *tickets: bytes, **settings: int) -> None:
        self._stage, self._leader, self.consumer = stage, stage.leader(), stage.consumer("a", **settings)
        self._declared = BatchOptions(10, 0.0, 1)
        self._gatherer = BatchCollector(self.consumer.executor, self._declared)
        self.read(*tickets)

    def read(self, *tickets: bytes) -> None:
        for ticket in tickets:
            self._stage.send(ticket)
        self._leader.settle()
        self.consumer.read()

    def look(self) -> BatchCall | None:
        self.consumer.flush()  # nothing starts again before its failure is noted
        lanes = self._gatherer.take_now()
        return BatchCall(self.consumer.executor, lanes, self._declared) if lanes is not None else None

    def call(self) -> BatchCall:
        call = self.look()
        assert call is not None
        return call


def test_an_answer_that_was_true_before_the_ticket_came_back_drops_nothing_of_it(stage: Stage) -> None:
    """The first call is done and its reply is lost; the second one says STALE, because another owner has the ticket by
    then. Before that is read, the other one is done, and the reader has what was handed over to us after it."""
    leader, a, b = stage.world.elect(), stage.consumer("a"), stage.consumer("b")

    def give(owner: ConsumerActor) -> bytes:
        [sent] = stage.world.parked(leader, T)
        _give(leader, plan(owner.incarnation, {T: [sent]}))
        owner.read()
        return sent

    first = give(a)
    run = _started(a)
    run.fail(GiveUp())
    a.link.troubles["dead_letter"] = Trouble.REPLY_LOST
    with pytest.raises(ReplyUnknown):
        a.flush()
    second = give(b)
    later = list[bytes]()

    def meanwhile(done: str) -> None:
        if done == "dead_letter" and not later:
            b.work()
            later.append(give(a))

    a.link.after = meanwhile
    a.flush()
    a.work()
    stage.check_done(T, [first, second, *later])


def _halting(a: ConsumerActor, run: Run) -> None:
    """It will be given up, at the next flush, and its ticket halted."""
    a.acker.policy = "halt"
    a.executor.bury(run._lane, run.message, Bury("gave_up", ""))
    a.runs.clear()


def test_a_record_that_grew_shorter_is_not_written_over_that_of_a_ticket_which_was_halted_meanwhile(
    stage: Stage,
) -> None:
    """The leader hears the report of a flush, which halts the ticket as well, before the note of it."""
    leader, a = stage.leader(), stage.consumer("a")
    _, second, third = [sent for _ in range(3) for sent in stage.send(T)]
    leader.settle()
    a.read()
    a.start().succeed()  # type: ignore[union-attr]
    _halting(a, _started(a))
    a.flush()
    leader.turn(*a.reports())
    leader.settle()
    owner, _, *ids = stage.link.call("HGET", stage.keys.tickets, T).split()
    assert (owner, ids) == (b"halted", [second, third])
    assert leader.board.tickets[T].standing is Standing.HALTED
    later = stage.send(T)
    leader.settle()
    a.read()
    assert a.start() is None, later


def test_the_record_of_a_ticket_that_is_halted_during_a_takeover_stays(stage: Stage) -> None:
    """Its record was read before, and its owner's pending list after."""
    leader, a = stage.leader(), stage.consumer("a")
    [first] = stage.send(T)
    leader.settle()
    a.read()
    _halting(a, _started(a))
    stage.end_lead()
    leader.crash()
    successor = stage.master("m2")

    def meanwhile(step: str) -> None:
        if step == "XPENDING" and "HSCAN" in successor.link.calls:
            successor.link.before = lambda step: None
            a.flush()

    successor.link.before = meanwhile
    successor.elect()
    successor.turn()
    successor.settle()
    stage.send(T)
    successor.settle()
    assert stage.world.pending()[b"halted"] == [first]
    assert stage.world.head(T).startswith(b"halted ")
    a.read()
    assert a.start() is None


def test_a_failure_is_noted_before_its_ticket_is_given_back(stage: Stage) -> None:
    """A handler raises between the drain's look at what is to be written, and its look at what is quiet."""
    m, a = stage.leader(), stage.consumer("a")
    [first] = stage.send(T)
    m.settle()
    a.read()
    run = _started(a)
    a.begin_drain()
    lock = a.lanes.lock

    @contextlib.contextmanager
    def raised_just_before() -> Iterator[None]:
        a.lanes.lock = lock
        run.fail(ValueError("x"))
        with lock:
            yield

    a.lanes.lock = raised_just_before()  # type: ignore[assignment]
    for _ in range(3):
        a.give_back()
        a.flush()
    assert a.deregister()
    assert attempts(stage.world) == {first: Attempts(1, 1)}
    b = stage.consumer("b")
    m.settle()
    b.read()
    assert _started(b).message.attempt == 2


def test_failures_that_never_end_do_not_hold_up_acknowledgements(stage: Stage) -> None:
    """A handler that polls fails again while Redis is told of the last time."""
    m, a = stage.leader(), stage.consumer("a")
    stage.send(T)
    stage.send(U)
    m.settle()
    a.read()
    polls, ends = sorted([_started(a), _started(a)], key=lambda run: run.message.ticket)
    ends.succeed()

    def again(step: str) -> None:
        nonlocal polls
        if step == "charge" and a.link.calls.count("charge") < 100:
            polls = _started(a)
            polls.fail(RetryLater(0))

    a.link.before = again
    polls.fail(RetryLater(0))
    a.flush()
    assert "ack" in a.link.calls
    assert a.link.calls.index("ack") < 10


def test_a_watchdog_ends_the_process_though_redis_refuses_the_charge(stage: Stage) -> None:
    """Somebody has written over the attempts: that must not keep a handler that hangs."""
    m, a = stage.leader(), stage.consumer("a")
    stage.send(T)
    m.settle()
    a.read()
    _started(a)
    stage.link.call("SET", stage.keys.attempts, "x")
    said = list[str]()
    Watchdog(ProcessEnding(a.steps, lambda: True, a.journal, 0, said.append), 2e-6).run_once()
    assert said


def test_a_suspect_whose_body_is_deleted_before_it_runs_alone_runs_as_it_came(stage: Stage, tmp_path: Path) -> None:
    """Redis >= 7 drops it from the pending list when the lease is renewed; its body came with the inbox."""
    process = Process(stage, stage.leader(), tmp_path / "a.journal", 5)
    [first] = hand_over(stage, process, T)
    for _ in range(2):
        process.begin()
        process.crash()
    a = process.now
    [second] = hand_over(stage, process, T)
    stage.world.make_idle(a.name, LEASE_MS, first, second)
    stage.world.delete(first)
    a.steps.renew(LEASE_MS)
    stage.finish(process._master, [a])
    assert not stage.world.pending()
    assert not stage.world.state().index
    assert stage.history.ids(T) == [first, first, first, second]
    assert not stage.world.dead()


def test_a_letter_that_is_lost_with_its_machine_does_not_come_back_as_a_crash(stage: Stage) -> None:
    """Its failures are stored, its letter is not, and the loss that `take_back` counts is no proof that its handler ran
    then."""
    m, a = stage.leader(), stage.consumer("a", max_attempts=1)
    [sent] = stage.send(T)
    m.settle()
    a.read()
    _started(a).fail(ValueError("no stock"))
    a.link.troubles["dead_letter"] = Trouble.NEVER_SENT
    with pytest.raises(ReplyUnknown):
        a.flush()
    assert attempts(stage.world) == {sent: Attempts(1, 1)}
    a.crash()
    stage.end_lease(a)
    b = stage.consumer("b", max_attempts=1)
    m.settle()
    assert attempts(stage.world) == {sent: Attempts(1, 1, losses=1)}
    stage.finish(m, [b])
    [letter] = stage.world.dead()
    assert (letter[b"usher-id"], letter[b"usher-reason"]) == (sent, b"attempts_exhausted")
    assert letter[b"usher-error"].endswith(b"its process ended before the dead letter was written")
    assert stage.history.ids(T) == [sent], "it is not started again"
    assert not stage.world.pending()


def test_a_drain_starts_nothing_that_waited_to_be_called_by_itself(stage: Stage) -> None:
    """A call of many fails as a whole, so each is to go alone. What has no slot yet when the drain begins goes back."""
    batches = _Batches(stage, *(b"T%d" % number for number in range(10)))
    a = batches.consumer
    together = batches.call()
    assert len(together.messages) == 10
    together.end(None, ValueError("x"))
    alone = batches.call()
    assert len(alone.messages) == 1
    a.begin_drain()
    assert batches.look() is None
    a.flush()
    assert a.give_back() == 9
    alone.end(None, None)
    a.flush()
    assert a.deregister()
    assert len(stage.world.pending()[b"master"]) == 9


def test_a_batch_keeps_what_it_has_started_although_an_outage_begins(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = _Batches(stage, T, T, T)
    batches._declared = BatchOptions(10, 0.0, 3)
    outages = batches.consumer.executor.outages
    monkeypatch.setattr(outages, "known", {("ConnectionError", "h.py:1"): Outage(("ConnectionError", "h.py:1"), 0.0)})
    waits = iter([None, Wait(now_s() + 9.0, True, 0.0, 3)])  # it began behind the start of the first one
    monkeypatch.setattr(outages, "hold", lambda message, at_s: next(waits))
    assert len(batches.call().messages) == 3


def test_who_fails_alike_takes_no_others_along_in_a_batch(stage: Stage) -> None:
    batches = _Batches(stage, *(b"bad%d" % number for number in range(3)))
    outages = batches.consumer.executor.outages
    batches.call().end(None, ConnectionError("away"))
    for _ in range(3):
        batches.call().end(None, ConnectionError("away"))
    assert outages.waiting == 3
    batches.read(b"good", b"fine")
    for bad in (b"bad0", b"bad1", b"bad2"):
        outages.ask(bad)
    batches.consumer.lanes.let_go([b"bad0", b"bad1", b"bad2"])
    calls = [{message.ticket for message in batches.call().messages} for _ in range(4)]
    assert {b"good", b"fine"} in calls and {b"bad0"} in calls


def test_a_batch_is_not_kept_waiting_by_those_that_go_alone(stage: Stage) -> None:
    """A few that fail again and again are always due."""
    batches = _Batches(stage, *(b"bad%d" % number for number in range(4)), max_attempts=1000)
    for _ in range(3):
        batches.call().end(None, ValueError("x"))
    batches.read(b"good")
    for _ in range(20):
        call = batches.call()
        if call.messages[0].ticket == b"good":
            return
        call.end(None, ValueError("x"))
    raise AssertionError("it waits for ever")


class _Bare(RetryLater):
    def __init__(self) -> None:  # and nothing of it: an error of the handler's making
        pass


class _BareParts(PartialFailure):
    def __init__(self) -> None:
        pass


class _OddParts(_BareParts):
    def __getattribute__(self, name: str) -> Any:
        if name == "failed":
            raise ValueError("x")
        return super().__getattribute__(name)


class _Listed:
    id: ClassVar[list[str]] = []


class _NoTruth:
    def __bool__(self) -> bool:
        raise ValueError("ambiguous")

    __str__ = __bool__  # type: ignore[assignment]


def test_what_is_declared_to_be_away_may_be_one_of_several_errors(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a", max_attempts=1)
    a.executor.away = (LookupError,)
    stage.send(T)
    m.settle()
    a.read()
    _started(a).fail(ExceptionGroup("of a TaskGroup", [ExceptionGroup("inner", [KeyError()]), ValueError()]))
    a.flush()
    assert (a.executor.outages.waiting, stage.world.dead()) == (1, [])


def test_an_error_that_cannot_be_read_is_a_failure_of_its_message_only(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a", max_attempts=1)
    stage.send(T)
    m.settle()
    a.read()
    _started(a).fail(_Bare())
    a.flush()
    assert [letter[b"usher-reason"] for letter in stage.world.dead()] == [b"attempts_exhausted"]
    assert not a.lost


@pytest.mark.parametrize("how", ["parts", "odd parts", "unhashable", "no truth"])
def test_so_is_a_batch_handlers_answer(stage: Stage, how: str) -> None:
    batches = _Batches(stage, T, max_attempts=1)
    call = batches.call()
    [message] = call.messages
    if how in ("parts", "odd parts"):
        call.end(None, _BareParts() if how == "parts" else _OddParts())
    else:
        call.end({_Listed(): "x"} if how == "unhashable" else {message.id: _NoTruth()}, None)
    batches.consumer.flush()
    assert [letter[b"usher-reason"] for letter in stage.world.dead()] == [b"attempts_exhausted"]


def test_neighbours_in_a_call_are_not_judged_by_an_error_that_cannot_be_read(stage: Stage) -> None:
    """It is a RetryLater that does not say when, because of one of them: as after any error, each is tried by
    itself."""
    batches = _Batches(stage, b"T0", b"T1", b"T2", max_attempts=1)
    for messages in (3, 1, 1, 1):
        call = batches.call()
        assert len(call.messages) == messages
        call.end(None, _Bare() if any(message.ticket == b"T1" for message in call.messages) else None)
        batches.consumer.flush()
    assert [letter[b"usher-ticket"] for letter in stage.world.dead()] == [b"T1"]


def test_a_letter_that_redis_refuses_does_not_keep_a_drain_from_giving_back_the_others(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    stage.send(T, b"1-1", b"2-1")
    [other] = stage.send(U)
    m.settle()
    a.read()
    run = _started(a)
    assert run.message.ticket == T
    stage.link.call("SET", stage.keys.dead, "x")
    run.fail(GiveUp())
    a.begin_drain()
    with pytest.raises(CommandRefused):
        a.flush()
    with pytest.raises(CommandRefused):
        a.give_back()
    assert stage.world.pending() == {a.name: [b"1-1", b"2-1"], b"master": [other]}
