"""Batch pool: the runners of batch handlers (``usher.consumer.handlers.decorators.batch``), which make one call with
the messages of several lanes.

A call holds its lanes as a single message does: per ticket one call at a time; order, attempts, fences and
acknowledgements belong to each message. One runner at a time collects lanes; the others run calls, or wait for their
turn to collect.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from usher.common.base.clock import now_s, run_us
from usher.common.runtime.service import Service
from usher.consumer.execution.async_pool import AsyncPool, LaneWorker
from usher.consumer.execution.executor import Executor
from usher.consumer.execution.lanes import Lane
from usher.consumer.handlers.batches import TriedTogether, goes_alone, judge
from usher.consumer.handlers.decorators import BatchOptions
from usher.consumer.handlers.loader import Handler
from usher.consumer.handlers.message import Message

#: Longest wait for a lane, so that a stop is noticed.
_LONGEST_WAIT_S = 2.0


class BatchCollector:
    """A collector of lanes for the next call. One thread uses it at a time; the threads of a sync handler form a line
    for it."""

    def __init__(self, executor: Executor, batch: BatchOptions) -> None:
        self._lanes, self._outages = executor.lanes, executor.outages
        self._line, self.news = threading.Lock(), threading.Event()
        self._batch = batch
        self._taken: list[Lane] = []
        self._size = 0
        self._since_s = 0.0
        self._alone: Lane | None = None  # one at a time: all other ready lanes stay where a drain finds them

    def take(self, now: float) -> list[Lane] | None:
        """Return the lanes of the next call if it can start now: it is full, has waited long enough, or is for a single
        message that goes alone. Otherwise return None. It never waits."""
        while self._alone is None and self._size < self._batch.most and (lane := self._lanes.take_now()) is not None:
            self._put(lane, now)
        # First the lanes that have waited: more messages that go alone may come at any time.
        if self._taken and (
            self._size >= self._batch.most or now >= self._since_s + self._batch.wait_s or self._lanes.paused
        ):
            lanes, self._taken, self._size = self._taken, [], 0
            return lanes
        lane, self._alone = self._alone, None
        return [lane] if lane is not None else None

    def wait(self) -> list[Lane] | None:
        """Return the lanes of a call; None after a moment without any, and during a pause."""
        until_s = now_s() + _LONGEST_WAIT_S
        if not self._line.acquire(timeout=_LONGEST_WAIT_S):
            return None
        try:
            while True:
                self.news.clear()
                now = now_s()
                lanes, due_s = self.take(now), self.due_s()
                if lanes is not None or self._lanes.paused or now >= until_s:
                    return lanes
                self.news.wait(max(0.0, min(until_s, math.inf if due_s is None else due_s) - now))
        finally:
            self._line.release()

    def due_s(self) -> float | None:
        """Return the time at which ``take`` may have something even if nothing rings, or None."""
        due_s = self._lanes.next_due_s()
        if not self._taken:
            return due_s
        full_s = self._since_s + self._batch.wait_s
        return full_s if due_s is None else min(full_s, due_s)

    def _put(self, lane: Lane, now: float) -> None:
        if lane.early:
            with self._lanes.lock:
                lane.merge_early()
        try:
            head = lane.queue[0]
        except IndexError:  # the ticket was forgotten at this moment
            self._lanes.release(lane)
            return
        if self._outages.known and self._outages.concerns(head, now):
            head.alone = True  # its neighbours in a call would fail with it
        if goes_alone(head):
            self._alone = lane
            return
        if not self._taken:
            self._since_s = now
        self._taken.append(lane)
        self._size += min(len(lane.queue), self._batch.per_ticket)


class BatchCall:
    """A call of a batch handler: making it starts ``messages``, and ``end`` settles all of them."""

    def __init__(self, executor: Executor, lanes: Sequence[Lane], batch: BatchOptions) -> None:
        self._executor = executor
        self._parts: list[tuple[Lane, list[Message]]] = []
        room = batch.most
        for lane in lanes:
            part = self._start(lane, min(batch.per_ticket, room)) if room else []
            room -= len(part or ())
            if part:
                self._parts.append((lane, part))
            elif part is not None:
                executor.lanes.release(lane)
        self.messages = [message for _, part in self._parts for message in part]
        self._start_us = run_us()

    def _start(self, lane: Lane, most: int) -> list[Message] | None:
        """Start the lane's messages of this call, and return them; None when its first one is not started, and the lane
        is not ours any more."""
        part: list[Message] = []
        while len(part) < most and not (part and (lane.forgotten or _next_goes_alone(lane))):
            message = self._executor.next_message(lane)
            if message is None:
                break
            if part and goes_alone(message):  # one with a lower id came in front of the one that we looked at
                with self._executor.lanes.lock:
                    self._executor.lanes.requeue(lane, [message])
                break
            if not self._executor.admit(lane, message, run_us(), not part):
                return None
            part.append(message)
            if goes_alone(message):
                break
        return part

    def end(self, returned: Any, raised: BaseException | None) -> None:
        """Settle all messages: the handler is done. Afterwards none of the lanes is the runner's any more."""
        end_us = run_us()
        for (lane, part), (done, error) in zip(
            self._parts, judge([part for _, part in self._parts], returned, raised), strict=True
        ):
            self._settle(lane, part, done, error, end_us)

    def _settle(self, lane: Lane, part: list[Message], done: int, error: BaseException | None, end_us: int) -> None:
        executor = self._executor
        took_us = end_us - self._start_us
        held = False
        for place, message in enumerate(part[:done]):
            # In their order, each with an equal part of the call's time, so that a ticket's executions do not overlap
            # in the run log.
            start_us = self._start_us + took_us * place // len(part)
            held = not executor.succeeded(lane, message, start_us, self._start_us + took_us * (place + 1) // len(part))
        if error is None:
            if not held:
                executor.lanes.release(lane, done, took_us / 1e6)
            return
        for message in part[done:]:
            message.alone = isinstance(error, TriedTogether)
        # It was started together with the finished ones, and is noted behind them.
        part[done].start_us = self._start_us + took_us * done // len(part)
        executor.requeue(lane, part[done + 1 :])
        executor.raised(lane, part[done], error)


def _next_goes_alone(lane: Lane) -> bool:
    try:
        return goes_alone(lane.queue[0])
    except IndexError:
        return True


class BatchWorker(LaneWorker):
    """A slot of a sync batch handler: it runs one call at a time, for as long as the handler takes."""

    def __init__(
        self,
        number: int,
        executor: Executor,
        handle: Callable[[list[Message]], Any],
        batch: BatchOptions,
        collector: BatchCollector,
    ) -> None:
        super().__init__(number, executor, handle)
        self._batch, self._collector = batch, collector

    def run_once(self) -> float:
        while not self.stopping:
            if not self._executor.lease.may_start():
                return 0.02  # the lease may have ended: the heartbeat renews it, or this process leaves
            lanes = self._collector.wait()
            if lanes is None:
                return 0.05 if self._executor.lanes.paused else 0.0
            try:
                self._call(lanes)
            except BaseException as problem:  # an error of ours, not of the handler; the lanes are lost
                self._executor.broken(problem)
                raise
        return 0.0

    def interrupt(self) -> None:
        self._collector.news.set()

    def _call(self, lanes: list[Lane]) -> None:
        call = BatchCall(self._executor, lanes, self._batch)
        self._collector.news.set()  # lanes that found no room are ready again
        if call.messages:
            try:
                returned = self._handle(list(call.messages))
            except BaseException as problem:  # sys.exit() in a handler must not end this thread and lose the lanes
                call.end(None, problem)
            else:
                call.end(returned, None)
        self._collector.news.set()  # lanes with more messages are ready again, and who collects now was not told


class AsyncBatchPool(AsyncPool):
    """The runner of ``async def`` batch handlers, on one event loop; every call is a task."""

    def __init__(
        self, executor: Executor, handle: Callable[[list[Message]], Awaitable[Any]], slots: int, batch: BatchOptions
    ) -> None:
        super().__init__(executor, handle, slots)
        self._batch = batch
        self._gatherer = BatchCollector(executor, batch)

    def _next_work(self) -> list[Lane] | None:
        return self._gatherer.take(now_s())

    def _due_s(self) -> float | None:
        return self._gatherer.due_s()

    async def _run(self, lanes: Any) -> None:
        call = BatchCall(self._executor, lanes, self._batch)
        self._ring()  # lanes that found no room are ready again
        if call.messages:
            self.calls[asyncio.current_task()] = call.messages
            try:
                returned = await self._handle(list(call.messages))
            except BaseException as problem:  # sys.exit() in a handler must not end the loop
                if issubclass(type(problem), asyncio.CancelledError) and self._ends():
                    raise
                call.end(None, problem)
            else:
                call.end(returned, None)
        await self._pause(0.0 if self._executor.lease.may_start() else 0.02)


def batch_pool(handler: Handler, batch: BatchOptions, executor: Executor, slots: int) -> list[Service]:
    if executor.strict:  # a ticket's next message starts when Redis has the acknowledgement of the last one
        batch = dataclasses.replace(batch, per_ticket=1)
    if handler.is_async:
        return [AsyncBatchPool(executor, handler.call, slots, batch)]
    collector = BatchCollector(executor, batch)
    executor.lanes.on_ready = collector.news.set
    return [BatchWorker(number, executor, handler.call, batch, collector) for number in range(slots)]
