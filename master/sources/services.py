"""Intake over many ticket streams: the services that a master runs in addition when USHER_TICKET_STREAM names several
streams, or a pattern.

Each source has the same group as the work stream. Masters share the sources, find new ones, learn of new entries
(``ChangeEar``), and move them (``gatherer``) to the end of the work stream, which is the ticket stream for everything
that follows: one leader, one board, and consumers that read one inbox and one stream with one batched read, woken by
Redis, whether there is one source or a hundred thousand. The leader cuts finished entries off the work stream; the
master that gathers a source cuts it too, if asked to (``Trimmer``).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import orjson

from usher.common.base.log import WARNING, event
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.tracking import ChangeEar
from usher.common.runtime.service import Service
from usher.master.leader.limits import BATCH
from usher.master.operations.trimming import Trimmer, retention_of, turn_s
from usher.master.settings import MasterSettings
from usher.master.sources.gatherer import Gatherer

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
        self._setting = f"{settings.ticket_stream} (tickets: {settings.ticket_field})"
        asked = (keys, sources, settings.ticket_field, BATCH, DISCOVER_S, int(settings.leader_lease_seconds * 1000))
        self._gatherer = gatherer = Gatherer(make_link("gather"), *asked)
        self._sources = sources
        self._watch = ChangeEar(redis_url, "master:watch", sources.prefixes(), self._heard, self._refused)
        gatherer.on_unsaid, gatherer.says = self._watch.unsaid, self.says
        self._trimmers = []
        if settings.trim_keep != "forever":
            kept = turn_s(settings.trim_keep), retention_of(settings, work_stream=False)
            of_sources = make_link("trim-sources"), lambda: gatherer.rounds.mine
            self._trimmers = [Trimmer(*of_sources, *kept, gathered_by=keys.group)]
        self.services: list[Service] = [gatherer, self._watch, *self._trimmers]

    def _heard(self, changed: list[bytes] | None) -> None:
        """Take changes: a stream that matches a pattern is a source from its first entry on."""
        if changed is None:
            self._gatherer.look_at_all()
        else:
            self._gatherer.changed([key for key in changed if self._sources.takes(key)])

    def _refused(self, why: str) -> None:
        event("source_notifications_unavailable", level=WARNING, why=why)
        self._gatherer.poll()

    def says(self) -> str:
        """Return this master's report in the shares, one JSON object; common/doctor/collector.py reads it."""
        rounds = self._gatherer.rounds
        found = {source: (told.outcome.value.lower(), told.words) for source, told in list(rounds.troubles.items())}
        for trimmer in self._trimmers:
            found = {source: ("not_trimmed", why) for source, why in trimmer.troubles()} | found
        shown = [(source.decode(errors="replace"), *told) for source, told in islice(found.items(), _SHOWN)]
        told = {"url": self.url, "setting": self._setting, "moved": self._gatherer.moved, "sources": rounds.known}
        told |= {"mode": "polling" if self._watch.why else "change-driven", "troubles": shown}
        return orjson.dumps(told).decode()
