"""The incarnation: the services of one start of the consumer, put together.

Each service gets the few values it needs, never the settings as a whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from usher.common.base.clock import anchor, now_s
from usher.common.base.errors import OwnershipLost, RedisTrouble, ServerChanged
from usher.common.base.log import ERROR, WARNING, event
from usher.common.http.serve import LEAST_SILENCE_S, LOOK_S, Liveness
from usher.common.observability.metrics import DeadLetterNotifier, Metrics
from usher.common.protocol.attempts import CLEARED, ENDED, GIVEN_UP
from usher.common.protocol.keys import Keys
from usher.common.protocol.marks import MarkFields, parse_weights
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import CommandRefused, Link, SameServer
from usher.common.redis.replies import Order
from usher.common.runtime.fork_guard import call_in_children
from usher.common.runtime.service import Service, stalled
from usher.consumer.execution.acker import Acker
from usher.consumer.execution.executor import Beside, Executor
from usher.consumer.execution.inbox_reader import InboxReader
from usher.consumer.execution.lanes import Lanes
from usher.consumer.execution.pools import AsyncPool, make_pool
from usher.consumer.execution.reporter import Reporter
from usher.consumer.execution.watchdog import Watchdog
from usher.consumer.handlers.decorators import HandlerOptions, given
from usher.consumer.handlers.loader import Handler, with_spans
from usher.consumer.handlers.message import Message, OwnLease, message_type
from usher.consumer.isolation.process import ProcessSpec, Template
from usher.consumer.isolation.worker import SuspectWorker, most_children
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.lifecycle.lease import Heartbeat, LeaseGuard, Taken
from usher.consumer.lifecycle.master_client import MasterClient
from usher.consumer.lifecycle.owner_scripts import Letter, OwnerScripts
from usher.consumer.lifecycle.process_ending import FLUSH_AT_END_S, ProcessEnding, wait_until
from usher.consumer.policy.outcome import RetryPolicy, linger
from usher.consumer.settings import WorkSettings


class Orders:
    """The one who carries orders out, on the reader's thread."""

    def __init__(self, executor: Executor, journal: Journal, ending: ProcessEnding, steps: OwnerScripts) -> None:
        self._executor = executor
        self._lanes = executor.lanes
        self._journal = journal
        self._ending, self._steps = ending, steps

    def obey(self, order: Order) -> None:
        steps = {"retry": self._retry, "give_up": self._give_up, "cancel": self._cancel}
        steps |= {"interrupt": self._interrupt, "clear": self._clear}
        step = steps.get(order.what.partition(" ")[0])
        is_done = step is not None and step(order)
        facts: dict[str, Any] = {"ticket": order.ticket.decode(), "id": order.id, "what": order.what}
        event("order_obeyed" if is_done else "order_without_effect", level=WARNING, **facts)

    def _retry(self, order: Order) -> bool:
        self._executor.outages.ask(order.ticket)
        return self._lanes.hasten(order.ticket, order.id)

    def _give_up(self, order: Order) -> bool:
        """Have the message become a dead letter in its turn: at once if it waits, else when its run has failed."""
        with self._lanes.lock:
            is_held = order.id in self._lanes.held_ids
            queued, _, _ = self._lanes.look(order.ticket)
            for message in queued:
                if message.stream_id == order.id:
                    message.failures, message.plain = GIVEN_UP, False
            if is_held:
                self._lanes.given_up.add(order.id)
        self._lanes.hasten(order.ticket, order.id)
        return is_held

    def _clear(self, order: Order) -> bool:
        """Have all that waits of the ticket here become dead letters in their turn; what runs is left alone."""
        with self._lanes.lock:  # first here, so that none begins meanwhile; what a runner has in hand by then runs
            before = [(one, one.failures, one.plain) for one in self._lanes.look(order.ticket)[0]]
            for one, _, _ in before:
                one.failures, one.plain = CLEARED, False
            queued, _, _ = self._lanes.look(order.ticket)
            left = {one.stream_id for one in queued}
            for one, failures, is_plain in before:
                if one.stream_id not in left:
                    one.failures, one.plain = failures, is_plain
        if not queued:
            return False
        # Then in Redis: whoever has them next, after a drain or a crash, is to know.
        try:
            self._steps.charge({one.stream_id: one.known for one in queued})
        except CommandRefused as refused:  # it never accepts it: that must not hold up what is handed over
            event("attempts_not_recorded", level=ERROR, messages=len(queued), why=str(refused))
        self._lanes.hasten(order.ticket, queued[0].stream_id)
        return True

    def _interrupt(self, order: Order) -> bool:
        """Interrupt what runs of the ticket; where it still runs after the seconds that the order has, cancel it."""
        runs = self._journal.running(order.ticket)
        run = min(runs, key=lambda one: rank(one.stream_id)) if runs else None
        if run is None or (order.id and order.id != run.stream_id):
            return False
        with self._lanes.lock:  # which it needs to absorb anything
            fresh, besides = Beside(), self._executor.besides
            beside = besides.setdefault(run.stream_id, fresh)
            if run.stream_id not in [one.stream_id for one in self._journal.running(order.ticket)]:
                if beside is fresh:  # else who ends the run takes it, with what the run absorbed
                    besides.pop(run.stream_id, None)
                return False
        if not beside.cancelled.is_set():
            beside.cancelled.set()
            self._executor.cancel_task(run.stream_id)
        if grace := order.what.partition(" ")[2]:
            late = order._replace(id=run.stream_id)
            self._executor.late.append((now_s() + float(grace), lambda: self._cancel(late, run.start_us)))
        return True

    def _cancel(self, order: Order, start_us: int = 0) -> bool:
        """Cancel the run; only the one that began at ``start_us``, if that is given."""
        running = self._journal.running(order.ticket)
        runs = [one for one in running if one.stream_id == order.id and start_us in (0, one.start_us)]
        if not runs:
            return False
        if runs[0].is_apart:
            self._executor.cancelled.add(order.id)
        else:
            self._ending.end(runs, "an operator cancelled a run", ENDED)
        return True


_JOIN_S = 2.0
#: Shortest time between acknowledgements of a few finished messages each: a call of one costs Redis as much as one of
#: twenty.
FLUSH_S = 0.02
#: Longest wait between attempts, unless the handler says otherwise.
RETRY_CAP_S = 60.0


#: Pause between looks of a drain, and the least time that it has: to refuse hand-overs, and give quiet tickets back.
_DRAIN_LOOK_S, _LEAST_DRAIN_S = 0.02, 0.5


class Drain:
    """A drain, used once, by one thread, with a connection of its own behind ``steps``: leave so that nothing has to be
    delivered again.

    The order matters. First Redis refuses further hand-overs to us; only operators' orders can come into the inbox
    then, which is read until the end, and the first read brings all hand-overs. Handlers that run may finish; finished
    messages are acknowledged; every quiet ticket is given back whole, with the time at which it is due, if it waits.
    What the leader recalls now is given back anyway. Messages that still run at the end of the grace time are not
    touched: the lease ends, and the leader takes them back.
    """

    def __init__(
        self,
        steps: OwnerScripts,
        lanes: Lanes,
        reader: InboxReader,
        acker: Acker,
        lease_ms: int,
    ) -> None:
        self._steps = steps
        self.is_over = False  # we have deregistered, or are about to
        self._given_back = 0
        self._lanes = lanes
        self._reader = reader
        self._acker = acker
        self._lease_ms = lease_ms

    def run(self, grace_s: float) -> bool:
        """Drain for up to ``grace_s`` seconds. Return whether nothing of us is left, and we have deregistered. Never
        raises: the end of the lease settles what cannot be done here."""
        until_s = now_s() + max(grace_s, _LEAST_DRAIN_S)
        self._lanes.pause()
        self._acker.hurry()
        left, trouble = [self._take_no_more, self._end_reader, self._leave], ""
        while left:
            try:
                if left[0]():
                    del left[0]
                    continue
            except RedisTrouble as problem:  # not yet: every step may be taken again
                trouble = str(problem)
            except (OwnershipLost, ServerChanged, CommandRefused) as problem:
                trouble = str(problem)
                break
            if now_s() >= until_s:
                break
            time.sleep(_DRAIN_LOOK_S)
        facts: dict[str, Any] = {"given_back": self._given_back, "still_running": self._lanes.running}
        trouble = trouble or self._acker.trouble or "none"
        event("consumer_drained", clean=not left, trouble=trouble, **facts)
        return not left

    def _take_no_more(self) -> bool:
        self._steps.drain(self._lease_ms)
        return True

    def _end_reader(self) -> bool:
        self._reader.stop()
        if not self._reader.join(_DRAIN_LOOK_S):
            raise RedisTrouble("the reader has not ended yet")
        # ``stop`` broke its connection, which a thread that was not waiting on it has not noticed.
        self._reader.close()
        return True

    def _leave(self) -> bool:
        self._reader.read_rest()  # again and again: orders still come
        self._given_back += self._acker.give_all_back()
        if self._lanes.running or not self._acker.is_flushed:
            return False
        self.is_over = True
        self.is_over = self._steps.deregister()
        return self.is_over


class Incarnation:
    """The services of one start of the consumer, from the moment its name is taken."""

    #: A kit of tests has others.
    acker_type: type[Acker] = Acker
    reporter_type: type[Reporter] = Reporter

    def __init__(
        self,
        settings: WorkSettings,
        redis_url: str,
        taken: Taken,
        handler: Handler,
        journal: Journal,
        on_lost: Callable[..., None],
        metrics: Metrics,
        template: Template,
        masters: MasterClient,
    ) -> None:
        anchor()
        self._settings, self._redis_url, self._registration = settings, redis_url, taken.registration
        # An incarnation ends after a restart or a failover of Redis: fences and acknowledgements that it remembers may
        # be lost there, and an old fence in a restored index would be handed to it again.
        self._same_server = SameServer(on_lost)
        self._keys = keys = Keys(settings.work_stream, settings.group)
        self.name = taken.registration.incarnation
        self._journal = journal
        self._on_lost = on_lost
        slots, is_strict = settings.concurrency, settings.ack_mode == "strict"
        self.lease = OwnLease(taken.lease_s, taken.sent_s)
        self.lanes = lanes = Lanes(settings.marks, parse_weights(settings.tenant_weights))
        self.reporter = self.reporter_type(
            masters,
            self.name,
            taken.registration.slots,
            settings.capacity,
            taken.ticket_window,
            lambda: lanes.keeps_up,
        )
        self.reporter.retrying, lanes.on_retry = lambda: len(lanes.waiting), self.reporter.hear_of_retry
        waits = linger(FLUSH_S, is_strict, settings.capacity - slots, taken.ticket_window)
        self.acker = self.acker_type(self.steps("ack"), lanes, self.reporter, waits, settings.run_log_length, on_lost)
        self.bell = DeadLetterNotifier(metrics, settings, settings.consumer_name, keys)
        self.acker.policy = handler.options.dead_letter_policy or settings.dead_letter_policy
        self.acker.on_dead_letter, self.acker.ran = self._ring, (settings.handler, settings.marks)
        policy, limit_s = terms(settings, handler.options)
        self._limit_s = limit_s or math.inf
        self.executor = Executor(lanes, self.acker, journal, self.lease, policy, is_strict, limit_s, self._broken)
        self.executor.obey(handler.options)
        outages = self.acker.outages = self.executor.outages
        outages.kinds_of, outages.slots = kinds_of(settings.marks, handler.kind_of), slots
        call_in_children(self.executor.end_in_child)
        ending = ProcessEnding(self.steps("ending"), self._is_flushed, journal, settings.run_log_length, on_lost)
        self.reader = self._make_reader(handler.batch is not None, ending)
        self.heartbeat = Heartbeat(self.steps("beat", max(0.2, taken.lease_s / 3)), self.lease, self._works, on_lost)
        self.guard = LeaseGuard(self.lease, on_lost)
        self.pool = make_pool(with_spans(handler, keys.stream, keys.group), self.executor, slots)
        event_loop = next((pool for pool in self.pool if isinstance(pool, AsyncPool)), None)
        self.pool += self._suspect_workers(template)
        looks = lambda: (self.executor.ended, lanes.running), self.executor.look
        self.watch = Watchdog(ending, limit_s, event_loop, *looks)
        self._drain_steps = self.steps("drain")
        lease_ms = int(taken.lease_s * 1000)
        self.drain = Drain(self._drain_steps, lanes, self.reader, self.acker, lease_ms)

    def steps(self, role: str, timeout_s: float = 5.0) -> OwnerScripts:
        """Return the owner's scripts over a connection of their own."""
        link = Link(self._redis_url, f"consumer:{self.name}:{role}", timeout_s, self._same_server)
        return OwnerScripts(link, self._keys, self._registration)

    def _make_reader(self, is_batch: bool, ending: ProcessEnding) -> InboxReader:
        settings, steps = self._settings, self.steps("read")
        reader = InboxReader(steps.link, self._keys, self.name, self.lanes, self.lease)
        reader.most_bytes, reader.slots = settings.capacity_bytes, settings.concurrency
        reader.on_recall = self.acker.recall
        reader.message_type = message_type(self._keys.stream, settings.sources is not None)
        reader.message_type.on_progress = self.acker.progress
        reader.message_type.runner = None if is_batch else self.executor
        reader.on_order = Orders(self.executor, self._journal, ending, steps).obey
        return reader

    def _suspect_workers(self, template: Template) -> list[Service]:
        settings = self._settings
        spec = ProcessSpec(
            settings.handler,
            self._keys.stream,
            settings.sources is not None,
            settings.handler_seconds,
            (settings.log_level, settings.log_format),
            tuple(filter(None, settings.secrets)),
            settings.consumer_name,
            is_rehearsal=False,
            group=settings.group,
        )
        count = most_children(settings.concurrency)
        steps = [self.steps(f"suspects-{number}") for number in range(count)]
        return [SuspectWorker(number, self.executor, each, spec, template) for number, each in enumerate(steps)]

    @property
    def services(self) -> list[Service]:
        # The heartbeat checks whether the others live, so it starts after them and stops before them.
        return [
            self.reader,
            self.guard,
            *self.pool,
            self.watch,
            *self.bell.services,
            self.acker,
            self.reporter,
            self.heartbeat,
        ]

    def liveness(self) -> Liveness:
        """Return how long this process may be silent: to the deadline of a handler that started now, and not to the end
        of its lease; and whether the lease's keepers stand still. These watch the others."""
        now, lease_s = now_s(), self.lease.lease_s
        silence_s = min(self._limit_s, self.lease.ends_s - now - LOOK_S)
        return Liveness(max(silence_s, LEAST_SILENCE_S), stalled([self.heartbeat, self.guard], now, lease_s))

    def start(self) -> None:
        for service in self.services:
            service.start()

    def stop(self, grace_s: float) -> None:
        """Drain for up to ``grace_s`` seconds, then end every thread, without waiting for threads that are still in a
        handler. While there are any, the lease guard stays: it ends the process before another owner may start."""
        is_clean = self.drain.run(grace_s)
        self._journal.explain()  # we cut off what still runs
        ending = [service for service in reversed(self.services) if is_clean or service is not self.guard]
        for service in ending:
            service.stop()
        until_s = now_s() + _JOIN_S
        for service in ending:
            service.join(max(0.0, until_s - now_s()))
        if is_clean:
            self._journal.remove()
        self.reader.close()
        self._drain_steps.link.close()

    def _is_flushed(self) -> bool:
        """Have all that has ended written at once, and return whether it is."""
        self.acker.hurry()
        return self.acker.is_flushed

    def _broken(self, why: str) -> None:
        """Leave as in a crash: a handler may have ended what it runs in, so what runs is suspected."""
        wait_until(lambda: self.acker.is_settled, FLUSH_AT_END_S)
        self._on_lost(why, is_explained=False)

    def _ring(self, letter: Letter) -> None:
        how = {"error_type": letter.error_type, "attempts": letter.attempts, "policy": letter.policy}
        self.bell.ring(letter.ticket, letter.id, letter.reason, **how)

    def _works(self) -> bool:
        """Return whether all parts live and the reader makes progress; the lease is renewed only then. Paused lanes
        mean a drain, which stops the reader itself."""
        if not all(service.alive for service in (*self.pool, self.acker)):
            return False
        last = self.reader.last_turn_s
        return self.lanes.paused or (
            self.reader.alive and last is not None and now_s() - last < self.reader.stalls_after_s
        )


def kinds_of(marks: MarkFields, kind_of: Callable[[Message], object]) -> Callable[[Message], list[object]]:
    """Return what tells the kinds of messages that may need something of their own: their tenant, their route."""

    def kinds(message: Message) -> list[object]:
        tenant = marks.of(message.stream_id, message.ticket, message.flat).tenant if marks.tenant else b""
        return [kind for kind in (tenant, kind_of(message)) if kind]

    return kinds


def terms(settings: WorkSettings, asked: HandlerOptions) -> tuple[RetryPolicy, float]:
    """Return what holds for the handler: its retry policy, and the longest it may run in seconds (0: no limit)."""
    base_s = given(asked.backoff_s, settings.retry_seconds)
    cap_s = given(asked.backoff_cap_s, RETRY_CAP_S)
    policy = RetryPolicy(asked.max_attempts or settings.max_attempts, base_s, cap_s)
    return policy, given(asked.deadline_s, settings.handler_seconds)
