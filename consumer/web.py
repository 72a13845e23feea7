"""The consumer's HTTP interface: its health, its metrics, and what masters ask for: the state of one ticket, when they
explain what it waits for, and what this process is and runs. Work comes through Redis, never over HTTP."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import psutil
from flask import Flask, Response, request
from prometheus_client.core import Metric

from usher.common.base.clock import now_s, run_us, wall_ms
from usher.common.base.extras import version
from usher.common.http import app as web
from usher.common.http.app import Problem, answer
from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials, Role
from usher.common.http.openapi import tells
from usher.common.observability.metrics import counter, counters, gauge, histogram, service_metrics
from usher.common.protocol.run_log import DONE

if TYPE_CHECKING:
    from usher.consumer.execution.lanes import Lanes
    from usher.consumer.incarnation import Incarnation
    from usher.consumer.lifecycle.journal import Journal
    from usher.consumer.program import ConsumerProgram

#: Most queued messages that an answer names, and those of which it says where they run; calls of each, and characters
#: of a file or a function.
_MOST, _MOST_STACKS, _DEEPEST, _LONGEST = 200, 20, 8, 100


def create_app(program: ConsumerProgram) -> Flask:
    """Make the application. No answer has a secret, nor anything of what messages contain; so none needs a token."""
    settings = program.settings
    hosts = web.own_hosts(settings.bind, settings.advertise_url, settings.hosts)
    doorman = Doorman(Credentials(settings.api_token, settings.tokens_file))
    app = web.create_app(__name__, doorman, max_body=0, hosts=hosts)
    web.add_health(app, program.health, program.facts, lambda: program.stopped, lambda: program.liveness().stalled)
    web.add_metrics(app, program.metrics)

    def begun() -> tuple[Incarnation, Journal]:
        incarnation, journal = program.incarnation, program.journal
        if incarnation is None or journal is None:
            problem = "this consumer has no incarnation at the moment"
            raise Problem(503, "not_registered", problem, headers={"Retry-After": "1"})
        return incarnation, journal

    @app.get("/api/tickets/<rest:ticket_id>")
    @tells("What this consumer has of a ticket.", {200: dict[str, Any]}, role=Role.ANYBODY)
    def ticket(ticket_id: str) -> Response:
        incarnation, journal = begun()
        most = incarnation.executor.policy.max_attempts
        # The bytes of the path, as WSGI keeps them: a ticket's name need be no text.
        asked = request.environ["PATH_INFO"].encode("latin-1").removeprefix(b"/api/tickets/")
        return answer(describe_ticket(asked, incarnation.name, journal, incarnation.lanes, most))

    @app.get("/api/running")
    @tells("What this process is, and runs.", {200: dict[str, Any]}, role=Role.ANYBODY)
    def running() -> Response:
        return answer(_describe(program, *begun()))

    return app


def describe_ticket(
    ticket: bytes, incarnation: str, journal: Journal, lanes: Lanes, max_attempts: int
) -> dict[str, Any]:
    """Return the state of ``ticket`` for JSON. ``entries``: messages that run (``running``), wait for the next attempt
    (``waiting``), are queued, or wait for a child process (``apart``), in that order; one that runs in a child process
    says so. A message that has ended and is not acknowledged yet is in none of them."""
    now_ms, running = wall_ms(), journal.running(ticket)
    with lanes.lock:
        queued, due_s, is_apart = lanes.look(ticket)
    entries: list[dict[str, Any]] = [
        _entry(left.stream_id, "running", left.before.starts, left.start_us // 1000) | {"apart": left.is_apart}
        for left in running
    ]
    names, states = {left.stream_id for left in running}, ["queued"] * min(_MOST, len(queued))
    if states and not running:
        states[0] = "apart" if is_apart else "waiting" if due_s is not None else "queued"
    due_ms = now_ms + int(1000 * (due_s - now_s())) if due_s is not None and not running else None
    for message, state in zip(queued, states, strict=False):
        if message.stream_id not in names:
            entries.append(_entry(message.stream_id, state, message.attempt, due_ms=due_ms))
        due_ms = None  # of the others
    return {"incarnation": incarnation, "time_ms": now_ms, "max_attempts": max_attempts, "entries": entries}


def _entry(
    entry_id: bytes, state: str, attempt: int, started_ms: int | None = None, due_ms: int | None = None
) -> dict[str, Any]:
    return {"id": entry_id.decode(), "state": state, "attempt": attempt, "started_ms": started_ms, "due_ms": due_ms}


def _describe(program: ConsumerProgram, incarnation: Incarnation, journal: Journal) -> dict[str, Any]:
    """Return what this process is, and the messages whose handlers run, the longest first, for JSON."""
    running = sorted(journal.running(), key=lambda left: left.start_us)
    # Whoever can reach this may ask: places in the code, and not what stands there.
    told, stacks = incarnation.watch.stacks(), dict[bytes, list[str]]()
    for left in running[:_MOST_STACKS]:
        calls = re.findall(r'File "(.*)", line (\d+), in (.*)', told.get(left.stream_id, ""))[-_DEEPEST:]
        stacks[left.stream_id] = [f"{file[-_LONGEST:]}:{line} in {name[:_LONGEST]}" for file, line, name in calls]
    return {
        "incarnation": incarnation.name,
        "time_ms": run_us() // 1000,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": version(),
        "handler": program.settings.handler,
        "code": program.code,
        "memory_bytes": psutil.Process().memory_info().rss,
        "running": [
            {
                "ticket_id": left.ticket.decode(),
                "id": left.stream_id.decode(),
                "attempt": left.before.starts,
                "started_ms": left.start_us // 1000,
                "stack": stacks.get(left.stream_id, []),
            }
            for left in running[:_MOST]
        ],
        "runs": len(running),
    }


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
    lanes, counts = incarnation.lanes, incarnation.acker.counts
    lease_left_s = max(0.0, incarnation.lease.ends_s - now_s())
    tickets, messages = lanes.load()
    yield gauge("running_handlers", "Handlers that run.", lanes.running)
    text = "Since a handler ended, while some run; 0 while none does. Long where they wait for something."
    yield gauge("since_handler_ended_seconds", text, incarnation.watch.still_s)
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
    yield counter("acknowledged_messages", "Messages that Redis has as done.", counts.outcomes[DONE])
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
