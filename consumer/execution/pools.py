"""Pools: the runners of lanes. Threads run ``def`` handlers, one lane at a time each; an event loop runs ``async def``
ones, as many calls at a time as there are slots.

A batch handler (``usher.consumer.handlers.decorators.batch``) gets the messages of several lanes in one call. It
holds them as a single message does: per ticket one call at a time; order, attempts, fences and acknowledgements belong
to each message. One runner at a time collects lanes; the others run calls, or wait for their turn to collect.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from usher.common.base.clock import now_s, run_us
from usher.common.runtime.service import Service, ServiceEnded
from usher.consumer.execution.executor import Executor
from usher.consumer.execution.lanes import Ended, Lane, Lanes
from usher.consumer.handlers.batches import TriedTogether, goes_alone, judge
from usher.consumer.handlers.decorators import BatchOptions
from usher.consumer.handlers.loader import Handler, check_ran
from usher.consumer.handlers.message import Message

#: Most messages of one lane in a row, and the time in microseconds after which the lane goes behind the others.
_THREAD_SLICE = 64
_THREAD_SLICE_US = 2000
_LOOKS_EVERY_S = 5.0
#: The same of a lane on an event loop.
_SLICE = 16
#: The free slots of an event loop look for lanes this often, even if nothing rings: only such a look ends the patience
#: of lanes that wait to run isolated. A thread that collects a batch waits no longer, so that a stop is noticed.
_LONGEST_WAIT_S = 1.0


class BatchCollector:
    """A collector of lanes for the next call. One thread uses it at a time; the threads of a sync handler form a line
    for it."""

    def __init__(self, executor: Executor, batch: BatchOptions) -> None:
        self._lanes, self._outages = executor.lanes, executor.outages
        self._line, self.news = threading.Lock(), threading.Event()
        self.batch = batch
        self._taken: list[Lane] = []
        self._size = 0
        self._since_s = 0.0
        self._alone: Lane | None = None  # one at a time: all other ready lanes stay where a drain finds them

    def take_now(self) -> list[Lane] | None:
        """Return the lanes of the next call if it can start now: it is full, has waited long enough, or is for a single
        message that goes alone. Otherwise return None. It never waits."""
        now = now_s()
        while self._alone is None and self._size < self.batch.most and (lane := self._lanes.take_now()) is not None:
            self._put(lane, now)
        # First the lanes that have waited: more messages that go alone may come at any time.
        if self._taken and (
            self._size >= self.batch.most or now >= self._since_s + self.batch.wait_s or self._lanes.paused
        ):
            lanes, self._taken, self._size = self._taken, [], 0
            return lanes
        lane, self._alone = self._alone, None
        return [lane] if lane is not None else None

    def wait(self, _ended: None = None) -> list[Lane] | None:
        """Return the lanes of a call; None after a moment without any, and during a pause."""
        until_s = now_s() + _LONGEST_WAIT_S
        if not self._line.acquire(timeout=_LONGEST_WAIT_S):
            return None
        try:
            while True:
                self.news.clear()
                lanes, due_s, now = self.take_now(), self.next_due_s(), now_s()
                if lanes is not None or self._lanes.paused or now >= until_s:
                    return lanes
                self.news.wait(max(0.0, min(until_s, math.inf if due_s is None else due_s) - now))
        finally:
            self._line.release()

    def next_due_s(self) -> float | None:
        """Return the time at which ``take_now`` may have something even if nothing rings, or None."""
        due_s = self._lanes.next_due_s()
        if not self._taken:
            return due_s
        full_s = self._since_s + self.batch.wait_s
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
        self._size += min(len(lane.queue), self.batch.per_ticket)


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
        self.given = [*self.messages]  # the handler's own
        self._start_us = run_us()
        executor.lanes.on_ready()  # for lanes that found no room

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

    def end(self, returned: Any, raised: BaseException | None) -> bool:
        """Settle all messages: the handler is done. Afterwards none of the lanes is the runner's any more."""
        end_us = run_us()
        for (lane, part), (done, error) in zip(
            self._parts, judge([part for _, part in self._parts], returned, raised), strict=True
        ):
            self._settle(lane, part, done, error, end_us)
        return False

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


class LaneCall:
    """A call of a handler with a message of one lane, as ``BatchCall`` is one with messages of several."""

    def __init__(self, executor: Executor, lane: Lane) -> None:
        self._executor, self._lane = executor, lane
        self._count, self._began_us = 0, run_us()
        self.messages: Sequence[Message] = ()
        self.begin()

    def begin(self) -> None:
        """Start the lane's next message. With none in ``messages``, the lane is not the runner's any more."""
        message, self._start_us = self._executor.next_message(self._lane), run_us()
        self.messages = ()
        if message is None:
            self.leave()
        elif self._executor.admit(self._lane, message, self._start_us):
            self.given, self.messages = message, (message,)

    def leave(self) -> None:
        self._executor.lanes.release(self._lane, self._count, (self._start_us - self._began_us) / 1e6)

    def end(self, returned: Any, raised: BaseException | None) -> bool:
        """Settle the message. Return whether the lane is the runner's still, for more of its messages."""
        executor, lane, message, end_us = self._executor, self._lane, self.given, run_us()
        try:
            if raised is None and returned is not None:
                check_ran(returned)
                message.result(returned)
        except BaseException as problem:
            executor.raised(lane, message, problem)
            return False
        if raised is not None:
            executor.raised(lane, message, raised)
            return False
        if not executor.succeeded(lane, message, self._start_us, end_us):
            return False
        self._count, self._start_us = self._count + 1, end_us
        if lane.queue and self._count < _SLICE and not executor.lanes.paused:
            return True
        self.leave()
        return False


class LaneWorker(Service):
    """A slot that runs one lane at a time. A handler may take as long as it likes, so health does not time this
    thread."""

    stalls_after_s = math.inf

    def __init__(self, number: int, executor: Executor, handle: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name = f"work-{number}"
        self._executor = executor
        self._handle = handle
        self._next: Callable[[Any], Any] = partial(executor.lanes.next_lane, _LOOKS_EVERY_S)

    def run_once(self) -> float:
        lanes = self._executor.lanes
        ended: Ended | None = None
        while not self.stopping:
            work = self._next(ended)
            if work is None:
                return 0.05 if lanes.paused else 0.0
            try:
                ended = self._run(work)
            except BaseException as problem:
                # An error of ours, not of the handler. What it had is lost, and only a new process is sure to run its
                # tickets again.
                self._executor.broken(problem)
                raise
            if (ended is None or not ended[1]) and not self._executor.lease.may_start():
                break  # the lease may have ended: the heartbeat renews it, or this process leaves
        if ended is not None:
            lanes.release(*ended)
        return 0.02

    def _run(self, lane: Any) -> Ended | None:
        """Run a slice of the lane. Return None when the lane is not ours any more, and another part decides when it
        goes on."""
        executor, handle, clock, queue = self._executor, self._handle, run_us, lane.queue
        next_message, admit = executor.next_message, executor.admit
        began_us = end_us = clock()
        count = 0
        while (message := next_message(lane)) is not None:
            start_us = end_us
            if not admit(lane, message, start_us):
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


class BatchWorker(LaneWorker):
    """A slot of a sync batch handler: it runs one call at a time, for as long as the handler takes."""

    def __init__(self, number: int, executor: Executor, handle: Callable[[Any], Any], batch: BatchCollector) -> None:
        super().__init__(number, executor, handle)
        self._next, self._batch = batch.wait, batch.batch

    def interrupt(self) -> None:
        self._executor.lanes.on_ready()

    def _run(self, lanes: Any) -> None:
        call = BatchCall(self._executor, lanes, self._batch)
        if call.messages:
            try:
                returned = self._handle(call.given)
            except BaseException as problem:
                call.end(None, problem)
            else:
                call.end(returned, None)
            self._executor.lanes.on_ready()  # lanes with more messages are ready, and who collects now was not told


class AsyncPool(Service):
    """A thread with an event loop. Every lane that runs, or batch, is a task, with its own context; when one ends, the
    next one starts."""

    name = "async"
    stalls_after_s = math.inf  # one turn is the whole life of the loop

    def __init__(
        self,
        executor: Executor,
        handle: Callable[[Any], Awaitable[Any]],
        slots: int,
        batch: BatchOptions | None = None,
    ) -> None:
        super().__init__()
        self._executor = executor
        self._handle = handle
        self._source: Lanes | BatchCollector = executor.lanes if batch is None else BatchCollector(executor, batch)
        self._begin: Callable[[Any], Any] = (
            partial(LaneCall, executor) if batch is None else partial(BatchCall, executor, batch=batch)
        )
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
            while self._free and (work := self._source.take_now()) is not None:
                task = loop.create_task(self._run(work))
                self._free -= 1
                self.calls[task] = ()
                task.add_done_callback(self._ended, context=self._context)
            if self._free:
                due_s = self._source.next_due_s()
                wait_s = _LONGEST_WAIT_S if due_s is None else min(_LONGEST_WAIT_S, max(0.0, due_s - now_s()))
                now = loop.time()
                if self._timer is None or not now < self._timer.when() <= now + wait_s:  # it is over, or too late
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer = loop.call_later(wait_s, self._fill, context=self._context)
        except BaseException as problem:
            self._executor.broken(problem)
            raise

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

    async def _run(self, work: Any) -> None:
        """Make a call, and further ones with the same lane. A changed context, or a cancelled task, is no other
        message's: another task goes on."""
        task = asyncio.current_task()
        assert task is not None
        call = self._begin(work)
        while call.messages:
            self.calls[task], before, self._latest = call.messages, contextvars.copy_context(), task
            try:
                returned = await self._handle(call.given)
            except BaseException as problem:
                # sys.exit() in a handler must not end the loop, and its own cancellation must not lose the lanes.
                if issubclass(type(problem), asyncio.CancelledError) and self._ends():
                    raise
                goes_on = call.end(None, problem)
            else:
                goes_on = call.end(returned, None)
            if not goes_on:
                break
            # A handler that never waits must not keep the loop for itself.
            is_same = contextvars.copy_context() == before and not task.cancelling()
            if not is_same or (self._latest is task and not await self._pause(0.0)):
                call.leave()
                break
            call.begin()
        if not self._executor.lease.may_start():
            await self._pause(0.02)  # or the loop would spin
        if task.cancelling():
            await self._pause(0.0)  # a cancellation that the handler asked for as it ended arrives here

    async def _pause(self, seconds: float) -> bool:
        """Let other tasks run. Return False if a handler had its own task cancelled as it ended."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if self._ends():
                raise
            return False
        return True


def make_pool(handler: Handler, executor: Executor, slots: int) -> list[Service]:
    batch = handler.batch
    if batch is not None and executor.strict:  # a ticket's next message starts when Redis has the last one's end
        batch = dataclasses.replace(batch, per_ticket=1)
    if handler.is_async:
        return [AsyncPool(executor, handler.call, slots, batch)]
    if batch is None:
        return [LaneWorker(number, executor, handler.call) for number in range(slots)]
    collector = BatchCollector(executor, batch)
    executor.lanes.on_ready = collector.news.set
    return [BatchWorker(number, executor, handler.call, collector) for number in range(slots)]
