"""Async pool: it runs lanes of ``async def`` handlers on one event loop per process, as many messages at a time as
there are slots."""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from usher.common.base.clock import now_s, run_us
from usher.common.runtime.service import Service, ServiceEnded
from usher.consumer.execution.executor import Executor
from usher.consumer.execution.lanes import Ended, Lane
from usher.consumer.handlers.loader import check_ran
from usher.consumer.handlers.message import Message

#: Most messages of one lane in a row, and the time in microseconds after which the lane goes behind the others.
_THREAD_SLICE = 64
_THREAD_SLICE_US = 2000
_LOOKS_EVERY_S = 5.0


class LaneWorker(Service):
    """A slot that runs one lane at a time. A handler may take as long as it likes, so health does not time this
    thread."""

    stalls_after_s = math.inf

    def __init__(self, number: int, executor: Executor, handle: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name = f"work-{number}"
        self._executor = executor
        self._handle = handle

    def run_once(self) -> float:
        lanes = self._executor.lanes
        ended: Ended | None = None
        while not self.stopping:
            lane = lanes.next_lane(_LOOKS_EVERY_S, ended)
            if lane is None:
                return 0.05 if lanes.paused else 0.0
            try:
                ended = self._run(lane)
            except BaseException as problem:
                # An error of ours, not of the handler. The lane is lost, and only a new process is sure to run its
                # ticket again.
                self._executor.broken(problem)
                raise
            if ended is not None and not ended[1] and not self._executor.lease.may_start():
                break  # the lease may have ended: the heartbeat renews it, or this process leaves
        if ended is not None:
            lanes.release(*ended)
        return 0.02

    def _run(self, lane: Lane) -> Ended | None:
        """Run a slice of the lane. Return None when the lane is not ours any more, and another part decides when it
        goes on."""
        executor, handle, clock, queue = self._executor, self._handle, run_us, lane.queue
        next_message, is_plain, outages = executor.next_message, executor.is_plain, executor.outages
        began_us = end_us = clock()
        count = 0
        while (message := next_message(lane)) is not None:
            start_us = end_us
            is_free = not outages.known or outages.is_quiet(message.ticket)
            if is_plain and is_free and message.plain and not message.attempt:
                executor.begin(message, start_us)
            elif not executor.admit(lane, message, start_us):
                return None
            try:
                result = handle(message)
                if result is not None:
                    check_ran(result)
                    message.result(result)
            except BaseException as problem:  # sys.exit() in a handler must not end this thread and lose the lane
                executor.raised(lane, message, problem)
                return None
            end_us = clock()
            count += 1
            if not executor.succeeded(lane, message, start_us, end_us, here=True):
                return None
            if not queue or count >= _THREAD_SLICE or end_us - began_us >= _THREAD_SLICE_US:
                break  # most lanes have one message
        return lane, count, (end_us - began_us) / 1e6


#: The free slots look for lanes this often, even if nothing rings: only such a look ends the patience of lanes that
#: wait to run isolated.
_LONGEST_WAIT_S = 1.0
#: Most messages of one lane in a row; then it goes behind the others.
_SLICE = 16


class AsyncPool(Service):
    """A thread with an event loop. Every lane that runs is a task, with its own context; when one ends, the next one
    starts."""

    name = "async"
    stalls_after_s = math.inf  # one turn is the whole life of the loop

    def __init__(self, executor: Executor, handle: Callable[[Any], Awaitable[Any]], slots: int) -> None:
        super().__init__()
        self._executor = executor
        self._handle = handle
        self._free = slots  # changed on the loop only
        self._rung = False  # the loop was called and has not looked yet
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.Context()  # of our own callbacks: lanes start in it, whichever thread rang
        self._end = asyncio.Event()  # set first, so that nothing starts while the loop ends
        self._main: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.calls: dict[asyncio.Task[Any] | None, Sequence[Message]] = {}  # the messages of a task's last call
        self._latest: asyncio.Task[Any] | None = None  # the task that called a handler last
        self._asked_s = 0.0  # when the loop was asked to turn, and has not answered; 0: it has
        executor.lanes.on_ready, executor.cancel_task = self._ring, lambda one: self._call(lambda: self._cancel(one))

    def _cancel(self, stream_id: bytes) -> None:
        beside = self._executor.besides.get(stream_id)
        if beside is None or not beside.cancelled.is_set():
            return  # the run that was interrupted has ended
        for task, messages in self.calls.items():
            if task is not None and any(one.stream_id == stream_id and one.in_hand for one in messages):
                task.cancel()

    def silent_s(self) -> float:
        """Return for how long the loop has not turned, 0.0 if it did since the last question. For the watchdog."""
        if self._asked_s:
            return time.monotonic() - self._asked_s
        self._asked_s = time.monotonic()
        self._call(self._answer)
        return 0.0

    def _answer(self) -> None:
        self._asked_s = 0.0

    def on_loop(self) -> Sequence[Message]:
        """Return the messages of the call that runs on the loop at this moment, empty if it is no lane's task."""
        loop = self._event_loop
        return self.calls.get(asyncio.current_task(loop), ()) if loop is not None else ()

    def run_once(self) -> float:
        if self._main is not None:
            raise ServiceEnded  # a loop that one of its tasks ended is not started again: this process leaves
        try:
            asyncio.run(self._live())
        except BaseException as problem:  # a task of a handler's own may end the loop, with SystemExit for example
            self._executor.broken(problem)
            raise
        return 0.0

    def interrupt(self) -> None:
        self._call(self._end.set)

    def _ring(self) -> None:
        """Look for ready lanes soon. Not needed while no slot is free: a slot looks by itself as soon as it is."""
        if self._free and not self._rung:
            self._rung = True
            self._call(self._fill)

    def _call(self, what: Callable[[], Any]) -> None:
        loop = self._event_loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(what, context=self._context)
            except RuntimeError:
                pass  # the loop is closed: nothing is to start any more, and the caller is not to blame

    def _ends(self) -> bool:
        """Return whether the pool ends: nothing may start any more, and this is why tasks are cancelled. A handler may
        have ended the loop itself."""
        return self.stopping or self._end.is_set() or (self._main is not None and self._main.cancelling() > 0)

    async def _live(self) -> None:
        self._main, self._event_loop = asyncio.current_task(), asyncio.get_running_loop()
        if not self.stopping:
            self._call(self._fill)
            await self._end.wait()
        if self.calls:
            await asyncio.wait(filter(None, [*self.calls]), timeout=1.0)

    def _fill(self) -> None:
        """Start a task for each ready lane while slots are free, and look again when more is due. Runs on the loop."""
        loop = self._event_loop
        assert loop is not None
        self._rung = False  # before the look: a lane that is added after it rings again
        if self._ends():
            return
        try:
            while self._free and (work := self._next_work()) is not None:
                task = loop.create_task(self._run(work))
                self._free -= 1
                self.calls[task] = ()
                task.add_done_callback(self._ended, context=self._context)
            if self._free:
                due_s = self._due_s()
                wait_s = _LONGEST_WAIT_S if due_s is None else min(_LONGEST_WAIT_S, max(0.0, due_s - now_s()))
                now = loop.time()
                if self._timer is None or not now < self._timer.when() <= now + wait_s:  # it is over, or too late
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer = loop.call_later(wait_s, self._fill, context=self._context)
        except BaseException as problem:
            self._executor.broken(problem)
            raise

    def _next_work(self) -> Any:
        return self._executor.lanes.take_now()

    def _due_s(self) -> float | None:
        return self._executor.lanes.next_due_s()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.calls.pop(task, None)
        self._free += 1  # before the look, see ``_ring``
        if task.cancelled():
            if not self._ends():
                self._executor.broken(asyncio.CancelledError("the task of a lane was cancelled"))
        elif (problem := task.exception()) is not None:
            self._executor.broken(problem)  # an error of ours, not of the handler; the lane is lost
        if not self._rung:  # one look for all that end in this turn of the loop
            self._rung = True
            task.get_loop().call_soon(self._fill, context=self._context)

    async def _run(self, lane: Any) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        await self._slice(lane, task)
        if task.cancelling():
            await self._pause(0.0)  # a cancellation that the handler asked for as it ended arrives here

    async def _slice(self, lane: Lane, task: asyncio.Task[None]) -> None:
        """Run messages of the lane, and give it back, if it is still ours. A changed context, or a cancelled task, is
        no other message's: another task goes on."""
        executor, queue, count = self._executor, lane.queue, 0
        began_us = end_us = run_us()
        while not task.cancelling() and count < _SLICE and (message := executor.next_message(lane)) is not None:
            start_us = run_us()
            is_free = not executor.outages.known or executor.outages.is_quiet(message.ticket)
            if executor.is_plain and is_free and message.plain and not message.attempt:
                executor.begin(message, start_us)
            elif not executor.admit(lane, message, start_us):
                return
            self.calls[task], before, self._latest = (message,), contextvars.copy_context(), task
            try:
                result = await self._handle(message)
                if result is not None:
                    check_ran(result)
                    message.result(result)
            except BaseException as problem:
                # sys.exit() in a handler must not end the loop, and its own cancellation must not lose the lane.
                if issubclass(type(problem), asyncio.CancelledError) and self._ends():
                    raise
                executor.raised(lane, message, problem)
                return
            count, end_us = count + 1, run_us()
            if not executor.succeeded(lane, message, start_us, end_us):
                return
            if not queue or executor.lanes.paused or contextvars.copy_context() != before:
                break
            # A handler that never waits must not keep the loop for itself.
            if self._latest is task and not await self._pause(0.0):
                break
        if not executor.lease.may_start():
            await self._pause(0.02)  # or the loop would spin
        executor.lanes.release(lane, count, (end_us - began_us) / 1e6)

    async def _pause(self, seconds: float) -> bool:
        """Let other tasks run. Return False if a handler had its own task cancelled as it ended: the rest of the lane
        goes on in another task."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if self._ends():
                raise
            return False
        return True
