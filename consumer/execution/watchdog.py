"""Watchdog: it ends the process when a handler runs past its deadline, instead of letting a second delivery run beside
the hanging first one.

A thread cannot be ended from outside. So the message becomes a suspect, and the process leaves
(consumer/lifecycle/process_ending.py). The next time it runs in a child process, which can be ended by itself. It is
not charged before that: its handler may yet return, now.

What stands still without its own doing is not to blame. Time in which no handler could run (code kept the interpreter
lock, or the machine was paused) is given back. While a call keeps the event loop from turning, only its messages hang.
A process that stands still for good is ended by its arbiter (common/http/serve.py).
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from usher.common.base.clock import now_s, run_us
from usher.common.base.log import ERROR, WARNING, event
from usher.common.protocol.attempts import RAN_PAST
from usher.common.runtime.service import Service
from usher.consumer.handlers.message import Message
from usher.consumer.lifecycle.process_ending import ProcessEnding
from usher.consumer.policy.quarantine import Left

_HERE = f"{Path(__file__).parent}/"
_HEAD = "Stack (most recent call last):\n"


def stacks(tasks: Mapping[asyncio.Task[Any] | None, Sequence[Message]]) -> dict[bytes, str]:
    """Return, by message, the calls of each handler that runs here, from the handler on: those of its thread, or of
    what its task awaits. ``tasks``: of handlers on an event loop, with the messages of their last calls."""
    found = {one.stream_id: task_stack(task) for task, messages in list(tasks.items()) if task for one in messages}
    for top in list(sys._current_frames().values()):
        frames = [frame for frame, _ in traceback.walk_stack(top)]
        ours = next((at for at, frame in enumerate(frames) if _runs(frame)), 0)
        found |= dict.fromkeys((one.stream_id for one in _runs(frames[ours]) if ours), _told(frames[ours - 1 :: -1]))
    return found


def task_stack(task: asyncio.Task[Any]) -> str:
    """Return the calls of a task that waits: those of the coroutines that it awaits, one within the other."""
    frames: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(_HERE):
            frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return _told(frames)


def _runs(frame: FrameType) -> Sequence[Message]:
    if not frame.f_code.co_filename.startswith(_HERE):
        return ()
    message, call = frame.f_locals.get("message"), frame.f_locals.get("call")
    return [message] if isinstance(message, Message) else getattr(call, "messages", ())


def _told(frames: list[FrameType]) -> str:
    if not frames:
        return ""
    walked = ((frame, frame.f_lineno) for frame in frames)
    return _HEAD + "".join(traceback.StackSummary.extract(walked).format())


if TYPE_CHECKING:
    from usher.consumer.execution.pools import AsyncPool

#: Messages that a line names.
_MOST_NAMED = 20
#: A loop that does not turn for this long is kept from it.
_TURNS_WITHIN_S = 0.2
#: A turn that comes later than this was kept from coming.
_LATE_S = 1.0
#: No handler ended for so long: that is worth a word, unless it is usual here (so many times the longest pause that
#: ended by itself is not). It is told again at twice the time.
LONG_S, _UNUSUAL = 60.0, 3


class Watchdog(Service):
    """The service that looks at the handlers from outside: which ones hang, if there is a limit, and whether any ends.
    ``event_loop``: that on which they run; None if they have threads. ``handlers``: how many have ended so far, and how
    many run. ``look``: what else is looked at, every second at least."""

    name = "watch"

    def __init__(
        self,
        ending: ProcessEnding,
        limit_s: float,
        event_loop: AsyncPool | None = None,
        handlers: Callable[[], tuple[int, int]] = lambda: (0, 0),
        look: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._handlers, self._look = handlers, look
        self._ended, self._since_s = 0, now_s()
        self._usual_s = self._told_s = 0.0
        self.still_s = 0.0  # for how long no handler has ended, while some ran
        self.event_loop = event_loop
        self._silent_s = 0.0
        self._limit_us = int(1e6 * limit_s)
        self._due_us = math.inf
        # When, for how long, and up to which age of a run nothing could run.
        self._lost: list[tuple[int, int, float]] = []
        self._asleep_us = self._asleep()
        self._every_s = min(1.0, max(0.02, limit_s / 10)) if limit_s else 1.0
        self._ending = ending

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self._is_unusual:
            return ()
        return (f"no handler has ended for {self.still_s:.0f} s; {self._handlers()[1]} run",)

    @property
    def _is_unusual(self) -> bool:
        return self.still_s >= max(LONG_S, _UNUSUAL * self._usual_s)

    def run_once(self) -> float:
        if self._limit_us:
            self._watch_limit()
        self._watch_progress()
        self._look()
        return self._every_s

    def _watch_progress(self) -> None:
        (ended, running), now = self._handlers(), now_s()
        if ended != self._ended:
            self._usual_s = max(self._usual_s, self.still_s)
        if ended != self._ended or not running:
            self._ended, self._since_s, self._told_s = ended, now, 0.0
        self.still_s = now - self._since_s
        if self._is_unusual and self.still_s >= 2 * self._told_s:
            self._told_s = self.still_s
            way_out = "see what they wait for (py-spy dump, usher tickets explain); USHER_HANDLER_SECONDS bounds it"
            for_s = round(self.still_s)
            event("handlers_stand_still", level=WARNING, for_s=for_s, running=running, way_out=way_out)

    def _watch_limit(self) -> None:
        now, asleep_us = run_us(), self._asleep()
        slept_us, self._asleep_us = asleep_us - self._asleep_us, asleep_us
        silent_s = self.event_loop.silent_s() if self.event_loop is not None else 0.0
        lost_s = max((now - self._due_us) / 1e6, 0.0 if silent_s else self._silent_s)
        self._due_us, self._silent_s = now + 1e6 * self._every_s, silent_s
        runs = [left for left in self._ending.journal.running() if not left.is_apart]
        if lost_s > _LATE_S:
            # None gets back more than as long again as a handler may run, since one of them may be what takes the time;
            # but that the machine slept is no doing of a handler.
            self._lost = [one for one in self._lost if any(left.start_us < one[0] for left in runs)]
            has_slept = slept_us > 5e5 * lost_s
            self._lost.append((now, *((slept_us, math.inf) if has_slept else (int(1e6 * lost_s), 2 * self._limit_us))))
            named = [left.facts() for left in runs if self._given_back_us(left)]
            event("handlers_stood_still", level=WARNING, seconds=round(lost_s, 1), running=named[:_MOST_NAMED])
        hung = [left for left in runs if left.start_us + self._limit_us + self._given_back_us(left) < now]
        if hung and self.event_loop is not None and silent_s:
            keeping = {one.stream_id for one in self.event_loop.on_loop()}  # none: it is not known
            hung = [left for left in hung if not keeping or left.stream_id in keeping]
            hung = hung if silent_s > _TURNS_WITHIN_S else []
        if hung:
            self._end(hung)

    def _given_back_us(self, left: Left) -> int:
        return sum(lost_us for at_us, lost_us, most in self._lost if left.start_us < at_us < left.start_us + most)

    @staticmethod
    def _asleep() -> int:
        """Return what tells, by its growth, for how many microseconds the machine slept: one clock goes on then."""
        return run_us() - int(1e6 * time.monotonic())

    def stacks(self) -> dict[bytes, str]:
        """Return where the handlers stand that run in this process, by message."""
        return stacks({} if self.event_loop is None else self.event_loop.calls)

    def _end(self, hung: list[Left]) -> None:
        known = self.stacks()
        told = [known.get(left.stream_id, "") for left in hung]
        for left, stack in zip(hung, told, strict=True):
            event("handler_stuck", level=ERROR, trace=stack, **left.facts())
        self._ending.end(hung, f"{len(hung)} handler(s) ran past the deadline", RAN_PAST, told)
