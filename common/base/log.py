"""Logging by action: every record names an event, so that logs can be counted and asserted on.

``event("ticket_handed_over", ticket="42", owner="c1:7")`` prints, for people::

    2026-11-27T12:00:01.123+01:00 INFO  master intake  ticket_handed_over ticket=42 owner=c1:7

and one JSON object per line with ``USHER_LOG_FORMAT=json``: ``timestamp``, ``level``, ``logger``, ``message``, for our
lines ``event`` (its name, which is their message too), and the facts as fields. Values are escaped: a ticket id with a
line break cannot fake a line. Tracebacks, and records of several lines by other libraries, are indented, with control
characters spelt out: only our own lines begin at the margin. Passwords and tokens become ``***``, whichever library
logs them.

A handler's code logs through here too, and sets up logging as it likes. A line never raises, whatever it was given; and
our events are written whatever becomes of the loggers of this process, since they do not go through them.

Nobody waits for a reader of the log. A line is written at once, by the thread that logs it, as far as there is room: it
is there whatever becomes of the process next. What finds no room waits in memory for a thread; beyond a bound, lines
are dropped and counted. Logging handlers of others run where the line is logged, as in any program.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import json
import logging
import os
import queue
import re
import select
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import orjson

from usher.common.base.text import escape_control, format_error

DEBUG, INFO, WARNING, ERROR, CRITICAL = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL

_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+,-]+")
#: A password in a Redis URL anywhere in a text, up to the last ``@`` of the word: a password may hold ``:``, ``/`` and
#: ``@``.
_URL_PASSWORD = re.compile(r'(?<=://)([^/@:\s]*):[^\s"]+@')
#: A password among the options of a URL: ``?sentinel_password=...``, ``?password=...``.
_OPTION_PASSWORD = re.compile(r'(?<=password=)[^&#\s"]+')
#: A bearer token in a header, and a token made by `usher token new` anywhere in a text.
_TOKEN = re.compile(r"(?i:(?<=bearer ))[A-Za-z0-9._~+/=-]{8,}|usher_[A-Za-z0-9_-]{43}")
#: A shorter secret is not hidden: it protects nothing, and would be found everywhere.
_SHORTEST_SECRET = 4
#: How long a flush waits for a reader that is behind.
_FLUSH_S = 0.5
#: Bytes that wait for the reader of stderr.
_MOST_BYTES = 1 << 20
#: Our own descriptor of stderr has at least this number: programs that "close everything" begin at 3.
_NUMBER = 100
_Lock = contextlib.AbstractContextManager[object]


#: The work that this thread, or this task, has in hand, for as long as it says so itself (``in_hand``): every line that
#: any code logs meanwhile carries its ``facts()``. A thread that a handler starts does not inherit it, unless it runs
#: in a ``contextvars.copy_context()``.
in_hand: ContextVar[Any] = ContextVar("usher_in_hand", default=None)

#: The secrets of this process; replaced by ``configure``.
_secrets: tuple[str, ...] = ()


def redacted(text: str) -> str:
    """Return the text without passwords of URLs, tokens, and the secrets that ``configure`` was given.

    >>> redacted("redis://user:secret@host:6379/0")
    'redis://user:***@host:6379/0'
    >>> redacted("redis+sentinel://:one@host:26379/service?sentinel_password=two")
    'redis+sentinel://:***@host:26379/service?sentinel_password=***'
    >>> redacted("Authorization: Bearer abcd1234")
    'Authorization: Bearer ***'
    """
    for secret in _secrets:
        text = text.replace(secret, "***")
    return _TOKEN.sub("***", _OPTION_PASSWORD.sub("***", _URL_PASSWORD.sub(r"\1:***@", text)))


def event(action: str, *, level: int = INFO, exc_info: bool = False, trace: str = "", **facts: Any) -> None:
    """Log that ``action`` happened, with its facts, under the name of the module that calls. ``trace``: a traceback, or
    the stack of a thread, as text."""
    if (ours := _ours) is not None and level < ours.threshold:
        return
    here = inspect.currentframe()
    log = logging.getLogger(here.f_back.f_globals["__name__"] if here and here.f_back else __name__)
    if ours is None:  # a library in somebody's program
        log.log(level, f"{action}\n{trace}" if trace else action, extra={"facts": facts}, exc_info=exc_info)
    else:
        record = logging.LogRecord(log.name, level, "", 0, action, (), sys.exc_info() if exc_info else None)
        record.facts, record.exc_text = facts, trace or None
        ours.tell(log, record)


class _Stderr:
    """The log's own descriptor. ``write`` is called with ``lock`` held, and never waits: what finds no room waits for a
    thread, which may be slow, or stand still for ever."""

    def __init__(self, lock: _Lock) -> None:
        self._lock = lock
        self.dropped = self.told = 0
        self._anew()
        self._descriptor, self._file = -1, os.stat_result([0] * 10)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed before this program began
            number = sys.stderr.fileno()
            try:
                self._descriptor = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _NUMBER)
            except OSError:  # so few are allowed
                self._descriptor = os.dup(number)
            self._file = os.fstat(self._descriptor)
        self._takes_all = stat.S_ISREG(self._file.st_mode)
        self._flag = getattr(os, "RWF_NOWAIT", 0)  # 0: the system cannot write without waiting

    def _anew(self) -> None:
        self._pid, self._size = os.getpid(), 0
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def waits(self) -> bool:
        if os.getpid() != self._pid:  # a forked child: what waits is its parent's, and so is the thread
            self._anew()
        return self._size > 0

    def write(self, line: bytes) -> None:
        rest = line
        if not self.waits():
            try:
                rest = line[self._write(line, may_wait=False) :]
            except BlockingIOError:
                pass
            except OSError:
                self.dropped += 1
                return
        if not rest:
            return
        if self._size and self._size + len(rest) > _MOST_BYTES:
            self.dropped += 1
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="log", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread to be had, or the interpreter ends
                self.dropped += 1
                return
            self._thread = thread
        self._size += len(rest)
        self._queue.put(rest)

    def _write(self, line: bytes, may_wait: bool) -> int:
        if self._descriptor < 0 or not os.path.samestat(os.fstat(self._descriptor), self._file):
            raise OSError("closed, and the number may be somebody else's")
        if may_wait or self._takes_all:
            return os.write(self._descriptor, line)
        if self._flag:
            try:
                return os.pwritev(self._descriptor, [line], -1, self._flag)
            except (BlockingIOError, BrokenPipeError):
                raise
            except OSError:  # not for this kind of file, or not on this kernel; what is really wrong fails again below
                self._flag = 0
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        # Another process may take the room between the two: then this thread waits for the reader.
        return os.write(self._descriptor, line[: select.PIPE_BUF]) if room.poll(0) else 0

    def _run(self) -> None:
        while True:
            line = rest = self._queue.get()
            try:
                while rest:
                    try:
                        rest = rest[self._write(rest, may_wait=True) :]
                    except BlockingIOError:  # it was opened so by others
                        time.sleep(0.05)
            except OSError:
                self.dropped += 1
            with self._lock:
                self._size -= len(line)
            if self.dropped > self.told and not self._size:
                lines, self.told = self.dropped - self.told, self.dropped
                event("log_lines_dropped", level=WARNING, lines=lines)

    def flush(self, within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        while self.waits():
            if time.monotonic() > until_s:
                return False
            time.sleep(0.005)
        return True


class LogHandler(logging.Handler):
    """The handler of all records of this process: those of others come through the root logger, our events do not."""

    def __init__(self, program: str, threshold: int, style: str) -> None:
        super().__init__()
        assert self.lock is not None
        self._lock: _Lock = self.lock  # which is new in a forked child
        self._program = program
        self._line = self._json if style == "json" else self._human
        self.threshold = threshold
        self._is_replaced = False  # and the log says so
        # Not the stream itself: a handler may close it, and a thread that is forked away may hold its lock for ever.
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self.stderr = _Stderr(self._lock)

    def tell(self, log: logging.Logger, record: logging.LogRecord) -> None:
        """Write an event of ours, and pass it on to the handlers that others have added."""
        self._write_safely(record)
        if (log.disabled or self not in logging.getLogger().handlers) and not self._is_replaced:
            self._is_replaced = True
            way_out = "add a handler to the root logger where the events are wanted too (docs/handlers.md)"
            what = "logging was set up anew in this process: other lines go where that says, events still come here"
            event("logging_replaced", level=WARNING, what=what, way_out=way_out)
        for handler in list(_handlers_of(log)) if log.isEnabledFor(record.levelno) else ():
            if handler is not self and record.levelno >= handler.level:
                with contextlib.suppress(Exception):
                    handler.handle(record)

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record of others. Neither it nor their filters can make this raise."""
        kept: Any = True
        with contextlib.suppress(Exception):
            kept = self.filter(record)
        if kept:
            self._write_safely(kept if isinstance(kept, logging.LogRecord) else record)
        return bool(kept)

    def flush(self) -> None:
        """Write what waits for a reader, for as long as may be."""
        self.stderr.flush(_FLUSH_S)

    def _write_safely(self, record: logging.LogRecord) -> None:
        try:
            facts, message = _facts(record), record.getMessage()
            encoded = f"{self._line(record, message, facts)}\n".encode(self._encoding, "backslashreplace")
            with self._lock:
                self.stderr.write(encoded)
        except Exception as problem:  # no line can be made of it: Python would print a traceback
            try:
                said, where = _shown(repr, record.msg)[:500], f"{record.pathname}:{record.lineno}"
                why = format_error(problem)
                event("log_line_unreadable", level=WARNING, said=said, where=where, why=why)
            except Exception:  # without memory or stack
                self.stderr.dropped += 1

    def _human(self, record: logging.LogRecord, message: str, facts: dict[Any, Any]) -> str:
        clock = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        head = f"{clock} {record.levelname!s:<7} {self._program} {record.threadName!s:<9}"
        told = "".join(f" {_as_text(name)}={_format_value(value)}" for name, value in facts.items())
        trace = f"\n{text}" if (text := _traceback(record)) else ""
        return escape_control(redacted(f"{head} {message}{told}{trace}"), kept="\n\t").replace("\n", "\n    ")

    def _json(self, record: logging.LogRecord, message: str, facts: dict[Any, Any]) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        own: dict[Any, Any] = {
            "timestamp": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "program": self._program,
            "thread": record.threadName,
            "logger": record.name,
            "message": message,
        }
        if isinstance(getattr(record, "facts", None), dict):
            own["event"] = message
        document = {**own, **facts, **own}  # these in front, and nobody's fact in their place
        if trace := _traceback(record):
            document["traceback"] = trace
        try:
            return redacted(orjson.dumps(document, default=_as_text).decode())
        except TypeError:  # a lone surrogate from bytes that are not UTF-8, or a number of more than 64 bits
            pass
        try:
            return redacted(json.dumps(document, default=_as_text))
        except (TypeError, ValueError, RecursionError):  # keys that are no text, or a value that holds itself
            return redacted(json.dumps({_as_text(name): _as_text(value) for name, value in document.items()}))


def _facts(record: logging.LogRecord) -> dict[Any, Any]:
    own = getattr(record, "facts", None)
    facts: dict[Any, Any] = own if isinstance(own, dict) else {}  # ``extra`` of others may hold anything
    what = in_hand.get()
    return {**what.facts(), **facts} if what is not None and what.in_hand else facts


def _traceback(record: logging.LogRecord) -> str:
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text or ""


def _shown(how: Any, value: Any) -> str:
    try:
        return str(how(value))
    except BaseException as problem:  # also one that means to end the program
        return f"({type(value).__name__} without a text: {type(problem).__name__})"


def _as_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else _shown(str, value)


def _format_value(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else _as_text(value)
    return text if _PLAIN.fullmatch(text) else orjson.dumps(text).decode() if text.isprintable() else ascii(text)


def _handlers_of(log: logging.Logger) -> Iterator[logging.Handler]:
    at: logging.Logger | None = log
    while at is not None:
        yield from at.handlers
        at = at.parent if at.propagate else None


#: The handler of this process; None in programs that are not ours.
_ours: LogHandler | None = None


def flush() -> None:
    """Write the lines that wait for a reader, for as long as may be: this process is about to end."""
    if _ours is not None:
        _ours.flush()


def log_state() -> tuple[int, bool]:
    """Return how many lines of this process were dropped, and whether lines wait now since nobody reads the log."""
    if _ours is None:
        return 0, False
    return _ours.stderr.dropped, _ours.stderr.waits()


def configure(program: str, level: str, style: str, secrets: Iterable[str] = ()) -> None:
    """Send all records to stderr, as text for people (``style="human"``) or as JSON lines (``"json"``); ``secrets`` are
    never shown."""
    global _secrets, _ours
    # The longest first: one secret may be the beginning of another.
    _secrets = tuple(sorted({secret for secret in secrets if len(secret) >= _SHORTEST_SECRET}, key=len, reverse=True))
    for name in [one for one in sys.modules if one.startswith("usher.")]:
        logging.getLogger(name)  # there, for whoever sets up logging anew and means all loggers
    root = logging.getLogger()
    root.setLevel(level.upper())
    _ours = LogHandler(program, root.level, style)
    root.handlers[:] = [_ours]
    for chatty in ("urllib3", "gunicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
