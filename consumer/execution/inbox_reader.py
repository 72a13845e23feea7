"""Batch reader: inbox -> bodies -> lanes, in batches.

The inbox is read from the last record seen, with a plain XREAD: nothing is consumed, so a lost reply is simply asked
again and no wake-up can be missed. The bodies come from the own pending list, exactly those that the records name; but
for those that the record brings.

Nobody knows how large they are, or how fast the network is. So they are fetched page by page, in id order, and a page
gets as large as comes in short time. What has come is run, whatever becomes of the next page: else a batch of which
each trial is cut off would never get here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
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
    TicketStream,
    parse_bodies,
    parse_inbox,
    range_command,
    read_inbox_command,
    read_own_command,
    trim_inbox_command,
)
from usher.common.runtime.service import Service
from usher.consumer.execution.lanes import LaneKeeper
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.policy.reads import FIRST_PAGE, next_page, plan_reads

log = logging.getLogger(__name__)

#: Pause before a record is looked at again whose messages are about to be acknowledged.
_ENDING_S = 0.005
#: Records of the inbox read by one call.
_MOST_RECORDS = 100
#: Records that stay in the inbox while nothing must be fetched.
_MOST_UNTRIMMED = 25


def _parts(records: Iterable[InboxRecord]) -> list[HandOver]:
    return [part for record in records for part in record.parts]


def _named(hand_overs: Iterable[HandOver]) -> dict[bytes, HandOver]:
    """What says so of each id. One that is named twice was handed over anew, and runs under the later fence."""
    return {entry_id: part for part in hand_overs for entry_id in part.ids}


class _Begun(NamedTuple):
    """Records that are being read: how many the inbox had, the fences that were closed before, what names each id, the
    ids whose bodies are still to be fetched, in order, and what the records brought."""

    records: list[InboxRecord]
    found: int
    closed: list[tuple[bytes, int]]
    named: dict[bytes, HandOver]
    left: list[bytes]
    brought: dict[bytes, list[bytes]]


class BatchReader(Service):
    """Fills the lanes."""

    name = "read"
    _BLOCK_MS = 2000

    def __init__(self, link: Link, keys: Keys, incarnation: str, keeper: LaneKeeper, lease: OwnLease) -> None:
        super().__init__()
        self._link = link
        self._keys = keys
        self._stream = TicketStream(link, keys)
        self._incarnation = incarnation
        self._inbox = keys.inbox(incarnation)
        self._keeper = keeper
        self._lease = lease
        self._last_record = ZERO
        self._highest = -1  # rank of the highest id ever read
        self._untrimmed = 0  # records that were read
        self._held_up: tuple[bytes, bytes] | None = (
            None  # the next record, which must wait for an acknowledgement, and the ticket of that
        )
        self._begun: _Begun | None = None  # what is not in the lanes as a whole
        self._page = FIRST_PAGE  # most messages fetched by one call
        self._waiting: list[HandOver] = []  # in a drain: hand-overs that must wait so
        self.messages = 0
        self.message_type = Message

    @property
    def held_up(self) -> bool:
        """Whether the next record must wait for an acknowledgement."""
        return self._held_up is not None

    @property
    def last_turn_s(self) -> float | None:
        """Who waits for Redis is not stalled, however long a reply takes to come: if nothing comes any more, the link
        ends it soon."""
        return now_s() if self._link.is_waiting else super().last_turn_s

    @property
    def trouble(self) -> str | None:
        """Also what holds up all that was handed over since: a handler may run for long."""
        held_up = self._held_up
        why = (
            f"waits for a message of {held_up[1]!r} to end, which was handed over anew" if held_up is not None else None
        )
        return super().trouble or why

    def run_once(self) -> float:
        self.read(self._BLOCK_MS)
        return _ENDING_S if self.held_up else 0.0

    def read(self, block_ms: int | None) -> int:
        """Read what the inbox has above the last record seen; returns the number of messages that were new.

        What fails is read again from the same record, or goes on where it was: ``_last_record`` moves only when the
        lanes are filled.
        """
        if self._begun is None:
            closed = self._keeper.closed_fences()  # before the inbox is read
            records = self._records(block_ms)
            if not records:
                self._held_up = None
                self._keeper.forget_closed(closed)
                self._trim()
                return 0
            self._begin(records, closed)
        return self._go_on()

    def _begin(self, records: list[InboxRecord], closed: list[tuple[bytes, int]]) -> None:
        found = len(records)
        named = _named(_parts(records))
        wanted = self._keeper.unknown(named)
        if len(wanted) < len(named):
            records = self._that_may_be_read(records)
            if not records:
                return
            named = _named(_parts(records))
            wanted = self._keeper.unknown(named)
        self._held_up = None
        self._begun = _Begun(records, found, closed, named, sorted(wanted, key=rank), self._brought(records, wanted))

    def _go_on(self) -> int:
        """Bring what was begun to its end; what fails of it is left for the next time."""
        begun = self._begun
        if begun is None:
            return 0
        added = 0
        while begun.left:
            page = begun.left[: self._page]
            brought = {entry_id: begun.brought[entry_id] for entry_id in page if entry_id in begun.brought}
            try:
                added += self._fill_lanes(begun.named, page, brought)
            except GroupMissing:
                self._begun = None  # what comes may be handed over anew, and only the inbox tells under which fence
                raise
            del begun.left[: len(page)]
        self._begun, records = None, begun.records
        self._last_record = records[-1].id
        if begun.found == len(records) < _MOST_RECORDS:
            self._keeper.forget_closed(begun.closed)
        self._untrimmed += len(records)
        return added

    def read_rest(self) -> bool:
        """For a drain, in which nothing is started any more: read the inbox to its end. A message that is named anew
        and about to end here does not hold up the rest; only its ticket waits, for the next call. Returns whether
        nothing waits."""
        self._go_on()
        while True:
            records = self._records(None)
            parts = [*self._waiting, *_parts(records)]
            ending = {part.ticket for part in parts if self._keeper.is_ending(part.ticket, part.ids)}
            ready = _named(part for part in parts if part.ticket not in ending)
            self._fill_lanes(ready, self._keeper.unknown(ready), {})
            self._waiting = [part for part in parts if part.ticket in ending]
            if not records:
                return not self._waiting
            self._last_record = records[-1].id

    def _trim(self) -> None:
        """What was read need not stay while nothing comes."""
        if self._untrimmed:
            self._link.call(*trim_inbox_command(self._inbox, after(self._last_record)))
            self._untrimmed = 0

    def _records(self, block_ms: int | None) -> list[InboxRecord]:
        command = read_inbox_command(self._inbox, self._last_record, block_ms, _MOST_RECORDS)
        return list(parse_inbox(self._link.call(*command, block_s=(block_ms or 0) / 1000)))

    def _that_may_be_read(self, records: list[InboxRecord]) -> list[InboxRecord]:
        """Those before the first one that names a message which is about to end here. What waits in a lane and is named
        again will be run, and its acknowledgement will count. But if Redis had the acknowledgement first and lost the
        group then, the message was handed over anew: passed over as one that we hold, it would never be run nor
        acknowledged. So its record waits until we know."""
        for number, record in enumerate(records):
            ending = next((part.ticket for part in record.parts if self._keeper.is_ending(part.ticket, part.ids)), None)
            if ending is not None:
                if number == 0 and (record.id, ending) != self._held_up:
                    self._held_up = (record.id, ending)
                    event(
                        log,
                        "inbox_held_up",
                        level=logging.WARNING,
                        consumer=self._incarnation,
                        record=record.id,
                        ticket=ending,
                    )
                return records[:number]
        return records

    def _brought(self, records: list[InboxRecord], wanted: list[bytes]) -> dict[bytes, list[bytes]]:
        """Bodies that came with the records, by id. Not of what this process may have had before: an acknowledgement
        that was sent again may have ended it since it was handed over anew, and only the pending list knows."""
        bodies: dict[bytes, list[bytes]] = {}
        for record in records:
            for part in record.parts if bodies else ():
                for entry_id in part.ids:
                    bodies.pop(entry_id, None)  # it was handed over anew
            bodies.update(record.bodies)
        return (
            {entry_id: bodies[entry_id] for entry_id in wanted if rank(entry_id) > self._highest and entry_id in bodies}
            if bodies
            else {}
        )

    def _fill_lanes(self, named: dict[bytes, HandOver], wanted: list[bytes], brought: dict[bytes, list[bytes]]) -> int:
        if not wanted:
            return 0
        bodies, attempts = self._bodies(wanted, brought)
        missing = [entry_id for entry_id in wanted if bodies.get(entry_id) is None]
        if missing:
            over = self._find(missing, named, bodies)
            wanted = [entry_id for entry_id in wanted if entry_id not in over]
            bodies = {entry_id: bodies.get(entry_id) for entry_id in sorted(wanted, key=rank)}
        elif len(bodies) > len(wanted):
            asked = set(wanted)
            bodies = {entry_id: flat for entry_id, flat in bodies.items() if entry_id in asked}
        if bodies:
            self._highest = max(self._highest, rank(next(reversed(bodies))))
        by_ticket: dict[bytes, list[Message]] = {}
        make, lease, charge = self.message_type, self._lease, attempts.get
        for entry_id, flat in bodies.items():
            ticket, fence, _ = named[entry_id]
            message = make(ticket, entry_id, fence, flat, lease, charge(entry_id, NEVER))
            messages = by_ticket.get(ticket)
            if messages is None:
                by_ticket[ticket] = [message]
            else:
                messages.append(message)
        self._keeper.add(by_ticket.items())
        self.messages += len(wanted)
        return len(wanted)

    def _bodies(
        self, wanted: list[bytes], brought: dict[bytes, list[bytes]]
    ) -> tuple[dict[bytes, list[bytes] | None], dict[bytes, Attempts]]:
        """Bodies by id, in id order, and what is known of attempts under former owners. One that is missing, or None,
        is not where it should be; others may be there too."""
        bodies, attempts = self._fetched(
            [entry_id for entry_id in wanted if entry_id not in brought] if brought else wanted, brought
        )
        if brought:
            bodies.update(brought)
            bodies = {entry_id: bodies[entry_id] for entry_id in sorted(bodies, key=rank)}
        return bodies, attempts

    def _fetched(
        self, wanted: list[bytes], brought: Collection[bytes]
    ) -> tuple[dict[bytes, list[bytes] | None], dict[bytes, Attempts]]:
        """The same from the pending list, in which those that were ``brought`` are too."""
        if not wanted and self._untrimmed < _MOST_UNTRIMMED:
            return {}, {}
        highest = max(self._highest, *map(rank, brought)) if brought else self._highest
        reads = plan_reads(wanted, lambda: self._keeper.held_ids().union(brought), highest) if wanted else []
        commands = [read_own_command(self._keys, self._incarnation, read.after, read.most) for read in reads]
        if self._untrimmed:
            commands.append(trim_inbox_command(self._inbox, after(self._last_record)))
        bodies: dict[bytes, list[bytes] | None] = {}
        any_charged, *read_replies = self._timed(commands, len(wanted) + len(brought) if wanted else 0)[
            : len(reads) + 1
        ]
        for reply in (any_charged, *read_replies):
            if isinstance(reply, Exception):
                raise reply
        for reply in read_replies:
            bodies.update(parse_bodies(reply))
        self._untrimmed = 0
        return bodies, self._attempts(wanted) if any_charged and wanted else {}

    def _timed(self, commands: list[tuple[Arg, ...]], most: int) -> list[Any]:
        """The replies; how long they took says how large the next page may be. Before them whether attempts are noted
        of anything: that comes at once, and from then on the others are on their way."""
        try:
            replies = self._link.pipeline([("EXISTS", self._keys.attempts), *commands])
        except ReplyUnknown:
            self._page = next_page(self._page, most, None)
            raise
        self._page = next_page(self._page, most, self._link.lasted_s)
        return replies

    def _attempts(self, wanted: list[bytes]) -> dict[bytes, Attempts]:
        charged = self._link.call("HMGET", self._keys.attempts, *wanted)
        return {entry_id: decode(value) for entry_id, value in zip(wanted, charged, strict=True) if value is not None}

    def _find(
        self, missing: list[bytes], named: dict[bytes, HandOver], bodies: dict[bytes, list[bytes] | None]
    ) -> set[bytes]:
        """Bodies of what the planned reads did not bring; only what has none anywhere has lost it. Returns the ids that
        are not ours (any more)."""
        self._read_on(missing, bodies)
        over = self._not_ours({entry_id for entry_id in missing if entry_id not in bodies}, named)
        self._look_in_the_stream(
            [entry_id for entry_id in missing if bodies.get(entry_id) is None and entry_id not in over], bodies
        )
        return over

    def _read_on(self, wanted: list[bytes], bodies: dict[bytes, list[bytes] | None]) -> None:
        """Find what the planned reads did not bring. Entries of records that we have not read yet are in the pending
        list too, and may lie between those wanted; only at the end of the list an id is really gone."""
        missing = sorted(rank(entry_id) for entry_id in wanted if entry_id not in bodies)
        while missing:
            most = self._page  # what lies between may be large too
            _, reply = self._timed(
                [read_own_command(self._keys, self._incarnation, from_rank(missing[0] - 1), most)], most
            )
            if isinstance(reply, Exception):
                raise reply
            page = parse_bodies(reply)
            bodies.update(page)
            last = rank(page[-1][0]) if page else missing[-1]
            missing = [at for at in missing if at > last]

    def _not_ours(self, missing: set[bytes], named: dict[bytes, HandOver]) -> set[bytes]:
        """Those that the index does not have in processing with us. The pending list does not have them either: an
        acknowledgement of ours that was sent again ended them, after the group was lost and they were handed over anew.
        Their ticket may be another's by now."""
        if not missing:
            return set()
        tickets = list({named[entry_id].ticket for entry_id in missing})
        mine = self._incarnation.encode()
        ours = {
            entry_id
            for record in self._stream.records_of(tickets)
            if record is not None and record.owner == mine
            for entry_id in record.ids
        }
        over = missing - ours
        if over:
            event(
                log,
                "inbox_outdated",
                level=logging.WARNING,
                consumer=self._incarnation,
                count=len(over),
                first=min(over, key=rank),
            )
        return over

    def _look_in_the_stream(self, missing: list[bytes], bodies: dict[bytes, list[bytes] | None]) -> None:
        """The last resort for what inbox and index name and the pending list does not have: the group was lost and is
        being made again. Only what the stream does not have either is gone."""
        if not missing:
            return
        for reply in self._timed([range_command(self._keys.stream, entry_id) for entry_id in missing], len(missing))[
            1:
        ]:
            if isinstance(reply, Exception):
                raise reply
            bodies.update(reply)

    def interrupt(self) -> None:
        self._link.interrupt()

    def close(self) -> None:
        self._link.close()
