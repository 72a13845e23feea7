"""Write log lines to a descriptor whose reader may be slow, stand still or be gone. Nobody waits for it for long.

A line is written at once, by the thread that logs it: it is there whatever becomes of the process next. A full pipe is
waited for, for a moment; then lines wait in memory, up to a bound, and a thread writes them as soon as somebody reads
again. Lines beyond the bound are dropped and counted.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

#: How long a line waits for a reader that is behind, the thread that logs it with it.
_PATIENCE_S = 0.2
#: Bytes that wait in memory.
_MOST_BYTES = 1 << 20
#: Our own descriptor has at least this number: programs that "close everything" begin at 3.
_NUMBER = 100
#: How long the thread waits for room at a time, and how long it rests after a line that was not written whole.
_LOOK_S, _REST_S = 1.0, 0.01


class LineWriter:
    """The writer of one log. ``write`` is called with ``lock`` held, which is held for ``_PATIENCE_S`` at most;
    ``on_flow`` when dropped lines can be told, with their number, without the lock."""

    def __init__(
        self, descriptor: int | None, lock: AbstractContextManager[object], on_flow: Callable[[int], None]
    ) -> None:
        """``descriptor``: duplicated here, since a handler may close its own, or put something else there. None: all
        lines are dropped."""
        self._lock = lock
        self._on_flow = on_flow
        self._descriptor = -1 if descriptor is None else _own(descriptor)
        self._file = os.stat_result([0] * 10) if descriptor is None else os.fstat(self._descriptor)
        # Files take all; what was opened as non-blocking takes what it can.
        self._is_plain = stat.S_ISREG(self._file.st_mode) or (
            descriptor is not None and not os.get_blocking(self._descriptor)
        )
        self._flag = getattr(os, "RWF_NOWAIT", 0)  # 0: the system cannot write without waiting
        self._pid = os.getpid()
        # Guarded by the lock.
        self._waiting: collections.deque[memoryview] = collections.deque()
        self._size = 0  # of those behind the first, which may be a long line
        self._told = 0
        self._thread: threading.Thread | None = None
        self.dropped = 0

    @property
    def is_blocked(self) -> bool:
        """Return whether lines wait, since nobody reads."""
        return bool(self._waiting)

    def write(self, line: bytes) -> None:
        """Write a line, let it wait, or drop it. The caller holds the lock."""
        if os.getpid() != self._pid:  # a forked child: what waits is its parent's, and so is the thread
            self._pid, self._size, self._thread = os.getpid(), 0, None
            self._waiting.clear()
        rest = memoryview(line)
        if not self._waiting:
            rest = self._write(rest, _PATIENCE_S)
        elif self._size + len(rest) > _MOST_BYTES:
            self.dropped += 1
            return
        else:
            self._size += len(rest)
        if rest:
            self._waiting.append(rest)
            self._begin()

    def flush(self, within_s: float) -> None:
        """Write what waits, as far as somebody reads it in time. The caller holds the lock."""
        until_s = time.monotonic() + within_s
        while self._waiting and self._pid == os.getpid():
            if not self._write_first(max(0.0, until_s - time.monotonic())):
                return

    def _begin(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="log", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread to be had: the next line tries again
                self._thread.start()

    def _run(self) -> None:
        """Write what waits until nothing does."""
        while True:
            self._has_room(_LOOK_S)
            with self._lock:
                while self._waiting and self._write_first(0.0):
                    pass
                if not self._waiting:
                    self._thread = None
                    untold, self._told = self.dropped - self._told, self.dropped
                    break
            time.sleep(_REST_S)
        if untold:
            self._on_flow(untold)

    def _write_first(self, patience_s: float) -> bool:
        """Write the first line that waits; return whether it is done with."""
        rest = self._write(self._waiting[0], patience_s)
        if rest:
            self._waiting[0] = rest
            return False
        self._waiting.popleft()
        self._size -= len(self._waiting[0]) if self._waiting else 0
        return True

    def _write(self, line: memoryview, patience_s: float) -> memoryview:
        """Write as much as there is room for, and return the rest. What nobody can read any more is dropped."""
        until_s = time.monotonic() + patience_s
        try:
            if self._descriptor < 0 or not os.path.samestat(os.fstat(self._descriptor), self._file):
                raise OSError("closed, and the number may be somebody else's")
            while line:
                try:
                    written = self._write_some(line)
                except BlockingIOError:
                    written = 0
                line = line[written:]
                if not written and not self._has_room(until_s - time.monotonic()):
                    break
        except OSError:
            self.dropped += 1
            return line[:0]
        return line

    def _write_some(self, line: memoryview) -> int:
        """Write as much as can be written without waiting; return how much it was."""
        if self._is_plain:
            return os.write(self._descriptor, line)
        if self._flag:
            try:
                return os.pwritev(self._descriptor, [line], -1, self._flag)
            except BlockingIOError:
                raise
            except OSError:  # not for this kind of file, or not on this kernel; what is really wrong fails again
                self._flag = 0
        # Another process may take the room between the two: then this thread waits for the reader.
        return os.write(self._descriptor, line[: select.PIPE_BUF]) if self._has_room(0.0) else 0

    def _has_room(self, within_s: float) -> bool:
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        return bool(room.poll(max(0.0, within_s) * 1000))


def _own(descriptor: int) -> int:
    """Return a descriptor of our own for the same file. A terminal is opened anew, since it takes a whole line or makes
    the writer wait (Ctrl-S), and to open it as non-blocking must not change it for others."""
    try:
        own = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _NUMBER)
    except OSError:  # so few are allowed
        own = os.dup(descriptor)
    if os.isatty(own):
        with contextlib.suppress(OSError):  # somebody else's terminal
            anew = os.open(f"/proc/self/fd/{own}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.dup2(anew, own, inheritable=False)
            os.close(anew)
    return own
