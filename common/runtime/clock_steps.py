"""End the waits that would last too long after the machine's clock was set back.

Locks and events of Python wait by the wall clock if it was built without sem_clockwait, that is for a C library before
glibc 2.30, as many prebuilt Pythons are. After a step of an hour back no thread would end its wait for an hour: nothing
renews a lease, leads, hands over or retries. A signal ends such a wait inside Python, which then computes the rest
anew, by a clock that is never set; the waiting code notices nothing.
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
#: A smaller step changes a wait by no more than itself, which does no harm.
_STEP_MS = 300
#: Linux ignores this signal by default, so a thread or child that does not expect it is unharmed.
_SIGNAL = signal.SIGURG


class ClockStepWatcher(Service):
    """A watcher that ends the waits of all Python threads when the wall clock was set back. Made on the main thread."""

    name = "set-back"

    def __init__(self) -> None:
        super().__init__()
        self._ahead_ms = _ahead_ms()
        if signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(_SIGNAL, lambda _number, _frame: None)  # an ignored signal would end no wait
            signal.siginterrupt(_SIGNAL, False)

    def run_once(self) -> float:
        time.sleep(_LOOK_S)  # not Service's own wait, which counts by the wall clock too
        before_ms, self._ahead_ms = self._ahead_ms, _ahead_ms()
        if before_ms - self._ahead_ms > _STEP_MS:
            event(log, "clock_moved_backwards", level=logging.WARNING, seconds=(before_ms - self._ahead_ms) / 1000)
            self._end_waits()
        return 0.0

    def _end_waits(self) -> None:
        me = threading.current_thread()
        for thread in threading.enumerate():
            # A signal to a thread that has ended may end the process (SIGSEGV); of threads that Python did not start it
            # does not know whether they have.
            if thread is me or isinstance(thread, threading._DummyThread):
                continue
            if thread.ident is not None and thread.is_alive():
                try:
                    signal.pthread_kill(thread.ident, _SIGNAL)
                except ProcessLookupError:  # it has just ended
                    continue


def _ahead_ms() -> float:
    return wall_ms() - time.monotonic() * 1000


def waits_by_the_wall_clock() -> bool:
    return not sysconfig.get_config_var("HAVE_SEM_CLOCKWAIT")


def look_for_steps() -> ClockStepWatcher | None:
    """Start a ClockStepWatcher if this Python needs one; ``stop`` ends it. Off the main thread, where no signal can be
    taken, return None."""
    if not waits_by_the_wall_clock() or threading.current_thread() is not threading.main_thread():
        return None
    looking = ClockStepWatcher()
    looking.start()
    return looking
