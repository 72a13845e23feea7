"""Turn Ctrl-C, SIGTERM and a closed terminal into a flag that loops check.

A signal handler that raises could hit any line, also the one between starting a process and writing down that it was
started. So nothing is raised here: a waiting loop waits in small steps and checks.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

_STEP_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopAsked(Exception):
    """The user, or the system, asked us to stop."""


class StopRequest:
    """A counter of requests to stop, between ``__enter__`` and ``__exit__``."""

    def __init__(self) -> None:
        self.count = 0
        self.signal = 0  # the first one
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.count > 0

    @property
    def insists(self) -> bool:
        """True when asked a second time: end at once instead of gently."""
        return self.count > 1

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect of a program stopped by a signal."""
        return 128 + self.signal

    def check(self) -> None:
        if self.asked:
            raise StopAsked

    def wait(self, seconds: float) -> bool:
        """Wait for ``seconds``, or until asked to stop; return True in the second case."""
        deadline_s = time.monotonic() + seconds
        while not self.asked and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(_STEP_S, left_s))
        return self.asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.signal = self.signal or number

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
