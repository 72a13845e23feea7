"""Put together what of a master faces people and programs: HTTP interface, page, metrics, live events, and their
readers; and who may come in, by the settings: tokens, proxies, host names."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flask import Flask, Response

from usher.common.base.log import WARNING, event
from usher.common.doctor.judgements import DoctorFinding, DoctorSeverity
from usher.common.http import app as web
from usher.common.http.app import Problem, answer_problem
from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials, Role
from usher.common.http.openapi import add_document, tells
from usher.common.http.proxies import parse_networks
from usher.common.http.push import LiveStreams
from usher.common.observability.metrics import Metrics
from usher.common.redis.client import SharedLink
from usher.common.runtime.service import Health, Service
from usher.common.runtime.settings import is_loopback
from usher.master.assembly.program import LeaderServices, MasterContext
from usher.master.insight.live import LiveOverview, TicketFeed
from usher.master.insight.metrics import AuditMetrics, MasterMetrics
from usher.master.insight.stats import BacklogWatch, lag_document
from usher.master.insight.status import FIELDS_S, SystemDiagnostics
from usher.master.leader.limits import TICKET_WINDOW
from usher.master.membership.consumer_http import HealthHosts, OwnerQuestion
from usher.master.membership.registry import Membership, NameInUse, RegistrationOver
from usher.master.operations.trimming import retention_of
from usher.master.policy.rates import BacklogLimits
from usher.master.settings import MasterSettings
from usher.master.verbs.verbs import Lag
from usher.master.web.api import REGISTER_BODY, Desk, Parts, operator_routes, routes
from usher.master.web.pages.site import add_pages

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
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
        self._live = self._kept(LiveStreams())
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
        window, look_now = TICKET_WINDOW, leading.roster.wake
        desk = Desk(membership, parts.status, leading.dispatcher, lead, all_services, window, look_now, self._feed)
        facts: dict[str, Any] = {"metrics": metrics, "draining": draining, "stalled": stalled}
        hosts, desk.beside = hosts_of(settings), beside
        self.app = create_app(desk, doorman=doorman, health_hosts=place.hosts, hosts=hosts, parts=parts, **facts)

    def _make_parts(self, reads: SharedLink, trusted: str) -> Parts:
        place, settings, keys = self._place, self._place.settings, self._place.keys
        dispatcher, sources = self._leading.dispatcher, settings.sources
        asker = self._kept(OwnerQuestion(place.hosts, settings.tls_ca))
        of_leader = dispatcher.parked_of, dispatcher.tenants_now if settings.tenant_field else dict
        overview = LiveOverview(place.link("pulse"), keys, settings.work_ticket_field, place.lease_ms, *of_leader)
        retention = retention_of(settings, work_stream=sources is not None)
        diagnostics = SystemDiagnostics(reads, keys, place.lease_ms, sources, retention, findings(trusted))
        of_view = (settings, reads, keys, FIELDS_S, asker, dispatcher.glance, overview)
        return Parts(*of_view, overview=overview, diagnostics=diagnostics, ask_process=asker.process)

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

        @app.get("/api/lag")
        @tells("Plain numbers for autoscalers, such as KEDA's metrics-api scaler.", {200: Lag})
        def lag() -> Response:
            return web.answer(lag_document(parts.stats.read()))

    if metrics is not None:
        web.add_metrics(app, metrics)
    web.add_health(app, desk.health, desk.leading, draining, stalled)
    add_document(app, "Usher: a master")
    _add_errors(app)
    return app


def _add_errors(app: Flask) -> None:
    @app.errorhandler(NameInUse)
    def name_in_use(held: NameInUse) -> Response:
        retry_after = {"Retry-After": str(max(1, math.ceil(held.retry_after_ms / 1000)))}
        return answer_problem(Problem(409, "name_in_use", str(held), headers=retry_after))

    @app.errorhandler(RegistrationOver)
    def registration_over(_over: RegistrationOver) -> Response:
        return answer_problem(
            Problem(410, "registration_over", "the registration under this uuid has ended; register under a new one")
        )


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


def hosts_of(settings: MasterSettings) -> tuple[str, ...]:
    """Return the host names that a request may be addressed to; empty: any.

    A page of somewhere else can make its own name lead to 127.0.0.1 (DNS rebinding). Where a token is required, that
    gains it nothing.
    """
    named = tuple(host.strip().strip("[]") for host in settings.hosts.split(",") if host.strip())
    own = (settings.bind.rpartition(":")[0].strip("[]"), urlsplit(settings.advertise_url).hostname or "")
    if named:
        return named
    asked = settings.api_token or settings.tokens_file
    return () if asked or not is_loopback(settings.bind) else tuple(filter(None, (*_LOCAL_NAMES, *own)))
