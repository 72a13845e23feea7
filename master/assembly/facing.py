"""Put together what of a master faces people and programs: HTTP interface, page, metrics, live events, and their
readers; and who may come in, by the settings: tokens, proxies, host names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from flask import Flask

from usher.common.base.log import WARNING, event
from usher.common.doctor.judgements import DoctorFinding, DoctorSeverity
from usher.common.http import app as web
from usher.common.http.answers import LiveStreams
from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials, Role, parse_networks
from usher.common.http.openapi import add_document
from usher.common.http.serve import MOST_FOLLOWERS
from usher.common.observability.metrics import Metrics
from usher.common.redis.client import SharedLink
from usher.common.runtime.service import Health, Service
from usher.common.runtime.settings import is_loopback
from usher.master.assembly.program import LeaderServices, MasterContext
from usher.master.insight.live import LiveOverview, TicketFeed
from usher.master.insight.metrics import AuditMetrics, MasterMetrics
from usher.master.insight.stats import BacklogLimits, BacklogWatch
from usher.master.insight.status import FIELDS_S
from usher.master.membership.consumer_http import HealthHosts, OwnerQuestion
from usher.master.membership.registry import Membership
from usher.master.operations.trimming import retention_of
from usher.master.settings import MasterSettings
from usher.master.web.api import REGISTER_BODY, Desk, Parts, operator_routes, routes
from usher.master.web.pages.site import add_pages

_Part = TypeVar("_Part", bound=Any)


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
        beside: Callable[[], Health],
    ) -> None:
        self._place = place
        self._leading = leading
        self._closing = contextlib.ExitStack()
        settings, link, keys, lead = place.settings, place.link, place.keys, leading.lead
        self._live = self._kept(LiveStreams(MOST_FOLLOWERS))
        field = settings.work_ticket_field
        self._feed = TicketFeed(link("feed"), keys, field, self._live)
        self._reads = self._kept(SharedLink(place.redis_url, "master:reads"))
        credentials = Credentials(settings.api_token, settings.tokens_file)
        secure = settings.tls_cert is not None or settings.advertise_url.startswith("https://")
        proxies, trusted = parse_networks(settings.proxies), sign_on(settings, credentials)
        doorman = Doorman(credentials, secure=secure, proxies=proxies, sign_on_header=settings.sign_on_header)
        doorman.noted_in = self._reads, keys
        if trusted:
            event("sign_on", level=WARNING, trusted=trusted)
        parts = self._make_parts(self._reads, trusted)
        self.services: list[Service] = [self._feed, parts.overview, parts.bulk]
        limits = BacklogLimits(settings.backlog_limit, settings.tenant_backlog_limit)
        if any(limits):
            waiting, by_tenant = (lambda: parts.stats.read()["unfinished"]), leading.dispatcher.waiting_by_tenant
            self.services.append(BacklogWatch(link("backlog"), keys, lead, limits, waiting, by_tenant))
        metrics.add(MasterMetrics(parts.stats, all_services, leading.dispatcher, leading.health))
        metrics.add(AuditMetrics(parts.status.proofs))
        membership = Membership(self._kept(link("register")), keys, place.lease_ms)
        of_desk = lead, all_services, leading.roster.wake, self._feed, beside
        desk, hosts = Desk(membership, parts.status, leading.dispatcher, *of_desk), hosts_of(settings)
        facts: dict[str, Any] = {"metrics": metrics, "draining": draining, "stalled": stalled}
        self.app = create_app(desk, doorman=doorman, health_hosts=place.hosts, hosts=hosts, parts=parts, **facts)

    def _make_parts(self, reads: SharedLink, trusted: str) -> Parts:
        place, settings, keys = self._place, self._place.settings, self._place.keys
        dispatcher = self._leading.dispatcher
        asker = self._kept(OwnerQuestion(place.hosts, settings.tls_ca))
        of_leader = dispatcher.parked_of, dispatcher.tenants_now if settings.tenant_field else dict
        overview = LiveOverview(place.link("pulse"), keys, settings.work_ticket_field, place.lease_ms, *of_leader)
        retention = retention_of(settings, work_stream=settings.sources is not None)
        of_master: dict[str, Any] = {"retention": retention, "of_master": findings(trusted)}
        of_view = (settings, reads, keys, FIELDS_S, asker, dispatcher.glance, overview)
        return Parts(*of_view, overview=overview, ask_process=asker.process, **of_master)

    def _kept(self, part: _Part) -> _Part:
        self._closing.callback(part.close)
        return part

    def close(self) -> None:
        self._closing.close()


def create_app(
    desk: Desk,
    *,
    doorman: Doorman,
    health_hosts: HealthHosts,
    hosts: Collection[str] = (),
    parts: Parts | None = None,
    metrics: Metrics | None = None,
    draining: Callable[[], bool] = lambda: False,
    stalled: Callable[[], str] = lambda: "",
) -> Flask:
    """Return the application on top of ``desk``; with ``parts`` also what operators look at, and the page.

    ``health_hosts``: the hosts that health URLs may name. ``hosts``: the names under which this service may be
    addressed, empty for any.
    """
    app = web.create_app(__name__, doorman, REGISTER_BODY, hosts)
    app.register_blueprint(routes(desk, health_hosts, parts.fields if parts is not None else None))
    if parts is not None:
        app.register_blueprint(operator_routes(parts))
        add_pages(app, parts)
    if metrics is not None:
        web.add_metrics(app, metrics)
    web.add_health(app, desk.health, desk.leading, draining, stalled)
    add_document(app, "Usher: a master")
    return app


def sign_on(settings: MasterSettings, credentials: Credentials) -> str:
    """Tell which proxies may sign people on, and how many; "" for none. Whoever asks from there can be anybody."""
    if not settings.proxies or not credentials.people:
        return ""
    roles = [person.role for person in credentials.people]
    admitted = f"{roles.count(Role.OPERATOR)} as operators and {roles.count(Role.VIEWER)} as viewers (*: all)"
    return f"{settings.proxies} may say in {settings.sign_on_header} who asks; of these names it admits {admitted}"


def findings(trusted: str) -> tuple[DoctorFinding, ...]:
    means = "whoever sends requests from these addresses can be anybody on these lists"
    return (DoctorFinding("sign-on by proxies", DoctorSeverity.OK, trusted, means),) if trusted else ()


def hosts_of(settings: MasterSettings) -> list[str]:
    """Return the host names that a request may be addressed to; empty: any."""
    if named := [host.strip().strip("[]") for host in settings.hosts.split(",") if host.strip()]:
        return named
    asked = settings.api_token or settings.tokens_file or not is_loopback(settings.bind)
    return [] if asked else web.own_hosts(settings.bind, settings.advertise_url)
