"""gunicorn's words in our log."""

from __future__ import annotations

import functools
import logging
import re
import sys
from typing import Any

from gunicorn.arbiter import Arbiter

from usher.common.base.log import event

log = logging.getLogger(__name__)

#: Exit codes of a worker after which the arbiter starts no other: it could not start.
NEVER_AGAIN = (Arbiter.WORKER_BOOT_ERROR, Arbiter.APP_LOAD_ERROR)
#: How a worker ended; up to gunicorn 26.0 some of these lines come with their arguments in them.
_ENDED = re.compile(r"Worker \(pid:(\d+)\) (?:was sent (\w+)|exited with code (\d+))")


class ServerLog:
    """gunicorn's words in our log: troubles as they are, everything else only for those who ask for debug."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self._ended: set[int] = set()  # workers that stood still
        self.killed = 0  # the last worker that was ended by SIGKILL

    def _say(self, level: int, message: str, *args: Any, **more: Any) -> None:
        event(
            log,
            "web_server",
            level=level,
            says=(message % args if args else message),
            exc_info=bool(more.get("exc_info")),
        )

    def critical(self, message: str, *args: Any, **more: Any) -> None:
        stands_still = message.startswith("WORKER TIMEOUT")  # told by ``WorkerEnds``
        self._ended.update(args if stands_still else ())
        self._say(logging.DEBUG if stands_still else logging.CRITICAL, message, *args, **more)

    info = functools.partialmethod(_say, logging.DEBUG)

    def debug(self, message: str, *args: Any, **more: Any) -> None:
        """Say nothing: these lines have the path of every request, in which a token may stand by mistake."""

    def warning(self, message: str, *args: Any, **more: Any) -> None:
        if message.startswith("Invalid request"):  # it repeats parts of the request; and a flood is none of the log
            self._say(logging.DEBUG, "a request that is not HTTP was refused")
        else:
            self._say(logging.DEBUG if self._is_told(message, args) else logging.WARNING, message, *args, **more)

    def error(self, message: str, *args: Any, **more: Any) -> None:
        ended = _ended(message, args)
        if ended is not None and ended[2] == "SIGKILL":
            self.killed = int(ended[1])
        refused = ended is not None and ended[3] is not None and int(ended[3]) in NEVER_AGAIN
        told = refused or self._is_told(message, args)  # in better words
        told = told or message.startswith(("Shutting down", "Reason:"))  # by ``serve``
        self._say(logging.DEBUG if told else logging.ERROR, message, *args, **more)

    def _is_told(self, message: str, args: tuple[Any, ...]) -> bool:
        """Return whether this is of the end of a worker that stood still."""
        ended = _ended(message, args)
        return ended is not None and int(ended[1]) in self._ended

    def exception(self, message: str, *args: Any, **more: Any) -> None:
        slow = isinstance(
            sys.exc_info()[1], TimeoutError
        )  # a client that does not send its request, or read its answer
        self._say(logging.DEBUG if slow else logging.ERROR, message, *args, exc_info=not slow)

    def log(self, level: int, message: str, *args: Any, **more: Any) -> None:
        self._say(level, message, *args, **more)

    def _nothing(self, *_args: Any, **_more: Any) -> None:
        """Do nothing: there is no access log, and our handlers are the root's."""

    setup = access = reopen_files = close_on_exec = _nothing


def _ended(message: str, args: tuple[Any, ...]) -> re.Match[str] | None:
    """Return the worker's process id, signal and exit code, if the line tells of its end."""
    return _ENDED.match(message % args if args else message)
