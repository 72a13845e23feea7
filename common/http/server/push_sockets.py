"""Connections that stay open and are only written to, thousands of them on one thread.

The HTTP server gives a connection away when its head is written (``DETACH``); from then on it costs a descriptor and a
few hundred bytes. Who does not read what is sent loses the connection: it can come back and say where it was.
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable

from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.common.runtime.service import Service

log = logging.getLogger(__name__)

#: In the environ of a request: ``detach(keeper)`` gives the connection to ``keeper`` once the answer, whose end then
#: nothing marks, is written.
DETACH = "usher.detach"

#: How often it is looked who was idle for how long.
_LOOK_S, _HEARTBEAT_S = 1.0, 15.0
_MOST_BYTES = 262_144
#: Not now; over TLS it has other names.
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class LiveSocket:
    """An open connection. ``send`` and ``close`` may be called from any thread. ``unwritten``: bytes that were sent
    and are not written yet."""

    __slots__ = (
        "_owner",
        "_socket",
        "_waiting",
        "_waiting_bytes",
        "closed",
        "idle_since_s",
        "on_closed",
        "on_written",
        "unwritten",
        "watched",
        "who",
    )

    def __init__(
        self,
        owner: LiveSockets,
        sock: socket.socket,
        who: str,
        on_closed: Callable[[], None],
        on_written: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._socket = sock
        self.who = who
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self.closed = False
        self.idle_since_s = now_s()
        self.on_closed = on_closed
        self.on_written = on_written
        self.unwritten = 0  # changed under the owner's lock
        self.watched = selectors.EVENT_READ

    def send(self, data: bytes) -> None:
        """Write ``data`` as soon as the other side takes it."""
        with self._owner.lock:
            self.unwritten += len(data)
        self._owner.post(self, data)

    def close(self) -> None:
        """End the connection, after what was sent, if the other side takes that at once."""
        self.closed = True
        self._owner.post(self, b"")

    # -- on the owner's thread

    def add(self, data: bytes) -> None:
        if data:
            self._waiting.append(data)
            self._waiting_bytes += len(data)

    @property
    def file(self) -> socket.socket:
        return self._socket

    @property
    def is_slow(self) -> bool:
        """By what waits behind that which is being written: this alone may be larger, and would be so again for who
        comes back for it."""
        being_written = len(self._waiting[0]) if self._waiting else 0
        return self._waiting_bytes - being_written > _MOST_BYTES

    @property
    def has_more(self) -> bool:
        return bool(self._waiting)

    def write(self) -> bool:
        """Write what can be written now; False when the other side has gone."""
        try:
            while self._waiting:
                data = self._waiting[0]
                sent = self._socket.send(data)
                self._waiting_bytes -= sent
                with self._owner.lock:
                    self.unwritten -= sent
                if sent < len(data):
                    self._waiting[0] = data[sent:]
                    break
                self._waiting.popleft()
        except _LATER:
            pass
        except OSError:
            return False
        return True

    def is_there(self) -> bool:
        """Return True while the other side is connected; what it sends is read and dropped."""
        try:
            return bool(self._socket.recv(4096))
        except _LATER:
            return True
        except OSError:
            return False


class LiveSockets(Service):
    """All of them, up to ``most``, of which one caller may have half. ``heartbeat`` gives what is sent to one that was
    idle for a while, so that its end is noticed."""

    name = "live"

    def __init__(self, most: int, heartbeat: bytes = b":\n\n") -> None:
        super().__init__()
        self._most = most
        self._heartbeat = heartbeat
        self.lock = threading.Lock()  # of all counts of unwritten bytes
        self._posted: deque[tuple[LiveSocket, bytes]] = deque()
        self._bell: socket.socket | None = None
        self._rung = False
        # Only of the service's own thread: made by its first turn, so that nothing is left of one that was never
        # started.
        self._ear: socket.socket
        self._selector: selectors.BaseSelector
        self._open: dict[LiveSocket, None] = {}
        self._by_caller: Counter[str] = Counter()
        self._look_s = 0.0
        self.slow = 0

    def has_room(self, who: str) -> bool:
        """Return True while one more may come from the caller ``who``; "": callers are not told apart. Approximate:
        several that come at once may be too many."""
        its_most = max(1, self._most // 2) if who else self._most
        return not self.stopping and len(self._open) < self._most and self._by_caller[who] < its_most

    @property
    def count(self) -> int:
        return len(self._open)

    def keep(
        self,
        sock: socket.socket,
        who: str,
        on_closed: Callable[[], None],
        on_written: Callable[[], None] = lambda: None,
    ) -> LiveSocket:
        """Take a connection of the caller ``who``. On the thread of this service ``on_closed`` is called once, when it
        is gone, and ``on_written`` whenever nothing waits to be written any more."""
        sock.setblocking(False)
        live = LiveSocket(self, sock, who, on_closed, on_written)
        self.post(live, b"")
        return live

    def post(self, live: LiveSocket, data: bytes) -> None:
        """``data`` is to be written. From any thread."""
        self._posted.append((live, data))
        self.interrupt()

    def interrupt(self) -> None:
        bell = self._bell
        if bell is not None and not self._rung:
            self._rung = True
            try:
                bell.send(b"!")
            except OSError:
                pass  # it is full of rings, or closed

    def run_once(self) -> float:
        if self._bell is None:
            self._begin()
            return 0.0  # who asked for the end meanwhile had no bell to ring
        for key, events in self._selector.select(
            0.0 if self._posted else _LOOK_S if self._open else self.stalls_after_s / 3
        ):
            if key.fileobj is self._ear:
                self._ear.recv(4096)
                self._rung = (
                    False  # not before: a ring that comes meanwhile is received too, and nobody would ring again
                )
                continue
            live: LiveSocket = key.data
            if events & selectors.EVENT_READ and not live.is_there():
                self._end(live)
            elif events & selectors.EVENT_WRITE:
                self._write(live)
        self._read_posted()
        now = now_s()
        if now - self._look_s >= _LOOK_S:
            self._look_s = now
            for live in [one for one in self._open if now - one.idle_since_s > _HEARTBEAT_S]:
                live.send(self._heartbeat)
        return 0.0

    def on_end(self) -> None:
        """Write what was sent, as far as the sockets take it, and close all."""
        if self._bell is None:
            self._begin()
        self._read_posted()
        for live in list(self._open):
            self._end(live)
        assert self._bell is not None
        self._selector.close()
        self._bell.close()
        self._ear.close()

    def _begin(self) -> None:
        self._selector = selectors.DefaultSelector()
        bell, self._ear = socket.socketpair()
        bell.setblocking(False)
        self._ear.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._bell = bell

    def _read_posted(self) -> None:
        touched: dict[LiveSocket, None] = {}
        for _ in range(len(self._posted)):
            live, data = self._posted.popleft()
            if live.file.fileno() >= 0:  # else it has ended already
                live.add(data)
                touched[live] = None
        for live in touched:
            if live not in self._open:
                self._open[live] = None
                self._by_caller[live.who] += 1
                self._selector.register(live.file, live.watched, live)
            self._write(live)

    def _write(self, live: LiveSocket) -> None:
        live.idle_since_s = now_s()
        there = live.write()
        if there and live.is_slow:
            self.slow += 1
            event(log, "reader_too_slow", level=logging.WARNING)
        if not there or live.closed or live.is_slow:
            self._end(live)
            return
        watched = selectors.EVENT_READ | (selectors.EVENT_WRITE if live.has_more else 0)
        if watched != live.watched:
            live.watched = watched
            self._selector.modify(live.file, watched, live)
        if not live.has_more:
            live.on_written()

    def _end(self, live: LiveSocket) -> None:
        if self._open.pop(live, self) is self:
            return
        self._by_caller[live.who] -= 1
        self._by_caller += Counter()  # those of whom nothing is left go
        self._selector.unregister(live.file)
        live.closed = True
        try:
            live.file.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was first
        live.file.close()
        live.on_closed()
