"""Intake over many ticket streams: the services that a master runs in addition when USHER_TICKET_STREAM names several
streams, or a pattern.

Each source has the same group as the work stream. Masters share the sources (``shards``), learn of new entries
(``discovery``), and move them (``gatherer``) to the end of the work stream, which is the ticket stream for everything
that follows: one leader, one board, and consumers that read one inbox and one stream with one batched read, woken by
Redis, whether there is one source or a hundred thousand. The leader cuts finished entries off the work stream; the
master that gathers a source cuts it too, if asked to (``trimmer``).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from itertools import islice

import orjson

from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.tracking import TrackingLink
from usher.common.runtime.service import Service
from usher.master.leader.limits import BATCH
from usher.master.operations.trimming import TRIM_S, retention_of
from usher.master.settings import MasterSettings
from usher.master.sources.change_listeners import PollListener, PushListener
from usher.master.sources.discovery import Discovery, SourceWatch
from usher.master.sources.gatherer import Gatherer, GatherPlan
from usher.master.sources.shards import ShardAssigner
from usher.master.sources.trimmer import SourceTrimmer

_TIMEOUT_S = 5.0
#: Seconds between two SCANs for streams that match a pattern, beside what Redis notifies of.
DISCOVER_S = 30.0
#: Most troubles that a master reports to the others.
_SHOWN = 20


class SourceServices:
    """The services of gathering. ``url``: where people reach this master; it is known when the master listens."""

    def __init__(
        self,
        settings: MasterSettings,
        sources: SourceSelection,
        keys: Keys,
        redis_url: str,
        make_link: Callable[[str], Link],
    ) -> None:
        self.url = settings.advertise_url
        self._setting = f"{settings.ticket_stream} (tickets: {settings.ticket_field} per {settings.ticket_scope})"
        self._gathers_all = settings.ticket_scope == "group"  # lua/sources/share.lua looks at it
        holder = uuid.uuid4().hex[:12]
        plan = GatherPlan(settings.ticket_field, settings.ticket_scope, BATCH)
        self._gatherer = gatherer = Gatherer(make_link("gather"), keys, holder, sources, plan)
        lease_ms = int(settings.leader_lease_seconds * 1000)
        sharer = ShardAssigner(make_link("share"), keys, holder, self.says, lease_ms, gatherer.hold)
        discovery = Discovery(make_link("discover"), keys, sources, gatherer, DISCOVER_S)
        listener = PushListener(TrackingLink(redis_url, "master:watch", _TIMEOUT_S), sources.prefixes())
        self._watch = SourceWatch(
            listener, lambda: PollListener(make_link("watch"), gatherer.mine), sources, gatherer, discovery.scan_now
        )
        self._trimmers = []
        if settings.trim_keep != "forever":
            trim = make_link("trim-sources")
            retention = retention_of(settings, work_stream=False)
            self._trimmers = [SourceTrimmer(trim, keys.group, gatherer, TRIM_S, retention)]
        self.services: list[Service] = [
            gatherer,
            self._watch,
            *([discovery] if sources.patterns else []),
            *self._trimmers,
            sharer,
        ]

    def says(self) -> str:
        """Return this master's report in the shares, one JSON object; common/doctor/source_status.py reads it."""
        known, troubles = self._gatherer.seen()
        found = {source: (told.outcome.value.lower(), told.words) for source, told in troubles}
        for trimmer in self._trimmers:
            found = {source: ("not_trimmed", why) for source, why in trimmer.troubles()} | found
        shown = [(source.decode(errors="replace"), *told) for source, told in islice(found.items(), _SHOWN)]
        told = {"url": self.url, "setting": self._setting, "mode": self._watch.mode, "moved": self._gatherer.moved}
        told |= {"gathers_all": self._gathers_all, "sources": known, "troubles": shown}
        return orjson.dumps(told).decode()
