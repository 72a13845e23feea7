"""``StreamRouter``: any number of streams on a handful of connections.

Two modes. *change-driven*: two connections; on one Redis says which keys have changed (``ChangeEar``), on the other one
read without waiting brings just those. What changes during a read is read by the next one, so that the reads grow with
the load. Unannounced changes (a connection that broke, a proxy that drops messages) are found by a sweep: of everything
after every connect, and by a slow one that never ends.

*portable*, where Redis does not announce changes: every reader takes the streams whose turn it is, asks for all of them
with one XREAD, and puts them back at the end of the queue, so an entry waits until its stream's turn comes.

The desk has the subscriptions, and the queue of those that are to be read, under one lock. A subscription is read by
one reader at a time, from its own position, which only moves when it has taken the entries: so a reply that never came
costs nothing and gives nothing twice. For a subscriber that is too slow nothing is read until it has taken half of its
channel: Redis keeps the rest, unless the stream is trimmed. An idle subscription is only its position: its channel, and
the means to wait, are made when first needed. What it may rely on: docs/plain-streams.md.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from usher.common.base.callables import unawaitable_reason
from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble, UsherError
from usher.common.base.log import ERROR, WARNING, event
from usher.common.observability.metrics import Reader
from usher.common.protocol.message import EntryView, key_bytes
from usher.common.protocol.stream_id import ZERO, from_rank, is_id, rank
from usher.common.redis.client import Arg, CommandRefused, Link, SharedLink
from usher.common.redis.endpoints import in_reach
from usher.common.redis.replies import stream_facts
from usher.common.redis.tracking import ChangeEar
from usher.common.runtime.fork_guard import ForkGuard
from usher.common.runtime.service import Service

#: Approximate limit of entries in one reply: 500 streams that are read from their beginning could have any number.
_MOST_ENTRIES = 10_000
Found = dict[bytes, list[Any]]
# Marks of a subscription. They are one number, because there may be a million of them, and a plain one: arithmetic of
# an IntFlag costs a microsecond each.
#: Urgent: queued before those that are only looked at in passing.
_QUEUED, _URGENT, _READING = 1, 2, 4
#: Announced, or begun anew, while it was being read.
_AGAIN = 8
#: When nothing new is found, check that the stream is still the one that the position belongs to.
_CHECK = 16
#: Queued by the sweep, without an announced change.
_SWEPT = 32
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
#: be quick, and may close its subscription.
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


@dataclass(slots=True, eq=False)
class Subscription:
    """A subscription, made by ``StreamRouter.subscribe``. Iterate over it, or call ``take``; with a callback neither.

    ``last`` (bytes) is the id of the last entry that the subscription was given, ``resets`` how often it began anew
    because the stream is not the one it was: entries may then come again.
    """

    _desk: RouterDesk
    key: bytes
    last: bytes
    callback: Callback | None
    _capacity: int
    held: bool = False  # it has no room, so nothing is read for it
    resets: int = 0
    marks: int = 0
    _channel: deque[EntryView] | None = None  # guarded by the desk's lock, like all below
    _waiting: threading.Condition | None = None
    end: End | None = None
    detail: str = ""

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
                self._desk.resume(self)
            return taken

    def __iter__(self) -> Iterator[EntryView]:
        """Yield entries as they come, until the end. Raises SubscriptionEnded for an end that was not asked for."""
        while taken := self.take(1):
            yield taken[0]

    # -- called by the desk, under its lock

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


class Read(NamedTuple):
    """A read to do: entries of a subscription above ``after``. ``swept``: no change was announced; ``check``: when
    nothing is found, see that the stream is still the same."""

    of: Subscription
    after: bytes
    swept: bool
    check: bool


#: A subscription whose position must not be above the last id of its stream, and that position.
LastIdCheck = tuple[Subscription, bytes]


class RouterDesk:
    """The subscriptions and their queue. ``count``: most entries of one stream that one read brings. ``in_turn``: all
    are read again and again (portable mode), else those that change. Callbacks run without the lock, on the thread of
    the reader that brought their entries."""

    def __init__(self, count: int) -> None:
        self.lock = threading.Lock()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.on_work: Callable[[], None] = lambda: None
        self.in_turn = False
        self.by_key: dict[bytes, tuple[Subscription, ...]] = {}  # guarded by self.lock, like all below
        self.open = 0
        self._count = count
        self._urgent: deque[Subscription] = deque()
        self._queue: deque[Subscription] = deque()
        self._pass: list[Subscription] = []

    @property
    def queued(self) -> int:
        return len(self._urgent) + len(self._queue)

    def close(self, subscription: Subscription, reason: End, detail: str = "") -> None:
        with self.lock:
            self._close(subscription, reason, detail)

    def close_all(self, reason: End) -> None:
        with self.lock:
            for one in self._everyone():
                self._close(one, reason, "")

    def _close(self, one: Subscription, reason: End, detail: str) -> None:
        if one.end is not None:
            return
        self.counters[f"ended_{reason.name.lower()}"] += 1
        one.ended(reason, detail)
        self.open -= 1
        others = tuple(other for other in self.by_key[one.key] if other is not one)
        if others:
            self.by_key[one.key] = others
        else:
            del self.by_key[one.key]

    def _everyone(self) -> list[Subscription]:
        return [one for several in self.by_key.values() for one in several]

    # -- what is to be read; called under the lock

    def add(self, one: Subscription, check: bool) -> None:
        self.by_key[one.key] = (*self.by_key.get(one.key, ()), one)
        self.open += 1
        self.counters["subscribed"] += 1
        self._want(one, _CHECK if check else 0)

    def resume(self, one: Subscription) -> None:
        if one.held:
            one.held = False
            self._want(one, _URGENT)
        self.on_work()

    def announced(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            known = self.by_key.get(key, ())
            self.counters["announced"] += bool(known)
            for one in known:
                self._want(one, _URGENT | _CHECK)

    def want_all(self) -> None:
        for one in self._everyone():
            self._want(one, _CHECK)

    def check_all(self) -> None:
        for one in self._everyone():
            one.marks |= _CHECK

    def sweep(self, count: int) -> None:
        self._pass = self._pass or self._everyone()
        for one in self._pass[-count:]:
            if one.end is None:
                one.marks |= 0 if one.marks & (_QUEUED | _READING) else _SWEPT
                self._want(one, 0)
        del self._pass[-count:]

    @staticmethod
    def heard_of(read: Read) -> bool:
        return bool(read.of.marks & _AGAIN)

    def _want(self, one: Subscription, marks: int) -> None:
        one.marks |= marks & _CHECK
        if one.marks & _READING:
            # In turn, every one comes again anyway; a change that was announced during the read comes at once.
            one.marks |= _AGAIN
        elif not one.marks & _QUEUED:
            one.marks |= _QUEUED | (marks & _URGENT)
            (self._urgent if marks & _URGENT else self._queue).append(one)
        elif marks & _URGENT and not one.marks & _URGENT:
            one.marks = (one.marks | _URGENT) & ~_SWEPT
            self._urgent.append(one)  # its place in the other queue is skipped

    def _next(self) -> Subscription | None:
        for queue, is_urgent in ((self._urgent, True), (self._queue, False)):
            while queue:
                one = queue.popleft()
                if one.marks & _QUEUED and bool(one.marks & _URGENT) is is_urgent:
                    return one
        return None

    # -- readers

    def take(self, most: int) -> list[Read]:
        reads: dict[bytes, Read] = {}
        later: list[tuple[Subscription, int]] = []
        with self.lock:
            while len(reads) < most and (one := self._next()) is not None:
                marks, one.marks = one.marks, one.marks & ~(_QUEUED | _URGENT | _AGAIN | _CHECK | _SWEPT)
                if one.key in reads:  # a reply has one part for each key
                    later.append((one, marks))
                elif one.end is None and not one.held:
                    one.marks |= _READING
                    reads[one.key] = Read(one, one.last, bool(marks & _SWEPT), bool(marks & _CHECK))
            for one, marks in later:
                self._want(one, marks)
        return list(reads.values())

    def read_command(self, reads: Sequence[Read], block_ms: int | None = None) -> tuple[Arg, ...]:
        block = () if block_ms is None else ("BLOCK", block_ms)
        self.counters["reads"] += 1
        keys, after = (read.of.key for read in reads), (read.after for read in reads)
        return ("XREAD", "COUNT", self._count_of(reads), *block, "STREAMS", *keys, *after)

    def came(self, reads: Sequence[Read], found: Found) -> list[LastIdCheck]:
        """Hand out the entries of an XREAD. Returns the checks that are due: of streams where nothing was found
        although a change was announced."""
        checks: list[LastIdCheck] = []
        called: list[tuple[Subscription, list[EntryView], bool]] = []
        most = self._count_of(reads)
        with self.lock:
            for read in reads:
                one, entries = read.of, [EntryView(*entry) for entry in found.get(read.of.key) or ()]
                more = len(entries) >= most
                if one.last != read.after:
                    one.marks |= _AGAIN  # it began anew meanwhile
                elif entries and not one.held and one.end is None:
                    taken = one.offer(entries) if one.callback is None else len(entries)
                    one.last = entries[taken - 1].stream_id if taken else one.last
                    self.counters["entries"] += taken
                    if one.callback is not None:
                        called.append((one, entries, more))
                        continue
                elif not entries and (read.check or not (read.swept or self.in_turn)):
                    self.counters["empty_reads"] += 1
                    checks += [(one, one.last)] if one.last != ZERO else []
                self._finish(one, more)
        for one, entries, more in called:
            self._call(one, entries)
            with self.lock:
                self._finish(one, more)  # not earlier: another reader would get ahead of the callbacks
        return checks

    def failed(self, reads: Iterable[Read]) -> None:
        with self.lock:
            for read in reads:
                read.of.marks &= ~(_READING | _AGAIN)
                self._want(read.of, _CHECK if read.check else 0)

    def refused(self, one: Subscription, why: CommandRefused) -> None:
        self.close(one, End.NOT_A_STREAM if "WRONGTYPE" in str(why) else End.REFUSED, str(why))
        event("subscription_refused", level=WARNING, stream=_shown(one), why=str(why))
        with self.lock:
            self._finish(one, more=False)

    def checked(self, checks: Sequence[LastIdCheck], replies: Sequence[object]) -> None:
        """Compare positions with the streams' last ids. ``replies``: those to XINFO STREAM of each stream. A position
        above that (or of no stream) belongs to an earlier stream of that name, or to a history that Redis has lost, and
        begins anew: no entry of the present stream may be missed."""
        for (one, last), reply in zip(checks, replies, strict=True):
            try:
                last_generated = stream_facts(reply).get(_LAST)
            except RedisTrouble:
                with self.lock:
                    self._want(one, _CHECK)
                continue
            except CommandRefused as refused:
                self.refused(one, refused)
                continue
            if rank(last) <= rank(last_generated or ZERO):
                continue
            with self.lock:
                if one.last != last or one.end is not None:
                    continue
                one.last = ZERO
                one.resets += 1
                self.counters["resets"] += 1
                self._want(one, _URGENT)
            seen = "there is none" if last_generated is None else last_generated.decode()
            event("stream_reset", level=WARNING, stream=_shown(one), last_id=seen)

    def _finish(self, one: Subscription, more: bool) -> None:
        again = more or one.marks & _AGAIN
        one.marks &= ~(_READING | _AGAIN)
        if one.end is None and (again or self.in_turn):
            self._want(one, _URGENT if again else 0)

    def _count_of(self, reads: Sequence[Read]) -> int:
        """Return the most entries of each stream: fewer when there are many streams, so that the reply is bounded."""
        return max(1, min(self._count, _MOST_ENTRIES // len(reads)))

    def _call(self, one: Subscription, entries: Sequence[EntryView]) -> None:
        if one.callback is None or one.end is not None:
            return
        try:
            with ForkGuard():  # a forked child would read on our connection
                copy_context().run(one.callback, one, entries)
        except Exception as problem:
            event("callback_failed", level=ERROR, stream=_shown(one), exc_info=True)
            self.close(one, End.CALLBACK_FAILED, repr(problem))


def _shown(one: Subscription) -> str:
    return one.key.decode(errors="replace")


_AT_ONCE, _PAUSE_S, _LAST = 1000, 0.1, b"last-generated-id"
#: Seconds until a reader that has nothing to read looks again; where Redis announces changes, it is woken.
_IDLE_S, _LONGEST_IDLE_S = 0.2, 1.0


class _Now(Enum):
    NOW = "now"


#: Given instead of an id: begin from now on.
NOW = _Now.NOW


class Mode(Enum):
    CHANGE_DRIVEN = "change-driven"
    PORTABLE = "portable"


#: What it counts of the present, too.
_COUNTS_NOW = {"streams": "Streams with subscriptions.", "queued": "Streams to be read.", "connections": "Connections."}


class StreamReader(Service):
    """Service that reads what the desk says. ``unannounced`` is told of streams in which a sweep found entries."""

    waits_on_link = True

    def __init__(
        self,
        name: str,
        link: Link,
        desk: RouterDesk,
        options: RouterOptions,
        unannounced: Callable[[list[bytes]], None],
    ) -> None:
        super().__init__()
        self.name = name
        self._link = link
        self._desk = desk
        self._options = options
        self._unannounced = unannounced
        self._connections = 0
        self._check_at_s = now_s() + options.check_seconds
        self._sweep_at_s = now_s() + _LONGEST_IDLE_S

    def run_once(self) -> float:
        options, in_turn = self._options, self._desk.in_turn
        self._look_again(in_turn)
        reads = self._desk.take(options.xread_streams)
        if not reads:
            return _IDLE_S if in_turn else max(0.0, min(_LONGEST_IDLE_S, self._sweep_at_s - now_s()))
        try:
            return self._read(reads, in_turn, options.xread_block_millis if in_turn else None)
        except RedisTrouble:
            if self._link.connections != self._connections:  # behind the next one may be a server with fewer entries
                self._connections = self._link.connections
                with self._desk.lock:
                    self._desk.want_all()
            raise

    def _read(self, reads: Sequence[Read], in_turn: bool, block_ms: int | None) -> float:
        command = self._desk.read_command(reads, block_ms)
        try:
            found = dict(self._link.call(*command, block_s=(block_ms or 0) / 1000) or ())
        except CommandRefused as refused:
            if len(reads) == 1:
                self._desk.refused(reads[0].of, refused)
            for at, read in enumerate(reads if len(reads) > 1 else ()):  # one of the streams makes the read of all fail
                try:
                    self._read([read], in_turn, None)
                except BaseException:
                    self._desk.failed(reads[at + 1 :])
                    raise
            return 0.0
        except BaseException:
            self._desk.failed(reads)
            raise
        if not in_turn and (swept := [read for read in reads if read.swept and read.of.key in found]):
            with self._desk.lock:
                self._unannounced([read.of.key for read in swept if not self._desk.heard_of(read)])
        if checks := self._desk.came(reads, found):
            try:
                replies = self._link.pipeline([("XINFO", "STREAM", one.key) for one, _ in checks])
            except RedisTrouble as trouble:
                self._desk.checked(checks, [trouble] * len(checks))
                raise
            self._desk.checked(checks, replies)
        return _IDLE_S / 4 if in_turn and block_ms is None and not found else 0.0

    def _look_again(self, in_turn: bool) -> None:
        """Have streams checked whose ids may have gone back, and, of those that are read when they change, some read
        all the same."""
        now, desk = now_s(), self._desk
        if now >= self._check_at_s:
            self._check_at_s = now + self._options.check_seconds
            with self._desk.lock:
                desk.check_all()
        if not in_turn and now >= self._sweep_at_s:
            every_s = min(_LONGEST_IDLE_S, self._options.sweep_seconds)
            with self._desk.lock:
                desk.sweep(math.ceil(desk.open * every_s / self._options.sweep_seconds))
            self._sweep_at_s = now + every_s


class StreamRouter(Reader):
    """Reads many streams for many subscriptions; may be used from any thread. Call ``start`` before anything is
    delivered and ``stop`` at the end (or use ``with``); subscribing is possible before ``start``.

    ``prefixes``: only keys that begin with one of these can be subscribed to, and Redis announces only their changes;
    none: all keys, which on a server with much other traffic is wasted work. No prefix may be the beginning of another.
    ``mode`` PORTABLE: even where Redis announces changes.
    """

    kind, told = "router", COUNTS | _COUNTS_NOW

    def __init__(
        self,
        url: str,
        *,
        name: str = "usher",
        mode: Mode = Mode.CHANGE_DRIVEN,
        prefixes: Sequence[str] = (),
        options: RouterOptions | None = None,
    ) -> None:
        self._url = url
        self._options = options or RouterOptions()
        self._prefixes = tuple(prefix.encode() for prefix in prefixes)
        if any(one is not other and one.startswith(other) for one in self._prefixes for other in self._prefixes):
            raise ValueError("no prefix may be the beginning of another")
        self._desk = RouterDesk(self._options.xread_count)
        self._lock = threading.Lock()
        self._stopped = False
        #: The mode in use, and the reason when it is not the requested one.
        self.mode, self.why = mode, ""
        self._watch = ChangeEar(url, f"{name}:router-hear", self._prefixes, self._heard, self._fall_back)
        self._readers = [
            StreamReader(one, Link(url, f"{name}:{one}"), self._desk, self._options, self._watch.unsaid)
            for one in (f"router-{number}" for number in range(1, self._options.worker_count + 1))
        ]
        self._ask = SharedLink(url, f"{name}:router-ask")
        self._desk.in_turn = mode is Mode.PORTABLE
        self._desk.on_work = self._ring
        self.labels = {"router": name}
        self.show()

    def start(self) -> None:
        with self._lock:
            for service in self.services:
                service.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        with self._lock:
            self._stopped = True
        for service in (self._watch, *self._readers):
            service.stop()
        for service in (self._watch, *self._readers):
            service.join(timeout_s)
        self._ask.close()
        self._desk.close_all(End.ROUTER_STOPPED)

    def subscribe(
        self,
        key: str | bytes,
        last_id: str | bytes | _Now | None = None,
        *,
        on_entries: Callback | None = None,
        capacity: int = 1000,
    ) -> Subscription:
        """Subscribe to entries of the stream ``key`` above ``last_id``; None: from the beginning; NOW: entries that are
        added after this call.

        The stream need not exist. Instead of iteration, ``on_entries(subscription, entries)`` is called with new ones.
        ``capacity``: most entries in the channel; while it is full the rest waits in Redis. Raises ValueError for an
        impossible id or key, TypeError for an ``on_entries`` that a call does not run (``async def``), and with NOW
        RedisTrouble when Redis does not tell the end of the stream within 5 s.
        """
        [subscription] = self.subscribe_all([key], last_id, on_entries=on_entries, capacity=capacity)
        return subscription

    def subscribe_all(
        self,
        keys: Iterable[str | bytes],
        last_id: str | bytes | _Now | None = None,
        *,
        on_entries: Callback | None = None,
        capacity: int = 1000,
        timeout_s: float = 5.0,
    ) -> list[Subscription]:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        if self._stopped:
            raise UsherError("this router was stopped")
        if on_entries is not None and (kind := unawaitable_reason(on_entries)):
            raise TypeError(f"on_entries is {kind}: give a plain function")
        names = [self._key(key) for key in keys]
        given = self._position(last_id)
        made: list[Subscription] = []
        for at in range(0, len(names), _AT_ONCE):  # in parts: nothing is delivered while the lock is held
            part = names[at : at + _AT_ONCE]
            lasts = self._ends(part, timeout_s) if last_id is NOW else [given] * len(part)
            with self._desk.lock:
                for name, last in zip(part, lasts, strict=True):
                    made.append(Subscription(self._desk, name, last, on_entries, capacity))
                    self._desk.add(made[-1], check=last_id is not NOW)
            self._desk.on_work()
        return made

    def _ends(self, names: Sequence[bytes], timeout_s: float) -> list[bytes]:
        """Return where these streams end now."""
        until_s = now_s() + timeout_s
        while True:
            try:
                replies = self._ask.pipeline([("XINFO", "STREAM", name) for name in names])
                # What cannot be read is refused when it is read.
                return [
                    ZERO if isinstance(one, CommandRefused) else stream_facts(one).get(_LAST, ZERO) for one in replies
                ]
            except RedisTrouble as trouble:
                if now_s() + _PAUSE_S > until_s:
                    raise RedisTrouble(f"Redis did not say where these streams end: {trouble}") from trouble
                time.sleep(_PAUSE_S)

    def metrics(self) -> dict[str, float]:
        with self._desk.lock:
            now = {"streams": len(self._desk.by_key), "queued": self._desk.queued}
            return {**self._desk.counters, **now, "connections": len(self.services)}

    @property
    def services(self) -> Sequence[Service]:
        return tuple(self._readers) if self._desk.in_turn else (self._watch, self._readers[0])

    # -- inside

    def _key(self, key: str | bytes) -> bytes:
        name = key_bytes("the key of a stream", key)
        if self._prefixes and not name.startswith(self._prefixes):
            raise ValueError(f"{name.decode(errors='replace')} begins with none of the prefixes of this router")
        if not in_reach(self._url, name):
            raise ValueError(
                f"{name.decode(errors='replace')} lies in another slot of the cluster than the router's (give them one"
                " hash tag)"
            )
        return name

    @staticmethod
    def _position(last_id: str | bytes | _Now | None) -> bytes:
        if last_id is None or isinstance(last_id, _Now):
            return ZERO
        given = last_id.encode() if isinstance(last_id, str) else bytes(last_id)
        given = given if b"-" in given else given + b"-0"
        if not is_id(given.decode(errors="replace")):
            raise ValueError(
                "a stream id looks like 1526919030474-55, and a part of it is at most 18446744073709551615"
            )
        return from_rank(rank(given))

    def _ring(self) -> None:
        for reader in self._readers:
            reader.wake()

    def _heard(self, changed: list[bytes] | None) -> None:
        with self._desk.lock:
            if changed is None:
                self._desk.want_all()
            else:
                self._desk.announced(changed)
        if changed != []:
            self._ring()

    def _fall_back(self, why: str) -> None:
        """Switch to the portable mode."""
        with self._lock:
            if self._stopped:
                return
            event("router_fell_back_to_polling", level=WARNING, mode=Mode.PORTABLE.value, why=why)
            with self._desk.lock:
                self._desk.in_turn = True
                self._desk.want_all()
            self.mode, self.why = Mode.PORTABLE, why
            for reader in self._readers[1:]:
                reader.start()
            self._ring()
