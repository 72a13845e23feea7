"""Acker: it acknowledges finished messages and notes failed attempts, one script per batch, writes given-up messages as
dead letters, and gives tickets back that are recalled, or are to wait for long.

One batch is under way at a time; one whose reply was lost goes again, unchanged, before anything later (the script
answers OK or GONE). Failures are noted before successes, because a message may have failed first and succeeded later,
and its acknowledgement forgets its failures. A dead letter is written, and a ticket given back, after everything that
finished before it, so that per ticket a prefix is acknowledged. A ticket is given back again and again until the answer
is sure; its fence is closed before the first time, so that nothing of it starts here whatever becomes of the calls.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import NotNow, OwnershipLost, RedisTrouble, ReplyUnknown, ServerChanged
from usher.common.base.log import ERROR, event
from usher.common.observability.metrics import LONG_US, DurationHistogram
from usher.common.protocol.marks import NO_FIELDS, MarkFields
from usher.common.protocol.run_log import DONE, RETRY_LATER, encode
from usher.common.redis.client import CommandRefused
from usher.common.redis.replies import HandOver
from usher.common.runtime.service import Service
from usher.consumer.execution.lanes import Lane, Lanes
from usher.consumer.execution.outages import Outages
from usher.consumer.execution.reporter import Item, Reporter
from usher.consumer.handlers.message import Message, Told, answers_of
from usher.consumer.lifecycle.owner_scripts import GO_ON, Buried, GiveBack, Letter, OwnerScripts
from usher.consumer.policy.outcome import CLEARED_OUT, OPERATOR, Bury, Finished

#: The waiting time is taken from the first execution of a batch, and from every so many-th after it.
_EVERY = 64


class HandlerCounters:
    """The counts of one consumer since its start."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {DONE: 0}
        self.handlers = DurationHistogram()
        self.waits = DurationHistogram(LONG_US)

    def done(self, runs: Sequence[Message], absorbed: int) -> None:
        self.outcomes[DONE] += len(runs) + absorbed
        self.handlers.add([run.end_us - run.start_us for run in runs])
        self.waits.add(
            [run.start_us - 1000 * int(run.stream_id.partition(b"-")[0]) for run in runs[::_EVERY] if run.attempt == 1]
        )

    def failed(self, failures: Sequence[Finished]) -> None:
        for failure in failures:
            self.outcomes[failure.outcome] = self.outcomes.get(failure.outcome, 0) + 1
        self.handlers.add([failure.end_us - failure.start_us for failure in failures])


#: Most messages of one ack script.
BATCH = 500
#: Most dead letters written at once, and most bytes of their messages. Each is a call of its own, which copies the
#: message, and Redis may run all of them before it answers another client.
_LETTERS, _LETTER_BYTES = 50, 1 << 22
#: Most tickets given back at once: each may have thousands of ids, and Redis does nothing else meanwhile.
_GIVE_BACKS, _DRAINED = 50, 500  # the latter when nothing else is to be done here
#: So long after others, tickets that are put off wait for more, up to as many as one script takes: each note of one
#: that was given back may stop a turn of the leader, which hands over others.
_PUT_OFF_S = 0.25
#: Most parts of results that are sent at once; and most bytes that wait, where each counts so many more than it has.
_PARTS, _WAITING_BYTES, _PART_BYTES = 200, 1 << 24, 200
#: The policy under which a ticket goes on after a dead letter.
SKIP = "skip"
#: Reasons of dead letters after which a ticket goes on under any policy.
_GOES_ON = ("body_gone", OPERATOR, CLEARED_OUT)


class GivenUp(NamedTuple):
    """A message on its way to the dead letters. ``lane`` is held until it is written. ``in_doubt``: it may be written
    already; the answer was lost."""

    lane: Lane
    message: Message
    letter: Letter
    in_doubt: bool = False


class Acker(Service):
    """The service that writes the outcome of handlers to Redis. ``finished``, ``failed``, ``give_up``, ``put_off`` and
    ``recall`` may be called from any thread; the rest belongs to who has ``_turn``: this thread, or a runner of lanes
    that writes its own acknowledgement."""

    name = "ack"
    _IDLE_S = 2.0

    def __init__(
        self,
        steps: OwnerScripts,
        lanes: Lanes,
        reporter: Reporter,
        linger: tuple[float, int],
        run_log_length: int,
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._steps, self._link = steps, steps.link
        self._lanes = lanes
        self._reporter = reporter
        self._incarnation = steps.incarnation
        self._linger_s, self._enough = linger
        self._flushed_s = -math.inf
        self._run_log_length = run_log_length
        self._on_lost = on_lost
        self._finished: deque[Message] = deque()  # append and popleft of a deque are atomic
        self._under_way = 0  # how many of them, from the first one, the last call had, whose answer is not known
        self._absorbed: dict[bytes, Sequence[Message]] = {}  # what runs ended beside their message, by its id
        self._failed: deque[Finished] = deque()
        self._noting: list[Finished] = []  # only this thread: the failures that are under way
        self.unnoted: set[bytes] = set()  # messages whose last failure Redis does not know yet
        self._given_up: deque[GivenUp] = deque()
        self._asked: set[bytes] = set()  # messages whose callers wait, from before they are in the ledger
        self._parts: deque[tuple[Any, ...]] = deque()
        self._numbers = count(1)
        self._to_give_back: deque[GiveBack] = deque()  # their fences are closed
        self._gave_back_s = -math.inf
        self._writing = False
        # What belongs to this thread belongs to a runner of lanes while that one writes.
        self._turn, self._is_here = threading.Lock(), False
        self._idle = True  # the thread waits to be woken
        self._lingering = False
        self._write_now = threading.Event()  # ends the linger
        self.policy, self.outages = SKIP, Outages()
        #: The handler's name, and the fields in which its messages have tenants and priorities.
        self.ran: tuple[str, MarkFields] = ("", NO_FIELDS)
        self.on_dead_letter: Callable[[Letter], None] = lambda letter: None
        #: Called when messages were acknowledged.
        self.on_progress: Callable[[], None] = lambda: None
        self.counts = HandlerCounters()

    # ---- any thread --------------------------------------------------------------------------------------------------

    def absorbed(self, item: Message, absorbed: Sequence[Message]) -> None:
        """Take those that ended with ``item``, in order, before that itself is taken."""
        self._asked.update([one.stream_id for one in absorbed if one.is_asked])
        self._absorbed[item.stream_id] = absorbed

    def finished(self, item: Message, here: bool = False) -> None:
        """Take a success. ``here``: this thread may wait for Redis, and takes a lane next."""
        if item.is_asked:  # with the look below, all that results cost where nobody asks for one
            self._asked.add(item.stream_id)
        self._finished.append(item)
        if self._asked:
            self._write_now.set()
        if item.lane is not None and not self._lanes.ready:  # nothing goes on before this is written
            # Not while lanes wait for a time and nobody else is there to run them: Redis may stand still.
            if here and (self._lanes.has_idle or not self._lanes.waiting) and self._write_here():
                return
            self._write_now.set()
            if self._trouble:  # it may pause after a turn that failed
                self.wake()
        if self._idle:
            self._idle = False
            self.wake()
        elif self._lingering and len(self._finished) >= self._enough:
            self._write_now.set()

    def _write_here(self) -> bool:
        """Write what there is, unless it is being written: to wake the thread that does takes as long. Return False
        where that one is to do it."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self.stopping:  # the link may be closed
                return False
            self._is_here = True
            self._flush()
            return True
        except (RedisTrouble, CommandRefused, OwnershipLost, ServerChanged):  # it tries again, and tells
            return False
        finally:
            self._is_here = False
            self._turn.release()

    def failed(self, item: Finished) -> None:
        if item.outcome != RETRY_LATER:  # it costs nothing, and comes again at once
            self.unnoted.add(item.stream_id)
        self._failed.append(item)
        self.wake()

    def progress(self, messages: Sequence[Message], told: Told) -> None:
        """Send a part of messages' results at once. Raises NotNow when too much waits."""
        if (len(self._parts) + len(messages) - 1) * (_PART_BYTES + len(told[1])) > _WAITING_BYTES:
            raise NotNow("BUSY", f"{len(self._parts):,} parts of results wait for Redis")
        for one in messages:
            key, call = one.reply_to or (b"", b"")
            self._parts.append((key, b"", call, f"{one.fence} {one.attempt} {next(self._numbers)}", *told))
        self._write_now.set()
        self.wake()

    def give_up(self, lane: Lane, message: Message, bury: Bury) -> None:
        """Have a message become a dead letter; its lane is held. If its ticket does not simply go on, what is queued of
        it is not ours from now on: the script takes it back, and it may be handed to us again before we have seen the
        answer."""
        policy = SKIP if bury.reason in _GOES_ON else self.policy
        if policy != SKIP:
            with self._lanes.lock:
                self._lanes.close_fence(message.ticket, message.fence, message.stream_id)
        letter = Letter(
            message.ticket,
            message.stream_id,
            bury.reason,
            bury.error,
            message.attempt,
            message.first_ms,
            wall_ms(),
            message.fence,
            bury.error_type,
            bury.traceback,
            policy,
            bury.at,
            bury.noted,
            self.ran[0],
        )
        self._given_up.append(GivenUp(lane, message, letter))
        self._write_now.set()
        self.wake()

    def put_off(self, lane: Lane, message: Message, due_s: float) -> None:
        """Have a message wait until then, and with it its ticket; its lane is held. The ticket is given back."""
        with self._lanes.lock:
            ids = self._lanes.close_fence(message.ticket, message.fence, message.stream_id)
        self._to_give_back.append(GiveBack(message.ticket, message.fence, ids, due_s, lane))
        self.wake()

    def go_on(self, tickets: Iterable[tuple[bytes, int]]) -> None:
        """Let tickets go on that were put off under these fences, as far as they still wait so."""
        self._to_give_back += [GiveBack(ticket, fence, GO_ON) for ticket, fence in tickets]
        self.wake()

    def recall(self, tickets: Iterable[HandOver]) -> None:
        """Give back those of these tickets of which nothing was started: the leader wants them for another consumer.
        Report what is over of all of them: it may ask because it has not heard of that."""
        tickets = [*tickets]
        with self._lanes.lock:
            over = [(ticket, fence, self._lanes.over(ticket, ids)) for ticket, fence, ids in tickets]
            closed = self._lanes.close_unstarted(tickets)
        self._to_give_back += [GiveBack(ticket, fence, ids) for ticket, fence, ids in closed]
        self._reporter.add(over)
        self.wake()

    def give_all_back(self) -> int:
        """Give back every ticket of which nothing runs, with the time at which it is due, if it waits: this incarnation
        ends. Return how many there are."""
        with self._lanes.lock:
            closed = self._lanes.close_quiet()
        self._to_give_back += [GiveBack(*one) for one in closed]
        if closed:
            self.wake()
        return len(closed)

    def hurry(self) -> None:
        """Write everything at once from now on, without waiting for more to finish: this incarnation ends."""
        self._linger_s = 0.0  # first: a linger that starts after the event was cleared must see it
        self._write_now.set()
        self.wake()

    def interrupt(self) -> None:
        self.hurry()

    @property
    def is_flushed(self) -> bool:
        return not (self._given_up or self._to_give_back) and self.is_settled

    @property
    def is_settled(self) -> bool:
        """Return whether nothing but dead letters and tickets to be given back waits to be written: their lanes are
        held or gone, and no other ticket is concerned."""
        is_empty = not (self._finished or self._failed or self._noting or self._parts)
        return is_empty and not self._writing

    # ---- this thread -------------------------------------------------------------------------------------------------

    def run_once(self) -> float:
        if self._rest_s() > 0:
            self._idle = True
            rest_s = self._rest_s()  # again: a message that finished before the line above did not wake this thread
            if rest_s > 0:
                return rest_s
        self._idle = False
        self._linger()
        try:
            with self._turn:
                self._flush()
        except OwnershipLost as lost:
            self._on_lost(str(lost))
            return self._IDLE_S
        return 0.0

    def on_end(self) -> None:
        with self._turn:
            super().on_end()

    def _rest_s(self) -> float:
        if self._given_up or not self.is_settled:
            return 0.0
        return self._gathering_s() if self._to_give_back else self._IDLE_S

    def _gathering_s(self) -> float:
        """Return for how long tickets that are put off wait for more; 0.0 where others are to be given back."""
        waiting = [*islice(self._to_give_back, _GIVE_BACKS)]
        is_many = len(waiting) >= _GIVE_BACKS or sum(len(one.ids) for one in waiting) >= self._reporter.enough
        if is_many or not self._linger_s or any(one.lane is None for one in waiting):
            return 0.0
        return self._gave_back_s + _PUT_OFF_S - now_s()

    def _linger(self) -> None:
        """Wait a moment for more to finish, so that a batch is worth its call. After a quiet time do not wait."""
        self._lingering = True
        left_s = self._flushed_s + self._linger_s - now_s()
        if left_s > 0 and len(self._finished) < self._enough and not self._given_up:
            self._write_now.wait(left_s)
        self._lingering = False
        self._write_now.clear()  # everything that set it before now is written now

    def _flush(self) -> None:
        self._writing = True
        try:
            self._write()
        finally:
            self._writing = False
            self._flushed_s = now_s()

    def _write(self) -> None:
        """Write everything that is there now: first failures, then successes, then what comes after them in their
        lanes, tickets to be given back and dead letters. Leave what comes meanwhile to the next turn: handlers that ask
        to be called again at once always bring one more failure."""
        letters, given_back = len(self._given_up), len(self._to_give_back) if self._gathering_s() <= 0 else 0
        finished = len(self._finished)  # before the failures are counted: they include those of finished messages
        for _ in range(bool(self._noting) + -(-len(self._failed) // BATCH)):
            self._note_failures()
        for _ in range(-(-len(self._parts) // _PARTS)):  # those of what has finished by then; more may always come
            parts = [*islice(self._parts, _PARTS)]
            self._steps.ack((), answers=parts)
            for _ in parts:
                self._parts.popleft()
        while finished > 0 and self._finished:
            finished -= self._acknowledge(self._under_way or self._fitting(finished))
        if self._is_here:  # what else there is may take long, and the lanes that go on wait for this thread
            return
        refused = self._give_back(min(given_back, 4 * _GIVE_BACKS if self._linger_s else given_back))
        while letters > 0:
            items = self._next_letters(min(letters, _LETTERS))
            refused = self._bury(items) or refused
            letters -= len(items)
            self.made_progress()  # also if Redis is far away, or its disk is slow
        if refused is not None:
            raise refused

    def _note_failures(self) -> None:
        is_new = not self._noting  # else it is sent again, unchanged: Redis counts it by what it changes
        while is_new and self._failed and len(self._noting) < BATCH:
            self._noting.append(self._failed[0])
            self._failed.popleft()
        try:
            self._steps.note_failures(self._noting, self._run_log_length, self.ran)
        except CommandRefused as refused:  # counts that Redis never accepts must not hold up acknowledgements
            event("attempts_not_recorded", level=ERROR, messages=len(self._noting), why=str(refused))
        noted, self._noting = self._noting, []
        self.unnoted.difference_update(item.stream_id for item in noted)
        self.counts.failed(noted)
        if self.outages.wonders(now_s()):
            self.outages.hear(self._steps.some_errors(), now_s())

    def _fitting(self, most: int) -> int:
        """Return how many of those that finished one call takes: their answers may be large."""
        size = 0
        for number, one in enumerate([*islice(self._finished, BATCH)] if self._asked else (), 1):
            for each in (one, *self._absorbed.get(one.stream_id, ())):
                size += sum(map(len, getattr(each, "answer", None) or ()))
            if size > _LETTER_BYTES:
                return min(most, number)
        return most

    def _next_batch(self, most: int) -> tuple[list[Message], dict[bytes, bytes]]:
        """Return the first messages that have finished, up to ``most``, with what they absorbed; and the id of the run
        by that of what it absorbed. Per ticket they are a prefix in id order: lanes finish in order."""
        runs, into = [*islice(self._finished, most)], dict[bytes, bytes]()
        self._under_way = len(runs)
        if not self._absorbed:
            return runs, into
        batch, self._under_way = list[Message](), 0
        for run in runs:
            if len(batch) < BATCH:  # a script has no room for many more
                others = self._absorbed.get(run.stream_id, ())
                into |= {one.stream_id: run.stream_id for one in others}
                batch += (run, *others)
                self._under_way += 1
        return batch, into

    def _acknowledge(self, most: int) -> int:
        """Acknowledge up to ``most`` of those that have finished, and return how many. If the answer is lost, the next
        call has the same ones."""
        is_again = self._under_way > 0
        batch, into = self._next_batch(min(BATCH, most))
        record = encode(self._incarnation, batch, (), *self.ran, into) if self._run_log_length else b""
        ids = [item.stream_id for item in batch]
        answers = answers_of(item for item in batch if item.stream_id in self._asked) if self._asked else ()
        self._steps.ack(ids, record, self._run_log_length, is_again, answers)
        taken, self._under_way = self._under_way, 0
        over = [self._finished.popleft() for _ in range(taken)]
        for run in over if self._absorbed else ():
            self._absorbed.pop(run.stream_id, None)
        self._asked.difference_update(ids if self._asked else ())
        self.counts.done([item for item in batch if item.stream_id not in into] if into else batch, len(into))
        with self._lanes.lock:
            self._lanes.done(ids)
        self.on_progress()
        held = [item.lane for item in batch if item.lane is not None]
        if held:
            self._lanes.resume(*held, here=self._is_here)
        done: dict[bytes, Item] = {}
        for item in batch:
            if (known := done.get(item.ticket)) is None:
                done[item.ticket] = (item.ticket, item.fence, [item.stream_id])
            else:
                known[2].append(item.stream_id)
        self._reporter.add(done.values())
        return taken

    def _give_back(self, left: int) -> CommandRefused | None:
        """Give tickets back, and return the refusal if Redis does not accept that: it must not hold up dead letters.
        Raises what ``Link.call`` raises. Whatever is answered, nothing of a ticket under its fence is ours any more."""
        self._gave_back_s = now_s() if left else self._gave_back_s
        while left > 0:
            items = list(islice(self._to_give_back, min(left, _GIVE_BACKS if self._linger_s else _DRAINED)))
            try:
                given = items[: len(self._steps.give_back(items))]
            except CommandRefused as refused:
                return refused
            left -= len(given)
            with self._lanes.lock:
                for item in given:
                    self._lanes.confirm_closed(item.ticket, item.fence)
                    self._to_give_back.popleft()
            if held := [item.lane for item in given if item.lane is not None]:
                self._lanes.resume(*held)
        return None

    def _next_letters(self, most: int) -> list[GivenUp]:
        items: list[GivenUp] = []
        size = 0
        for item in [*islice(self._given_up, most)]:  # at once: runners add to it meanwhile
            size += item.message.size
            if items and size > _LETTER_BYTES:
                break
            items.append(item)
        return items

    def _bury(self, items: list[GivenUp]) -> CommandRefused | None:
        """Write the dead letters of ``items``, the first that wait. Return the refusal of one that Redis does not
        accept: it must not hold up the others. Raises what ``Link.call`` raises."""
        refused, trouble = None, None
        for item, answer in zip(items, self._steps.dead_letters([one.letter for one in items]), strict=True):
            self._given_up.popleft()
            if not isinstance(answer, Exception):
                self._buried(item, answer)
                continue
            self._given_up.append(item._replace(in_doubt=item.in_doubt or isinstance(answer, ReplyUnknown)))
            if isinstance(answer, CommandRefused):
                refused = answer
            else:
                trouble = trouble or answer  # the ones after it may only report that they were not sent
        if trouble is not None:
            raise trouble
        return refused

    def _buried(self, item: GivenUp, answer: Buried) -> None:
        message, policy = item.message, item.letter.policy
        with self._lanes.lock:
            if policy != SKIP:
                self._lanes.confirm_closed(message.ticket, message.fence)
            else:
                self._lanes.done([message.stream_id])
                if answer is Buried.STALE:
                    self._lanes.forget(message.ticket, message.fence)
        self._lanes.resume(item.lane)
        # The call before, whose answer was lost, wrote it, and its ticket has gone on since.
        was_written = item.in_doubt and answer in (Buried.GONE, Buried.STALE)
        if was_written or answer in (Buried.OK, Buried.HALTED):
            self.on_dead_letter(item.letter)
        if answer is Buried.HALTED:
            event("ticket_halted", level=ERROR, ticket=message.ticket, id=message.id)
        if policy != SKIP or answer is Buried.STALE:
            return  # the leader hears of it from Redis
        self._reporter.add([(message.ticket, message.fence, [message.stream_id])])
