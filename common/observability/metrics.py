"""Metrics of a program, as Prometheus reads them at ``GET /metrics``, and dead letters, which a webhook hears of too if
USHER_DEAD_LETTER_WEBHOOK names one. No label holds a ticket, a message or a text: their number is unbounded.

Counts on a message's path are plain numbers of the service that counts; metric families are made of them only at a
scrape. A histogram costs a tenth of a microsecond per value: one thread adds whole batches, the metrics page reads.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import itertools
import platform
import secrets
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import orjson

from usher.common.base.clock import now_s
from usher.common.base.extras import Late, version
from usher.common.base.log import WARNING, event, log_state
from usher.common.protocol.keys import Keys
from usher.common.redis.client import troubles
from usher.common.runtime.service import Service
from usher.common.runtime.settings import CommonSettings

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: Upper bounds in microseconds, from the time of a handler that does nothing to the longest that a person waits.
SHORT_US = tuple(int(1000 * ms) for ms in (0.1, 0.5, 1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 10_000, 60_000))
#: Upper bounds in microseconds for durations of seconds to minutes.
LONG_US = tuple(
    1000 * ms for ms in (10, 100, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 60_000, 120_000, 300_000, 900_000)
)


class DurationHistogram:
    """A histogram of durations: ``counts`` of those up to each bound, and of those above all. Written by one thread; a
    reader may see a value that the sum does not include yet.

    >>> timings = DurationHistogram((10, 20))
    >>> timings.add([5, 10, 11, 99])
    >>> timings.counts
    [2, 1, 1]
    """

    def __init__(self, bounds_us: tuple[int, ...] = SHORT_US) -> None:
        self.bounds_us = bounds_us
        self.counts = [0] * (len(bounds_us) + 1)
        self.sum_us = 0

    def add(self, values_us: Iterable[int]) -> None:
        """Add durations in microseconds; one below zero (of two clocks) counts as zero."""
        counts, bounds = self.counts, self.bounds_us
        total = 0
        for value in values_us:
            counts[bisect_left(bounds, value)] += 1
            if value > 0:
                total += value
        self.sum_us += total


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
        self._sources: list[Source] = [self._own]
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
        text = "Answers and connections of Redis that were errors. class: Redis' first word, connect, reply_unknown,"
        yield counters("redis_errors", f"{text} nogroup, refused.", "class", dict.fromkeys(_FULL, 0) | troubles)
        text = "Lines that are lost: nobody read the log for long, it was closed, or a handler of logging took too"
        yield counter("log_lines_dropped", f"{text} long.", log_state()[0])

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

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

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
        event("handler_metrics_failed", level=WARNING, problem=repr(problem)[:300])


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
    bounds = (*(repr(us / 1e6) for us in timings.bounds_us), "+Inf")
    rows = [*zip(bounds, itertools.accumulate(timings.counts), strict=True)]
    return core.HistogramMetricFamily(f"usher_{name}", text, buckets=rows, sum_value=timings.sum_us / 1e6)


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


#: Most dead letters of one POST, and most that may wait for a POST; more are only counted (``left_out``).
MOST_AT_ONCE = 100
MOST_WAITING = 1000
_TIMEOUT_S = (1.0, 3.0)
#: Tries per batch; the pause doubles after each failure.
_TRIES = 4


def redact_webhook_url(url: str) -> str:
    """Return the part of a URL that may be shown: path, query and user may be secrets.

    >>> redact_webhook_url("https://u:p@hooks.example:8443/T0/B0/token?key=1")
    'https://hooks.example:8443/...'
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(no URL)"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/..."


def signature(secret: str, message_id: str, timestamp_s: int, body: bytes) -> str:
    """Return the signature of a message as Standard Webhooks (standardwebhooks.com) has it in ``webhook-signature``.
    ``secret``: ``whsec_`` and base64, or any text.

    >>> secret, message_id = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek"
    >>> signature(secret, message_id, 1614265330, b'{"test": 2432232314}')
    'v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE='
    """
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True) if secret.startswith("whsec_") else b""
    except binascii.Error:
        key = b""
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key or secret.encode(), signed, hashlib.sha256)).decode()


class Webhook(Service):
    """A service that POSTs ``{"program", "stream", "group", "dead_letters": [...], "left_out": n}`` to one URL: the
    first at once, then one per ``pause_s``. With a secret it signs them (Standard Webhooks): ``webhook-id``, the same
    one for each try, ``webhook-timestamp`` and ``webhook-signature``.

    ``add`` may be called from any thread and never blocks. Answers other than 2xx, redirects included, are failures:
    retried a few times, then dropped; the letters themselves are in Redis.
    """

    name = "bell"
    stalls_after_s = 60.0  # longer than the longest pause

    def __init__(
        self, url: str, about: Mapping[str, str], pause_s: float = 5.0, secret: str = "", ca: Path | None = None
    ) -> None:
        """Make the service. ``ca``: a file of the trusted CAs; None: those of the system."""
        super().__init__()
        self._secret = secret
        self._url = url
        self._about = dict(about)
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._waiting: deque[dict[str, Any]] = deque()  # guarded by self._lock, as is the next
        self._left_out = 0
        import requests  # here, because few programs have a webhook, and it costs each 4 MiB

        self._session = requests.Session()
        self._session.verify = True if ca is None else str(ca.expanduser())
        self._session.trust_env = False  # take no proxies and no .netrc from the environment
        self.sent = 0
        self.dropped = 0

    def add(self, letter: dict[str, Any]) -> None:
        with self._lock:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(letter)
            else:
                self._left_out += 1
        self.wake()

    def run_once(self) -> float:
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(MOST_AT_ONCE, len(self._waiting)))]
            left_out, self._left_out = (self._left_out, 0) if batch else (0, self._left_out)
        if not batch:
            return self.stalls_after_s / 3
        body = orjson.dumps({**self._about, "dead_letters": batch, "left_out": left_out})
        message_id = f"msg_{secrets.token_urlsafe(18)}"
        for number in range(_TRIES):
            trouble = self._post(message_id, body)
            if trouble is None or self.stopping:
                break
            self._stop.wait(self._pause_s * 2**number)
            self.made_progress()
        if trouble is None:
            self.sent += len(batch)
        else:
            self.dropped += len(batch)
            url = redact_webhook_url(self._url)
            event("webhook_failed", level=WARNING, url=url, letters=len(batch), why=trouble)
        self._stop.wait(self._pause_s)
        return 0.0

    def _post(self, message_id: str, body: bytes) -> str | None:
        headers = {"Content-Type": "application/json"}
        if self._secret:
            at_s = int(time.time())
            headers |= {"webhook-id": message_id, "webhook-timestamp": str(at_s)}
            headers["webhook-signature"] = signature(self._secret, message_id, at_s, body)
        try:
            with self._session.post(
                self._url, data=body, headers=headers, timeout=_TIMEOUT_S, allow_redirects=False, stream=True
            ) as response:
                return None if 200 <= response.status_code < 300 else f"it answered {response.status_code}"
        # ValueError: a URL that urllib3 cannot take. OSError: an error of requests, or a file of CAs is not there.
        except (ValueError, OSError) as problem:
            return type(problem).__name__

    def on_end(self) -> None:
        self._session.close()


class DeadLetterNotifier:
    """A notifier that any thread may call; it never blocks: letters that cannot be sent are counted and dropped. It
    sends no fields or texts of a message: they may be secrets. The log event is written where the decision is made."""

    def __init__(self, metrics: Metrics, settings: CommonSettings, program: str, keys: Keys) -> None:
        self._count = metrics.count_letter
        url, about = settings.dead_letter_webhook, {"program": program, "stream": keys.stream, "group": keys.group}
        self.services: tuple[Webhook, ...] = ()
        if url:
            self.services = (Webhook(url, about, secret=settings.webhook_secret, ca=settings.tls_ca),)

    def ring(self, ticket: bytes, message_id: bytes, reason: str, **more: Any) -> None:
        """``more``: ``error_type``, ``attempts``, ``policy``, as far as there are such."""
        self._count(reason)
        told = {"ticket_id": ticket.decode(errors="replace"), "message_id": message_id.decode(errors="replace")}
        for webhook in self.services:
            webhook.add({**told, "reason": reason, "error_type": "", "attempts": 0, "policy": "skip", **more})
