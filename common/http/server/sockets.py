"""Sockets for gunicorn's ``gthread`` worker that keep bounds which it does not have; the worker stays as it is.

=======================================  =============================================================================
gunicorn with plain sockets              with these
=======================================  =============================================================================
a thread waits for a client for ever     a request must be there 10 s after a thread began to read it, and each write
                                         may take 10 s
an accept without a free descriptor      it does not (``connection_not_accepted``); the connection waits for one. 25.3
ends the worker                          and later need one more for each new connection: for want of that, some are
                                         closed without an answer
an address may have every connection     it may have ``per_address`` of them; more are closed
26 and later: a close waits up to 2 s    a close reads what is there already, and waits for nobody
for the client, on the only loop
a connection is gunicorn's               ``give_away`` takes it out of gunicorn's hands (``push_sockets.py``)
=======================================  =============================================================================
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import ssl
import time
from typing import Any, cast

from usher.common.base.log import event

log = logging.getLogger(__name__)

#: Seconds a request may take to arrive, head and body together, once a thread reads it; and one write.
REQUEST_S, WRITE_S = 10.0, 10.0
#: The process, or the machine, has no descriptors or no memory for one more connection; and seconds until the next try.
_NO_ROOM, _NO_ROOM_S = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM), 0.05
#: Pieces of what a client still says at the end that are read, and their bytes.
_PIECES, _PIECE = 16, 65_536

#: The other side of each connection, by descriptor. An entry outlives its connection until the number is used again, or
#: somebody counts.
_peers: dict[int, Any] = {}


class Bounded(socket.socket):
    """A connection for which no thread waits for long."""

    #: By ``time.monotonic``: when the request that is being read has to be there.
    ends_s: float | None = None
    given_away = False

    def setblocking(self, flag: bool, /) -> None:
        """Set by gunicorn: True when a thread takes the connection to read a request, False when its loop does to wait
        for one."""
        if not self.given_away:
            self.ends_s = time.monotonic() + REQUEST_S
            self.settimeout(WRITE_S if flag else 0.0)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        if self.given_away:
            return b""
        wait_s = self.gettimeout()
        if not wait_s:
            return super().recv(size, flags)
        if self.ends_s is None:  # TLS: this object is younger than gunicorn's setblocking
            self.ends_s = time.monotonic() + REQUEST_S
        left_s = self.ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request did not arrive in time")
        self.settimeout(min(wait_s, left_s))
        try:
            return super().recv(size, flags)
        finally:
            self.settimeout(wait_s)

    def shutdown(self, how: int, /) -> None:
        """Refuse: gunicorn would wait on its loop for the client to close. It closes instead, and ``close`` does what
        is needed."""
        raise OSError(errno.ENOTCONN, "close does it")

    def close(self) -> None:
        if not self.given_away:
            if self.fileno() >= 0:
                self.linger(0.0)
            super().close()

    def linger(self, wait_s: float) -> None:
        """Say that nothing more comes, and read what the client still sends: closing with unread input would reset the
        last answer."""
        ends_s = time.monotonic() + wait_s
        try:
            socket.socket.shutdown(self, socket.SHUT_WR)
            for _ in range(_PIECES):
                self.settimeout(max(0.0, ends_s - time.monotonic()))
                if not socket.socket.recv(self, _PIECE):
                    break
        except OSError:
            pass  # it has gone, or is silent

    def give_away(self) -> socket.socket:
        """Return the connection for its new owner. Whatever gunicorn still does to this object does nothing."""
        _peers.pop(self.fileno(), None)
        self.given_away = True
        return cast(socket.socket, _Kept(self))


class _Kept:
    """A connection that was given away, with the methods that it had without ``Bounded``."""

    def __init__(self, connection: Bounded) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(super(Bounded, self._connection), name)


class TlsConnection(Bounded, ssl.SSLSocket):  # type: ignore[misc]
    """A connection over TLS (``SSLContext.sslsocket_class``)."""


class Listener(socket.socket):
    """The listening socket ``fd``. It accepts ``per_address`` connections from one address, but for loopback, where a
    proxy may be."""

    def __init__(self, fd: int, per_address: int) -> None:
        super().__init__(fileno=fd)
        self._per_address = per_address

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises the OSErrors that gunicorn takes for "not now"."""
        try:
            plain, peer = super().accept()
        except OSError as trouble:
            if trouble.errno not in _NO_ROOM:
                raise
            event(log, "connection_not_accepted", level=logging.WARNING, problem=trouble.strerror)
            time.sleep(
                _NO_ROOM_S
            )  # whoever waits to be accepted wakes the loop again at once, so it must not be in a hurry
            raise BlockingIOError(errno.EAGAIN, "no descriptor is free") from trouble
        if not is_loopback(peer[0]) and _count(peer[0], self._per_address) >= self._per_address:
            event(log, "connection_refused", level=logging.DEBUG, address=peer[0])
            plain.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, "the address has as many connections as it may have")
        connection = Bounded(plain.family, plain.type, plain.proto, fileno=plain.detach())
        _peers[connection.fileno()] = peer
        return connection, peer


def is_loopback(address: str) -> bool:
    """Tell whether it is an address of this machine that no other machine can have."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _count(address: str, enough: int) -> int:
    """Count the open connections of ``address``. Up to ``enough`` those that have ended may be counted too, which costs
    no system call."""
    theirs = {fd: peer for fd, peer in _peers.copy().items() if peer[0] == address}
    if len(theirs) < enough:
        return len(theirs)
    for fd, peer in list(theirs.items()):
        if _peer_of(fd) != peer:
            del theirs[fd]
            _peers.pop(fd, None)
    return len(theirs)


def _peer_of(fd: int) -> Any:
    """Return the other side of whatever ``fd`` is now; None when it is no connection."""
    try:
        found = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        return found.getpeername()
    except OSError:
        return None
    finally:
        found.detach()
