"""A subscription: entries of one stream in id order, by iteration or by callback, with a stated policy for a reader
that is too slow.

An idle subscription is only its position: its channel, and the means to wait, are made when first needed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from usher.common.base.clock import now_s
from usher.common.base.errors import UsherError
from usher.common.redis.replies import Entry
from usher.common.router.schedule import ReadPosition, Stream

if TYPE_CHECKING:
    from usher.common.router.coordinator import RouterCoordinator


class SlowPolicy(Enum):
    #: Stop reading for it until it has taken half of its channel. Redis keeps the rest (unless the stream is trimmed).
    WAIT = "wait"
    #: Drop the oldest entry in the channel; ``dropped`` counts them.
    DROP_OLDEST = "drop oldest"
    #: End the subscription, with the reason SLOW, after the entries it has.
    CLOSE = "close"


class End(Enum):
    CLOSED = "it was closed"
    ROUTER_STOPPED = "the router was stopped"
    SLOW = "its reader was too slow"
    NOT_A_STREAM = "the key holds something that is not a stream"
    REFUSED = "Redis refuses to read the key"
    CALLBACK_FAILED = "its callback raised an error"


#: Ends that the reader has asked for: iteration simply ends.
_WANTED = (End.CLOSED, End.ROUTER_STOPPED)
#: Called on the router's thread, which serves many subscriptions: it must be quick, and may close or pause its
#: subscription.
Callback = Callable[["Subscription", Sequence[Entry]], None]


class SubscriptionEnded(UsherError):
    """The subscription has ended without its reader's request. ``reason`` says why, ``detail`` gives Redis' words."""

    def __init__(self, key: bytes, reason: End, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(
            f"the subscription of {key.decode(errors='replace')} has ended:"
            f" {reason.value}{f' ({detail})' if detail else ''}"
        )


class Subscription(ReadPosition):
    """A subscription, made by ``StreamRouter.subscribe``. Iterate over it, or call ``take``; with a callback neither.

    ``last`` (bytes) is the id of the last entry that the subscription was given, ``resets`` how often it began anew
    because the stream is not the one it was: entries may then come again.
    """

    __slots__ = ("_callback", "_capacity", "_channel", "_desk", "_policy", "_waiting", "detail", "dropped", "end")

    def __init__(
        self,
        desk: RouterCoordinator,
        stream: Stream,
        last: bytes | None,
        callback: Callback | None,
        capacity: int,
        policy: SlowPolicy,
    ) -> None:
        super().__init__(stream, last)
        self._desk = desk
        self._callback = callback
        self._capacity = capacity
        self._policy = policy
        self._channel: deque[Entry] | None = None  # guarded by the coordinator's lock, like all below
        self._waiting: threading.Condition | None = None
        self.end: End | None = None
        self.detail = ""
        self.dropped = 0

    @property
    def key(self) -> bytes:
        return self.stream.key

    def close(self) -> None:
        """End the subscription and drop entries that were not taken. May be called twice."""
        self._desk.close(self, End.CLOSED)

    def take(self, most: int = 100, timeout_s: float | None = None) -> list[Entry]:
        """Return up to ``most`` entries, waiting for the first; none after ``timeout_s`` seconds, or after the end.
        Raises SubscriptionEnded."""
        deadline_s = None if timeout_s is None else now_s() + timeout_s
        with self._desk.lock:
            while not self._channel:
                if self.end is not None:
                    if self.end in _WANTED:
                        return []
                    raise SubscriptionEnded(self.key, self.end, self.detail)
                left_s = None if deadline_s is None else deadline_s - now_s()
                if left_s is not None and left_s <= 0:
                    return []
                if self._waiting is None:
                    self._waiting = threading.Condition(self._desk.lock)
                self._waiting.wait(left_s)
            taken = [self._channel.popleft() for _ in range(min(most, len(self._channel)))]
            if self.held and len(self._channel) <= self._capacity // 2:
                self._desk.resume_locked(self)
            return taken

    def __iter__(self) -> Iterator[Entry]:
        """Yield entries as they come, until the end. Raises SubscriptionEnded for an end that was not asked for."""
        while taken := self.take(1):
            yield taken[0]

    def pause(self) -> None:
        """Stop reading for it until ``resume``. For callbacks that hand entries on to a slow receiver."""
        with self._desk.lock:
            self.held = True

    def resume(self) -> None:
        with self._desk.lock:
            self._desk.resume_locked(self)

    # -- called by the coordinator, under its lock

    @property
    def callback(self) -> Callback | None:
        return self._callback

    def offer(self, entries: Sequence[Entry]) -> int:
        """Put entries into the channel; returns how many of them, from the first, are dealt with. The others come
        again."""
        if self._channel is None:
            self._channel = deque()
        channel = self._channel
        accepted = len(entries)
        if self._policy is SlowPolicy.DROP_OLDEST:
            channel.extend(entries)
            over = max(0, len(channel) - self._capacity)
            for _ in range(over):
                channel.popleft()
            self.dropped += over
        else:
            accepted = min(accepted, self._capacity - len(channel))
            channel.extend(entries[:accepted])
            self.held = self._policy is SlowPolicy.WAIT and len(channel) >= self._capacity
        if self._waiting is not None:
            self._waiting.notify_all()
        return accepted

    @property
    def overflows(self) -> bool:
        """Return True when entries that were not accepted end the subscription."""
        return self._policy is SlowPolicy.CLOSE

    def ended(self, reason: End, detail: str) -> None:
        if self.end is None:
            self.end, self.detail = reason, detail
            if reason is End.CLOSED:
                self._channel = None
            if self._waiting is not None:
                self._waiting.notify_all()
