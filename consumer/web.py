"""The consumer's HTTP interface: its health, its metrics, and what masters ask for: the state of one ticket, when they
explain what it waits for, and what this process is and runs. Work comes through Redis, never over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from flask import Flask, Response, request

from usher.common.http import app as web
from usher.common.http.app import Problem, answer
from usher.common.http.auth import Doorman, needs
from usher.common.http.credentials import Role
from usher.common.observability.metrics import Metrics
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.runtime.health import Health

_TICKETS = b"/api/tickets/"


def create_app(
    doorman: Doorman,
    health: Callable[[], Health],
    facts: Callable[[], dict[str, Any]],
    metrics: Metrics | None = None,
    draining: Callable[[], bool] = lambda: False,
    ticket: Callable[[bytes], dict[str, Any] | None] | None = None,
    stalled: Callable[[], str] = lambda: "",
    hosts: Collection[str] = (),
    process: Callable[[], dict[str, Any] | None] | None = None,
) -> Flask:
    """Make the application. ``facts`` (name, incarnation and the like) are part of every health answer; they hold no
    secret and need no token. Nor do ``ticket`` (ids, attempts and times of one ticket's messages here, but nothing of
    their content) and ``process``; they return None while there is no incarnation."""
    app = web.create_app(__name__, doorman, max_body=0, hosts=hosts)
    web.add_health(app, health, facts, draining, stalled)
    if metrics is not None:
        web.add_metrics(app, metrics)
    if ticket is not None:
        _add_ticket(app, ticket)
    if process is not None:
        _add_process(app, process)
    return app


def hosts_of(bind: str, health_url: str, named: str) -> tuple[str, ...]:
    """Return the hosts that requests may name. Health and tickets need no token, and a page of somewhere else can make
    a name of its own lead here (DNS rebinding), but no address."""
    own = (bind.rpartition(":")[0].strip("[]"), urlsplit(health_url).hostname or "", "localhost")
    return tuple(filter(None, (web.ANY_ADDRESS, *own, *(host.strip() for host in named.split(",")))))


def _add_process(app: Flask, look: Callable[[], dict[str, Any] | None]) -> None:
    @app.get("/api/running")
    @needs(Role.ANYBODY)
    def running() -> Response:
        return answer(_known(look()))


def _known(found: dict[str, Any] | None) -> dict[str, Any]:
    if found is None:
        raise Problem(
            503, "not_registered", "this consumer has no incarnation at the moment", headers={"Retry-After": "1"}
        )
    return found


def _add_ticket(app: Flask, look: Callable[[bytes], dict[str, Any] | None]) -> None:
    @app.get("/api/tickets/<rest:ticket_id>")
    @needs(Role.ANYBODY)
    def ticket(ticket_id: str) -> Response:
        asked = request.environ["PATH_INFO"].encode("latin-1").removeprefix(_TICKETS)
        return answer(_known(look(asked) if len(asked) <= LONGEST_TICKET else None))
