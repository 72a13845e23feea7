"""Async pool: lanes of ``async def`` handlers on one event loop per process; as many messages at a time as there are slots."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from common.clock import now_s
from common.service import Service
from consumer.executor import Executor
from consumer.handlers import check_ran
from consumer.lane_keeper import MessageLane

_LONGEST_WAIT_S = 1.0
#: Most messages of one lane in a row; then it goes behind the others.
_SLICE = 16


class AsyncPool(Service):
    """One thread with an event loop; every lane that runs is a task."""

    name = "async"
    stalls_after_s = math.inf  # one turn is the whole life of the loop

    def __init__(self, executor: Executor, handle: Callable[[Any], Awaitable[Any]], slots: int) -> None:
        super().__init__()
        self._executor = executor
        self._handle = handle
        self._slots = slots
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        executor.keeper.on_ready = self._ring

    def run_once(self) -> float:
        try:
            asyncio.run(self._take_lanes())
        except BaseException as problem:  # a task that a handler made may end the loop, with SystemExit for one
            self._executor.broken(problem)
            raise
        return 0.0

    def interrupt(self) -> None:
        self._ring()

    def _ring(self) -> None:
        loop, news = self._event_loop, self._news
        if loop is not None and news is not None:
            try:
                loop.call_soon_threadsafe(news.set)
            except RuntimeError:
                pass  # the loop is closed: nothing is to be begun any more, and whoever rings is not to blame

    async def _take_lanes(self) -> None:
        self._news = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        while not self.stopping:
            self._news.clear()
            while len(tasks) < self._slots and (work := self._next_work()) is not None:
                task = asyncio.create_task(self._run(work))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(self._over)
            due_s = self._due_s()
            wait_s = _LONGEST_WAIT_S if due_s is None else min(_LONGEST_WAIT_S, max(0.0, due_s - now_s()))
            try:
                await asyncio.wait_for(self._news.wait(), wait_s)
            except asyncio.TimeoutError:
                continue
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def _next_work(self) -> Any:
        """What ``_run`` can begin with now, or None."""
        return self._executor.keeper.take_now()

    def _due_s(self) -> float | None:
        """When to look again even if nothing rings."""
        return self._executor.keeper.next_due_s()

    def _over(self, task: asyncio.Task[None]) -> None:
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            self._executor.broken(problem)  # not the handler's: ours; the lane is lost in there
        self._ring()

    async def _run(self, lane: MessageLane) -> None:
        """One lane, for a slice of messages."""
        executor = self._executor
        began_ns = time.monotonic_ns()
        count = 0
        while count < _SLICE and (message := executor.next_message(lane)) is not None:
            start_us = time.time_ns() // 1000
            if not executor.admit(lane, message, start_us):
                return
            try:
                result = await self._handle(message)
                if result is not None:
                    check_ran(result)
            except BaseException as problem:  # sys.exit() in a handler must not end the loop, nor a cancellation of its own lose the lane
                if isinstance(problem, asyncio.CancelledError) and self.stopping:
                    raise
                executor.raised(lane, message, problem)
                return
            count += 1
            if not executor.succeeded(lane, message, start_us, time.time_ns() // 1000):
                return
            if executor.keeper.paused:
                break
            await asyncio.sleep(0)  # a handler that never waits must not keep the loop for itself
        if not executor.may_start():
            await asyncio.sleep(0.02)  # the lease may have ended: do not spin
        executor.keeper.release(lane, count, (time.monotonic_ns() - began_ns) / 1e9)
