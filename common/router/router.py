"""``StreamRouter``: any number of streams on a handful of connections.

Two modes. *change-driven*: two connections; on one Redis says which keys have changed (``ChangeEar``), on the other one
read without waiting brings just those. What changes during a read is read by the next one, so that the reads grow with
the load. Unannounced changes (a connection that broke, a proxy that drops messages) are found by a sweep: of everything
after every connect, and by a slow one that never ends.

*portable*, where Redis does not announce changes: every reader takes the streams whose turn it is, asks for all of them
with one XREAD, and puts them back at the end of the queue, so an entry waits until its stream's turn comes.

What a subscription may rely on: docs/plain-streams.md.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from usher.common.base.callables import unawaitable_reason
from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble, UsherError
from usher.common.base.log import event
from usher.common.observability.metrics import Reader
from usher.common.protocol.message import key_bytes
from usher.common.protocol.stream_id import ZERO, from_rank, is_id, rank
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.endpoints import in_reach
from usher.common.redis.tracking import ChangeEar
from usher.common.router.desk import (
    COUNTS,
    Callback,
    End,
    Read,
    RouterDesk,
    RouterOptions,
    Subscription,
    last_id_of,
)
from usher.common.runtime.service import Service

log = logging.getLogger(__name__)

_AT_ONCE, _PAUSE_S = 1000, 0.1
#: Seconds until a reader that has nothing to read looks again; where Redis announces changes, it is woken.
_IDLE_S, _LONGEST_IDLE_S = 0.2, 1.0


class _Now(Enum):
    NOW = "now"


#: Given instead of an id: begin from now on.
NOW = _Now.NOW


class Mode(Enum):
    CHANGE_DRIVEN = "change-driven"
    PORTABLE = "portable"


#: What it counts of the present, too.
_COUNTS_NOW = {"streams": "Streams with subscriptions.", "queued": "Streams to be read.", "connections": "Connections."}


class StreamReader(Service):
    """Service that reads what the desk says. ``unannounced`` is told of streams in which a sweep found entries."""

    def __init__(
        self,
        name: str,
        link: Link,
        desk: RouterDesk,
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
        self._check_at_s = now_s() + options.check_seconds
        self._sweep_at_s = now_s() + _LONGEST_IDLE_S

    def run_once(self) -> float:
        options, in_turn = self._options, self._desk.in_turn
        self._look_again(in_turn)
        reads = self._desk.take(options.xread_streams)
        if not reads:
            return _IDLE_S if in_turn else max(0.0, min(_LONGEST_IDLE_S, self._sweep_at_s - now_s()))
        try:
            return self._read(reads, in_turn, options.xread_block_millis if in_turn else None)
        except RedisTrouble:
            if self._link.connections != self._connections:  # behind the next one may be a server with fewer entries
                self._connections = self._link.connections
                with self._desk.lock:
                    self._desk.want_all()
            raise

    def _read(self, reads: Sequence[Read], in_turn: bool, block_ms: int | None) -> float:
        command = self._desk.read_command(reads, block_ms)
        try:
            found = dict(self._link.call(*command, block_s=(block_ms or 0) / 1000) or ())
        except CommandRefused as refused:
            if len(reads) == 1:
                self._desk.refused(reads[0].of, refused)
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
        if not in_turn and (swept := [read for read in reads if read.swept and read.of.key in found]):
            with self._desk.lock:
                self._unannounced([read.of.key for read in swept if not self._desk.heard_of(read)])
        if checks := self._desk.came(reads, found):
            try:
                replies = self._link.pipeline([("XINFO", "STREAM", one.key) for one, _ in checks])
            except RedisTrouble as trouble:
                self._desk.checked(checks, [trouble] * len(checks))
                raise
            self._desk.checked(checks, replies)
        return _IDLE_S / 4 if in_turn and block_ms is None and not found else 0.0

    def interrupt(self) -> None:
        self._link.interrupt()

    def _look_again(self, in_turn: bool) -> None:
        """Have streams checked whose ids may have gone back, and, of those that are read when they change, some read
        all the same."""
        now, desk = now_s(), self._desk
        if now >= self._check_at_s:
            self._check_at_s = now + self._options.check_seconds
            with self._desk.lock:
                desk.check_all()
        if not in_turn and now >= self._sweep_at_s:
            every_s = min(_LONGEST_IDLE_S, self._options.sweep_seconds)
            with self._desk.lock:
                desk.sweep(math.ceil(desk.open * every_s / self._options.sweep_seconds))
            self._sweep_at_s = now + every_s


class StreamRouter(Reader):
    """Reads many streams for many subscriptions; may be used from any thread. Call ``start`` before anything is
    delivered and ``stop`` at the end (or use ``with``); subscribing is possible before ``start``.

    ``prefixes``: only keys that begin with one of these can be subscribed to, and Redis announces only their changes;
    none: all keys, which on a server with much other traffic is wasted work. No prefix may be the beginning of another.
    ``mode`` PORTABLE: even where Redis announces changes.
    """

    kind, told = "router", COUNTS | _COUNTS_NOW

    def __init__(
        self,
        url: str,
        *,
        name: str = "usher",
        mode: Mode = Mode.CHANGE_DRIVEN,
        prefixes: Sequence[str] = (),
        options: RouterOptions | None = None,
    ) -> None:
        self._url = url
        self._options = options or RouterOptions()
        self._prefixes = tuple(prefix.encode() for prefix in prefixes)
        if any(one is not other and one.startswith(other) for one in self._prefixes for other in self._prefixes):
            raise ValueError("no prefix may be the beginning of another")
        self._desk = RouterDesk(self._options.xread_count)
        self._lock = threading.Lock()
        self._stopped = False
        #: The mode in use, and the reason when it is not the requested one.
        self.mode, self.why = mode, ""
        self._watch = ChangeEar(url, f"{name}:router-hear", self._prefixes, self._heard, self._fall_back)
        self._readers = [
            StreamReader(one, Link(url, f"{name}:{one}"), self._desk, self._options, self._watch.unsaid)
            for one in (f"router-{number}" for number in range(1, self._options.worker_count + 1))
        ]
        self._ask, self._asking = Link(url, f"{name}:router-ask"), threading.Lock()
        self._desk.in_turn = mode is Mode.PORTABLE
        self._desk.on_work = self._ring
        self.labels = {"router": name}
        self.show()

    def start(self) -> None:
        with self._lock:
            for service in self.services:
                service.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        with self._lock:
            self._stopped = True
        for service in (self._watch, *self._readers):
            service.stop()
        for service in (self._watch, *self._readers):
            service.join(timeout_s)
        with self._asking:
            self._ask.close()
        self._desk.close_all(End.ROUTER_STOPPED)

    def __enter__(self) -> StreamRouter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def subscribe(
        self,
        key: str | bytes,
        last_id: str | bytes | _Now | None = None,
        *,
        on_entries: Callback | None = None,
        capacity: int = 1000,
    ) -> Subscription:
        """Subscribe to entries of the stream ``key`` above ``last_id``; None: from the beginning; NOW: entries that are
        added after this call.

        The stream need not exist. Instead of iteration, ``on_entries(subscription, entries)`` is called with new ones.
        ``capacity``: most entries in the channel; while it is full the rest waits in Redis. Raises ValueError for an
        impossible id or key, TypeError for an ``on_entries`` that a call does not run (``async def``), and with NOW
        RedisTrouble when Redis does not tell the end of the stream within 5 s.
        """
        [subscription] = self.subscribe_all([key], last_id, on_entries=on_entries, capacity=capacity)
        return subscription

    def subscribe_all(
        self,
        keys: Iterable[str | bytes],
        last_id: str | bytes | _Now | None = None,
        *,
        on_entries: Callback | None = None,
        capacity: int = 1000,
        timeout_s: float = 5.0,
    ) -> list[Subscription]:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        if self._stopped:
            raise UsherError("this router was stopped")
        if on_entries is not None and (kind := unawaitable_reason(on_entries)):
            raise TypeError(f"on_entries is {kind}: give a plain function")
        names = [self._key(key) for key in keys]
        given = self._position(last_id)
        made: list[Subscription] = []
        for at in range(0, len(names), _AT_ONCE):  # in parts: nothing is delivered while the lock is held
            part = names[at : at + _AT_ONCE]
            lasts = self._ends(part, timeout_s) if last_id is NOW else [given] * len(part)
            with self._desk.lock:
                for name, last in zip(part, lasts, strict=True):
                    made.append(Subscription(self._desk, name, last, on_entries, capacity))
                    self._desk.add(made[-1], check=last_id is not NOW)
            self._desk.on_work()
        return made

    def _ends(self, names: Sequence[bytes], timeout_s: float) -> list[bytes]:
        """Return where these streams end now."""
        until_s = now_s() + timeout_s
        while True:
            try:
                with self._asking:
                    replies = self._ask.pipeline([("XINFO", "STREAM", name) for name in names])
                # What cannot be read is refused when it is read.
                return [ZERO if isinstance(one, CommandRefused) else last_id_of(one) or ZERO for one in replies]
            except RedisTrouble as trouble:
                if now_s() + _PAUSE_S > until_s:
                    raise RedisTrouble(f"Redis did not say where these streams end: {trouble}") from trouble
                time.sleep(_PAUSE_S)

    def metrics(self) -> dict[str, float]:
        with self._desk.lock:
            now = {"streams": len(self._desk.by_key), "queued": self._desk.queued}
            return {**self._desk.counters, **now, "connections": len(self.services)}

    @property
    def services(self) -> Sequence[Service]:
        return tuple(self._readers) if self._desk.in_turn else (self._watch, self._readers[0])

    # -- inside

    def _key(self, key: str | bytes) -> bytes:
        name = key_bytes("the key of a stream", key)
        if self._prefixes and not name.startswith(self._prefixes):
            raise ValueError(f"{name.decode(errors='replace')} begins with none of the prefixes of this router")
        if not in_reach(self._url, name):
            raise ValueError(
                f"{name.decode(errors='replace')} lies in another slot of the cluster than the router's (give them one"
                " hash tag)"
            )
        return name

    @staticmethod
    def _position(last_id: str | bytes | _Now | None) -> bytes:
        if last_id is None or isinstance(last_id, _Now):
            return ZERO
        given = last_id.encode() if isinstance(last_id, str) else bytes(last_id)
        given = given if b"-" in given else given + b"-0"
        if not is_id(given.decode(errors="replace")):
            raise ValueError(
                "a stream id looks like 1526919030474-55, and a part of it is at most 18446744073709551615"
            )
        return from_rank(rank(given))

    def _ring(self) -> None:
        for reader in self._readers:
            reader.wake()

    def _heard(self, changed: list[bytes] | None) -> None:
        with self._desk.lock:
            if changed is None:
                self._desk.want_all()
            else:
                self._desk.announced(changed)
        if changed != []:
            self._ring()

    def _fall_back(self, why: str) -> None:
        """Switch to the portable mode."""
        with self._lock:
            if self._stopped:
                return
            event(log, "router_fell_back_to_polling", level=logging.WARNING, mode=Mode.PORTABLE.value, why=why)
            with self._desk.lock:
                self._desk.in_turn = True
                self._desk.want_all()
            self.mode, self.why = Mode.PORTABLE, why
            for reader in self._readers[1:]:
                reader.start()
            self._ring()
