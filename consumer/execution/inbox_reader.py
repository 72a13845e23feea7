"""Inbox reader: inbox, with its bodies -> lanes, in batches.

The inbox is read from the last record seen, with a plain XREAD: nothing is consumed, so a lost reply is simply asked
for again, and no wake-up can be missed. A small body comes with its record where nobody was given the message before;
all others are read from our own pending list. Of what was here before, an acknowledgement of ours that is sent again
may have ended it since it was named, and another owner may have its ticket.

Neither the size of the bodies nor the speed of the network is known beforehand. So what did not come is fetched page by
page, in id order, and a page grows as long as it comes in a short time and the last one was not large. The messages of
a page are run whatever becomes of the next one: otherwise a batch whose every fetch is cut off would never get here.
While this process holds ``most_bytes``, the next page waits, and one record at most with its bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import GroupMissing, ReplyUnknown
from usher.common.base.log import ERROR, WARNING, event
from usher.common.protocol.attempts import NEVER, Attempts, decode
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import ZERO, after, from_rank, rank
from usher.common.redis.client import Arg, Link, checked
from usher.common.redis.replies import (
    HandOver,
    InboxRecord,
    Order,
    parse_inbox,
    parse_own,
    read_command,
    read_own_command,
)
from usher.common.runtime.service import Service
from usher.consumer.execution.lanes import Lanes
from usher.consumer.handlers.message import Message, OwnLease

#: Most messages that the first fetch, and any fetch, asks for; and about how many bytes.
FIRST_PAGE, _MOST_PAGE, PAGE_BYTES = 4, 1000, 16 * 1024 * 1024
#: A larger page may follow one that came in less than the first time, counted from its first byte; a smaller page
#: follows one that took longer than the second. In seconds.
_FAST_S, _SLOW_S = 0.2, 1.0


def next_page(page: int, fetched: int, took_s: float | None) -> int:
    """Return the most messages of the next fetch, after one of up to ``page`` that asked for ``fetched`` (0: it asked
    for none, and proves nothing). ``took_s``: from the first byte to the last, so that a distant or busy server does
    not count as a narrow network. None: the fetch was cut off.

    >>> next_page(16, 16, 0.01), next_page(16, 3, 0.01), next_page(16, 16, 5.0)
    (64, 16, 8)
    >>> next_page(16, 16, None), next_page(16, 0, None)
    (4, 16)
    """
    if not fetched:
        return page
    if took_s is None:
        return max(1, min(page, fetched) // 4)
    if took_s > _SLOW_S:
        return max(1, min(page, fetched) // 2)
    return min(_MOST_PAGE, 4 * page) if took_s < _FAST_S and fetched >= page else page


def fitting(page: int, mean_bytes: float, room: int) -> int:
    """Return how many messages of up to ``page`` to fetch at once, where those of the last page had ``mean_bytes``, and
    there is ``room`` for so many bytes: at least one.

    >>> fitting(64, 100.0, 1 << 28), fitting(64, 1e6, 1 << 28), fitting(64, 1e6, 3_000_000), fitting(64, 1e6, -5)
    (64, 16, 3, 1)
    """
    return max(1, min(page, int(min(PAGE_BYTES, room) / max(1.0, mean_bytes))))


#: Pause before a look whether there is room for more bytes.
_FULL_S = 0.01
#: Bytes of a message from which on it counts, and mean bytes of a page in which they are looked for: thousands of
#: smaller ones are no load.
_HEAVY, _WORTH_A_LOOK = 4096, 256
#: Most records of the inbox read by one call. The new entries of a record have about 8 MiB, unless their sizes were a
#: surprise (master/dispatch/stream_cursor.py), and their bodies in it up to 4 MiB (master/leader/entries.py).
_MOST_RECORDS = 16


#: What is handed over of a ticket: it, its fence, and the entries, [id, name, value, ...]; [id] where the body is not
#: here.
Part = tuple[bytes, int, list[list[bytes]]]

_UNTRIED: dict[bytes, Attempts] = {}


def _ids(parts: Iterable[Part]) -> list[bytes]:
    return [one[0] for _, _, entries in parts for one in entries]


class InboxReader(Service):
    """The service that fills the lanes with the messages that the inbox names."""

    name = "read"
    waits_on_link = True
    _BLOCK_MS = 5000

    def __init__(self, link: Link, keys: Keys, incarnation: str, lanes: Lanes, lease: OwnLease) -> None:
        super().__init__()
        self._link = link
        self._keys = keys
        self._incarnation = incarnation
        self._inbox = keys.inbox(incarnation)
        self._any_tried = ("EXISTS", keys.attempts)  # whether attempts are noted of any message
        self._lanes = lanes
        self._lease = lease
        # What was read and is not all in the lanes yet: ``_left`` is not, and gets shorter page by page.
        self._records: list[InboxRecord] = []
        self._left: list[Part] = []
        self._tried = False  # attempts are noted of some messages
        # Fences that were closed before the inbox was read, if it had no more than these records.
        self._closed: list[tuple[bytes, int]] = []
        self._last_record = ZERO  # id of the last record whose messages are in the lanes
        self._trimmed, self._untrimmed = ZERO, 0  # the last record that is gone from the inbox, and how many may go
        self._record_bytes = 0.0  # of bodies in a record, as the last read brought them
        self._is_idle = False  # the last read brought nothing: the next one asks for no more than it must
        self._page_size = FIRST_PAGE  # most messages fetched by one call
        self._mean_bytes = 0.0  # of the messages that the last fetch brought
        self._heavy: dict[bytes, int] = {}  # bytes by id, of large messages that may still be held
        self.most_bytes, self.slots = 1 << 28, 1
        self._drains = False
        self.messages = 0
        self.message_type = Message
        self.on_order: Callable[[Order], None] = lambda order: None
        self.on_recall: Callable[[Iterable[HandOver]], None] = lambda tickets: None

    @property
    def last_turn_s(self) -> float | None:
        """Return the time of the last turn. A wait for Redis counts as a turn, however long a reply takes: if nothing
        comes any more, the link ends the wait soon."""
        return now_s() if self._link.is_waiting else super().last_turn_s

    def run_once(self) -> float:
        self.read(self._BLOCK_MS)
        return _FULL_S if self._records else 0.0

    def read(self, block_ms: int | None) -> int:
        """Read the records of the inbox above the last one seen; return the number of messages that were new.

        A read that fails starts again from the same record, or goes on where it was: ``_last_record`` moves only when
        the lanes are filled.
        """
        before = self.messages
        if not self._records:
            self._read_inbox(block_ms)
        self._fill()
        return self.messages - before

    def _read_inbox(self, block_ms: int | None) -> None:
        closed = self._lanes.closed_fences()  # before the inbox is read
        count = fitting(_MOST_RECORDS, self._record_bytes, self._room())
        records, self._tried = self._ask(block_ms, count)
        if not records:
            self._lanes.forget_closed(closed)
            return
        found, is_all = len(records), len(records) < count
        # What is recalled is looked at when all that was handed over before it, and nothing later, is in the lanes.
        records = records[: next((number for number, record in enumerate(records, 1) if record.recalled), found)]
        self._begin(records, closed if is_all and found == len(records) else [])

    def _begin(self, records: list[InboxRecord], closed: list[tuple[bytes, int]]) -> None:
        """Have what these records hand over come into the lanes, unless it is there. An id that is named twice was
        handed over anew, and runs under the later fence."""
        self._records, self._closed = records, closed
        self._left = parts = [
            (ticket, int(own) if own else record.fence, entries)
            for record in records
            for ticket, own, *entries in record.given
        ]
        ids = _ids(parts)
        with self._lanes.lock:
            unknown = set(self._lanes.unknown(ids))
        if len(unknown) == len(ids):
            return
        last = {one[0]: one for _, _, entries in parts for one in entries if one[0] in unknown}
        parts = [(ticket, fence, [one for one in each if last.get(one[0]) is one]) for ticket, fence, each in parts]
        self._left = [part for part in parts if part[2]]

    def _ask(self, block_ms: int | None, count: int) -> tuple[list[InboxRecord], bool]:
        last = self._last_record
        # Not with each read, which may bring one message.
        is_worth_it = self._is_idle or self._untrimmed * max(1.0, self._record_bytes / _HEAVY) >= _MOST_RECORDS
        is_due = is_worth_it and last != self._trimmed
        trim = [("XTRIM", self._inbox, "MINID", after(last))] if is_due else []  # refused: next time
        asked = [read_command(self._inbox, last, block_ms, count), *([] if self._is_idle else [self._any_tried])]
        try:
            replies = checked(self._link.pipeline([*trim, *asked], (block_ms or 0) / 1000)[len(trim) :])
        except ReplyUnknown:
            self._record_bytes = float(PAGE_BYTES)  # one record at the next time
            raise
        if trim:
            self._trimmed, self._untrimmed = last, 0
        records = list(parse_inbox(replies[0]))
        any_tried = replies[1] if len(replies) > 1 else records and self._link.call(*self._any_tried)
        self._is_idle = not records
        for record in records:
            if not (record.given or record.order or record.recalled):
                event("inbox_record_unknown", level=ERROR, consumer=self._incarnation, record=record.id)
        self._untrimmed += len(records)
        if records:
            self._record_bytes = sum(record.size for record in records) / len(records)
        return records, bool(any_tried)

    def _fill(self) -> None:
        """Bring the messages that were read into the lanes, all at once where their bodies came with them, else page by
        page. A page that fails, or for which there is no room, is left for the next time."""
        while self._left:
            room = PAGE_BYTES if self._drains else self._room()
            if not room:
                return
            page = self._next_page(fitting(self._page_size, self._mean_bytes, room))
            try:
                self._fill_lanes(page)
            except GroupMissing:
                # The messages may be handed over anew, and only the inbox tells under which fence.
                self._records, self._left = [], []
                raise
            self._left = self._left[len(page) :]
        if self._records:
            self._last_record = self._records[-1].id
            self._obey()
            self._lanes.forget_closed(self._closed)

    def _next_page(self, most: int) -> list[Part]:
        missing = [one for _, _, entries in self._left for one in entries if len(one) == 1]
        if len(missing) <= most or self._drains:
            return self._left
        one_by_one = [(ticket, fence, [one]) for ticket, fence, entries in self._left for one in entries]
        self._left = sorted(one_by_one, key=lambda part: rank(part[2][0][0]))
        first_left = sorted(missing, key=lambda one: rank(one[0]))[most]
        return list(takewhile(lambda part: part[2][0] is not first_left, self._left))

    def _room(self) -> int:
        room = self.most_bytes - sum(self._heavy.values())
        if room > 0:
            return room
        with self._lanes.lock:
            held = self._lanes.held_ids
            self._heavy = {entry_id: size for entry_id, size in self._heavy.items() if entry_id in held}
            is_idle = self._lanes.in_slots < self.slots and not self._lanes.ready
        return max(self.most_bytes - sum(self._heavy.values()), int(is_idle))

    def read_rest(self) -> None:
        """Read the inbox to its end, for a drain, in which nothing is started any more, so that no bodies are
        needed."""
        self._drains, self._tried = True, False
        self._fill()
        while records := self._ask(None, _MOST_RECORDS)[0]:
            self._begin(records, [])
            self._fill()

    def _obey(self) -> None:
        """Carry out the orders and recalls among the records. The messages that were handed over before them are in
        the lanes. Of equal orders the last one is: a storm of them must not keep up what is handed over."""
        last = {record.order: record.id for record in self._records}
        while self._records:  # one that Redis does not answer is carried out again, before those behind it
            record = self._records[0]
            if record.order is not None and last[record.order] == record.id:
                self.on_order(record.order)
            if record.recalled and not self._drains:  # a drain gives everything back
                self.on_recall(record.recalled)
            del self._records[0]

    def _fill_lanes(self, page: list[Part]) -> None:
        missing = [one[0] for _, _, entries in page for one in entries if len(one) == 1]
        if self._drains:  # what has a body is started by a runner that goes on with its lane
            page = [(ticket, fence, [one[:1] for one in each]) for ticket, fence, each in page]
        elif missing:
            page = self._with_bodies(page, sorted(missing, key=rank))
        ids = _ids(page)
        known = (self._attempts(ids) if self._tried and ids else _UNTRIED).get
        make, lease = self.message_type, self._lease
        if missing or self._record_bytes * len(self._records) >= _WORTH_A_LOOK * len(ids):
            sizes = ((one[0], sum(map(len, one[1:]))) for _, _, entries in page for one in entries)
            self._heavy |= {entry_id: size for entry_id, size in sizes if size >= _HEAVY}
        self._lanes.add(
            [
                (ticket, [make(ticket, one[0], fence, one[1:] or None, lease, known(one[0], NEVER)) for one in each])
                for ticket, fence, each in page
            ]
        )
        self.messages += len(ids)

    def _with_bodies(self, page: list[Part], missing: list[bytes]) -> list[Part]:
        """Return those of these messages that are ours, with their bodies. Only a message without one anywhere has lost
        it."""
        found = self._read_on(missing)
        over = self._over([one for one in missing if one not in found])
        page = [
            (
                ticket,
                fence,
                [one if len(one) > 1 else [one[0], *(found.get(one[0]) or ())] for one in each if one[0] not in over],
            )
            for ticket, fence, each in page
        ]
        return [part for part in page if part[2]]

    def _fetched(self, commands: list[tuple[Arg, ...]], most: int) -> list[Any]:
        """Return the replies to commands that read up to ``most`` bodies, and size the next page by their time, counted
        from a first reply that comes at once. When they do not come it gets smaller."""
        try:
            replies = self._link.pipeline([self._any_tried, *commands])[1:]
        except ReplyUnknown:
            self._page_size = next_page(self._page_size, most, None)
            raise
        self._page_size = next_page(self._page_size, most, self._link.lasted_s)
        return checked(replies)

    def _attempts(self, wanted: list[bytes]) -> dict[bytes, Attempts]:
        charged = self._link.call("HMGET", self._keys.attempts, *wanted)
        found = {entry_id: value for entry_id, value in zip(wanted, charged, strict=True) if value is not None}
        if wrong := [entry_id for entry_id, value in found.items() if decode(value) is NEVER]:
            event("attempts_unreadable", level=ERROR, count=len(wrong), first=wrong[0])
        return {entry_id: decode(value) for entry_id, value in found.items()}

    def _read_on(self, wanted: list[bytes]) -> dict[bytes, list[bytes] | None]:
        """Read our own pending list for bodies of ``wanted``, in id order. It also has what is in the lanes, and what
        records name that we have not read yet; only at the end of the list is an id really gone."""
        missing, bodies = list(map(rank, wanted)), dict[bytes, list[bytes] | None]()
        while missing:
            # The entries between them may be large too.
            most = min(len(missing), fitting(self._page_size, self._mean_bytes, PAGE_BYTES))
            command = read_own_command(self._keys, self._incarnation, from_rank(missing[0] - 1), most)
            page = parse_own(self._fetched([command], most)[0])
            self._mean_bytes = sum(len(part) for _, flat in page for part in flat or ()) / max(1, len(page))
            bodies.update(page)
            last = rank(page[-1][0]) if page else missing[-1]
            missing = [at for at in missing if at > last]
        return bodies

    def _over(self, missing: list[bytes]) -> set[bytes]:
        """Return those of these ids, which are pending for us no more, that are in the stream: an acknowledgement of
        ours that was sent again ended them, or somebody has taken them from us by hand. Of the others the body is
        gone."""
        if not missing:
            return set()
        found = self._fetched([("XRANGE", self._keys.stream, one, one) for one in missing], len(missing))
        over = {one for one, there in zip(missing, found, strict=True) if there}
        if over:
            me, count, first = self._incarnation, len(over), min(over, key=rank)
            event("inbox_entries_stale", level=WARNING, consumer=me, count=count, first=first)
        return over

    def close(self) -> None:
        self._link.close()
