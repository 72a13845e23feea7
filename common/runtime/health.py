"""Judge whether a program makes progress: services note when a turn ended, the health endpoint asks how long ago."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from usher.common.runtime.service import Service


@dataclass(frozen=True)
class Health:
    """The health of a program: ``reasons`` is empty when all is well. ``warnings`` want a look, and change nothing."""

    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.reasons


def stalled(services: Iterable[Service], now_s: float, lease_s: float) -> str:
    """Name the services that stand still, "" when none does: no turn of theirs ended for a lease longer than health
    allows, maybe since their thread has ended. To be asked about such as turn for as long as their program lives."""
    silent = [(one, now_s - one.last_turn_s) for one in services if one.last_turn_s is not None]
    still = [(one.name, silent_s) for one, silent_s in silent if silent_s > one.stalls_after_s + lease_s]
    return "; ".join(f"{name} made no progress for {silent_s:.1f} s" for name, silent_s in still)


def judge(services: Iterable[Service], now_s: float) -> Health:
    """Judge the health of a program by its services.

    ============================  =====================================
    service                       reason
    ============================  =====================================
    thread not running            "<name> is not running"
    no turn for stalls_after_s    "<name> made no progress for <n> s"
    last turn failed              "<name>: <what went wrong>"
    ============================  =====================================
    """
    reasons: list[str] = []
    for service in services:
        last = service.last_turn_s
        if not service.alive:
            reasons.append(f"{service.name} is not running")
        elif last is not None and now_s - last > service.stalls_after_s:
            reasons.append(f"{service.name} made no progress for {now_s - last:.1f} s")
        elif service.trouble is not None:
            reasons.append(f"{service.name}: {service.trouble}")
    return Health(tuple(reasons))
