"""The connections of ``usher.common.http.server.worker``, and what its loop waits for itself, so that a client that
takes its time holds no thread."""

from __future__ import annotations

import fcntl
import math
import re
import selectors
import socket
import ssl
import sys
import time
from collections.abc import Callable
from selectors import BaseSelector
from typing import Any

from gunicorn.http import errors as http_errors

#: Seconds one write may take.
WRITE_S = 10.0
#: Room that is asked for, for an answer above some bytes: the system doubles it for its own use, and often allows 208
#: KiB.
_ROOM, _ABOVE = 262_144, 4096
#: Bytes of a request's first line, and of its head, above which it is clear what it is answered.
_LINE_BYTES, _MOST_BYTES = 2050, 12_288
#: Bytes of a body that has to be there, too, before a thread is asked to answer.
SMALL_BODY = 4096
_FRAMING = re.compile(rb"\r\n(content-length|transfer-encoding|expect):[ \t]*0*([0-9]{0,5})", re.IGNORECASE)
_PIECE = 8192
#: Linux: how many bytes the other side has not been sent yet, and a bound of those below which a connection counts as
#: ready for more; the usual one.
_SIOCOUTQNSD = 0x894B
_ALL_SENT, _USUAL = 1, 0
#: Linux: the state of a connection that was reset.
_TCP_CLOSE = 7
#: Not now; over TLS it has other names.
LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Late(http_errors.ParseException):
    """The request did not arrive in time."""


class Deadlined(socket.socket):
    """A connection whose reads end at a deadline (``time.monotonic``), however slowly bytes trickle in."""

    deadline_s: float | None = None
    #: Gets the connection when its answer is written, instead of its being closed.
    keeper: Callable[[socket.socket], None] | None = None
    #: What was read of the next request before a thread asked for it.
    early = b""
    was_stuck = False

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        if self.early:
            read, self.early = self.early[:size], self.early[size:]
            return read
        if self.deadline_s is None:
            return super().recv(size, flags)
        left = self.deadline_s - time.monotonic()
        if left <= 0:
            raise Late
        self.settimeout(left)
        try:
            return super().recv(size, flags)
        except TimeoutError:
            raise Late from None
        finally:
            self.settimeout(WRITE_S)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """What the system keeps holds no thread, whoever reads it. Over a network it has room for 13 to 70 KB by
        itself, until it knows how fast."""
        if len(data) > _ABOVE and self.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 2 * _ROOM:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        super().sendall(data, flags)

    def setblocking(self, flag: bool, /) -> None:
        """A thread waits for no write longer than that, whether it has read before or not."""
        self.settimeout(WRITE_S if flag else 0.0)

    def is_endless(self) -> bool:
        """Whether what has come of a head is more than any may have."""
        return len(self.early) > _MOST_BYTES and b"\r\n\r\n" not in self.early

    def take_ahead(self) -> bytes:
        """What was read of the next request: no poller tells of it any more."""
        ahead, self.early = self.early, b""
        return ahead

    def has_request(self) -> bool:
        """Read what has come, without a wait. Whether a thread would not have to wait either: a head and its small body
        are there, or nothing more will come."""
        while not _can_be_judged(self.early):
            try:
                read = super().recv(_PIECE)
            except LATER:
                return False
            except OSError:
                return True
            if not read:
                return True
            self.early += read
        return True

    def is_stuck(self) -> bool:
        """Whether the other side has yet to take what was written: then it is ready for writing no sooner. Raises
        OSError when it is gone."""
        try:
            unsent = int.from_bytes(fcntl.ioctl(self.fileno(), _SIOCOUTQNSD, bytes(4)), sys.byteorder) > 0
        except (
            OSError
        ):  # not Linux, or a sandbox that does not know the question: a thread may have to wait for it then
            return False
        if unsent and self.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            raise ConnectionResetError  # what is unsent stays so, and it is always "ready"
        if unsent != self.was_stuck:
            self.was_stuck = unsent
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _ALL_SENT if unsent else _USUAL)
        return unsent


class ClientSocket(Deadlined):
    """A plain one."""


class TlsSocket(Deadlined, ssl.SSLSocket):  # type: ignore[misc]
    """One over TLS."""

    def greet(self) -> int:
        """Go on with the handshake: what the connection must be ready for first (of ``selectors``), 0 when it is done.
        Raises OSError."""
        try:
            self.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        return 0

    def take_ahead(self) -> bytes:
        ahead = super().take_ahead()
        return ahead + self.recv(self.pending()) if self.pending() else ahead


def _can_be_judged(come: bytes) -> bool:
    """Whether it is a whole head with its small body, or one that is refused whatever follows.

    >>> [_can_be_judged(come) for come in (b"", b"G", b"GET / HTTP/1.1\\r\\nHost:", b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\nbody")]
    [False, False, False, True]
    >>> [_can_be_judged(come) for come in (b"GET / HTTP/1.1\\n", b"G" * 2051)]
    [True, True]
    >>> [_can_be_judged(b"POST / HTTP/1.1\\r\\nContent-Length: 3\\r\\n\\r\\n" + body) for body in (b"a\\n", b"abc")]
    [False, True]
    """
    head, end, body = come.partition(b"\r\n\r\n")
    if end:
        return len(body) >= _small_body(head)
    lines = come.count(b"\r\n")
    return come.count(b"\n") != lines or len(come) > (_MOST_BYTES if lines else _LINE_BYTES)


def _small_body(head: bytes) -> int:
    """How long a small body will be. 0: there is none, or only a thread may wait for it.

    >>> [_small_body(b"POST / HTTP/1.1\\r\\n" + lines) for lines in (b"Host: a", b"content-length:004096", b"Content-Length: 4097")]
    [0, 4096, 0]
    >>> [_small_body(b"POST / HTTP/1.1\\r\\nContent-Length: 1\\r\\n" + line) for line in (b"Expect: 100-continue", b"Content-Length: 2")]
    [0, 0]
    """
    framing = _FRAMING.findall(head)
    if len(framing) != 1 or framing[0][0].lower() != b"content-length":
        return 0
    length = int(framing[0][1] or 0)
    return length if length <= SMALL_BODY else 0


class Waits:
    """Connections that wait on the loop, each until its deadline. Of the loop's thread alone."""

    def __init__(self) -> None:
        self._late: dict[Any, tuple[float, BaseSelector, Callable[[], None]]] = {}

    @property
    def first_s(self) -> float:
        """The first deadline."""
        return min((late[0] for late in self._late.values()), default=math.inf)

    def add(
        self,
        conn: Any,
        poller: BaseSelector,
        events: int,
        ends_s: float,
        ready: Callable[[], None],
        late: Callable[[], None],
    ) -> None:
        """``ready`` is called when the connection is, or else ``late`` at ``ends_s``; it waits no longer then."""

        def is_ready(_socket: object) -> None:
            poller.unregister(conn.sock)
            del self._late[conn]
            ready()

        poller.register(conn.sock, events, is_ready)
        self._late[conn] = (ends_s, poller, late)

    def hurry(self) -> None:
        """All are late from now on."""
        self._late = {conn: (-math.inf, poller, late) for conn, (_, poller, late) in self._late.items()}

    def end_late(self, now: float) -> None:
        """End the wait of those that are late at ``now``."""
        for conn, (ends_s, poller, late) in list(self._late.items()):
            if ends_s <= now:
                poller.unregister(conn.sock)
                del self._late[conn]
                late()
