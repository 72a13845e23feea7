"""Logging by action: every record names what happened, so that logs can be counted and asserted on.

``event(log, "ticket_handed_over", ticket="42", owner="c1:7")`` prints, for people::

    12:00:01.123 INFO  master intake  ticket_handed_over ticket=42 owner=c1:7

and one JSON object per line with ``USHER_LOG_FORMAT=json``. Values are escaped: a ticket id with a line break cannot
fake a line. Tracebacks, and what others log in several lines, are moved in, with control characters spelt out: what
begins at the margin is ours. Passwords and tokens are ``***``, whoever logs them. A line that comes again and again is
left out after a few times; the next one after that tells how often, as ``left_out``.
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
#: A password in a Redis URL, wherever it turns up in a text.
#: Up to the last ``@`` of the word: a password may hold ``:``, ``/`` and ``@``.
_URL_PASSWORD = re.compile(r'(?<=://)([^/@:\s]*):[^\s"]+@')
#: One among the options of a URL: ``?sentinel_password=...``, ``?password=...``.
_OPTION_PASSWORD = re.compile(r'(?<=password=)[^&#\s"]+')
#: A bearer token in a header, and one that `usher token new` has made, wherever it turns up.
_TOKEN = re.compile(r"(?i:(?<=bearer ))[A-Za-z0-9._~+/=-]{8,}|usher_[A-Za-z0-9_-]{43}")
#: Identical lines that are let through in a while, and how many different ones are remembered.
_MOST_ALIKE, _WHILE_S, _MOST_KNOWN = 10, 10.0, 1000
#: A secret shorter than this is none, and would be found everywhere.
_SHORTEST_SECRET = 4
#: A fork waits so long for a line that is being written; a log that nobody reads must not hold it up for ever.
_LONGEST_LINE_S = 1.0


class HasFacts(Protocol):
    """What a line of a log can be about."""

    @property
    def in_hand(self) -> bool: ...

    def facts(self) -> dict[str, Any]: ...


#: What this thread, or this task, is at work on, as long as that says so itself: every line that is logged meanwhile
#: tells its facts, whoever logs it. A thread that a handler starts does not inherit it, unless it runs in a
#: ``contextvars.copy_context()``.
in_hand: ContextVar[HasFacts | None] = ContextVar("usher_in_hand", default=None)


#: Of this process; replaced by ``configure``.
_secrets: tuple[str, ...] = ()


def redacted(text: str) -> str:
    """The text without passwords of URLs, tokens, and the secrets that ``configure`` was given.

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
        except TypeError:  # a lone surrogate out of somebody's bytes, or a number of more than 64 bits
            return redacted(json.dumps(document, default=_as_text))


class _InHand(logging.Filter):
    """Adds the facts of what is in hand; those that a line names itself stand."""

    def filter(self, record: logging.LogRecord) -> bool:
        what = in_hand.get()
        if what is not None and what.in_hand:
            record.facts = {**what.facts(), **getattr(record, "facts", {})}
        return True


class _Repeats(logging.Filter):
    """Leaves out what is said too often. Two lines are alike when they say the same about the same."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[
            tuple[str, int, str, str], tuple[float, int]
        ] = {}  # guarded by self._lock: since when, and how often

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
        """Make room: of what was not left out, nothing needs to be told."""
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
    # The longest first: one may be the beginning of another.
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
    """No process is forked while a thread writes a line: the stream would be locked in the child for ever, by a thread
    that is not there, and whoever writes there waits for it. The locks of ``logging`` itself are new in a child."""
    held = threading.local()

    def hold() -> None:
        locks = [handler.lock for handler in logging.getLogger().handlers if handler.lock is not None]
        held.locks = [lock for lock in locks if lock.acquire(timeout=_LONGEST_LINE_S)]

    def release() -> None:
        for lock in held.locks:
            lock.release()

    os.register_at_fork(before=hold, after_in_parent=release)
