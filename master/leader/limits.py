"""Limits of how much the leader takes at a time, from its settings."""

from __future__ import annotations

from dataclasses import dataclass

from usher.master.settings import MasterSettings


@dataclass(frozen=True)
class LeaderLimits:
    """Limits of how much the leader takes at a time."""

    batch: int
    ticket_window: int
    work_s: float
    parked: int
    reconcile_s: float
    sweep_s: float
    min_idle_ms: int
    ticket_field: str
    longest_message: int = 0
    spread: bool = False


def limits_of(settings: MasterSettings) -> LeaderLimits:
    return LeaderLimits(
        batch=settings.batch_size,
        ticket_window=settings.ticket_window,
        work_s=settings.hand_over_seconds,
        parked=settings.parked_limit,
        reconcile_s=settings.reconcile_seconds,
        sweep_s=settings.sweep_seconds,
        min_idle_ms=int(2000 * settings.lease_seconds),
        ticket_field=settings.work_ticket_field,
        longest_message=settings.longest_message_bytes,
        spread=settings.unkeyed == "spread",
    )
