"""The two ways to read what a router's subscriptions want.

Change-driven: Redis says which keys have changed, and one read without waiting brings just those. One thread, one
connection. One request is under way at a time; what changes meanwhile is read by the next one, so that the reads grow
with the load. Unannounced changes (a connection that broke, a proxy that drops messages) are found by a sweep: of
everything after every connect, and by a slow one that never ends. The slow one also asks for an answer at least once a
second, which reveals a dead connection.

Portable: every reader takes the streams whose turn it is, asks for all of them with one XREAD, and puts them back at
the end of the queue. It needs only XREAD; its price is that an entry waits until its stream's turn comes.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, RedisTrouble, ReplyUnknown
from usher.common.base.log import event
from usher.common.redis.client import ELSEWHERE, Arg, CommandRefused, Link
from usher.common.redis.tracking import KeysChanged, TrackingLink, TrackingRefused
from usher.common.router.desk import RouterCoordinator, RouterOptions, as_found, last_id_command
from usher.common.router.schedule import LastIdCheck, Read
from usher.common.runtime.service import Service, ServiceEnded

log = logging.getLogger(__name__)

#: Pause of a polling reader that does not block, or has nothing to read, in seconds.
_IDLE_S = 0.05
#: Most streams whose last id is asked for at once.
_MOST_ASKED = 500
#: Changes that were found without an announcement, on one connection, after which announcements are not trusted any
#: more.
_MOST_UNANNOUNCED = 3
_REPLY_S = 5.0
#: Streams of one step of the slow pass, and the shortest time between two steps.
_AT_ONCE, _SHORTEST_S = 250, 0.05


class ChangeDrivenReader(Service):
    """Reads what Redis announces. ``on_refused`` is called, once, when Redis cannot announce changes or does not do so
    reliably; the service has then ended."""

    name = "router"

    def __init__(
        self,
        link: TrackingLink,
        desk: RouterCoordinator,
        options: RouterOptions,
        prefixes: Sequence[bytes],
        on_refused: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._link = link
        self._desk = desk
        self._options = options
        self._prefixes = tuple(prefixes)
        self._on_refused = on_refused
        self._bell: socket.socket | None = None
        self._rung = False
        # Used only by the service's own thread, like all below; opened by its first turn, so that a service that was
        # never started leaves nothing behind.
        self._selector: selectors.BaseSelector
        self._ear: socket.socket
        # Requests that have no answer yet.
        self._asked: deque[Callable[[Any], None]] = deque()
        self._asked_at_s = 0.0
        self._checks: list[LastIdCheck] = []
        self._alone: list[Read] = []
        self._next_sweep_s = 0.0
        self._next_check_s = 0.0
        self._pass_checks = False
        self._unannounced: tuple[set[bytes], set[bytes]] = (set(), set())
        self._lost = 0
        self._not_now: Exception | None = None
        self._refused = ""

    def ring(self) -> None:
        """Tell the reader that there is work; from any thread, and cheap when a ring is already pending."""
        bell = self._bell
        if bell is not None and not self._rung:
            self._rung = True
            try:
                bell.send(b"!")
            except OSError:
                pass  # it is full of rings already, or closed

    interrupt = ring

    def run_once(self) -> float:
        if self._bell is None:
            self._open()
            return 0.0  # a stop that was asked for meanwhile had no bell to ring
        if self._link.has_moved:
            self._forget()
        if not self._link.connected:
            self._connect()
        try:
            self._turn()
        except ReplyUnknown:
            self._desk.counters["breaks"] += 1
            self._forget()
            raise
        except NotNow as refused:
            if refused.kind in ELSEWHERE:
                self._link.misled()
                self._forget()  # the next connection goes where the server is now
            raise
        if self._refused:
            self._give_up(self._refused)
        return 0.0

    def _open(self) -> None:
        self._selector = selectors.DefaultSelector()
        bell, self._ear = socket.socketpair()
        bell.setblocking(False)
        self._ear.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._bell = bell

    def on_end(self) -> None:
        if self._bell is not None:
            self._forget()
            self._selector.close()
            self._bell.close()
            self._ear.close()
        if self._refused and not self.stopping:
            self._on_refused(self._refused)

    # -- the connection

    def _connect(self) -> None:
        try:
            self._link.connect(self._prefixes)
        except TrackingRefused as refused:
            self._give_up(str(refused))
        self._desk.counters["connects"] += 1
        self._selector.register(self._link.socket, selectors.EVENT_READ)
        self._unannounced, self._lost = (set(), set()), 0
        self._next_sweep_s = now_s() + 1.0
        with self._desk.lock:
            self._desk.book.want_all()

    def _give_up(self, why: str) -> None:
        self._refused = why
        raise ServiceEnded

    def _forget(self) -> None:
        asked, self._asked = self._asked, deque()
        self._checks.clear()
        lost = ReplyUnknown("the connection broke")
        for answer in asked:
            answer(lost)
        self._desk.failed(self._alone)
        self._alone.clear()
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._ear:
                self._selector.unregister(key.fileobj)
        self._link.disconnect()

    # -- one turn

    def _turn(self) -> None:
        now = now_s()
        if not self._asked:
            self._sweep(now)
            self._ask(now)
        elif now - self._asked_at_s > _REPLY_S:
            raise ReplyUnknown(f"Redis has not answered for {_REPLY_S:g} s")
        wait_s = _REPLY_S / 4 if self._asked else max(0.0, min(1.0, self._next_sweep_s - now))
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._ear:
                self._ear.recv(4096)
                # Not earlier: a ring that comes meanwhile is received too, and no further one would follow.
                self._rung = False
            else:
                self._hear(self._link.receive())
        trouble, self._not_now = self._not_now, None
        if trouble is not None:
            raise trouble  # after all that was heard with it

    def _hear(self, messages: Sequence[Any]) -> None:
        for message in messages:
            if isinstance(message, KeysChanged):
                self._announced(message.keys)
            elif self._asked:
                self._asked.popleft()(message)

    def _announced(self, keys: list[bytes] | None) -> None:
        with self._desk.lock:
            self._desk.counters["announced"] += self._desk.book.announced(keys)
        for suspects in self._unannounced:
            if suspects:
                suspects.difference_update(keys or suspects.copy())

    def _sweep(self, now: float) -> None:
        """Take one step of the slow pass over all streams, and judge what the last steps found: an announcement had a
        second to arrive."""
        if now < self._next_sweep_s:
            return
        young, old = self._unannounced
        self._unannounced = (set(), young)
        if old:
            self._lost += len(old)
            self._desk.counters["unannounced"] += len(old)
            event(log, "change_notification_missed", level=logging.WARNING, streams=len(old))
            if self._lost >= _MOST_UNANNOUNCED:
                self._refused = f"{self._lost} changes were not announced"
        with self._desk.lock:
            book = self._desk.book
            size, every_s = sweep_slice(len(book.streams), self._options.sweep_seconds)
            if book.sweep(size, self._pass_checks):
                self._pass_checks = now >= self._next_check_s
                if self._pass_checks:
                    self._next_check_s = now + self._options.check_seconds
        self._next_sweep_s = now + max(every_s, _SHORTEST_S)

    # -- requests

    def _ask(self, now: float) -> None:
        """Send the next request, if there is reason for one: first what was refused in company, then checks, positions
        and reads."""
        commands = self._of_alone() or self._of_checks() or self._of_places() or self._of_reads()
        if commands:
            self._asked_at_s = now
            self._link.send(commands)

    def _of_reads(self) -> list[tuple[Arg, ...]]:
        reads = self._desk.take(self._options.xread_streams)
        if not reads:
            return []
        self._asked.append(lambda reply: self._read(reads, reply))
        return [self._desk.read_command(reads)]

    def _read(self, reads: list[Read], reply: Any) -> None:
        if isinstance(reply, CommandRefused):
            self._alone = reads  # one of them makes all fail: read each by itself
        elif isinstance(reply, Exception):
            self._desk.failed(reads)
            self._not_now = reply if isinstance(reply, NotNow) else None
        else:
            found = as_found(reply)
            with self._desk.lock:
                swept = [read for read in reads if read.swept and read.stream.key in found]
                self._unannounced[0].update(read.stream.key for read in swept if not self._desk.book.heard_of(read))
            self._checks += self._desk.came(reads, found, announced=True)

    def _of_alone(self) -> list[tuple[Arg, ...]]:
        alone, self._alone = self._alone, []
        for read in alone:
            self._asked.append(lambda reply, read=read: self._read_alone(read, reply))  # type: ignore[misc]
        return [self._desk.read_command([read]) for read in alone]

    def _read_alone(self, read: Read, reply: Any) -> None:
        if isinstance(reply, NotNow):
            self._not_now = reply
        self._checks += self._desk.came_alone(read, reply)

    def _of_checks(self) -> list[tuple[Arg, ...]]:
        checks, self._checks = self._checks[:_MOST_ASKED], self._checks[_MOST_ASKED:]
        for check in checks:
            self._asked.append(lambda reply, check=check: self._desk.checked([check], [reply]))  # type: ignore[misc]
        return [last_id_command(check.stream) for check in checks]

    def _of_places(self) -> list[tuple[Arg, ...]]:
        places = self._desk.take_unplaced(_MOST_ASKED)
        for asked in places:
            self._asked.append(lambda reply, asked=asked: self._desk.placed([asked], [reply]))  # type: ignore[misc]
        return [last_id_command(stream) for stream, _ in places]


def sweep_slice(streams: int, pass_s: float) -> tuple[int, float]:
    """Return how many streams to look at, and how often (s), for a pass over all streams in ``pass_s``: a little once a
    second; of many streams, a few hundred at a time, because changed ones wait meanwhile.

    >>> sweep_slice(600, 60.0), sweep_slice(60_000, 60.0)
    ((10, 1.0), (250, 0.25))
    """
    per_second = streams / pass_s
    if per_second <= _AT_ONCE:
        size = max(1, min(streams, math.ceil(per_second)))
        return size, min(1.0, pass_s * size / max(1, streams))
    every_s = max(_SHORTEST_S, _AT_ONCE / per_second)
    return math.ceil(per_second * every_s), every_s


class PollingReader(Service):
    def __init__(self, name: str, link: Link, desk: RouterCoordinator, options: RouterOptions) -> None:
        super().__init__()
        self.name = name
        self._link = link
        self._desk = desk
        self._options = options
        self._connections = 0
        self._check_at_s = now_s() + options.check_seconds

    ring = Service.wake

    def run_once(self) -> float:
        # Behind another connection may be another server, with fewer entries.
        if self._link.connections != self._connections or now_s() >= self._check_at_s:
            self._connections = self._link.connections
            self._check_at_s = now_s() + self._options.check_seconds
            self._desk.check_all()
        self._place()
        reads = self._desk.take(self._options.xread_streams)
        if not reads:
            return _IDLE_S * 4
        block_ms = self._options.xread_block_millis
        command = self._desk.read_command(reads, block_ms)
        try:
            try:
                reply = self._link.call(*command, block_s=(block_ms or 0) / 1000)
                alone = None
            except CommandRefused:  # one of the streams makes the read of all fail: read each by itself
                alone = self._link.pipeline([self._desk.read_command([read]) for read in reads])
        except BaseException:
            self._desk.failed(reads)
            raise
        if alone is not None:
            each = zip(reads, alone, strict=True)
            self._checked([check for read, one in each for check in self._desk.came_alone(read, one)])
            for one in alone:
                if isinstance(one, NotNow):
                    raise one  # a pause, then again
            return 0.0
        found = as_found(reply)
        self._checked(self._desk.came(reads, found, announced=False))
        return _IDLE_S if block_ms is None and not found else 0.0

    def interrupt(self) -> None:
        self._link.interrupt()

    def _checked(self, checks: Sequence[LastIdCheck]) -> None:
        if checks:
            try:
                replies = self._link.pipeline([last_id_command(check.stream) for check in checks])
            except RedisTrouble as trouble:
                self._desk.checked(checks, [trouble] * len(checks))
                raise
            self._desk.checked(checks, replies)

    def _place(self) -> None:
        asked = self._desk.take_unplaced(_MOST_ASKED)
        if not asked:
            return
        try:
            replies = self._link.pipeline([last_id_command(stream) for stream, _ in asked])
        except RedisTrouble:
            self._desk.not_placed([stream for stream, _ in asked])
            raise
        self._desk.placed(asked, replies)
