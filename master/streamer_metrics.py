"""Metrics of a streamer: whether it sends, how much it has sent, and since when rows wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from common.clock import now_s
from common.metrics import counter, gauge, service_metrics

if TYPE_CHECKING:
    from master.streamer_wiring import StreamerProgram


def behind_s(program: StreamerProgram) -> float:
    """For how long rows have been waiting, as far as this streamer knows; 0 for one that stands by."""
    return max(0.0, now_s() - program.streamer.caught_up_s) if program.lead.is_ours else 0.0


def streamer_metrics(program: StreamerProgram) -> Iterable[Metric]:
    """A source for ``common.metrics.Metrics``."""
    streamer = program.streamer
    yield gauge("outbox_streams", "1 for the streamer that sends, 0 for one that stands by.", program.lead.is_ours)
    yield counter("outbox_sent_rows", "Rows that became messages and left the outbox.", streamer.sent)
    yield counter(
        "outbox_refused_rows", "Rows that could become no message and were set aside, with the reason, in refused_log_records.", streamer.refused
    )
    text = "Since all that was committed had been sent; what was committed since waits. An empty outbox is looked at every USHER_OUTBOX_POLL_SECONDS."
    yield gauge("outbox_behind_seconds", text, behind_s(program))
    yield from service_metrics(program.services)
