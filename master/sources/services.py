"""Intake over many ticket streams: the services that a master runs in addition when USHER_TICKET_STREAM names several
streams, or a pattern.

Each source has the same group as the work stream. Masters share the sources, find new ones, learn of new entries
(``ChangeEar``), and move them (``gatherer``) to the end of the work stream, which is the ticket stream for everything
that follows: one leader, one board, and consumers that read one inbox and one stream with one batched read, woken by
Redis, whether there is one source or a hundred thousand. The leader cuts finished entries off the work stream; the
master that gathers a source cuts it too, if asked to (``Trimmer``).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from itertools import islice

import orjson

from usher.common.base.errors import RedisTrouble
from usher.common.base.log import WARNING, event
from usher.common.doctor.collector import running_masters
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SHARDS, SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs, redis_ms
from usher.common.redis.tracking import ChangeEar
from usher.common.runtime.service import Service
from usher.master.leader.limits import BATCH
from usher.master.operations.trimming import Trimmer, retention_of, turn_s
from usher.master.settings import MasterSettings
from usher.master.sources.gatherer import Gatherer

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
        self, link: Link, shares: str, says: Callable[[], str], lease_ms: int, hold: Callable[[frozenset[int]], None]
    ) -> None:
        super().__init__()
        self._link = link
        self._shares = shares
        self._says = says
        self._lease_ms = lease_ms
        self._hold = hold
        self._me = uuid.uuid4().hex[:12].encode()
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
            event("shards_assigned", count=len(shards), before=len(self._held))
            self._held = shards
        self._hold(shards)
        return min(_LONGEST_BEAT_S, self._lease_ms / 3000)

    def on_end(self) -> None:
        self._hold(frozenset())
        with contextlib.suppress(RedisTrouble):  # the others find out when the note ends
            self._link.call("HDEL", self._shares, self._me)
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
        asked = (keys, sources, settings.ticket_field, BATCH, DISCOVER_S)
        self._gatherer = gatherer = Gatherer(make_link("gather"), *asked)
        lease_ms = int(settings.leader_lease_seconds * 1000)
        sharer = SourceSharer(make_link("share"), keys.shares, self.says, lease_ms, gatherer.hold)
        self._sources = sources
        self._watch = ChangeEar(redis_url, "master:watch", sources.prefixes(), self._heard, self._refused)
        gatherer.on_unsaid = self._watch.unsaid
        self._trimmers = []
        if settings.trim_keep != "forever":
            kept = turn_s(settings.trim_keep), retention_of(settings, work_stream=False)
            of_sources = make_link("trim-sources"), lambda: gatherer.rounds.mine
            self._trimmers = [Trimmer(*of_sources, *kept, gathered_by=keys.group)]
        self.services: list[Service] = [gatherer, self._watch, *self._trimmers, sharer]

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
