"""Metrics of a streamer: whether it sends, how much it has sent, and since when rows wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from usher.common.base.clock import now_s
from usher.common.observability.metrics import counters, gauges, service_metrics

if TYPE_CHECKING:
    from usher.master.streamer.program import StreamerProgram


def behind_s(program: StreamerProgram) -> float:
    """Return the seconds since a look at the outbox last found no more than was sent then; 0 for a streamer that stands
    by, or cannot know whether it leads."""
    return max(0.0, now_s() - program.streamer.caught_up_s) if program.lead.holds else 0.0


def streamer_metrics(program: StreamerProgram, outbox: str) -> Iterable[Metric]:
    """Yield the metrics of a streamer, for ``usher.common.observability.metrics.Metrics``. ``outbox``: its name."""
    streamer = program.streamer

    def told(value: float) -> dict[str, float]:
        return {outbox: value}

    text = (
        "1 for the streamer that sends. 0 for one that stands by, and when its lease has ended: it does not reach"
        " Redis, or its database fails."
    )
    yield gauges("outbox_streams", text, "outbox", told(program.lead.holds))
    yield counters("outbox_sent_rows", "Rows that became messages and left the outbox.", "outbox", told(streamer.sent))
    text = "Rows that could become no message and were set aside, with the reason, in refused_log_records."
    yield counters("outbox_refused_rows", text, "outbox", told(streamer.refused))
    text = "Tickets whose rows wait in the outbox for a refused one (USHER_OUTBOX_REFUSED_POLICY)."
    yield gauges("outbox_parked_tickets", text, "outbox", told(streamer.parked))
    text = (
        "Since the outbox was last sent to its end; an empty one is looked at twice a second. A new"
        " leader begins with 0."
    )
    yield gauges("outbox_behind_seconds", text, "outbox", told(behind_s(program)))
    yield from service_metrics(program.services)
