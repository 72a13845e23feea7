"""The master's parts, put together in one place. Each part gets the few values it needs, never the settings as a whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from common.bell import Bell
from common.clock import now_s
from common.keys import Keys
from common.live_sockets import LiveSockets
from common.log import event
from common.metrics import Metrics
from common.redis_client import Link
from common.service import Service
from common.stream_router import StreamRouter
from common.streams import TicketStream
from master.dead_letters import DeadLetters
from master.dispatcher import Changed, Dispatcher, Limits
from master.elector import Elector, Lead
from master.halts import ChangeWatch
from master.health_checker import HealthChecker
from master.intake import Doorbell
from master.janitor import Janitor
from master.leader_steps import Rejected
from master.membership import Membership
from master.roster import RosterReader
from master.service_port import ServicePort
from master.settings import MasterSettings
from master.status import StatusReader
from master.ticket_feed import TicketFeed
from master.trimming import Trimmer
from master.web.app import create_app

log = logging.getLogger(__name__)

_JOIN_S = 3.0


class MasterProgram:
    """The master as common.serving runs it: web application, start, stop."""

    def __init__(self, settings: MasterSettings, redis_url: str) -> None:
        self._settings = settings
        self._redis_url = redis_url
        self._keys = Keys(settings.ticket_stream, settings.group)
        self._lead = Lead()
        lease_ms = int(settings.lease_seconds * 1000)
        limits = Limits(
            batch=settings.batch_size,
            ticket_window=settings.ticket_window,
            parked=settings.parked_limit,
            reconcile_s=settings.reconcile_seconds,
            sweep_s=settings.sweep_seconds,
            min_idle_ms=2 * lease_ms,
            ticket_field=settings.ticket_field,
            longest_message=settings.longest_message_bytes,
            spread=settings.unkeyed == "spread",
        )
        self._dispatcher = Dispatcher(self._link("dispatch", max(1.0, settings.leader_lease_seconds / 2)), self._keys, self._lead, limits)
        self._roster = RosterReader(self._link("roster"), self._keys, self._lead, settings.roster_seconds, self._dispatcher.post)
        bell_link = self._link("doorbell")
        doorbell = Doorbell(bell_link, TicketStream(bell_link, self._keys), self._dispatcher.ring)
        self._dispatcher.doorbell = doorbell
        metrics = Metrics()
        self._bell = Bell(metrics, settings.dead_letter_webhook, "master", self._keys)
        self._dispatcher.on_rejected = self._ring
        changes = ChangeWatch(self._link("changes"), self._keys.changed, lambda tickets: self._dispatcher.post(Changed(tickets)))
        self._lead.on_change = self._dispatcher.wake
        health = HealthChecker(self._link("health"), self._keys, self._lead, settings.health_seconds, settings.health_failures)
        janitor = Janitor(self._link("reap"), self._keys, self._lead, settings.sweep_seconds)
        sockets = LiveSockets(settings.followers_limit)
        feed = TicketFeed(self._link("feed"), self._keys, settings.ticket_field, sockets, self._make_router)
        self._services: list[Service] = [self._dispatcher, doorbell, changes, self._roster, health, janitor, feed, sockets, *self._bell.services]
        if settings.trim_seconds:
            self._services.append(Trimmer(self._link("trim"), self._keys, self._lead, settings.trim_seconds, settings.trim_archived))
        self._membership = Membership(self._link("register"), self._keys, lease_ms)
        self._status = StatusReader(self._link("status"), self._keys)
        self._letters = DeadLetters(self._link("letters"), self._keys)
        port = ServicePort(
            self._membership, self._status, self._dispatcher, self._lead, self._services, lease_ms, self._roster.wake, feed
        )
        self.app = create_app(port, token=settings.api_token, health_hosts=settings.health_hosts, letters=self._letters, metrics=metrics.page)

    def start(self, port: int, host: str) -> None:
        """Start every role; the elector last, and with it the work."""
        settings = self._settings
        url = settings.advertise_url or f"http://{f'[{host}]' if ':' in host else host}:{port}"
        lease_ms = int(settings.leader_lease_seconds * 1000)
        elector = Elector(self._link("elect", max(0.2, settings.leader_lease_seconds / 3)), self._keys, self._lead, url, lease_ms, self._works)
        self._lead.on_doubt = elector.wake
        self._services.append(elector)
        event(log, "master_starts", url=url, stream=self._keys.stream, group=self._keys.group)
        for service in self._services:
            service.start()

    def stop(self) -> None:
        """End the work first, then give the lead up, so that a standby adopts at once and finds nothing moving."""
        *workers, elector = self._services
        for service in workers:
            service.stop()
        for service in workers:
            service.join(_JOIN_S)
        elector.stop()
        elector.join(_JOIN_S)
        self._membership.close()
        self._status.close()
        self._letters.close()

    def _ring(self, rejected: Sequence[Rejected]) -> None:
        for entry in rejected:
            self._bell.ring(entry.shown, entry.id, entry.reason)

    def _works(self) -> bool:
        """Whether the dispatcher makes progress: the lead is extended only then."""
        last = self._dispatcher.last_turn_s
        return self._dispatcher.alive and last is not None and now_s() - last < self._settings.leader_lease_seconds

    def _make_router(self) -> StreamRouter:
        keys = self._keys
        # A stream whose name is its own hash tag begins as its other keys do.
        prefixes = [keys.stream] if keys.prefix.startswith(keys.stream) else [keys.stream, keys.runs, keys.dead]
        return StreamRouter(self._redis_url, name="master", prefixes=prefixes)

    def _link(self, role: str, timeout_s: float = 5.0) -> Link:
        return Link(self._redis_url, f"master:{role}", timeout_s)
