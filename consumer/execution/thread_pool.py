"""Thread pool: threads that run lanes of plain handlers. A lane's messages run on the thread that took the lane,
without a hop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from usher.common.runtime.service import Service
from usher.consumer.execution.executor import Executor
from usher.consumer.execution.lanes import Ended, MessageLane
from usher.consumer.handlers.loader import check_ran
from usher.consumer.handlers.message import Message

#: Most messages of one lane in a row, and the time in microseconds after which the lane goes behind the others.
_SLICE = 64
_SLICE_US = 2000
_LONGEST_WAIT_S = 5.0


class LaneWorker(Service):
    """A slot that runs one lane at a time. A handler may take as long as it likes, so health does not time this
    thread."""

    stalls_after_s = math.inf

    def __init__(self, number: int, executor: Executor, handle: Callable[[Message], Any]) -> None:
        super().__init__()
        self.name = f"work-{number}"
        self._executor = executor
        self._handle = handle

    def run_once(self) -> float:
        lanes = self._executor.lanes
        ended: Ended | None = None
        while not self.stopping:
            lane = lanes.next_lane(_LONGEST_WAIT_S, ended)
            if lane is None:
                return 0.05 if lanes.paused else 0.0
            try:
                ended = self._run(lane)
            except BaseException as problem:
                # An error of ours, not of the handler. The lane is lost, and only a new process is sure to run its
                # ticket again.
                self._executor.broken(problem)
                raise
            if ended is not None and not ended[1] and not self._executor.may_start():
                break  # the lease may have ended: the heartbeat renews it, or this process leaves
        if ended is not None:
            lanes.release(*ended)
        return 0.02

    def _run(self, lane: MessageLane) -> Ended | None:
        """Run a slice of the lane. Return None when the lane is not ours any more, and another part decides when it
        goes on."""
        executor, handle, clock = self._executor, self._handle, time.time_ns
        began_us = end_us = clock() // 1000
        count = 0
        while count < _SLICE and end_us - began_us < _SLICE_US:
            message = executor.next_message(lane)
            if message is None:
                break
            start_us = end_us
            if not executor.admit(lane, message, start_us):
                return None
            try:
                result = handle(message)
                if result is not None:
                    check_ran(result)
            except BaseException as problem:  # sys.exit() in a handler must not end this thread and lose the lane
                executor.raised(lane, message, problem)
                return None
            end_us = clock() // 1000
            count += 1
            if not executor.succeeded(lane, message, start_us, end_us):
                return None
            if not lane.queue:
                break  # most lanes have one message
        return lane, count, (end_us - began_us) / 1e6
