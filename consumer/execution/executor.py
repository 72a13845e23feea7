"""Executor: the steps around a handler call, for every runner of lanes: admit the start, take the outcome, decide what
follows.

A runner's turn: ``next_message``, ``admit`` (False: the lane is not the runner's any more), the handler, then
``succeeded`` or ``raised``.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from usher.common.base.clock import now_s, run_us, wall_ms
from usher.common.base.errors import GiveUp, RetryLater, UsherError, parts_of, readable
from usher.common.base.log import CRITICAL, ERROR, WARNING, event, in_hand
from usher.common.base.text import format_error
from usher.common.protocol.attempts import GIVEN_UP
from usher.common.protocol.last_error import LastError, NotedError, encode
from usher.common.protocol.run_log import CRASHED, FAILED, GAVE_UP, RETRY_LATER
from usher.common.protocol.stream_id import rank
from usher.common.runtime.fork_guard import leave
from usher.consumer.execution.acker import Acker
from usher.consumer.execution.lanes import SHORT_S, Lane, Lanes
from usher.consumer.execution.outages import CONNECTION, DECLARED, OTHER, GoOn, Outages, Sign, Wait, tells_of_connection
from usher.consumer.handlers.batches import TriedTogether
from usher.consumer.handlers.decorators import HandlerOptions, given
from usher.consumer.handlers.error_trace import has_cause, own_line, raised_at, traced, type_name
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.lifecycle.journal import APART, Journal
from usher.consumer.policy.outcome import (
    PUT_OFF_S,
    Bury,
    Finished,
    RetryPolicy,
    Settling,
    TicketPace,
    decide,
    unended,
)
from usher.consumer.policy.quarantine import is_suspect, is_used_up

#: Most messages that all runs of a consumer absorb at a time.
MOST_ABSORBED = 512
#: Child processes that ran no handler, until suspects run in this process.
_MOST_REFUSED = 3
#: Pause before a look whether Redis has noted the failure of a message, without which it is not started again.
_UNNOTED_S = 0.05


class ProcessEnded(UsherError):
    """The handler's own process ended, or was ended, before the handler did.

    ``is_stuck``: it was ended, at the deadline. ``is_blamed``: nothing but this message can have been the reason.
    """

    def __init__(self, is_stuck: bool, is_blamed: bool) -> None:
        self.is_stuck = is_stuck
        self.is_blamed = is_blamed
        super().__init__()


class Beside:
    """State of a run beside its message: those that it absorbed, and whether somebody interrupts it."""

    def __init__(self) -> None:
        self.absorbed: list[Message] = []
        self.cancelled = threading.Event()


@dataclass(frozen=True)
class ErrorText:
    """An error as text, where the error itself is in another process."""

    error: str
    error_type: str = ""
    traceback: str = ""


class Executor:
    """The steps around a handler call. Many threads use it; its only state is the messages that run, the counts and the
    random generator."""

    def __init__(
        self,
        lanes: Lanes,
        acker: Acker,
        starts: Journal,
        lease: OwnLease,
        policy: RetryPolicy,
        strict: bool,
        limit_s: float,
        on_broken: Callable[[str], None],
    ) -> None:
        self.lanes = lanes
        self._acker = acker
        self._note_start: Callable[..., None] = starts.started
        self._note_end: Callable[[Message], None] = starts.ended
        self._has_spare = starts.has_spare
        self.lease = lease
        self.policy = policy
        self.rng, self.clock = random.Random(), now_s  # of pauses before a retry
        self._on_broken = on_broken
        self.late: list[tuple[float, Callable[[], object]]] = []  # what is to be done, and when
        #: Cancels the task that runs the message of this id. Of ``def`` handlers there is none.
        self.cancel_task: Callable[[bytes], None] = lambda stream_id: None
        self.strict, self.all_wait_here = strict, False  # else what waits for long is given back
        self._limit_s = limit_s
        # Messages whose run in a child process an operator has ended.
        self.cancelled: set[bytes] = set()
        self.pace: TicketPace | None = None
        self.settling: Settling | None = None
        self.outages, self.away = Outages(), tuple[type[BaseException], ...]()  # away: errors that the handler declares
        # What runs have beside their message, by its id: few have anything.
        self.besides: dict[bytes, Beside] = {}
        self.refused_children = 0  # child processes in a row that ran no handler: they could not load it
        self.ended = 0  # starts; only roughly right: counted without a lock, for people to look at

    def obey(self, options: HandlerOptions) -> None:
        self.away = options.away if isinstance(options.away, tuple) else (options.away,)
        self.pace = TicketPace(options.rate) if options.rate else None
        if settle_s := options.settle_s:
            self.settling = Settling(settle_s, given(options.settle_max_s, 10 * settle_s))

    def end_in_child(self) -> None:
        """Call this in a child process that a handler has forked: the child then ends where its handler ends, or where
        another one would start (common/runtime/fork_guard.py)."""
        self._note_start = self._note_end = leave

    @property
    def isolates(self) -> bool:
        """Return whether suspects run in child processes: better in company than never."""
        return self.refused_children < _MOST_REFUSED

    def next_message(self, lane: Lane) -> Message | None:
        if lane.early:
            with self.lanes.lock:
                lane.merge_early()
        queue = lane.queue
        if not queue or now_s() >= self.lease.start_until_s:
            return None
        lane.forgotten = 0  # all that is queued now came after the ticket was forgotten
        try:
            return queue.popleft()
        except IndexError:  # the ticket was forgotten at this moment: another owner has it
            return None

    def admit(self, lane: Lane, message: Message, start_us: int, is_first: bool = True) -> bool:
        """Return whether the handler may be called now, at ``start_us``; if so, count and record its start. If not, the
        lane is not the runner's any more. ``is_first``: none of its ticket is in the call already, to be lost then."""
        if is_first and not message.plain and not self._may_start_here(lane, message):
            return False
        if (
            self.settling is not None
            and not message.attempt
            and rank(message.stream_id) > rank(lane.settled)
            and (due_s := self.settling.due_s(message.ticket, lane.last, now := self.clock())) > now
        ):
            self.lanes.retry(lane, message, due_s)
            return False
        lane.settled = lane.last  # what came until now has settled
        if self.pace is not None and (due_s := self.pace.due_s(message.ticket, now := self.clock())) > now:
            self.lanes.retry(lane, message, due_s)
            return False
        # Should the lease end, this start would be no other's.
        if is_first and message.attempt and message.stream_id in self._acker.unnoted:
            self.lanes.retry(lane, message, self.clock() + _UNNOTED_S)
            return False
        if (
            is_first
            and self.outages.known
            and not self.outages.is_quiet(message.ticket)
            and (wait := self.outages.hold(message, self.clock())) is not None
        ):
            self._wait(lane, message, wait.due_s, wait)
            return False
        if self._limit_s:
            message.deadline = time.monotonic() + self._limit_s
        self.begin(message, start_us)
        return True

    def admit_apart(self, lane: Lane, message: Message) -> bool:
        if self._is_over(lane, message):
            return False
        self.cancelled.discard(message.stream_id)  # a former run, which had just ended
        self.begin(message, run_us(), APART)
        return True

    def not_started(self, lane: Lane, message: Message, wait_s: float) -> None:
        """Take the start back: its child process ended before it called the handler. The lane is not the runner's any
        more."""
        self._note_end(message)
        self.besides.pop(message.stream_id, None)
        message.attempt -= 1
        self.lanes.retry(lane, message, self.clock() + wait_s)

    def begin(self, message: Message, start_us: int, *state: int) -> None:
        message.attempt += 1
        message.start_us = start_us
        if self.pace is not None:
            self.pace.began(message.ticket, self.clock())
        if not message.first_ms:
            message.first_ms = start_us // 1000
        in_hand.set(message)
        self._note_start(message, start_us, *state)

    def _may_start_here(self, lane: Lane, message: Message) -> bool:
        """Return whether a message with a past may start in this process; if not, give it up, or to a child process."""
        if self._is_over(lane, message):
            return False
        if self.isolates and is_suspect(message.known):
            self.lanes.isolate(lane, message)
            return False
        return True

    def _is_over(self, lane: Lane, message: Message) -> bool:
        """Give the message up, and return True, if its body is gone, or its attempts are used up. A drain reads no
        bodies: what it has brought waits, and is given back."""
        if message.stream_id in self.lanes.given_up:  # by now
            message.failures = GIVEN_UP
        if message.body_is_gone and self.lanes.paused:
            self.lanes.retry(lane, message, now_s() + 1.0)
            return True
        if message.body_is_gone:
            self.bury(lane, message, Bury("body_gone", ""))
            return True
        if not is_used_up(message.known, self.policy.max_attempts):
            return False
        decision = unended(message.known)
        event("message_given_up", level=ERROR, reason=decision.reason, **message.facts(), error=decision.error)
        self.bury(lane, message, decision)
        return True

    def succeeded(self, lane: Lane, message: Message, start_us: int, end_us: int, here: bool = False) -> bool:
        """Take the success of a handler that returned. Return True when the lane may go on, False when it is held until
        Redis has the acknowledgement. ``here``: this thread may wait for that, and takes a lane next."""
        self._note_end(message)
        self.ended += 1
        if self.outages.known and not self.outages.is_quiet(message.ticket):
            self._go_on(self.outages.done(message, self.clock(), not (lane.queue or lane.early)))
        message.start_us, message.end_us = start_us, end_us
        if self.besides:
            self._end_absorbed(message, end_us)
        if not self.strict:
            self._acker.finished(message)
            return True
        message.lane = lane
        self.lanes.hold(lane, (end_us - start_us) / 1e6)
        self._acker.finished(message, here)
        return False

    def _end_absorbed(self, message: Message, end_us: int) -> None:
        absorbed = self._over(message).absorbed
        for one in absorbed:
            self._note_end(one)
            self.ended += 1
            one.start_us = one.end_us = end_us  # in the run log none of a ticket's runs overlap
        if absorbed:
            self._acker.absorbed(message, absorbed)

    def _over(self, message: Message) -> Beside:
        """Return what its run had beside it."""
        with self.lanes.lock:  # who absorbs from another thread has ended, or finds that the message has
            beside = self.besides.pop(message.stream_id, None) or Beside()
        message.interrupted = beside.cancelled.is_set()
        return beside

    def raised(self, lane: Lane, message: Message, problem: BaseException, text: ErrorText | None = None) -> None:
        """Try the message again in its place, or give it up: its handler raised, or its process ended. Either way the
        lane is not the runner's any more. ``text``: where that is not told by ``problem``."""
        self._note_end(message)
        message.answer = message.given = None
        self.ended += 1
        problem = self._of_all(lane, message, readable(problem)) if self.besides else readable(problem)
        self.outages.ended(message.ticket)
        name, at = (text.error_type, own_line(text.traceback)) if text else (type_name(problem), raised_at(problem))
        wait = self._outage(message, problem, (name, at))
        if text is None:
            text = ErrorText(format_error(problem), name, "" if wait and not wait.is_news else traced(problem))
        if isinstance(problem, ProcessEnded):
            message.crashed(problem.is_blamed)
        else:
            message.failures += not (wait or isinstance(problem, RetryLater))
            message.survived()
        if message.stream_id in self.lanes.given_up:
            message.failures, wait = GIVEN_UP, None
        now = self.clock()
        decision = wait.due_s - now if wait else decide(problem, message.failures, self.policy, self.rng)
        end_us = run_us()
        noted = self._noted(message, text, at, end_us // 1000, wait)
        times = message.attempt, message.start_us, end_us
        run = Finished(message.ticket, message.stream_id, message.fence, *times, message.flat, message.interrupted)
        message.interrupted = False
        # Who only asks to be called later has no trouble, and may be one of very many.
        is_plain_wait = wait is None and isinstance(problem, RetryLater) and not has_cause(text.traceback)
        error = None if is_plain_wait or isinstance(decision, Bury) else noted
        self._acker.failed(run._replace(outcome=_outcome(problem), known=message.known, error=error))
        if wait is None:
            _tell(message, problem, text, decision)
        elif wait.is_news:
            facts: dict[str, Any] = {"tickets": wait.tickets, "since_s": round(now - wait.since_s, 1)}
            facts |= {"error": text.error[:500], "at": at}
            event("tickets_fail_alike", level=WARNING, trace=text.traceback, **facts)
        if isinstance(decision, Bury):
            details = {"error": text.error, "error_type": text.error_type, "traceback": text.traceback}
            self.bury(lane, message, replace(decision, **details, at=at, noted=noted.head))
            return
        # What fails at once, as in an outage, does not tell how long handlers take that do not.
        ran_s = (run.end_us - run.start_us) / 1e6
        self._wait(lane, message, self.clock() + decision, wait, None if lane.apart or ran_s < SHORT_S else ran_s)

    def _wait(self, lane: Lane, message: Message, due_s: float, wait: Wait | None, ran_s: float | None = None) -> None:
        is_here = self.all_wait_here or (wait.is_here if wait else due_s - self.clock() < PUT_OFF_S)
        if is_here:
            self.lanes.retry(lane, message, due_s, ran_s)
        else:
            self.lanes.hold(lane, ran_s)
            self._acker.put_off(lane, message, due_s)
        if wait is not None and not self.outages.waits(message, wait._replace(is_here=is_here)):
            if is_here:
                self.lanes.let_go((message.ticket,))
            else:
                self._acker.go_on([(message.ticket, message.fence)])

    def _outage(self, message: Message, problem: BaseException, sign: Sign) -> Wait | None:
        if isinstance(problem, (ProcessEnded, GiveUp)) or (isinstance(problem, RetryLater) and not problem.is_away):
            self.outages.leave(message.ticket)
            return None
        declared: tuple[type[BaseException], ...] = (RetryLater, *self.away)
        is_declared = sign[0] in {one.__name__ for one in self.away} or any(
            isinstance(one, declared) for one in (problem, *parts_of(problem))
        )
        how = DECLARED if is_declared else CONNECTION if tells_of_connection(problem) else OTHER
        return self.outages.failed(message, sign, how, self.clock())

    def beside(self, message: Message) -> Beside:
        """Return what its run has beside it; what is nobody's if it does not run."""
        found = self.besides.get(message.stream_id)
        if found is None:
            # First this, then the look: whoever ends the run does it the other way round.
            found = self.besides.setdefault(message.stream_id, Beside())
            if not message.in_hand:
                self.besides.pop(message.stream_id, None)
        return found

    def absorb(self, message: Message, limit: int | None) -> list[Message]:
        """Take messages that wait in the lane of ``message``, which runs, into its run, in order."""
        taken: list[Message] = []
        with self.lanes.lock:
            beside, lane = self.beside(message), self.lanes.by_ticket.get(message.ticket)
            if lane is None or not (message.in_hand and _may_join(message) and self.lease.may_start()):
                return []
            if lane.early:
                lane.merge_early()
            last = (message, *beside.absorbed)[-1]
            while lane.queue and not (self.lanes.paused or (limit is not None and len(taken) >= limit)):
                one = lane.queue[0]
                is_next = rank(one.stream_id) > rank(last.stream_id) and one.fence > lane.forgotten
                if not is_next or not _may_join(one) or not self._has_spare():
                    break
                if one.is_asked and (given := getattr(message, "given", None)) is not None:
                    try:
                        message.answer_all(given, one)
                    except (TypeError, ValueError):  # its caller gets a result of its own
                        break
                last = lane.queue.popleft()
                self.begin(last, run_us())
                beside.absorbed.append(last)
                taken.append(last)
        in_hand.set(message)
        return taken

    async def more(self, message: Message, timeout_s: float) -> Message | None:
        """Return the next message of the ticket, absorbed; None after ``timeout_s``, and when a drain begins."""
        loop, until_s, run = asyncio.get_running_loop(), self.clock() + timeout_s, message.attempt
        came = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(came.set)

        self.lanes.awaited[wake] = message.ticket
        try:
            while message.attempt == run:  # a task that outlives its run waits for nothing
                came.clear()
                if (found := self.absorb(message, 1)) or self.lanes.paused:
                    return found[0] if found else None
                await asyncio.wait_for(came.wait(), until_s - self.clock())
        except TimeoutError:
            pass
        finally:
            del self.lanes.awaited[wake]
        return None

    def _of_all(self, lane: Lane, message: Message, problem: BaseException) -> BaseException:
        """Put back what the run had absorbed, and return the problem of its message: which one caused it shows when
        each is tried by itself."""
        beside = self._over(message)
        is_interrupted = beside.cancelled.is_set() and isinstance(problem, asyncio.CancelledError)
        problem = GiveUp("interrupted") if is_interrupted else problem
        is_plain = is_interrupted or isinstance(problem, RetryLater) or not beside.absorbed
        for one in (message, *beside.absorbed):
            one.alone = one.alone or not is_plain
        self.requeue(lane, beside.absorbed)
        return problem if is_plain else TriedTogether(problem)

    def look(self) -> None:
        """Let tickets go on that nobody else lets, and do what is due by now. Called every second."""
        if self.outages.known:
            self._go_on(self.outages.overdue(self.clock()))
        for late in [one for one in self.late if one[0] <= self.clock()]:
            self.late.remove(late)
            late[1]()

    def _go_on(self, over: Sequence[GoOn]) -> None:
        for on in over:
            self._acker.go_on([one for one in on.first if one[1]])
            self.lanes.let_go({ticket for ticket, fence in on.first if not fence})
            if on.lasted_s is not None:
                facts: dict[str, Any] = {"tickets": len(on.alike), "probes": on.probes}
                facts |= {"lasted_s": round(on.lasted_s, 1), "error_type": on.sign[0], "at": on.sign[1]}
                event("tickets_go_on", level=WARNING, **facts)

    def _noted(self, message: Message, text: ErrorText, at: str, at_ms: int, wait: Wait | None) -> NotedError:
        most = self.policy.max_attempts
        charged = most if message.known.is_given_up else message.failures
        error = LastError(text.error, text.error_type, at, message.attempt, charged, most, at_ms)
        if wait is not None:
            error = error._replace(alike=wait.tickets, since_ms=wall_ms() - int(1000 * (self.clock() - wait.since_s)))
        return encode(error, text.traceback)

    def requeue(self, lane: Lane, messages: Sequence[Message]) -> None:
        """Put back messages that were started in one call with others, and must wait for an earlier one of their
        ticket. The lane stays the runner's."""
        for message in messages:
            message.answer = message.given = None
            self._note_end(message)
        with self.lanes.lock:
            self.lanes.requeue(lane, messages)

    def bury(self, lane: Lane, message: Message, decision: Bury) -> None:
        """Give the message up. Nothing more of its ticket starts before the dead letter is written: only success is
        pipelined."""
        self.lanes.hold(lane)
        self.outages.leave(message.ticket)
        self._acker.give_up(lane, message, decision)

    def broken(self, problem: BaseException) -> None:
        """End this incarnation: our own code failed around a handler call, so its lanes cannot be trusted any more."""
        event("executor_failed", level=CRITICAL, error=format_error(problem))
        self._on_broken(f"{type(problem).__name__} around a handler call")


def _may_join(message: Message) -> bool:
    """Return whether a message may share a run: it has not failed, and has ended no process, as far as is known."""
    is_fit = message.plain or not (message.body_is_gone or is_suspect(message.known))
    return is_fit and not (message.alone or message.failures)


def _tell(message: Message, problem: BaseException, text: ErrorText, decision: float | Bury) -> None:
    facts: dict[str, Any] = {**message.facts(), "error": text.error[:500]}
    if isinstance(problem, ProcessEnded):
        facts |= {"failures": message.failures, "crashes": message.crashes}
        is_stuck, trace = problem.is_stuck, text.traceback
        event("handler_stuck" if is_stuck else "handler_crashed", level=ERROR, trace=trace, **facts)
    if isinstance(decision, Bury):
        trace = "" if isinstance(problem, ProcessEnded) else text.traceback
        event("message_given_up", level=ERROR, trace=trace, reason=decision.reason, **facts)
    elif isinstance(problem, RetryLater) and not isinstance(problem, TriedTogether):
        event("handler_asked_later", retry_in_s=decision, **facts)
    elif not isinstance(problem, ProcessEnded):
        trace = text.traceback if message.failures <= 1 else ""
        event("handler_failed", level=WARNING, trace=trace, retry_in_s=decision, **facts)


def _outcome(problem: BaseException) -> str:
    if isinstance(problem, ProcessEnded):
        return CRASHED
    return RETRY_LATER if isinstance(problem, RetryLater) else GAVE_UP if isinstance(problem, GiveUp) else FAILED
