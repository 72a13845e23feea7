"""One program = one gunicorn arbiter with one ``gthread`` worker; the worker also runs the service threads.

The process that does the work so answers its own health question, and the arbiter brings it back when it dies. What is
ours on top of gunicorn 27, and why:

=======================================  =============================================================================================
gunicorn alone                           here
=======================================  =============================================================================================
SIGTERM: HTTP ends first, waits for      ``Served.stop`` begins at once, on a thread of its own; HTTP answers until it has returned, so
open connections, then work ends         nobody takes a draining program for a dead one. Then idle connections are closed, none is waited for
SIGINT, SIGQUIT, SIGHUP: work is cut     the same drain as SIGTERM; a second SIGINT or SIGQUIT shortens what is left to 2 s
the arbiter is killed: the worker ends   the same drain, bounded by ``graceful_s`` because nobody is left to kill it
a thread waits for slow requests         a request's head must be there in 5 s, its body in 10 s (408); who has not sent a head, and a body of up to
                                         4 KiB, holds no thread
errors in HTML that repeat the input     problem documents (RFC 9457) without any input, and only 4xx for what a client did wrong
100 Continue before the program is       only when the program reads the body; a refusal comes instead of it
asked
the worker unwinds the arbiter's stack   it ends where it was forked: no ``finally`` or ``atexit`` of the parent runs twice
=======================================  =============================================================================================
"""

from __future__ import annotations

import errno
import functools
import gc
import logging
import math
import os
import queue
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.sock import TCP6Socket, TCPSocket

from usher.common.base.backoff import backoff_s
from usher.common.base.errors import StartRefused, UsherError
from usher.common.base.log import event
from usher.common.http.server.sockets import TlsSocket
from usher.common.http.server.worker import CALM_S, ENDING, HEAD_BYTES, HttpWorker, check_head
from usher.common.http.server.wsgi import exchanges
from usher.common.http.tls import ServerTls
from usher.common.runtime.clock_steps import look_for_steps

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

log = logging.getLogger(__name__)

_THREADS = 8
#: At the end: seconds for requests that are being answered, and how much longer than ``stop`` the arbiter waits before
#: it kills.
_LAST_ANSWERS_S = 1
_ARBITER_EXTRA_S = 3
#: A worker that ended sooner than this is not started again at once, the second time.
_SHORT_LIFE_S = 5.0
#: Objects that came and stayed before the collector looks at them.
_NEW_OBJECTS = 20_000
#: Exit codes of a worker that gunicorn takes for "never start me again".
_NEVER_AGAIN = (Arbiter.WORKER_BOOT_ERROR, Arbiter.APP_LOAD_ERROR)


class Served(Protocol):
    """What runs in the worker."""

    @property
    def app(self) -> WSGIApplication: ...

    def start(self, port: int, host: str) -> None:
        """Start the threads. ``port`` is the real one, also where 0 was asked for. May raise UsherError: then the
        program does not start."""

    def stop(self) -> None:
        """Drain, and join the threads. Called once, on a thread of its own, while HTTP still answers; also after
        ``start`` has raised."""


@dataclass(frozen=True)
class Bounds:
    """Most connections open at a time, of these from one address (but for loopback, where a proxy may be), and requests
    that are or wait to be answered. What is more is closed, or answered 503."""

    connections: int = 256
    per_address: int = 64
    in_flight: int = 64


@dataclass(frozen=True)
class Certificate:
    """Files in PEM: the chain, and the key if that is not in the same file. ``cert`` None: plain HTTP."""

    cert: Path | None = None
    key: Path | None = None


def serve(
    make: Callable[[], Served],
    bind: str,
    program: str,
    graceful_s: float = 20.0,
    setting: str = "USHER_BIND",
    bounds: Bounds = Bounds(),
    certificate: Certificate = Certificate(),
) -> None:
    """Run ``program`` at ``bind`` (``host:port``) until a signal ends it.

    ``make`` is called in the worker, after the fork, so that no thread and no connection is shared with the arbiter.
    ``Served.stop`` gets ``graceful_s`` seconds; the whole program is gone at most 3 s later (give a supervisor more
    than that). Raises StartRefused when the address is not free, and with the message of whatever UsherError ``make``
    or ``start`` raised.
    """
    tls = None if certificate.cert is None else ServerTls(certificate.cert, certificate.key, TlsSocket)
    listener = _listen(bind, setting)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (*Arbiter.SIGNALS, signal.SIGCHLD)}
    configured = _Program(make, program, graceful_s, writer, bounds, tls)
    arbiter = _Arbiter(configured, listener)
    gc.collect()
    # the arbiter and its worker share the pages of what is there now, as long as no collector writes into them
    gc.freeze()
    try:
        arbiter.run()
    except SystemExit as ended:
        if arbiter.refused:
            raise StartRefused(
                _told(reader) or f"the {program} failed while it started; the lines above say why"
            ) from None
        if ended.code:
            raise
    finally:
        for end in (reader, writer, *configured.life):
            os.close(end)
        for number, handler in before.items():
            signal.signal(number, handler)


def url_of(host: str, port: int, tls: bool) -> str:
    """The URL of what listens there.

    >>> url_of("::1", 8700, True)
    'https://[::1]:8700'
    """
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def check_address(bind: str, setting: str) -> None:
    """Raise StartRefused, naming ``setting``, unless ``bind`` (``host:port``) can be listened at. Port 0 is always
    free."""
    _listen(bind, setting).close()


def leave(code: int = os.EX_TEMPFAIL, why: str = "") -> NoReturn:
    """End this worker now, from any thread, without a drain; the arbiter starts a fresh one. For a process that must
    not go on."""
    if code in (0, *_NEVER_AGAIN):
        raise ValueError(f"exit code {code} would not bring a new worker")
    signal.alarm(2)  # a full log pipe must not keep us: the default action of SIGALRM ends the process
    event(log, "worker_leaves", level=logging.ERROR, code=code, why=why, pid=os.getpid())
    _flush()
    os._exit(code)


def _collect_less() -> None:
    """Let Python's cyclic collector pass over what is there now (all modules, for good), and come when there is
    something to find.

    A thousand messages on their way are some ten thousand objects that no cycle holds. With the usual threshold of 700
    the collector walks through them again and again, a fifth of the time, and now and then through everything, which
    stops all threads for 0.1 s and more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def _flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()


def _listen(bind: str, setting: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as unknown:
        raise StartRefused(f"{setting}: the host of {bind} cannot be found: {unknown.strerror}") from unknown
    family, kind, protocol, _, address = min(
        found, key=lambda one: one[0] != socket.AF_INET
    )  # "localhost" is 127.0.0.1 to clients
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as refused:
        listener.close()
        reasons = {
            errno.EADDRINUSE: "is in use by another program; stop that or choose another port",
            errno.EADDRNOTAVAIL: "is not an address of this machine",
            errno.EACCES: "needs privileges; choose a port above 1023",
        }
        raise StartRefused(
            f"{setting}: {bind} {reasons.get(refused.errno or 0, f'cannot be used: {refused.strerror}')}"
        ) from refused
    return listener


def _told(reader: int) -> str:
    """What the worker wrote before it refused to start."""
    try:
        return os.read(reader, 65_536).decode(errors="replace")
    except BlockingIOError:
        return ""


class _Program(BaseApplication):
    """The configuration, and the one ``Served`` of the worker process."""

    def __init__(
        self,
        make: Callable[[], Served],
        program: str,
        graceful_s: float,
        refusals: int,
        bounds: Bounds,
        tls: ServerTls | None,
    ) -> None:
        self._make = make
        self._program = program
        self.graceful_s = graceful_s
        self._refusals = refusals
        self.bounds = bounds
        self._tls = tls
        self.served: Served | None = None
        #: A pipe into which nobody writes: it ends with the arbiter.
        self.life = os.pipe()
        self.signals_of_arbiter: Any = None
        super().__init__()

    def load_config(self) -> None:
        memory = Path("/dev/shm")
        for name, value in {
            "workers": 1,
            "worker_class": HttpWorker,
            "threads": _THREADS,
            # One more than are taken: gunicorn stops to accept at this many, and what waits then is neither served nor
            # refused.
            "worker_connections": self.bounds.connections + 1,
            "keepalive": 30,
            "timeout": 60,
            "graceful_timeout": math.ceil(self.graceful_s) + _ARBITER_EXTRA_S,
            "worker_tmp_dir": str(memory) if memory.is_dir() and os.access(memory, os.W_OK) else None,
            # its default path is one file per user, and several programs run per machine
            "control_socket_disable": True,
            "preload_app": False,
            "proc_name": self._program,
            "logger_class": _ServerLog,
            "limit_request_line": 2048,
            "limit_request_fields": 64,
            "limit_request_field_size": HEAD_BYTES,
            "forwarded_allow_ips": "",  # nobody may set SCRIPT_NAME or the scheme by a header
            "http_parser": "python",  # the same answers whether or not gunicorn_h1c happens to be installed
            "pre_request": check_head,
            "post_worker_init": self._start,
            "worker_exit": self._stop,
        }.items():
            self.cfg.set(name, value)
        tls = self._tls
        if tls is not None:
            self.cfg.set("certfile", str(tls.cert))  # says that there is TLS; the context is ours
            self.cfg.set("ssl_context", lambda _config, _default: tls.context())

    def load(self) -> WSGIApplication:
        try:
            self.served = self._make()
        except UsherError as refused:
            self._refuse(refused)
        return exchanges(self.served.app)

    def _start(self, worker: Any) -> None:
        host, port = worker.sockets[0].getsockname()[:2]
        worker.cfg.set("graceful_timeout", _LAST_ANSWERS_S)  # this process' own copy: what HTTP waits after the drain
        _take_signals_back(worker)
        assert self.served is not None
        look_for_steps()
        try:
            self.served.start(port, host)
        except UsherError as refused:
            self._refuse(refused)
        event(log, "listening", url=url_of(host, port, self._tls is not None), pid=os.getpid())
        _collect_less()
        worker.heed(self.signals_of_arbiter)

    def _stop(self, _arbiter: Any, worker: Any) -> None:
        # gunicorn calls this in the arbiter too, for a worker it cannot find.
        if self.served is not None and not worker.drained(self.graceful_s):
            event(log, "drain_unfinished", level=logging.ERROR, seconds=self.graceful_s)

    def _refuse(self, refused: UsherError) -> NoReturn:
        os.write(self._refusals, str(refused).encode(errors="replace")[:4000])
        sys.exit(Arbiter.WORKER_BOOT_ERROR)


def _take_signals_back(worker: HttpWorker) -> None:
    """A handler's module, or a library of it, may have set what SIGTERM does when it was imported: then nothing would
    drain."""
    taken = [number for number in ENDING if signal.getsignal(number) != worker.handle_exit]
    for number in taken:
        signal.signal(number, worker.handle_exit)
    if taken:
        names = ", ".join(number.name for number in taken)
        event(
            log,
            "signals_taken_back",
            level=logging.WARNING,
            signals=names,
            why="the handler's module or a library of it had set them; they drain",
        )


class _Arbiter(Arbiter):
    """Exactly one worker, no banner, every ending signal drains."""

    def __init__(self, program: _Program, listener: socket.socket) -> None:
        super().__init__(program)
        kind = TCP6Socket if listener.family == socket.AF_INET6 else TCPSocket
        address = listener.getsockname()
        self.LISTENERS = [kind(address, self.cfg, self.log, fd=listener.detach())]
        self.refused = False
        program.signals_of_arbiter = self.SIG_QUEUE
        self._rng = random.Random()
        self._started_s = -math.inf
        self._short_lives = 0
        self._not_before_s = -math.inf

    def _end(self) -> None:
        raise StopIteration  # gunicorn's own word for "halt"

    def _ignore(self) -> None:
        """More workers, fewer, a second arbiter: none of it fits a program that is one process with one name."""

    handle_int = handle_quit = handle_hup = _end
    handle_ttin = handle_ttou = handle_usr2 = _ignore

    def wait_for_signals(self, timeout: float = 1.0) -> list[int]:
        """One at a time: what comes right behind an ending signal stays in the queue, where ``stop`` looks for a second
        one. The end of a worker is a signal too, so only one that hangs, or is not to be started yet, is found by
        looking."""
        if self.WORKERS:
            timeout = CALM_S
        try:
            number = self.SIG_QUEUE.get(timeout=timeout)
        except queue.Empty:
            return []
        return [] if number == self.WAKEUP_REQUEST else [number]

    def halt(self, reason: str | None = None, exit_status: int = 0) -> None:
        self.refused = exit_status in _NEVER_AGAIN
        super().halt()  # ends by SystemExit; serve() has the better message

    def manage_workers(self) -> None:
        if self.WORKERS or time.monotonic() >= self._not_before_s:
            super().manage_workers()

    def spawn_worker(self) -> None:
        now = time.monotonic()
        self._short_lives = self._short_lives + 1 if now - self._started_s < _SHORT_LIFE_S else 0
        self._started_s = now
        self._not_before_s = now + backoff_s(self._short_lives, 0.5, 10.0, self._rng) if self._short_lives else now
        arbiter = os.getpid()
        try:
            super().spawn_worker()
        except SystemExit as ended:
            if os.getpid() == arbiter:
                raise
            # The frames above belong to the parent: what it has in `finally` and `atexit` is not for us to run.
            _flush()
            os._exit(ended.code if isinstance(ended.code, int) else 1 if ended.code else 0)


class _ServerLog:
    """gunicorn's words in our log: troubles as they are, everything else only for those who ask for debug."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def _say(self, level: int, message: str, *args: Any, **more: Any) -> None:
        event(
            log,
            "web_server",
            level=level,
            says=(message % args if args else message),
            exc_info=bool(more.get("exc_info")),
        )

    critical = functools.partialmethod(_say, logging.CRITICAL)
    warning = functools.partialmethod(_say, logging.WARNING)
    info = debug = functools.partialmethod(_say, logging.DEBUG)

    def error(self, message: str, *args: Any, **more: Any) -> None:
        refused = message.startswith("Worker (pid") and args[1:] and args[1] in _NEVER_AGAIN
        self._say(logging.DEBUG if refused else logging.ERROR, message, *args, **more)

    def exception(self, message: str, *args: Any, **more: Any) -> None:
        slow = isinstance(sys.exc_info()[1], TimeoutError)  # a client that does not read its answer
        self._say(logging.DEBUG if slow else logging.ERROR, message, *args, exc_info=not slow)

    def log(self, level: int, message: str, *args: Any, **more: Any) -> None:
        self._say(level, message, *args, **more)

    def _nothing(self, *_args: Any, **_more: Any) -> None:
        """There is no access log, and our handlers are the root's."""

    setup = access = reopen_files = close_on_exec = _nothing
