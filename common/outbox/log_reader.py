"""Read a stream as a log, from after an id, with a proof that nothing was lost in between.

The entry of the id itself is read again, each time: while it is there, its successors were neither trimmed away nor
lost with Redis' memory. That needs no second command, and `usher trim` keeps the entry of every checkpoint for it. A
consumer that begins with the first entry is placed at the id just below it: nothing fits between the two, so while that
entry is there nothing was lost either. Only after 0-0, of a stream that has no entry yet, there is no proof before the
first batch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from usher.common.base.errors import UsherError
from usher.common.protocol.keys import LogKeys
from usher.common.protocol.stream_id import ZERO, Span, after, before, rank
from usher.common.redis.client import Link
from usher.common.redis.endpoints import near
from usher.common.redis.replies import Entry, span_of
from usher.common.redis.scripts import ScriptRunner
from usher.common.router.router import StreamRouter

#: Redis stands still, and both sides hold the whole reply: a few entries show how large they are, and a read ends with
#: about so many bytes.
_ENOUGH_BYTES = 4 * 1024 * 1024
_FIRST_PAGE, _GROWTH = 16, 4


class Loss(enum.Enum):
    ABOVE_END = "checkpoint_above_end"
    BELOW_START = "checkpoint_below_start"
    GONE = "checkpoint_entry_gone"


_TOLD = {
    Loss.ABOVE_END: "the stream ends below it: Redis has lost its data, or this is another stream",
    Loss.BELOW_START: "the stream begins above it: entries that it has not read may have been cut",
    Loss.GONE: "its entry is not in the stream: it was deleted, or Redis has lost its last moments and gone on",
}


class LogLost(UsherError):
    """The stream after a checkpoint is not the unread rest of what its reader has read. Nothing was handled; it stays
    like this until it is reset."""

    def __init__(self, name: str, stream: str, last_id: bytes, loss: Loss, span: Span | None) -> None:
        self.loss = loss
        first, last = (b"", b"") if span is None else (span.first or b"", span.last_generated)
        super().__init__(
            f"{loss.value}: log consumer {name} has read {stream} up to {last_id.decode()}, but {_TOLD[loss]} (first"
            f" entry {first.decode() or 'none'}, last id {last.decode() or 'none'}). Compare its state with the source"
            " and reset it: LogConsumer.reset(last_id, state)"
        )


def judge_loss(last_id: bytes, span: Span | None) -> Loss | None:
    """Return why the entry of a checkpoint is missing; None when nothing after it can be lost. Pure."""
    if span is None or rank(last_id) > rank(span.last_generated):
        return Loss.ABOVE_END
    if last_id == span.last_generated:
        return None  # it never had a successor
    return Loss.BELOW_START if span.first is None or rank(span.first) > rank(last_id) else Loss.GONE


def _next_page(page: int, room: int, seen: list[Entry]) -> int:
    """Return how many entries to ask for after a page of so many: as many as ``room`` bytes hold of entries like those
    that were seen."""
    return min(_GROWTH * page, room // (_size(seen) // len(seen) + 1))


def _size(entries: list[Entry]) -> int:
    return sum(len(part) for entry in entries for part in entry.fields or ())


class StreamLog:
    """A stream as a log, over a connection of its own; used by one thread. With a ``router`` it waits through that: log
    consumers of many streams in one process block no connection each, and wake when Redis announces a change. Entries
    to handle are read here all the same: a router's delivery proves no continuity."""

    def __init__(self, redis_url: str, stream: str, name: str, router: StreamRouter | None = None) -> None:
        self._link = Link(near(redis_url, stream), f"log:{name}")
        self._scripts = ScriptRunner(self._link)
        self._keys = LogKeys(stream)
        self._router = router

    def read(self, name: str, last_id: bytes, count: int) -> list[Entry]:
        """Return entries above ``last_id``, at most ``count``, fewer where they are large; at once. Raises LogLost, and
        what ``Link.call`` raises."""
        page, room = min(count, _FIRST_PAGE), _ENOUGH_BYTES
        found = entries = self._page(name, last_id, page)
        while len(found) == page:
            room -= _size(found)
            page = min(_next_page(page, room, found), count - len(entries))
            if page <= 0:
                break
            behind = self._range(entries[-1].id, page + 1)
            if not behind or behind[0].id != entries[-1].id:
                break  # lost, or cut, meanwhile: the next read reports it
            found = behind[1:]
            entries = [*entries, *found]
        return entries

    def _page(self, name: str, last_id: bytes, count: int) -> list[Entry]:
        if last_id == ZERO:
            return self._range(b"-", count)
        found = self._range(last_id, count + 1)
        if found and found[0].id == last_id:
            return found[1:]
        span = span_of(self._link, self._keys.stream)
        if found and span is not None and found[0].id == span.first == after(last_id):
            return found[:count]
        loss = judge_loss(last_id, span)
        if loss is not None:
            raise LogLost(name, self._keys.stream, last_id, loss, span)
        return []  # entries that came between the two looks are read by the next one

    def _range(self, start: bytes, count: int) -> list[Entry]:
        return [Entry(*entry) for entry in self._link.call("XRANGE", self._keys.stream, start, "+", "COUNT", count)]

    def wait(self, last_id: bytes, wait_s: float) -> bool:
        """Return True when there is an entry above ``last_id``, waiting up to ``wait_s`` seconds."""
        if self._router is not None:
            subscription = self._router.subscribe(self._keys.stream, last_id, capacity=1)
            try:
                return bool(subscription.take(1, wait_s))
            finally:
                subscription.close()
        command = ("XREAD", "COUNT", 1, "BLOCK", max(1, int(wait_s * 1000)), "STREAMS", self._keys.stream, last_id)
        return self._link.call(*command, block_s=wait_s) is not None

    def place(self, wanted: bytes) -> bytes:
        """Return the highest id in the stream that is not above ``wanted`` (b"+": the end); the one just below the
        first entry when there is none, 0-0 when the stream is empty."""
        below = self._link.call("XREVRANGE", self._keys.stream, wanted, "-", "COUNT", 1)
        if below:
            return bytes(below[0][0])
        first = self._link.call("XRANGE", self._keys.stream, "-", "+", "COUNT", 1)
        return before(first[0][0]) if first else ZERO

    def back_from(self, last_id: bytes, page: int) -> Iterator[Entry]:
        """Yield the entries from ``last_id`` back to the first one, in pages of ``page``, fewer where they are
        large."""
        most, page = page, min(page, _FIRST_PAGE)
        while found := [
            Entry(*entry) for entry in self._link.call("XREVRANGE", self._keys.stream, last_id, "-", "COUNT", page)
        ]:
            yield from found
            last_id = b"(" + found[-1].id
            page = max(1, min(most, _next_page(page, _ENOUGH_BYTES, found)))

    def note(self, name: str, version: int, last_id: bytes, *, replace: bool = False) -> bool:
        """Tell trimmers that everything from ``last_id`` on is needed; return False when a later version is noted."""
        return bool(
            self._scripts.run(
                "note_checkpoint", (self._keys.checkpoints,), (name, version, last_id, "1" if replace else "")
            )
        )

    def noted(self, name: str) -> int | None:
        value = self._link.call("HGET", self._keys.checkpoints, name)
        version = (value or b"").partition(b" ")[0]
        return int(version) if version.isdigit() else None

    def close(self) -> None:
        self._link.close()
