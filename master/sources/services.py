"""Intake over many ticket streams: the services that a master runs in addition when USHER_TICKET_STREAM names several
streams, or a pattern.

Each source has the same group as the work stream. Masters share the sources, learn of new entries (``ChangeEar``,
``Discovery``), and move them (``gatherer``) to the end of the work stream, which is the ticket stream for everything
that follows: one leader, one board, and consumers that read one inbox and one stream with one batched read, woken by
Redis, whether there is one source or a hundred thousand. The leader cuts finished entries off the work stream; the
master that gathers a source cuts it too, if asked to (``trimmer``).
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from itertools import islice

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble, ReplyUnknown
from usher.common.base.log import event
from usher.common.doctor.collector import running_masters
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SHARDS, SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs, redis_ms
from usher.common.redis.tracking import ChangeEar
from usher.common.runtime.service import Service
from usher.master.leader.limits import BATCH
from usher.master.operations.trimming import retention_of, turn_s
from usher.master.settings import MasterSettings
from usher.master.sources.gatherer import Gatherer
from usher.master.sources.trimmer import SourceTrimmer

log = logging.getLogger(__name__)

#: Seconds between two SCANs for streams that match a pattern, beside what Redis notifies of.
DISCOVER_S = 30.0
_SCAN_COUNT = 1000
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


class Discovery(Service):
    """Service that finds the streams that match the patterns and were there before a change of them was heard: at the
    start, when something may have been missed, and from time to time; and those that are gone. With names alone there
    is nothing to find, and it is not started."""

    name = "discover"

    def __init__(self, link: Link, keys: Keys, sources: SourceSelection, gatherer: Gatherer, every_s: float) -> None:
        super().__init__()
        self._link = link
        self._gathered = keys.gathered
        self._sources = sources
        self._gatherer = gatherer
        self._every_s = every_s
        self._due_s = 0.0
        self._asked = threading.Event()

    def scan_now(self) -> None:
        self._asked.set()
        self.wake()

    def run_once(self) -> float:
        if self._asked.is_set() or now_s() >= self._due_s:
            self._asked.clear()  # a request from here on wants another scan
            self._due_s = 0.0  # a scan that fails is made again
            self._gatherer.doubt()
            fresh = self.look(self._link, self)
            self._recall()
            if not self.stopping:
                self._gatherer.forget_doubted()
            self._due_s = now_s() + self._every_s
            if fresh:
                event(log, "sources_discovered", count=fresh)
        return 0.0 if self._asked.is_set() else max(0.0, min(self._due_s - now_s(), self.stalls_after_s / 3))

    def look(self, link: Link, asker: Service) -> int:
        """Tell the gatherer of all streams that there are, on the thread of ``asker``. Return how many it did not
        know."""
        fresh = 0
        for pattern in self._sources.patterns:
            cursor = b""
            while cursor != b"0" and not asker.stopping:
                words = ("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", _SCAN_COUNT, "TYPE", "stream")
                cursor, keys = link.call(*words)
                fresh += self._gatherer.found(key for key in keys if self._sources.takes(key))
                asker.made_progress()
        return fresh

    def _recall(self) -> None:
        """Have sources that were gathered once looked at too: so a stream that was deleted while nobody gathered is
        forgotten (lua/sources/gather.lua)."""
        cursor = b"0"
        while not self.stopping:
            cursor, flat = self._link.call("HSCAN", self._gathered, cursor, "COUNT", _SCAN_COUNT)
            self._gatherer.found(key for key in flat[::2] if key and self._sources.takes(key))  # "" is gather.lua's own
            self.made_progress()
            if cursor == b"0":
                break


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
        self._sources, self._scan = sources, discovery.scan_now
        self._watch = ChangeEar(redis_url, "master:watch", sources.prefixes(), self._heard, self._refused)
        gatherer.on_unsaid = self._watch.unsaid
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

    def _heard(self, changed: list[bytes] | None) -> None:
        """Take changes: a stream that matches a pattern is a source from its first entry on."""
        if changed is None:
            self._gatherer.look_at_all()
            self._scan()
        else:
            self._gatherer.changed([key for key in changed if self._sources.takes(key)])

    def _refused(self, why: str) -> None:
        event(log, "source_notifications_unavailable", level=logging.WARNING, why=why)
        self._gatherer.poll()

    def says(self) -> str:
        """Return this master's report in the shares, one JSON object; common/doctor/collector.py reads it."""
        known, troubles = self._gatherer.seen()
        found = {source: (told.outcome.value.lower(), told.words) for source, told in troubles}
        for trimmer in self._trimmers:
            found = {source: ("not_trimmed", why) for source, why in trimmer.troubles()} | found
        shown = [(source.decode(errors="replace"), *told) for source, told in islice(found.items(), _SHOWN)]
        told = {"url": self.url, "setting": self._setting, "moved": self._gatherer.moved, "sources": known}
        told |= {"mode": "polling" if self._watch.why else "change-driven", "troubles": shown}
        return orjson.dumps(told).decode()
