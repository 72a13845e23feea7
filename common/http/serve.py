"""Serve one program: a gunicorn arbiter with one ``gthread`` worker, which also runs the service threads.

The process that does the work so answers its own health question, and the arbiter starts it again when it dies.
gunicorn (25.1 and later) is used as it is, by its settings and server hooks, but for three things:

* SIGTERM, and SIGINT, SIGQUIT and SIGHUP like it, begin ``Served.stop`` on a thread of its own. HTTP answers until that
  has returned, so nobody takes a draining program for a dead one; then open connections have a second or two. When the
  arbiter is killed, HTTP ends first, since a successor needs the port, and then the drain runs.
* A worker that is silent for longer than it said it might be is ended (``usher.common.http.watch``). After 5 early
  deaths in a row without any progress one is started again after a pause that grows to 10 s.
* A worker ends where it was forked: no ``finally`` or ``atexit`` of its parent runs twice.

Every request, and every live subscription, holds a thread; a silent client for 10 s at most, one that trickles for as
long as it likes. Slow clients, and rates and connections per address, are left to a reverse proxy: deploy/nginx.conf.
gunicorn's parser answers what it refuses in its own HTML.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import gc
import logging
import math
import os
import queue
import random
import re
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter

from usher.common.base.backoff import backoff_s
from usher.common.base.errors import StartRefused, UsherError
from usher.common.base.log import began_here, event, flush
from usher.common.http.push import MOST_FOLLOWERS
from usher.common.http.tls import ServerTls
from usher.common.http.watch import START_S, Liveness, WatchedWorker, WorkerEnds
from usher.common.runtime.clock_steps import look_for_steps
from usher.common.runtime.fork_guard import end_children_by, try_for
from usher.common.runtime.service import Service, ServiceEnded
from usher.common.runtime.settings import is_loopback

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

#: Requests that are answered at a time, beside the live subscriptions; more wait. Threads start when they are needed.
_REQUESTS = 128
#: More connections than this wait to be accepted; and files that this process may open, where that is allowed.
_CONNECTIONS, _FILES = 1024, 4096
#: Seconds that a thread waits for a client which sends, or reads, nothing: SO_RCVTIMEO and SO_SNDTIMEO.
_CLIENT_S = 10
#: At the end: seconds for requests that are being answered, and how much longer than ``stop`` the arbiter waits before
#: it kills.
_LAST_ANSWERS_S, _ARBITER_EXTRA_S = 1, 3
#: Seconds within which a process that ends says so, and its output is flushed; the rest is lost.
_LAST_WORDS_S = 1.5
#: A worker that ended sooner than this, and has done nothing, died early. So many in a row are started again at once.
_SHORT_LIFE_S = 5.0
_MOST_AT_ONCE = 5
#: Objects that came and stayed before the collector looks at them.
_NEW_OBJECTS = 20_000
#: Exit codes of a worker after which the arbiter starts no other: it could not start.
NEVER_AGAIN = (Arbiter.WORKER_BOOT_ERROR, Arbiter.APP_LOAD_ERROR)
#: The signals that end a program, all in the same way; and those that mean more workers, fewer, or a second arbiter,
#: none of which fits here.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_IGNORED = (signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR2)
#: Descriptors that gunicorn's loop had, with room to spare.
_NUMBERS = 32


class Served(Protocol):
    """The program that runs in the worker."""

    @property
    def app(self) -> WSGIApplication: ...

    def start(self, port: int, host: str) -> None:
        """Start the threads. ``port`` is the real one, also where 0 was asked for. May raise UsherError: then the
        program does not start."""

    def stop(self) -> None:
        """Drain, and join the threads. Called once, on a thread of its own, while HTTP still answers; also after
        ``start`` has raised."""

    def liveness(self) -> Liveness:
        """Asked twice a second once ``start`` has returned, until a stop is asked for."""


def serve(
    make: Callable[[], Served],
    bind: str,
    program: str,
    graceful_s: float = 20.0,
    setting: str = "USHER_BIND",
    tls: ServerTls | None = None,
    ends: WorkerEnds | None = None,
) -> None:
    """Run ``program`` at ``bind`` (``host:port``) until a signal ends it.

    ``make`` is called in the worker, after the fork, so that no thread and no connection is shared with the arbiter.
    ``Served.stop`` gets ``graceful_s`` seconds; the whole program is gone at most 3 s later (give a supervisor more
    than that). ``ends`` hears of each worker that ends, in the arbiter. Raises StartRefused when the address is not
    free, and with the message of whatever UsherError ``make`` or ``start`` raised.
    """
    warn_of_plain_http(bind, tls)
    listener = _listen(bind, setting)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES if hard < 0 else min(_FILES, hard), hard))
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (*Arbiter.SIGNALS, signal.SIGCHLD)}
    configured = _Program(make, program, graceful_s, tls, ends or WorkerEnds(), listener.detach(), writer)
    gc.collect()
    # The arbiter and its worker share the pages of what is there now, as long as no collector writes into them.
    gc.freeze()
    try:
        configured.run()
    except SystemExit as ended:
        if ended.code in NEVER_AGAIN:
            with contextlib.suppress(BlockingIOError):
                raise StartRefused(os.read(reader, 65_536).decode(errors="replace")) from None
            raise StartRefused(f"the {program} failed while it started; the lines above say why") from None
        if ended.code:
            raise
    finally:
        for end in (reader, writer):
            os.close(end)
        for number, handler in before.items():
            signal.signal(number, handler)


def warn_of_plain_http(bind: str, tls: ServerTls | None) -> None:
    """Log that tokens can be read on their way, where others can reach the address without TLS."""
    if tls is None and not is_loopback(bind):
        event(log, "plain_http", level=logging.WARNING, address=bind, way_out="set USHER_TLS_CERT and USHER_TLS_KEY")


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


def _listen(bind: str, setting: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as unknown:
        raise StartRefused(f"{setting}: the host of {bind} cannot be found: {unknown.strerror}") from unknown
    # "localhost" is 127.0.0.1 to clients
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # the connections that it accepts have these too
            listener.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _CLIENT_S, 0))
        listener.bind(address)
        listener.listen(1024)
    except OSError as refused:
        listener.close()
        reasons = {
            errno.EADDRINUSE: "is in use by another program; stop that or choose another port",
            errno.EADDRNOTAVAIL: "is not an address of this machine",
            errno.EACCES: "needs privileges; choose a port above 1023",
        }
        reason = reasons.get(refused.errno or 0, f"cannot be used: {refused.strerror}")
        raise StartRefused(f"{setting}: {bind} {reason}") from refused
    return listener


def leave(why: str = "", *, for_good: bool = False) -> NoReturn:
    """End this worker now, from any thread, without a drain; the arbiter starts a fresh one. ``for_good``: no new one
    could do better, so the program ends too, as one that cannot start (``serve`` raises StartRefused)."""
    code = Arbiter.WORKER_BOOT_ERROR if for_good else os.EX_TEMPFAIL

    def say() -> None:
        event(log, "worker_leaves", level=logging.ERROR, code=code, why=why, pid=os.getpid())
        _flush()

    try:
        signal.alarm(2)  # ends the process, by the signal's default action, should the interpreter itself stand still
        try_for(_LAST_WORDS_S, say)  # a full pipe, and whatever a handler did to its streams, must not keep us
    finally:
        os._exit(code)


def _flush() -> None:
    flush()
    for stream in (*logging.getLogger().handlers, sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a handler may have closed it, or put anything in its place
            stream.flush()


class _Log:
    """gunicorn's words in our log: troubles as they are, everything else only for those who ask for debug."""

    _TOLD = re.compile(
        r"WORKER TIMEOUT|Shutting down|Reason:|Worker \(pid:\d+\) (exited with code [34]\b|was sent SIGABRT)"
    )
    _KNOWN = logging.DEBUG
    _KILLED = re.compile(r"Worker \(pid:(\d+)\) was sent SIGKILL")

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.killed = 0  # the last worker that was ended by SIGKILL

    def _say(self, level: int, message: str, *args: Any, exc_info: Any = False, **_more: Any) -> None:
        text = message % args if args else message
        if killed := self._KILLED.match(text):
            self.killed = int(killed[1])
        is_slow = bool(exc_info) and isinstance(sys.exc_info()[1], TimeoutError | BlockingIOError)
        is_known = is_slow or bool(self._TOLD.match(text))  # told in better words
        if text.startswith("Invalid request"):  # it repeats parts of the request; and a flood is none of the log
            is_known, text = True, "a request that is not HTTP was refused"
        told = self._KNOWN if is_known else level
        event(log, "web_server", level=told, says=text, exc_info=bool(exc_info) and not is_slow)

    info = functools.partialmethod(_say, logging.DEBUG)
    warning = functools.partialmethod(_say, logging.WARNING)
    error = functools.partialmethod(_say, logging.ERROR)
    critical = functools.partialmethod(_say, logging.CRITICAL)
    exception = functools.partialmethod(_say, logging.ERROR, exc_info=True)
    log = _say

    def _nothing(self, *_args: Any, **_more: Any) -> None:
        """Lines of debug have the path of every request, in which a token may stand by mistake. There is no access log,
        and our handlers are the root's."""

    debug = setup = access = reopen_files = close_on_exec = _nothing


class _Drain(Service):
    """Run ``Served.stop`` once, when asked. A thread that waits for that from the start: a signal handler may start
    none."""

    name = "drain"

    def __init__(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        super().__init__()
        self._work, self.on_end = work, then  # type: ignore[method-assign]
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()  # whose ``put`` is for signal handlers too
        self.ask = functools.partial(self._asked.put, None)
        self._begun = False

    def run_once(self) -> float:
        if not self._begun:
            self._asked.get()
            self._begun = True
            event(log, "draining", pid=os.getpid())
            self._work()  # one try: a turn that fails is logged by the service, and the next one ends it
        raise ServiceEnded


class _Program(BaseApplication):
    """The settings and hooks, and the one ``Served`` of the worker process."""

    def __init__(
        self,
        make: Callable[[], Served],
        program: str,
        graceful_s: float,
        tls: ServerTls | None,
        ends: WorkerEnds,
        listener: int,
        refusals: int,
    ) -> None:
        self._make, self._program, self._graceful_s, self._tls, self._ends = make, program, graceful_s, tls, ends
        self._listener, self._refusals = listener, refusals
        # In the arbiter.
        self._arbiter_pid = 0
        self._asked = False  # a signal has come; a worker that is forked then sees it too
        self._rng = random.Random()
        self._started_s = -math.inf
        self._early_deaths = 0  # in a row
        # In the worker.
        self._served: Served | None = None
        self._drain: _Drain | None = None
        self._end_http: Callable[[int, Any], None]
        self._is_up = self._is_drained = self._is_over = False
        self._stalled = ""  # services that stand still, as the log says already
        self._request = threading.local()  # gunicorn's own, of the thread that answers it
        super().__init__()

    def load_config(self) -> None:
        memory = Path("/dev/shm")
        for name, value in {
            "bind": f"fd://{self._listener}",
            "workers": 1,
            "worker_class": WatchedWorker,
            "threads": _REQUESTS + MOST_FOLLOWERS,
            "worker_connections": _CONNECTIONS,
            "keepalive": 30,
            "timeout": 60,  # that it is there: see ``watch.py``
            "graceful_timeout": math.ceil(self._graceful_s) + _ARBITER_EXTRA_S,
            "worker_tmp_dir": str(memory) if memory.is_dir() and os.access(memory, os.W_OK) else None,
            # its default path is one file per user, and several programs run per machine
            "control_socket_disable": True,
            "proc_name": self._program,
            "logger_class": _Log,
            "limit_request_line": 8190,  # so that the answer is ours up to there
            "limit_request_fields": 64,
            "limit_request_field_size": 8190,
            "forwarded_allow_ips": "",  # nobody may set SCRIPT_NAME or the scheme by a header, but for USHER_PROXIES
            "header_map": "drop",  # X_Forwarded_User is X-Forwarded-User to WSGI, but not to a proxy that deletes that
            "http_parser": "python",  # the same answers whether or not gunicorn_h1c happens to be installed
            "when_ready": self._when_ready,
            "pre_fork": self._pre_fork,
            "post_worker_init": self._post_worker_init,
            "pre_request": self._pre_request,
            "worker_exit": self._worker_exit,
            "child_exit": self._child_exit,
        }.items():
            if name in self.cfg.settings or name != "http_parser":  # which is younger than 25.1
                self.cfg.set(name, value)
        if (tls := self._tls) is not None:
            self.cfg.set("certfile", str(tls.cert))  # says that there is TLS; the context is ours
            self.cfg.set("ssl_context", lambda _config, _default: tls.context())

    # -- in the arbiter

    def _when_ready(self, _arbiter: Any) -> None:
        self._arbiter_pid = os.getpid()
        heed: Any = signal.getsignal(signal.SIGTERM)

        def end(number: int, frame: Any) -> None:
            # The first one drains, whichever it is; gunicorn looks for a second SIGINT or SIGQUIT while it waits for
            # the worker.
            heed(number if self._asked else signal.SIGTERM, frame)
            self._asked = True

        for number in _ENDING:
            signal.signal(number, end)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)

    def _pre_fork(self, _arbiter: Any, _worker: Any) -> None:
        now = time.monotonic()
        if self._started_s > -math.inf:
            is_early = now - self._started_s < _SHORT_LIFE_S and not self._ends.has_progressed
            self._early_deaths = self._early_deaths + 1 if is_early else 0
            too_many = self._early_deaths - _MOST_AT_ONCE
            pause_s = backoff_s(too_many, 0.5, 10.0, self._rng) if too_many > 0 else 0.0
            event(
                log,
                "worker_started_again",
                level=logging.WARNING,
                program=self._program,
                in_s=round(pause_s, 1),
                early_deaths=self._early_deaths,
            )
            while not self._asked and time.monotonic() < now + pause_s:
                time.sleep(0.05)
        self._started_s = time.monotonic()
        self._ends.begin()

    def _child_exit(self, arbiter: Any, worker: Any) -> None:
        self._ends.note(worker, self._program, worker.pid == arbiter.log.killed)

    # -- in the worker

    def load(self) -> WSGIApplication:
        began_here()
        # By it the arbiter ends a worker that stands still, where a handler in Python would not run; printed are calls.
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        faulthandler.disable()  # it may be on already, and would not see SIGABRT
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # there is no stderr
            faulthandler.enable()
        for number in _ENDING:
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        # What a handler or its module forks (multiprocessing does) has no loop to drain by: a signal shall end it.
        end_children_by(_ENDING, self._on_signal)
        if self._asked:  # the signal came before gunicorn had set the worker's handlers
            sys.exit(0)
        try:
            self._served = self._make()
            self._drain = _Drain(self._served.stop, self._after_drain)
            self._drain.start()
        except UsherError as refused:
            self._refuse(refused)
        return self._closing(self._served.app)

    def _post_worker_init(self, worker: Any) -> None:
        self._end_http = worker.handle_exit
        host, port = worker.sockets[0].getsockname()[:2]
        worker.cfg.set("graceful_timeout", _LAST_ANSWERS_S)  # this process' own copy: what HTTP waits after the drain
        self._take_signals_back()
        assert self._served is not None and self._drain is not None
        look_for_steps()
        try:
            self._served.start(port, host)
        except UsherError as refused:
            self._refuse(refused)
        event(log, "listening", url=url_of(host, port, self._tls is not None), pid=os.getpid())
        # A thousand messages on their way are some ten thousand objects that no cycle holds. With the usual threshold
        # of 700 the collector walks through them again and again, a fifth of the time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS)
        self._is_up = True
        if self._asked:
            self._drain.ask()

    def _pre_request(self, _worker: Any, request: Any) -> None:
        self._request.current = request

    def _closing(self, app: WSGIApplication) -> WSGIApplication:
        """Close a connection whose answer says so, which gunicorn does not heed, and any while the program ends."""

        def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
                if self._asked or ("Connection", "close") in headers:
                    self._request.current.force_close()
                return start_response(status, headers, *more)

            return app(environ, start)

        return application

    def silence(self) -> tuple[float, str]:
        """Return for how long the worker may be silent, 0 while its services stand still, and what it does."""
        if not self._is_up or self._served is None:
            return START_S, "starts"
        if self._asked:
            return self._graceful_s + _ARBITER_EXTRA_S, "drains"
        silence_s, stalled = self._served.liveness()
        if stalled and not self._stalled:
            event(log, "services_stand_still", level=logging.ERROR, why=stalled, pid=os.getpid())
        self._stalled = stalled
        return (0.0, "") if stalled else (silence_s, "runs")

    def _on_signal(self, number: int, frame: Any) -> None:
        self._asked = True
        if self._is_drained:
            self._end_http(number, frame)
        elif self._is_up and self._drain is not None:
            self._drain.ask()

    def _after_drain(self) -> None:
        self._is_drained = True
        if not self._is_over:
            os.kill(os.getpid(), signal.SIGTERM)  # to ``_on_signal``, on the main thread

    def _worker_exit(self, _arbiter: Any, _worker: Any) -> None:
        """End the process, here: the frames above belong to the parent, and threads that wait for clients are not
        waited for."""
        if os.getpid() == self._arbiter_pid:
            return  # gunicorn calls this in the arbiter too, for a worker that it cannot find
        code: Any = 1
        try:  # whatever comes up in here must not reach those frames either
            ended = sys.exc_info()[1]
            code = ended.code if isinstance(ended, SystemExit) else 1
            self._finish_drain()
            try_for(_LAST_WORDS_S, _flush)
        finally:
            os._exit(code & 0xFF if isinstance(code, int) else 1 if code else 0)

    def _finish_drain(self) -> None:
        self._is_over = self._asked = True
        if self._drain is not None and not self._is_drained:
            if os.getppid() != self._arbiter_pid:
                event(log, "arbiter_gone", level=logging.WARNING, pid=os.getpid())
            # A thread that answers late wakes the loop that is no more, through a number that must not be somebody
            # else's by now.
            with contextlib.suppress(OSError):
                for _ in range(_NUMBERS):
                    os.open(os.devnull, os.O_WRONLY)
            self._drain.ask()
            if not self._drain.join(self._graceful_s):
                event(log, "drain_unfinished", level=logging.ERROR, seconds=self._graceful_s)

    def _take_signals_back(self) -> None:
        """A handler's module, or a library of it, may have set what SIGTERM does, or blocked it, when it was imported:
        then nothing would drain. The default action of SIGPIPE would end the process, without a word, when somebody
        closes a connection."""
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        taken = [one for one in _ENDING if one in blocked or signal.getsignal(one) != self._on_signal]
        for number in taken:
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            taken.append(signal.SIGPIPE)
        if taken:
            names = ", ".join(number.name for number in taken)
            why = "the handler's module or a library of it had set them; they drain, and SIGPIPE is ignored"
            event(log, "signals_taken_back", level=logging.WARNING, signals=names, why=why)

    def _refuse(self, refused: UsherError) -> NoReturn:
        os.write(self._refusals, str(refused).encode(errors="replace")[:4000])
        sys.exit(Arbiter.WORKER_BOOT_ERROR)
