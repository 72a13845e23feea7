"""The schedule: it decides which stream is read next and from where, and interprets a reply. Pure: no clock, no
connection, no lock.

A stream is read for all of its subscriptions together, from the lowest of their positions, and by one reader at a time;
each gets what lies above its own position. A position only moves when its subscription has taken the entries, so a
reply that never came costs nothing and gives nothing twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from usher.common.protocol.message import EntryView
from usher.common.protocol.stream_id import ZERO, rank

# Marks of a stream. They are one number, because there may be a million streams, and a plain one: arithmetic of an
# IntFlag costs a microsecond each.
#: Urgent: queued before the streams that are only looked at in passing.
_QUEUED, _URGENT, _READING = 1, 2, 4
#: Announced, or got a subscription, while it was being read.
_AGAIN = 8
#: When nothing new is found, check that the stream is still the one that the positions belong to.
_CHECK = 16
#: Queued by the sweep, without an announced change.
_SWEPT = 32


class Stream:
    __slots__ = ("key", "marks", "places")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.places: tuple[ReadPosition, ...] = ()
        self.marks = 0


class ReadPosition:
    """The position of a subscription in its stream: ``last`` is the id of the last entry it has.

    ``held``: it has no room, so nothing is read for it. ``resets``: how often it began anew because the stream was
    another one than before.
    """

    __slots__ = ("held", "last", "resets", "stream")

    def __init__(self, stream: Stream, last: bytes) -> None:
        self.stream = stream
        self.last = last
        self.held = False
        self.resets = 0


class Read(NamedTuple):
    """A read to do: entries of ``stream`` above ``after``. ``swept``: no change was announced; ``check``: when
    nothing is found, see that the stream is still the same."""

    stream: Stream
    after: bytes
    swept: bool = False
    check: bool = False


class LastIdCheck(NamedTuple):
    """A check to do: ask for the last id of ``stream``; ``places`` are the positions that must not be above it."""

    stream: Stream
    places: tuple[tuple[ReadPosition, bytes], ...]


class ReadSchedule:
    """The schedule of all streams. ``in_turn``: every stream is read again and again (portable mode), else only
    announced ones."""

    def __init__(self) -> None:
        self.streams: dict[bytes, Stream] = {}
        self.in_turn = False
        self._urgent: deque[Stream] = deque()
        self._queue: deque[Stream] = deque()
        self._pass: list[Stream] = []

    # -- subscriptions

    def stream(self, key: bytes) -> Stream:
        return self.streams.get(key) or self.streams.setdefault(key, Stream(key))

    def add(self, place: ReadPosition, check: bool = True) -> None:
        stream = place.stream
        stream.places = (*stream.places, place)
        self._want(stream, _CHECK if check else 0)

    def remove(self, place: ReadPosition) -> None:
        """Remove a position. The stream goes with its last position; a queued or busy stream goes when its turn
        comes."""
        stream = place.stream
        stream.places = tuple(other for other in stream.places if other is not place)
        self._forget_unused(stream)

    def resume(self, place: ReadPosition) -> None:
        if place.held:
            place.held = False
            self._want(place.stream, _URGENT)

    # -- what is to be read

    def announced(self, keys: Iterable[bytes]) -> int:
        """Queue the streams of these keys, which have changed. Returns how many of them have subscriptions."""
        known = [stream for key in keys if (stream := self.streams.get(key)) is not None]
        for stream in known:
            self._want(stream, _URGENT | _CHECK)
        return len(known)

    def want_all(self) -> None:
        for stream in self.streams.values():
            self._want(stream, _CHECK)

    def check_all(self) -> None:
        for stream in self.streams.values():
            stream.marks |= _CHECK

    def sweep(self, count: int) -> None:
        if not self._pass:
            self._pass = list(self.streams.values())
        chosen = self._pass[-count:]
        del self._pass[-count:]
        for stream in chosen:
            if stream.places:
                if not stream.marks & (_QUEUED | _READING):
                    stream.marks |= _SWEPT
                self._want(stream, 0)

    def take(self, most: int) -> list[Read]:
        reads: list[Read] = []
        while len(reads) < most and (stream := self._next()) is not None:
            marks = stream.marks
            after = _lowest(stream)
            stream.marks = marks & ~(_QUEUED | _URGENT | _AGAIN | _CHECK | _SWEPT)
            if after is None:
                self._forget_unused(stream)
                continue
            stream.marks |= _READING
            reads.append(Read(stream, after, bool(marks & _SWEPT), bool(marks & _CHECK)))
        return reads

    @staticmethod
    def heard_of(read: Read) -> bool:
        return bool(read.stream.marks & _AGAIN)

    @property
    def queued(self) -> int:
        return len(self._urgent) + len(self._queue)

    # -- what a reply means

    def shares(self, read: Read, entries: Sequence[EntryView]) -> list[tuple[ReadPosition, Sequence[EntryView]]]:
        """Return the entries for each position. A position that was added, or went back, while the read was under way
        is behind it and gets nothing yet."""
        found: list[tuple[ReadPosition, Sequence[EntryView]]] = []
        after = rank(read.after)
        for place in read.stream.places:
            if place.held:
                continue
            last = rank(place.last)
            if last < after:
                read.stream.marks |= _AGAIN
                continue
            is_all = rank(entries[0].stream_id) > last
            share = entries if is_all else [entry for entry in entries if rank(entry.stream_id) > last]
            if share:
                found.append((place, share))
        return found

    def finish(self, read: Read, more: bool) -> None:
        stream = read.stream
        again = more or stream.marks & _AGAIN
        stream.marks &= ~(_READING | _AGAIN)
        if not stream.places:
            self._forget_unused(stream)
        elif again:
            self._want(stream, _URGENT)
        elif self.in_turn:
            self._want(stream, 0)

    def failed(self, read: Read) -> None:
        stream = read.stream
        stream.marks &= ~(_READING | _AGAIN)
        self._want(stream, _CHECK if read.check else 0)

    def to_check(self, read: Read, found: bytes = ZERO, more: bool = False) -> LastIdCheck | None:
        """Return the check that proves that there was nothing to find for positions above ``found``, the last entry
        found (ZERO: none). A position at the beginning can miss nothing. ``more``: the next read proves it."""
        if found != ZERO and len(read.stream.places) < 2:
            return None  # the only position got it
        end = rank(found)
        places = tuple((place, place.last) for place in read.stream.places if rank(place.last) > end)
        if more and places:
            read.stream.marks |= _CHECK
        return LastIdCheck(read.stream, places) if places and not more else None

    def checked(self, check: LastIdCheck, last_generated: bytes | None) -> list[ReadPosition]:
        """Return the positions that were above the stream's last id (None: there is no stream): they belong to an
        earlier stream of that name, or to a history that Redis has lost, and begin anew, because no entry of the
        present stream may be missed."""
        highest = rank(last_generated or ZERO)
        reset = [place for place, last in check.places if place.last == last and rank(last) > highest]
        for place in reset:
            place.last = ZERO
            place.resets += 1
        if reset:
            self._want(check.stream, _URGENT)
        return reset

    def want_check(self, check: LastIdCheck) -> None:
        self._want(check.stream, _CHECK)

    # -- inside

    def _want(self, stream: Stream, marks: int) -> None:
        stream.marks |= marks & _CHECK
        if stream.marks & _READING:
            # In turn, every stream comes again anyway; a change that was announced during the read comes at once.
            stream.marks |= _AGAIN
        elif not stream.marks & _QUEUED:
            stream.marks |= _QUEUED | (marks & _URGENT)
            (self._urgent if marks & _URGENT else self._queue).append(stream)
        elif marks & _URGENT and not stream.marks & _URGENT:
            stream.marks = (stream.marks | _URGENT) & ~_SWEPT
            self._urgent.append(stream)  # its place in the other queue is skipped

    def _forget_unused(self, stream: Stream) -> None:
        if not stream.places and not stream.marks & (_QUEUED | _READING) and self.streams.get(stream.key) is stream:
            del self.streams[stream.key]

    def _next(self) -> Stream | None:
        while self._urgent:
            stream = self._urgent.popleft()
            if stream.marks & _URGENT:
                return stream
        while self._queue:
            stream = self._queue.popleft()
            if stream.marks & _QUEUED and not stream.marks & _URGENT:
                return stream
        return None


def _lowest(stream: Stream) -> bytes | None:
    positions = [place.last for place in stream.places if not place.held]
    if len(positions) < 2:
        return positions[0] if positions else None
    return min(positions, key=rank)
