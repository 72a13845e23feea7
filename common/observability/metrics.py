"""Metrics of a program, as Prometheus reads them at ``GET /metrics``. No label holds a ticket, a message or a text:
their number is unbounded.

Counts on a message's path are plain numbers of the service that counts; metric families are made of them only at a
scrape.
"""

from __future__ import annotations

import functools
import logging
import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from usher.common.base.clock import now_s
from usher.common.base.extras import Late, version
from usher.common.base.log import event, log_state
from usher.common.redis.client import troubles
from usher.common.runtime.histograms import DurationHistogram
from usher.common.runtime.service import Service

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)
core: Any = Late("prometheus_client.core")
prometheus: Any = Late("prometheus_client")

Source = Callable[[], "Iterable[Metric]"]

#: Reasons of dead letters, and below Redis' errors when it is full. All are exported from the start, with 0: of a
#: series that begins with 1 Prometheus' ``increase`` is 0, and the first dead letter of a program would alert nobody.
DEAD_LETTER_REASONS = (
    "attempts_exhausted",
    "gave_up",
    "invalid",
    "body_gone",
    "too_large",
    "over_limit",
    "no_ticket_id",
    "empty_ticket_id",
    "ticket_id_too_long",
    "ticket_id_not_utf8",
    "unreadable_due_ms",
)
_FULL = ("oom", "misconf")


class Metrics:
    """All metrics of this process."""

    def __init__(self) -> None:
        self._dead_letters, self._counting = Counter(dict.fromkeys(DEAD_LETTER_REASONS, 0)), threading.Lock()
        self._sources: list[Source] = [self._own, _redis_errors, _log_lines]
        #: Adds a source, which is called at every scrape, on a thread of the web server.
        self.add = self._sources.append

    def count_letter(self, reason: str) -> None:
        """Count a dead letter by its ``reason``, one of DEAD_LETTER_REASONS. Any thread may call it."""
        with self._counting:
            self._dead_letters[reason] += 1

    def _own(self) -> Iterable[Metric]:
        build, text = {"version": version(), "python": platform.python_version()}, "The version of Usher, and of the"
        yield core.InfoMetricFamily("usher_build", f"{text} Python that it runs on.", value=build)
        text = "Messages that this process has made dead letters of."
        yield counters("dead_letters", text, "reason", self._dead_letters)

    def collect(self) -> Iterator[Metric]:
        return (family for source in self._sources for family in source())

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """Return what Prometheus reads, and its content type: OpenMetrics, if ``accept`` asks for it, else its text."""
        encode, content_type = prometheus.exposition.choose_encoder(accept)
        everything = [*prometheus.ProcessCollector(registry=None).collect(), *self.collect()]
        return bytes(encode(SimpleNamespace(collect=lambda: everything))), content_type


class Reader:
    """Base of what reads streams without tickets, in a program of yours. ``told``: what each count is."""

    kind = ""
    told: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}

    @property
    def services(self) -> Sequence[Service]:
        return ()

    def metrics(self) -> Mapping[str, float]:
        return {}

    def show(self) -> None:
        """Tell of it in prometheus_client's own registry, of which any exporter makes its page."""
        of_this_program()
        _READERS[id(self)] = self


_READERS: WeakValueDictionary[int, Reader] = WeakValueDictionary()
#: Beginnings of their names; and the counts that are no sums.
_OF_READERS, _NOW = ("usher_loop_", "usher_router_"), ("held", "running", "streams", "queued", "connections")


@functools.cache
def of_this_program() -> Metrics:
    made = Metrics()
    made.add(_of_readers)
    core.REGISTRY.register(made)
    return made


def _of_readers() -> Iterable[Metric]:
    readers = [reader for known in _READERS.valuerefs() if (reader := known()) is not None]
    yield from service_metrics([service for reader in readers for service in reader.services])
    families, sums = dict[str, Any](), Counter[tuple[str, ...]]()
    for reader in readers:
        for name, value in reader.metrics().items():
            full = f"usher_{reader.kind}_{name}"
            made = core.GaugeMetricFamily if name in _NOW else core.CounterMetricFamily
            families[full] = made(full, reader.told[name], labels=[*reader.labels])
            sums[full, *reader.labels.values()] += value  # type: ignore[assignment]
    for (full, *values), value in sums.items():
        families[full].add_metric(values, value)
    yield from families.values()


def of_handlers() -> Iterable[Metric]:
    """Yield what a handler's own module has made (prometheus_client's default registry)."""
    try:
        for family in core.REGISTRY.collect():
            if not family.name.startswith(("process_", "python_", "usher_")) or family.name.startswith(_OF_READERS):
                yield family  # others are here already, or ours
    except Exception as problem:  # of a collector of theirs: the rest is missing, and ours is not
        event(log, "handler_metrics_failed", level=logging.WARNING, problem=repr(problem)[:300])


def gauge(name: str, text: str, value: float) -> Metric:
    return core.GaugeMetricFamily(f"usher_{name}", text, value=value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _by_label(core.GaugeMetricFamily(f"usher_{name}", text, labels=[label]), values)


def counter(name: str, text: str, value: float) -> Metric:
    return core.CounterMetricFamily(f"usher_{name}", text, value=value)


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _by_label(core.CounterMetricFamily(f"usher_{name}", text, labels=[label]), values)


def _by_label(family: Any, values: Mapping[str, float]) -> Metric:
    for word, value in values.items():
        family.add_metric([word], value)
    return family


def histogram(name: str, text: str, timings: DurationHistogram) -> Metric:
    rows = [("+Inf" if bound == float("inf") else repr(bound), count) for bound, count in timings.cumulative()]
    return core.HistogramMetricFamily(f"usher_{name}", text, buckets=rows, sum_value=timings.sum_s)


def service_metrics(services: Sequence[Service]) -> Iterable[Metric]:
    """Yield turns and troubles of the threads, by role: ``work-1`` to ``work-8`` are ``work``."""
    now = now_s()
    turns: dict[str, float] = {}
    failed: dict[str, float] = {}
    idle: dict[str, float] = {}
    down: dict[str, float] = {}
    for service in services:
        role = service.name.rstrip("0123456789").rstrip("-")
        turns[role] = turns.get(role, 0) + service.turns
        failed[role] = failed.get(role, 0) + service.failed_turns
        idle[role] = max(idle.get(role, 0), 0 if service.last_turn_s is None else now - service.last_turn_s)
        down[role] = down.get(role, 0) + (not service.alive)
    yield counters("service_turns", "Turns of a role's loop that went well.", "service", turns)
    yield counters("service_failed_turns", "Turns that failed and were tried again.", "service", failed)
    text = "Since the last turn ended; the longest, where a role has several threads."
    yield gauges("service_since_turn_seconds", text, "service", idle)
    yield gauges("service_threads_down", "Threads of a role that do not run.", "service", down)


def _log_lines() -> Iterable[Metric]:
    text = "Lines that are lost: nobody read the log for long, it was closed, or a handler of logging took too long."
    yield counter("log_lines_dropped", text, log_state()[0])


def _redis_errors() -> Iterable[Metric]:
    text = (
        "Answers and connections of Redis that were errors. class: Redis' first word, connect, reply_unknown, nogroup,"
        " refused."
    )
    yield counters("redis_errors", text, "class", dict.fromkeys(_FULL, 0) | troubles)
