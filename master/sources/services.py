"""Intake over many ticket streams: the services that a master runs in addition when USHER_TICKET_STREAM names several
streams, or a pattern.

Each source has the same group as the work stream. Masters share the sources, learn of new entries
(``discovery``), and move them (``gatherer``) to the end of the work stream, which is the ticket stream for everything
that follows: one leader, one board, and consumers that read one inbox and one stream with one batched read, woken by
Redis, whether there is one source or a hundred thousand. The leader cuts finished entries off the work stream; the
master that gathers a source cuts it too, if asked to (``trimmer``).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from itertools import islice

import orjson

from usher.common.base.errors import RedisTrouble, ReplyUnknown
from usher.common.base.log import event
from usher.common.doctor.source_status import running_masters
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SHARDS, SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs, redis_ms
from usher.common.redis.tracking import ChangeEar
from usher.common.runtime.service import Service
from usher.master.leader.limits import BATCH
from usher.master.operations.trimming import retention_of, turn_s
from usher.master.settings import MasterSettings
from usher.master.sources.discovery import Discovery, SourceWatch
from usher.master.sources.gatherer import Gatherer
from usher.master.sources.trimmer import SourceTrimmer

log = logging.getLogger(__name__)

#: Seconds between two SCANs for streams that match a pattern, beside what Redis notifies of.
DISCOVER_S = 30.0
_LONGEST_BEAT_S = 1.0
#: Most troubles that a master reports to the others.
_SHOWN = 20


class SourceSharer(Service):
    """Service that notes that this master runs, and tells ``hold`` which shards are its own: an even part for each
    master that runs, whether it leads or stands by. ``says``: what the note tells of it.

    Shares only spread the work: to gather a source twice moves nothing twice, so masters may disagree for a beat. Those
    of a master that dies go to the others when its note ends, those of one that stops at once.
    """

    name = "share"

    def __init__(
        self,
        link: Link,
        shares: str,
        says: Callable[[], str],
        lease_ms: int,
        hold: Callable[[frozenset[int]], None],
        name: str = "",
    ) -> None:
        super().__init__()
        self._link = link
        self._shares = shares
        self._says = says
        self._lease_ms = lease_ms
        self._hold = hold
        self._me = (name or uuid.uuid4().hex[:12]).encode()
        self._held: frozenset[int] = frozenset()

    def run_once(self) -> float:
        now_ms = redis_ms(self._link)
        note = f"{now_ms + self._lease_ms} {self._says()}"
        _, flat = self._link.all_of([("HSET", self._shares, self._me, note), ("HGETALL", self._shares)])
        notes = pairs(flat)
        masters = running_masters(notes, now_ms)
        if gone := notes.keys() - masters:
            self._link.call("HDEL", self._shares, *gone)
        shards = frozenset(range(masters.index(self._me), SHARDS, len(masters)))
        if shards != self._held:
            event(log, "shards_assigned", count=len(shards), before=len(self._held))
            self._held = shards
        self._hold(shards)
        return min(_LONGEST_BEAT_S, self._lease_ms / 3000)

    def on_end(self) -> None:
        self._hold(frozenset())
        try:
            try:
                self._link.call("HDEL", self._shares, self._me)
            except ReplyUnknown:  # a connection that broke while it was idle is noticed only now
                self._link.call("HDEL", self._shares, self._me)
        except RedisTrouble as trouble:  # the others find out when the note ends
            event(log, "shards_not_released", level=logging.WARNING, problem=str(trouble))
        finally:
            self._link.close()


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
        self._gatherer = gatherer = Gatherer(make_link("gather"), keys, sources, settings.ticket_field, BATCH)
        lease_ms = int(settings.leader_lease_seconds * 1000)
        sharer = SourceSharer(make_link("share"), keys.shares, self.says, lease_ms, gatherer.hold)
        discovery = Discovery(make_link("discover"), keys, sources, gatherer, DISCOVER_S)
        gatherer.look_for_new = discovery.look
        ear = ChangeEar(redis_url, "master:watch", sources.prefixes())
        self._watch = SourceWatch(ear, sources, gatherer, discovery.scan_now)
        self._trimmers = []
        if settings.trim_keep != "forever":
            trim = make_link("trim-sources")
            retention = retention_of(settings, work_stream=False)
            self._trimmers = [SourceTrimmer(trim, keys.group, gatherer, turn_s(settings.trim_keep), retention)]
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
        told |= {"sources": known, "troubles": shown}
        return orjson.dumps(told).decode()
