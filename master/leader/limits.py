"""Limits of how much the leader takes at a time, from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from usher.common.protocol.marks import NO_FIELDS, MarkFields, parse_weights
from usher.master.settings import MasterSettings

#: Most entries read, and handed over, at once, of up to 7 consumers: Redis answers nobody else for some 2 ms.
BATCH = 1000
#: Most entries of one ticket handed over at a time: with half of them done the leader hears of it in time for more.
#: Half of what a consumer takes (USHER_CAPACITY), so that one ticket whose handler is slow leaves room for others.
TICKET_WINDOW = 1024
#: Seconds of work that a consumer is given at a time, as it was seen to finish: less, and it waits for round trips;
#: more, and a drain or a new consumer finds little to move.
WORK_S = 1.0
#: Most waiting entries, which memory has the ids of (70 bytes each, and 900 a ticket). At this many reading stops.
READ_AHEAD = 2_000_000
#: Seconds between two comparisons of memory with the index: the bound for a lost notification.
RECONCILE_S = 5.0
#: Seconds between two looks for idle messages.
SWEEP_S = 5.0


@dataclass(frozen=True)
class LeaderLimits:
    """Limits of how much the leader takes at a time."""

    batch: int
    ticket_window: int
    work_s: float
    read_ahead: int
    reconcile_s: float
    sweep_s: float
    min_idle_ms: int
    ticket_field: str
    longest_message: int = 0
    marks: MarkFields = NO_FIELDS
    weights: Mapping[bytes, float] | None = None  # of tenants; None: neither tenants nor priorities


def limits_of(settings: MasterSettings) -> LeaderLimits:
    marks, min_idle_s = settings.marks, settings.min_idle_seconds or 2 * settings.lease_seconds
    weights = None if marks.is_empty else parse_weights(settings.tenant_weights)
    fixed = (BATCH, TICKET_WINDOW, WORK_S, READ_AHEAD, RECONCILE_S, SWEEP_S)
    asked = (int(1000 * min_idle_s), settings.work_ticket_field, settings.longest_message_bytes)
    return LeaderLimits(*fixed, *asked, marks, weights)
