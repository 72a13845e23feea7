"""The consumer's metrics: the work that its handlers did, and the work that waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from usher.common.base.clock import now_s
from usher.common.observability.metrics import counter, counters, gauge, histogram, service_metrics

if TYPE_CHECKING:
    from usher.consumer.incarnation import Incarnation


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
    text = "Starts of a handler, by outcome: done, failed, retry_later, gave_up."
    yield counters("attempts", text, "outcome", counts.outcomes)
    yield counter("acknowledged_messages", "Messages that Redis has as done.", acker.acknowledged)
    yield counter(
        "stale_acknowledgements", "Tickets whose acknowledgement came after another owner had them.", acker.stale
    )
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
