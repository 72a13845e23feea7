"""Metrics of a program, as Prometheus reads them at ``GET /metrics``. No label holds an id, a ticket or a text: their number is unbounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

Source = Callable[[], Iterable[Metric]]


class Metrics:
    """All metrics of this process, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        #: By ``reason``: gave_up, attempts_exhausted, too_large, no_ticket_id and the like, a fixed set of words.
        self.dead_letters = Counter("usher_dead_letters", "Messages that this process has made dead letters of.", ["reason"], registry=self._registry)

    def add(self, source: Source) -> None:
        """``source`` is asked at every scrape, on a thread of the web server."""
        self._registry.register(_Asked(source))

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return bytes(generate_latest(self._registry))


class _Asked:
    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        return self._source()


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"usher_{name}", text, value=value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """One gauge per value of ``label``, of which there must be few."""
    family = GaugeMetricFamily(f"usher_{name}", text, labels=[label])
    for word, value in values.items():
        family.add_metric([word], value)
    return family
