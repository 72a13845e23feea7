"""What every runner of lanes does around a handler call: may it start, what did it end in, what follows."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from common.clock import now_s
from common.errors import RetryLater
from common.log import event
from consumer.context import Message, OwnLease
from consumer.lane_keeper import LaneKeeper, MessageLane
from consumer.policy.acks import Finished
from consumer.policy.outcome import Bury, RetryPolicy, decide, told

log = logging.getLogger(__name__)


class Accounts(Protocol):
    """Where finished and given-up messages go (the acker)."""

    def finished(self, item: Finished) -> None: ...

    def give_up(self, lane: MessageLane, message: Message, bury: Bury) -> None: ...


class Executor:
    """Steps around a handler call. Used by many threads; it keeps no state of its own but the random generator."""

    def __init__(
        self,
        keeper: LaneKeeper,
        accounts: Accounts,
        lease: OwnLease,
        policy: RetryPolicy,
        strict: bool,
        limit_s: float,
        on_broken: Callable[[str], None],
    ) -> None:
        self.keeper = keeper
        self._accounts = accounts
        self._lease = lease
        self._policy = policy
        self._rng = random.Random()
        self._on_broken = on_broken
        self.strict = strict
        self._limit_s = limit_s
        self.running: dict[int, Message] = {}  # by the identity of the message: those whose handler runs; kept only with a limit
        self.handled = 0  # only roughly right: counted without a lock, for people
        self.failed = 0

    def may_start(self) -> bool:
        """Whether handlers may start: the lease cannot have ended anywhere."""
        return self._lease.may_start()

    def next_message(self, lane: MessageLane) -> Message | None:
        """The message to start now, with its attempt counted; None when the lane is empty or nothing may start."""
        if lane.early:
            self.keeper.merge_early(lane)
        queue = lane.queue
        if not queue or not self._lease.may_start():
            return None
        lane.forgotten = False  # what is queued now came after that
        try:
            message = queue.popleft()
        except IndexError:  # the ticket was forgotten at this moment: somebody else has it
            return None
        message.attempt += 1
        if not message.first_ms:
            message.first_ms = time.time_ns() // 1_000_000
        if self._limit_s:
            message.deadline = time.monotonic() + self._limit_s
            self.running[id(message)] = message
        return message

    def unfit(self, message: Message) -> Bury | None:
        """Why this message must not be started at all, if so: it lost its body, or all its attempts ended with their process."""
        if message.body_is_gone:
            message.attempt -= 1
            return Bury("body_gone", "")
        if message.failures >= self._policy.max_attempts:
            message.attempt -= 1
            return Bury("attempts_exhausted", "its handler was ended with its process every time")
        return None

    def succeeded(self, lane: MessageLane, message: Message, start_us: int, end_us: int) -> bool:
        """The handler returned. True when the lane may go on, False when it is held until Redis has the acknowledgement."""
        self._ended(message)
        self.handled += 1
        held = lane if self.strict else None
        if self.strict:
            self.keeper.hold(lane)
        self._accounts.finished(Finished(message.ticket, message.stream_id, message.fence, message.attempt, start_us, end_us, held))
        return held is None

    def raised(self, lane: MessageLane, message: Message, problem: BaseException) -> None:
        """The handler raised: the message is tried again in its place, or given up. Either way the lane is not the runner's any more."""
        self._ended(message)
        self.failed += 1
        message.failures += not isinstance(problem, RetryLater)
        decision = decide(problem, message.failures, self._policy, self._rng)
        facts: dict[str, Any] = {"ticket": message.ticket_id, "id": message.id, "fence": message.fence, "attempt": message.attempt}
        facts["error"] = told(problem)[:500]
        if isinstance(decision, Bury):
            event(log, "message_given_up", level=logging.ERROR, reason=decision.reason, **facts)
            self.bury(lane, message, decision)
        else:
            event(log, "handler_failed", level=logging.WARNING, retry_in_s=decision.wait_s, **facts)
            self.keeper.retry(lane, message, now_s() + decision.wait_s)

    def put_back(self, lane: MessageLane, messages: Sequence[Message]) -> None:
        """Messages that were started, in one call with others, and must wait for an earlier one of their ticket. The lane stays the runner's."""
        for message in messages:
            self._ended(message)
        self.keeper.put_back(lane, messages)

    def bury(self, lane: MessageLane, message: Message, decision: Bury) -> None:
        """Nothing more of the ticket starts before its dead letter is written: only success is pipelined."""
        self._ended(message)
        self.keeper.hold(lane)
        self._accounts.give_up(lane, message, decision)

    def broken(self, problem: BaseException) -> None:
        """Something of ours failed around a handler call: this incarnation cannot vouch for its lanes any more."""
        event(log, "runner_broken", level=logging.CRITICAL, error=told(problem))
        self._on_broken(f"{type(problem).__name__} around a handler call")

    def _ended(self, message: Message) -> None:
        if self._limit_s:
            self.running.pop(id(message), None)
