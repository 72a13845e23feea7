"""The consumer's parts, put together in one place. Each part gets the few values it needs, never the settings as a
whole."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.common.http.auth import looked_at
from usher.common.http.server.server import url_of
from usher.common.observability import tracing as telemetry
from usher.common.observability.dead_letter_notifier import DeadLetterNotifier
from usher.common.observability.metrics import Metrics
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import NO_LOCK, Registration
from usher.common.redis.client import Link, SameServer
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.fork_guard import call_in_children
from usher.common.runtime.health import Health, judge
from usher.common.runtime.name_lock import NameLock, boot_id
from usher.common.runtime.service import Service
from usher.consumer.execution.acker import Acker
from usher.consumer.execution.async_pool import AsyncPool
from usher.consumer.execution.batch_pool import batch_pool
from usher.consumer.execution.drain import Drain
from usher.consumer.execution.executor import Executor
from usher.consumer.execution.inbox_reader import InboxReader
from usher.consumer.execution.lanes import Lanes
from usher.consumer.execution.reporter import Reporter
from usher.consumer.execution.thread_pool import LaneWorker
from usher.consumer.execution.ticket_state import describe_ticket
from usher.consumer.execution.watchdog import Watchdog
from usher.consumer.handlers.decorators import HandlerOptions, given
from usher.consumer.handlers.loader import Handler, load_handler
from usher.consumer.handlers.message import OwnLease, message_type
from usher.consumer.lifecycle.crash_report import report_crash
from usher.consumer.lifecycle.heartbeat import Heartbeat
from usher.consumer.lifecycle.journal import Journal, read_journal
from usher.consumer.lifecycle.lease_guard import LeaseGuard
from usher.consumer.lifecycle.master_client import MasterClient, MasterUnavailable
from usher.consumer.lifecycle.owner_scripts import Letter, OwnerScripts
from usher.consumer.lifecycle.registrar import Registrar, Taken
from usher.consumer.lifecycle.start_log import StartLog
from usher.consumer.metrics import consumer_metrics
from usher.consumer.policy.acks import linger
from usher.consumer.policy.outcome import RetryPolicy
from usher.consumer.settings import ConsumerSettings
from usher.consumer.web import create_app

log = logging.getLogger(__name__)

_JOIN_S = 2.0


class _Wires:
    """Connections of one incarnation, and the owner's steps over them."""

    def __init__(self, redis_url: str, keys: Keys, taken: Taken, on_lost: Callable[[str], None]) -> None:
        self._redis_url = redis_url
        self._keys = keys
        self._registration = taken.registration
        # After a restart or a failover of Redis an incarnation ends: fences and acknowledgements that it remembers may
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
        settings: ConsumerSettings,
        redis_url: str,
        taken: Taken,
        handler: Handler,
        journal: Journal,
        on_lost: Callable[[str], None],
        metrics: Metrics,
    ) -> None:
        name = taken.registration.incarnation
        keys = Keys(settings.work_stream, settings.group)
        wires = _Wires(redis_url, keys, taken, on_lost)
        link, steps = wires.link, wires.steps
        self.name = name
        self.is_over = False
        self._journal = journal
        self.lease = OwnLease(taken.lease_s, taken.sent_s)
        self.lanes = Lanes()
        spare = settings.capacity - settings.concurrency
        self.reporter = Reporter(
            _masters(settings, taken.leader_url), name, spare, taken.ticket_window, lambda: self.lanes.keeps_up
        )
        waits = linger(settings.flush_ms / 1000, settings.ack_mode == "strict", spare, taken.ticket_window)
        ack_link, beat_link = link("ack"), link("beat", max(0.2, taken.lease_s / 3))
        self.acker = Acker(
            ack_link, steps(ack_link), self.lanes, self.reporter, name, waits, settings.run_log_length, on_lost
        )
        self.bell = DeadLetterNotifier(metrics, settings.dead_letter_webhook, settings.consumer_name, keys)
        self.acker.policy, self.acker.on_dead_letter = settings.dead_letter_policy, self._ring
        alone_link = link("alone")
        self._starts = StartLog(journal, alone_link, steps(alone_link))
        policy, limit_s = _terms(settings, handler.options)
        self.executor = Executor(
            self.lanes, self.acker, self._starts, self.lease, policy, settings.ack_mode == "strict", limit_s, on_lost
        )
        call_in_children(self.executor.end_in_child)
        self.reader = InboxReader(link("read"), keys, name, self.lanes, self.lease)
        self.reader.message_type = message_type(keys.stream, settings.sources is not None)
        self.heartbeat = Heartbeat(beat_link, steps(beat_link), self.lease, self._works, on_lost)
        self.guard = LeaseGuard(self.lease, on_lost)
        self.pool = _pool(_traced(handler, keys.stream), self.executor, settings.concurrency)
        self.watch: list[Service] = (
            [self._watchdog(wires, limit_s, settings.run_log_length, on_lost)] if limit_s else []
        )
        self._drain_link = link("drain")
        self._drain_steps = steps(self._drain_link)
        self._drain = Drain(
            self._drain_steps,
            self.lanes,
            self.reader,
            self.acker,
            self._starts,
            int(taken.lease_s * 1000),
            self._deregister,
        )
        self._goodbye = _masters(settings, taken.leader_url)

    def _watchdog(self, wires: _Wires, limit_s: float, run_log_length: int, on_lost: Callable[[str], None]) -> Watchdog:
        link, running = wires.link("watch"), self.executor.running
        return Watchdog(
            *(link, wires.steps(link), lambda: list(running.values()), lambda: self.acker.is_flushed),
            *(self._journal, limit_s, run_log_length, on_lost),
        )

    @property
    def services(self) -> list[Service]:
        # The heartbeat asks whether the others live, so it begins after them and ends before.
        return [
            self.reader,
            self.guard,
            *self.pool,
            *self.watch,
            *self.bell.services,
            self.acker,
            self.reporter,
            self.heartbeat,
        ]

    def start(self) -> None:
        for service in self.services:
            service.start()

    def stop(self, grace_s: float) -> None:
        """Drain, then end every thread; those in a handler are not waited for any longer. While such a one runs the
        guard watches on: it ends the process, if that is still there, when another owner may begin."""
        drained = self._drain.run(grace_s, self._say_goodbye)
        self._journal.explain()  # what still runs is cut off by us
        if not drained.clean:
            self._starts.give_back(self._drain_steps)
        ending = [service for service in reversed(self.services) if drained.clean or service is not self.guard]
        for service in ending:
            service.stop()
        until_s = now_s() + _JOIN_S
        for service in ending:
            service.join(max(0.0, until_s - now_s()))
        if drained.clean:
            self._journal.remove()
        self.reader.close()
        self._starts.close()
        self._drain_link.close()
        self._goodbye.close()

    def _ring(self, letter: Letter) -> None:
        self.bell.ring(letter.ticket, letter.id, letter.reason, letter.error_type, letter.attempts, letter.policy)

    def _deregister(self) -> bool:
        """Leave for good. The lease is gone then, and its loss is no news to anybody."""
        self.is_over = True
        self.is_over = self._drain_steps.deregister()
        return self.is_over

    def _works(self) -> bool:
        """Whether all parts live and the reader makes progress; the lease is renewed only then. Paused lanes mean a
        drain, which stops the reader itself."""
        if not all(service.alive for service in (*self.pool, self.acker)):
            return False
        last = self.reader.last_turn_s
        return self.lanes.paused or (
            self.reader.alive and last is not None and now_s() - last < self.reader.stalls_after_s
        )

    def _say_goodbye(self) -> None:
        """The leader hands the rest over at once instead of at its next look at the roster."""
        try:
            self._goodbye.post("/api/consumers/deregister", orjson.dumps({"incarnation": self.name}))
        except MasterUnavailable as nobody:
            event(log, "deregister_failed", level=logging.WARNING, why=str(nobody))


class ConsumerProgram:
    """The consumer as usher.common.http.server.server runs it: web application, start, stop."""

    def __init__(self, settings: ConsumerSettings, redis_url: str, leave: Callable[[str], None]) -> None:
        self._settings = settings
        self._redis_url = redis_url
        self._leave = leave
        self._handler = load_handler(settings.handler)
        self._lock = NameLock(settings.state_folder, settings.consumer_name)
        self._lock_is_missed = False  # it was said that somebody else holds it
        self._former_is_told = False
        self._journal: Journal | None = None
        self._incarnation: Incarnation | None = None
        self._registrar: Registrar | None = None
        self._ending = threading.Lock()  # held while an incarnation is begun or ended
        self._stopped = False
        self._metrics = Metrics()
        self._metrics.add(lambda: consumer_metrics(self._incarnation, settings.concurrency))
        self.app = create_app(
            looked_at(settings.api_token, settings.viewer_token),
            self._health,
            self._facts,
            self._metrics.page,
            lambda: self._stopped,
            self._look,
        )

    def start(self, port: int, host: str) -> None:
        """Take the name lock and begin to register."""
        settings = self._settings
        health_url = settings.health_url or f"{url_of(host, port, settings.tls_cert is not None)}/api/health"
        event(
            log, "consumer_starting", name=settings.consumer_name, handler=settings.handler, slots=settings.concurrency
        )
        self._registrar = Registrar(
            lambda: self._ask(health_url), _masters(settings, None), self._begin, self._tell_of_former
        )
        self._registrar.start()

    def _tell_of_former(self) -> None:
        """Tell what the former process of our name was running when it ended, if it left a journal. This is done as
        soon as we hold its lock, and once: then the journal is removed, or our successor would tell it again if we end
        before we begin our own. It is removed, not written over: where its lock was begun anew, a process of a former
        version may have it mapped."""
        settings, path = self._settings, None if self._former_is_told else self._journal_path()
        if path is None:
            return
        former = None if self._lock.is_anew else read_journal(path, self._origin())
        if former is not None:
            report_crash(self._redis_url, Keys(settings.work_stream, settings.group), former, settings.run_log_length)
        with contextlib.suppress(OSError):
            path.unlink()
        self._former_is_told = True

    def _origin(self) -> str:
        """What a journal must say to be believed: of this boot, and of this stream and group, where another consumer of
        our name may have been."""
        prefix = Keys(self._settings.work_stream, self._settings.group).prefix
        return f"{boot_id()} {hashlib.sha256(prefix.encode()).hexdigest()[:16]}"

    def _journal_path(self) -> Path | None:
        """Beside the name lock; None where that proves nothing."""
        return self._lock.path.with_suffix(".journal") if self._lock.acquire() not in (None, NO_LOCK) else None

    def _ask(self, health_url: str) -> Registration:
        """A registration under a uuid of its own, with the evidence of this moment."""
        settings = self._settings
        lock = self._lock.acquire()
        if lock is None:
            # Another consumer of that name, or a child that a former one left behind. Without the lock there is no
            # proof that the former is dead: registering waits until its lease has ended, and is refused for as long as
            # it lives.
            if not self._lock_is_missed:
                event(log, "name_lock_held", level=logging.WARNING, name=settings.consumer_name)
            self._lock_is_missed, lock = True, self._lock.begin_anew() or NO_LOCK
        return Registration(
            settings.consumer_name, uuid.uuid4().hex, health_url, settings.concurrency, settings.capacity, lock
        )

    def stop(self) -> None:
        self._stopped = True
        with self._ending:
            if self._registrar is not None:
                self._registrar.stop()
            if self._incarnation is not None:
                self._incarnation.stop(self._settings.drain_seconds)

    def _begin(self, taken: Taken) -> None:
        """The name is ours: start working. On the registrar's thread."""
        with self._ending:
            if self._stopped:
                return  # nothing was handed over yet, or the leader takes it back when the lease ends
            try:
                name, batch = taken.registration.incarnation, self._handler.batch
                slots = self._settings.concurrency * (batch.most if batch is not None else 1)
                self._journal = Journal(self._journal_path(), self._origin(), name, slots)
                self._incarnation = Incarnation(
                    self._settings, self._redis_url, taken, self._handler, self._journal, self._lost, self._metrics
                )
                self._incarnation.start()
            except Exception as problem:  # half of it may run: registering again would begin a second one beside it
                self._lost(f"it could not be started: {type(problem).__name__}: {problem}")

    def _lost(self, why: str) -> None:
        """An incarnation that lost its lease never works again: this process leaves, also in the middle of a drain,
        because others may have its tickets already. Its successor takes the name anew."""
        incarnation = self._incarnation
        if incarnation is not None and incarnation.is_over:
            return
        if self._journal is not None:
            self._journal.explain()
        self._leave(why)  # it also logs: a log that blocks must not keep this process here

    def _health(self) -> Health:
        incarnation, registrar = self._incarnation, self._registrar
        if incarnation is None:
            why = registrar.trouble if registrar is not None else None
            return Health((f"not registered yet: {why or 'asking the masters'}",))
        health = judge(incarnation.services, now_s())
        return health if incarnation.lease.holds() else Health((*health.reasons, "the lease has ended"))

    def _look(self, ticket: bytes) -> dict[str, Any] | None:
        """What is held of a ticket, for who asks what it waits for."""
        incarnation, journal = self._incarnation, self._journal
        if incarnation is None or journal is None:
            return None
        return describe_ticket(ticket, incarnation.name, journal, incarnation.lanes, incarnation.executor.max_attempts)

    def _facts(self) -> dict[str, Any]:
        incarnation = self._incarnation
        facts: dict[str, Any] = {
            "role": "consumer",
            "name": self._settings.consumer_name,
            "handler": self._settings.handler,
        }
        if incarnation is not None:
            tickets, messages = incarnation.lanes.load()
            facts |= {
                "incarnation": incarnation.name,
                "tickets": tickets,
                "messages": messages,
                "running": incarnation.lanes.running,
                "handled": incarnation.executor.handled,
                "failed": incarnation.executor.failed,
                "acknowledged": incarnation.acker.acknowledged,
                "stale": incarnation.acker.stale,
                "dead_letters": incarnation.acker.dead_letters,
            }
        return facts


def _terms(settings: ConsumerSettings, asked: HandlerOptions) -> tuple[RetryPolicy, float]:
    """What holds for the handler: attempts and waits, and the longest it may run."""
    base_s, cap_s = (
        given(asked.backoff_s, settings.retry_seconds),
        given(asked.backoff_cap_s, settings.retry_cap_seconds),
    )
    return RetryPolicy(asked.max_attempts or settings.max_attempts, base_s, cap_s), given(
        asked.deadline_s, settings.handler_seconds
    )


def _traced(handler: Handler, stream: str) -> Handler:
    """The handler with a span around each call, if its module (or whoever started us) has set OpenTelemetry up; else
    the handler as it is."""
    tracer = telemetry.tracer()
    if tracer is None:
        return handler
    call = telemetry.traced(handler.call, tracer, stream, is_async=handler.is_async, is_batch=handler.batch is not None)
    return replace(handler, call=call)


def _pool(handler: Handler, executor: Executor, slots: int) -> list[Service]:
    """The runners that the handler asks for by what it is."""
    if handler.batch is not None:
        return batch_pool(handler, handler.batch, executor, slots)
    if handler.is_async:
        return [AsyncPool(executor, handler.call, slots)]
    return [LaneWorker(number, executor, handler.call) for number in range(slots)]


def _masters(settings: ConsumerSettings, leader_url: str | None) -> MasterClient:
    client = MasterClient(settings.master_urls.split(","), settings.api_token, settings.tls_ca)
    if leader_url is not None:
        client.prefer(leader_url)
    return client
