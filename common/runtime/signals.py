"""Turn Ctrl-C and SIGTERM into a flag that a program's own loop checks; Python would raise at any line, or end at once.

::

    with UntilSignal() as until, StreamRouter("redis://...") as router:
        subscription = router.subscribe("tickets:42")
        while not until.came:
            for entry in subscription.take(timeout_s=1.0):
                ...

``MessageReadingLoop.run`` and ``LogConsumer.run`` do this by themselves.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

#: Signal -> Python's own handler. A handler that the program (or `nohup`) has set itself stays.
_UNTAKEN: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_STEP_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class UntilSignal:
    """A stop flag, set by signals. Between ``__enter__`` and ``__exit__`` the first of the two signals only sets
    ``came``; the second does what it did before, and so ends a program that does not finish. Off the main thread, which
    alone gets signals, it takes none.

    If one is nested in another, the first signal sets both. A signal in a forked child concerns that child only."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[signal.Signals, Any] = {}
        self._pid = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Takes no lock: the interrupted code may hold it."""
        self._let_go()
        if os.getpid() != self._pid:  # a child forked meanwhile ends as it would without us
            os.kill(os.getpid(), number)
        self.came = True
        around = _one_of_us(self._before.get(signal.Signals(number)))
        if around is not None and around._pid == self._pid:
            around._note(number, frame)

    def _let_go(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def __enter__(self) -> UntilSignal:
        if threading.current_thread() is threading.main_thread():
            self._pid = os.getpid()
            now = {number: signal.getsignal(number) for number in _UNTAKEN}
            self._before = {
                number: handler for number, handler in now.items() if handler is _UNTAKEN[number] or _one_of_us(handler)
            }
            for number in self._before:
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()


def _one_of_us(handler: Any) -> UntilSignal | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, UntilSignal) else None


class StopAsked(SystemExit):
    """The user, or the system, asked us to stop: with the exit code that shells expect of a program that a signal
    stopped."""


class StopRequest:
    """A counter of requests to stop (Ctrl-C, SIGTERM, a closed terminal), between ``__enter__`` and ``__exit__``. A
    signal handler that raises could hit any line, also the one between starting a process and writing down that it was
    started. So nothing is raised here: a waiting loop waits in small steps and checks."""

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
        return 128 + self.signal

    def check(self) -> None:
        if self.asked:
            raise StopAsked(self.exit_code)

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
