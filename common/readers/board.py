"""The messages that a reading loop holds, shared by its threads: waiting, running, waiting for another attempt. One
lock; it makes no calls.

A suspect (its former reader died with it) runs alone: nothing else runs beside it, and nothing starts before Redis has
its outcome. So a message that kills its process is charged for that, and no neighbour is.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Iterable

from usher.common.base.clock import now_s
from usher.common.readers.reliable_stream import StreamMessage


class ReadingBoard:
    """The board. ``most``: most messages held. Nothing starts when the last touch is older than ``fresh_s`` seconds:
    other readers may have taken over."""

    def __init__(self, most: int, fresh_s: float) -> None:
        self._most = most
        self._fresh_s = fresh_s
        self._changed = threading.Condition()
        self._held: dict[bytes, StreamMessage] = {}
        self._ready: deque[StreamMessage] = deque()
        self._suspects: deque[StreamMessage] = deque()
        self._due: list[tuple[float, int, StreamMessage]] = []
        self._order = 0
        self._running: set[bytes] = set()
        self._alone: bytes | None = None  # the suspect that runs, or has ended and is not written yet
        self._closed = False
        self._touched_s = now_s()

    # ---- reader and writer -----------------------------------------------------------------------

    @property
    def room(self) -> int:
        return 0 if self._closed else max(0, self._most - len(self._held))

    def add(self, messages: Iterable[StreamMessage]) -> int:
        """Take messages that came, except those that are held already. Returns the number taken."""
        with self._changed:
            fresh = [message for message in messages if message.stream_id not in self._held]
            for message in fresh:
                self._held[message.stream_id] = message
                self._queue(message)
            self._changed.notify(len(fresh))
            return len(fresh)

    def held_ids(self) -> list[bytes]:
        with self._changed:
            return list(self._held)

    def known_ids(self) -> set[bytes]:
        """Return the ids of messages that are held, or run although they were dropped."""
        with self._changed:
            return {*self._held, *self._running}

    def drop(self, ids: Iterable[bytes]) -> None:
        """Drop messages that Redis has as done, or that another reader has: none of them starts here any more. A
        running handler runs on."""
        with self._changed:
            gone = {entry_id for entry_id in ids if self._held.pop(entry_id, None) is not None}
            if gone:
                self._ready = deque(message for message in self._ready if message.stream_id not in gone)
                self._suspects = deque(message for message in self._suspects if message.stream_id not in gone)
                self._due = [item for item in self._due if item[2].stream_id not in gone]
                heapq.heapify(self._due)
            if self._alone in gone and self._alone not in self._running:
                self._alone = None
                self._changed.notify_all()

    def touched(self, at_s: float) -> None:
        """Note that Redis has touched all held messages; the call was sent at ``at_s``."""
        with self._changed:
            self._touched_s = at_s
            self._changed.notify_all()

    # ---- runners ---------------------------------------------------------------------------------

    def take(self, timeout_s: float) -> StreamMessage | None:
        """Return a message to start; None after ``timeout_s``, or when nothing starts any more."""
        until_s = now_s() + timeout_s
        with self._changed:
            while not self._closed:
                now = now_s()
                while self._due and self._due[0][0] <= now:
                    self._queue(heapq.heappop(self._due)[2])
                message = self._next() if now < self._touched_s + self._fresh_s else None
                if message is not None:
                    self._running.add(message.stream_id)
                    return message
                if now >= until_s:
                    return None
                self._changed.wait(min(until_s, self._due[0][0] if self._due else until_s) - now)
            return None

    def _queue(self, message: StreamMessage) -> None:
        (self._suspects if message.is_suspect else self._ready).append(message)

    def _next(self) -> StreamMessage | None:
        if self._alone is not None:
            return None
        if self._suspects:
            if self._running:
                return None  # nothing new starts until it can run alone
            suspect = self._suspects.popleft()
            self._alone = suspect.stream_id
            return suspect
        return self._ready.popleft() if self._ready else None

    def ended(self, message: StreamMessage) -> None:
        """Note that it no longer runs; it is held until it is dropped."""
        with self._changed:
            self._running.discard(message.stream_id)
            if message.stream_id == self._alone and message.stream_id not in self._held:
                self._alone = None
                self._changed.notify_all()
            elif self._suspects and not self._running:
                self._changed.notify()

    def again(self, message: StreamMessage, due_s: float) -> None:
        """Note that it no longer runs, and is ready again at ``due_s``, unless it was dropped meanwhile."""
        with self._changed:
            self._running.discard(message.stream_id)
            if message.stream_id == self._alone:
                self._alone = None
            if message.stream_id in self._held:
                self._order += 1
                heapq.heappush(self._due, (due_s, self._order, message))
            self._changed.notify_all()

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def quiet(self) -> list[StreamMessage]:
        """Return the waiting messages: not started, or waiting for another attempt."""
        with self._changed:
            return [*self._ready, *self._suspects, *(message for _, _, message in self._due)]

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def held(self) -> int:
        return len(self._held)
