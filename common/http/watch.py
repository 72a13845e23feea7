"""The watch over a worker, kept by its arbiter, which is another process.

C code that does not release the interpreter lock stops every thread of its process, those that look after leases and
deadlines too. So the worker says, each time gunicorn's loop turns (once a second at least), for how long it may be
silent from then on; the arbiter counts the silence, and ends a worker whose time is up. A worker whose service threads
stand still says nothing either.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gunicorn.workers.gthread import ThreadWorker
from gunicorn.workers.workertmp import WorkerTmp

from usher.common.base.log import event
from usher.common.runtime.memory import oom_kills

log = logging.getLogger(__name__)

#: A start that takes longer makes no progress.
START_S = 60.0
#: The arbiter looks this often.
LOOK_S = 1.0
#: A busy machine alone makes a worker silent for a second or two.
LEAST_SILENCE_S = 3.0
#: Seconds for a client to close its end.
_GOODBYE_S = 1.0
#: The worker speaks again after this.
_EVERY_S = 0.5
#: Most that one look of the arbiter adds to the silence: it looks every second, unless it stood still itself, with the
#: whole machine or container.
_LONGEST_LOOK_S = 2.0
#: number of the word, seconds of silence, what the worker does
_WORD = struct.Struct("=Qd16s")


class Liveness(NamedTuple):
    """``silence_s``: how long a program may be silent from now on. ``stalled``: the services that stand still, and for
    how long; "" when all go on."""

    silence_s: float
    stalled: str = ""


class Pulse(WorkerTmp):
    """The file that the worker writes and the arbiter reads; gunicorn's own has a time only."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._words = 0
        self._heard = b""
        self._looked_s = time.monotonic()
        self.silent_s = 0.0
        self.say(START_S, "starts")

    def say(self, silence_s: float, does: str) -> None:
        """Say that the worker lives, and for how long it may be silent. Called in the worker."""
        self._words += 1
        os.pwrite(self.fileno(), _WORD.pack(self._words, silence_s, does.encode()), 0)

    def last_update(self) -> float:
        """Return now, or a time that makes gunicorn end the worker. Called in the arbiter, every second."""
        now, word = time.monotonic(), os.pread(self.fileno(), _WORD.size, 0)
        self.silent_s = self.silent_s + min(now - self._looked_s, _LONGEST_LOOK_S) if word == self._heard else 0.0
        self._looked_s, self._heard = now, word
        return now if self.silent_s <= _WORD.unpack(word)[1] else -math.inf

    def facts(self) -> dict[str, Any]:
        """Return for how long the worker was silent, and what it did when it was last heard: starts, runs or drains."""
        did = _WORD.unpack(self._heard)[2].rstrip(b"\0").decode() if self._heard else ""
        return {"did": did, "silent_s": round(self.silent_s, 1)}


class WorkerEnds:
    """The arbiter's knowledge of how its last worker ended. A worker that is forked then knows it too."""

    def __init__(self, running: Callable[[], Sequence[str]] = lambda: ()) -> None:
        """``running`` names what ran in a worker that stood still, for the log."""
        self._running = running
        self._kills: int | None = None
        self._progress = mmap.mmap(-1, 1)  # which a worker shares with its arbiter
        #: The last one was ended by SIGKILL, and neither by its arbiter nor by the kernel, for want of memory.
        self.is_from_outside = False

    def begin(self) -> None:
        """Note that a worker begins."""
        self._kills = oom_kills()
        self._progress[0] = 0

    def progressed(self) -> None:
        """Note that this worker has done something that need not be done again. Called in the worker."""
        self._progress[0] = 1

    @property
    def has_progressed(self) -> bool:
        return self._progress[0] != 0

    def note(self, worker: Any, program: str, is_killed: bool) -> None:
        """Note that a worker has ended."""
        self.is_from_outside = is_killed and not worker.aborted and self._kills is not None
        self.is_from_outside = self.is_from_outside and oom_kills() == self._kills
        if worker.aborted:  # by the arbiter: its time was up
            why = "its interpreter or its services stood still: code keeps the interpreter lock, or waits for ever"
            facts = worker.tmp.facts() | {"pid": worker.pid, "running": list(self._running()), "why": why}
            event(log, "worker_stood_still", level=logging.ERROR, program=program, **facts)


class WatchedWorker(ThreadWorker):
    """gunicorn's threaded worker with a ``Pulse``. A client that does not close its end keeps a thread waiting, and not
    the only loop, which gunicorn (26 and later) would let wait for 2 s."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.tmp.close()
        self.tmp: Pulse = Pulse(self.cfg)
        self._spoke_s = -math.inf

    def notify(self) -> None:
        """Say that this process lives, unless its services stand still. Called by gunicorn's loop at each turn."""
        now = time.monotonic()
        if now - self._spoke_s >= _EVERY_S:
            self._spoke_s = now
            silence_s, does = self.app.silence()
            if silence_s:
                self.tmp.say(silence_s, does)

    def handle(self, conn: Any) -> Any:
        goes_on = super().handle(conn)
        if goes_on is False:
            ends_s = now = time.monotonic()
            ends_s += _GOODBYE_S
            try:  # closing with unread input would reset the last answer
                conn.sock.shutdown(socket.SHUT_WR)
                while ends_s > now:
                    conn.sock.settimeout(ends_s - now)
                    if not conn.sock.recv(65_536):
                        break
                    now = time.monotonic()
                conn.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has gone
        return goes_on
