"""What every runner of lanes does around a handler call: may it start, what did it end in, what follows.

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


#: After Redis could not be told of a start that must be told of: until the next try.
_AGAIN_S = 0.5


class Starts(Protocol):
    """Where starts are written down before they happen (consumer/lifecycle/start_log.py)."""

    def started(self, message: Message, start_us: int) -> None: ...

    def ended(self, message: Message) -> None: ...

    def charge(self, message: Message, ahead: Attempts) -> bool:
        """Write to Redis what will be true when ``message`` has started. False: it is not ours any more. Raises what
        ``Link.call`` raises."""


class Accounts(Protocol):
    """Where finished, failed and given-up messages go (the acker)."""

    def finished(self, item: Success) -> None: ...

    def failed(self, item: FailedAttempt) -> None: ...

    def give_up(self, lane: MessageLane, message: Message, bury: Bury) -> None: ...


class Executor:
    """Steps around a handler call. Used by many threads; it keeps no state of its own but what runs, and the random
    generator."""

    def __init__(
        self,
        lanes: Lanes,
        accounts: Accounts,
        starts: Starts,
        lease: OwnLease,
        policy: RetryPolicy,
        strict: bool,
        limit_s: float,
        on_broken: Callable[[str], None],
    ) -> None:
        self.lanes = lanes
        self._accounts = accounts
        self._starts = starts
        self._note_start: Callable[[Message, int], None] = starts.started
        self._note_end: Callable[[Message], None] = starts.ended
        self._lease = lease
        self._policy = policy
        self._rng = random.Random()
        self._on_broken = on_broken
        self.strict = strict
        self._limit_s = limit_s
        self.running: dict[
            int, Message
        ] = {}  # by the identity of the message: those whose handler runs; kept only with a limit
        self.handled = 0  # only roughly right: counted without a lock, for people
        self.failed = 0

    def end_in_child(self) -> None:
        """We are the copy in a child that a handler has forked: where its handler ends, or another one would start, it
        ends (common/runtime/fork_guard.py)."""
        self._note_start = self._note_end = leave

    @property
    def max_attempts(self) -> int:
        return self._policy.max_attempts

    def may_start(self) -> bool:
        """Whether handlers may start: the lease cannot have ended anywhere."""
        return self._lease.may_start()

    def next_message(self, lane: MessageLane) -> Message | None:
        """The message that comes next; None when the lane is empty or nothing may start."""
        if lane.early:
            with self.lanes.locked():
                lane.merge_early()
        queue = lane.queue
        if not queue or now_s() >= self._lease.start_until_s:
            return None
        lane.forgotten = 0  # what is queued now came after that
        try:
            return queue.popleft()
        except IndexError:  # the ticket was forgotten at this moment: somebody else has it
            return None

    def admit(self, lane: MessageLane, message: Message, start_us: int) -> bool:
        """Whether the handler may be called now, at ``start_us``; its start is counted and written down then. If not,
        the lane is not the runner's any more."""
        if not message.plain:
            if not self._may_have(lane, message):
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

    def _may_have(self, lane: MessageLane, message: Message) -> bool:
        """The same question of a message with a past: it lost its body, its attempts are used up, or it is a suspect
        (quarantine.py)."""
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
        """Charge a start that may end this process before it happens: then nothing can lose it."""
        known = message.known
        ahead = known._replace(starts=known.starts + 1).blamed()
        try:
            is_ours = self._starts.charge(message, ahead)
        except (RedisTrouble, CommandRefused) as trouble:
            event(log, "attempt_not_recorded", level=logging.WARNING, **message.facts(), why=str(trouble))
            self.lanes.retry(lane, message, now_s() + _AGAIN_S)
            return False
        if (
            not is_ours
        ):  # or its body was deleted, and Redis >= 7 dropped it when it was claimed: then the index has it still
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
        """The handler returned. True when the lane may go on, False when it is held until Redis has the
        acknowledgement."""
        self._note_end(message)
        if self._limit_s:
            self.running.pop(id(message), None)
        self.handled += 1
        # A message with a past is held too: one that was charged ahead must not lose its success in the crash of
        # another suspect.
        held = self.strict or not message.plain
        if held:
            message.lane = lane
            self.lanes.hold(lane, (end_us - start_us) / 1e6)
        message.start_us, message.end_us = start_us, end_us
        self._accounts.finished(message)
        return not held

    def raised(self, lane: MessageLane, message: Message, problem: BaseException) -> None:
        """The handler raised: the message is tried again in its place, or given up. Either way the lane is not the
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
            decision = replace(decision, error_type=type(problem).__name__, traceback=traced(problem))
            event(log, "message_given_up", level=logging.ERROR, reason=decision.reason, **facts)
            self._accounts.failed(failure)
            self.bury(lane, message, decision)
            return
        event(log, "handler_failed", level=logging.WARNING, retry_in_s=decision.wait_s, **facts)
        due_s, ran_s = now_s() + decision.wait_s, (run.end_us - run.start_us) / 1e6
        if lane.isolation is Isolation.ALONE:  # it was charged for a crash: nobody else may crash before that is mended
            self.lanes.hold(lane, ran_s)
            self._accounts.failed(failure._replace(then=partial(self.lanes.retry_held, lane, message, due_s)))
        else:
            self._accounts.failed(failure)
            self.lanes.retry(lane, message, due_s, ran_s)

    def requeue(self, lane: MessageLane, messages: Sequence[Message]) -> None:
        """Put messages back that were started, in one call with others, and must wait for an earlier one of their
        ticket. The lane stays the runner's."""
        for message in messages:
            self._note_end(message)
            self.running.pop(id(message), None)
        with self.lanes.locked() as board:
            board.requeue(lane, messages)

    def bury(self, lane: MessageLane, message: Message, decision: Bury) -> None:
        """Nothing more of the ticket starts before its dead letter is written: only success is pipelined."""
        self.lanes.hold(lane)
        self._accounts.give_up(lane, message, decision)

    def broken(self, problem: BaseException) -> None:
        """Something of ours failed around a handler call: this incarnation cannot vouch for its lanes any more."""
        event(log, "executor_failed", level=logging.CRITICAL, error=format_error(problem))
        self._on_broken(f"{type(problem).__name__} around a handler call")


def _outcome(problem: BaseException) -> str:
    """The word of the run log for an execution that ended in ``problem``."""
    return RETRY_LATER if isinstance(problem, RetryLater) else GAVE_UP if isinstance(problem, GiveUp) else FAILED
