"""The streamer program: its parts, put together in one place, and its web interface, if it is asked for: health and
metrics. The work does not depend on that."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from prometheus_client.core import Metric

from usher.common.base.clock import now_s
from usher.common.base.errors import StartRefused
from usher.common.base.log import event
from usher.common.http import app as web
from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials
from usher.common.http.serve import Liveness
from usher.common.observability.metrics import Metrics, counters, gauges, service_metrics
from usher.common.outbox.store import OutboxStore
from usher.common.protocol.keys import LogKeys
from usher.common.redis.client import CommandRefused, Link
from usher.common.runtime.service import Health, Service, judge, stalled
from usher.common.runtime.settings import is_loopback
from usher.master.leader.elector import Elector, Lead
from usher.master.settings import StreamerSettings
from usher.master.streamer.streamer import Pace, Streamer, log

_JOIN_S = 5.0
_TURNS_PER_LEASE = 4
#: Seconds without an answer of the database after which the program ends, for the next one to try another connection;
#: at least as many leases. The lease ends long before; a slow database must not be begun anew again and again.
_PATIENCE_S, _PATIENCE_LEASES = 15.0, 3
_ANOTHER = "an outbox of another database is streamed under this name: give each a USHER_OUTBOX_NAME of its own"


class StreamerProgram:
    """A streamer with its lease, as usher.common.http.serve runs it, too. ``streamer_class`` lets the rides demo put in
    one that makes mistakes; ``pace``: what is not among the settings."""

    def __init__(
        self,
        settings: StreamerSettings,
        redis_url: str,
        streamer_class: type[Streamer] = Streamer,
        pace: Pace = Pace(),  # noqa: B008  (it cannot change)
    ) -> None:
        if not settings.outbox_url:
            raise StartRefused(
                "USHER_OUTBOX_URL is not set: name the database that has the outbox there, or with --outbox-url"
            )
        self._settings = settings
        self.lease_s = lease_s = pace.lease_s
        self._stopping = False
        store = OutboxStore(settings.outbox_url)
        link = Link(redis_url, "streamer:stream", max(1.0, lease_s))
        try:
            store.check()
            if settings.outbox_wait_aof:
                _check_waitaof(link)
        except BaseException:  # the caller gets no program that it could close
            link.close()
            store.close()
            raise
        keys = LogKeys(settings.one_stream, settings.outbox_name)
        self.lead = lead = Lead()
        self._identity = store.identity
        self._warned = False
        # An idle streamer takes a turn in time to hold its lease.
        pace = pace._replace(
            poll_s=min(pace.poll_s, lease_s / _TURNS_PER_LEASE),
            replicas=settings.outbox_wait_replicas,
            on_disk=settings.outbox_wait_aof,
            halts=settings.outbox_refused_policy == "halt",
        )
        self.streamer = streamer_class(link, keys, lead, store, settings.ticket_field, pace)
        self.streamer.stalls_after_s = max(self.streamer.stalls_after_s, 2 * pace.poll_s)
        elect_link = Link(redis_url, "streamer:elect", max(0.2, lease_s / 3))
        holder = f"{platform.node()}:{os.getpid()}:{store.identity}"
        self._elector = Elector(elect_link, keys, lead, holder, int(lease_s * 1000), self._works)
        lead.on_change, lead.on_doubt = self._lead_changed, self._elector.wake
        self.services: list[Service] = [self.streamer, self._elector]
        event(log, "streamer_starting", stream=settings.one_stream, database=store.dialect)

    def start(self, *_address: object) -> None:
        for service in self.services:
            service.start()

    def stop(self) -> None:
        """Stop the work first, then give up the lease, so that another streamer goes on at once."""
        self._stopping = True
        for service in self.services:
            service.stop()
            service.join(_JOIN_S)
        event(log, "streamer_stopped", sent=self.streamer.sent)

    @property
    def alive(self) -> bool:
        return not self._hangs and all(service.alive for service in self.services)

    @property
    def _hangs(self) -> str:
        silent_s = now_s() - (self.streamer.last_turn_s or now_s())
        is_over = silent_s > max(_PATIENCE_S, _PATIENCE_LEASES * self.lease_s)
        return f"the database has not answered for {silent_s:.0f} s" if is_over else ""

    @property
    def behind_s(self) -> float:
        """Return the seconds since a look at the outbox last found no more than was sent then; 0 for a streamer that
        stands by, or cannot know whether it leads."""
        return max(0.0, now_s() - self.streamer.caught_up_s) if self.lead.holds else 0.0

    @property
    def another_leads(self) -> bool:
        """Return whether a streamer of another database leads under our outbox' name, so that ours is never sent."""
        leader = self.lead.leader_url
        return leader is not None and leader.rpartition(":")[2] != self._identity

    @cached_property
    def app(self) -> Any:
        settings, metrics = self._settings, Metrics()
        metrics.add(lambda: streamer_metrics(self, settings.outbox_name))
        guard = Doorman(Credentials(settings.api_token, settings.tokens_file))
        app = web.create_app(__name__, guard, max_body=0, hosts=hosts_of(settings))
        web.add_health(app, self._health, self._facts, lambda: self._stopping, lambda: self.liveness().stalled)
        web.add_metrics(app, metrics)
        return app

    def liveness(self) -> Liveness:
        """Return how long this streamer may be silent, and whether its elector stands still, or a thread has ended, or
        its database does not answer."""
        lease_s, elector = self.lease_s, self.services[-1]
        ended = ", ".join(f"{service.name} has ended" for service in self.services if not service.alive)
        return Liveness(
            max(elector.stalls_after_s, lease_s), ended or self._hangs or stalled([elector], now_s(), lease_s)
        )

    def _health(self) -> Health:
        """Return the health; a standby is healthy. A database's messages may have rows in them: they are for the log
        alone."""
        reasons = map(web.in_brief, judge(self.services, now_s()).reasons)
        return Health((*reasons, *((_ANOTHER,) if self.another_leads else ())))

    def _facts(self) -> dict[str, Any]:
        return {
            "role": "streamer",
            "name": self._settings.outbox_name,
            "stream": self._settings.one_stream,
            "streams": self.lead.holds,
            "sent": self.streamer.sent,
            "refused": self.streamer.refused,
            "behind_seconds": round(self.behind_s, 1),
        }

    def _lead_changed(self) -> None:
        self.streamer.wake()
        if self.another_leads and not self._warned:
            self._warned = True
            name, leader = self._settings.outbox_name, self.lead.leader_url
            event(log, "outbox_name_in_use", level=logging.ERROR, name=name, leader=leader)

    def _works(self) -> bool:
        """Return whether the streamer makes progress: only then is the lease extended, so that where its database fails
        it another streamer takes over that may reach it better. While it stops, the last batch keeps the lease."""
        if why := self._hangs:
            event(log, "outbox_database_timeout", level=logging.WARNING, why=why, do="this streamer ends")
        return self._stopping or (self.streamer.alive and now_s() - self.streamer.worked_s < self.lease_s)


def _check_waitaof(link: Link) -> None:
    try:
        link.call("WAITAOF", 1, 0, 1)
    except CommandRefused as refused:
        raise StartRefused(
            f"USHER_OUTBOX_WAIT_AOF: this Redis has no WAITAOF, or has its append-only file off ({refused}). Before"
            " 7.2, `appendfsync always` does the same: Redis answers when the entries are on disk"
        ) from refused


def hosts_of(settings: StreamerSettings) -> tuple[str, ...]:
    """Return the hosts that requests may name; empty: any. A page of somewhere else can make its own name lead to
    127.0.0.1 (DNS rebinding). Where a token is required, that gains it nothing."""
    asked = settings.api_token or settings.tokens_file
    return () if asked or not is_loopback(settings.outbox_bind) else (web.ANY_ADDRESS, "localhost")


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
        "Since the outbox was last sent to its end; an empty one is looked at five times a second. A"
        " new leader begins with 0."
    )
    yield gauges("outbox_behind_seconds", text, "outbox", told(program.behind_s))
    yield from service_metrics(program.services)
