"""The consumer's parts, put together in one place. Each part gets the few values it needs, never the settings as a whole."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any

import orjson

from common.clock import now_s
from common.health import Health, judge
from common.keys import Keys
from common.log import event
from common.process import NameLock
from common.redis_client import Link, SameServer
from common.registration import NO_LOCK, Registration
from common.scripts import ScriptRunner
from common.service import Service
from consumer.acker import Acker
from consumer.async_pool import AsyncPool
from consumer.batch_pool import batch_pool
from consumer.batch_reader import BatchReader
from consumer.context import OwnLease
from consumer.drain import Drain
from consumer.executor import Executor
from consumer.handlers import Handler, load_handler
from consumer.heartbeat import Heartbeat
from consumer.lane_keeper import LaneKeeper
from consumer.lease_guard import LeaseGuard
from consumer.master_client import MasterClient, MasterUnavailable
from consumer.owner_steps import OwnerSteps
from consumer.policy.outcome import RetryPolicy
from consumer.registrar import Registrar, Taken
from consumer.reporter import Reporter
from consumer.settings import ConsumerSettings
from consumer.watchdog import Watchdog
from consumer.web import create_app
from consumer.worker_pool import LaneWorker

log = logging.getLogger(__name__)

_JOIN_S = 2.0


class Incarnation:
    """The services of one start of the consumer, from the moment its name is taken."""

    def __init__(self, settings: ConsumerSettings, redis_url: str, taken: Taken, handler: Handler, on_lost: Callable[[str], None]) -> None:
        name = taken.registration.incarnation
        keys = Keys(settings.ticket_stream, settings.group)

        # After a restart or a failover of Redis an incarnation ends: fences and acknowledgements that it remembers may be lost there, and
        # an old fence in a restored index would be handed to it again.
        same_server = SameServer(on_lost)

        def link(role: str, timeout_s: float = 5.0) -> Link:
            return Link(redis_url, f"consumer:{name}:{role}", timeout_s, same_server)

        def steps(role_link: Link) -> OwnerSteps:
            return OwnerSteps(ScriptRunner(role_link), keys, taken.registration)

        self.name = name
        self.is_over = False
        self.lease = OwnLease(taken.lease_s, taken.sent_s)
        self.keeper = LaneKeeper()
        self.reporter = Reporter(_masters(settings, taken.leader_url), name)
        ack_link, beat_link = link("ack"), link("beat", max(0.2, taken.lease_s / 3))
        self.acker = Acker(
            ack_link, steps(ack_link), self.keeper, self.reporter, name, settings.flush_ms / 1000, settings.run_log_length, on_lost
        )
        policy = RetryPolicy(settings.max_attempts, settings.retry_seconds, settings.retry_cap_seconds)
        self.executor = Executor(self.keeper, self.acker, self.lease, policy, settings.ack_mode == "strict", settings.handler_seconds, on_lost)
        self.reader = BatchReader(link("read"), keys, name, self.keeper, self.lease)
        self.heartbeat = Heartbeat(beat_link, steps(beat_link), self.lease, self._works, on_lost)
        self.guard = LeaseGuard(self.lease, on_lost)
        self.pool = _pool(handler, self.executor, settings.concurrency)
        self.watch: list[Service] = []
        if settings.handler_seconds:
            watch_link = link("watch")
            running = self.executor.running
            watchdog = Watchdog(
                watch_link, steps(watch_link), lambda: list(running.values()), lambda: self.acker.is_flushed, settings.handler_seconds, on_lost
            )
            self.watch.append(watchdog)
        self._drain_link = link("drain")
        self._drain_steps = steps(self._drain_link)
        self._drain = Drain(self._drain_steps, self.keeper, self.reader, self.acker, int(taken.lease_s * 1000), self._deregister)
        self._goodbye = _masters(settings, taken.leader_url)

    @property
    def services(self) -> list[Service]:
        # The heartbeat asks whether the others live, so it begins after them and ends before.
        return [self.reader, self.guard, *self.pool, *self.watch, self.acker, self.reporter, self.heartbeat]

    def start(self) -> None:
        for service in self.services:
            service.start()

    def stop(self, grace_s: float) -> None:
        """Drain, then end every thread; those in a handler are not waited for any longer."""
        self._drain.run(grace_s, self._say_goodbye)
        for service in reversed(self.services):
            service.stop()
        until_s = now_s() + _JOIN_S
        for service in reversed(self.services):
            service.join(max(0.0, until_s - now_s()))
        self.reader.close()
        self._drain_link.close()
        self._goodbye.close()

    def _deregister(self) -> bool:
        """Leave for good. The lease is gone then, and its loss is no news to anybody."""
        self.is_over = True
        self.is_over = self._drain_steps.deregister()
        return self.is_over

    def _works(self) -> bool:
        """Whether all parts live and the reader makes progress; the lease is renewed only then. A paused keeper means a drain, which stops
        the reader itself."""
        if not all(service.alive for service in (*self.pool, self.acker)):
            return False
        last = self.reader.last_turn_s
        return self.keeper.paused or (self.reader.alive and last is not None and now_s() - last < self.reader.stalls_after_s)

    def _say_goodbye(self) -> None:
        """The leader hands the rest over at once instead of at its next look at the roster."""
        try:
            self._goodbye.post("/api/consumers/deregister", orjson.dumps({"incarnation": self.name}))
        except MasterUnavailable as nobody:
            event(log, "goodbye_not_heard", level=logging.WARNING, why=str(nobody))


class ConsumerProgram:
    """The consumer as common.serving runs it: web application, start, stop."""

    def __init__(self, settings: ConsumerSettings, redis_url: str, leave: Callable[[str], None]) -> None:
        self._settings = settings
        self._redis_url = redis_url
        self._leave = leave
        self._handler = load_handler(settings.handler)
        self._lock = NameLock(settings.state_folder, settings.consumer_name)
        self._incarnation: Incarnation | None = None
        self._registrar: Registrar | None = None
        self._ending = threading.Lock()  # held while an incarnation is begun or ended
        self._stopped = False
        self.app = create_app(self._health, self._facts)

    def start(self, port: int, host: str) -> None:
        """Take the name lock and begin to register."""
        settings = self._settings
        lock = self._lock.acquire()
        if lock is None:
            # Another consumer of that name, or a child that a former one left behind. Without the lock there is no proof that the former
            # is dead: registering waits until its lease has ended, and is refused for as long as it lives.
            event(log, "name_lock_held", level=logging.WARNING, name=settings.consumer_name)
            lock = NO_LOCK
        health_url = settings.health_url or f"http://{f'[{host}]' if ':' in host else host}:{port}/api/health"
        asked = Registration(settings.consumer_name, uuid.uuid4().hex, health_url, settings.concurrency, settings.capacity, lock)
        event(log, "consumer_starts", name=settings.consumer_name, handler=settings.handler, slots=settings.concurrency)
        self._registrar = Registrar(asked, _masters(settings, None), self._begin)
        self._registrar.start()

    def stop(self) -> None:
        with self._ending:
            self._stopped = True
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
                self._incarnation = Incarnation(self._settings, self._redis_url, taken, self._handler, self._lost)
                self._incarnation.start()
            except Exception as problem:  # half of it may run: registering again would begin a second one beside it
                self._lost(f"it could not be started: {type(problem).__name__}: {problem}")

    def _lost(self, why: str) -> None:
        """An incarnation that lost its lease never works again: this process leaves, also in the middle of a drain, because others may
        have its tickets already. Its successor takes the name anew."""
        incarnation = self._incarnation
        if incarnation is not None and incarnation.is_over:
            return
        self._leave(why)  # it also logs: a log that blocks must not keep this process here

    def _health(self) -> Health:
        incarnation, registrar = self._incarnation, self._registrar
        if incarnation is None:
            why = registrar.trouble if registrar is not None else None
            return Health((f"not registered yet: {why or 'asking the masters'}",))
        health = judge(incarnation.services, now_s())
        return health if incarnation.lease.holds() else Health((*health.reasons, "the lease has ended"))

    def _facts(self) -> dict[str, Any]:
        incarnation = self._incarnation
        facts: dict[str, Any] = {"role": "consumer", "name": self._settings.consumer_name, "handler": self._settings.handler}
        if incarnation is not None:
            tickets, messages = incarnation.keeper.load()
            facts |= {
                "incarnation": incarnation.name,
                "tickets": tickets,
                "messages": messages,
                "running": incarnation.keeper.running,
                "handled": incarnation.executor.handled,
                "failed": incarnation.executor.failed,
                "acknowledged": incarnation.acker.acknowledged,
                "stale": incarnation.acker.stale,
                "dead_letters": incarnation.acker.dead_letters,
            }
        return facts


def _pool(handler: Handler, executor: Executor, slots: int) -> list[Service]:
    """The runners that the handler asks for by what it is."""
    if handler.batch is not None:
        return batch_pool(handler, handler.batch, executor, slots)
    if handler.is_async:
        return [AsyncPool(executor, handler.call, slots)]
    return [LaneWorker(number, executor, handler.call) for number in range(slots)]


def _masters(settings: ConsumerSettings, leader_url: str | None) -> MasterClient:
    client = MasterClient(settings.master_urls.split(","), settings.api_token)
    if leader_url is not None:
        client.prefer(leader_url)
    return client
