"""The master, put together: the services that lead, that gather (``usher.master.sources.gatherer``), and that face
people and programs (``facing``)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble
from usher.common.base.log import DEBUG, event
from usher.common.http.serve import Liveness, url_of
from usher.common.observability import tracing as telemetry
from usher.common.observability.metrics import DeadLetterNotifier, Metrics
from usher.common.protocol.keys import Keys
from usher.common.redis.acl import scripts_for_others
from usher.common.redis.client import CommandRefused, Link
from usher.common.runtime.service import Health, Service, stalled
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.dispatch.events import ChangeWatch
from usher.master.dispatch.stream_notifier import StreamNotifier
from usher.master.insight.charts import ChartKeeper
from usher.master.leader.elector import Elector, Lead
from usher.master.leader.entries import LONGEST_MARK, Rejected
from usher.master.leader.limits import limits_of
from usher.master.membership.consumer_http import ConsumerHttpClient, parse_hosts, redis_ports
from usher.master.membership.health_checker import BOUNDS, HealthChecker
from usher.master.membership.registry import ConsumerRegistry
from usher.master.operations.delayed_sender import DelayedMessages
from usher.master.operations.trimming import Trimmer, retention_of, turn_s
from usher.master.policy.board.plans import HandOverPlan
from usher.master.recovery.repairs import Janitor
from usher.master.settings import MasterSettings

if TYPE_CHECKING:
    from flask import Flask
    from opentelemetry.trace import Tracer

    from usher.master.assembly.facing import HttpServices

_TRIM_WORK_S = 2.0
_JOIN_S = 3.0
#: Seconds between two questions to each consumer's health URL.
HEALTH_S = 3.3
#: Failed answers in a row before a lease is revoked: 10 s, as long as a lease lives.
HEALTH_FAILURES = 3

#: As many links as OpenTelemetry keeps per span by default.
_MOST_LINKS = 128


class MasterContext:
    """Settings, Redis, the keys of the stream that is worked on, and the hosts where consumers may be asked, of which
    each part of a master gets the few values that it needs. Raises SettingsError."""

    def __init__(self, settings: MasterSettings, redis_url: str) -> None:
        self.settings, self.redis_url = settings, redis_url
        self.keys = Keys(settings.work_stream, settings.group)
        self.hosts = parse_hosts(settings.health_hosts, redis_ports(redis_url))

    @property
    def lease_ms(self) -> int:
        return int(self.settings.lease_seconds * 1000)

    def link(self, role: str, timeout_s: float = 5.0) -> Link:
        return Link(self.redis_url, f"master:{role}", timeout_s)


class HandOverSpans:
    """A span per hand-over, linked to the messages that were handed over; only where OpenTelemetry is set up. The
    callback ``LeaderCounters.on_handed_over``, for the dispatcher's thread, with a link of its own: the master knows
    ids and tickets, not bodies, so one more call per recorded batch reads the messages' trace contexts."""

    def __init__(self, tracer: Tracer, link: Link, keys: Keys) -> None:
        self._tracer = tracer
        self._link = link
        self._keys = keys

    def __call__(self, plan: HandOverPlan, began_ns: int) -> None:
        """Record a hand-over that began at ``began_ns`` and has ended. Never raises: tracing must not hold up the
        work."""
        attributes: dict[str, str | int] = {
            "messaging.system": "usher",
            "messaging.operation.name": "hand_over",
            "messaging.destination.name": self._keys.stream,
            "messaging.consumer.group.name": self._keys.group,
        }
        attributes |= {"messaging.batch.message_count": plan.size, "usher.consumers": len(plan.targets)}
        span = self._tracer.start_span(f"hand_over {self._keys.stream}", attributes=attributes, start_time=began_ns)
        try:
            if span.is_recording():
                for link in telemetry.links_to(self._contexts(plan)):
                    span.add_link(link.context)
        except (RedisTrouble, CommandRefused) as trouble:
            event("span_without_links", level=DEBUG, why=str(trouble))
        finally:
            span.end()

    def _contexts(self, plan: HandOverPlan) -> list[str | None]:
        ids = [entry_id for target in plan.targets for part in target.parts for entry_id in part.ids][:_MOST_LINKS]
        values = self._link.run("read_fields", (self._keys.stream,), (LONGEST_MARK, "", 1, telemetry.FIELD, *ids))
        return [value and value[0].decode(errors="replace") for (value,) in values]

    def close(self) -> None:
        self._link.close()


class LeaderServices:
    """The services that lead: from the stream notifier to the hand-over, and the watch over consumers. On a standby
    they wait for the lead. The elector, which begins the work, is made when this master can be reached."""

    def __init__(self, place: MasterContext, metrics: Metrics) -> None:
        settings, keys, link = place.settings, place.keys, place.link
        self._place = place
        self.lead = Lead()
        notifier = StreamNotifier(link("notifier", 0.5), keys.stream)
        limits = limits_of(settings)
        dispatch_link = link("dispatch", max(1.0, settings.leader_lease_seconds / 2))
        self.dispatcher = Dispatcher(dispatch_link, keys, self.lead, limits, notifier)
        self.roster = ConsumerRegistry(link("roster"), keys, self.lead, self.dispatcher.post, place.lease_ms)
        asker = ConsumerHttpClient(place.hosts, BOUNDS, settings.tls_ca)
        watch = (HEALTH_S, HEALTH_FAILURES, asker, lambda: self.roster.members, place.lease_ms, self._close)
        self.health = HealthChecker(link("health"), keys, self.lead, *watch)
        self._bell = DeadLetterNotifier(metrics, settings, "master", keys)
        told = (self.dispatcher.post, self.roster.wake, keys.reports, lambda: self.lead.is_ours)
        self._changes = ChangeWatch(link("changes"), keys.changed, *told)
        janitor = Janitor(
            link("reap"), keys, self.lead, limits.sweep_s, lambda name: name in self.dispatcher.board.consumers
        )
        tracer = telemetry.tracer()
        self._spans = None if tracer is None else HandOverSpans(tracer, link("spans", 1.0), keys)
        self.dispatcher.on_rejected = self._ring
        self.dispatcher.counts.on_handed_over = self._spans
        self.lead.on_change = self._lead_changed
        self.services: list[Service] = [
            self.dispatcher,
            self._changes,
            self.roster,
            self.health,
            janitor,
            ChartKeeper(link("charts"), keys, self.lead, self.dispatcher.tenants, settings.by_stream, self._fleet),
            *self._bell.services,
        ]
        is_work = settings.sources is not None
        trim_s = turn_s(settings.trim_keep)
        if is_work:  # no one else trims it
            trim_s = min(trim_s or _TRIM_WORK_S, _TRIM_WORK_S)
        fields = (settings.sources, settings.ticket_field, self._ring)
        self._delayed = DelayedMessages(link("delayed"), keys, self.lead, *fields)
        self.services.append(self._delayed)
        retention = retention_of(settings, work_stream=is_work)
        stream = keys.stream.encode()
        ours = link("trim"), lambda: (stream,) * self.lead.is_ours
        self.services.append(Trimmer(*ours, trim_s, retention, keys))

    def _fleet(self) -> dict[str, str]:
        return {one: self.health.codes.get(one, "") for one in self.roster.members}

    def _close(self, silent: frozenset[str]) -> None:
        self.dispatcher.closed = silent
        self.roster.wake()

    def elector(self, url: str) -> Elector:
        """Return the service that wins and holds the lead, for a master that is reached under ``url``."""
        lease_s = self._place.settings.leader_lease_seconds
        link = self._place.link("elect", max(0.2, lease_s / 3))
        made = Elector(link, self._place.keys, self.lead, url, int(lease_s * 1000), self._works, scripts_for_others())
        made.folder = self._place.settings.state_folder / "locks"
        self.lead.on_doubt, self._changes.on_leader = made.wake, made.wake
        return made

    def _lead_changed(self) -> None:
        self.dispatcher.wake()
        self.roster.wake()
        self._delayed.wake()

    def _works(self) -> bool:
        last, lease_s = self.dispatcher.last_turn_s, self._place.settings.leader_lease_seconds
        quiet_s = now_s() - last if last is not None else math.inf
        if quiet_s > lease_s / 2:
            self.dispatcher.wake()  # it may be idle, and then waits for longer than a short lease
        return self.dispatcher.alive and quiet_s < lease_s

    def _ring(self, rejected: Sequence[Rejected]) -> None:
        for entry in rejected:
            self._bell.ring(entry.shown, entry.id, entry.reason)

    def close(self) -> None:
        if self._spans is not None:
            self._spans.close()


class MasterProgram:
    """The master as usher.common.http.serve runs it: web application, start, stop. With ``beside``, the
    health of what else its process runs, it faces nobody before somebody asks: that takes 10 MiB. Else its consumers
    ask at once: and it takes a fifth of a second, in which it leads badly."""

    def __init__(self, settings: MasterSettings, redis_url: str, beside: Callable[[], Health] | None = None) -> None:
        self._settings, self._beside = settings, beside or (lambda: Health(()))
        self.place = place = MasterContext(settings, redis_url)
        self._started = self._stopping = False
        self._metrics = Metrics()
        self.leading = LeaderServices(place, self._metrics)
        self._services = [*self.leading.services]
        self._gathering = None
        if settings.sources is not None:
            from usher.master.sources.gatherer import SourceServices

            self._gathering = SourceServices(settings, settings.sources, place.keys, redis_url, place.link)
            self._services += self._gathering.services
        self._facing: HttpServices | None = None
        self._once = threading.Lock()
        wanted = settings.backlog_limit or settings.tenant_backlog_limit or settings.tokens_file or settings.proxies
        if wanted or beside is None:
            self._face()  # its services are wanted, or its settings are to be checked

    @property
    def app(self) -> Flask:
        return (self._facing or self._face()).app

    def _face(self) -> HttpServices:
        from usher.master.assembly.facing import HttpServices

        with self._once:
            if self._facing is None:
                of_health = self._services, lambda: self._stopping, lambda: self.liveness().stalled, self._beside
                self._facing = HttpServices(self.place, self.leading, self._metrics, *of_health)
                self._services[:0] = self._facing.services
                for service in self._facing.services if self._started else ():
                    service.start()
            return self._facing

    def start(self, port: int, host: str) -> None:
        settings = self._settings
        url = settings.advertise_url or url_of(host, port, settings.tls_cert is not None)
        if self._gathering is not None:
            self._gathering.url = url
        self._services.append(self.leading.elector(url))
        event("master_starting", url=url, stream=self.place.keys.stream, group=self.place.keys.group)
        with self._once:
            self._started = True
            for service in self._services:
                service.start()

    def liveness(self) -> Liveness:
        """Return how long this master may be silent, and whether its elector or dispatcher stands still; they watch the
        work of all others, and Redis gives the lead to another master without them."""
        lease_s, elector = self._settings.leader_lease_seconds, self._services[-1]
        still = stalled([self.leading.dispatcher, elector], now_s(), lease_s)
        return Liveness(max(elector.stalls_after_s, lease_s), still)

    def resign(self) -> None:
        """End the work first, then give the lead up, so that a standby takes over at once and finds nothing moving."""
        self._stopping = True
        faces = self._facing.services if self._facing is not None else ()
        *workers, elector = (one for one in self._services if one not in faces)
        _end(workers)
        _end([elector])

    def stop(self) -> None:
        self.resign()
        if self._facing is not None:
            _end(self._facing.services)
            self._facing.close()
        self.leading.close()


def _end(services: Sequence[Service]) -> None:
    for service in services:
        service.stop()
    for service in services:
        service.join(_JOIN_S)
