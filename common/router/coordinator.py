"""Guard the schedule with a lock: readers take their work here, bring entries back, and subscriptions get them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from usher.common.base.errors import RedisTrouble
from usher.common.base.log import event
from usher.common.redis.client import Arg, CommandRefused
from usher.common.redis.replies import Entry, pairs
from usher.common.router.schedule import LastIdCheck, Read, ReadSchedule, Stream
from usher.common.router.subscription import End, Subscription
from usher.common.runtime.fork_guard import ForkGuard

log = logging.getLogger(__name__)

#: Approximate limit of entries in one reply: 500 streams that are read from their beginning could have any number.
_MOST_ENTRIES = 10_000
#: (key, entries) pairs of an XREAD reply, in either protocol.
Found = dict[bytes, list[Any]]


_COUNTED = ("subscribed", "entries", "reads", "empty_reads", "announced", "unannounced", "connects", "breaks", "resets")


class RouterCoordinator:
    """The lock and the schedule, shared by all threads of a router. Callbacks run without the lock, on the thread of
    the reader that brought their entries."""

    def __init__(self, count: int) -> None:
        """Make an empty coordinator. ``count``: most entries of one stream that one read brings."""
        self.lock = threading.Lock()
        self.book = ReadSchedule()  # guarded by self.lock, like all below
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self.on_work: Callable[[], None] = lambda: None
        self._count = count
        self._placed = threading.Condition(self.lock)

    # -- subscribers

    def wait_until_placed(self, subscriptions: Sequence[Subscription], timeout_s: float) -> bool:
        """Return True once the start of each subscription is known; False after ``timeout_s``."""
        with self.lock:
            return self._placed.wait_for(
                lambda: all(one.last is not None or one.end is not None for one in subscriptions), timeout_s
            )

    def close(self, subscription: Subscription, reason: End, detail: str = "") -> None:
        with self.lock:
            self._close(subscription, reason, detail)

    def close_all(self, reason: End) -> None:
        with self.lock:
            for stream in list(self.book.streams.values()):
                for place in stream.places:
                    self._close(place, reason, "")

    def resume_locked(self, subscription: Subscription) -> None:
        self.book.resume(subscription)
        self.on_work()

    def _close(self, subscription: object, reason: End, detail: str) -> None:
        assert isinstance(subscription, Subscription)
        if subscription.end is None:
            self.counters[f"ended_{reason.name.lower()}"] += 1
            subscription.ended(reason, detail)
            self.book.remove(subscription)
            self._placed.notify_all()

    # -- readers

    def take(self, most: int) -> list[Read]:
        with self.lock:
            return self.book.take(most)

    def read_command(self, reads: Sequence[Read], block_ms: int | None = None) -> tuple[Arg, ...]:
        block = () if block_ms is None else ("BLOCK", block_ms)
        self.counters["reads"] += 1
        return (
            "XREAD",
            "COUNT",
            self._count_of(reads),
            *block,
            "STREAMS",
            *(read.stream.key for read in reads),
            *(read.after for read in reads),
        )

    def came(self, reads: Sequence[Read], found: Found, announced: bool) -> list[LastIdCheck]:
        """Hand out the entries of an XREAD. Returns the checks that are due: of streams where nothing was found
        although something was expected (``announced``: the reads were for announced changes, except those marked as
        swept), and of positions above all that was found."""
        checks: list[LastIdCheck] = []
        called: list[tuple[Read, bool, list[tuple[Subscription, Sequence[Entry]]]]] = []
        with self.lock:
            for read in reads:
                entries = found.get(read.stream.key)
                more, check = len(entries or ()) >= self._count_of(reads), None
                calls: list[tuple[Subscription, Sequence[Entry]]] = []
                if entries:
                    self._share(read, [Entry(*entry) for entry in entries], calls)
                    check = self.book.to_check(read, entries[-1][0], more)
                elif read.check or (announced and not read.swept):
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

    def check_all(self) -> None:
        with self.lock:
            self.book.check_all()

    def failed(self, reads: Iterable[Read]) -> None:
        with self.lock:
            for read in reads:
                self.book.failed(read)

    def came_alone(self, read: Read, reply: object) -> list[LastIdCheck]:
        """Handle the reply to the XREAD of one stream, after a read of several was refused."""
        if isinstance(reply, CommandRefused):
            self._refused(read.stream, reply)
            with self.lock:
                self.book.finish(read, more=False)
            return []
        if isinstance(reply, Exception):
            self.failed([read])
            return []
        return self.came([read], as_found(reply), announced=False)

    def checked(self, checks: Sequence[LastIdCheck], replies: Sequence[object]) -> None:
        """Compare positions with the streams' last ids. ``replies``: those to ``last_id_command`` of each stream."""
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
                event(
                    log,
                    "stream_reset",
                    level=logging.WARNING,
                    stream=check.stream.key.decode(errors="replace"),
                    last_id=seen,
                )

    def take_unplaced(self, most: int) -> list[tuple[Stream, list[Subscription]]]:
        with self.lock:
            streams = self.book.take_unplaced(most)
            return [
                (stream, [place for place in stream.places if isinstance(place, Subscription) and place.last is None])
                for stream in streams
            ]

    def placed(self, asked: Sequence[tuple[Stream, list[Subscription]]], replies: Sequence[object]) -> None:
        """Place waiting positions at the end. ``replies``: those to ``last_id_command`` of each stream."""
        for (stream, waiting), reply in zip(asked, replies, strict=True):
            try:
                last_generated = last_id_of(reply)
            except RedisTrouble:
                self.not_placed([stream])
            except CommandRefused as refused:
                self._refused(stream, refused)
            else:
                with self.lock:
                    self.book.placed(stream, waiting, last_generated)
        with self.lock:
            self._placed.notify_all()

    def not_placed(self, streams: Iterable[Stream]) -> None:
        with self.lock:
            self.book.not_placed(streams)

    # -- inside

    def _count_of(self, reads: Sequence[Read]) -> int:
        """Return the most entries of each stream: fewer when there are many streams, so that the reply is bounded."""
        return max(1, min(self._count, _MOST_ENTRIES // len(reads)))

    def _share(self, read: Read, entries: Sequence[Entry], calls: list[tuple[Subscription, Sequence[Entry]]]) -> None:
        for place, share in self.book.shares(read, entries):
            assert isinstance(place, Subscription)
            if place.callback is not None:
                calls.append((place, share))
                accepted = len(share)
            else:
                accepted = place.offer(share)
            if accepted:
                place.last = share[accepted - 1].id
                self.counters["entries"] += accepted
            if accepted < len(share) and place.overflows:
                self._close(place, End.SLOW, "")

    def _call(self, calls: Iterable[tuple[Subscription, Sequence[Entry]]]) -> None:
        for subscription, entries in calls:
            callback = subscription.callback
            if callback is None or subscription.end is not None:
                continue
            try:
                with ForkGuard():  # a forked child would read on our connection
                    callback(subscription, entries)
            except Exception as problem:
                event(
                    log,
                    "callback_failed",
                    level=logging.ERROR,
                    stream=subscription.key.decode(errors="replace"),
                    exc_info=True,
                )
                self.close(subscription, End.CALLBACK_FAILED, repr(problem))

    def _refused(self, stream: Stream, refused: CommandRefused) -> None:
        """Handle Redis' answer that no read of this key can ever work."""
        reason = End.NOT_A_STREAM if "WRONGTYPE" in str(refused) else End.REFUSED
        with self.lock:
            for place in stream.places:
                self._close(place, reason, str(refused))
        event(
            log,
            "subscription_refused",
            level=logging.WARNING,
            stream=stream.key.decode(errors="replace"),
            why=str(refused),
        )


def last_id_command(stream: Stream) -> tuple[Arg, ...]:
    return ("XINFO", "STREAM", stream.key)


def last_id_of(reply: object) -> bytes | None:
    """Return the last id in the reply; None when there is no stream. Raises CommandRefused and RedisTrouble."""
    if isinstance(reply, CommandRefused) and "no such key" in str(reply):
        return None
    if isinstance(reply, Exception):
        raise reply
    facts = reply if isinstance(reply, dict) else pairs(reply)  # type: ignore[arg-type]
    return bytes(facts[b"last-generated-id"])


def as_found(reply: object) -> Found:
    """Return the entries of an XREAD reply, of either protocol, by key."""
    if not reply:
        return {}
    return reply if isinstance(reply, dict) else dict(_listed(reply))


def _listed(reply: object) -> Iterator[tuple[bytes, list[Any]]]:
    for key, entries in reply:  # type: ignore[attr-defined]
        yield bytes(key), entries
