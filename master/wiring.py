"""The master's parts, put together in one place. Each part gets the few values it needs, never the settings as a whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common import telemetry
from common.bell import Bell
from common.clock import now_s
from common.keys import Keys
from common.live_sockets import LiveSockets
from common.log import event
from common.metrics import Metrics
from common.redis_client import Link
from common.service import Service
from common.serving import url_of
from common.stream_router import StreamRouter
from common.streams import TicketStream
from master.access import admission, health_hosts
from master.actions import ActionLog
from master.asker import Asker
from master.audit_metrics import AuditMetrics
from master.bulk_letters import BulkLetters
from master.dead_letters import DeadLetters
from master.dispatcher import Dispatcher
from master.elector import Elector, Lead
from master.explainer import Explainer
from master.gathering import Gathering
from master.halts import ChangeWatch
from master.hand_over_spans import HandOverSpans
from master.health_checker import BOUNDS, HealthChecker
from master.intake import Doorbell
from master.janitor import Janitor
from master.leader_steps import Rejected
from master.limits import limits_of
from master.live_rules import LiveRules
from master.membership import Membership
from master.metrics import MasterMetrics
from master.operations import Operations
from master.owner_question import OwnerQuestion
from master.pulse import Pulse
from master.roster import RosterReader
from master.service_port import ServicePort
from master.settings import MasterSettings
from master.status import StatusReader
from master.system_facts import SystemFacts
from master.ticket_feed import TicketFeed
from master.ticket_story import TicketStory
from master.trimming import Trimmer
from master.vitals import VitalsReader
from master.web.app import create_app
from master.web.health_url import HealthHosts
from master.web.pages.port import PagePort

if TYPE_CHECKING:
    from flask import Flask

log = logging.getLogger(__name__)

_JOIN_S = 3.0
_TRIM_WORK_S = 2.0


class MasterProgram:
    """The master as common.serving runs it: web application, start, stop."""

    def __init__(self, settings: MasterSettings, redis_url: str) -> None:
        self._settings = settings
        self._redis_url = redis_url
        self._keys = Keys(settings.work_stream, settings.group)
        self._lead = Lead()
        lease_ms = int(settings.lease_seconds * 1000)
        dispatch_link = self._link("dispatch", max(1.0, settings.leader_lease_seconds / 2))
        self._dispatcher = Dispatcher(dispatch_link, self._keys, self._lead, limits_of(settings))
        self._roster = RosterReader(self._link("roster"), self._keys, self._lead, settings.roster_seconds, self._dispatcher.post)
        bell_link = self._link("doorbell")
        doorbell = Doorbell(bell_link, TicketStream(bell_link, self._keys), self._dispatcher.ring)
        self._dispatcher.doorbell = doorbell
        metrics = Metrics()
        self._bell = Bell(metrics, settings.dead_letter_webhook, "master", self._keys)
        self._dispatcher.on_rejected = self._ring
        changes = ChangeWatch(self._link("changes"), self._keys.changed, self._dispatcher.post)
        self._lead.on_change = self._dispatcher.wake
        hosts, every_s, failures = health_hosts(settings, redis_url), settings.health_seconds, settings.health_failures
        asker = Asker(hosts, BOUNDS, settings.tls_ca)
        health = HealthChecker(self._link("health"), self._keys, self._lead, every_s, failures, asker)
        janitor = Janitor(self._link("reap"), self._keys, self._lead, settings.sweep_seconds)
        sockets = LiveSockets(settings.followers_limit)
        feed = TicketFeed(self._link("feed"), self._keys, settings.work_ticket_field, sockets, self._make_router)
        self._services: list[Service] = [self._dispatcher, doorbell, changes, self._roster, health, janitor, feed, sockets, *self._bell.services]
        self._gathering: Gathering | None = None
        trim_s = settings.trim_seconds
        if (sources := settings.sources) is not None:
            self._gathering = Gathering(settings, sources, self._keys, redis_url, self._link)
            self._services += self._gathering.services
            trim_s = min(trim_s or _TRIM_WORK_S, _TRIM_WORK_S)  # the work stream is ours: nobody else keeps it short
        if trim_s:
            self._services.append(Trimmer(self._link("trim"), self._keys, self._lead, trim_s, settings.trim_archived))
        self._membership = Membership(self._link("register"), self._keys, lease_ms)
        self._status = StatusReader(self._link("status"), self._keys, settings.sources)
        self._letters = DeadLetters(self._link("letters"), self._keys)
        self._vitals = VitalsReader(self._link("vitals"), self._keys, self._status.sources)
        tracer = telemetry.tracer()
        self._spans = None if tracer is None else HandOverSpans(tracer, self._link("spans", 1.0), self._keys)
        self._dispatcher.counts.on_handed_over = self._spans
        metrics.add(MasterMetrics(self._vitals, self._services, self._dispatcher, health))
        metrics.add(AuditMetrics(self._status.audit))
        port = ServicePort(self._membership, self._status, self._dispatcher, self._lead, self._services, lease_ms, self._roster.wake, feed)
        self._ask_owner = OwnerQuestion(hosts, settings.tls_ca)
        self._operations = self._make_operations(lease_ms)
        self._stopping = False
        self.app = self._make_app(port, metrics, self._make_pages(lease_ms, sockets), hosts)

    def start(self, port: int, host: str) -> None:
        """Start every role; the elector last, and with it the work."""
        settings = self._settings
        url = settings.advertise_url or url_of(host, port, settings.tls_cert is not None)
        lease_ms = int(settings.leader_lease_seconds * 1000)
        elector = Elector(self._link("elect", max(0.2, settings.leader_lease_seconds / 3)), self._keys, self._lead, url, lease_ms, self._works)
        self._lead.on_doubt = elector.wake
        if self._gathering is not None:
            self._gathering.url = url
        self._services.append(elector)
        event(log, "master_starts", url=url, stream=self._keys.stream, group=self._keys.group)
        for service in self._services:
            service.start()

    def stop(self) -> None:
        """End the work first, then give the lead up, so that a standby adopts at once and finds nothing moving."""
        self._stopping = True
        *workers, elector = self._services
        for service in workers:
            service.stop()
        for service in workers:
            service.join(_JOIN_S)
        elector.stop()
        elector.join(_JOIN_S)
        self._membership.close()
        self._status.close()
        self._vitals.close()
        if self._spans is not None:
            self._spans.close()
        self._letters.close()
        self._story.close()
        self._facts.close()
        self._operations.close()
        self._ask_owner.close()

    def _ring(self, rejected: Sequence[Rejected]) -> None:
        for entry in rejected:
            self._bell.ring(entry.shown, entry.id, entry.reason)

    def _works(self) -> bool:
        """Whether the dispatcher makes progress: the lead is extended only then."""
        last = self._dispatcher.last_turn_s
        return self._dispatcher.alive and last is not None and now_s() - last < self._settings.leader_lease_seconds

    def _make_app(self, port: ServicePort, metrics: Metrics, pages: PagePort, hosts: HealthHosts) -> Flask:
        return create_app(
            port,
            **admission(self._settings),
            health_hosts=hosts,
            letters=self._letters,
            operations=self._operations,
            metrics=metrics.page,
            vitals=self._vitals,
            pages=pages,
            draining=lambda: self._stopping,
        )

    def _make_operations(self, lease_ms: int) -> Operations:
        keys, dispatcher = self._keys, self._dispatcher
        explainer = Explainer(self._link("explain"), keys, self._settings.work_ticket_field, lease_ms, self._ask_owner, dispatcher.glance)
        return Operations(keys.stream, LiveRules(self._link("rules"), keys), ActionLog(self._link("actions"), keys), explainer)

    def _make_router(self) -> StreamRouter:
        keys = self._keys
        # A stream whose name is its own hash tag begins as its other keys do.
        prefixes = [keys.stream] if keys.prefix.startswith(keys.stream) else [keys.stream, keys.runs, keys.dead]
        return StreamRouter(self._redis_url, name="master", prefixes=prefixes)

    def _make_pages(self, lease_ms: int, sockets: LiveSockets) -> PagePort:
        keys, field = self._keys, self._settings.work_ticket_field
        pulse = Pulse(self._link("pulse"), keys, field, lease_ms, sockets, self._dispatcher.parked_of)
        bulk = BulkLetters(DeadLetters(self._link("bulk"), keys))
        self._services += [pulse, bulk]
        self._story = TicketStory(self._link("story"), keys, field)
        self._facts = SystemFacts(self._link("facts"), keys, lease_ms)
        return PagePort(pulse, self._status, self._story, self._letters, bulk, self._facts, self._operations)

    def _link(self, role: str, timeout_s: float = 5.0) -> Link:
        return Link(self._redis_url, f"master:{role}", timeout_s)
