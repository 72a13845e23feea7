"""``async def`` handlers on the event loop of the standard library: what a handler may do to it, and what a stop
does."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

import usher.consumer.execution.pools
from usher.common.base.clock import now_s
from usher.consumer.execution.executor import Executor
from usher.consumer.execution.lanes import Lane, Lanes
from usher.consumer.execution.pools import AsyncPool
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.policy.outcome import Bury, Finished, RetryPolicy

PATIENCE_S = 20.0
LEASE = OwnLease(1e6, now_s())  # taken when the tests are collected; it outlives the run, however long that is


class Pool:
    """An async pool on lanes; what its messages ended in."""

    unnoted = frozenset[bytes]()

    def __init__(
        self,
        handle: Callable[[Message], Awaitable[None]],
        slots: int = 4,
        policy: RetryPolicy | None = None,
        strict: bool = False,
    ) -> None:
        self.done: list[str] = []
        self.given_up: list[str] = []
        self.broken: list[str] = []
        self.lanes = Lanes()
        self.journal, self.failures = Journal(None, "", "", 8), list[Finished]()
        self.executor = Executor(
            self.lanes, self, self.journal, LEASE, policy or RetryPolicy(3, 0.0, 0.0), strict, 0.0, self.broken.append
        )
        self.executor.all_wait_here = True
        self.pool = AsyncPool(self.executor, handle, slots)

    def finished(self, item: Message, here: bool = False) -> None:
        self.done.append(item.id)
        with self.lanes.lock:
            self.lanes.done([item.stream_id])
        if item.lane is not None:  # it is held until Redis has this
            self.lanes.resume(item.lane)

    def failed(self, failure: Finished) -> None:
        self.failures.append(failure)

    def give_up(self, lane: Lane, given: Message, bury: Bury) -> None:
        self.given_up.append(given.id)

    def add(self, *numbers: int) -> None:
        self.lanes.add([(b"T%d" % n, [Message(b"T%d" % n, b"%d-0" % n, 1, [], LEASE)]) for n in numbers])

    def add_to(self, ticket: int, *numbers: int) -> None:
        """Messages of one ticket."""
        self.lanes.add([(b"T%d" % ticket, [Message(b"T%d" % ticket, b"%d-0" % n, 1, [], LEASE) for n in numbers])])

    def end(self) -> None:
        self.pool.stop()
        assert self.pool.join(PATIENCE_S)

    def until(self, condition: Callable[[], bool]) -> None:
        end_s = now_s() + PATIENCE_S
        while not condition():
            assert now_s() < end_s, (self.done, self.given_up, self.broken)
            time.sleep(0.005)


def test_a_handler_may_use_child_processes_threads_and_its_own_cancellation() -> None:
    """The loop does not run on the main thread, where child processes are watched differently."""

    async def handle(message: Message) -> None:
        if message.id == "1-0":
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "print(42)", stdout=asyncio.subprocess.PIPE
            )
            assert (await child.communicate())[0] == b"42\n"
        elif message.id == "2-0":
            assert await asyncio.get_running_loop().run_in_executor(None, threading.get_ident) != threading.get_ident()
        elif message.attempt == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(60)

    made = Pool(handle)
    made.add(1, 2, 3)
    made.pool.start()
    made.until(lambda: sorted(made.done) == ["1-0", "2-0", "3-0"])
    made.end()
    assert not made.broken


async def _exit() -> None:
    sys.exit(3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["stop", "cancel_all", "exit_in_a_task", "exit_in_a_callback"])
def test_a_handler_that_ends_the_loop_leaves_all_that_ran_as_a_crash_does(how: str) -> None:
    """The journal still has what ran, and nobody was charged: the successor makes suspects of all of them."""

    async def handle(message: Message) -> None:
        if message.id == "9-0":
            loop = asyncio.get_running_loop()
            if how == "stop":
                loop.stop()
            elif how == "cancel_all":
                for task in asyncio.all_tasks():
                    task.cancel()
            elif how == "exit_in_a_task":
                await loop.create_task(_exit())
            else:
                loop.call_soon(sys.exit, 3)
        await asyncio.sleep(60)

    made = Pool(handle)
    made.add(1, 2)
    made.pool.start()
    made.until(lambda: len(made.journal.running()) == 2)
    made.add(9)
    made.until(lambda: bool(made.broken))
    assert made.pool.join(PATIENCE_S)
    assert sorted(left.stream_id for left in made.journal.running()) == [b"1-0", b"2-0", b"9-0"]
    assert not (made.failures or made.done or made.given_up)


@pytest.fixture
def no_glances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for lanes by chance: what is not told is not seen."""
    monkeypatch.setattr(usher.consumer.execution.pools, "_LONGEST_WAIT_S", 3600.0)


@pytest.mark.usefixtures("no_glances")
def test_what_comes_while_all_slots_are_busy_begins_when_one_is_free() -> None:
    gate = threading.Event()

    async def handle(message: Message) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.001)

    made = Pool(handle, slots=2)
    made.add(1, 2)
    made.pool.start()
    made.until(lambda: made.lanes.running == 2)
    made.add(3)
    made.add_to(1, 4)
    gate.set()
    made.until(lambda: sorted(made.done) == ["1-0", "2-0", "3-0", "4-0"])
    for number in range(10, 60):  # and what comes while some slots are free, at any moment of the loop
        made.add(number)
        made.until(lambda number=number: f"{number}-0" in made.done)
    made.end()


@pytest.mark.usefixtures("no_glances")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_handler_that_has_its_own_task_cancelled_as_it_ends_does_not_take_its_lane_along(
    strict: bool, fails: bool
) -> None:
    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if fails and not message.failures:
            raise RuntimeError

    made = Pool(handle, slots=1, strict=strict)
    made.add_to(1, 1, 2, 3)
    made.pool.start()
    made.until(lambda: made.done == ["1-0", "2-0", "3-0"])
    made.add_to(1, 4)
    made.until(lambda: made.done == ["1-0", "2-0", "3-0", "4-0"])
    made.end()
    assert not made.broken


def test_a_cancellation_that_comes_late_and_what_waits_for_a_task_to_end_concern_no_other_ticket() -> None:
    """Of a timeout of the handler's own that nobody withdraws, say; and of what is kept by the task."""
    ended: list[str] = []

    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: ended.append(message.id))
        assert len(ended) >= len(made.done) - 1
        if message.id == "1-0":
            asyncio.get_running_loop().call_later(0.02, task.cancel)
        await asyncio.sleep(0.001 if message.id == "1-0" else 0.05)

    made = Pool(handle, slots=1)
    made.add(1, 2, 3)
    made.pool.start()
    made.until(lambda: len(made.done) == 3 or bool(made.failures))
    made.end()
    assert (made.done, made.failures) == (["1-0", "2-0", "3-0"], [])


def test_a_message_behind_one_that_was_interrupted_and_ended_well_is_not_cancelled() -> None:
    """From Python 3.13 on, a group of tasks that fails in a task that was cancelled once cancels that again."""
    seen: list[tuple[int, str]] = []

    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        if message.id == "1-0":
            task.cancel()  # as an interrupt does
        seen.append((task.cancelling(), message.id))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(0 if message.id == "1-0" else "no number"))  # type: ignore[arg-type]
        except (asyncio.CancelledError, ExceptionGroup):
            await asyncio.sleep(0)

    made = Pool(handle, slots=1)
    made.add_to(1, 1, 2, 3)
    made.pool.start()
    made.until(lambda: made.done == ["1-0", "2-0", "3-0"] or bool(made.failures))
    made.end()
    assert (seen, made.failures) == ([(1, "1-0"), (0, "2-0"), (0, "3-0")], [])


def test_who_was_interrupted_too_late_is_no_reason_to_cancel_its_next_run() -> None:
    """The order reaches the event loop when its run has ended, and the message runs again: it was a failure of that."""

    async def handle(message: Message) -> None:
        made.executor.cancel_task(message.stream_id)
        await asyncio.sleep(0.05)

    made = Pool(handle)
    made.add(1)
    made.pool.start()
    made.until(lambda: bool(made.done or made.failures))
    made.end()
    assert made.done == ["1-0"]


@pytest.mark.usefixtures("no_glances")
@pytest.mark.parametrize("failures", [0, 2])
@pytest.mark.parametrize("slots", [1, 4])
def test_what_a_handler_has_in_its_context_no_other_message_and_no_retry_sees(slots: int, failures: int) -> None:
    note: contextvars.ContextVar[str] = contextvars.ContextVar("note", default="")
    seen: list[str] = []

    async def handle(message: Message) -> None:
        seen.append(note.get())
        note.set(message.id)
        if message.failures < failures:
            raise RuntimeError

    made = Pool(handle, slots)
    made.add(1, 2, 3)
    made.add_to(4, 4, 5, 6)
    made.pool.start()
    made.until(lambda: len(made.done) == 6)
    made.end()
    assert seen == [""] * 6 * (failures + 1)


@pytest.mark.usefixtures("no_glances")
def test_a_retry_that_comes_due_between_the_look_for_lanes_and_that_for_due_times_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, fails = threading.Event(), threading.Event()

    async def handle(message: Message) -> None:
        if message.ticket == b"T2":
            while not gate.is_set():
                await asyncio.sleep(0.001)
        elif message.failures < 1:
            fails.set()
            raise RuntimeError

    made = Pool(handle, 4, RetryPolicy(3, 0.2, 0.2))
    next_due_s = made.lanes.next_due_s

    def late() -> float | None:
        waiting = made.lanes.waiting
        if waiting and gate_to_late.is_set():
            gate_to_late.clear()
            while now_s() < waiting[0][0]:  # the loop's thread is held up here until then
                time.sleep(0.001)
        return next_due_s()

    gate_to_late = threading.Event()
    monkeypatch.setattr(made.lanes, "next_due_s", late)
    made.add(1)
    made.pool.start()
    assert fails.wait(PATIENCE_S)
    made.until(lambda: bool(made.lanes.waiting))
    gate_to_late.set()
    made.add(2)
    made.until(lambda: made.done == ["1-0"])
    gate.set()
    made.end()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # it leaves its thread, as it should
def test_a_task_of_a_handler_that_ends_the_loop_is_the_failure_of_no_other_message() -> None:
    tasks: list[asyncio.Task[None]] = []

    async def leave() -> None:
        raise SystemExit(3)

    async def handle(message: Message) -> None:
        if message.id == "3-0":
            tasks.append(asyncio.get_running_loop().create_task(leave()))
        await asyncio.sleep(60)

    made = Pool(handle, 2, RetryPolicy(1, 0.0, 0.0))
    made.add(1, 3, 4)
    made.pool.start()
    made.until(lambda: bool(made.broken))
    made.end()
    assert not made.given_up
    assert made.broken == ["SystemExit around a handler call"]
    assert made.lanes.ready, "the fourth begins nowhere"
    assert isinstance(tasks[0].exception(), SystemExit)  # or asyncio tells of it in the middle of another test


def test_a_failed_message_starts_again_once_its_failure_is_noted_or_a_lost_lease_would_not_count_it() -> None:
    starts: list[int] = []

    async def handle(message: Message) -> None:
        starts.append(message.attempt)
        raise ValueError

    made = Pool(handle)
    made.unnoted = frozenset({b"1-0"})
    made.add(1)
    made.pool.start()
    made.until(lambda: starts == [1])
    time.sleep(0.2)  # it is due at once
    assert starts == [1]
    made.unnoted = frozenset()
    made.until(lambda: made.given_up == ["1-0"])
    made.end()
    assert starts == [1, 2, 3]


@pytest.mark.parametrize("is_quick", [True, False])
def test_what_fails_at_once_in_an_outage_does_not_make_handlers_short_and_what_fails_slowly_long(
    is_quick: bool,
) -> None:
    async def handle(message: Message) -> None:
        is_done = message.id < "5"
        await asyncio.sleep(0.05 * (is_done == is_quick))
        if not is_done:
            raise ConnectionRefusedError("away")

    pool = Pool(handle, policy=RetryPolicy(99, 60.0, 60.0))
    pool.add(1, 2, 3, 4)
    pool.pool.start()
    pool.until(lambda: len(pool.done) == 4)
    assert pool.lanes.keeps_up == (not is_quick)
    pool.add(*range(6, 10), *range(60, 100))
    pool.until(lambda: len(pool.failures) == 44)
    pool.end()
    assert not pool.lanes.keeps_up, "others would wait for each other"
