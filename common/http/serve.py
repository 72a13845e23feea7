"""Serve one program: a gunicorn arbiter with one ``gthread`` worker, which also runs the service threads.

The process that does the work so answers its own health question, and the arbiter starts it again when it dies.
gunicorn (26.1 and later) is used as it is, by its settings and server hooks, but for four things:

* SIGTERM, and SIGINT, SIGQUIT and SIGHUP like it, begin the program's ``stop`` on a thread of its own. HTTP answers
  until that has returned, so nobody takes a draining program for a dead one; then open connections have a second or
  two. When the arbiter is killed, HTTP ends first, since a successor needs the port, and then the drain runs.
* C code that does not release the interpreter lock stops every thread of its process, those that look after leases and
  deadlines too. So the worker says, each time gunicorn's loop turns (once a second at least), for how long it may be
  silent from then on; the arbiter counts the silence, and ends a worker whose time is up. A worker whose service
  threads stand still says nothing either. After 5 early deaths in a row without any progress one is started again after
  a pause that grows to 10 s.
* A worker ends where it was forked: no ``finally`` or ``atexit`` of its parent runs twice.
* A request gets a thread when it has arrived whole, and the loop waits for it till then, so that strangers who send
  nothing, half a head, half a body or one request behind another hold none; where too many wait, those that wait
  longest are closed. Questions for health have threads of their own. (Behind TLS, and of chunks and bodies above
  4 KiB, the loop sees no end: they hold a thread, a silent client for 10 s at most.)

Every other request, and every live subscription, holds a thread. Rates, connections per address and slow clients of TLS
are left to a reverse proxy: deploy/nginx.conf. gunicorn's parser answers what it refuses in its own HTML.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import gc
import logging
import math
import mmap
import os
import queue
import re
import resource
import selectors
import signal
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.workers.gthread import ThreadWorker
from gunicorn.workers.workertmp import WorkerTmp

from usher.common.base.backoff import backoff_s
from usher.common.base.clock import CHANCE
from usher.common.base.errors import SettingsError, StartRefused, UsherError
from usher.common.base.log import CRITICAL, DEBUG, ERROR, WARNING, event, flush
from usher.common.http.credentials import FileValue
from usher.common.runtime.fork_guard import end_children_by, oom_kills, try_for
from usher.common.runtime.service import Service, ServiceEnded
from usher.common.runtime.settings import is_loopback

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

#: A start that takes longer makes no progress.
START_S = 60.0
#: The arbiter looks this often; a busy machine alone makes a worker silent for a second or two.
LOOK_S, LEAST_SILENCE_S = 1.0, 3.0
#: The worker speaks again after this.
_EVERY_S = 0.5
#: Most that one look of the arbiter adds to the silence: it stood still itself, maybe with the whole machine.
_LONGEST_LOOK_S = 2.0
#: Requests that are answered at a time, beside the live subscriptions; more wait. Threads start when they are needed.
_REQUESTS = 128
#: Of all subscriptions of one program; one caller may have half of them.
MOST_FOLLOWERS = 192
#: From so many connections on the one that waits longest is closed for each new one; more than the second number wait
#: to be accepted; and files that this process may open, where that is allowed.
_CROWDED, _CONNECTIONS, _FILES = 2000, 2200, 4096
#: Connections that are accepted, and closed, in one turn of the loop.
_AT_ONCE = 32
_TOO_SLOW, _CUT_OFF = (
    b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" % why
    for why in (b"408 Request Timeout", b"400 Bad Request")
)
#: A question for health, and threads that answer these alone.
_HEALTH_QUESTION, _HEALTH_THREADS = re.compile(rb"(?:GET|HEAD) /api/health(?:/live|/ready)?[? ]"), 4
#: Most bytes of a head, and of a body, that are waited for; what says that a body follows, of a length or as it comes.
_WHOLE_BYTES, _BODY_BYTES = 65_536, 4096
_BODY = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(?=0*[1-9])([0-9]{1,20})[ \t]*\r")
_AS_IT_COMES = re.compile(rb"(?i)\r\ntransfer-encoding:")
_EXPECTS, _CONTINUE = re.compile(rb"(?i)\r\nexpect:[ \t]*100"), b"HTTP/1.1 100 Continue\r\n\r\n"
#: Another request begins; not a body whose length is missing or cannot be read, which is refused for that.
_BEHIND = re.compile(rb"\s*[A-Z]+ ")
#: The body of who says that they have a token is not waited for: the request is refused, or read, at once.
_KNOWN = re.compile(rb"(?is)[A-Z]+ /api/.*\r\nauthorization:")
#: Seconds that a thread waits for a client which sends, or reads, nothing (SO_RCVTIMEO and SO_SNDTIMEO), and for one
#: to close its end.
_CLIENT_S, _GOODBYE_S = 10, 1.0
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
#: Exit codes of a worker that could not start: the arbiter starts no other.
NEVER_AGAIN = (Arbiter.WORKER_BOOT_ERROR, Arbiter.APP_LOAD_ERROR)
#: The signals that end a program, all in the same way; and those that mean more workers, fewer, or a second arbiter,
#: none of which fits here.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_IGNORED = (signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR2)
#: Bytes of the reason why a program cannot start.
_REASON_BYTES = 4096
#: What a worker says: when, for how many seconds it may be silent, and what it does.
_WORD = struct.Struct("=dd16s")


def serve(
    make: Callable[[], Any],
    bind: str,
    program: str,
    graceful_s: float = 20.0,
    setting: str = "USHER_BIND",
    tls: ServerTls | None = None,
    ends: WorkerEnds | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Run ``program`` at ``bind`` (``host:port``) until a signal ends it.

    ``make`` is called in the worker, after the fork, so that no thread and no connection is shared with the arbiter. It
    returns an object with

    * ``app``, the WSGI application, asked for with each request;
    * ``start(port, host)``, which starts the threads. ``port`` is the real one, also where 0 was asked for;
    * ``stop()``, which drains, and joins the threads. Called once, on a thread of its own, while HTTP still answers;
      also after ``start`` has raised. It gets ``graceful_s`` seconds; the whole program is gone at most 3 s later (give
      a supervisor more than that);
    * ``liveness()``, asked twice a second once ``start`` has returned, until a stop is asked for.

    ``ends`` hears of each worker that ends, in the arbiter. ``listener``: that of ``listen``. Raises StartRefused when
    the address is not free, and with the message of whatever UsherError ``make`` or ``start`` raised.
    """
    warn_of_plain_http(bind, tls)
    listener = listener or listen(bind, setting)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES if hard < 0 else min(_FILES, hard), hard))
    configured = _Program(make, program, graceful_s, tls, ends or WorkerEnds(), listener.detach())
    gc.freeze()  # what the collector does not touch stays shared with the worker
    try:
        _Arbiter(configured).run()
    except SystemExit as ended:
        if ended.code in NEVER_AGAIN:
            lines_above = f"the {program} failed while it started; the lines above say why"
            raise StartRefused(configured.reason[:].rstrip(b"\0").decode(errors="replace") or lines_above) from None
        if ended.code:
            raise


def warn_of_plain_http(bind: str, tls: ServerTls | None) -> None:
    """Log that tokens can be read on their way, where others can reach the address without TLS."""
    if tls is None and not is_loopback(bind):
        event("plain_http", level=WARNING, address=bind, way_out="set USHER_TLS_CERT and USHER_TLS_KEY")


def url_of(host: str, port: int, tls: bool) -> str:
    """The URL of what listens there.

    >>> url_of("::1", 8700, True)
    'https://[::1]:8700'
    """
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def check_address(bind: str, setting: str) -> None:
    """Raise StartRefused, naming ``setting``, unless ``bind`` can be listened at. Port 0 is always free."""
    listen(bind, setting).close()


def listen(bind: str, setting: str, near: int = 0) -> socket.socket:
    """Listen at ``bind``; where that is taken, at one of the ``near`` ports after it. Raises StartRefused."""
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as unknown:
        raise StartRefused(f"{setting}: the host of {bind} cannot be found: {unknown.strerror}") from unknown
    # "localhost" is 127.0.0.1 to clients
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    is_any = host == "::"
    if is_any and not socket.has_dualstack_ipv6():  # all addresses of this machine, which has none of IPv6
        is_any, family, address = False, socket.AF_INET, ("0.0.0.0", int(port))  # noqa: S104 - that was asked for
    try:
        listener = socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=is_any)
    except OSError as refused:
        if near and refused.errno == errno.EADDRINUSE:
            return listen(f"{bind.rpartition(':')[0]}:{int(port) + 1}", setting, near - 1)
        reasons = {
            errno.EADDRINUSE: "is in use by another program; stop that or choose another port",
            errno.EADDRNOTAVAIL: "is not an address of this machine",
            errno.EACCES: "needs privileges; choose a port above 1023",
        }
        reason = reasons.get(refused.errno or 0, f"cannot be used: {refused.strerror}")
        raise StartRefused(f"{setting}: {bind} {reason}") from refused
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # the connections that it accepts have these too
        listener.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _CLIENT_S, 0))
    return listener


def leave(why: str = "", *, for_good: bool = False) -> NoReturn:
    """End this worker now, from any thread, without a drain; the arbiter starts a fresh one. ``for_good``: no new one
    could do better, so the program ends too, as one that cannot start (``serve`` raises StartRefused)."""
    code = Arbiter.WORKER_BOOT_ERROR if for_good else os.EX_TEMPFAIL

    def say() -> None:
        event("worker_leaves", level=ERROR, code=code, why=why, pid=os.getpid())
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


class Liveness(NamedTuple):
    """``silence_s``: how long a program may be silent. ``stalled``: services that stand still, "" when all go on."""

    silence_s: float
    stalled: str = ""


class Pulse(WorkerTmp):
    """The file that the worker writes and the arbiter reads; gunicorn's own has a time only."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._heard = b""
        self._looked_s = time.monotonic()
        self.silent_s = 0.0
        self.say(START_S, "starts")

    def say(self, silence_s: float, does: str) -> None:
        """Say that the worker lives, and for how long it may be silent. Called in the worker."""
        os.pwrite(self.fileno(), _WORD.pack(time.monotonic(), silence_s, does.encode()), 0)

    def last_update(self) -> float:
        """Return now, or a time that makes gunicorn end the worker. Called in the arbiter, every second."""
        now, word = time.monotonic(), os.pread(self.fileno(), _WORD.size, 0)
        self.silent_s = self.silent_s + min(now - self._looked_s, _LONGEST_LOOK_S) if word == self._heard else 0.0
        self._looked_s, self._heard = now, word
        return now if self.silent_s <= _WORD.unpack(word)[1] else -math.inf

    def facts(self) -> dict[str, Any]:
        """Return for how long the worker was silent, and what it did when it was last heard: starts, runs or drains."""
        did = _WORD.unpack(self._heard)[2].rstrip(b"\0").decode() if self._heard else ""
        return {"did": did, "silent_s": round(self.silent_s, 1)}


class WorkerEnds:
    """The arbiter's knowledge of how its last worker ended. A worker that is forked then knows it too."""

    def __init__(
        self, running: Callable[[], Sequence[str]] = lambda: (), before_restart: Callable[[], None] = lambda: None
    ) -> None:
        self._running = running  # names what ran in a worker that stood still, for the log
        self.before_restart = before_restart
        self._kills: int | None = None
        self.shared = mmap.mmap(-1, 2)  # with its arbiter: that this worker has made progress, runs code of others
        #: While the last one lived, the kernel ended nothing for want of memory; and: it was ended by SIGKILL, and not
        #: by its arbiter either.
        self.is_by_itself = self.is_from_outside = False

    def begin(self) -> None:
        self._kills = oom_kills()
        self.shared[:] = b"\0\0"

    def progressed(self) -> None:
        """Note that this worker has done something that need not be done again. Called in the worker."""
        self.shared[0] = 1

    def began(self) -> None:
        """Note that code of others runs in this worker from now on, so that its exit code says nothing."""
        self.shared[1] = 1

    def hurry(self, program: str) -> None:
        why = "asked once more (SIGINT or SIGQUIT): its process ends within 2 s, and what runs with it"
        event("drain_cut_short", level=WARNING, program=program, running=list(self._running()), why=why)

    def note(self, worker: Any, program: str, is_killed: bool) -> None:
        self.is_by_itself = self._kills is not None and oom_kills() == self._kills
        self.is_from_outside = is_killed and not worker.aborted and self.is_by_itself
        if worker.aborted:  # by the arbiter: its time was up
            why = "its interpreter or its services stood still: code keeps the interpreter lock, or waits for ever"
            facts = worker.tmp.facts() | {"pid": worker.pid, "running": list(self._running()), "why": why}
            event("worker_stood_still", level=ERROR, program=program, **facts)


def bytes_of_request(begin: bytes) -> int:
    """Return how many bytes a request has of which this is the beginning: one more than there are while its head is not
    all there, 0 where its body has no end that can be told, or is none that anybody waits for.

    >>> bytes_of_request(b"GET / HTT"), bytes_of_request(b"POST / HTTP/1.1\\r\\nContent-Length: 5\\r\\n\\r\\n1")
    (10, 43)
    """
    head, end, _ = begin.lstrip(b"\r\n").partition(b"\r\n\r\n")
    if not end:
        return 0 if b"\n\n" in begin else len(begin) + 1
    whole = begin.index(head + end) + len(head + end)
    if _AS_IT_COMES.search(head):
        return 0
    if (body := _BODY.search(head + b"\r\n")) is None:
        return whole
    is_long = int(body[1]) > _BODY_BYTES or whole > _WHOLE_BYTES - _BODY_BYTES  # whether it is wanted is seen at once
    return 0 if is_long or head.startswith((b"GET", b"HEAD")) or _KNOWN.match(head) else whole + int(body[1])


class WatchedWorker(ThreadWorker):
    """gunicorn's threaded worker with a ``Pulse``, whose loop waits for requests. A client that does not close its end
    keeps a thread waiting, and not the only loop, which gunicorn would let wait for 2 s."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.tmp.close()
        self.tmp: Pulse = Pulse(self.cfg)
        self._spoke_s = -math.inf
        self._for_health = ThreadPoolExecutor(_HEALTH_THREADS, "health")

    def accept(self, listener: Any) -> None:
        """Accept a few of those that wait: a turn of the loop for each would keep the last of a thousand waiting."""
        for _ in range(_AT_ONCE):
            before = self.nr_conns
            super().accept(listener)
            if self.nr_conns <= before:
                return

    def murder_pending(self) -> None:
        """Close those whose time is over, a few at a time, since others come meanwhile."""
        for _ in range(_AT_ONCE):
            if not (self.pending_conns and self.pending_conns[0].timeout <= time.monotonic()):
                return
            self._drop(self.pending_conns.popleft())
        self.method_queue.defer(lambda: None)

    def _drop(self, conn: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.poller.unregister(conn.sock)
        with contextlib.suppress(OSError):
            conn.sock.send(conn.late if getattr(conn, "seen", -1) >= 0 else b"")
            conn.sock.recv(_WHOLE_BYTES)  # closing with unread input would reset it
        self.nr_conns -= 1
        conn.close()

    def enqueue_req(self, conn: Any) -> None:
        """Wait for a request until it is there whole, or nothing more comes; then give it a thread."""
        begin, seen, wanted = b"", getattr(conn, "seen", -1), 0
        try:
            if conn.parser is None or not self.cfg.is_ssl:
                with contextlib.suppress(BlockingIOError):
                    begin = conn.sock.recv(_WHOLE_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                wanted = 0 if begin and self.cfg.is_ssl else bytes_of_request(begin)
                read = b"" if conn.parser is None else conn.parser.unreader.buf.getvalue()
                if read.strip() or (wanted and _BEHIND.match(begin, wanted)):
                    wanted = _WHOLE_BYTES  # one behind another, which no client sends
                if len(begin) < wanted:
                    if seen >= 0 and (seen == len(begin) or time.monotonic() >= conn.timeout):  # it ended, or trickles
                        conn.late = conn.late and (_CUT_OFF if seen == len(begin) else _TOO_SLOW)
                        self._drop(conn)
                    else:
                        self._wait(conn, begin, wanted)
                    return
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        except OSError:  # it was reset
            self._drop(conn)
            return
        conn.seen, conn.is_whole = -1, 0 < wanted <= len(begin)
        pool = self._for_health if conn.is_whole and _HEALTH_QUESTION.match(begin) else self.tpool
        answered = pool.submit(self.handle, conn)
        answered.add_done_callback(lambda done: self.method_queue.defer(self.finish_request, conn, done))

    def _wait(self, conn: Any, begin: bytes, wanted: int) -> None:
        """Wait in the loop, which is woken by so many bytes, or by the client's end."""
        if conn.timeout is None or conn.seen < 0:
            conn.timeout, conn.late = time.monotonic() + _CLIENT_S, b""
        if b"\r\n\r\n" in begin and not conn.late:
            conn.late = _TOO_SLOW
            if _EXPECTS.search(begin):
                conn.sock.send(_CONTINUE)
        conn.seen = len(begin)
        conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
        conn.sock.setblocking(False)
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, functools.partial(self.on_pending_socket_readable, conn))

    def notify(self) -> None:
        """Say that this process lives, unless its services stand still, and make room. Called by gunicorn's loop before
        each turn: while one goes on, a connection that is closed may be the next that is looked at."""
        while self.nr_conns >= _CROWDED and (idle := self.pending_conns or self.keepalived_conns):
            self._drop(idle.popleft())
        now = time.monotonic()
        if now - self._spoke_s >= _EVERY_S:
            self._spoke_s = now
            silence_s, does = self.app.silence()
            if silence_s:
                self.tmp.say(silence_s, does)

    def run(self) -> None:
        super().run()
        # A thread that answers late would wake the loop that is no more, through a number that may be somebody else's.
        self.method_queue.defer = lambda *_: None

    def handle(self, conn: Any) -> Any:
        goes_on = super().handle(conn)
        if goes_on is False:
            until_s = time.monotonic() + _GOODBYE_S
            with contextlib.suppress(OSError):  # closing with unread input would reset the last answer
                conn.sock.shutdown(socket.SHUT_WR)
                conn.sock.settimeout(0.0 if conn.is_whole else _GOODBYE_S)
                while conn.sock.recv(65_536) and time.monotonic() < until_s:
                    pass
            with contextlib.suppress(OSError):
                conn.sock.shutdown(socket.SHUT_RDWR)
        return goes_on


class _Log:
    """gunicorn's words in our log: troubles as they are, everything else only for those who ask for debug; its own
    lines of debug never, since they have the path of every request, in which a token may stand by mistake."""

    #: Told in better words.
    _TOLD = re.compile(
        r"WORKER TIMEOUT|Shutting down|Reason:|Worker \(pid:\d+\) (exited with code [34]\b|was sent SIGABRT)"
    )
    _KILLED = re.compile(r"Worker \(pid:(\d+)\) was sent SIGKILL")

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.killed = 0  # the last worker that was ended by SIGKILL
        self.on_hurry: Callable[[], None] = lambda: None

    def _say(self, level: int, message: str, *args: Any, exc_info: Any = False, **_more: Any) -> None:
        text = message % args if args else message
        if killed := self._KILLED.match(text):
            self.killed = int(killed[1])
        if text == "Quick shutdown requested":
            self.on_hurry()
        if text.startswith("Invalid request"):  # it repeats parts of the request; and a flood is none of the log
            level, text = DEBUG, "a request that is not HTTP was refused"
        is_slow = bool(exc_info) and isinstance(sys.exc_info()[1], TimeoutError | BlockingIOError)  # a client
        if is_slow or self._TOLD.match(text):
            level, exc_info = DEBUG, False
        event("web_server", level=level, says=text, exc_info=bool(exc_info))

    info = functools.partialmethod(_say, DEBUG)
    warning = functools.partialmethod(_say, WARNING)
    error = functools.partialmethod(_say, ERROR)
    critical = functools.partialmethod(_say, CRITICAL)
    exception = functools.partialmethod(_say, ERROR, exc_info=True)
    log = _say

    def _nothing(self, *_args: Any, **_more: Any) -> None: ...

    debug = setup = access = reopen_files = close_on_exec = _nothing


class ServerTls(FileValue[ssl.SSLContext]):
    """The context for new connections of a server: a certificate chain and its key, in PEM."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        self.cert, self._key = cert.expanduser(), (key or cert).expanduser()
        super().__init__((self.cert, self._key), self._load, self._told)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self._key)
        except (OSError, ssl.SSLError) as problem:
            why = problem.strerror or type(problem).__name__
            raise SettingsError(
                [f"USHER_TLS_CERT, USHER_TLS_KEY: {self.cert} and {self._key} cannot be used: {why}"]
            ) from None
        return context

    def _told(self, unfit: SettingsError | OSError | None) -> None:
        if unfit is None:
            event("certificate_reloaded", file=str(self.cert))
        else:
            event("certificate_unusable", level=ERROR, why=str(unfit), means="the former certificate stays in use")


def server_tls(cert: Path | None, key: Path | None) -> ServerTls | None:
    return None if cert is None else ServerTls(cert, key)


class _Drain(Service):
    """Run the program's ``stop`` once, when asked; a signal handler may start no thread."""

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
            event("draining", pid=os.getpid())
            self._work()  # one try: a turn that fails is logged by the service, and the next one ends it
        raise ServiceEnded


class _Arbiter(Arbiter):
    """Takes these codes for a worker that cannot start, but not once a handler may have ended it by ``os._exit(3)``."""

    app: _Program
    WORKER_BOOT_ERROR = property(lambda self: -1 if self.app.ends.shared[1] else Arbiter.WORKER_BOOT_ERROR)
    APP_LOAD_ERROR = property(lambda self: -1 if self.app.ends.shared[1] else Arbiter.APP_LOAD_ERROR)


class _Program(BaseApplication):
    def __init__(
        self,
        make: Callable[[], Any],
        program: str,
        graceful_s: float,
        tls: ServerTls | None,
        ends: WorkerEnds,
        listener: int,
    ) -> None:
        self._make, self._program, self._graceful_s, self._tls, self.ends = make, program, graceful_s, tls, ends
        self._listener = listener
        self.reason = mmap.mmap(-1, _REASON_BYTES)  # which a worker shares with its arbiter: why it cannot start
        # In the arbiter.
        self._arbiter_pid = 0
        self._asked = False  # a signal has come; a worker that is forked then sees it too
        self._started_s = -math.inf
        self._early_deaths = 0  # in a row
        # In the worker.
        self._served: Any = None
        self._drain: _Drain | None = None
        self._end_http: Callable[[int, Any], None]
        self._is_up = self._is_drained = self._is_over = False
        self._stalled = ""  # services that stand still, as the log says already
        super().__init__()

    def load_config(self) -> None:
        memory, program = Path("/dev/shm"), self._program
        for name, value in {
            "bind": f"fd://{self._listener}",
            "workers": 1,
            "worker_class": WatchedWorker,
            "threads": _REQUESTS + MOST_FOLLOWERS,
            "worker_connections": _CONNECTIONS,
            "keepalive": 30,
            "timeout": 60,  # that it is there: see ``Pulse``
            "graceful_timeout": math.ceil(self._graceful_s) + _ARBITER_EXTRA_S,
            "worker_tmp_dir": str(memory) if memory.is_dir() and os.access(memory, os.W_OK) else None,
            # its default path is one file per user, and several programs run per machine
            "control_socket_disable": True,
            "proc_name": program,
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
            "worker_exit": self._worker_exit,
            "child_exit": lambda arbiter, worker: self.ends.note(worker, program, worker.pid == arbiter.log.killed),
        }.items():
            self.cfg.set(name, value)
        if (tls := self._tls) is not None:
            self.cfg.set("certfile", str(tls.cert))  # says that there is TLS; the context is ours
            self.cfg.set("ssl_context", lambda _config, _default: tls.get())

    # -- in the arbiter

    def _when_ready(self, arbiter: Any) -> None:
        self._arbiter_pid = os.getpid()
        arbiter.log.on_hurry = functools.partial(self.ends.hurry, self._program)
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
            is_early = now - self._started_s < _SHORT_LIFE_S and not self.ends.shared[0]
            self._early_deaths = self._early_deaths + 1 if is_early else 0
            too_many = self._early_deaths - _MOST_AT_ONCE
            pause_s = backoff_s(too_many, 0.5, 10.0, CHANCE) if too_many > 0 else 0.0
            event(
                "worker_started_again",
                level=WARNING,
                program=self._program,
                in_s=round(pause_s, 1),
                early_deaths=self._early_deaths,
            )
            self.ends.before_restart()
            while not self._asked and time.monotonic() < now + pause_s:
                time.sleep(0.05)
        self._started_s = time.monotonic()
        self.ends.begin()

    # -- in the worker

    def load(self) -> WSGIApplication:
        # By it the arbiter ends a worker that stands still, where a handler in Python would not run; printed are calls.
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        faulthandler.disable()  # it may be on already, and would not see SIGABRT
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # there is no stderr
            faulthandler.enable()
        self._take_signals()
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
        return self._answer

    def _post_worker_init(self, worker: Any) -> None:
        self._end_http = worker.handle_exit
        host, port = worker.sockets[0].getsockname()[:2]
        worker.cfg.set("graceful_timeout", _LAST_ANSWERS_S)  # this process' own copy: what HTTP waits after the drain
        self._take_signals()
        # A thousand messages on their way are some ten thousand objects that no cycle holds. With the usual threshold
        # of 700 the collector walks through them again and again, a fifth of the time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS)
        try:
            self._served.start(port, host)
        except UsherError as refused:
            self._refuse(refused)
        event("listening", url=url_of(host, port, self._tls is not None), pid=os.getpid())
        self._is_up = True
        if self._asked and self._drain is not None:
            self._drain.ask()

    def _take_signals(self) -> None:
        """Again, once the handler's module was imported: it, or a library of it, may have set or blocked them. Then
        nothing would drain, or somebody who closes a connection would end the process."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        for number in _ENDING:
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)
        for number in (signal.SIGPIPE, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Close a connection whose answer says so, which gunicorn does not heed, and any while the program ends. Nor
        is a body waited for that nobody wants. ``start_response`` is a method of gunicorn's response."""
        is_bodied = "HTTP_TRANSFER_ENCODING" in environ or environ.get("CONTENT_LENGTH", "0") not in ("", "0")
        is_read_only = environ["REQUEST_METHOD"] in ("GET", "HEAD")

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            if self._asked or ("Connection", "close") in headers or (is_bodied and (is_read_only or status >= "4")):
                start_response.__self__.force_close()  # type: ignore[attr-defined]
            return start_response(status, headers, *more)

        answer: Iterable[bytes] = self._served.app(environ, start)
        return answer

    def silence(self) -> tuple[float, str]:
        """Return for how long the worker may be silent, 0 while its services stand still, and what it does."""
        if not self._is_up:
            return START_S, "starts"
        if self._asked:
            return self._graceful_s + _ARBITER_EXTRA_S, "drains"
        silence_s, stalled = self._served.liveness()
        if stalled and not self._stalled:
            event("services_stand_still", level=ERROR, why=stalled, pid=os.getpid())
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
        """End the process, here: the frames above belong to the parent. Threads that wait for clients do not count."""
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
                event("arbiter_gone", level=WARNING, pid=os.getpid())
            self._drain.ask()
            if not self._drain.join(self._graceful_s):
                event("drain_unfinished", level=ERROR, seconds=self._graceful_s)

    def _refuse(self, refused: UsherError) -> NoReturn:
        self.reason.write(str(refused).encode(errors="replace")[:_REASON_BYTES])
        sys.exit(Arbiter.WORKER_BOOT_ERROR)
