"""The consumer's program: it takes the name, starts an incarnation, and ends it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import math
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from usher.common.base.clock import now_s
from usher.common.base.log import WARNING, event
from usher.common.http.serve import LEAST_SILENCE_S, Liveness, WorkerEnds, url_of
from usher.common.observability.metrics import Metrics, of_handlers
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import MOST_SLOTS, NO_LOCK, Registration
from usher.common.redis.locate import check_leases
from usher.common.runtime.name_lock import NameLock, boot_id
from usher.common.runtime.service import Health, judge, stalled
from usher.consumer.execution.executor import MOST_ABSORBED
from usher.consumer.handlers.decorators import BatchOptions
from usher.consumer.handlers.loader import code_of, load_handler
from usher.consumer.incarnation import Incarnation, terms
from usher.consumer.isolation.process import Template
from usher.consumer.isolation.worker import most_children
from usher.consumer.lifecycle.journal import Journal, read_journal
from usher.consumer.lifecycle.lease import Registrar, Taken
from usher.consumer.lifecycle.master_client import MasterClient
from usher.consumer.lifecycle.process_ending import report_crash
from usher.consumer.settings import WorkSettings

if TYPE_CHECKING:
    from flask import Flask

#: A process without a lease may be silent for this long.
_UNREGISTERED_S = 10.0
#: Messages that a line names: those that started last.
_MOST_NAMED = 20


def origin(settings: WorkSettings) -> str:
    """Return the origin that a journal must have to be believed: this boot, and this stream and group, since another
    one may have had a consumer of our name."""
    prefix = Keys(settings.work_stream, settings.group).prefix
    return f"{boot_id()} {hashlib.sha256(prefix.encode()).hexdigest()[:16]}"


def journal_beside(lock: NameLock) -> Path:
    return lock.path.with_suffix(".journal")


def name_what_ran(settings: WorkSettings) -> list[str]:
    """Name the messages whose handlers ran when the process of our name ended, as its journal says, for the log of its
    arbiter. The successor reads it again, for what is charged."""
    former = read_journal(journal_beside(NameLock(settings.state_folder, settings.consumer_name)), origin(settings))
    ran = sorted(former.left, key=lambda left: left.start_us) if former is not None else []
    told = [f"{left.stream_id.decode()} of ticket {left.ticket.decode()}" for left in ran[-_MOST_NAMED:]]
    return told if len(ran) == len(told) else [f"{len(ran) - len(told)} more", *told]


def tell_what_ran(settings: WorkSettings, redis_url: str, path: Path, is_from_outside: bool, by_itself: bool) -> None:
    """Report what the holder of a name lock that we hold now was running when it ended, as its journal says, if it left
    one, and how it ended (``Former``); then remove it. Raises what ``Link.call`` raises."""
    former = read_journal(path, origin(settings))
    if former is not None:
        former = former._replace(is_from_outside=is_from_outside, by_itself=by_itself)
        report_crash(redis_url, Keys(settings.work_stream, settings.group), former, settings.run_log_length)
        with contextlib.suppress(OSError):
            path.unlink()


def messages_at_once(calls: int, batch: BatchOptions | None) -> int:
    return calls * (batch.most if batch is not None else 1)


class ConsumerProgram:
    """The consumer as usher.common.http.serve runs it: web application, start, stop."""

    def __init__(
        self,
        settings: WorkSettings,
        redis_url: str,
        leave: Callable[[str], None],
        give_up: Callable[[str], None],
        ends: WorkerEnds,
        template: Template,
        masters: MasterClient,
    ) -> None:
        """Make the program. ``leave`` ends this process, so that a new one is started; ``give_up`` ends the program;
        ``ends``: how the process before it ended; ``template``: forks the processes of suspects."""
        self._ends = ends
        self._template = template
        self.settings = settings
        self._redis_url = redis_url
        self._leave = leave
        self._give_up = give_up
        self._masters = masters
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Whatever a handler prints is seen, in the order of the log, even if its process is killed.
            sys.stdout.reconfigure(line_buffering=True)
        self._handler = load_handler(settings.handler)
        self.code = code_of(settings.handler)
        self._lock = NameLock(settings.state_folder, settings.consumer_name)
        self._lock_is_missed = False  # the log says already that another process holds it
        self._former_is_told = False
        self.journal: Journal | None = None
        self.incarnation: Incarnation | None = None
        self._registrar: Registrar | None = None
        self._ending = threading.Lock()  # held while an incarnation is begun or ended
        self.stopped = False
        self.metrics = Metrics()
        self.metrics.add(of_handlers)
        self._app: Flask | None = None
        self._once = threading.Lock()
        web = functools.partial(importlib.import_module, "usher.consumer.web")
        self.metrics.add(lambda: web().consumer_metrics(self.incarnation, settings.concurrency))

    @property
    def app(self) -> Flask:
        """The web application, made when somebody asks for something: it takes 10 MiB and a tenth of a second."""
        from usher.consumer.web import create_app

        with self._once:
            self._app = self._app or create_app(self)
            return self._app

    def start(self, port: int, host: str, at: str = "") -> None:
        """Start to register; the registrar's thread takes the name lock. ``at``: the path of our application there."""
        settings = self.settings
        own_url = settings.advertise_url.rstrip("/") or url_of(host, port, settings.tls_cert is not None)
        health_url = f"{own_url}{at}/api/health"
        event("consumer_starting", name=settings.consumer_name, handler=settings.handler, slots=settings.concurrency)
        self._registrar = Registrar(
            lambda: self._ask(health_url),
            self._masters,
            self._begin,
            self._tell_of_former,
            self._give_up,
        )
        self._registrar.start()

    def _tell_of_former(self) -> None:
        """Report what the former process of our name was running when it ended, if it left a journal. Do it as soon as
        we hold its lock, and once: then the journal is removed, or our successor would report it again if we end before
        we begin our own."""
        path = None if self._former_is_told else self._journal_path()
        if path is None:
            return
        tell_what_ran(self.settings, self._redis_url, path, self._ends.is_from_outside, self._ends.is_by_itself)
        self._former_is_told = True

    def _journal_path(self) -> Path | None:
        return journal_beside(self._lock) if self._lock.acquire() not in (None, NO_LOCK) else None

    def _ask(self, health_url: str) -> Registration:
        settings = self.settings
        # Another consumer of that name may have it, or a child that a former one left behind. Without the lock there is
        # no proof that the former one is dead: registering waits until its lease has ended, and is refused for as long
        # as it lives.
        lock = self._lock.acquire()
        if lock is None and not self._lock_is_missed:
            event("name_lock_held", level=WARNING, name=settings.consumer_name)
            self._lock_is_missed = True
        # The leader gives at least two tickets for each of the slots: calls that wait for messages to become full, and
        # are slower the fewer they are, would never be given more.
        slots = min(MOST_SLOTS, messages_at_once(settings.concurrency, self._handler.batch))
        return Registration(
            settings.consumer_name, uuid.uuid4().hex, health_url, slots, settings.capacity, lock or NO_LOCK
        )

    def stop(self) -> None:
        self.stopped = True
        with self._ending:
            if self._registrar is not None:
                self._registrar.stop()
            if self.incarnation is not None:
                self.incarnation.stop(self.settings.drain_seconds)

    def _begin(self, taken: Taken) -> None:
        """Start working: the name is ours. Runs on the registrar's thread."""
        # The lease is the master's setting. StartRefused is the registrar's trouble, which health and log show: a
        # registration that nobody renews gets no messages.
        check_leases(self._redis_url, {"USHER_LEASE_SECONDS of the masters": taken.lease_s})
        with self._ending:
            if self.stopped:
                return  # nothing has been handed over yet, or the leader takes it back when the lease ends
            try:
                name, slots = taken.registration.incarnation, self.settings.concurrency
                at_once = messages_at_once(slots, self._handler.batch) + most_children(slots)
                spare = 0 if self._handler.batch else MOST_ABSORBED
                self.journal = Journal(self._journal_path(), origin(self.settings), name, at_once, spare)
                self.incarnation = Incarnation(
                    self.settings,
                    self._redis_url,
                    taken,
                    self._handler,
                    self.journal,
                    self._lost,
                    self.metrics,
                    self._template,
                    self._masters,
                )
                self.incarnation.acker.on_progress = self._ends.progressed
                self._ends.began()
                self.incarnation.start()
            except Exception as problem:  # half of it may run: registering again would start a second one beside it
                self._lost(f"it could not be started: {type(problem).__name__}: {problem}")

    def _lost(self, why: str, is_explained: bool = True) -> None:
        """Leave: an incarnation that lost its lease never works again, not even in the middle of a drain, because
        others may have its tickets already. The successor of this process takes the name anew. Unless it
        ``is_explained``, what runs is suspected, as in a crash."""
        incarnation = self.incarnation
        if incarnation is not None and incarnation.drain.is_over:
            return
        if self.journal is not None and is_explained:
            self.journal.explain()
        self._leave(why)  # it also logs: a log that blocks must not keep this process here

    def liveness(self) -> Liveness:
        """Return how long this process may be silent from now on, and what of it stands still."""
        incarnation, registrar = self.incarnation, self._registrar
        if incarnation is not None:
            return incarnation.liveness()
        # Registering keeps nothing busy; and a handler may start, and stand still, before this is asked again.
        silence_s = min(terms(self.settings, self._handler.options)[1] or math.inf, _UNREGISTERED_S)
        still = stalled([registrar], now_s(), 0.0) if registrar is not None else ""
        return Liveness(max(silence_s, LEAST_SILENCE_S), still)

    def health(self) -> Health:
        incarnation, registrar = self.incarnation, self._registrar
        if incarnation is None:
            why = registrar.trouble if registrar is not None else None
            return Health((f"not registered yet: {why or 'asking the masters'}",))
        reasons, warnings = judge(incarnation.services, now_s()).reasons, incarnation.watch.warnings
        return Health(reasons if incarnation.lease.holds() else (*reasons, "the lease has ended"), warnings)

    def facts(self) -> dict[str, Any]:
        name, incarnation = self.settings.consumer_name, self.incarnation
        facts = {"role": "consumer", "name": name, "handler": self.settings.handler, "code": self.code}
        return facts | ({"incarnation": incarnation.name} if incarnation is not None else {})
