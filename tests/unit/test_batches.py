"""BatchOptions handlers: what is declared, what follows from the end of a call, and that per message nothing differs from
single calls."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.test_lanes import quiet_ids
from usher import batch
from usher.common.base.clock import now_s
from usher.common.base.errors import GiveUp, PartialFailure, RetryLater
from usher.common.protocol.attempts import NEVER, Attempts
from usher.common.runtime.service import Service
from usher.consumer.execution import pools
from usher.consumer.execution.executor import Executor
from usher.consumer.execution.lanes import Lane, Lanes
from usher.consumer.handlers.batches import MessageFailed, TriedTogether, goes_alone, judge
from usher.consumer.handlers.decorators import BatchOptions
from usher.consumer.handlers.loader import Handler
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.policy.outcome import Bury, Finished, RetryPolicy

PATIENCE_S = 20.0
LEASE = OwnLease(1e6, now_s())  # taken when the tests are collected; it outlives the run, however long that is


def message(ticket: bytes, number: int, attempts: int = 0) -> Message:
    return Message(ticket, b"%d-0" % number, 1, [], LEASE, Attempts(attempts, attempts) if attempts else NEVER)


class TestDeclared:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"most": 0},
            {"most": 10_001},
            {"wait_s": -1},
            {"wait_s": 61},
            {"per_ticket": 0},
            {"most": 2, "per_ticket": 3},
        ],
    )
    def test_what_cannot_be_is_said_at_once(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="@batch"):
            batch(**wrong)


@pytest.mark.parametrize("past", [Attempts(1, 1), Attempts(1, 0, 1), Attempts(0, 0, 0, 1), None])
def test_what_may_have_ended_a_process_or_has_no_body_shares_no_call(past: Attempts | None) -> None:
    suspect = Message(b"A", b"1-0", 1, None if past is None else [], LEASE, past or NEVER)
    assert goes_alone(suspect)
    assert not goes_alone(message(b"A", 2))


class TestJudge:
    A1, A2, A3, B1 = message(b"A", 1), message(b"A", 2), message(b"A", 3), message(b"B", 4)
    PARTS = ((A1, A2, A3), (B1,))

    @pytest.mark.parametrize("by_id", [True, False])
    @pytest.mark.parametrize("is_raised", [True, False])
    def test_what_is_behind_a_failed_one_of_its_ticket_is_not_done(self, by_id: bool, is_raised: bool) -> None:
        error = ValueError("x")
        failed: dict[Any, Any] = {(self.A2.id if by_id else self.A2): error}
        assert judge(self.PARTS, *((None, PartialFailure(failed)) if is_raised else (failed, None))) == [
            (1, error),
            (1, None),
        ]

    @pytest.mark.parametrize("told", ["no such order", "", None])
    def test_a_text_is_an_error_too(self, told: str | None) -> None:
        [_, verdict] = judge(self.PARTS, {self.B1: told}, None)
        assert isinstance(verdict[1], MessageFailed)
        assert (told or "named this message") in str(verdict[1])

    @pytest.mark.parametrize(
        "raised", [ValueError("boom"), GiveUp("boom"), SystemExit("boom"), ExceptionGroup("boom", [PartialFailure({})])]
    )
    def test_a_call_of_several_that_fails_as_a_whole_is_nobodys_fault_yet(self, raised: BaseException) -> None:
        verdicts = judge(self.PARTS, None, raised)
        assert [done for done, _ in verdicts] == [0, 0]
        for verdict in verdicts:
            assert isinstance(verdict[1], TriedTogether)
            assert "boom" in str(verdict[1])
            assert verdict[1].after_s == 0, "each is tried by itself at once"

    @pytest.mark.parametrize(
        ("returned", "why"),
        [
            (True, "None, or a mapping of the messages that failed; this one returned bool"),
            (["1-0"], "this one returned list"),
            *((odd, "no message of the call") for odd in ({"9-0": "x"}, {b"1-0": "x"}, {message(b"A", 9): "x"})),
        ],
    )
    def test_an_answer_that_cannot_be_meant_is_no_success(self, returned: Any, why: str) -> None:
        [verdict] = judge([[self.B1]], returned, None)
        assert isinstance(verdict[1], TypeError)
        assert why in str(verdict[1])


class Runners:
    """A batch handler on its pool, on lanes, with accounts that keep what comes."""

    unnoted = frozenset[bytes]()

    def __init__(
        self,
        handle: Callable[[list[Message]], Any],
        is_async: bool = False,
        strict: bool = False,
        slots: int = 2,
        **declared: Any,
    ) -> None:
        self.finished_items: list[Finished] = []
        self.failures: list[Finished] = []
        self.given_up: list[tuple[str, str, int]] = []
        self.broken: list[str] = []
        self.lanes = Lanes()
        policy, self.journal = RetryPolicy(3, 0.0, 0.0), Journal(None, "", "", 100)
        self.executor = Executor(self.lanes, self, self.journal, LEASE, policy, strict, 60.0, self.broken.append)
        self.executor.all_wait_here, self.calls = True, list[list[str]]()

        def called(messages: list[Message]) -> Any:
            self.calls.append([one.id for one in messages])
            return handle(messages)

        async def called_async(messages: list[Message]) -> Any:
            return called(messages)

        declaration = BatchOptions(**{"most": 100, "wait_s": 0.05, "per_ticket": 1} | declared)
        handler = Handler(called_async if is_async else called, is_async, batch=declaration)
        assert handler.batch is not None
        self.services: list[Service] = pools.make_pool(handler, self.executor, slots)

    def finished(self, item: Finished, here: bool = False) -> None:
        self.finished_items.append(item)
        with self.lanes.lock:
            self.lanes.done([item.stream_id])
        if item.lane is not None:
            threading.Thread(target=lambda: self.lanes.resume(item.lane), daemon=True).start()

    def failed(self, failure: Finished) -> None:
        self.failures.append(failure)

    def give_up(self, lane: Lane, given: Message, bury: Bury) -> None:
        self.given_up.append((given.id, bury.reason, given.attempt))
        with self.lanes.lock:
            self.lanes.done([given.stream_id])
        threading.Thread(target=lambda: self.lanes.resume(lane), daemon=True).start()

    def add(self, **numbers: list[int]) -> None:
        self.lanes.add(
            (ticket.encode(), [message(ticket.encode(), number) for number in of_it])
            for ticket, of_it in numbers.items()
        )

    def __enter__(self) -> Runners:
        for service in self.services:
            service.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.lanes.pause()
        for service in self.services:
            service.stop()
        for service in self.services:
            assert service.join(PATIENCE_S)

    def until(self, condition: Callable[[], bool]) -> None:
        end_s = now_s() + PATIENCE_S
        while not condition():
            assert now_s() < end_s, (self.calls, self.given_up, self.broken)
            time.sleep(0.005)

    def until_over(self) -> None:
        self.until(lambda: self.lanes.load() == (0, 0))
        assert self.lanes.running == 0
        assert not self.journal.running(), "nobody is watched any more"
        assert not self.broken

    def done(self, ticket: str) -> list[str]:
        return [item.stream_id.decode() for item in self.finished_items if item.ticket == ticket.encode()]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class TestPool:
    @pytest.fixture
    def barrier(self) -> Iterator[threading.Event]:
        event = threading.Event()
        yield event
        event.set()

    def test_one_call_takes_one_of_each_ticket(self, is_async: bool) -> None:
        runners = Runners(lambda messages: None, is_async)
        runners.add(A=[1, 5], B=[2, 6], C=[3])
        with runners:
            runners.until_over()
        assert sorted(runners.calls[0]) == ["1-0", "2-0", "3-0"]
        assert sorted(one for call in runners.calls[1:] for one in call) == ["5-0", "6-0"]
        assert runners.done("A") == ["1-0", "5-0"]

    def test_what_is_ready_again_after_a_call_is_noticed_by_whoever_gathers(self, is_async: bool) -> None:
        """Else the rest of a ticket would wait for the gatherer's longest wait, each time."""
        runners = Runners(lambda messages: time.sleep(0.005), is_async, slots=2, wait_s=0.0)
        runners.add(A=list(range(1, 31)))
        with runners:
            runners.until_over()
        assert runners.done("A") == [f"{n}-0" for n in range(1, 31)]

    def test_a_full_batch_does_not_wait(self, is_async: bool) -> None:
        runners = Runners(lambda messages: None, is_async, most=3, wait_s=60)
        runners.add(**{f"T{n}": [n + 1] for n in range(6)})
        with runners:
            runners.until_over()
        assert [len(call) for call in runners.calls] == [3, 3]

    def test_a_retry_that_is_due_before_the_batch_is_gathered_when_it_is_due(
        self, is_async: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It fills the batch, which then waits for nothing more."""
        monkeypatch.setattr(pools, "_LONGEST_WAIT_S", 3600.0)  # nobody looks by chance

        def handle(messages: list[Message]) -> dict[Message, RetryLater]:
            return {one: RetryLater(0.3) for one in messages if one.id == "1-0" and one.attempt == 1}

        runners = Runners(handle, is_async, most=2, wait_s=2 * PATIENCE_S)
        runners.add(A=[1], B=[2])
        with runners:
            runners.until(lambda: runners.done("B") == ["2-0"])
            runners.add(C=[3])
            runners.until_over()
        assert [sorted(call) for call in runners.calls] == [["1-0", "2-0"], ["1-0", "3-0"]]

    def test_several_of_a_ticket_come_in_order_where_that_is_asked_for(self, is_async: bool) -> None:
        runners = Runners(lambda messages: None, is_async, per_ticket=3, most=10)
        runners.add(A=[1, 2, 3, 4])
        with runners:
            runners.until_over()
        assert runners.calls == [["1-0", "2-0", "3-0"], ["4-0"]]
        spans = [(item.start_us, item.end_us) for item in runners.finished_items]
        assert spans == sorted(spans)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), (
            "a ticket's executions do not overlap"
        )

    def test_strict_acknowledgements_allow_one_of_a_ticket(self, is_async: bool) -> None:
        runners = Runners(lambda messages: None, is_async, strict=True, per_ticket=3)
        runners.add(A=[1, 2, 3], B=[4])
        with runners:
            runners.until_over()
        assert all(len(set(call) & {"1-0", "2-0", "3-0"}) <= 1 for call in runners.calls)
        assert runners.done("A") == ["1-0", "2-0", "3-0"]

    def test_only_those_that_failed_come_again_and_their_ticket_waits(self, is_async: bool) -> None:
        failures: Counter[str] = Counter()

        def handle(messages: list[Message]) -> Any:
            bad = [one for one in messages if one.id == "2-0" and one.attempt < 3]
            failures.update(one.id for one in bad)
            return dict.fromkeys(bad, "not yet")

        runners = Runners(handle, is_async, per_ticket=5)
        runners.add(A=[1, 2, 3], B=[4, 5])
        with runners:
            runners.until_over()
        assert runners.done("A") == ["1-0", "2-0", "3-0"]
        assert runners.done("B") == ["4-0", "5-0"]
        assert failures["2-0"] == 2
        assert Counter(one for call in runners.calls for one in call) == {
            "1-0": 1,
            "2-0": 3,
            "3-0": 2,
            "4-0": 1,
            "5-0": 1,
        }
        assert {item.stream_id: item.attempt for item in runners.finished_items}[b"2-0"] == 3
        assert runners.given_up == []

    def test_one_that_failed_ran_after_those_of_its_ticket_that_are_done(self, is_async: bool) -> None:
        """So it is in the run log: else the audit takes it for one that overlapped with them, and overtook them."""

        def handle(messages: list[Message]) -> dict[Message, str]:
            time.sleep(0.01)
            return {one: "not yet" for one in messages if one.id == "3-0" and one.attempt == 1}

        runners = Runners(handle, is_async, per_ticket=5)
        runners.add(A=[1, 2, 3, 4])
        with runners:
            runners.until_over()
        [failure] = runners.failures
        assert failure.stream_id == b"3-0"
        assert [item.stream_id for item in runners.finished_items if item.end_us <= failure.start_us] == [
            b"1-0",
            b"2-0",
        ]
        assert failure.start_us <= failure.end_us

    def test_one_that_poisons_its_call_is_given_up_and_its_neighbours_are_not_charged(self, is_async: bool) -> None:
        def handle(messages: list[Message]) -> None:
            if any(one.id == "50-0" for one in messages):
                raise ValueError("poison")

        runners = Runners(handle, is_async, slots=3)
        runners.add(**{f"T{n}": [n] for n in range(1, 101)})
        with runners:
            runners.until_over()
        assert [(one, reason) for one, reason, _ in runners.given_up] == [("50-0", "attempts_exhausted")]
        assert len(runners.finished_items) == 99
        alone = [call for call in runners.calls if "50-0" in call][1:]
        assert alone == [["50-0"]] * 3, "three failures of its own, after the one in company"

    def test_sys_exit_in_a_handler_ends_neither_thread_nor_loop(self, is_async: bool) -> None:
        def handle(messages: list[Message]) -> None:
            if messages[0].attempt == 1:
                raise SystemExit(3)

        runners = Runners(handle, is_async, slots=1)
        runners.add(A=[1])
        with runners:
            runners.until_over()
        assert runners.done("A") == ["1-0"]

    def test_suspects_of_a_crash_are_called_by_themselves(self, is_async: bool) -> None:
        runners = Runners(lambda messages: None, is_async)
        runners.lanes.add(
            [(b"A", [message(b"A", 1, attempts=1)]), (b"B", [message(b"B", 2)]), (b"C", [message(b"C", 3, attempts=1)])]
        )
        runners.lanes.add([(b"D", [message(b"D", 4, attempts=3)])])
        with runners:
            runners.until_over()
        assert sorted(runners.calls) == [["1-0"], ["2-0"], ["3-0"]]
        assert runners.given_up == [("4-0", "attempts_exhausted", 3)]

    def test_a_pause_lets_what_is_gathered_run_and_nothing_else_begin(self) -> None:
        runners = Runners(lambda messages: None, wait_s=60)
        runners.add(A=[1, 2])
        with runners:
            runners.until(lambda: runners.lanes.running == 1)
            runners.lanes.pause()
            runners.until(lambda: runners.lanes.running == 0)
        assert runners.calls == [["1-0"]]
        assert quiet_ids(runners.lanes) == {b"A": [b"2-0"]}

    def test_a_ticket_forgotten_while_its_call_runs_leaves_nothing_behind(self, barrier: threading.Event) -> None:
        def handle(messages: list[Message]) -> Any:
            barrier.wait(PATIENCE_S)
            return {messages[0]: "failed"}

        runners = Runners(handle, per_ticket=3)
        runners.add(A=[1, 2, 3, 4])
        with runners:
            runners.until(lambda: len(runners.calls) == 1)
            with runners.lanes.lock:
                runners.lanes.forget(b"A", 1)
            barrier.set()
            runners.until_over()
        assert runners.calls == [["1-0", "2-0", "3-0"]]
        assert runners.finished_items == []

    def test_calls_run_at_the_same_time(self, barrier: threading.Event) -> None:
        def handle(messages: list[Message]) -> None:
            barrier.wait(PATIENCE_S)

        runners = Runners(handle, slots=3, most=1)
        runners.add(A=[1], B=[2], C=[3])
        with runners:
            runners.until(lambda: len(runners.calls) == 3)
            barrier.set()
            runners.until(lambda: runners.lanes.running == 0)
