"""Inbox reader: inbox -> bodies -> lanes, in batches.

The inbox is read from the last record seen, with a plain XREAD: nothing is consumed, so a lost reply is simply asked
for again, and no wake-up can be missed. The bodies come from our own pending list, exactly those that the records name,
except for those that a record brings along.

Neither the size of the bodies nor the speed of the network is known beforehand. So they are fetched page by page, in id
order, and a page grows as long as it comes in a short time and the last one was not large. The messages of a page are
run whatever becomes of the next one: otherwise a batch whose every fetch is cut off would never get here. While this
process holds ``most_bytes``, the next page waits.

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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

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

#: More separate runs of ids than this are read as one: many commands in a round trip cost more than bodies read twice.
_MOST_RUNS = 16
#: Most messages that the first fetch, and any fetch, asks for; and about how many bytes.
FIRST_PAGE, _MOST_PAGE, PAGE_BYTES = 4, 1000, 16 * 1024 * 1024
#: A larger page may follow one that came in less than the first time, counted from its first byte; a smaller page
#: follows one that took longer than the second. In seconds.
_FAST_S, _SLOW_S = 0.2, 1.0


class OwnRead(NamedTuple):
    """A read of up to ``most`` entries of our own pending list, above the id ``after``."""

    after: bytes
    most: int


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


def plan_reads(wanted: Sequence[bytes], held: Callable[[], Collection[bytes]], highest_held: int) -> list[OwnRead]:
    """Return the reads that cover ``wanted`` (in any order). ``held`` gives the other ids that are pending,
    ``highest_held`` is the rank of the highest id ever held.

    In the usual case, all new ids above all old ones, it is one read of exactly their number.
    """
    ranks = sorted(map(rank, wanted))
    lowest, highest = ranks[0], ranks[-1]
    if lowest > highest_held:
        return [OwnRead(from_rank(lowest - 1), len(ranks))]
    runs: list[OwnRead] = []
    between = [(at, False) for at in map(rank, held()) if lowest < at < highest]
    line = sorted([*between, *((at, True) for at in ranks)])
    start, count = 0, 0
    for at, is_wanted in line:
        if is_wanted:
            start, count = (start, count + 1) if count else (at, 1)
        elif count:
            runs.append(OwnRead(from_rank(start - 1), count))
            count = 0
    runs.append(OwnRead(from_rank(start - 1), count))  # the highest of the line is wanted
    return runs if len(runs) <= _MOST_RUNS else [OwnRead(from_rank(lowest - 1), len(line))]


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


def _by_id(hand_overs: Iterable[HandOver]) -> dict[bytes, HandOver]:
    """Map each id to the hand-over that names it. An id that is named twice was handed over anew, and runs under the
    later fence."""
    return {entry_id: part for part in hand_overs for entry_id in part.ids}


@dataclass(frozen=True)
class Idle:
    """The state in which everything that was read is in the lanes."""


@dataclass(frozen=True)
class Blocked:
    """The state in which the next record names a message of ``ticket`` again, and must wait until that message is
    acknowledged."""

    record_id: bytes
    ticket: bytes


@dataclass(frozen=True)
class Filling:
    """The state in which the messages of ``records`` are not all in the lanes.

    ``is_all``: the inbox had no more than these records. ``closed_fences``: those that were closed before the inbox was
    read. ``hand_overs``: by id, the hand-over that names it. ``bodies``: by id, those that the records bring along.
    ``left``: the ids that are not in the lanes yet, in order; it gets shorter page by page.
    """

    records: list[InboxRecord]
    is_all: bool
    closed_fences: list[tuple[bytes, int]]
    hand_overs: dict[bytes, HandOver]
    bodies: dict[bytes, list[bytes]]
    left: list[bytes]


_IDLE = Idle()
#: Bodies by id; None: the body is not where it should be.
Bodies = dict[bytes, list[bytes] | None]


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
        self._lanes = lanes
        self._lease = lease
        self._state: Idle | Blocked | Filling = _IDLE
        self._last_record = ZERO  # id of the last record whose messages are in the lanes
        self._records_to_trim = 0  # records up to that one that are still in the inbox
        self._highest_id = -1  # rank of the highest id ever read
        self._page_size = FIRST_PAGE  # most messages fetched by one call
        self._mean_bytes = 0.0  # of the messages that the last fetch brought
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
        records = self._records(block_ms)
        if not records:
            self._forget_closed(closed)
            return _IDLE
        found = len(records)
        # What is recalled is looked at when all that was handed over before it, and nothing later, is in the lanes.
        records = records[: next((number for number, record in enumerate(records, 1) if record.recalled), found)]
        hand_overs = _by_id(_parts(records))
        wanted = self._unknown(hand_overs)
        if len(wanted) < len(hand_overs):
            number, blocked = self._first_blocked(records)
            if blocked is not None and number == 0:
                self._tell_blocked(blocked)
                return blocked
            records = records[:number]
            hand_overs = _by_id(_parts(records))
            # Asked again: a message that was acknowledged since must not be passed over as one that we hold.
            wanted = self._unknown(hand_overs)
        is_all = found == len(records) < _MOST_RECORDS
        bodies = self._brought_bodies(records, wanted)
        return Filling(records, is_all, closed, hand_overs, bodies, sorted(wanted, key=rank))

    def _fill(self) -> int:
        """Bring the messages that were read into the lanes, page by page, and return how many. A page that fails, or
        for which there is no room, is left for the next time."""
        filling = self._state
        if not isinstance(filling, Filling):
            return 0
        added = 0
        while filling.left:
            room = PAGE_BYTES if self._drains else self._room()
            if not room:
                return added
            page = filling.left[: fitting(self._page_size, self._mean_bytes, room)]
            bodies = {entry_id: filling.bodies[entry_id] for entry_id in page if entry_id in filling.bodies}
            try:
                added += self._fill_lanes(filling.hand_overs, page, bodies)
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
        self._mean_bytes = sum(map(len, chain.from_iterable(filter(None, bodies.values())))) / len(bodies)
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
            records = self._records(None)
            parts = [*self._postponed, *_parts(records)]
            ending = self._ending_tickets(parts)
            ready = _by_id(part for part in parts if part.ticket not in ending)
            self._fill_lanes(ready, self._unknown(ready), {})
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

    def _records(self, block_ms: int | None) -> list[InboxRecord]:
        command = read_inbox_command(self._inbox, self._last_record, block_ms, _MOST_RECORDS)
        records = list(parse_inbox(self._link.call(*command, block_s=(block_ms or 0) / 1000)))
        for record in records:
            if not (record.parts or record.order or record.recalled):
                event(log, "inbox_record_unknown", level=logging.ERROR, consumer=self._incarnation, record=record.id)
        return records

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

    def _brought_bodies(self, records: list[InboxRecord], wanted: list[bytes]) -> dict[bytes, list[bytes]]:
        """Return the bodies that came with the records, by id.

        Bodies of messages that this process may have had before are left out: an acknowledgement that was sent again
        may have ended such a message since it was handed over anew, and only the pending list knows.
        """
        bodies: dict[bytes, list[bytes]] = {}
        for record in records:
            for part in record.parts if bodies else ():
                for entry_id in part.ids:
                    bodies.pop(entry_id, None)  # it was handed over anew
            bodies.update(record.bodies)
        if not bodies:
            return {}
        new = (entry_id for entry_id in wanted if entry_id in bodies and rank(entry_id) > self._highest_id)
        return {entry_id: bodies[entry_id] for entry_id in new}

    def _fill_lanes(
        self, hand_overs: dict[bytes, HandOver], wanted: list[bytes], brought: dict[bytes, list[bytes]]
    ) -> int:
        if not wanted:
            return 0
        if self._drains:
            over = self._not_ours(set(wanted), hand_overs)
            return self._put(dict.fromkeys(sorted(set(wanted) - over, key=rank)), hand_overs, {})
        bodies, attempts = self._bodies(wanted, brought)
        missing = [entry_id for entry_id in wanted if bodies.get(entry_id) is None]
        if missing:
            over = self._find(missing, hand_overs, bodies)
            wanted = [entry_id for entry_id in wanted if entry_id not in over]
            bodies = {entry_id: bodies.get(entry_id) for entry_id in sorted(wanted, key=rank)}
        elif len(bodies) > len(wanted):
            asked = set(wanted)
            bodies = {entry_id: flat for entry_id, flat in bodies.items() if entry_id in asked}
        return self._put(bodies, hand_overs, attempts)

    def _put(self, bodies: Bodies, hand_overs: dict[bytes, HandOver], attempts: dict[bytes, Attempts]) -> int:
        if not bodies:
            return 0
        self._highest_id = max(self._highest_id, rank(next(reversed(bodies))))
        self._weigh(bodies)
        by_ticket: dict[bytes, list[Message]] = {}
        make, lease, charge = self.message_type, self._lease, attempts.get
        for entry_id, flat in bodies.items():
            ticket, fence, _ = hand_overs[entry_id]
            message = make(ticket, entry_id, fence, flat, lease, charge(entry_id, NEVER))
            messages = by_ticket.get(ticket)
            if messages is None:
                by_ticket[ticket] = [message]
            else:
                messages.append(message)
        self._lanes.add(by_ticket.items())
        self.messages += len(bodies)
        return len(bodies)

    def _bodies(self, wanted: list[bytes], brought: dict[bytes, list[bytes]]) -> tuple[Bodies, dict[bytes, Attempts]]:
        """Return bodies by id, in id order, and the attempts known from former owners. A body that is missing, or None,
        is not where it should be; there may be more bodies than wanted."""
        absent = [entry_id for entry_id in wanted if entry_id not in brought] if brought else wanted
        bodies, attempts = self._fetched(absent, brought)
        if brought:
            bodies.update(brought)
            bodies = {entry_id: bodies[entry_id] for entry_id in sorted(bodies, key=rank)}
        return bodies, attempts

    def _fetched(self, wanted: list[bytes], brought: Collection[bytes]) -> tuple[Bodies, dict[bytes, Attempts]]:
        """Fetch the bodies and attempts of ``wanted``; in the same round trip, trim the inbox. The pending list also
        has the ids that were ``brought``, so the reads have to pass over them."""
        if not wanted and self._records_to_trim < _MOST_UNTRIMMED:
            return {}, {}
        highest = max(self._highest_id, *map(rank, brought)) if brought else self._highest_id
        reads = plan_reads(wanted, lambda: self._held_ids(brought), highest) if wanted else []
        commands = [read_own_command(self._keys, self._incarnation, read.after, read.most) for read in reads]
        if self._records_to_trim:
            commands.append(trim_inbox_command(self._inbox, after(self._last_record)))
        bodies: Bodies = {}
        replies = self._timed(commands, len(wanted) + len(brought) if wanted else 0)
        any_charged, *read_replies = replies[: len(reads) + 1]
        for reply in (any_charged, *read_replies):
            if isinstance(reply, Exception):
                raise reply
        for reply in read_replies:
            bodies.update(parse_bodies(reply))
        self._records_to_trim = 0
        return bodies, self._attempts(wanted) if any_charged and wanted else {}

    def _timed(self, commands: list[tuple[Arg, ...]], most: int) -> list[Any]:
        """Return the replies, with one more in front, and size the next page by the time that they took. That first
        reply says whether any attempts are noted; it comes at once, and the time is counted from it on."""
        try:
            replies = self._link.pipeline([("EXISTS", self._keys.attempts), *commands])
        except ReplyUnknown:
            self._page_size = next_page(self._page_size, most, None)
            raise
        self._page_size = next_page(self._page_size, most, self._link.lasted_s)
        return replies

    def _attempts(self, wanted: list[bytes]) -> dict[bytes, Attempts]:
        charged = self._link.call("HMGET", self._keys.attempts, *wanted)
        found = {entry_id: value for entry_id, value in zip(wanted, charged, strict=True) if value is not None}
        if wrong := [entry_id for entry_id, value in found.items() if decode(value) is NEVER]:
            event(log, "attempts_unreadable", level=logging.ERROR, count=len(wrong), first=wrong[0])
        return {entry_id: decode(value) for entry_id, value in found.items()}

    def _find(self, missing: list[bytes], hand_overs: dict[bytes, HandOver], bodies: Bodies) -> set[bytes]:
        """Find bodies that the planned reads did not bring, into ``bodies``: only a message without one anywhere has
        lost it. Return the ids that are not ours (any more)."""
        self._read_on(missing, bodies)
        over = self._not_ours({entry_id for entry_id in missing if entry_id not in bodies}, hand_overs)
        nowhere = [entry_id for entry_id in missing if bodies.get(entry_id) is None and entry_id not in over]
        self._look_in_the_stream(nowhere, bodies)
        return over

    def _read_on(self, wanted: list[bytes], bodies: Bodies) -> None:
        """Read the pending list on, for bodies that the planned reads did not bring. It also has entries of records
        that we have not read yet, which may lie between the wanted ones; only at the end of the list is an id really
        gone."""
        missing = sorted(rank(entry_id) for entry_id in wanted if entry_id not in bodies)
        while missing:
            most = fitting(self._page_size, self._mean_bytes, PAGE_BYTES)  # the entries between them may be large too
            command = read_own_command(self._keys, self._incarnation, from_rank(missing[0] - 1), most)
            _, reply = self._timed([command], most)
            if isinstance(reply, Exception):
                raise reply
            page = parse_bodies(reply)
            bodies.update(page)
            last = rank(page[-1][0]) if page else missing[-1]
            missing = [at for at in missing if at > last]

    def _not_ours(self, missing: set[bytes], hand_overs: dict[bytes, HandOver]) -> set[bytes]:
        """Return the ids that the index does not have in processing with us. The pending list does not have them
        either: an acknowledgement of ours that was sent again ended them, after the group was lost and they were handed
        over anew. Another owner may have their ticket by now."""
        if not missing:
            return set()
        tickets = list({hand_overs[entry_id].ticket for entry_id in missing})
        mine = self._incarnation.encode()
        records = [record for record in self._stream.records_of(tickets) if record is not None and record.owner == mine]
        ours = {entry_id for record in records for entry_id in record.ids}
        over = missing - ours
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
        commands = [range_command(self._keys.stream, entry_id) for entry_id in missing]
        for reply in self._timed(commands, len(missing))[1:]:
            if isinstance(reply, Exception):
                raise reply
            bodies.update(reply)

    def _unknown(self, ids: Iterable[bytes]) -> list[bytes]:
        with self._lanes.locked() as board:
            return board.unknown(ids)

    def _ending_tickets(self, parts: Iterable[HandOver]) -> set[bytes]:
        with self._lanes.locked() as board:
            return {part.ticket for part in parts if board.is_ending(part.ticket, part.ids)}

    def _held_ids(self, brought: Iterable[bytes]) -> set[bytes]:
        with self._lanes.locked() as board:
            return board.held_ids.union(brought)

    def _forget_closed(self, closed: list[tuple[bytes, int]]) -> None:
        if closed:
            with self._lanes.locked() as board:
                board.forget_closed(closed)

    def interrupt(self) -> None:
        self._link.interrupt()

    def close(self) -> None:
        self._link.close()
