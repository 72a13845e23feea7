"""Lanes between threads: who is woken when, and what a pause, a retry and a blocked handler mean."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.integration.routers import until
from tests.unit.test_lanes import quiet_ids
from usher.common.base.clock import now_s
from usher.consumer.execution import lanes as lane_keeper
from usher.consumer.execution.lanes import Lane, Lanes
from usher.consumer.handlers.message import Message, OwnLease

#: Longer than any wait here may take on a busy machine.
PATIENCE_S = 20.0
LEASE = OwnLease(1e6, now_s())  # taken when the tests are collected; it outlives the run, however long that is


def messages(ticket: bytes, *numbers: int, fence: int = 1) -> tuple[bytes, list[Message]]:
    return ticket, [Message(ticket, b"%d-0" % number, fence, [], LEASE) for number in numbers]


class Waiter:
    """A thread in ``next_lane``."""

    def __init__(self, lanes: Lanes, timeout_s: float = PATIENCE_S) -> None:
        self.lane: Lane | None = None
        self.ended_s = 0.0
        self._lanes = lanes
        self._timeout_s = timeout_s
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self.lane = self._lanes.next_lane(self._timeout_s)
        self.ended_s = now_s()

    def join(self) -> Lane | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.lane

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()


def test_a_retry_that_is_due_while_the_others_are_busy_wakes_who_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_keeper, "_WATCH_S", PATIENCE_S)
    lanes = Lanes()
    lanes.add([messages(b"A", 1), messages(b"X", 2)])
    runner = lanes.next_lane(0.0)
    assert runner is not None
    watcher = Waiter(lanes)
    until(lambda: lanes._watched)
    monkeypatch.setattr(lane_keeper, "_WATCH_S", 0.01)  # the next time
    with lanes.lock:  # the runner fails, and takes the lane that the watcher could have had, before that one is awake
        lanes._hold(runner)
        lanes.waiting.append((now_s() + 0.05, 1, runner))
        assert lanes.take() is not None
        lanes._changed.notify()
    assert watcher.join() is runner


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    """Paused at the end, so that no thread of a failed test stays."""
    made = Lanes()
    yield made
    made.pause()


def make_slow(lanes: Lanes) -> None:
    """As if handlers took a second each."""
    lanes.add([messages(b"slow", 1)])
    lane = lanes.take_now()
    assert lane is not None
    lane.queue.clear()
    lanes.release(lane, 1, 1.0)


def test_who_waits_for_a_suspect_is_woken_by_it_and_nobody_else_waits(lanes: Lanes) -> None:
    lanes.add([messages(b"A", 1), messages(b"B", 2)])
    a = lanes.take_now()
    assert a is not None
    found: list[object] = []
    waits = threading.Thread(target=lambda: found.append(lanes.next_suspect(PATIENCE_S)), daemon=True)
    waits.start()
    lanes.isolate(a, a.queue.popleft())
    waits.join(PATIENCE_S)
    assert found == [a]
    assert lanes.running == 1
    b = lanes.next_lane(PATIENCE_S)
    assert b is not None
    assert b.ticket == b"B", "although a handler runs, and handlers are short: no watcher has to find out"
    a.queue.clear()
    lanes.release(a, 0, 0.0)
    assert lanes.running == 1
    lanes.pause()
    assert lanes.next_suspect(PATIENCE_S) is None, "at once"


def test_while_handlers_are_short_a_second_lane_runs_only_when_the_first_blocks(lanes: Lanes) -> None:
    lanes.add([messages(b"A", 1), messages(b"B", 2)])
    blocked = lanes.next_lane(PATIENCE_S)
    began_s = now_s()
    other = lanes.next_lane(PATIENCE_S)
    assert blocked is not None
    assert other is not None
    assert (blocked.ticket, other.ticket) == (b"A", b"B")
    assert now_s() - began_s >= lane_keeper._WATCH_S


def test_when_handlers_are_long_every_ready_lane_runs_at_once(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_keeper, "_WATCH_S", PATIENCE_S)  # watching would take for ever
    make_slow(lanes)
    waiters = [Waiter(lanes) for _ in range(4)]
    threading.Event().wait(0.1)
    lanes.add([messages(b"T%d" % number, number) for number in range(2, 6)])
    lanes = [waiter.join() for waiter in waiters]
    assert {lane.ticket for lane in lanes if lane is not None} == {b"T2", b"T3", b"T4", b"T5"}


def test_it_keeps_up_while_handlers_are_short_and_no_lane_waits(lanes: Lanes) -> None:
    assert lanes.keeps_up
    lanes.add([messages(b"T", 1)])
    assert not lanes.keeps_up
    assert lanes.take_now() is not None
    assert lanes.keeps_up
    make_slow(lanes)
    assert not lanes.keeps_up


def test_a_retry_is_run_at_its_time_by_a_thread_that_was_waiting_longer(lanes: Lanes) -> None:
    lanes.add([messages(b"T", 1)])
    lane = lanes.next_lane(PATIENCE_S)
    assert lane is not None
    waiter = Waiter(lanes)
    threading.Event().wait(0.1)  # by now it waits for much longer than the retry
    due_s = now_s() + 0.2
    lanes.retry(lane, lane.queue.popleft(), due_s)
    assert lanes.next_due_s() == due_s
    assert waiter.join() is lane
    assert due_s <= waiter.ended_s < due_s + PATIENCE_S / 2


def test_a_held_lane_wakes_somebody_when_it_is_let_go(lanes: Lanes) -> None:
    lanes.add([messages(b"T", 1)])
    lane = lanes.next_lane(PATIENCE_S)
    assert lane is not None
    lane.queue.clear()
    lanes.hold(lane)
    lanes.add([messages(b"T", 2)])
    waiter = Waiter(lanes)
    threading.Event().wait(0.1)
    assert lanes.take_now() is None
    lanes.resume(lane)
    assert waiter.join() is lane


class TestPause:
    def test_a_thread_that_watches_the_runner_takes_nothing_when_the_pause_wakes_it(
        self, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is quiet is given back: were it started now, two consumers would run it."""
        monkeypatch.setattr(lane_keeper, "_WATCH_S", PATIENCE_S)
        lanes.add([messages(b"RUNS", 1), messages(b"READY", 2)])
        assert lanes.next_lane(PATIENCE_S) is not None
        waiter = Waiter(lanes)
        until(lambda: lanes._watched)
        lanes.pause()
        assert waiter.join() is None
        assert quiet_ids(lanes) == {b"READY": [b"2-0"]}


def test_an_event_loop_is_told_of_everything_that_may_make_a_lane_ready(lanes: Lanes) -> None:
    told: list[str] = []
    lanes.on_ready = lambda: told.append("ready")
    lanes.add([messages(b"T", 1)])
    lane = lanes.take_now()
    assert lane is not None
    lanes.retry(lane, lane.queue.popleft(), now_s())
    assert lanes.take_now() is lane
    lanes.hold(lane)
    lanes.resume(lane)
    assert len(told) == 3


class Crowd:
    """Threads that run whatever is ready, as a pool does, and note what they see."""

    def __init__(self, lanes: Lanes, threads: int) -> None:
        self.handled: dict[bytes, list[bytes]] = defaultdict(list)
        self.overlaps = 0
        self._lanes = lanes
        self._running: set[bytes] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._lanes.paused:
            lane = self._lanes.next_lane(0.5)
            if lane is not None:
                self._run_lane(lane, rng)

    def _run_lane(self, lane: Lane, rng: random.Random) -> None:
        began_s, count = now_s(), 0
        while count < 3:
            if lane.early:
                with self._lanes.lock:
                    lane.merge_early()
            if not lane.queue:
                break
            message = lane.queue.popleft()
            self._note(lane.ticket, rng)
            how = rng.random()
            if how < 0.1:
                self._lanes.retry(lane, message, now_s() + 0.001)
                return
            with self._lock:
                self.handled[lane.ticket].append(message.stream_id)
            with self._lanes.lock:
                self._lanes.done([message.stream_id])
            count += 1
            if how < 0.2:
                self._lanes.hold(lane)
                self._lanes.resume(lane)
                return
        self._lanes.release(lane, count, now_s() - began_s)

    def _note(self, ticket: bytes, rng: random.Random) -> None:
        with self._lock:
            self.overlaps += ticket in self._running
            self._running.add(ticket)
        if rng.random() < 0.05:
            threading.Event().wait(0.003)  # a handler that blocks
        with self._lock:
            self._running.discard(ticket)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_with_many_threads_each_ticket_runs_in_order_and_alone_and_all_is_done(lanes: Lanes) -> None:
    crowd = Crowd(lanes, 6)
    tickets = [b"T%d" % number for number in range(20)]
    number = 0
    for _ in range(40):
        parts = []
        for ticket in random.Random(number).sample(tickets, 10):
            parts.append(messages(ticket, number + 1, number + 2))
            number += 2
        lanes.add(parts)
    until(lambda: lanes.load()[1] == 0)
    lanes.pause()
    crowd.join()
    assert crowd.overlaps == 0
    assert sum(map(len, crowd.handled.values())) == number == 800
    for handled in crowd.handled.values():
        order = [int(entry_id.partition(b"-")[0]) for entry_id in handled]
        assert order == sorted(order)


def test_what_comes_under_the_fence_of_a_ticket_that_has_ended_here_is_not_taken_and_what_comes_under_a_later_one_is() -> (
    None
):
    lanes = Lanes()
    lanes.add([messages(b"T", 1, 2)])
    lane = lanes.take_now()
    assert lane is not None
    lane.queue.popleft()
    lanes.hold(lane)
    lanes.close_fence(b"T", 1, b"1-0")
    assert not lanes.held_ids, "they may be handed over to us again"
    lanes.add([messages(b"T", 3), messages(b"U", 4)])
    assert lanes.held_ids == {b"4-0"}
    assert lanes.closed_fences() == [], "Redis has not said so yet: the inbox may still get more"
    lanes.confirm_closed(b"T", 1)
    assert lanes.closed_fences() == [(b"T", 1)]
    lanes.add([messages(b"T", 1, 2, fence=2)])
    lanes.resume(lane)
    lane.merge_early()
    assert [message.stream_id for message in lane.queue] == [b"1-0", b"2-0"]
    lanes.forget_closed([(b"T", 1)])
    assert lanes.closed_fences() == []
