"""The master's Flask application."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from flask import Flask, Response

from usher.common.http import app as web
from usher.common.http.app import Problem, answer_problem
from usher.common.http.auth import Doorman
from usher.common.http.openapi import add_document, tells
from usher.common.http.path_prefix import add_path_prefix
from usher.common.http.rate_limits import RateLimits
from usher.common.observability.metrics import Metrics
from usher.master.insight.stats import StreamStatsReader, lag_document
from usher.master.membership.health_url import HealthHosts
from usher.master.operations.delayed_messages import DelayedView
from usher.master.web.api import REGISTER_BODY, routes
from usher.master.web.dead_letters import LetterPort, letter_routes
from usher.master.web.delayed import delayed_routes
from usher.master.web.documents import Lag
from usher.master.web.find import FieldsPort, find_routes
from usher.master.web.follow import events_route
from usher.master.web.message import MessageParts, message_routes
from usher.master.web.operations import OperationsPort, operation_routes
from usher.master.web.pages.port import PagePort
from usher.master.web.pages.site import add_pages
from usher.master.web.ports import IncarnationFenced, MasterPort, NameHeld, NotLeader, StartOver


def create_app(
    port: MasterPort,
    *,
    doorman: Doorman,
    health_hosts: HealthHosts,
    hosts: Collection[str] = (),
    limits: RateLimits | None = None,
    letters: LetterPort | None = None,
    delayed: DelayedView | None = None,
    operations: OperationsPort | None = None,
    metrics: Metrics | None = None,
    vitals: StreamStatsReader | None = None,
    pages: PagePort | None = None,
    fields: FieldsPort | None = None,
    messages: MessageParts | None = None,
    draining: Callable[[], bool] = lambda: False,
    stalled: Callable[[], str] = lambda: "",
) -> Flask:
    """Return the application on top of ``port``; with ``letters``, ``delayed``, ``operations``, ``metrics``,
    ``vitals``, ``pages``, ``fields`` and ``messages``, where they are given.

    ``health_hosts``: the hosts that health URLs may name. ``hosts``: the names under which this service may be
    addressed, empty for any. ``limits``: see ``usher.common.http.rate_limits``.
    """
    app = web.create_app(__name__, doorman, REGISTER_BODY, hosts, limits)
    app.register_blueprint(routes(port, health_hosts, fields))
    app.register_blueprint(events_route(port))
    if letters is not None:
        app.register_blueprint(letter_routes(letters, operations.note if operations is not None else None, fields))
    if delayed is not None:
        app.register_blueprint(delayed_routes(delayed))
    if operations is not None:
        app.register_blueprint(operation_routes(operations))
    if fields is not None:
        app.register_blueprint(find_routes(fields))
    if messages is not None:
        app.register_blueprint(message_routes(messages))
    if metrics is not None:
        web.add_metrics(app, metrics)
    if vitals is not None:
        _add_lag(app, vitals)
    if pages is not None:
        add_pages(app, pages)
    web.add_health(app, port.health, lambda: _role(port.leading()), draining, stalled)
    add_document(app, "Usher: a master")
    if doorman.prefix:
        add_path_prefix(app, doorman.prefix)
    _add_errors(app)
    return app


def _add_errors(app: Flask) -> None:
    @app.errorhandler(NameHeld)
    def name_held(held: NameHeld) -> Response:
        return answer_problem(Problem(409, "name_in_use", str(held), headers=_retry_after(held.retry_after_s)))

    @app.errorhandler(StartOver)
    def start_over(_over: StartOver) -> Response:
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


def _add_lag(app: Flask, vitals: StreamStatsReader) -> None:
    @tells("Plain numbers for autoscalers, such as KEDA's metrics-api scaler.", {200: Lag})
    def lag() -> Response:
        return web.answer(lag_document(vitals.read()))

    app.add_url_rule("/api/lag", "lag", lag)


def _role(leading: dict[str, Any]) -> dict[str, Any]:
    return {"role": "leader" if leading["leader"] else "standby", **leading}


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
