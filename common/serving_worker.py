"""The gunicorn worker of ``common.serving``: one process, one loop on its main thread, a few threads that answer HTTP.

``common.serving`` says what it does and why; only it may import this module.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterable
from concurrent import futures
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson
from gunicorn.http import errors as http_errors
from gunicorn.workers.gthread import ThreadWorker

from common.live_sockets import DETACH
from common.log import event
from common.service import Ended, Service

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

#: Seconds a request may take to arrive: its head, then its body; and seconds one write may take.
HEAD_S, BODY_S, WRITE_S = 5.0, 10.0, 10.0
#: Seconds that the loops of arbiter and worker wait when there is nothing to wait for.
CALM_S = 5.0
#: Bytes of all headers of a request together.
HEAD_BYTES = 8190
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
        raise Ended

    def on_end(self) -> None:
        self._then()


class _Late(http_errors.ParseException):
    """The request did not arrive in time."""


class _Deadlined(socket.socket):
    """A connection whose reads end at a deadline (``time.monotonic``), however slowly bytes trickle in."""

    deadline_s: float | None = None
    #: Gets the connection when its answer is written, instead of its being closed.
    keeper: Callable[[socket.socket], None] | None = None

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        if self.deadline_s is None:
            return super().recv(size, flags)
        left = self.deadline_s - time.monotonic()
        if left <= 0:
            raise _Late
        self.settimeout(left)
        try:
            return super().recv(size, flags)
        except TimeoutError:
            raise _Late from None
        finally:
            self.settimeout(WRITE_S)


class _ClientSocket(_Deadlined):
    """A plain one."""


class TlsSocket(_Deadlined, ssl.SSLSocket):  # type: ignore[misc]
    """One over TLS. Its handshake counts as a part of the first request's head."""

    def do_handshake(self, block: bool = False) -> None:
        self.deadline_s = time.monotonic() + HEAD_S
        self.settimeout(HEAD_S)
        super().do_handshake(block)
        self.settimeout(WRITE_S)


class HttpWorker(ThreadWorker):
    """What is without a lock here runs on the main thread, which is gunicorn's loop."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._asked = False
        self._drain: _Drain | None = None
        self._bounds: Any = self.app.bounds
        self._addresses: Counter[str] = Counter()
        self._in_flight = 0
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

    def heed(self, signals: Any) -> None:
        """Take up signals that came between the fork and ``init_signals``: the arbiter's handlers put them in our copy of its queue."""
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
        """The loop closes them when it has dispatched all that it found: a request on one of them may be among that, and is answered then."""
        for connection in (*self.keepalived_conns, *self.pending_conns):
            connection.timeout = 0.0

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
        if self.alive:
            first_s = min((conns[0].timeout for conns in (self.keepalived_conns, self.pending_conns) if conns), default=math.inf)
            timeout = max(0.0, min(CALM_S, first_s - time.monotonic()))
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

    def enqueue_req(self, conn: Any) -> None:
        if conn.initialized or conn.data_ready:
            if self._in_flight >= self._bounds.in_flight:
                self._turn_away(conn)
                return
            self._in_flight += 1
            super().enqueue_req(conn)
            return
        if not self._takes(conn):
            return
        # A new connection waits in the poller for its first bytes. gunicorn lets a thread wait 5 s: eight silent ones stop the service.
        plain = conn.sock
        conn.sock = _ClientSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        conn.sock.setblocking(False)
        conn.timeout = time.monotonic() + HEAD_S
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, functools.partial(self.on_pending_socket_readable, conn))

    def finish_request(self, conn: Any, fs: Any) -> None:
        self._in_flight -= 1
        super().finish_request(conn, fs)

    def _takes(self, conn: Any) -> bool:
        """Count a new connection, for as long as it is open; or close it, when there are too many."""
        address = str(conn.client[0])
        counted = not _is_loopback(address)
        if self.nr_conns > self._bounds.connections or (counted and self._addresses[address] >= self._bounds.per_address):
            event(log, "connection_refused", level=logging.DEBUG, address=address)
            self.nr_conns -= 1
            conn.close()
            return False
        self._addresses[address] += counted

        def close(graceful: bool = False) -> None:
            self._addresses[address] -= counted
            if not self._addresses[address]:
                del self._addresses[address]
            if not getattr(conn, "given_away", False):
                type(conn).close(conn, graceful)

        conn.close = close
        return True

    def _turn_away(self, conn: Any) -> None:
        """Too much to do already: say so, on the loop, if it costs no wait."""
        event(log, "too_many_requests_in_flight", level=logging.DEBUG)
        try:
            conn.sock.setblocking(False)
            conn.sock.recv(65_536)  # closing with unread input would reset the answer
            conn.sock.send(_problem(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_requests_in_flight", secrets.token_hex(8), "Retry-After: 1\r\n"))
        except OSError:
            pass  # it sees its connection closed
        self.nr_conns -= 1
        conn.close()

    def handle(self, conn: Any) -> Any:
        conn.sock.deadline_s = time.monotonic() + HEAD_S
        try:
            kept = super().handle(conn)
        finally:
            conn.sock.deadline_s = None
        if kept is False and conn.sock.keeper is not None:
            _give_away(conn)
        elif kept is False:
            _say_goodbye(conn.sock)
        return kept

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
        facts: dict[str, Any] = {"status": int(status), "problem": type(exc).__name__, "request_id": secrets.token_hex(8)}
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
        f"HTTP/1.1 {int(status)} {status.phrase}\r\nConnection: close\r\nContent-Type: application/problem+json\r\n{header}"
        f"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _status_of(exc: BaseException) -> HTTPStatus:
    """The answer to a request that gunicorn's parser, or our clock, has refused."""
    if isinstance(exc, _Late):
        return HTTPStatus.REQUEST_TIMEOUT
    if isinstance(exc, http_errors.LimitRequestLine):
        return HTTPStatus.REQUEST_URI_TOO_LONG
    if isinstance(exc, http_errors.LimitRequestHeaders):
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    if isinstance(exc, http_errors.ExpectationFailed):
        return HTTPStatus.EXPECTATION_FAILED
    ours = isinstance(exc, (http_errors.InvalidResponseHeader, http_errors.InvalidResponseHeaderName))
    return HTTPStatus.BAD_REQUEST if isinstance(exc, http_errors.ParseException) and not ours else HTTPStatus.INTERNAL_SERVER_ERROR


def _give_away(conn: Any) -> None:
    """From here on the connection is its keeper's; gunicorn counts it as closed."""
    ours = conn.sock
    conn.given_away = True
    plain = not isinstance(ours, ssl.SSLSocket)
    ours.keeper(socket.socket(ours.family, ours.type, ours.proto, fileno=ours.detach()) if plain else ours)


def _say_goodbye(connection: socket.socket) -> None:
    """Let the client read our last answer: closing with unread input would reset it. gunicorn does that too, for 2 s and *on its loop*."""
    ends_s = time.monotonic() + 1.0
    try:
        connection.shutdown(socket.SHUT_WR)
        while (left := ends_s - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(65_536):
                break
    except OSError:
        pass  # late, or gone
    try:
        connection.shutdown(socket.SHUT_RDWR)  # so that gunicorn finds nothing to wait for
    except OSError:
        pass  # gone


def check_head(_worker: Any, request: Any) -> None:
    """gunicorn's ``pre_request``: called with every request before the program sees it."""
    if sum(len(name) + len(value) for name, value in request.headers) > HEAD_BYTES:
        raise http_errors.LimitRequestHeaders("all headers together")
    request._expected_100_continue = False  # said by _Input


class _Input:
    """``wsgi.input``: says 100 Continue when the program wants the body, and speaks in OSErrors (TimeoutError: it came too slowly)."""

    def __init__(self, environ: WSGIEnvironment) -> None:
        self._body = environ["wsgi.input"]
        self._connection = environ["gunicorn.socket"]
        self.awaited = environ.get("HTTP_EXPECT", "").lower() == "100-continue" and environ["SERVER_PROTOCOL"] == "HTTP/1.1"

    def read(self, size: int = -1) -> bytes:
        if self.awaited:
            self.awaited = False
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            data: bytes = self._body.read(size)
        except _Late as late:
            raise TimeoutError("the body did not arrive in time") from late
        except http_errors.ParseException as wrong:
            raise OSError("the body is not framed as HTTP wants it") from wrong
        return data


def exchanges(app: WSGIApplication) -> WSGIApplication:
    """``app`` with its ``wsgi.input`` checked, and able to end a connection with the header ``Connection: close``, which gunicorn drops, or to
    keep it for itself (``DETACH``)."""

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        response = start_response.__self__  # type: ignore[attr-defined]
        body = environ["wsgi.input"] = _Input(environ)

        def detach(keeper: Callable[[socket.socket], None]) -> None:
            response.is_chunked = lambda: False
            response.force_close()
            environ["gunicorn.socket"].keeper = keeper

        environ[DETACH] = detach

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None, /) -> Callable[[bytes], object]:
            # A client whose body was never asked for may send it or not: nothing that follows on the connection can be trusted.
            if body.awaited or ("Connection", "close") in headers:
                response.force_close()
            return start_response(status, headers, exc_info)

        return app(environ, start)

    return application
