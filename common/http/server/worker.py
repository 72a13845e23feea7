"""The gunicorn worker of ``usher.common.http.server.server``: one process, one loop on its main thread, a few threads
that answer HTTP.

``usher.common.http.server.server`` says what it does and why; only it may import this module.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import logging
import math
import os
import secrets
import selectors
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from http import HTTPStatus
from typing import Any

import orjson
from gunicorn.http import errors as http_errors
from gunicorn.http import get_parser
from gunicorn.sock import ssl_wrap_socket
from gunicorn.workers.gthread import ThreadWorker

from usher.common.base.log import event
from usher.common.http.server.sockets import LATER, ClientSocket, Late, TlsSocket, Waits
from usher.common.runtime.fork_guard import end_children_by
from usher.common.runtime.service import Service, ServiceEnded

log = logging.getLogger(__name__)

#: Seconds a request may take to arrive: its head, then its body.
HEAD_S, BODY_S = 5.0, 10.0
#: Seconds for a client to read our last answer, and for the rest of a body that nobody asked for.
_GOODBYE_S, _UNASKED_S = 1.0, 0.05
#: Pieces of what a client still says then that are read at a time.
_PIECES = 16
#: Seconds that the loops of arbiter and worker wait when there is nothing to wait for.
CALM_S = 5.0
#: Bytes of all headers of a request together.
HEAD_BYTES = 8190
#: The process, or the machine, has no descriptors or no memory for one more connection; and seconds until the next try.
_NO_ROOM, _NO_ROOM_S = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM), 0.05
#: The signals that end a program, all in the same way.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class _Drain(Service):
    """Runs ``Served.stop`` once."""

    name = "drain"

    def __init__(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        super().__init__()
        self._work: Callable[[], None] | None = work
        self._then = then

    def run_once(self) -> float:
        work, self._work = self._work, None
        if work is not None:
            work()  # one try: a turn that fails is logged by the service, and the next one ends it
        raise ServiceEnded

    def on_end(self) -> None:
        self._then()


class HttpWorker(ThreadWorker):
    """What is without a lock here runs on the main thread, which is gunicorn's loop."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._asked = False
        self._drain: _Drain | None = None
        self._bounds: Any = self.app.bounds
        self._addresses: Counter[str] = Counter()
        self._in_flight = 0
        self._heads, self._goodbyes = Waits(), Waits()
        self._orphaned = False
        # Never closed: threads that answer late would wake the loop through numbers that belong to other files by then.
        self.method_queue.close = lambda: None

    def get_thread_pool(self) -> futures.ThreadPoolExecutor:
        return futures.ThreadPoolExecutor(max_workers=self.cfg.threads, thread_name_prefix="http")

    # -- the end of the process

    def init_signals(self) -> None:
        super().init_signals()
        signal.signal(signal.SIGHUP, self.handle_exit)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        # What a handler or its module forks (multiprocessing does) has no loop to drain by: a signal shall end it, not
        # wake our loop.
        end_children_by(ENDING, self.handle_exit)

    def heed(self, signals: Any) -> None:
        """Take up signals that came between the fork and ``init_signals``: the arbiter's handlers put them in our copy
        of its queue."""
        while not signals.empty():
            if signals.get_nowait() in ENDING:
                self.handle_exit(0, None)

    def handle_exit(self, sig: int, frame: Any) -> None:
        # A signal handler takes no lock, so it starts no thread: the loop does.
        if not self._asked:
            self._asked = True
            self.method_queue.defer(self._begin_drain)

    handle_quit = handle_exit

    def _begin_drain(self) -> _Drain:
        if self._drain is None:
            event(log, "draining", pid=os.getpid())
            self.cfg.set("keepalive", 0)  # from now on an answer ends its connection
            self._drain = _Drain(self.app.served.stop, self._end_http)
            self._drain.start()
        return self._drain

    def drained(self, within_s: float) -> bool:
        """Whether ``Served.stop`` has returned; it is begun now if it was not before."""
        return self._begin_drain().join(within_s)

    def _end_http(self) -> None:
        self.alive = False
        self.method_queue.defer(self._close_idle)

    def _close_idle(self) -> None:
        """The loop closes them when it has dispatched all that it found: a request on one of them may be among that,
        and is answered then."""
        for connection in (*self.keepalived_conns, *self.pending_conns):
            connection.timeout = 0.0
        self._heads.hurry()

    def murder_pending(self) -> None:
        super().murder_pending()
        for waits in (self._heads, self._goodbyes):
            waits.end_late(time.monotonic())

    def init_process(self) -> None:
        os.close(self.app.life[1])
        super().init_process()

    def run(self) -> None:
        self.poller.register(self.app.life[0], selectors.EVENT_READ, self._note_orphaned)
        super().run()

    def _note_orphaned(self, life: int) -> None:
        self.poller.unregister(life)
        self._orphaned = True

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """gunicorn looks every second for connections that are late, and for its arbiter, whose end wakes us here."""
        idle_s = min(
            (conns[0].timeout for conns in (self.keepalived_conns, self.pending_conns) if conns), default=math.inf
        )
        first_s = min(idle_s, self._heads.first_s, self._goodbyes.first_s)
        timeout = max(0.0, min(CALM_S if self.alive else timeout, first_s - time.monotonic()))
        super().wait_for_and_dispatch_events(timeout)

    def is_parent_alive(self) -> bool:
        if not self._orphaned and super().is_parent_alive():
            return True
        event(log, "arbiter_gone", level=logging.WARNING, pid=os.getpid())
        self._asked = True
        self._begin_drain()
        self.alive = False  # HTTP ends now: a successor needs the port
        self._close_idle()
        return False

    # -- connections

    def accept(self, listener: Any) -> None:
        try:
            super().accept(listener)
        except OSError as trouble:
            if trouble.errno not in _NO_ROOM:
                raise
            # That would end the process and all its work. Whoever waits to be taken in wakes the loop again at once, so
            # it must not be in a hurry.
            event(log, "connection_not_accepted", level=logging.WARNING, problem=trouble.strerror)
            time.sleep(_NO_ROOM_S)

    def enqueue_req(self, conn: Any) -> None:
        if conn.initialized or conn.data_ready:
            self._gather(conn, time.monotonic() + HEAD_S)
            return
        if not self._takes(conn):
            return
        # A new connection waits in the poller for its first bytes. gunicorn lets a thread wait 5 s: eight silent ones
        # stop the service.
        plain = conn.sock
        conn.sock = ClientSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        conn.sock.setblocking(False)
        conn.timeout = time.monotonic() + HEAD_S
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, functools.partial(self.on_pending_socket_readable, conn))

    def _gather(self, conn: Any, ends_s: float, in_head: bool = True) -> None:
        """Give the connection to a thread, once it has a request's head to answer, and its body if that is small:
        whoever sends one byte of it would else hold that thread."""
        try:
            conn.sock.setblocking(False)
            awaited = self._awaited(conn)
        except ssl.SSLError as refused:  # no TLS, or none that we speak: there is no way to answer
            event(log, "tls_refused", level=logging.DEBUG, problem=refused.reason or type(refused).__name__)
            self._end(conn, graceful=True)
            return
        except OSError:
            self._end(conn)  # gone
            return
        if awaited:
            if in_head and awaited == selectors.EVENT_READ and b"\r\n\r\n" in conn.sock.early:
                in_head, ends_s = False, time.monotonic() + BODY_S
            self._heads.add(
                conn,
                self.poller,
                awaited,
                ends_s,
                lambda: self._gather(conn, ends_s, in_head),
                lambda: self._end_late(conn),
            )
        elif conn.sock.is_endless():
            self.handle_error(None, conn.sock, conn.client, http_errors.LimitRequestHeaders("all headers together"))
            self._end(conn, graceful=True)
        elif self._in_flight >= self._bounds.in_flight:
            self._turn_away(conn)
        else:
            self._in_flight += 1
            super().enqueue_req(conn)

    def _awaited(self, conn: Any) -> int:
        """What the connection must be ready for before a thread can answer without a wait; 0: nothing. Raises
        OSError."""
        if not conn.initialized:
            if self.cfg.is_ssl:
                if not isinstance(conn.sock, TlsSocket):
                    conn.sock = ssl_wrap_socket(conn.sock, self.cfg)
                if awaited := conn.sock.greet():
                    return int(awaited)
            conn.initialized, conn.parser = True, get_parser(self.cfg, conn.sock, conn.client)
        conn.sock.early = conn.parser.unreader.take_buffered() + conn.sock.early
        if not conn.sock.has_request():
            return selectors.EVENT_READ
        return selectors.EVENT_WRITE if conn.sock.is_stuck() else 0

    def _end_late(self, conn: Any) -> None:
        if conn.initialized:
            self.handle_error(None, conn.sock, conn.client, Late())
        self._end(conn, graceful=conn.initialized)

    def _end(self, conn: Any, graceful: bool = False) -> None:
        self.nr_conns -= 1
        conn.close(graceful)

    def finish_request(self, conn: Any, fs: Any) -> None:
        self._in_flight -= 1
        super().finish_request(conn, fs)

    def _takes(self, conn: Any) -> bool:
        """Count a new connection, for as long as it is open; or close it, when there are too many."""
        address = str(conn.client[0])
        counted = not _is_loopback(address)
        if self.nr_conns > self._bounds.connections or (
            counted and self._addresses[address] >= self._bounds.per_address
        ):
            event(log, "connection_refused", level=logging.DEBUG, address=address)
            self.nr_conns -= 1
            conn.close()
            return False
        self._addresses[address] += counted

        def close(graceful: bool = False) -> None:
            if graceful and not getattr(conn, "given_away", False):
                self.nr_conns += 1  # until the client has gone too
                self._part(conn)
                return
            self._addresses[address] -= counted
            if not self._addresses[address]:
                del self._addresses[address]
            if not getattr(conn, "given_away", False):
                type(conn).close(conn)

        conn.close = close
        return True

    def _turn_away(self, conn: Any) -> None:
        """Too much to do already: say so, on the loop, if it costs no wait."""
        event(log, "too_many_requests_in_flight", level=logging.DEBUG)
        try:
            conn.sock.setblocking(False)
            conn.sock.recv(65_536)  # closing with unread input would reset the answer
            conn.sock.send(
                _problem(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "too_many_requests_in_flight",
                    secrets.token_hex(8),
                    "Retry-After: 1\r\n",
                )
            )
        except OSError:
            pass  # it sees its connection closed
        self._end(conn, graceful=True)

    def _part(self, conn: Any) -> None:
        """Let the client read our last answer: closing with unread input would reset it. gunicorn does that too, for 2
        s and *on its loop*."""
        try:
            conn.sock.setblocking(False)
            conn.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._end(conn)  # gone
            return
        self._linger(conn, time.monotonic() + _GOODBYE_S)

    def _linger(self, conn: Any, ends_s: float) -> None:
        conn.sock.early = b""
        try:
            if not all(conn.sock.recv(65_536) for _ in range(_PIECES)):
                self._end(conn)
                return
        except LATER:
            pass
        except OSError:
            self._end(conn)
            return
        self._goodbyes.add(
            conn, self.poller, selectors.EVENT_READ, ends_s, lambda: self._linger(conn, ends_s), lambda: self._end(conn)
        )

    def handle(self, conn: Any) -> Any:
        conn.sock.deadline_s = time.monotonic() + HEAD_S
        try:
            kept = super().handle(conn)
        finally:
            conn.sock.deadline_s = None
        if kept is False and conn.sock.keeper is not None:
            _give_away(conn)
        if kept:  # gunicorn looks only there for what came behind this request
            conn.parser.unreader.unread(conn.parser.unreader.take_buffered() + conn.sock.take_ahead())
        return kept

    def _keepalive_after(self, conn: Any, keepalive: Any) -> bool:
        """gunicorn waits 5 s for a body that nobody asked for, to use the connection again, and as long anew for each
        byte of it."""
        conn.sock.deadline_s = ends_s = time.monotonic() + _UNASKED_S
        try:
            return bool(keepalive) and bool(conn.parser.finish_body(deadline=ends_s))
        except http_errors.ParseException:
            return False  # late, or no HTTP: its request is answered already
        finally:
            conn.sock.deadline_s = None

    def handle_request(self, req: Any, conn: Any) -> Any:
        conn.sock.deadline_s = time.monotonic() + BODY_S
        try:
            return super().handle_request(req, conn)
        finally:
            conn.sock.deadline_s = None

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Answer what never reached the program. Called in the ``except`` clause."""
        if isinstance(exc, ssl.SSLError):  # no TLS, or none that we speak: there is no way to answer
            event(log, "tls_refused", level=logging.DEBUG, problem=exc.reason or type(exc).__name__)
            return
        status = _status_of(exc)
        failed = status >= 500
        facts: dict[str, Any] = {
            "status": int(status),
            "problem": type(exc).__name__,
            "request_id": secrets.token_hex(8),
        }
        event(log, "request_unreadable", level=logging.ERROR if failed else logging.DEBUG, exc_info=failed, **facts)
        title = "uri_too_long" if status == HTTPStatus.REQUEST_URI_TOO_LONG else status.phrase.lower().replace(" ", "_")
        try:
            client.sendall(_problem(status, title, facts["request_id"]))
        except OSError:
            pass  # nobody is there to read it


def _problem(status: HTTPStatus, title: str, request_id: str, header: str = "") -> bytes:
    """A whole answer that ends its connection."""
    body = orjson.dumps({"type": "about:blank", "title": title, "status": int(status), "request_id": request_id})
    head = (
        f"HTTP/1.1 {int(status)} {status.phrase}\r\nConnection: close\r\nContent-Type:"
        f" application/problem+json\r\n{header}Cache-Control: no-store\r\nX-Content-Type-Options:"
        f" nosniff\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _status_of(exc: BaseException) -> HTTPStatus:
    """The answer to a request that gunicorn's parser, or our clock, has refused."""
    if isinstance(exc, Late):
        return HTTPStatus.REQUEST_TIMEOUT
    if isinstance(exc, http_errors.LimitRequestLine):
        return HTTPStatus.REQUEST_URI_TOO_LONG
    if isinstance(exc, http_errors.LimitRequestHeaders):
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    if isinstance(exc, http_errors.ExpectationFailed):
        return HTTPStatus.EXPECTATION_FAILED
    ours = isinstance(exc, (http_errors.InvalidResponseHeader, http_errors.InvalidResponseHeaderName))
    return (
        HTTPStatus.BAD_REQUEST
        if isinstance(exc, http_errors.ParseException) and not ours
        else HTTPStatus.INTERNAL_SERVER_ERROR
    )


def _give_away(conn: Any) -> None:
    """From here on the connection is its keeper's; gunicorn counts it as closed."""
    ours = conn.sock
    conn.given_away = True
    plain = not isinstance(ours, ssl.SSLSocket)
    ours.keeper(socket.socket(ours.family, ours.type, ours.proto, fileno=ours.detach()) if plain else ours)


def check_head(_worker: Any, request: Any) -> None:
    """gunicorn's ``pre_request``: called with every request before the program sees it."""
    if sum(len(name) + len(value) for name, value in request.headers) > HEAD_BYTES:
        raise http_errors.LimitRequestHeaders("all headers together")
    request._expected_100_continue = False  # said by _Input
