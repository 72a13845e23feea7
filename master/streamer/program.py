"""The streamer program: its parts, put together in one place."""

from __future__ import annotations

import logging
import os
import platform

from usher.common.base.clock import now_s
from usher.common.base.errors import StartRefused
from usher.common.base.log import event
from usher.common.outbox.store import OutboxStore
from usher.common.protocol.keys import LogKeys
from usher.common.redis.client import CommandRefused, Link
from usher.common.runtime.service import Service
from usher.master.leader.elector import Elector, Lead
from usher.master.settings import StreamerSettings
from usher.master.streamer.streamer import CommitWatcher, Pace, Streamer, log

_JOIN_S = 5.0
_TURNS_PER_LEASE = 4
#: Seconds of silence after which another connection is tried because the database has not answered; at least as many
#: leases. The lease ends long before; a slow database must not be begun anew again and again.
_PATIENCE_S, _PATIENCE_LEASES = 15.0, 3


class StreamerProgram:
    """A streamer with its lease and its commit notifier: start, stop. ``streamer_class`` lets the rides demo put in one
    that makes mistakes; ``pace``: what is not among the settings."""

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
        self._store = store
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
        bell = store.bell()
        self.services: list[Service] = [
            self.streamer,
            *([CommitWatcher(bell, self.streamer)] if bell else []),
            self._elector,
        ]
        event(log, "streamer_starting", stream=settings.one_stream, database=store.dialect, bell=bell is not None)

    def start(self) -> None:
        for service in self.services:
            service.start()

    def stop(self) -> None:
        """Stop the work first, then give up the lease, so that another streamer goes on at once."""
        self._stopping = True
        for service in self.services[:-1]:
            service.stop()
        for service in self.services[:-1]:
            service.join(_JOIN_S)
        self._elector.stop()
        self._elector.join(_JOIN_S)
        event(log, "streamer_stopped", sent=self.streamer.sent)

    @property
    def alive(self) -> bool:
        return all(service.alive for service in self.services)

    @property
    def another_leads(self) -> bool:
        """Return whether a streamer of another database leads under our outbox' name, so that ours is never sent."""
        leader = self.lead.leader_url
        return leader is not None and leader.rpartition(":")[2] != self._identity

    def _lead_changed(self) -> None:
        self.streamer.wake()
        if self.another_leads and not self._warned:
            self._warned = True
            do = "give each outbox of this stream a USHER_OUTBOX_NAME of its own"
            event(
                log,
                "outbox_name_in_use",
                level=logging.ERROR,
                name=self._settings.outbox_name,
                leader=self.lead.leader_url,
                do=do,
            )

    def _works(self) -> bool:
        """Return whether the streamer makes progress: only then is the lease extended, so that where its database fails
        it another streamer takes over that may reach it better. While it stops, the last batch keeps the lease."""
        lease_s, now = self.lease_s, now_s()
        silent_s = now - (self.streamer.last_turn_s or now)
        if silent_s > max(_PATIENCE_S, _PATIENCE_LEASES * lease_s) and self._store.interrupt():
            event(
                log,
                "outbox_database_timeout",
                level=logging.WARNING,
                silent_s=round(silent_s, 1),
                do="its connection is ended, and another one made",
            )
        return self._stopping or (self.streamer.alive and now - self.streamer.worked_s < lease_s)


def _check_waitaof(link: Link) -> None:
    try:
        link.call("WAITAOF", 1, 0, 1)
    except CommandRefused as refused:
        raise StartRefused(
            f"USHER_OUTBOX_WAIT_AOF: this Redis has no WAITAOF, or has its append-only file off ({refused}). Before"
            " 7.2, `appendfsync always` does the same: Redis answers when the entries are on disk"
        ) from refused
