"""Doorbell: what the dispatcher waits on. Other threads can set it, as a threading.Event, and Redis rings it when there
are new entries.

So a new entry wakes the thread that will read it, and no other: between ``XADD`` and hand-over no thread waits for
another one. The question is a plain XREAD: nothing is consumed, and one whose answer is lost is simply asked again. Its
answer says what has come, so that where that is not much nobody needs to look.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from typing import NamedTuple

from usher.common.base.clock import now_s
from usher.common.base.log import event
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import NOT_YET, Link
from usher.common.redis.replies import Entry, news_command, parse_own

log = logging.getLogger(__name__)

_BLOCK_S = 2.0
#: An answer that has not come this long after the block time never comes.
_LATE_S = 5.0
#: After trouble the stream is read so often, as if it had rung, and Redis is asked again after a growing pause: to
#: connect may take a while (the timeout of the link), in which nothing is handed over.
_AGAIN_S, _LONGEST_PAUSE_S = 0.5, 10.0
#: Shortest pause when waiting itself goes wrong.
_PAUSE_S = 0.05
#: Bytes of an answer that are worth a look.
_MUCH = 32_768


class Heard(NamedTuple):
    """That there is something above ``after`` (or, when that is empty, that nobody knows); ``entries``: all of it, if
    it is not much."""

    after: bytes
    entries: list[Entry]


_ANYTHING = Heard(b"", [])


class Doorbell:
    """``set`` may be called from any thread; all else is the dispatcher's. It rings once per ``arm``: under load nobody
    waits for it."""

    def __init__(self, link: Link, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._is_set = False
        self._pair: tuple[socket.socket, socket.socket] | None = (
            None  # (written by ``set``, waited on), while there is a thread
        )
        self._asked_until_s: float | None = None  # an answer is under way, and must be here by then
        self._asked = (b"", 0)  # above which id, for how many
        self._failures = 0
        self._failed = ("", 0.0)  # last: why, and when
        self._again_s = 0.0
        self._heard: Heard | None = None

    @property
    def trouble(self) -> str | None:
        """Why it did not ring lately. Under load nobody asks it, so it cannot know for long."""
        why, failed_s = self._failed
        return (
            f"doorbell: {why}"
            if self._failures and now_s() - failed_s < _LONGEST_PAUSE_S + _BLOCK_S + _LATE_S
            else None
        )

    # ---- as a threading.Event ------------------------------------------------------------------------------------------------

    def set(self) -> None:
        if self._is_set:
            return
        self._is_set = True
        pair = self._pair
        if pair is not None:
            with contextlib.suppress(OSError):  # full: it is set as it is; closed: nobody waits any more
                pair[0].send(b"\0")

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> None:
        """Until it is set, or rings, or ``timeout`` seconds are over."""
        try:
            self._wait(timeout)
        except Exception as trouble:  # whatever it is: without a bell the stream is read every so often
            self._cannot_hear(f"{type(trouble).__name__}: {trouble}")
            time.sleep(_PAUSE_S)

    def _wait(self, timeout: float) -> None:
        _, ear = self._pair = self._pair or _pair()
        if self._is_set:  # asked after ``set`` has somewhere to write to
            _empty(ear)
            return
        now = now_s()
        poll = select.poll()
        poll.register(ear, select.POLLIN)
        if self._asked_until_s is not None:
            poll.register(self._link.socket, select.POLLIN)
            timeout = min(timeout, self._asked_until_s - now)
        elif self._failures:
            timeout = min(timeout, _AGAIN_S)
        ready = poll.poll(max(0.0, timeout) * 1000)
        if self._asked_until_s is None and self._failures and not ready:
            self._heard = _ANYTHING
        for descriptor, _ in ready:
            if descriptor == ear.fileno():
                _empty(ear)
            else:
                self._listen()
        if self._asked_until_s is not None and now_s() > self._asked_until_s:
            self._cannot_hear("Redis does not answer")

    # ---- as a bell -----------------------------------------------------------------------------------------------------------

    def arm(self, after: bytes, most: int) -> None:
        """Ring when the stream has an entry above ``after``; more than ``most`` are not to be told of."""
        now = now_s()
        if self._asked_until_s is not None and rank(after) < rank(self._asked[0]):
            self.hang_up()  # it was asked for what follows news that were not taken, and would not ring for these
        if self._asked_until_s is not None or now < self._again_s:
            return
        try:
            self._asked = (after, most)
            self._link.ask(*news_command(self._stream, *self._asked, round(_BLOCK_S * 1000)))
        except Exception as trouble:
            self._cannot_hear(f"{type(trouble).__name__}: {trouble}")
        else:
            self._asked_until_s = now + _BLOCK_S + _LATE_S

    def heard(self) -> Heard | None:
        """What it said since this was asked last; None: it did not ring."""
        heard, self._heard = self._heard, None
        return heard

    def hang_up(self) -> None:
        """What was asked is asked no more; the next question goes to where the server is then."""
        self._link.close()
        self._asked_until_s = None

    def close(self) -> None:
        self._link.close()
        for end in self._pair or ():
            end.close()

    def _listen(self) -> None:
        answer = self._link.answer()
        if answer is not NOT_YET:
            self._asked_until_s, self._failures = None, 0
            if answer is not None:
                self._heard = self._understood(parse_own(answer))

    def _understood(self, entries: list[Entry]) -> Heard:
        after, count = self._asked
        size = sum(len(part) for entry in entries for part in entry.fields or ())
        return Heard(after, entries if len(entries) < count and size <= _MUCH else [])

    def mistrust(self) -> None:
        """What it says is not what is in the stream: it may be connected to another server."""
        self._cannot_hear("it told of entries that the leader did not find")

    def _cannot_hear(self, why: str) -> None:
        """Nobody knows what is in the stream: as if it had rung."""
        if not self._failures:
            event(log, "doorbell_broken", level=logging.WARNING, why=why)
        now = now_s()
        self.hang_up()
        self._again_s = now + min(_LONGEST_PAUSE_S, _AGAIN_S * 2.0 ** min(self._failures, 10))
        self._failures, self._failed = self._failures + 1, (why, now)
        self._heard = _ANYTHING


def _empty(ear: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        ear.recv(4096)


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair
