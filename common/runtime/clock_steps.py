"""Set back: the clock of this machine was set back, and waits that count by it would last for as long as the step.

Locks and events of Python count by the wall clock where it was built without sem_clockwait, so for a C library before
glibc 2.30, as many a ready-made one is. After a step of an hour back no thread would end its wait for an hour: nothing
renews a lease, leads, hands over or retries. A signal ends such a wait inside Python, which then counts anew what is
left of it, by a clock that nobody sets; the code that waits notices nothing.
"""

from __future__ import annotations

import logging
import signal
import sysconfig
import threading
import time

from usher.common.base.clock import wall_ms
from usher.common.base.log import event
from usher.common.runtime.service import Service

log = logging.getLogger(__name__)

_LOOK_S = 0.5
#: What is less shortens or lengthens a wait that little.
_STEP_MS = 300
#: Linux' own default is to ignore it, and so does who gets one that he does not wait for.
_SIGNAL = signal.SIGURG


class ClockStepWatcher(Service):
    """Ends the waits of all threads of Python when the wall clock was set back. Made on the main thread."""

    name = "set-back"

    def __init__(self) -> None:
        super().__init__()
        self._ahead_ms = _ahead_ms()
        if signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(_SIGNAL, lambda _number, _frame: None)  # what is ignored ends no wait
            signal.siginterrupt(_SIGNAL, False)

    def run_once(self) -> float:
        time.sleep(_LOOK_S)  # and not in Service's wait, which is one of those
        before_ms, self._ahead_ms = self._ahead_ms, _ahead_ms()
        if before_ms - self._ahead_ms > _STEP_MS:
            event(log, "clock_moved_backwards", level=logging.WARNING, seconds=(before_ms - self._ahead_ms) / 1000)
            self._end_waits()
        return 0.0

    def _end_waits(self) -> None:
        me = threading.current_thread()
        for thread in threading.enumerate():
            # A signal to a thread that has ended may end the process (SIGSEGV), and of one that it did not begin Python
            # does not know it.
            if thread is me or isinstance(thread, threading._DummyThread):
                continue
            if thread.ident is not None and thread.is_alive():
                try:
                    signal.pthread_kill(thread.ident, _SIGNAL)
                except ProcessLookupError:  # it has just ended
                    continue


def _ahead_ms() -> float:
    """How far the wall clock is ahead of one that nobody sets."""
    return wall_ms() - time.monotonic() * 1000


def waits_by_the_wall_clock() -> bool:
    """Whether this Python's locks do."""
    return not sysconfig.get_config_var("HAVE_SEM_CLOCKWAIT")


def look_for_steps() -> ClockStepWatcher | None:
    """From now on, where it is needed; ``stop`` ends it. Off the main thread, where no signal can be taken, it does
    nothing."""
    if not waits_by_the_wall_clock() or threading.current_thread() is not threading.main_thread():
        return None
    looking = ClockStepWatcher()
    looking.start()
    return looking
