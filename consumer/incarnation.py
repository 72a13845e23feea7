"""The incarnation: the services of one start of the consumer, put together.

Each service gets the few values it needs, never the settings as a whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import orjson

from usher.common.base.clock import anchor, now_s
from usher.common.base.log import event
from usher.common.http.serve import LEAST_SILENCE_S, LOOK_S, Liveness
from usher.common.observability.metrics import Metrics
from usher.common.observability.webhook import DeadLetterNotifier
from usher.common.protocol.attempts import CLEARED, GIVEN_UP
from usher.common.protocol.keys import Keys
from usher.common.protocol.marks import MarkFields, parse_weights
from usher.common.protocol.run_log import Ran
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Link, SameServer
from usher.common.redis.replies import Order
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.fork_guard import call_in_children
from usher.common.runtime.service import Service, stalled
from usher.consumer.execution.acker import Acker
from usher.consumer.execution.async_pool import AsyncPool, LaneWorker
from usher.consumer.execution.batch_pool import batch_pool
from usher.consumer.execution.drain import Drain
from usher.consumer.execution.executor import Beside, Executor
from usher.consumer.execution.inbox_reader import InboxReader
from usher.consumer.execution.lanes import Lanes
from usher.consumer.execution.reporter import Reporter
from usher.consumer.execution.watchdog import Watchdog, stacks
from usher.consumer.handlers.decorators import HandlerOptions, given
from usher.consumer.handlers.loader import Handler, with_spans
from usher.consumer.handlers.message import Message, OwnLease, message_type
from usher.consumer.isolation.process import ProcessSpec, Template
from usher.consumer.isolation.worker import SuspectWorker, most_children
from usher.consumer.lifecycle.heartbeat import Heartbeat, LeaseGuard, ProgressWatch
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.lifecycle.master_client import MasterClient, MasterUnavailable
from usher.consumer.lifecycle.owner_scripts import Letter, OwnerScripts
from usher.consumer.lifecycle.process_ending import FLUSH_AT_END_S, ProcessEnding, wait_until
from usher.consumer.lifecycle.registrar import Taken
from usher.consumer.policy.acks import linger
from usher.consumer.policy.outcome import RetryPolicy
from usher.consumer.settings import ConsumerSettings, WorkSettings


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
        event(log, "order_obeyed" if is_done else "order_without_effect", level=logging.WARNING, **facts)

    def _retry(self, order: Order) -> bool:
        self._executor.outages.ask(order.ticket)
        return self._lanes.hasten(order.ticket, order.id)

    def _give_up(self, order: Order) -> bool:
        """Have the message become a dead letter in its turn: at once if it waits, else when its run has failed."""
        with self._lanes.lock:
            is_held = order.id in self._lanes.board.held_ids
            queued, _, _ = self._lanes.board.look(order.ticket)
            for message in queued:
                if message.stream_id == order.id:
                    message.failures, message.plain = GIVEN_UP, False
            if is_held:
                self._lanes.board.given_up.add(order.id)
        self._lanes.hasten(order.ticket, order.id)
        return is_held

    def _clear(self, order: Order) -> bool:
        """Have all that waits of the ticket here become dead letters in their turn; what runs is left alone."""
        with self._lanes.lock:
            queued, _, _ = self._lanes.board.look(order.ticket)
        if not queued:
            return False
        # First in Redis: whoever has them next, after a drain or a crash, is to know.
        self._steps.charge({one.stream_id: one.known._replace(failures=CLEARED) for one in queued})
        for message in queued:
            message.failures, message.plain = CLEARED, False
        self._lanes.hasten(order.ticket, queued[0].stream_id)
        return True

    def _interrupt(self, order: Order) -> bool:
        """Interrupt what runs of the ticket; where it still runs after the seconds that the order has, cancel it."""
        runs = [one for one in self._journal.running(order.ticket) if not one.is_apart]
        run = min(runs, key=lambda one: rank(one.stream_id)) if runs else None
        if run is None or (order.id and order.id != run.stream_id):
            return False
        told = self._executor.besides.setdefault(run.stream_id, Beside()).cancelled
        if not told.is_set():
            told.set()
            self._executor.cancel_task(run.stream_id)
        with self._lanes.lock:  # which it needs to absorb anything
            if run.stream_id not in [one.stream_id for one in self._journal.running(order.ticket)]:
                self._executor.besides.pop(run.stream_id, None)
        if grace := order.what.partition(" ")[2]:
            late = order._replace(id=run.stream_id)
            self._executor.late.append((now_s() + float(grace), lambda: self._cancel(late, run.start_us)))
        return True

    def _cancel(self, order: Order, start_us: int = 0) -> bool:
        """Cancel the run; only the one that began at ``start_us``, if that is given."""
        with self._lanes.lock:  # before what runs: a child that ends in between is not this process
            lane = self._lanes.board.lanes.get(order.ticket)
            is_apart = lane is not None and lane.apart
        running = self._journal.running(order.ticket)
        runs = [one for one in running if one.stream_id == order.id and start_us in (0, one.start_us)]
        if not runs:
            return False
        if is_apart:
            self._executor.cancelled.add(order.id)
        else:
            self._ending.end(runs, "an operator cancelled a run", "an operator ended its run")
        return True


log = logging.getLogger(__name__)

_JOIN_S = 2.0
#: Shortest time between acknowledgements of a few finished messages each: a call of one costs Redis as much as one of
#: twenty.
FLUSH_S = 0.02
#: Longest wait between attempts, unless the handler says otherwise.
RETRY_CAP_S = 60.0


class _Wires:
    """The connections of one incarnation, and the owner's scripts over them."""

    def __init__(self, redis_url: str, keys: Keys, taken: Taken, on_lost: Callable[[str], None]) -> None:
        self._redis_url = redis_url
        self._keys = keys
        self._registration = taken.registration
        # An incarnation ends after a restart or a failover of Redis: fences and acknowledgements that it remembers may
        # be lost there, and an old fence in a restored index would be handed to it again.
        self._same_server = SameServer(on_lost)

    def link(self, role: str, timeout_s: float = 5.0) -> Link:
        return Link(self._redis_url, f"consumer:{self._registration.incarnation}:{role}", timeout_s, self._same_server)

    def steps(self, link: Link) -> OwnerScripts:
        return OwnerScripts(ScriptRunner(link), self._keys, self._registration)


class Incarnation:
    """The services of one start of the consumer, from the moment its name is taken."""

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
        masters: Callable[[str | None], MasterClient],
    ) -> None:
        anchor()
        name = taken.registration.incarnation
        keys = Keys(settings.work_stream, settings.group)
        wires = _Wires(redis_url, keys, taken, on_lost)
        link, steps = wires.link, wires.steps
        self.name = name
        self.is_over = False
        self._journal = journal
        self.lease = OwnLease(taken.lease_s, taken.sent_s)
        self.lanes = Lanes(settings.marks, parse_weights(settings.tenant_weights))
        slots, capacity, reports_to = settings.concurrency, settings.capacity, masters(taken.leader_url)
        of_registration = reports_to, name, taken.registration.slots, capacity, taken.ticket_window
        self.reporter = Reporter(*of_registration, lambda: self.lanes.keeps_up)
        self.reporter.retrying, self.lanes.on_retry = lambda: len(self.lanes.board.waiting), self.reporter.hear_of_retry
        waits = linger(FLUSH_S, settings.ack_mode == "strict", capacity - slots, taken.ticket_window)
        ack_link, beat_link = link("ack"), link("beat", max(0.2, taken.lease_s / 3))
        of_log = waits, settings.run_log_length, on_lost
        self.acker = Acker(ack_link, steps(ack_link), self.lanes, self.reporter, name, *of_log)
        self.bell = DeadLetterNotifier(metrics, settings, settings.consumer_name, keys)
        self.acker.policy = handler.options.dead_letter_policy or settings.dead_letter_policy
        self.acker.on_dead_letter, self.acker.ran = self._ring, Ran(settings.handler, settings.marks)
        policy, limit_s = terms(settings, handler.options)
        self._limit_s = limit_s or math.inf
        self.executor = Executor(
            self.lanes, self.acker, journal, self.lease, policy, settings.ack_mode == "strict", limit_s, self._broken
        )
        self._on_lost = on_lost
        self.executor.obey(handler.options)
        self.executor.unnoted = self.acker.unnoted
        outages = self.acker.outages = self.executor.outages
        outages.kinds_of, outages.slots = kinds_of(settings.marks, handler.kind_of), slots
        call_in_children(self.executor.end_in_child)
        self.reader = self._make_reader(settings, wires, keys, handler.batch is not None, on_lost)
        self.heartbeat = Heartbeat(beat_link, steps(beat_link), self.lease, self._works, on_lost)
        self.guard = LeaseGuard(self.lease, on_lost)
        self.pool = _pool(with_spans(handler, keys.stream, keys.group), self.executor, settings.concurrency)
        self.pool += self._suspect_workers(settings, wires, keys.stream, template)
        self.progress = ProgressWatch(lambda: (self.executor.ended, self.lanes.running), self.executor.look)
        self.watch: list[Service] = (
            [self._watchdog(wires, limit_s, settings.run_log_length, on_lost)] if limit_s else []
        )
        self._drain_link = link("drain")
        self._drain_steps = steps(self._drain_link)
        lease_ms = int(taken.lease_s * 1000)
        self._drain = Drain(self._drain_steps, self.lanes, self.reader, self.acker, lease_ms, self._deregister)
        self._goodbye = masters(taken.leader_url)

    def _make_reader(
        self, settings: WorkSettings, wires: _Wires, keys: Keys, is_batch: bool, on_lost: Callable[[str], None]
    ) -> InboxReader:
        link = wires.link("read")
        reader = InboxReader(link, keys, self.name, self.lanes, self.lease)
        reader.most_bytes, reader.slots = settings.capacity_bytes, settings.concurrency
        reader.on_recall = self.acker.recall
        reader.message_type = message_type(keys.stream, settings.sources is not None)
        reader.message_type.on_progress = self.acker.progress
        reader.message_type.runner = None if is_batch else self.executor
        steps = wires.steps(wires.link("ending"))  # of any thread, once
        ending = ProcessEnding(steps, self._is_flushed, self._journal, settings.run_log_length, on_lost)
        reader.on_order = Orders(self.executor, self._journal, ending, wires.steps(link)).obey
        return reader

    def _watchdog(self, wires: _Wires, limit_s: float, run_log_length: int, on_lost: Callable[[str], None]) -> Watchdog:
        link, running = wires.link("watch"), self.executor.running
        watchdog = Watchdog(
            link,
            wires.steps(link),
            lambda: list(running.values()),
            self._is_flushed,
            self._journal,
            limit_s,
            run_log_length,
            on_lost,
        )
        watchdog.event_loop = self._event_loop
        return watchdog

    @property
    def _event_loop(self) -> AsyncPool | None:
        return next((pool for pool in self.pool if isinstance(pool, AsyncPool)), None)

    def stacks(self) -> dict[bytes, str]:
        """Return where the handlers stand that run in this process, by message."""
        return stacks(loop.calls if (loop := self._event_loop) is not None else {})

    def _suspect_workers(self, settings: WorkSettings, wires: _Wires, stream: str, template: Template) -> list[Service]:
        spec = ProcessSpec(
            settings.handler,
            stream,
            settings.sources is not None,
            settings.handler_seconds,
            (settings.log_level, settings.log_format),
            tuple(filter(None, settings.secrets)),
            settings.consumer_name,
            is_rehearsal=False,
            has_lease=True,
            group=settings.group,
        )
        links = [wires.link(f"suspects-{number}") for number in range(most_children(settings.concurrency))]
        return [
            SuspectWorker(number, self.executor, link, wires.steps(link), spec, template)
            for number, link in enumerate(links)
        ]

    @property
    def services(self) -> list[Service]:
        # The heartbeat checks whether the others live, so it starts after them and stops before them.
        return [
            self.reader,
            self.guard,
            *self.pool,
            *self.watch,
            self.progress,
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
        drained = self._drain.run(grace_s, self._say_goodbye)
        self._journal.explain()  # we cut off what still runs
        ending = [service for service in reversed(self.services) if drained.clean or service is not self.guard]
        for service in ending:
            service.stop()
        until_s = now_s() + _JOIN_S
        for service in ending:
            service.join(max(0.0, until_s - now_s()))
        if drained.clean:
            self._journal.remove()
        self.reader.close()
        self._drain_link.close()
        self._goodbye.close()

    def _is_flushed(self) -> bool:
        """Have all that has ended written at once, and return whether it is."""
        self.acker.hurry()
        return self.acker.is_flushed

    def _broken(self, why: str) -> None:
        """Leave as in a crash: a handler may have ended what it runs in, so what runs is suspected."""
        wait_until(lambda: self.acker.is_settled, FLUSH_AT_END_S)
        self._on_lost(why, is_explained=False)

    def _ring(self, letter: Letter) -> None:
        self.bell.ring(letter.ticket, letter.id, letter.reason, letter.error_type, letter.attempts, letter.policy)

    def _deregister(self) -> bool:
        self.is_over = True
        self.is_over = self._drain_steps.deregister()
        return self.is_over

    def _works(self) -> bool:
        """Return whether all parts live and the reader makes progress; the lease is renewed only then. Paused lanes
        mean a drain, which stops the reader itself."""
        if not all(service.alive for service in (*self.pool, self.acker)):
            return False
        last = self.reader.last_turn_s
        return self.lanes.paused or (
            self.reader.alive and last is not None and now_s() - last < self.reader.stalls_after_s
        )

    def _say_goodbye(self) -> None:
        try:
            self._goodbye.post("/api/consumers/deregister", orjson.dumps({"incarnation": self.name}))
        except MasterUnavailable as nobody:
            event(log, "deregister_failed", level=logging.WARNING, why=str(nobody))


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


def _pool(handler: Handler, executor: Executor, slots: int) -> list[Service]:
    if handler.batch is not None:
        return batch_pool(handler, handler.batch, executor, slots)
    if handler.is_async:
        return [AsyncPool(executor, handler.call, slots)]
    return [LaneWorker(number, executor, handler.call) for number in range(slots)]


def master_client(settings: ConsumerSettings, leader_url: str | None) -> MasterClient:
    client = MasterClient(settings.master_urls.split(","), settings.api_token, settings.tls_ca)
    if leader_url is not None:
        client.prefer(leader_url)
    return client
