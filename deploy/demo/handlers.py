"""Two handlers to begin with: ``show`` prints every message, ``record`` is the one that ``usher demo`` checks.

Both are ordinary handlers, as a user writes them: a function of one argument.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from usher.common.base.log import event
from usher.deploy.demo.records import Handled, RecordFile

log = logging.getLogger(__name__)

#: Environment of the demo's consumers; `usher demo` sets it.
FOLDER_VARIABLE = "USHER_DEMO_FOLDER"
WORK_VARIABLE = "USHER_DEMO_WORK_MS"
_LONGEST_SHOWN = 60
_MOST_SHOWN = 6


class Shown(Handled, Protocol):
    """The part of a message that ``show`` needs."""

    @property
    def fields(self) -> dict[str, str]: ...


def show(message: Shown) -> None:
    """Log one line per message: ticket, id, fence and the first fields."""
    fields: dict[str, Any] = {
        f"field_{name}": _cut(value) for name, value in list(message.fields.items())[:_MOST_SHOWN]
    }
    event(
        log,
        "message_shown",
        ticket=message.ticket_id,
        id=message.id,
        fence=message.fence,
        attempt=message.attempt,
        **fields,
    )


def record(message: Handled) -> None:
    """Write down that the message starts, work for a moment, write down that it ended."""
    file, work_s = _Setup.get()
    serial = file.started(message)
    time.sleep(work_s)
    file.ended(serial)


def _cut(value: str) -> str:
    return value if len(value) <= _LONGEST_SHOWN else value[:_LONGEST_SHOWN] + "..."


class _Setup:
    """The file of this process and the time to work, made at the first message: an import does nothing."""

    _lock = threading.Lock()
    _made: tuple[RecordFile, float] | None = None  # guarded by _lock

    @classmethod
    def get(cls) -> tuple[RecordFile, float]:
        with cls._lock:
            # A forked child has its parent's object and must not share its serials.
            if cls._made is None or cls._made[0].pid != os.getpid():
                environ = os.environ
                file = RecordFile(Path(environ[FOLDER_VARIABLE]), environ["USHER_CONSUMER_NAME"])
                cls._made = (file, float(environ.get(WORK_VARIABLE, "1")) / 1000)
            return cls._made
