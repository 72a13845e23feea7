"""Compose what faces people and programs: HTTP interface, page, metrics, live events, and their readers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from usher.common.base.log import event
from usher.common.http.auth import SignedOut
from usher.common.http.credentials import Credentials
from usher.common.http.push import LiveStreams
from usher.common.observability.metrics import Metrics
from usher.common.redis.client import SharedLink
from usher.common.router.router import StreamRouter
from usher.common.runtime.service import Service
from usher.master.assembly.access import findings, hosts_of, make_doorman, sign_on
from usher.master.assembly.context import MasterContext
from usher.master.assembly.leader_services import LeaderServices
from usher.master.assembly.web_app import create_app
from usher.master.charts.keeper import ChartReader
from usher.master.insight.diagnostics import SystemDiagnostics
from usher.master.insight.explainer import Explainer
from usher.master.insight.live_overview import LiveOverview
from usher.master.insight.metrics import AuditMetrics, MasterMetrics
from usher.master.insight.stats import StreamStatsReader
from usher.master.insight.status import StatusReader
from usher.master.insight.ticket_feed import TicketFeed
from usher.master.insight.ticket_history import TicketHistory
from usher.master.leader.limits import TICKET_WINDOW
from usher.master.membership.consumer_http import OwnerQuestion
from usher.master.membership.registration import Membership
from usher.master.messages.fields import MessageFields
from usher.master.operations.action_log import ActionLog
from usher.master.operations.backlog_watch import BacklogWatch
from usher.master.operations.bulk_letters import BulkLetters
from usher.master.operations.dead_letters import DeadLetters
from usher.master.operations.delayed_messages import DelayedView
from usher.master.operations.live_rules import LiveRules
from usher.master.operations.ticket_orders import TicketOrders
from usher.master.operations.trimming import retention_of
from usher.master.policy.backlog import BacklogLimits
from usher.master.web.parts import Desk, Parts

log = logging.getLogger(__name__)


class _Closable(Protocol):
    def close(self) -> None: ...


_Part = TypeVar("_Part", bound=_Closable)


class HttpServices:
    """The services behind HTTP. ``services`` are its own; ``close`` ends the parts without a thread. ``all_services``:
    the services whose health and turns it reports."""

    def __init__(
        self,
        place: MasterContext,
        leading: LeaderServices,
        metrics: Metrics,
        all_services: Sequence[Service],
        draining: Callable[[], bool],
        stalled: Callable[[], str],
    ) -> None:
        self._place = place
        self._leading = leading
        self._all_services = all_services
        self._closing = contextlib.ExitStack()
        settings, link, keys, lead = place.settings, place.link, place.keys, leading.lead
        self._live = self._kept(LiveStreams())
        field = settings.work_ticket_field
        self._feed = TicketFeed(link("feed"), keys, field, self._live, self._make_router)
        self._reads = self._kept(SharedLink(place.redis_url, "master:reads"))
        credentials = Credentials(settings.api_token, settings.tokens_file)
        doorman, trusted = make_doorman(settings, credentials), sign_on(settings, credentials)
        doorman.ended = SignedOut(self._reads, keys)
        if trusted:
            event(log, "sign_on", level=logging.WARNING, trusted=trusted)
        parts = self._make_parts(self._reads, trusted)
        self.services: list[Service] = [self._feed, parts.overview, parts.bulk]
        limits = BacklogLimits(settings.backlog_limit, settings.tenant_backlog_limit)
        if any(limits):
            waiting, by_tenant = (lambda: parts.stats.read().unfinished), leading.dispatcher.waiting_by_tenant
            self.services.append(BacklogWatch(link("backlog"), keys, lead, limits, waiting, by_tenant))
        metrics.add(MasterMetrics(parts.stats, all_services, leading.dispatcher, leading.health))
        metrics.add(AuditMetrics(parts.status.audit, parts.status.proven_until_ms))
        membership = Membership(self._kept(link("register")), keys, place.lease_ms)
        window, look_now = TICKET_WINDOW, leading.roster.wake
        desk = Desk(membership, parts.status, leading.dispatcher, lead, all_services, window, look_now, self._feed)
        facts: dict[str, Any] = {"metrics": metrics, "draining": draining, "stalled": stalled}
        hosts = hosts_of(settings)
        self.app = create_app(desk, doorman=doorman, health_hosts=place.hosts, hosts=hosts, parts=parts, **facts)

    def _make_parts(self, reads: SharedLink, trusted: str) -> Parts:
        place, settings, keys = self._place, self._place.settings, self._place.keys
        field, sources, dispatcher = settings.work_ticket_field, settings.sources, self._leading.dispatcher
        asker = self._kept(OwnerQuestion(place.hosts, settings.tls_ca))
        status, letters, rules = (
            StatusReader(reads, keys, sources, field),
            DeadLetters(reads, keys),
            LiveRules(reads, keys),
        )
        explainer = Explainer(
            reads, keys, field, place.lease_ms, asker, dispatcher.glance, status.sources, settings.by_stream
        )
        orders = TicketOrders(reads, keys, lambda ticket_id: explainer.explain(ticket_id).document())
        retention = retention_of(settings, work_stream=sources is not None)
        return Parts(
            keys,
            status,
            StreamStatsReader(reads, keys, status.sources),
            MessageFields(reads, keys, field, settings.shown_names),
            letters,
            DelayedView(reads, keys, settings.ticket_field, settings.by_stream),
            rules,
            orders,
            explainer,
            ActionLog(reads, keys),
            TicketHistory(reads, keys, field),
            LiveOverview(place.link("pulse"), keys, field, place.lease_ms, self._live, dispatcher.parked_of),
            BulkLetters(letters, status.each, orders.give, rules.set),
            SystemDiagnostics(reads, keys, place.lease_ms, sources, retention, findings(trusted)),
            ChartReader(reads, keys),
            asker.process,
        )

    def _make_router(self) -> StreamRouter:
        keys = self._place.keys
        # A stream whose name is its own hash tag shares the prefix of its other keys.
        prefixes = [keys.stream] if keys.prefix.startswith(keys.stream) else [keys.stream, keys.runs, keys.dead]
        return StreamRouter(self._place.redis_url, name="master", prefixes=prefixes)

    def _kept(self, part: _Part) -> _Part:
        """Keep a part, to be closed at the end."""
        self._closing.callback(part.close)
        return part

    def close(self) -> None:
        self._closing.close()
