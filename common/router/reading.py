"""The two ways to read what a router's subscriptions want.

Change-driven: Redis says on one connection which keys have changed (``ChangeWatch``), and on another one a read without
waiting brings just those (``StreamReader``). What changes during a read is read by the next one, so that the reads grow
with the load. Unannounced changes (a connection that broke, a proxy that drops messages) are found by a sweep: of
everything after every connect, and by a slow one that never ends.

Portable: every reader takes the streams whose turn it is, asks for all of them with one XREAD, and puts them back at
the end of the queue. It needs only XREAD; its price is that an entry waits until its stream's turn comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from usher.common.base.clock import now_s
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.tracking import ChangeEar, TrackingRefused
from usher.common.router.desk import RouterCoordinator, RouterOptions
from usher.common.router.schedule import Read
from usher.common.runtime.service import Service, ServiceEnded

#: Seconds until a reader that has nothing to read looks again; where Redis announces changes, it is woken.
_IDLE_S, _LONGEST_IDLE_S = 0.2, 1.0


class ChangeWatch(Service):
    """Service that has announced changes read. ``on_refused`` is called, once, when Redis cannot announce changes or
    does not do so reliably; the service has then ended."""

    name = "router-hear"

    def __init__(
        self, ear: ChangeEar, desk: RouterCoordinator, wake: Callable[[], None], on_refused: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._ear = ear
        self._desk = desk
        self._wake_readers = wake
        self._on_refused = on_refused
        self._refused = ""

    def run_once(self) -> float:
        try:
            changed = self._ear.listen()
            with self._desk.lock:
                if changed is None:
                    self._desk.book.want_all()
                else:
                    self._desk.counters["announced"] += self._desk.book.announced(changed)
            if changed != []:
                self._wake_readers()
            self._ear.judge(changed)
        except TrackingRefused as refused:
            self._refused = str(refused)
            raise ServiceEnded from None
        return 0.0

    def interrupt(self) -> None:
        self._ear.interrupt()

    def on_end(self) -> None:
        self._ear.close()
        if self._refused and not self.stopping:
            self._on_refused(self._refused)


class StreamReader(Service):
    """Service that reads what the schedule says. ``unannounced`` is told of streams in which a sweep found entries."""

    def __init__(
        self,
        name: str,
        link: Link,
        desk: RouterCoordinator,
        options: RouterOptions,
        unannounced: Callable[[list[bytes]], None],
    ) -> None:
        super().__init__()
        self.name = name
        self._link = link
        self._desk = desk
        self._options = options
        self._unannounced = unannounced
        self._connections = 0
        self._sweep_at_s = now_s() + _LONGEST_IDLE_S

    def run_once(self) -> float:
        options, in_turn = self._options, self._desk.book.in_turn
        self._look_again(in_turn)
        reads = self._desk.take(options.xread_streams)
        if not reads:
            return _IDLE_S if in_turn else max(0.0, min(_LONGEST_IDLE_S, self._sweep_at_s - now_s()))
        return self._read(reads, in_turn, options.xread_block_millis if in_turn else None)

    def _read(self, reads: Sequence[Read], in_turn: bool, block_ms: int | None) -> float:
        command = self._desk.read_command(reads, block_ms)
        try:
            found = dict(self._link.call(*command, block_s=(block_ms or 0) / 1000) or ())
        except CommandRefused as refused:
            if len(reads) == 1:
                self._desk.refused(reads[0], refused)
            for at, read in enumerate(reads if len(reads) > 1 else ()):  # one of the streams makes the read of all fail
                try:
                    self._read([read], in_turn, None)
                except BaseException:
                    self._desk.failed(reads[at + 1 :])
                    raise
            return 0.0
        except BaseException:
            self._desk.failed(reads)
            raise
        if not in_turn and (swept := [read for read in reads if read.swept and read.stream.key in found]):
            with self._desk.lock:
                self._unannounced([read.stream.key for read in swept if not self._desk.book.heard_of(read)])
        self._desk.came(reads, found)
        return _IDLE_S / 4 if in_turn and block_ms is None and not found else 0.0

    def interrupt(self) -> None:
        self._link.interrupt()

    def _look_again(self, in_turn: bool) -> None:
        """Have all read after a new connection, behind which may be another server, and, of those that are read when
        they change, some all the same."""
        now, book = now_s(), self._desk.book
        if self._link.connections != self._connections:
            if self._connections:
                with self._desk.lock:
                    book.want_all()
            self._connections = self._link.connections
        if not in_turn and now >= self._sweep_at_s:
            every_s = min(_LONGEST_IDLE_S, self._options.sweep_seconds)
            with self._desk.lock:
                book.sweep(math.ceil(len(book.streams) * every_s / self._options.sweep_seconds))
            self._sweep_at_s = now + every_s
