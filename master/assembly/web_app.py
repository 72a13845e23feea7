"""The master's Flask application."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from flask import Flask, Response

from usher.common.http import app as web
from usher.common.http.app import Problem, answer_problem
from usher.common.http.auth import Doorman
from usher.common.http.openapi import add_document, tells
from usher.common.observability.metrics import Metrics
from usher.master.insight.stats import StreamStatsReader, lag_document
from usher.master.membership.health_url import HealthHosts
from usher.master.membership.registration import NameInUse, RegistrationOver
from usher.master.web.api import REGISTER_BODY, routes
from usher.master.web.dead_letters import letter_routes
from usher.master.web.delayed import delayed_routes
from usher.master.web.documents import Lag
from usher.master.web.messages import message_routes
from usher.master.web.operations import operation_routes
from usher.master.web.pages.site import add_pages
from usher.master.web.parts import Desk, IncarnationFenced, NotLeader, Parts


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
    app.register_blueprint(routes(desk, health_hosts, parts and parts.fields))
    if parts is not None:
        app.register_blueprint(letter_routes(parts.letters, parts.action_log, parts.fields))
        app.register_blueprint(delayed_routes(parts.delayed, parts.action_log))
        app.register_blueprint(operation_routes(parts))
        app.register_blueprint(message_routes(parts))
        _add_lag(app, parts.stats)
        add_pages(app, parts)
    if metrics is not None:
        web.add_metrics(app, metrics)
    web.add_health(app, desk.health, desk.leading, draining, stalled)
    add_document(app, "Usher: a master")
    _add_errors(app)
    return app


def _add_errors(app: Flask) -> None:
    @app.errorhandler(NameInUse)
    def name_in_use(held: NameInUse) -> Response:
        headers = _retry_after(held.retry_after_ms / 1000)
        return answer_problem(Problem(409, "name_in_use", str(held), headers=headers))

    @app.errorhandler(RegistrationOver)
    def registration_over(_over: RegistrationOver) -> Response:
        return answer_problem(
            Problem(410, "registration_over", "the registration under this uuid has ended; register under a new one")
        )

    @app.errorhandler(NotLeader)
    def not_leader(standby: NotLeader) -> Response:
        return answer_problem(
            Problem(503, "not_leader", str(standby), headers=_retry_after(1), leader_url=standby.leader_url)
        )

    @app.errorhandler(IncarnationFenced)
    def fenced(_ended: IncarnationFenced) -> Response:
        return answer_problem(Problem(409, "fenced", "this incarnation has ended; stop its work and register again"))


def _add_lag(app: Flask, stats: StreamStatsReader) -> None:
    @tells("Plain numbers for autoscalers, such as KEDA's metrics-api scaler.", {200: Lag})
    def lag() -> Response:
        return web.answer(lag_document(stats.read()))

    app.add_url_rule("/api/lag", "lag", lag)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
