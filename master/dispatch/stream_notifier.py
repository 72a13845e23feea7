"""Stream notifier: the dispatcher waits on it. Other threads can set it, like a threading.Event, and Redis notifies it
of new entries.

So a new entry wakes the thread that will take it, and no other: between ``XADD`` and hand-over no thread waits for
another one. The question is a plain blocking XREAD: nothing is consumed, and a question whose answer is lost is simply
asked again.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from usher.common.base.clock import now_s
from usher.common.base.log import WARNING, event
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.redis.client import NOT_YET, Link
from usher.common.redis.replies import read_command

_BLOCK_S = 5.0
#: An answer that has not come this long after the block time never comes.
_LATE_S = 5.0
#: After trouble the stream is read this often, as if a notification had come, and Redis is asked again after a growing
#: pause: connecting may take a while (the timeout of the link), in which nothing is handed over.
_AGAIN_S, _LONGEST_PAUSE_S = 0.5, 10.0
#: Pause when waiting itself fails.
_PAUSE_S = 0.05


class Notification(NamedTuple):
    """News of the entry ``id``, the next one ``after`` another, read from the server ``run``. All empty if it is not
    known whether there is one."""

    after: bytes = b""
    id: bytes = b""
    fields: Sequence[bytes] = ()
    run: str = ""


class StreamNotifier:
    """Waker of the dispatcher. ``set`` may be called from any thread; everything else belongs to the dispatcher.

    One ``arm`` brings one notification. It is armed only when all that is known is taken, or being taken, so under load
    no question is open.
    """

    def __init__(self, link: Link, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._is_set = False
        # two sockets, once somebody has waited: ``set`` writes to the first, the poll waits on the second
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._asked_until_s: float | None = None  # while an answer is under way: when it must be here
        self._after = ZERO  # above which id entries are asked for
        self._failures = 0
        self._failed = ("", 0.0)  # the last failure: why, and when
        self._again_s = 0.0
        self._notification: Notification | None = None
        self._run = ""  # the server that was asked

    @property
    def trouble(self) -> str | None:
        """Return why no notification comes, or None. A failure counts for a while only: under load Redis is not asked,
        so nobody would learn that it is over."""
        why, failed_s = self._failed
        return (
            f"stream notifier: {why}"
            if self._failures and now_s() - failed_s < _LONGEST_PAUSE_S + _BLOCK_S + _LATE_S
            else None
        )

    # ---- as a threading.Event ----------------------------------------------------------------------------------------

    def set(self) -> None:
        if self._is_set:
            return
        self._is_set = True
        pair = self._pair
        if pair is not None:
            with contextlib.suppress(OSError):  # full: it is set already; closed: nobody waits any more
                pair[0].send(b"\0")

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> None:
        """Wait until the notifier is set, a notification comes, or ``timeout`` seconds are over."""
        try:
            self._wait(timeout)
        except Exception as trouble:  # whatever it is, without notifications the stream is read every so often
            self.fail(f"{type(trouble).__name__}: {trouble}")
            time.sleep(_PAUSE_S)

    def _wait(self, timeout: float) -> None:
        _, wake_end = self._pair = self._pair or _pair()
        if self._is_set:  # checked after ``set`` has somewhere to write to
            _empty(wake_end)
            return
        now = now_s()
        poll = select.poll()
        poll.register(wake_end, select.POLLIN)
        if self._asked_until_s is not None:
            poll.register(self._link.socket, select.POLLIN)
            timeout = min(timeout, self._asked_until_s - now)
        elif self._failures:
            timeout = min(timeout, _AGAIN_S)
        ready = poll.poll(max(0.0, timeout) * 1000)
        if self._asked_until_s is None and self._failures and not ready:
            self._notification = Notification()
        for descriptor, _ in ready:
            if descriptor == wake_end.fileno():
                _empty(wake_end)
            else:
                self._receive()
        if self._asked_until_s is not None and now_s() > self._asked_until_s:
            self.fail("Redis does not answer")

    # ---- notifications -----------------------------------------------------------------------------------------------

    def arm(self, after: bytes) -> None:
        """Ask for a notification when the stream has an entry above ``after``."""
        now = now_s()
        if self._asked_until_s is not None and rank(after) < rank(self._after):
            self.reset()  # the question was about entries that were not taken after all
        if self._asked_until_s is not None or now < self._again_s:
            return
        try:
            self._after, self._run = after, self._link.server_run
            self._link.ask(*read_command(self._stream, after, round(_BLOCK_S * 1000), 1))
        except Exception as trouble:
            self.fail(f"{type(trouble).__name__}: {trouble}")
        else:
            self._asked_until_s = now + _BLOCK_S + _LATE_S

    def poll(self) -> Notification | None:
        """Return the news; None: there is none."""
        notification, self._notification = self._notification, None
        return notification

    def reset(self) -> None:
        """Drop the connection and the question on it; the next question goes to where the server is then."""
        self._link.close()
        self._asked_until_s = None

    def close(self) -> None:
        self._link.close()
        for end in self._pair or ():
            end.close()

    def _receive(self) -> None:
        answer = self._link.answer()
        if answer is not NOT_YET:
            self._asked_until_s, self._failures = None, 0
            if answer is not None:
                [(entry_id, fields)] = answer[0][1]
                self._notification = Notification(self._after, entry_id, fields, self._run)

    def fail(self, why: str) -> None:
        """Act as if a notification had come, since the state of the stream is unknown, and ask again after a pause."""
        if not self._failures:
            event("notifier_unavailable", level=WARNING, why=why)
        now = now_s()
        self.reset()
        self._again_s = now + min(_LONGEST_PAUSE_S, _AGAIN_S * 2.0 ** min(self._failures, 10))
        self._failures, self._failed = self._failures + 1, (why, now)
        self._notification = Notification()


def _empty(end: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        end.recv(4096)


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair
