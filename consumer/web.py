"""The consumer's HTTP interface: its health, its metrics, and what masters ask for: the state of one ticket, when they
explain what it waits for, and what this process is and runs. Work comes through Redis, never over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flask import Flask, Response, request
from prometheus_client.core import Metric

from usher.common.base.clock import now_s
from usher.common.http import app as web
from usher.common.http.app import Problem, answer
from usher.common.http.auth import Doorman, needs
from usher.common.http.credentials import Role
from usher.common.observability.metrics import Metrics, counter, counters, gauge, histogram, service_metrics
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.runtime.service import Health

if TYPE_CHECKING:
    from usher.consumer.incarnation import Incarnation

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
        running = needs(Role.ANYBODY)(lambda: answer(_known(process())))
        app.add_url_rule("/api/running", "running", running)
    return app


def hosts_of(bind: str, advertise_url: str, named: str) -> tuple[str, ...]:
    """Return the hosts that requests may name. Health and tickets need no token, and a page of somewhere else can make
    a name of its own lead here (DNS rebinding), but no address."""
    own = (bind.rpartition(":")[0].strip("[]"), urlsplit(advertise_url).hostname or "", "localhost")
    return tuple(filter(None, (web.ANY_ADDRESS, *own, *(host.strip() for host in named.split(",")))))


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
        # The bytes of the path, as WSGI keeps them: a ticket's name need be no text.
        asked = request.environ["PATH_INFO"].encode("latin-1").removeprefix(_TICKETS)
        return answer(_known(look(asked) if len(asked) <= LONGEST_TICKET else None))


def consumer_metrics(incarnation: Incarnation | None, slots: int) -> Iterable[Metric]:
    """Yield the metrics, as a source for ``usher.common.observability.metrics.Metrics``. ``incarnation``: None before
    the name is taken."""
    yield gauge(
        "registered",
        "1 if this consumer has its name and a lease that lives.",
        incarnation is not None and incarnation.lease.holds(),
    )
    yield gauge("slots", "Handlers that may run at the same time.", slots)
    if incarnation is None:
        return
    acker, lanes, counts = incarnation.acker, incarnation.lanes, incarnation.acker.counts
    lease_left_s = max(0.0, incarnation.lease.ends_s - now_s())
    tickets, messages = lanes.load()
    yield gauge("running_handlers", "Handlers that run.", lanes.running)
    text = "Since a handler ended, while some run; 0 while none does. Long where they wait for something."
    yield gauge("since_handler_ended_seconds", text, incarnation.progress.still_s)
    yield gauge("owned_tickets", "Tickets that this consumer owns.", tickets)
    yield gauge("owned_messages", "Messages of owned tickets that are not done here.", messages)
    yield gauge("lease_left_seconds", "Time left of the lease; it is renewed every third of its life.", lease_left_s)
    yield gauge("draining", "1 while this consumer takes no new work and gives back what it has.", lanes.paused)
    outages = incarnation.executor.outages
    text = "Tickets that wait, uncharged, because they fail alike: what their handler needs is away."
    yield gauge("tickets_failing_alike", text, outages.waiting)
    yield counter(
        "probes", "Starts of tickets that fail alike, one at a time, to see whether they still do.", outages.probes
    )
    text = "Starts of a handler, by outcome: done, failed, retry_later, gave_up."
    yield counters("attempts", text, "outcome", counts.outcomes)
    yield counter("acknowledged_messages", "Messages that Redis has as done.", acker.acknowledged)
    text = "Done messages that could be reported to no master; the leader finds them by itself, up to 5 s later."
    yield counter("unreported_messages", text, incarnation.reporter.dropped)
    yield histogram(
        "handler_seconds",
        "Time of a handler call, every execution; counted when Redis has its outcome.",
        counts.handlers,
    )
    text = (
        "From XADD to the handler's first start, by the clocks of Redis and consumer; sampled: one of 64 messages of a"
        " batch, at least one."
    )
    yield histogram("wait_seconds", text, counts.waits)
    yield from service_metrics(incarnation.services)
