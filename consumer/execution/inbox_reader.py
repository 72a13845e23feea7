"""Inbox reader: inbox -> bodies -> lanes, in batches.

The inbox is read from the last record seen, with a plain XREAD: nothing is consumed, so a lost reply is simply asked
for again, and no wake-up can be missed. The bodies come from our own pending list: with the records, in the same round
trip, comes what is pending above all that was read before, which is what they name, but for rare cases.

Neither the size of the bodies nor the speed of the network is known beforehand. So what did not come is fetched page by
page, in id order, and a page grows as long as it comes in a short time and the last one was not large. The messages of
a page are run whatever becomes of the next one: otherwise a batch whose every fetch is cut off would never get here.
While this process holds ``most_bytes``, the next page waits.

The states of a reader. ``read`` usually goes from Idle through Filling to Idle; it ends in Filling only if a page
could not be fetched::

    Idle ------> Idle       the inbox has nothing new
    Idle ------> Filling    it has records, whose messages are to go to the lanes, with their bodies
    Idle ------> Blocked    its next record names a message again that is about to be acknowledged
    Blocked ---> any        the record is looked at again, at the next ``read``
    Filling ---> Filling    a page could not be fetched, or there is no room for it: the next ``read`` goes on with it
    Filling ---> Idle       all messages are in the lanes
    Filling ---> Idle       the group is missing: messages may be handed over anew, and the inbox is read again
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import GroupMissing, ReplyUnknown
from usher.common.base.log import event
from usher.common.protocol.attempts import NEVER, Attempts, decode
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import ZERO, after, from_rank, rank
from usher.common.redis.client import Arg, Link
from usher.common.redis.replies import (
    HandOver,
    InboxRecord,
    Order,
    TicketStream,
    parse_bodies,
    parse_inbox,
    range_command,
    read_inbox_command,
    read_own_command,
    trim_inbox_command,
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


log = logging.getLogger(__name__)

#: Pause before a record is looked at again that names a message which is about to be acknowledged.
_BLOCKED_S = 0.005
#: Pause before a look whether there is room for more bytes.
_FULL_S = 0.01
#: Bytes of a message from which on it counts, and mean bytes of a page in which they are looked for: thousands of
#: smaller ones are no load.
_HEAVY, _WORTH_A_LOOK = 4096, 256
#: Records of the inbox read by one call. The new entries of a record have about 8 MiB at most (lua/leader/peek): that
#: bounds a page whose sizes are a surprise.
_MOST_RECORDS = 16
#: Records that stay in the inbox while nothing must be fetched.
_MOST_UNTRIMMED = 25


def _parts(records: Iterable[InboxRecord]) -> list[HandOver]:
    return [part for record in records for part in record.parts]


def _ids(parts: Iterable[HandOver]) -> list[bytes]:
    return list(chain.from_iterable([part.ids for part in parts]))


def _one_by_one(parts: Iterable[HandOver]) -> list[HandOver]:
    """Split hand-overs into those of one message each, in id order."""
    return sorted(
        [HandOver(ticket, fence, [entry_id]) for ticket, fence, ids in parts for entry_id in ids],
        key=lambda part: rank(part.ids[0]),
    )


@dataclass(frozen=True)
class Idle:
    """The state in which everything that was read is in the lanes."""


@dataclass(frozen=True)
class Blocked:
    """The state in which the next record names a message of ``ticket`` again, and must wait until that message is
    acknowledged."""

    record_id: bytes
    ticket: bytes


#: Bodies by id; None: the body is not where it should be.
Bodies = dict[bytes, list[bytes] | None]


@dataclass
class Filling:
    """The state in which the messages of ``records`` are not all in the lanes.

    ``is_all``: the inbox had no more than these records. ``closed_fences``: those that were closed before the inbox was
    read. ``left``: what is not in the lanes yet; it gets shorter page by page. ``bodies``: those that came with the
    records. ``any_tried``: attempts are noted of some messages.
    """

    records: list[InboxRecord]
    is_all: bool
    closed_fences: list[tuple[bytes, int]]
    left: list[HandOver]
    bodies: Bodies
    any_tried: bool


_IDLE = Idle()
_UNTRIED: dict[bytes, Attempts] = {}


class InboxReader(Service):
    """The service that fills the lanes with the messages that the inbox names."""

    name = "read"
    _BLOCK_MS = 2000

    def __init__(self, link: Link, keys: Keys, incarnation: str, lanes: Lanes, lease: OwnLease) -> None:
        super().__init__()
        self._link = link
        self._keys = keys
        self._stream = TicketStream(link, keys)
        self._incarnation = incarnation
        self._inbox = keys.inbox(incarnation)
        self._any_tried = ("EXISTS", keys.attempts)  # whether attempts are noted of any message
        self._lanes = lanes
        self._lease = lease
        self._state: Idle | Blocked | Filling = _IDLE
        self._last_record = ZERO  # id of the last record whose messages are in the lanes
        self._records_to_trim = 0  # records up to that one that are still in the inbox
        self._highest = ZERO  # the highest id ever read: most often, what is pending above it is new
        self._page_size = FIRST_PAGE  # most messages fetched by one call
        self._mean_bytes = 0.0  # of the messages that the last fetch brought
        self._named = _MOST_PAGE  # messages that the last records named
        self._heavy: dict[bytes, int] = {}  # bytes by id, of large messages that may still be held
        self.most_bytes, self.slots = 1 << 28, 1
        self._drains = False
        # In a drain: hand-overs of tickets of which a message is yet to be acknowledged.
        self._postponed: list[HandOver] = []
        self.messages = 0
        self.message_type = Message
        self.on_order: Callable[[Order], None] = lambda order: None
        self.on_recall: Callable[[Iterable[HandOver]], None] = lambda tickets: None

    @property
    def is_blocked(self) -> bool:
        return isinstance(self._state, Blocked)

    @property
    def last_turn_s(self) -> float | None:
        """Return the time of the last turn. A wait for Redis counts as a turn, however long a reply takes: if nothing
        comes any more, the link ends the wait soon."""
        return now_s() if self._link.is_waiting else super().last_turn_s

    @property
    def trouble(self) -> str | None:
        """Return the trouble; also when a record blocks all later hand-overs, since a handler may run for long."""
        state, why = self._state, None
        if isinstance(state, Blocked):
            why = f"waits until a message of {state.ticket!r} ends here, because it was handed over anew"
        return super().trouble or why

    def run_once(self) -> float:
        self.read(self._BLOCK_MS)
        return _BLOCKED_S if self.is_blocked else _FULL_S if isinstance(self._state, Filling) else 0.0

    def read(self, block_ms: int | None) -> int:
        """Read the records of the inbox above the last one seen; return the number of messages that were new.

        A read that fails starts again from the same record, or goes on where it was: ``_last_record`` moves only when
        the lanes are filled.
        """
        if not isinstance(self._state, Filling):
            self._state = self._read_inbox(block_ms)
            if self._state is _IDLE:
                self._trim()
        return self._fill()

    def _read_inbox(self, block_ms: int | None) -> Idle | Blocked | Filling:
        with self._lanes.locked() as board:
            closed = board.closed_fences()  # before the inbox is read
        room = 0 if self.is_blocked else self._room()
        # What the next records do not name comes for nothing, and again with the next ones.
        page = min(self._page_size, max(FIRST_PAGE, 2 * self._named))
        records, any_tried, own = self._ask(block_ms, fitting(page, self._mean_bytes, room) if room else 0)
        if not records:
            self._forget_closed(closed)
            return _IDLE
        found = len(records)
        # What is recalled is looked at when all that was handed over before it, and nothing later, is in the lanes.
        records = records[: next((number for number, record in enumerate(records, 1) if record.recalled), found)]
        parts = _parts(records)
        self._named = sum(len(part.ids) for part in parts)
        wanted = self._wanted(parts)
        if wanted is not parts:  # it has some already
            number, blocked = self._first_blocked(records)
            if blocked is not None and number == 0:
                self._tell_blocked(blocked)
                return blocked
            records = records[:number]
            # Asked again: a message that was acknowledged since must not be passed over as one that we hold.
            wanted = self._wanted(_parts(records))
        if wanted and isinstance(own, Exception):
            raise own
        is_all = found == len(records) < _MOST_RECORDS
        return Filling(records, is_all, closed, wanted, dict(own) if wanted else {}, any_tried)

    def _ask(self, block_ms: int | None, most: int) -> tuple[list[InboxRecord], bool, Any]:
        """Return the next records of the inbox; whether any attempts are noted; and up to ``most`` entries of our own
        pending list above all that was ever read, or why they cannot be had. None of these was here before, so no
        acknowledgement that is under way can have ended it."""
        commands = [read_inbox_command(self._inbox, self._last_record, block_ms, _MOST_RECORDS), self._any_tried]
        if most:
            commands.append(read_own_command(self._keys, self._incarnation, self._highest, most))
        if trims := self._records_to_trim >= _MOST_UNTRIMMED:
            commands.append(trim_inbox_command(self._inbox, after(self._last_record)))
        inbox, any_tried, *more = self._timed(commands, most, block_ms)
        for reply in (inbox, any_tried):
            if isinstance(reply, Exception):
                raise reply
        self._records_to_trim *= not trims
        own = more[0] if most else None
        if not isinstance(own, Exception):
            own = parse_bodies(own)
            if own and rank(own[0][0]) <= rank(self._highest):  # above the highest id that there is, Redis begins anew
                own = []
            self._page_size = next_page(self._page_size, len(own), self._link.lasted_s)
        records = list(parse_inbox(inbox))
        for record in records:
            if not (record.parts or record.order or record.recalled):
                event(log, "inbox_record_unknown", level=logging.ERROR, consumer=self._incarnation, record=record.id)
        return records, bool(any_tried), own

    def _fill(self) -> int:
        """Bring the messages that were read into the lanes, all at once where their bodies came with them, else page by
        page, and return how many. A page that fails, or for which there is no room, is left for the next time."""
        filling = self._state
        if not isinstance(filling, Filling):
            return 0
        added = 0
        ids, bodies = _ids(filling.left), filling.bodies
        if not all(map(bodies.get, ids)):
            filling.left = _one_by_one(filling.left)
        elif ids:
            # Where nothing else came with them, they came in their order.
            top = next(reversed(bodies)) if len(ids) == len(bodies) else max(ids, key=rank)
            added, filling.left = self._put(filling.left, bodies, top, filling.any_tried), []
        while filling.left:
            room = PAGE_BYTES if self._drains else self._room()
            if not room:
                return added
            page = filling.left[: fitting(self._page_size, self._mean_bytes, room)]
            page = list(takewhile(lambda part: part.ids[0] in bodies, filling.left)) or page
            try:
                added += self._fill_lanes(page, bodies, filling.any_tried)
            except GroupMissing:
                # The messages may be handed over anew, and only the inbox tells under which fence.
                self._state = _IDLE
                raise
            del filling.left[: len(page)]
        self._state, self._last_record = _IDLE, filling.records[-1].id
        self._obey(filling.records)
        if filling.is_all:
            self._forget_closed(filling.closed_fences)
        self._records_to_trim += len(filling.records)
        return added

    def _room(self) -> int:
        """Return the room for more bytes of messages, at least one where a handler is idle."""
        room = self.most_bytes - sum(self._heavy.values())
        if room > 0:
            return room
        with self._lanes.locked() as board:
            held = board.held_ids
            self._heavy = {entry_id: size for entry_id, size in self._heavy.items() if entry_id in held}
            is_idle = board.has_idle(self.slots)
        return max(self.most_bytes - sum(self._heavy.values()), int(is_idle))

    def _weigh(self, bodies: Bodies) -> None:
        self._mean_bytes = sum(map(len, chain.from_iterable(filter(None, bodies.values())))) / max(1, len(bodies))
        if self._mean_bytes >= _WORTH_A_LOOK:
            sizes = {entry_id: sum(map(len, flat or ())) for entry_id, flat in bodies.items()}
            self._heavy |= {entry_id: size for entry_id, size in sizes.items() if size >= _HEAVY}

    def read_rest(self) -> bool:
        """Read the inbox to its end, for a drain, in which nothing is started any more, so that no bodies are needed.
        Return whether nothing is postponed.

        A message that is named again and about to end here does not block the rest: only its ticket is postponed, to
        the next call.
        """
        self._drains = True
        self._fill()
        while True:
            records, _, _ = self._ask(None, 0)
            parts = [*self._postponed, *_parts(records)]
            ending = self._ending_tickets(parts)
            ready = [part for part in parts if part.ticket not in ending]
            self._fill_lanes(_one_by_one(self._wanted(ready)), {}, False)
            self._postponed = [part for part in parts if part.ticket in ending]
            self._obey(records)
            if not records:
                return not self._postponed
            self._last_record = records[-1].id

    def _obey(self, records: list[InboxRecord]) -> None:
        """Carry out the orders and recalls among these records. The messages that were handed over before them are in
        the lanes."""
        for record in records:
            if record.order is not None:
                self.on_order(record.order)
            if record.recalled and not self._drains:  # a drain gives everything back
                self.on_recall(record.recalled)

    def _trim(self) -> None:
        """Trim the records that were read from the inbox: they need not stay while nothing comes."""
        if self._records_to_trim:
            self._link.call(*trim_inbox_command(self._inbox, after(self._last_record)))
            self._records_to_trim = 0

    def _first_blocked(self, records: list[InboxRecord]) -> tuple[int, Blocked | None]:
        """Return how many records may be read, and the state that blocks the next one, which names a message that is
        about to end here.

        A message that waits in a lane and is named again will be run, and its acknowledgement will count. But if Redis
        had the acknowledgement first and then lost the group, the message was handed over anew: passed over as one that
        we hold, it would never be run nor acknowledged. So its record waits until we know.
        """
        with self._lanes.locked() as board:
            for number, record in enumerate(records):
                for part in record.parts:
                    if board.is_ending(part.ticket, part.ids):
                        return number, Blocked(record.id, part.ticket)
        return len(records), None

    def _tell_blocked(self, state: Blocked) -> None:
        if state != self._state:
            event(
                log,
                "inbox_blocked",
                level=logging.WARNING,
                consumer=self._incarnation,
                record=state.record_id,
                ticket=state.ticket,
            )

    def _wanted(self, parts: list[HandOver]) -> list[HandOver]:
        """Return ``parts`` if nothing of them is in the lanes, else what is not. An id that is named twice was handed
        over anew, and runs under the later fence."""
        ids = _ids(parts)
        with self._lanes.locked() as board:
            unknown = set(board.unknown(ids))
        if len(unknown) == len(ids):
            return parts
        last = {entry_id: at for at, part in enumerate(parts) for entry_id in part.ids if entry_id in unknown}
        left = [part._replace(ids=[one for one in part.ids if last.get(one) == at]) for at, part in enumerate(parts)]
        return [part for part in left if part.ids]

    def _fill_lanes(self, page: list[HandOver], came: Bodies, any_tried: bool) -> int:
        """Bring messages, which stand one by one in id order, into the lanes. ``came``: bodies that are here. Only a
        message without one anywhere has lost it. A drain needs none."""
        found = {} if self._drains else {part.ids[0]: came[part.ids[0]] for part in page if part.ids[0] in came}
        if not self._drains:
            self._read_on([part.ids[0] for part in page if part.ids[0] not in found], found)
        over = self._not_ours({part.ids[0]: part.ticket for part in page if part.ids[0] not in found})
        page = [part for part in page if part.ids[0] not in over]
        bodies = {part.ids[0]: found.get(part.ids[0]) for part in page}
        if not self._drains:
            self._look_in_the_stream([one for one, flat in bodies.items() if flat is None], bodies)
        return self._put(page, bodies, page[-1].ids[0], any_tried) if page else 0

    def _put(self, parts: list[HandOver], bodies: Bodies, top: bytes, any_tried: bool) -> int:
        """Bring messages into the lanes, and return how many; ``top``: the highest of their ids, or above it."""
        ids = _ids(parts)
        known = (self._attempts(ids) if any_tried else _UNTRIED).get
        make, lease, body = self.message_type, self._lease, bodies.get
        self._highest = max(self._highest, top, key=rank)
        self._weigh(bodies)
        self._lanes.add(
            [
                (ticket, [make(ticket, one, fence, body(one), lease, known(one, NEVER)) for one in each])
                for ticket, fence, each in parts
            ]
        )
        self.messages += len(ids)
        return len(ids)

    def _timed(self, commands: list[tuple[Arg, ...]], most: int, block_ms: int | None = None) -> list[Any]:
        """Return the replies. The first comes at once, or ends the wait: the time of the others is counted from it on.
        Replies that do not come make the next page smaller than ``most``."""
        try:
            return self._link.pipeline(commands, (block_ms or 0) / 1000)
        except ReplyUnknown:
            self._page_size = next_page(self._page_size, most, None)
            raise

    def _fetched(self, commands: list[tuple[Arg, ...]], most: int) -> list[Any]:
        """Return the replies to commands that read up to ``most`` bodies, and size the next page by their time."""
        replies = self._timed([self._any_tried, *commands], most)[1:]
        self._page_size = next_page(self._page_size, most, self._link.lasted_s)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _attempts(self, wanted: list[bytes]) -> dict[bytes, Attempts]:
        charged = self._link.call("HMGET", self._keys.attempts, *wanted)
        found = {entry_id: value for entry_id, value in zip(wanted, charged, strict=True) if value is not None}
        if wrong := [entry_id for entry_id, value in found.items() if decode(value) is NEVER]:
            event(log, "attempts_unreadable", level=logging.ERROR, count=len(wrong), first=wrong[0])
        return {entry_id: decode(value) for entry_id, value in found.items()}

    def _read_on(self, wanted: list[bytes], bodies: Bodies) -> None:
        """Read our own pending list for bodies of ``wanted``, in id order. It also has what is in the lanes, and what
        records name that we have not read yet; only at the end of the list is an id really gone."""
        missing = list(map(rank, wanted))
        while missing:
            # The entries between them may be large too.
            most = min(len(missing), fitting(self._page_size, self._mean_bytes, PAGE_BYTES))
            command = read_own_command(self._keys, self._incarnation, from_rank(missing[0] - 1), most)
            page = parse_bodies(self._fetched([command], most)[0])
            bodies.update(page)
            last = rank(page[-1][0]) if page else missing[-1]
            missing = [at for at in missing if at > last]

    def _not_ours(self, missing: dict[bytes, bytes]) -> set[bytes]:
        """Return those of these ids, given with their tickets, that the index does not have in processing with us. The
        pending list does not have them either: an acknowledgement of ours that was sent again ended them, after the
        group was lost and they were handed over anew. Another owner may have their ticket by now."""
        if not missing:
            return set()
        tickets = list(set(missing.values()))
        mine = self._incarnation.encode()
        records = [record for record in self._stream.records_of(tickets) if record is not None and record.owner == mine]
        ours = {entry_id for record in records for entry_id in record.ids}
        over = missing.keys() - ours
        if over:
            event(
                log,
                "inbox_entries_stale",
                level=logging.WARNING,
                consumer=self._incarnation,
                count=len(over),
                first=min(over, key=rank),
            )
        return over

    def _look_in_the_stream(self, missing: list[bytes], bodies: Bodies) -> None:
        """Read entries that inbox and index name but the pending list does not have, from the stream: the group was
        lost and is being made again. Only an entry that the stream does not have either is gone."""
        if not missing:
            return
        for reply in self._fetched([range_command(self._keys.stream, one) for one in missing], len(missing)):
            bodies.update(reply)

    def _ending_tickets(self, parts: Iterable[HandOver]) -> set[bytes]:
        with self._lanes.locked() as board:
            return {part.ticket for part in parts if board.is_ending(part.ticket, part.ids)}

    def _forget_closed(self, closed: list[tuple[bytes, int]]) -> None:
        if closed:
            with self._lanes.locked() as board:
                board.forget_closed(closed)

    def interrupt(self) -> None:
        self._link.interrupt()

    def close(self) -> None:
        self._link.close()
