"""Hold what the threads of a stream router share: the schedule under its lock, from which readers take their work and
to which they bring entries back, and the subscriptions that get them.

For a subscriber that is too slow nothing is read until it has taken half of its channel: Redis keeps the rest, unless
the stream is trimmed. An idle subscription is only its position: its channel, and the means to wait, are made when
first needed.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble, UsherError
from usher.common.base.log import event
from usher.common.protocol.message import EntryView
from usher.common.redis.client import Arg, CommandRefused
from usher.common.redis.replies import pairs
from usher.common.router.schedule import LastIdCheck, Read, ReadPosition, ReadSchedule, Stream
from usher.common.runtime.fork_guard import ForkGuard

log = logging.getLogger(__name__)

#: Approximate limit of entries in one reply: 500 streams that are read from their beginning could have any number.
_MOST_ENTRIES = 10_000
Found = dict[bytes, list[Any]]
#: What a router counts, in sums since it was made.
COUNTS = {
    "subscribed": "Subscriptions that were made.",
    "entries": "Entries given to subscriptions.",
    "reads": "Reads of streams.",
    "empty_reads": "Reads that found nothing although something was announced, or expected.",
    "announced": "Changes of subscribed streams that Redis announced.",
    "resets": "Positions that began anew because the stream was another one.",
}


@dataclass(frozen=True)
class RouterOptions:
    """``worker_count``: readers, and connections, of the portable mode. ``xread_streams``: streams of one XREAD;
    ``xread_count``: most entries of each of them. ``xread_block_millis``: how long a reader of the portable mode waits
    for entries of its streams; None: not at all. There an entry waits until its stream's turn comes: with n streams up
    to n / ``xread_streams`` / ``worker_count`` times that long.

    ``sweep_seconds``: the change-driven mode looks at every stream once in this time, announced or not.
    ``check_seconds``: how often every stream is checked for having gone back (deleted and made again) without an
    announcement.

    Raises ValueError for values that make no sense.
    """

    worker_count: int = 4
    xread_streams: int = 500
    xread_block_millis: int | None = 100
    xread_count: int = 100
    sweep_seconds: float = 60.0
    check_seconds: float = 600.0

    def __post_init__(self) -> None:
        wrong = [name for name in ("worker_count", "xread_streams", "xread_count") if not getattr(self, name) >= 1]
        wrong += [name for name in ("sweep_seconds", "check_seconds") if not getattr(self, name) > 0]
        if self.xread_block_millis is not None and not self.xread_block_millis >= 1:
            wrong.append("xread_block_millis")
        if wrong:
            raise ValueError(f"RouterOptions: {', '.join(wrong)} must be greater")


class End(Enum):
    CLOSED = "it was closed"
    ROUTER_STOPPED = "the router was stopped"
    NOT_A_STREAM = "the key holds something that is not a stream"
    REFUSED = "Redis refuses to read the key"
    CALLBACK_FAILED = "its callback raised an error"


COUNTS |= {f"ended_{end.name.lower()}": f"Subscriptions that ended: {end.value}." for end in End}
#: Ends that the reader has asked for: iteration simply ends.
_WANTED = (End.CLOSED, End.ROUTER_STOPPED)
#: Is called with the subscription and its new entries, on the router's thread, which serves many subscriptions: it must
#: be quick, and may close or pause its subscription.
Callback = Callable[["Subscription", Sequence[EntryView]], None]


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

    __slots__ = ("_capacity", "_channel", "_desk", "_waiting", "callback", "detail", "end")

    def __init__(
        self, desk: RouterCoordinator, stream: Stream, last: bytes, callback: Callback | None, capacity: int
    ) -> None:
        super().__init__(stream, last)
        self._desk = desk
        self.callback = callback
        self._capacity = capacity
        self._channel: deque[EntryView] | None = None  # guarded by the coordinator's lock, like all below
        self._waiting: threading.Condition | None = None
        self.end: End | None = None
        self.detail = ""

    @property
    def key(self) -> bytes:
        return self.stream.key

    def close(self) -> None:
        """End the subscription and drop entries that were not taken. May be called twice."""
        self._desk.close(self, End.CLOSED)

    def take(self, most: int = 100, timeout_s: float | None = None) -> list[EntryView]:
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
                self._resume()
            return taken

    def __iter__(self) -> Iterator[EntryView]:
        """Yield entries as they come, until the end. Raises SubscriptionEnded for an end that was not asked for."""
        while taken := self.take(1):
            yield taken[0]

    def pause(self) -> None:
        """Stop reading for it until ``resume``. For callbacks that hand entries on to a slow receiver."""
        with self._desk.lock:
            self.held = True

    def resume(self) -> None:
        with self._desk.lock:
            self._resume()

    def _resume(self) -> None:
        self._desk.book.resume(self)
        self._desk.on_work()

    # -- called by the coordinator, under its lock

    def offer(self, entries: Sequence[EntryView]) -> int:
        """Put entries into the channel; returns how many of them, from the first, are dealt with. The others come
        again."""
        if self._channel is None:
            self._channel = deque()
        accepted = min(len(entries), self._capacity - len(self._channel))
        self._channel.extend(entries[:accepted])
        self.held = len(self._channel) >= self._capacity
        if self._waiting is not None:
            self._waiting.notify_all()
        return accepted

    def ended(self, reason: End, detail: str) -> None:
        if self.end is None:
            self.end, self.detail = reason, detail
            if reason is End.CLOSED:
                self._channel = None
            if self._waiting is not None:
                self._waiting.notify_all()


_Call = tuple[Subscription, Sequence[EntryView]]


class RouterCoordinator:
    """The lock and the schedule. Callbacks run without the lock, on the thread of the reader that brought their
    entries. ``count``: most entries of one stream that one read brings."""

    def __init__(self, count: int) -> None:
        self.lock = threading.Lock()
        self.book = ReadSchedule()  # guarded by self.lock, like all below
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.on_work: Callable[[], None] = lambda: None
        self._count = count

    def close(self, subscription: Subscription, reason: End, detail: str = "") -> None:
        with self.lock:
            self._close(subscription, reason, detail)

    def close_all(self, reason: End) -> None:
        with self.lock:
            for stream in list(self.book.streams.values()):
                for place in stream.places:
                    self._close(place, reason, "")

    def _close(self, subscription: object, reason: End, detail: str) -> None:
        assert isinstance(subscription, Subscription)
        if subscription.end is None:
            self.counters[f"ended_{reason.name.lower()}"] += 1
            subscription.ended(reason, detail)
            self.book.remove(subscription)

    # -- readers

    def take(self, most: int) -> list[Read]:
        with self.lock:
            return self.book.take(most)

    def read_command(self, reads: Sequence[Read], block_ms: int | None = None) -> tuple[Arg, ...]:
        block = () if block_ms is None else ("BLOCK", block_ms)
        self.counters["reads"] += 1
        keys, after = (read.stream.key for read in reads), (read.after for read in reads)
        return ("XREAD", "COUNT", self._count_of(reads), *block, "STREAMS", *keys, *after)

    def came(self, reads: Sequence[Read], found: Found) -> list[LastIdCheck]:
        """Hand out the entries of an XREAD. Returns the checks that are due: of streams where nothing was found
        although a change was announced, and of positions above all that was found."""
        checks: list[LastIdCheck] = []
        called: list[tuple[Read, bool, list[_Call]]] = []
        with self.lock:
            for read in reads:
                entries = found.get(read.stream.key)
                more, check = len(entries or ()) >= self._count_of(reads), None
                calls: list[_Call] = []
                if entries:
                    self._share(read, [EntryView(*entry) for entry in entries], calls)
                    check = self.book.to_check(read, entries[-1][0], more)
                elif read.check or not (read.swept or self.book.in_turn):
                    self.counters["empty_reads"] += 1
                    check = self.book.to_check(read)
                if check is not None:
                    checks.append(check)
                if calls:
                    called.append((read, more, calls))
                else:
                    self.book.finish(read, more)
        for read, more, calls in called:
            self._call(calls)
            with self.lock:
                self.book.finish(read, more)  # not earlier: another reader would get ahead of the callbacks
        return checks

    def failed(self, reads: Iterable[Read]) -> None:
        with self.lock:
            for read in reads:
                self.book.failed(read)

    def refused(self, read: Read, why: CommandRefused) -> None:
        self._refused(read.stream, why)
        with self.lock:
            self.book.finish(read, more=False)

    def checked(self, checks: Sequence[LastIdCheck], replies: Sequence[object]) -> None:
        """Compare positions with the streams' last ids. ``replies``: those to XINFO STREAM of each stream."""
        for check, reply in zip(checks, replies, strict=True):
            try:
                last_generated = last_id_of(reply)
            except RedisTrouble:
                with self.lock:
                    self.book.want_check(check)
                continue
            except CommandRefused as refused:
                self._refused(check.stream, refused)
                continue
            with self.lock:
                reset = self.book.checked(check, last_generated)
                self.counters["resets"] += len(reset)
            if reset:
                seen = "there is none" if last_generated is None else last_generated.decode()
                stream = check.stream.key.decode(errors="replace")
                event(log, "stream_reset", level=logging.WARNING, stream=stream, last_id=seen)

    # -- inside

    def _count_of(self, reads: Sequence[Read]) -> int:
        """Return the most entries of each stream: fewer when there are many streams, so that the reply is bounded."""
        return max(1, min(self._count, _MOST_ENTRIES // len(reads)))

    def _share(self, read: Read, entries: Sequence[EntryView], calls: list[_Call]) -> None:
        for place, share in self.book.shares(read, entries):
            assert isinstance(place, Subscription)
            if place.callback is not None:
                calls.append((place, share))
                accepted = len(share)
            else:
                accepted = place.offer(share)
            if accepted:
                place.last = share[accepted - 1].stream_id
                self.counters["entries"] += accepted

    def _call(self, calls: Iterable[_Call]) -> None:
        for subscription, entries in calls:
            callback = subscription.callback
            if callback is None or subscription.end is not None:
                continue
            try:
                with ForkGuard():  # a forked child would read on our connection
                    copy_context().run(callback, subscription, entries)
            except Exception as problem:
                stream = subscription.key.decode(errors="replace")
                event(log, "callback_failed", level=logging.ERROR, stream=stream, exc_info=True)
                self.close(subscription, End.CALLBACK_FAILED, repr(problem))

    def _refused(self, stream: Stream, refused: CommandRefused) -> None:
        reason = End.NOT_A_STREAM if "WRONGTYPE" in str(refused) else End.REFUSED
        with self.lock:
            for place in stream.places:
                self._close(place, reason, str(refused))
        name = stream.key.decode(errors="replace")
        event(log, "subscription_refused", level=logging.WARNING, stream=name, why=str(refused))


def last_id_of(reply: object) -> bytes | None:
    if isinstance(reply, CommandRefused) and "no such key" in str(reply):
        return None
    if isinstance(reply, Exception):
        raise reply
    return bytes(pairs(reply)[b"last-generated-id"])  # type: ignore[arg-type]
