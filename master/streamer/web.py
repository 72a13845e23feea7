"""Web interface of a streamer, if it is asked for: health and metrics. The work does not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import Metric

from usher.common.base.clock import now_s
from usher.common.http import app as web
from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials
from usher.common.http.serve import Liveness
from usher.common.observability.metrics import Metrics, counters, gauges, service_metrics
from usher.common.runtime.service import Health, Service, judge, stalled
from usher.common.runtime.settings import is_loopback
from usher.master.settings import StreamerSettings
from usher.master.streamer.program import StreamerProgram

_LOOK_S = 1.0
_ANOTHER = "an outbox of another database is streamed under this name: give each a USHER_OUTBOX_NAME of its own"


class ServedStreamer:
    """The streamer as usher.common.http.serve runs it: web application, start, stop. ``leave`` ends the
    process, so that a new one is started."""

    def __init__(self, settings: StreamerSettings, redis_url: str, leave: Callable[[str], None]) -> None:
        self._settings = settings
        self._program = StreamerProgram(settings, redis_url)
        self._watch = _Watch(self._program, leave)
        self._stopped = False
        metrics = Metrics()
        metrics.add(lambda: streamer_metrics(self._program, settings.outbox_name))
        guard = Doorman(Credentials(settings.api_token, settings.tokens_file))
        self.app = web.create_app(__name__, guard, max_body=0, hosts=hosts_of(settings))
        web.add_health(self.app, self._health, self._facts, lambda: self._stopped, lambda: self.liveness().stalled)
        web.add_metrics(self.app, metrics)

    def start(self, _port: int, _host: str) -> None:
        self._program.start()
        self._watch.start()

    def liveness(self) -> Liveness:
        """Return how long this streamer may be silent, and whether its elector stands still: a database may be slow."""
        lease_s, elector = self._program.lease_s, self._program.services[-1]
        return Liveness(max(elector.stalls_after_s, lease_s), stalled([elector], now_s(), lease_s))

    def stop(self) -> None:
        self._stopped = True
        self._watch.stop()
        self._program.stop()

    def _health(self) -> Health:
        """Return the health; a standby is healthy. A database's messages may have rows in them: they are for the log
        alone."""
        program = self._program
        reasons = map(web.in_brief, judge(program.services, now_s()).reasons)
        return Health((*reasons, *((_ANOTHER,) if program.another_leads else ())))

    def _facts(self) -> dict[str, Any]:
        program, settings = self._program, self._settings
        return {
            "role": "streamer",
            "name": settings.outbox_name,
            "stream": settings.one_stream,
            "streams": program.lead.holds,
            "sent": program.streamer.sent,
            "refused": program.streamer.refused,
            "behind_seconds": round(behind_s(program), 1),
        }


def hosts_of(settings: StreamerSettings) -> tuple[str, ...]:
    """Return the hosts that requests may name; empty: any. A page of somewhere else can make its own name lead to
    127.0.0.1 (DNS rebinding). Where a token is required, that gains it nothing."""
    asked = settings.api_token or settings.tokens_file
    return () if asked or not is_loopback(settings.outbox_bind) else (web.ANY_ADDRESS, "localhost")


class _Watch(Service):
    """Service that has the process restarted when one of its threads has died."""

    name = "watch"

    def __init__(self, program: StreamerProgram, leave: Callable[[str], None]) -> None:
        super().__init__()
        self._program = program
        self._leave = leave

    def run_once(self) -> float:
        if not self._program.alive and not self.stopping:
            self._leave("a thread of the streamer has died")
        return _LOOK_S


def behind_s(program: StreamerProgram) -> float:
    """Return the seconds since a look at the outbox last found no more than was sent then; 0 for a streamer that stands
    by, or cannot know whether it leads."""
    return max(0.0, now_s() - program.streamer.caught_up_s) if program.lead.holds else 0.0


def streamer_metrics(program: StreamerProgram, outbox: str) -> Iterable[Metric]:
    """Yield the metrics of a streamer, for ``usher.common.observability.metrics.Metrics``. ``outbox``: its name."""
    streamer = program.streamer

    def told(value: float) -> dict[str, float]:
        return {outbox: value}

    text = (
        "1 for the streamer that sends. 0 for one that stands by, and when its lease has ended: it does not reach"
        " Redis, or its database fails."
    )
    yield gauges("outbox_streams", text, "outbox", told(program.lead.holds))
    yield counters("outbox_sent_rows", "Rows that became messages and left the outbox.", "outbox", told(streamer.sent))
    text = "Rows that could become no message and were set aside, with the reason, in refused_log_records."
    yield counters("outbox_refused_rows", text, "outbox", told(streamer.refused))
    text = "Tickets whose rows wait in the outbox for a refused one (USHER_OUTBOX_REFUSED_POLICY)."
    yield gauges("outbox_halted_tickets", text, "outbox", told(streamer.halted))
    text = (
        "Since the outbox was last sent to its end; an empty one is looked at twice a second. A new"
        " leader begins with 0."
    )
    yield gauges("outbox_behind_seconds", text, "outbox", told(behind_s(program)))
    yield from service_metrics(program.services)
