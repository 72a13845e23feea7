"""The last audit as metrics: a source for ``common.metrics.Metrics``. The audit itself runs elsewhere; Redis has what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import RedisTrouble
from common.metrics import Metric, gauge, gauges
from common.redis_client import CommandRefused

_SEVERITIES = ("bad", "warn")


@dataclass(frozen=True)
class AuditMetrics:
    """``read``: the summary of the last audit, None when there was none (StatusReader.audit). Nothing is told then, or while Redis is away."""

    read: Callable[[], Mapping[str, Any] | None]

    def __call__(self) -> Iterable[Metric]:
        try:
            found = self.read()
        except (RedisTrouble, CommandRefused):
            return
        if found is None:
            return
        began_s = _number(found.get("started_ms")) / 1000
        yield gauge("audit_last_run_timestamp_seconds", "When the last audit began; alert when it is too long ago.", began_s)
        yield gauge("audit_duration_seconds", "How long the last audit took.", _number(found.get("seconds")))
        yield gauge("audit_unproven", "What the last audit could not prove, in sentences of its report.", _number(found.get("unproven")))
        counts = found.get("severities")
        counts = counts if isinstance(counts, dict) else {}
        text = "Findings of the last audit in this ticket stream; both are 0 when the promise held."
        yield gauges("audit_findings", text, "severity", {severity: _number(counts.get(severity)) for severity in _SEVERITIES})


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
