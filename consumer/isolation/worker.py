"""Suspect worker: it runs messages that may have ended a process in a child process, one at a time, while all else goes
on.

The child calls the handler; everything that is ours stays here: lease, journal, attempts, acknowledgement. It is
started for the first suspect, kept while more of them come, and ends with this process, however that ends. Its end, or
that it has to be killed at the deadline, is seen from here, so nothing need be noted ahead. An end is charged to the
message only if the child had run no other before, and was not ended for want of memory, for which it is the first to
go; else it is a suspect still, and gets a fresh child the next time. A child that ends before it calls the handler
charges nobody.
"""

from __future__ import annotations

import math
import time
from functools import partial

from usher.common.base.clock import now_s
from usher.common.base.errors import (
    GiveUp,
    Invalid,
    OwnershipLost,
    RedisTrouble,
    RetryLater,
    ServerChanged,
    StartRefused,
)
from usher.common.base.log import ERROR, WARNING, event
from usher.common.protocol.attempts import CUT_OFF, ENDED, RAN_PAST
from usher.common.redis.client import CommandRefused
from usher.common.runtime.service import Service
from usher.consumer.execution.executor import ErrorText, Executor, ProcessEnded
from usher.consumer.execution.lanes import Lane
from usher.consumer.handlers.message import Message
from usher.consumer.isolation.process import (
    INTERRUPT,
    CallResult,
    HandlerProcess,
    How,
    Piece,
    ProcessSpec,
    Template,
)
from usher.consumer.lifecycle.owner_scripts import OwnerScripts
from usher.consumer.policy.quarantine import is_unseen, needs_fresh_process

#: Most children of a consumer.
_MOST_CHILDREN = 4
#: Seconds for which a child without work is kept.
_IDLE_S = 10.0
#: Seconds until a child is started again that could not be.
_AGAIN_S = 1.0


def most_children(slots: int) -> int:
    """Return how many suspects of a consumer with so many slots run at a time, beside what its slots run."""
    return min(slots, _MOST_CHILDREN)


class _CancelAsked(Exception):
    """An operator wants what runs in the child to end."""


class _StopAsked(Exception):
    """This worker is to end, whatever its child does."""


class SuspectWorker(Service):
    stalls_after_s = math.inf

    def __init__(
        self,
        number: int,
        executor: Executor,
        steps: OwnerScripts,
        spec: ProcessSpec,
        template: Template,
    ) -> None:
        super().__init__()
        self.name = f"suspects-{number}"
        self._executor = executor
        self._steps = steps
        self._spec = spec
        self._template = template
        self._child: HandlerProcess | None = None
        self._runs = b""  # the message that the child runs
        self._told_s = 0.0  # the end of the lease, as the child knows it
        self._is_told = False  # it knows that its run is interrupted

    def run_once(self) -> float:
        lanes = self._executor.lanes
        lane = lanes.next_suspect(_IDLE_S)
        if lane is None:
            self._end_child(gently=not self.stopping)
            return 0.05 if lanes.paused else 0.0
        try:
            self._run(lane)
        except _StopAsked:
            self._end_child(gently=False)
        except BaseException as problem:  # an error of ours, not of the handler; the lane is lost
            self._executor.broken(problem)
            raise
        return 0.0 if self._executor.lease.may_start() else 0.02

    def interrupt(self) -> None:
        self._executor.lanes.wake_suspects()

    def on_end(self) -> None:
        self._end_child(gently=False)
        self._template.end()  # the others of this consumer end, too
        self._steps.link.close()

    def _end_child(self, gently: bool) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end(gently)

    def _run(self, lane: Lane) -> None:
        executor = self._executor
        message = executor.next_message(lane)
        if message is None:
            executor.lanes.release(lane)
            return
        child = self._begun(needs_fresh_process(message.known, executor.policy.max_attempts))
        is_ready = child is not None and (not is_unseen(message.known) or self._note_ahead(message))
        # Both may have taken their time: the lease, and the ticket, are looked at again.
        may_start = executor.lease.may_start() and not executor.lanes.paused
        if child is None or not is_ready or lane.forgotten or not may_start:
            executor.lanes.retry(lane, message, now_s() + _AGAIN_S)
            return
        if not executor.admit_apart(lane, message):
            return
        event("suspect_isolated", **message.facts(), crashes=message.crashes, losses=message.losses)
        is_fresh, began_ns = child.is_fresh, time.monotonic_ns()
        self._runs, self._is_told = message.stream_id, False
        try:
            known = message.attempt - 1, message.failures, message.crashes, message.losses
            child.on_part = partial(type(message).on_progress, [message])
            result = child.run(Piece(message.ticket, message.stream_id, message.fence, known, message.flat))
        except _CancelAsked:
            self._end_child(gently=False)
            text = ErrorText(f"{ENDED} (`usher actions` says who, and why)")
            executor.raised(lane, message, ProcessEnded(is_stuck=True, is_blamed=True), text)
            return
        finally:
            self._runs = b""
            executor.cancelled.discard(message.stream_id)
        if result.how == How.NOT_RUN:
            self._refused(result.error)
            executor.not_started(lane, message, _AGAIN_S)
            return
        executor.refused_children = 0
        if result.how == How.DONE:
            message.answer = result.answer
            end_us = message.start_us + (time.monotonic_ns() - began_ns) // 1000
            if executor.succeeded(lane, message, message.start_us, end_us):
                executor.lanes.release(lane)
            return
        problem, text = _problem_of(result, is_fresh)
        executor.raised(lane, message, problem, text)

    def _begun(self, fresh: bool) -> HandlerProcess | None:
        """Return a child that has loaded the handler, and, if ``fresh``, has run nothing; None when there is none for
        now."""
        if fresh and self._child is not None and not self._child.is_fresh:
            self._end_child(gently=True)
        try:
            if self._child is None:
                self._child = HandlerProcess(self._spec, self._check, self._template)
                self._child.note = lambda what: event("handler_process_ended", level=WARNING, what=what)
            child = self._child
            child.begin()
        except (StartRefused, OSError) as refused:  # also where there is no room for a temporary file
            self._refused(str(refused))
            return None
        if child.is_fresh:
            self._told_s = 0.0
        self._check()
        return child

    def _refused(self, why: str) -> None:
        self._end_child(gently=False)
        self._executor.refused_children += 1
        runs_here = not self._executor.isolates
        event("suspect_not_isolated", level=ERROR, why=why, runs_here=runs_here)

    def _check(self) -> None:
        """Tell the child when the lease was renewed, and of an interruption. Called again and again while it runs.
        Raises _StopAsked."""
        if self.stopping:
            raise _StopAsked
        if self._runs in self._executor.cancelled:
            raise _CancelAsked
        beside = None if self._is_told else self._executor.besides.get(self._runs)
        if beside is not None and beside.cancelled.is_set() and self._child is not None:
            self._is_told = self._child.tell(INTERRUPT)
        ends_s = self._executor.lease.ends_s
        if ends_s != self._told_s and self._child is not None and self._child.tell(ends_s):
            self._told_s = ends_s

    def _note_ahead(self, message: Message) -> bool:
        """Note in Redis that it starts, as one more end in doubt: its owners end without a journal, so if this one does
        too, nobody else will know that it ran. Whatever it ends in forgets the note. Return False when it must not
        start: the lease is lost."""
        known = message.known
        ahead = known._replace(starts=known.starts + 1, crashes=known.crashes + 1)
        try:
            self._steps.charge({message.stream_id: ahead})
        except (RedisTrouble, CommandRefused, OwnershipLost, ServerChanged) as trouble:
            event("attempt_not_recorded", level=WARNING, **message.facts(), why=str(trouble))
            return not isinstance(trouble, (OwnershipLost, ServerChanged))
        return True


def _problem_of(result: CallResult, is_fresh: bool) -> tuple[BaseException, ErrorText]:
    is_stuck = result.how == How.HUNG
    if is_stuck or result.how == How.DIED:
        text = f"{CUT_OFF} ({result.error}; handler_crashed in the logs)"
        text = f"{RAN_PAST} (handler_stuck in the logs)" if is_stuck else text
        is_blamed = is_stuck or (is_fresh and not result.is_in_doubt)
        return ProcessEnded(is_stuck, is_blamed), ErrorText(text, traceback=result.traceback)
    raised = {How.LATER: RetryLater(result.after_s), How.GAVE_UP: GiveUp(), How.INVALID: Invalid()}.get(result.how)
    return raised or RuntimeError(result.error), ErrorText(result.error, result.error_type, result.traceback)
