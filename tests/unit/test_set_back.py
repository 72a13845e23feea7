"""What waits by the wall clock goes on when that is set back."""

from __future__ import annotations

import ctypes
import errno
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from usher.common.readers.loop import MessageReadingLoop
from usher.common.runtime import signals as set_back
from usher.common.runtime.signals import ClockStepWatcher

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def wait_by_the_wall_clock(seconds: int) -> int:
    """As a lock of such a Python waits. Why it ended."""
    semaphore = ctypes.create_string_buffer(64)
    assert _LIBC.sem_init(semaphore, 0, 0) == 0
    until = _Timespec(int(time.time()) + seconds, 0)
    assert _LIBC.sem_timedwait(semaphore, ctypes.byref(until)) == -1
    return ctypes.get_errno()


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """By how many ms it is wrong."""
    wrong_ms, right, before = [0], set_back.wall_ms, signal.getsignal(signal.SIGURG)
    monkeypatch.setattr(set_back, "wall_ms", lambda: right() + wrong_ms[0])
    yield wrong_ms
    signal.signal(signal.SIGURG, before)


def test_waits_go_on_when_the_clock_was_set_back_and_others_notice_nothing(wall: list[int]) -> None:
    ended: list[int] = []
    waited_s: list[float] = []

    def wait_for_an_event() -> None:
        began_s = time.monotonic()
        assert not threading.Event().wait(3)
        waited_s.append(time.monotonic() - began_s)

    waiting = [
        threading.Thread(target=lambda: ended.append(wait_by_the_wall_clock(20))),
        threading.Thread(target=wait_for_an_event),
    ]
    service = ClockStepWatcher()
    service.start()
    for thread in waiting:
        thread.start()
    time.sleep(1)
    assert not ended
    wall[0] = 3_600_000
    time.sleep(1)
    assert not ended, "a step forward ends them by itself"
    wall[0] = 0
    for thread in waiting:
        thread.join(10)
    service.stop()
    assert ended == [errno.EINTR]
    assert waited_s[0] >= 3
    assert service.join(5)


_WITH_STRANGERS = """
import _thread, threading, time
from usher.common.runtime.signals import ClockStepWatcher
service = ClockStepWatcher()
for _ in range(20):
    _thread.start_new_thread(threading.current_thread, ())  # as a log record of a library's callback asks for it
time.sleep(0.5)
service._end_waits()
"""


def test_threads_that_python_did_not_begin_and_that_have_ended_are_let_be() -> None:
    """Python before 3.13 lists them for ever, and a signal to one ended the process (SIGSEGV): the C library had freed
    what it is known by."""
    assert subprocess.run([sys.executable, "-c", _WITH_STRANGERS], check=False).returncode == 0


@pytest.mark.parametrize(("has", "looks"), [(1, False), (0, True), (None, True)])
def test_it_looks_only_where_locks_count_by_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch, has: int | None, looks: bool
) -> None:
    monkeypatch.setattr(
        set_back.sysconfig, "get_config_var", lambda name: has if name == "HAVE_SEM_CLOCKWAIT" else 1 - bool(has)
    )
    assert set_back.waits_by_the_wall_clock() == looks


def test_a_reading_loop_ends_it_in_somebody_elses_program(monkeypatch: pytest.MonkeyPatch, wall: list[int]) -> None:
    """One thread more was left by each run."""
    monkeypatch.setattr(set_back, "waits_by_the_wall_clock", lambda: True)
    for _ in range(2):
        loop = MessageReadingLoop("redis://127.0.0.1:1", "s", "g", lambda message: None)
        threading.Timer(0.2, loop.stop).start()
        loop.run()
    time.sleep(1)
    assert "set-back" not in [thread.name for thread in threading.enumerate()]
