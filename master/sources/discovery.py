"""Discovery: tells the gatherer which sources exist and which have changed.

``SourceWatch`` listens (master/sources/change_listeners.py): a stream that matches a pattern is a source from its first
entry on. ``Discovery`` scans for sources that were there before, at the start, when something may have been missed, and
from time to time; and for sources that are gone.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.tracking import TrackingRefused
from usher.common.runtime.service import Service
from usher.master.sources.change_listeners import ChangeListener
from usher.master.sources.gatherer import Gatherer

log = logging.getLogger(__name__)

_SCAN_COUNT = 1000
#: Seconds within which a change that a sweep found must be announced, or it counts as lost; and the number of lost ones
#: that shows that something in between does not announce changes (as in common/router/reading.py).
_SAID_WITHIN_S, _MOST_UNSAID = 1.0, 3


class SourceWatch(Service):
    """Service that tells the gatherer which sources change. ``make_poll_listener``: makes the listener for a server
    that does not announce changes."""

    name = "watch"

    def __init__(
        self,
        listener: ChangeListener,
        make_poll_listener: Callable[[], ChangeListener],
        sources: SourceSelection,
        gatherer: Gatherer,
        scan: Callable[[], None],
    ) -> None:
        super().__init__()
        self._listener = listener
        self._make_poll_listener = make_poll_listener
        self._sources = sources
        self._gatherer = gatherer
        self._scan = scan
        self.mode = "change-driven"
        # source -> when a sweep found it unannounced; set by the gatherer's thread
        self._unsaid: dict[bytes, float] = {}
        self._lost: Counter[bytes] = Counter()  # how many changes of each source were not announced
        gatherer.on_unsaid = self._found_unsaid

    def _found_unsaid(self, sources: list[bytes]) -> None:
        for source in sources:
            self._unsaid.setdefault(source, now_s())

    def run_once(self) -> float:
        try:
            changed = self._listener.listen()
            # Before ``_judge``: from here on no sweep takes these for unannounced, and one that did so before is
            # forgiven.
            if changed is None:
                self._gatherer.look_at_all()
            else:
                self._gatherer.changed([key for key in changed if self._sources.takes(key)])
            self._judge(changed)
        except TrackingRefused as refused:
            if not self.stopping:
                event(log, "source_notifications_unavailable", level=logging.WARNING, why=str(refused))
                self._listener.close()
                self._listener, self.mode = self._make_poll_listener(), "polling"
            return 0.0
        if changed is None:
            self._scan()
        return 0.0

    def _judge(self, changed: list[bytes] | None) -> None:
        """Judge whether changes are announced. Raises TrackingRefused when too many were not. After a new connection,
        the count begins anew."""
        if changed is None or self.mode == "polling":
            self._unsaid.clear()
            self._lost.clear()
            return
        for source in changed:
            self._unsaid.pop(source, None)
            # It is announced: a change that came too late, or was moved by another master, is no loss.
            self._lost.pop(source, None)
        late = [source for source, found_s in list(self._unsaid.items()) if now_s() - found_s > _SAID_WITHIN_S]
        for source in late:
            self._unsaid.pop(source, None)
        self._lost.update(late)
        if self._lost.total() >= _MOST_UNSAID:
            raise TrackingRefused(f"{self._lost.total()} changes were not announced")

    def interrupt(self) -> None:
        self._listener.interrupt()

    def on_end(self) -> None:
        self._listener.close()


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
