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
from types import FrameType
from typing import Any

#: Signal -> Python's own handler. A handler that the program (or `nohup`) has set itself stays.
_UNTAKEN: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


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
