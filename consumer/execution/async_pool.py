"""Async pool: lanes of ``async def`` handlers on one event loop per process; as many messages at a time as there are
slots."""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from usher.common.base.clock import now_s
from usher.common.runtime.service import Service, ServiceEnded
from usher.consumer.execution.executor import Executor
from usher.consumer.execution.lanes import MessageLane
from usher.consumer.handlers.loader import check_ran

#: The free slots look for lanes this often, even if nothing rings: the patience of lanes that were set apart ends with
#: a look.
_LONGEST_WAIT_S = 1.0
#: Most messages of one lane in a row; then it goes behind the others.
_SLICE = 16


class AsyncPool(Service):
    """One thread with an event loop. Every lane that runs is a task, with a context of its own; when one ends, the next
    one begins."""

    name = "async"
    stalls_after_s = math.inf  # one turn is the whole life of the loop

    def __init__(self, executor: Executor, handle: Callable[[Any], Awaitable[Any]], slots: int) -> None:
        super().__init__()
        self._executor = executor
        self._handle = handle
        self._free = slots  # changed on the loop only
        self._tasks: set[asyncio.Task[None]] = set()
        self._rung = False  # the loop was called and has not looked yet
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.Context()  # of what is ours on the loop: lanes begin in it, whoever rang
        self._end: asyncio.Future[None] | None = (
            None  # of the loop; whatever ends it ends this first, so that nothing begins while it does
        )
        self._timer: asyncio.TimerHandle | None = None
        executor.lanes.on_ready = self._ring

    def run_once(self) -> float:
        if self._end is not None:
            raise ServiceEnded  # a loop that was ended by what it ran is not begun again: this process leaves
        try:
            asyncio.run(self._live())
        except BaseException as problem:  # a task that a handler made may end the loop, with SystemExit for one
            self._executor.broken(problem)
            raise
        return 0.0

    def interrupt(self) -> None:
        self._call(self._let_end)

    def _ring(self) -> None:
        """A lane may be ready. Where no slot is free nobody needs to know: a slot frees itself first, and looks
        then."""
        if self._free and not self._rung:
            self._rung = True
            self._call(self._fill)

    def _call(self, what: Callable[[], Any]) -> None:
        loop = self._event_loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(what, context=self._context)
            except RuntimeError:
                pass  # the loop is closed: nothing is to be begun any more, and whoever rings is not to blame

    def _ends(self) -> bool:
        """Whether nothing may begin any more, and what is cancelled is cancelled by that."""
        return self.stopping or (self._end is not None and self._end.done())

    def _let_end(self) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        self._end, self._event_loop = loop.create_future(), loop
        if not self.stopping:
            self._call(self._fill)
            await self._end
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    def _fill(self) -> None:
        """Let the free slots begin with what is ready, and look again when more is due. On the loop."""
        loop = self._event_loop
        assert loop is not None
        self._rung = False  # before the look: what is added after it rings
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends():
            return
        try:
            while self._free and (work := self._next_work()) is not None:
                task = loop.create_task(self._run(work))
                self._free -= 1
                self._tasks.add(task)
                task.add_done_callback(self._ended, context=self._context)
            if self._free:
                due_s = self._due_s()
                wait_s = _LONGEST_WAIT_S if due_s is None else min(_LONGEST_WAIT_S, max(0.0, due_s - now_s()))
                self._timer = loop.call_later(wait_s, self._fill, context=self._context)
        except BaseException as problem:
            self._executor.broken(problem)
            raise

    def _next_work(self) -> Any:
        """What ``_run`` can begin with now, or None."""
        return self._executor.lanes.take_now()

    def _due_s(self) -> float | None:
        """When to look again even if nothing rings."""
        return self._executor.lanes.next_due_s()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._free += 1  # before the look, see ``_ring``
        if task.cancelled():
            if not self._ends():
                self._executor.broken(asyncio.CancelledError("the task of a lane was cancelled"))
        elif (problem := task.exception()) is not None:
            self._executor.broken(problem)  # not the handler's: ours; the lane is lost in there
        self._fill()

    async def _run(self, lane: MessageLane) -> None:
        """One lane, for a slice of messages."""
        began_ns = time.monotonic_ns()
        count = await self._slice(lane)
        # A cancellation that a handler asked for as it ended comes here; and where the lease may have ended, nothing
        # spins.
        await self._pause(0.0 if self._executor.may_start() else 0.02)
        if count is not None:
            self._executor.lanes.release(lane, count, (time.monotonic_ns() - began_ns) / 1e9)

    async def _slice(self, lane: MessageLane) -> int | None:
        """How many messages of the lane ended; None: somebody else has to say when it goes on."""
        executor = self._executor
        count = 0
        while count < _SLICE and (message := executor.next_message(lane)) is not None:
            start_us = time.time_ns() // 1000
            if not executor.admit(lane, message, start_us):
                return None
            try:
                result = await self._handle(message)
                if result is not None:
                    check_ran(result)
            except (
                BaseException
            ) as problem:  # sys.exit() in a handler must not end the loop, nor a cancellation of its own lose the lane
                if isinstance(problem, asyncio.CancelledError) and self._ends():
                    raise
                executor.raised(lane, message, problem)
                return None
            count += 1
            if not executor.succeeded(lane, message, start_us, time.time_ns() // 1000):
                return None
            if executor.lanes.paused or not lane.queue:
                break
            if not await self._pause(0.0):  # a handler that never waits must not keep the loop for itself
                break
        return count

    async def _pause(self, seconds: float) -> bool:
        """Let others run. False: a handler had its own task cancelled as it ended; what is left of the lane goes on in
        another task."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if self._ends():
                raise
            return False
        return True
