"""Logging by action: every record names an event, so that logs can be counted and asserted on.

``event(log, "ticket_handed_over", ticket="42", owner="c1:7")`` prints, for people::

    12:00:01.123 INFO  master intake  ticket_handed_over ticket=42 owner=c1:7

and one JSON object per line with ``USHER_LOG_FORMAT=json``. Values are escaped: a ticket id with a line break cannot
fake a line. Tracebacks, and records of several lines by other libraries, are indented, with control characters spelt
out: only our own lines begin at the margin. Passwords and tokens become ``***``, whichever library logs them. A line
that repeats is left out after a few times; the next one after that tells how often, as ``left_out``.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Protocol

import orjson

from usher.common.base.text import escape_control

_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+,-]+")
#: A password in a Redis URL anywhere in a text, up to the last ``@`` of the word: a password may hold ``:``, ``/`` and
#: ``@``.
_URL_PASSWORD = re.compile(r'(?<=://)([^/@:\s]*):[^\s"]+@')
#: A password among the options of a URL: ``?sentinel_password=...``, ``?password=...``.
_OPTION_PASSWORD = re.compile(r'(?<=password=)[^&#\s"]+')
#: A bearer token in a header, and a token made by `usher token new` anywhere in a text.
_TOKEN = re.compile(r"(?i:(?<=bearer ))[A-Za-z0-9._~+/=-]{8,}|usher_[A-Za-z0-9_-]{43}")
#: Identical lines that pass within ``_WHILE_S`` seconds, and the number of different lines that are remembered.
_MOST_ALIKE, _WHILE_S, _MOST_KNOWN = 10, 10.0, 1000
#: A shorter secret is not hidden: it protects nothing, and would be found everywhere.
_SHORTEST_SECRET = 4
#: The longest time that a fork waits for a line being written; a log pipe without a reader must not block it for ever.
_LONGEST_LINE_S = 1.0


class HasFacts(Protocol):
    """The work that a log line can be about."""

    @property
    def in_hand(self) -> bool: ...

    def facts(self) -> dict[str, Any]: ...


#: The work that this thread, or this task, has in hand, for as long as it says so itself: every line that any code logs
#: meanwhile carries its facts. A thread that a handler starts does not inherit it, unless it runs in a
#: ``contextvars.copy_context()``.
in_hand: ContextVar[HasFacts | None] = ContextVar("usher_in_hand", default=None)


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


def event(log: logging.Logger, action: str, *, level: int = logging.INFO, exc_info: bool = False, **facts: Any) -> None:
    """Log that ``action`` happened, with its facts."""
    log.log(level, action, extra={"facts": facts}, exc_info=exc_info)


class _Human(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = (
            f"{clock}.{record.msecs:03.0f} {record.levelname:<7} {self._program} {record.threadName:<9}"
            f" {record.getMessage()}"
        )
        facts = "".join(f" {name}={_format_value(value)}" for name, value in getattr(record, "facts", {}).items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return escape_control(redacted(head + facts + trace), kept="\n\t").replace("\n", "\n    ")


class _Json(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time_ms": int(record.created * 1000),
            "level": record.levelname,
            "program": self._program,
            "thread": record.threadName,
            "module": record.name,
            "action": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        try:
            return redacted(orjson.dumps(document, default=_as_text).decode())
        except TypeError:  # a lone surrogate from bytes that are not UTF-8, or a number of more than 64 bits
            return redacted(json.dumps(document, default=_as_text))


class _InHand(logging.Filter):
    """A filter that adds the facts of the work in hand; facts that a line names itself win."""

    def filter(self, record: logging.LogRecord) -> bool:
        what = in_hand.get()
        if what is not None and what.in_hand:
            record.facts = {**what.facts(), **getattr(record, "facts", {})}
        return True


class _Repeats(logging.Filter):
    """A filter that drops lines that repeat too often: same logger, level, event and facts."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # Guarded by self._lock: since when, and how often.
        self._seen: dict[tuple[str, int, str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        facts = getattr(record, "facts", {})
        alike = (record.name, record.levelno, record.getMessage(), repr(facts))
        with self._lock:
            since, count = self._seen.get(alike, (record.created, 0))
            left_out = 0
            if not 0 <= record.created - since < _WHILE_S:
                left_out, since, count = max(0, count - _MOST_ALIKE), record.created, 0
            if len(self._seen) >= _MOST_KNOWN and alike not in self._seen:
                self._forget(record.created)
            self._seen[alike] = (since, count + 1)
        if left_out:
            record.facts = {**facts, "left_out": left_out}
        return count < _MOST_ALIKE

    def _forget(self, now: float) -> None:
        """Make room: lines of which none was left out need no count."""
        self._seen = {
            alike: known
            for alike, known in self._seen.items()
            if known[1] > _MOST_ALIKE and now - known[0] < 60 * _WHILE_S
        }
        if len(self._seen) >= _MOST_KNOWN:
            self._seen = {}


def _as_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _format_value(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else _as_text(value)
    return text if _PLAIN.fullmatch(text) else orjson.dumps(text).decode() if text.isprintable() else ascii(text)


def configure(program: str, level: str, style: str, secrets: Iterable[str] = ()) -> None:
    """Send all records to stderr, as text for people (``style="human"``) or as JSON lines (``"json"``); ``secrets`` are
    never shown."""
    global _secrets
    # The longest first: one secret may be the beginning of another.
    _secrets = tuple(sorted({secret for secret in secrets if len(secret) >= _SHORTEST_SECRET}, key=len, reverse=True))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(program) if style == "json" else _Human(program))
    handler.addFilter(_InHand())
    handler.addFilter(_Repeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    _fork_between_lines()
    root.setLevel(level.upper())
    for chatty in ("urllib3", "gunicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


@functools.cache  # once in a process
def _fork_between_lines() -> None:
    """Let no process fork while a thread writes a line: the stream would stay locked in the child for ever, by a thread
    that does not exist there, and every writer would hang. The locks of ``logging`` itself are new in a child."""
    held = threading.local()

    def hold() -> None:
        locks = [handler.lock for handler in logging.getLogger().handlers if handler.lock is not None]
        held.locks = [lock for lock in locks if lock.acquire(timeout=_LONGEST_LINE_S)]

    def release() -> None:
        for lock in held.locks:
            lock.release()

    os.register_at_fork(before=hold, after_in_parent=release)
