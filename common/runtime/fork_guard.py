"""End a child that a handler made with ``os.fork`` at the point where the handler ends in it.

Such a child has one thread, which came out of our runner with copies of all waiting work. Going on there, it would
handle its parent's messages a second time, under the same fence, speak on its parent's connections, free its parent's
slots in the journal, and keep the name lock for as long as the machine runs. ``end_children_by`` settles what signals
do to a child.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

#: Seconds within which a child's output is flushed; the rest is lost.
_LAST_WORDS_S = 2.0
_PR_SET_PDEATHSIG = 1
_COUNTS = Path("/proc/vmstat")
_KILLS = re.compile(r"^oom_kill ([0-9]+)$", re.MULTILINE)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux send this signal to this process when the thread that made it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def oom_kills() -> int | None:
    """Return how many processes the kernel has ended for want of memory since the machine started, in all of its
    containers; None where it does not say."""
    with contextlib.suppress(OSError):
        found = _KILLS.search(_COUNTS.read_text(encoding="ascii"))
        return int(found[1]) if found is not None else None
    return None


def call_in_children(method: Callable[[], None]) -> None:
    """Call a bound method in every child that is forked from now on, for as long as its object lives."""
    known = weakref.WeakMethod(method)

    def in_child() -> None:
        if (found := known()) is not None:
            found()

    os.register_at_fork(after_in_child=in_child)


def end_children_by(signals: Iterable[signal.Signals], handler: Callable[..., object]) -> None:
    """Make these signals, taken by ``handler`` in this process, end every child that is forked from now on.

    The forking thread blocks them meanwhile: a signal that reaches the child before its handlers are the default ones
    would be forgotten (Python starts there without pending signals), or taken by ``handler``.
    """
    numbers, held = tuple(signals), threading.local()

    def hold() -> None:
        held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    def in_child() -> None:
        for number in numbers:
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=in_child)


class ForkGuard:
    """A guard around foreign code, ``with ForkGuard():``, amid work that only this process may go on with."""

    __slots__ = ("_here",)

    def __enter__(self) -> None:
        self._here = os.getpid()

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._here:
            leave()


def leave(*_: Any) -> NoReturn:
    """End this process as a script would end that ran the handler's code: with the code of ``sys.exit()``, or 1 and a
    traceback for an error that is being handled. Output is flushed where possible. ``atexit`` and the stack below
    belong to the parent."""
    problem, code = sys.exc_info()[1], 0
    try:
        if isinstance(problem, SystemExit):
            code = problem.code if isinstance(problem.code, int) else int(problem.code is not None)
        elif problem is not None:
            code = 1
        # If a thread of the parent was printing at the moment of the fork, the stream is locked here for ever.
        try_for(_LAST_WORDS_S, lambda: _write_last(problem))
    finally:
        os._exit(code & 0xFF)


def try_for(seconds: float, work: Callable[[], None]) -> None:
    """Do the last work of a process that ends, which may never return or raise anything, for so long at most."""
    doing = threading.Thread(target=work, daemon=True)
    doing.start()
    doing.join(seconds)


def _write_last(problem: BaseException | None) -> None:
    if isinstance(problem, SystemExit):
        if isinstance(problem.code, str):
            sys.stderr.write(f"{problem.code}\n")
    elif problem is not None:
        traceback.print_exception(problem)
    sys.stdout.flush()
    sys.stderr.flush()
