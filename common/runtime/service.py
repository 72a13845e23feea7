"""Background roles: each role is a ``Service``, with a thread that repeats ``run_once``; and the ``Health`` of a
program, judged by when their turns ended.

The contract, tested by abuse in tests/unit/test_service.py:

* ``start`` begins the thread; a second call is an error; after ``stop`` it does nothing. Raises StartRefused when the
  system has no thread to give.
* ``stop`` asks for the end and returns at once; before ``start``, twice, or from the thread itself is fine. It calls
  ``interrupt`` to end a blocking call in ``run_once``.
* ``join(timeout_s)`` says whether the thread has ended.
* A turn that fails is logged, counted as trouble for the health endpoint, and retried with backoff. ``ServiceEnded``
  ends the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from usher.common.base.backoff import backoff_s
from usher.common.base.clock import CHANCE, now_s
from usher.common.base.errors import RedisTrouble, SqlTrouble, StartRefused
from usher.common.base.log import CRITICAL, ERROR, WARNING, event

_FIRST_PAUSE_S = 0.05
#: The longest pause after a failed turn.
LONGEST_PAUSE_S = 2.0
#: Seconds before the same trouble is logged again, so that an outage of an hour is not a log of a million lines.
_REPEAT_LOG_S = 10.0
_NO_THREAD = (
    "The system limits threads (ulimit -u, TasksMax= of a systemd unit, --pids-limit of a container) or their memory"
    " (ulimit -v): allow more; a consumer has as many as USHER_CONCURRENCY says, and some ten others"
)


class ServiceEnded(Exception):
    """Raised by ``run_once`` when the role has nothing more to do, ever."""


class Service:
    """A role with a thread of its own. Subclasses set ``name`` (at most 15 bytes: Linux cuts thread names) and define
    ``run_once``."""

    name: str = "service"
    #: Health calls the service stalled when no turn ended for this long; a turn must therefore wait for less.
    stalls_after_s: float = 10.0
    #: A turn waits on ``_link`` for what comes: a stop ends that.
    waits_on_link = False
    _link: Any = None  # a connection of its own, where it has one

    def __init__(self, wake: Any = None) -> None:
        """``wake``: what it waits on between its turns, in place of an event that only threads can set."""
        self._stop = threading.Event()
        self._wake = wake or threading.Event()
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._trouble: str | None = None  # of the last turn; a long one may take it back
        self._logged: tuple[str, float] = ("", 0.0)
        self._last_turn_s: float | None = None
        self.turns = 0
        self.failed_turns = 0

    def run_once(self) -> float:
        """Do one turn of the work. Returns the seconds to wait before the next one; ``wake`` cuts that short."""
        raise TypeError(f"{type(self).__name__} must define run_once")

    def interrupt(self) -> None:
        """End a blocking call in ``run_once``. Called by ``stop``, from another thread."""
        if self.waits_on_link:
            self._link.interrupt()

    def on_end(self) -> None:
        """Clean up after the last turn: close ``_link``. Called once, on the service's own thread."""
        if self._link is not None:
            self._link.close()

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError(f"service {self.name} was started twice")
        if self._stop.is_set():
            return
        self._last_turn_s = now_s()
        thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
        try:
            thread.start()
        except RuntimeError as refused:  # Python gives no reason
            raise StartRefused(f"no thread for {self.name}: {refused}. {_NO_THREAD}") from refused
        self._thread = thread

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self.interrupt()

    def join(self, timeout_s: float) -> bool:
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def wake(self) -> None:
        self._wake.set()

    def made_progress(self) -> None:
        """Tell health that a long turn is not stalled. Called by that turn, on its own thread."""
        self._last_turn_s = now_s()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def last_turn_s(self) -> float | None:
        return self._last_turn_s

    @property
    def trouble(self) -> str | None:
        return self._trouble

    def _loop(self) -> None:
        while True:
            self._wake.clear()
            # Asked after ``clear``: otherwise a ``stop`` between the two would be slept through in the wait below.
            if self._stop.is_set():
                break
            try:
                wait_s = self.run_once()
                self._failures, self._trouble = 0, None
            except ServiceEnded:
                break
            except Exception as problem:
                if self._stop.is_set():
                    break
                wait_s = self._after_failure(problem)
            except BaseException as problem:
                event("service_crashed", level=CRITICAL, exc_info=True, service=self.name, problem=repr(problem))
                raise
            self._last_turn_s = now_s()
            self.turns += 1
            if wait_s > 0:
                self._wake.wait(wait_s)
        self.on_end()

    def _after_failure(self, problem: Exception) -> float:
        self._failures += 1
        self.failed_turns += 1
        self._trouble = f"{type(problem).__name__}: {problem}"
        expected = isinstance(problem, (RedisTrouble, SqlTrouble))
        last, when = self._logged
        if last != self._trouble or time.monotonic() - when > _REPEAT_LOG_S:
            self._logged = (self._trouble, time.monotonic())
            level = WARNING if expected else ERROR
            facts: dict[str, Any] = {"problem": self._trouble, "failures": self._failures, "exc_info": not expected}
            event("service_retrying", level=level, service=self.name, **facts)
        return backoff_s(self._failures, _FIRST_PAUSE_S, LONGEST_PAUSE_S, CHANCE)


@dataclass(frozen=True)
class Health:
    """The health of a program: ``reasons`` is empty when all is well. ``warnings`` want a look, and change nothing."""

    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.reasons


def stalled(services: Iterable[Service], now_s: float, lease_s: float) -> str:
    """Name the services that stand still, "" when none does: no turn of theirs ended for a lease longer than health
    allows, maybe since their thread has ended. To be asked about such as turn for as long as their program lives."""
    silent = [(one, now_s - one.last_turn_s) for one in services if one.last_turn_s is not None]
    still = [(one.name, silent_s) for one, silent_s in silent if silent_s > one.stalls_after_s + lease_s]
    return "; ".join(f"{name} made no progress for {silent_s:.1f} s" for name, silent_s in still)


def judge(services: Iterable[Service], now_s: float) -> Health:
    reasons: list[str] = []
    for service in services:
        last = service.last_turn_s
        if not service.alive:
            reasons.append(f"{service.name} is not running")
        elif last is not None and now_s - last > service.stalls_after_s:
            reasons.append(f"{service.name} made no progress for {now_s - last:.1f} s")
        elif service.trouble is not None:
            reasons.append(f"{service.name}: {service.trouble}")
    return Health(tuple(reasons))
