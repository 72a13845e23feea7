"""Compose what faces people and programs: HTTP interface, page, metrics, live events, and their readers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from usher.common.http.server.open_files import within_open_files
from usher.common.http.server.push_sockets import LiveSockets
from usher.common.observability.metrics import Metrics
from usher.common.router.router import StreamRouter
from usher.common.runtime.service import Service
from usher.master.assembly.access import admission, findings
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
from usher.master.membership.owner_question import OwnerQuestion
from usher.master.membership.registration import Membership
from usher.master.messages.fields import MessageFields
from usher.master.operations.action_log import ActionLog
from usher.master.operations.backlog_watch import BacklogWatch
from usher.master.operations.bulk_letters import BulkLetters
from usher.master.operations.dead_letters import DeadLetters
from usher.master.operations.delayed_messages import DelayedView
from usher.master.operations.live_rules import LiveRules
from usher.master.operations.signed_out import SignedOut
from usher.master.operations.ticket_orders import TicketOrders
from usher.master.operations.trimming import retention_of
from usher.master.policy.backlog import BacklogLimits
from usher.master.web.adapter import ServicePort
from usher.master.web.operations_adapter import Operations
from usher.master.web.pages.port import PagePort

if TYPE_CHECKING:
    from flask import Flask


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
        link, keys = place.link, place.keys
        self._sockets = LiveSockets(within_open_files(place.settings.connections, place.settings.followers_limit)[1])
        self._feed = TicketFeed(link("feed"), keys, place.settings.work_ticket_field, self._sockets, self._make_router)
        self.services: list[Service] = [self._feed, self._sockets]
        self._status = self._kept(
            StatusReader(link("status"), keys, place.settings.sources, place.settings.work_ticket_field)
        )
        self._letters = self._kept(DeadLetters(link("letters"), keys))
        self._delayed = self._kept(
            DelayedView(link("delayed-view"), keys, place.settings.ticket_field, place.settings.by_stream)
        )
        self._vitals = self._kept(StreamStatsReader(link("vitals"), keys, self._status.sources))
        self._operations = self._kept(self._make_operations())
        field, shown = place.settings.work_ticket_field, place.settings.shown_names
        self._fields = self._kept(MessageFields(link("fields"), keys, field, shown))
        limits = BacklogLimits(place.settings.backlog_limit, place.settings.tenant_backlog_limit)
        if any(limits):
            waiting, by_tenant = (lambda: self._vitals.read().unfinished), leading.dispatcher.waiting_by_tenant
            self.services.append(BacklogWatch(link("backlog"), keys, leading.lead, limits, waiting, by_tenant))
        metrics.add(MasterMetrics(self._vitals, all_services, leading.dispatcher, leading.health))
        metrics.add(AuditMetrics(self._status.audit, self._status.proven_until_ms))
        self.app = self._make_app(metrics, draining, stalled)

    def _make_app(self, metrics: Metrics, draining: Callable[[], bool], stalled: Callable[[], str]) -> Flask:
        place, rules = self._place, admission(self._place.settings)
        rules["doorman"].ended = self._kept(SignedOut(place.link("sessions"), place.keys))
        pages = self._make_pages()
        return create_app(
            self._make_port(),
            **rules,
            health_hosts=place.hosts,
            letters=self._letters,
            delayed=self._delayed,
            operations=self._operations,
            metrics=metrics,
            vitals=self._vitals,
            pages=pages,
            fields=self._fields,
            messages=pages,
            draining=draining,
            stalled=stalled,
        )

    def _make_port(self) -> ServicePort:
        place, leading = self._place, self._leading
        membership = self._kept(Membership(place.link("register"), place.keys, place.lease_ms))
        look_now, lead = leading.roster.wake, leading.lead
        window = place.settings.ticket_window
        return ServicePort(
            membership, self._status, leading.dispatcher, lead, self._all_services, window, look_now, self._feed
        )

    def _make_operations(self) -> Operations:
        place, link, keys = self._place, self._place.link, self._place.keys
        ask_owner = self._kept(OwnerQuestion(place.hosts, place.settings.tls_ca))
        field, glance = place.settings.work_ticket_field, self._leading.dispatcher.glance
        explainer = Explainer(
            link("explain"),
            keys,
            field,
            place.lease_ms,
            ask_owner,
            glance,
            self._status.sources,
            place.settings.by_stream,
        )
        rules, actions = LiveRules(link("rules"), keys), ActionLog(link("actions"), keys)
        return Operations(
            keys.stream,
            rules,
            actions,
            explainer,
            TicketOrders(link("orders"), keys),
            self._status.consumers,
            ask_owner.process,
        )

    def _make_pages(self) -> PagePort:
        place, link, keys = self._place, self._place.link, self._place.keys
        field = place.settings.work_ticket_field
        pulse = LiveOverview(
            link("pulse"), keys, field, place.lease_ms, self._sockets, self._leading.dispatcher.parked_of
        )
        bulk = BulkLetters(
            DeadLetters(link("bulk"), keys), self._status.each, self._operations.order, self._operations.set_rule
        )
        self.services += [pulse, bulk]
        story = self._kept(TicketHistory(link("story"), keys, field))
        sources = place.settings.sources
        retention = retention_of(place.settings, work_stream=sources is not None)
        facts = self._kept(
            SystemDiagnostics(link("facts"), keys, place.lease_ms, sources, retention, findings(place.settings))
        )
        charts = self._kept(ChartReader(link("charts-read"), keys))
        return PagePort(
            pulse,
            self._status,
            story,
            self._letters,
            bulk,
            facts,
            self._operations,
            charts,
            self._fields,
            self._delayed,
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
