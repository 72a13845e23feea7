"""Making families of numbers: what Prometheus reads back, and that series stay few."""

from __future__ import annotations

import platform

import pytest
from prometheus_client import REGISTRY, Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

import usher
from usher.common.observability.metrics import DurationHistogram, Metrics, histogram, of_handlers
from usher.master.insight.metrics import MOST_CONSUMERS, _consumers
from usher.master.leader.entries import TOO_LARGE


def _samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(metrics.page()[0].decode())
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_histogram_is_read_back_as_it_was_filled() -> None:
    timings = DurationHistogram((1000, 2_000_000))
    timings.add([-5, 1000, 1001])
    timings.add([3_000_000])
    metrics = Metrics()
    metrics.add(lambda: [histogram("x_seconds", "X.", timings)])
    seen = _samples(metrics)
    buckets = [seen["usher_x_seconds_bucket", bound] for bound in ("0.001", "2.0", "+Inf")]
    assert (buckets, seen["usher_x_seconds_count", ""]) == ([2, 3, 4], 4)
    assert seen["usher_x_seconds_sum", ""] == pytest.approx(3.002001), "below zero is zero"


def test_however_many_consumers_there_are_their_series_are_few_and_complete() -> None:
    loads = {
        f"c{n:05}": {"state": "live" if n % 2 else "strange", "pending": 2, "slots": 4}
        for n in range(MOST_CONSUMERS + 50)
    }
    metrics = Metrics()
    metrics.add(lambda: _consumers(loads))
    seen = _samples(metrics)
    pending = {label: value for (name, label), value in seen.items() if name == "usher_consumer_pending_messages"}
    assert len(pending) == MOST_CONSUMERS + 1
    assert sum(pending.values()) == 2 * (MOST_CONSUMERS + 50)
    assert pending["_others"] == 100
    assert (seen["usher_consumers", "live"], seen["usher_consumers", "lost"]) == (125, 125)


def test_what_alerts_take_the_increase_of_is_told_before_it_happens() -> None:
    """Prometheus' ``increase`` of a series that begins with 1 is 0: the first dead letter of a program would wake
    nobody."""
    seen = _samples(Metrics())
    reasons = {label for name, label in seen if name == "usher_dead_letters_total"}
    assert {"attempts_exhausted", "gave_up", "body_gone", "no_ticket_id", TOO_LARGE} <= reasons
    assert all(seen["usher_dead_letters_total", reason] == 0 for reason in reasons)
    assert {"oom", "misconf"} <= {label for name, label in seen if name == "usher_redis_errors_total"}


def test_openmetrics_is_served_to_who_asks_for_it_and_tells_the_same() -> None:
    metrics = Metrics()
    metrics.add(lambda: [histogram("x_seconds", "X.", DurationHistogram((1000,)))])
    plain, content_type = metrics.page("text/plain;version=0.0.4;q=0.5,*/*;q=0.1")
    assert content_type.startswith("text/plain")
    asked = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"  # Prometheus'
    text, content_type = metrics.page(asked)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    ours = {sample.name for family in openmetrics_families(text.decode()) for sample in family.samples}
    others = {sample.name for family in text_string_to_metric_families(plain.decode()) for sample in family.samples}
    assert {name for name in others if not name.endswith("_created")} <= ours
    assert (
        f'usher_build_info{{python="{platform.python_version()}",version="{usher.__version__}"}} 1.0' in plain.decode()
    )


def test_what_a_handlers_own_module_counts_is_there_beside_ours() -> None:
    Counter("orders_paid", "In a handler's module.").inc(3)
    metrics = Metrics()
    metrics.add(of_handlers)
    text = metrics.page()[0].decode()
    assert "orders_paid_total 3.0" in text
    assert text.count("# TYPE process_open_fds ") == 1
    theirs = Metrics()
    theirs.add(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    REGISTRY._collector_to_names[theirs] = []
    try:
        assert b"usher_build_info" in metrics.page()[0], "a collector of theirs that raises takes nothing of ours along"
    finally:
        REGISTRY.unregister(theirs)
