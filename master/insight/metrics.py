"""The master's metrics: what it knows of itself, and the stream's sums.

Every master exports the stream's sums, so that they survive the loss of one; in queries take the ``max`` over masters.
The leader's counters (``usher_handed_over_messages_total`` and the like) are added up with ``sum``: a standby's stand
still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric

from usher.common.base.clock import wall_ms
from usher.common.base.errors import RedisTrouble
from usher.common.observability.metrics import counter, gauge, gauges, histogram, service_metrics
from usher.common.redis.client import CommandRefused
from usher.common.runtime.service import Service
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.insight.stats import StreamStatsReader
from usher.master.leader.leader_scripts import LeaderCounters
from usher.master.membership.health_checker import HealthChecker
from usher.master.membership.registry import STATES

#: The most consumers that get series of their own. A consumer keeps its name over restarts, so names are few; if they
#: are not, the others share one series.
MOST_CONSUMERS = 200
#: No consumer can have this name.
OTHERS = "_others"


@dataclass(frozen=True)
class MasterMetrics:
    """A source for ``usher.common.observability.metrics.Metrics``."""

    vitals: StreamStatsReader
    services: Sequence[Service]
    dispatcher: Dispatcher
    health: HealthChecker

    def __call__(self) -> Iterable[Metric]:
        yield gauge("leader", "1 on the master that leads.", self.dispatcher.leads)
        yield counter("leases_revoked", "Leases taken from consumers that were not well.", self.health.revoked)
        text = "Live consumers whose health URLs do not answer the leader; they keep what they have."
        yield gauge("consumers_silent", text, self.health.silent)
        yield from _counted(self.dispatcher.counts)
        text = "1 while so many messages wait that the leader reads no more."
        yield gauge("waiting_limit_reached", text, self.dispatcher.is_full)
        text = "Messages whose priority is not a number from 0 to 9; they count as the least urgent."
        yield counter("priorities_unreadable", text, self.dispatcher.marks.unreadable)
        yield from service_metrics(self.services)
        try:
            vitals = self.vitals.read()
        except (RedisTrouble, CommandRefused):
            yield gauge("redis_up", "1 if Redis answered this scrape.", 0)
            return
        yield gauge("redis_up", "1 if Redis answered this scrape.", 1)
        yield from _stream_metrics(vitals)
        yield from _consumers(vitals["consumers"])


def _counted(counts: LeaderCounters) -> Iterable[Metric]:
    text = "Times that this master began to lead, or began again after an uncertain reply."
    yield counter("adoptions", text, counts.adoptions)
    yield counter("handed_over_messages", "Messages handed over.", counts.handed_over)
    yield counter("hand_over_batches", "Turns of the leader that handed something over.", counts.batches)
    yield histogram("hand_over_call_seconds", "Time of such a turn, round trip included.", counts.calls)
    text = "From XADD to hand-over, by the clocks of Redis and master; at most 17 tickets of each batch are looked at."
    yield histogram("hand_over_wait_seconds", text, counts.waits)
    yield counter("consumers_lost", "Consumers whose lease ended without a goodbye.", counts.lost)
    yield counter("recalled_tickets", "Tickets asked back from busy consumers for idle ones.", counts.recalled)
    yield counter("recalled_tickets_returned", "Those of them that came back unstarted.", counts.came_back)
    text = "From noticing a lost consumer until all its entries can be handed over again."
    yield histogram("recovery_seconds", text, counts.recoveries)


def _stream_metrics(seen: Mapping[str, Any]) -> Iterable[Metric]:
    text = "1 if Redis refuses writes, because memory or disk is full, or replicas are missing."
    yield gauge("redis_refuses_writes", text, seen["refuses_writes"])
    if seen["memory_share"] is not None:
        text = "Share of its memory (maxmemory, else the machine's) that Redis uses; at 1 it refuses writes."
        yield gauge("redis_memory_share", text, seen["memory_share"])
    yield gauge("leader_known", "1 if some master holds the leader lease.", seen["epoch"] is not None)
    yield gauge("stream_entries", "Entries in the ticket stream, done ones included.", seen["entries"])
    text = "Messages that were not read yet, also in gathered sources; see usher_lag_is_exact."
    yield gauge("lag_messages", text, seen["lag"])
    text = "0 if there are more than usher_lag_messages: before Redis 7.0 it is counted, up to a limit."
    yield gauge("lag_is_exact", text, seen["lag_is_exact"])
    yield gauge("unfinished_messages", "Lag and pending together: what is not done.", seen["unfinished"])
    text = "Age of the oldest message that is not done; 0 if there is none."
    yield gauge("oldest_message_age_seconds", text, seen["oldest_s"])
    text = "Like usher_oldest_message_age_seconds, without what halted tickets, pauses and slowing rules hold back."
    yield gauge("oldest_unheld_message_age_seconds", text, seen["oldest_unheld_s"])
    pending = {name: seen[name] for name in ("parked", "halted")}
    pending = {"handed_over": max(0, seen["pending"] - sum(pending.values())), **pending}
    text = "Read and not acknowledged. halted: behind a dead letter, waiting for an operator."
    yield gauges("pending_messages", text, "state", pending)
    yield gauge("tickets_in_processing", "Tickets that have an owner, or are halted.", seen["tickets"])
    text = "Unfinished messages that failed, or ran when a process ended, at least once."
    yield gauge("tried_messages", text, seen["retrying"])
    text = "Messages that were sent for later and are not due yet, or late: see usher_delayed_late_seconds."
    yield gauge("delayed_messages", text, seen["delayed"]["messages"])
    text = "Since when the first delayed message is due; 0 if none is. More than a few: no master leads."
    yield gauge("delayed_late_seconds", text, seen["late_s"])
    text = "Messages that were cut from the stream before they were read, as far as this can be known; they are lost."
    yield counter("unread_cut_messages", text, seen["mishaps"]["unread_cut"])
    yield gauge("dead_letters_open", "Dead letters that are not redriven or dropped yet.", seen["dead_letters"])


def _consumers(loads: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    by_state = dict.fromkeys(STATES, 0.0)
    pending: dict[str, float] = {}
    slots: dict[str, float] = {}
    live: dict[str, float] = {}
    for place, (name, load) in enumerate(loads.items()):
        shown = name if place < MOST_CONSUMERS else OTHERS
        by_state[load["state"] if load["state"] in by_state else "lost"] += 1
        pending[shown] = pending.get(shown, 0) + load["pending"]
        slots[shown] = slots.get(shown, 0) + load["slots"]
        live[shown] = live.get(shown, 0) + (load["state"] == "live")
    text = (
        "Registered consumers. paused: drained by an operator. lost: the lease has ended and the entries are not all"
        " taken back yet."
    )
    yield gauges("consumers", text, "state", by_state)
    first = f"the first {MOST_CONSUMERS} by name have their own, the rest is {OTHERS}."
    text = f"Handed over to a consumer and not acknowledged; {first}"
    yield gauges("consumer_pending_messages", text, "consumer", pending)
    yield gauges("consumer_slots", f"Handlers that a consumer runs at the same time; {first}", "consumer", slots)
    yield gauges("consumer_live", f"1 if a consumer is live; {first}", "consumer", live)


_SEVERITIES = ("bad", "warn")


@dataclass(frozen=True)
class AuditMetrics:
    """Metrics of the last audit and of the proof from the archive (``read``: ``StatusReader.proofs``). Exports nothing
    where there was none, or while Redis is away."""

    read: Callable[[], Mapping[str, Any]]

    def __call__(self) -> Iterable[Metric]:
        try:
            proofs = self.read()
        except (RedisTrouble, CommandRefused):
            return
        found, until_ms = proofs["audit"], proofs["until_ms"]
        if until_ms is not None:
            yield gauge("audit_proven_until", "Until when history is proven (usher audit prove).", until_ms / 1000)
            text = "How long ago that is: longer than the run log holds, and a part of history will not be proven."
            yield gauge("audit_unproven_seconds", text, max(0.0, (wall_ms() - until_ms) / 1000))
        if found is None:
            return
        began_s = _number(found.get("started_ms")) / 1000
        text = "When the last audit began; alert when it is too long ago."
        yield gauge("audit_last_run_timestamp_seconds", text, began_s)
        yield gauge("audit_duration_seconds", "How long the last audit took.", _number(found.get("seconds")))
        text = "What the last audit could not prove, in sentences of its report."
        yield gauge("audit_unproven", text, _number(found.get("unproven")))
        counts = found.get("severities")
        counts = counts if isinstance(counts, dict) else {}
        text = "Findings of the last audit in this ticket stream; both are 0 when the promise held."
        by_severity = {severity: _number(counts.get(severity)) for severity in _SEVERITIES}
        yield gauges("audit_findings", text, "severity", by_severity)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
