"""Discovery: tells the gatherer which sources exist and which have changed.

``SourceWatch`` hears of changes: a stream that matches a pattern is a source from its first entry on. ``Discovery``
scans for sources that were there before, at the start, when something may have been missed, and from time to time; and
for sources that are gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.tracking import ChangeEar, TrackingRefused
from usher.common.runtime.service import Service
from usher.master.sources.gatherer import Gatherer

log = logging.getLogger(__name__)

_SCAN_COUNT = 1000
#: Seconds between two looks at all sources of our shards, where Redis does not announce changes.
_POLL_S = 0.5


class SourceWatch(Service):
    """Service that tells the gatherer which sources change."""

    name = "watch"

    def __init__(self, ear: ChangeEar, sources: SourceSelection, gatherer: Gatherer, scan: Callable[[], None]) -> None:
        super().__init__()
        self._ear = ear
        self._sources = sources
        self._gatherer = gatherer
        self._scan = scan
        self.mode = "change-driven"
        gatherer.on_unsaid = ear.unsaid

    def run_once(self) -> float:
        if self.mode == "polling":
            self._gatherer.changed(self._gatherer.mine())
            return _POLL_S
        try:
            changed = self._ear.listen()
            # Before ``judge``: from here on no sweep takes these for unannounced, and one that did so before is
            # forgiven.
            if changed is None:
                self._gatherer.look_at_all()
            else:
                self._gatherer.changed([key for key in changed if self._sources.takes(key)])
            self._ear.judge(changed)
        except TrackingRefused as refused:
            if not self.stopping:
                event(log, "source_notifications_unavailable", level=logging.WARNING, why=str(refused))
                self._ear.close()
                self.mode, self._gatherer.on_unsaid = "polling", lambda sources: None
            return 0.0
        if changed is None:
            self._scan()
        return 0.0

    def interrupt(self) -> None:
        self._ear.interrupt()

    def on_end(self) -> None:
        self._ear.close()


class Discovery(Service):
    """Service that finds streams that match the patterns. With names alone there is nothing to find, and it is not
    started."""

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
