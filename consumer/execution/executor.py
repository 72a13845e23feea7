"""Executor: the steps around a handler call, for every runner of lanes: admit the start, take the outcome, decide what
follows.

A runner's turn: ``next_message``, ``admit`` (False: the lane is not the runner's any more), the handler, then
``succeeded`` or ``raised``.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from usher.common.base.clock import now_s
from usher.common.base.errors import GiveUp, RedisTrouble, RetryLater, readable
from usher.common.base.log import event, in_hand
from usher.common.base.text import format_error
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.run_log import FAILED, GAVE_UP, RETRY_LATER
from usher.common.redis.client import CommandRefused
from usher.common.runtime.fork_guard import leave
from usher.consumer.execution.lanes import Lanes, MessageLane
from usher.consumer.handlers.error_trace import traced
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.policy.acks import FailedAttempt, Finished, Success
from usher.consumer.policy.outcome import Bury, RetryPolicy, decide, unended
from usher.consumer.policy.quarantine import Isolation, isolation

log = logging.getLogger(__name__)


#: Seconds until the next try, when a start could not be charged ahead in Redis.
_AGAIN_S = 0.5
#: Characters of the name of an error's type that are kept.
_LONGEST_NAME = 200


class Starts(Protocol):
    """The log in which starts are recorded before they happen (consumer/lifecycle/start_log.py)."""

    def started(self, message: Message, start_us: int) -> None: ...

    def ended(self, message: Message) -> None: ...

    def charge(self, message: Message, ahead: Attempts) -> bool:
        """Write to Redis the attempts that will be true once ``message`` has started. Return False when it is not ours
        any more. Raises what ``Link.call`` raises."""


class Outcomes(Protocol):
    """The taker of finished, failed and given-up messages (the acker)."""

    def finished(self, item: Success) -> None: ...

    def failed(self, item: FailedAttempt) -> None: ...

    def give_up(self, lane: MessageLane, message: Message, bury: Bury) -> None: ...


class Executor:
    """The steps around a handler call. Many threads use it; its only state is the messages that run, the counts and the
    random generator."""

    def __init__(
        self,
        lanes: Lanes,
        outcomes: Outcomes,
        starts: Starts,
        lease: OwnLease,
        policy: RetryPolicy,
        strict: bool,
        limit_s: float,
        on_broken: Callable[[str], None],
    ) -> None:
        self.lanes = lanes
        self._outcomes = outcomes
        self._starts = starts
        self._note_start: Callable[[Message, int], None] = starts.started
        self._note_end: Callable[[Message], None] = starts.ended
        self._lease = lease
        self._policy = policy
        self._rng = random.Random()
        self._on_broken = on_broken
        self.strict = strict
        self._limit_s = limit_s
        # Messages whose handlers run, by the identity of the message; kept only with a time limit.
        self.running: dict[int, Message] = {}
        self.handled = 0  # only roughly right: counted without a lock, for people to look at
        self.failed = 0

    def end_in_child(self) -> None:
        """Call this in a child process that a handler has forked: the child then ends where its handler ends, or where
        another one would start (common/runtime/fork_guard.py)."""
        self._note_start = self._note_end = leave

    @property
    def ended(self) -> int:
        """Return how many handlers have ended, roughly."""
        return self.handled + self.failed

    @property
    def max_attempts(self) -> int:
        return self._policy.max_attempts

    def may_start(self) -> bool:
        """Return whether handlers may start: the lease cannot have ended anywhere."""
        return self._lease.may_start()

    def next_message(self, lane: MessageLane) -> Message | None:
        """Take the next message; None when the lane is empty or nothing may start."""
        if lane.early:
            with self.lanes.locked():
                lane.merge_early()
        queue = lane.queue
        if not queue or now_s() >= self._lease.start_until_s:
            return None
        lane.forgotten = 0  # all that is queued now came after the ticket was forgotten
        try:
            return queue.popleft()
        except IndexError:  # the ticket was forgotten at this moment: another owner has it
            return None

    def admit(self, lane: MessageLane, message: Message, start_us: int) -> bool:
        """Return whether the handler may be called now, at ``start_us``; if so, count and record its start. If not, the
        lane is not the runner's any more."""
        if not message.plain:
            if not self._may_start_again(lane, message):
                return False
            start_us = time.time_ns() // 1000  # Redis may have been asked
        message.attempt += 1
        message.start_us = start_us
        if not message.first_ms:
            message.first_ms = start_us // 1000
        if self._limit_s:
            message.deadline = time.monotonic() + self._limit_s
            self.running[id(message)] = message
        in_hand.set(message)
        self._note_start(message, start_us)
        return True

    def _may_start_again(self, lane: MessageLane, message: Message) -> bool:
        """Return whether a message with a past may start: it may have lost its body, used up its attempts, or be a
        suspect (quarantine.py)."""
        if message.body_is_gone:
            self.bury(lane, message, Bury("body_gone", ""))
            return False
        if message.failures >= self._policy.max_attempts:
            decision = unended(message.known)
            event(
                log,
                "message_given_up",
                level=logging.ERROR,
                reason=decision.reason,
                **message.facts(),
                error=decision.error,
            )
            self.bury(lane, message, decision)
            return False
        asked = isolation(message.known, self._policy.max_attempts)
        if asked > lane.isolation:
            self.lanes.isolate(lane, message, asked)
            return False
        return asked is not Isolation.ALONE or self._charge_ahead(lane, message)

    def _charge_ahead(self, lane: MessageLane, message: Message) -> bool:
        """Charge a start that may end this process before it happens, so that it cannot be lost. Return False when the
        message must not start now."""
        known = message.known
        ahead = known._replace(starts=known.starts + 1).blamed()
        try:
            is_ours = self._starts.charge(message, ahead)
        except (RedisTrouble, CommandRefused) as trouble:
            event(log, "attempt_not_recorded", level=logging.WARNING, **message.facts(), why=str(trouble))
            self.lanes.retry(lane, message, now_s() + _AGAIN_S)
            return False
        if not is_ours:
            # Another owner has it; or its body was deleted, and Redis >= 7 dropped it when it was claimed: then the
            # index still names it, and a dead letter is due.
            self.bury(lane, message, Bury("body_gone", ""))
            return False
        event(
            log,
            "suspect_isolated",
            **message.facts(),
            starts=ahead.starts,
            crashes=known.crashes,
            losses=known.losses,
        )
        return True

    def succeeded(self, lane: MessageLane, message: Message, start_us: int, end_us: int) -> bool:
        """Take the success of a handler that returned. Return True when the lane may go on, False when it is held until
        Redis has the acknowledgement."""
        self._note_end(message)
        if self._limit_s:
            self.running.pop(id(message), None)
        self.handled += 1
        # A message with a past is held too: if it was charged ahead, it must not lose its success in the crash of
        # another suspect.
        held = self.strict or not message.plain
        if held:
            message.lane = lane
            self.lanes.hold(lane, (end_us - start_us) / 1e6)
        message.start_us, message.end_us = start_us, end_us
        self._outcomes.finished(message)
        return not held

    def raised(self, lane: MessageLane, message: Message, problem: BaseException) -> None:
        """Try the message again in its place, or give it up: its handler raised. Either way the lane is not the
        runner's any more."""
        self._note_end(message)
        self.running.pop(id(message), None)
        self.failed += 1
        problem = readable(problem)
        message.failures += not isinstance(problem, RetryLater)
        message.survived()
        decision = decide(problem, message.failures, self._policy, self._rng)
        run = Finished(
            message.ticket, message.stream_id, message.fence, message.attempt, message.start_us, time.time_ns() // 1000
        )
        failure = FailedAttempt(run, _outcome(problem), message.known)
        facts = {**message.facts(), "error": format_error(problem)[:500]}
        if isinstance(decision, Bury):
            error_type = type(problem).__name__[:_LONGEST_NAME].encode("utf-8", "backslashreplace").decode()
            decision = replace(decision, error_type=error_type, traceback=traced(problem))
            event(log, "message_given_up", level=logging.ERROR, reason=decision.reason, **facts)
            self._outcomes.failed(failure)
            self.bury(lane, message, decision)
            return
        event(log, "handler_failed", level=logging.WARNING, retry_in_s=decision.wait_s, **facts)
        due_s, ran_s = now_s() + decision.wait_s, (run.end_us - run.start_us) / 1e6
        if lane.isolation is Isolation.ALONE:  # it was charged for a crash: none may happen until that is corrected
            self.lanes.hold(lane, ran_s)
            self._outcomes.failed(failure._replace(then=partial(self.lanes.retry_held, lane, message, due_s)))
        else:
            self._outcomes.failed(failure)
            self.lanes.retry(lane, message, due_s, ran_s)

    def requeue(self, lane: MessageLane, messages: Sequence[Message]) -> None:
        """Put back messages that were started in one call with others, and must wait for an earlier one of their
        ticket. The lane stays the runner's."""
        for message in messages:
            self._note_end(message)
            self.running.pop(id(message), None)
        with self.lanes.locked() as board:
            board.requeue(lane, messages)

    def bury(self, lane: MessageLane, message: Message, decision: Bury) -> None:
        """Give the message up. Nothing more of its ticket starts before the dead letter is written: only success is
        pipelined."""
        self.lanes.hold(lane)
        self._outcomes.give_up(lane, message, decision)

    def broken(self, problem: BaseException) -> None:
        """End this incarnation: our own code failed around a handler call, so its lanes cannot be trusted any more."""
        event(log, "executor_failed", level=logging.CRITICAL, error=format_error(problem))
        self._on_broken(f"{type(problem).__name__} around a handler call")


def _outcome(problem: BaseException) -> str:
    """Return the run log's word for an execution that ended in ``problem``."""
    return RETRY_LATER if isinstance(problem, RetryLater) else GAVE_UP if isinstance(problem, GiveUp) else FAILED
