"""Metrics of a program, as Prometheus reads them at ``GET /metrics``. No label holds an id, a ticket or a text: their number is unbounded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest


class Metrics:
    """All metrics of this process, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        #: By ``reason``: gave_up, attempts_exhausted, too_large, no_ticket_id and the like, a fixed set of words.
        self.dead_letters = Counter("usher_dead_letters", "Messages that this process has made dead letters of.", ["reason"], registry=self._registry)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return bytes(generate_latest(self._registry))
