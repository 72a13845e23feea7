"""Limits of how much the leader takes at a time, from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from usher.common.protocol.marks import NO_FIELDS, MarkFields, parse_weights
from usher.master.settings import MasterSettings


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
    marks = settings.marks
    return LeaderLimits(
        batch=settings.batch_size,
        ticket_window=settings.ticket_window,
        work_s=settings.hand_over_seconds,
        read_ahead=settings.read_ahead,
        reconcile_s=settings.reconcile_seconds,
        sweep_s=settings.sweep_seconds,
        min_idle_ms=int(2000 * settings.lease_seconds),
        ticket_field=settings.work_ticket_field,
        longest_message=settings.longest_message_bytes,
        marks=marks,
        weights=None if marks.is_empty else parse_weights(settings.tenant_weights),
    )
