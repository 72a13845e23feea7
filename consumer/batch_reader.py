"""Batch reader: inbox -> bodies -> lanes, in batches.

The inbox is read from the last record seen, with a plain XREAD: nothing is consumed, so a lost reply is simply asked again and no
wake-up can be missed. The bodies come from the own pending list, exactly those that the records name.
"""

from __future__ import annotations

from common.attempts import NEVER, Attempts, decode
from common.keys import Keys
from common.redis_client import Link
from common.service import Service
from common.stream_id import ZERO, after, from_rank, rank
from common.streams import HandOver, parse_inbox, parse_own, range_command, read_inbox_command, read_own_command, trim_inbox_command
from consumer.context import Message, OwnLease
from consumer.lane_keeper import LaneKeeper
from consumer.policy.reads import plan_reads

#: Pause before a record is looked at again whose messages are about to be acknowledged.
_ENDING_S = 0.005
#: Entries per call while looking for what the planned reads did not bring.
_PAGE = 1000
#: Records of the inbox read by one call.
_MOST_RECORDS = 100


class BatchReader(Service):
    """Fills the lanes."""

    name = "read"
    _BLOCK_MS = 2000

    def __init__(self, link: Link, keys: Keys, incarnation: str, keeper: LaneKeeper, lease: OwnLease) -> None:
        super().__init__()
        self._link = link
        self._keys = keys
        self._incarnation = incarnation
        self._inbox = keys.inbox(incarnation)
        self._keeper = keeper
        self._lease = lease
        self._last_record = ZERO
        self._highest = -1  # rank of the highest id ever read
        self._untrimmed = False
        self.held_up = False  # the next record must wait for acknowledgements
        self.messages = 0

    def run_once(self) -> float:
        self.read(self._BLOCK_MS)
        return _ENDING_S if self.held_up else 0.0

    def read(self, block_ms: int | None) -> int:
        """Read what the inbox has above the last record seen; returns the number of messages that were new.

        What fails is read again from the same record: ``_last_record`` moves only when the lanes are filled.
        """
        self.held_up = False
        over = self._keeper.ended_fences()  # before the inbox is read
        command = read_inbox_command(self._inbox, self._last_record, block_ms, _MOST_RECORDS)
        records = list(parse_inbox(self._link.call(*command, block_s=(block_ms or 0) / 1000)))
        if not records:
            self._keeper.forget_ended(over)
            return 0
        hand_overs = [part for _, parts in records for part in parts]
        wanted = self._keeper.unknown(entry_id for part in hand_overs for entry_id in part.ids)
        if len(wanted) < sum(len(part.ids) for part in hand_overs):
            records = self._that_may_be_read(records)
            if not records:
                return 0
            hand_overs = [part for _, parts in records for part in parts]
            wanted = self._keeper.unknown(entry_id for part in hand_overs for entry_id in part.ids)
        added = self._fill_lanes(hand_overs, wanted)
        self._last_record = records[-1][0]
        if len(records) < _MOST_RECORDS and not self.held_up:
            self._keeper.forget_ended(over)
        self._untrimmed = True
        return added

    def _that_may_be_read(self, records: list[tuple[bytes, list[HandOver]]]) -> list[tuple[bytes, list[HandOver]]]:
        """Those before the first one that names a message which is about to end here. What waits in a lane and is named again will be run, and
        its acknowledgement will count. But if Redis had the acknowledgement first and lost the group then, the message was handed over anew:
        passed over as one that we hold, it would never be run nor acknowledged. So its record waits until we know."""
        for number, (_, parts) in enumerate(records):
            if any(self._keeper.is_ending(part.ticket, part.ids) for part in parts):
                self.held_up = number == 0
                return records[:number]
        return records

    def _fill_lanes(self, hand_overs: list[HandOver], wanted: list[bytes]) -> int:
        if not wanted:
            return 0
        bodies, attempts = self._bodies(wanted)
        fresh = set(wanted)
        lease = self._lease
        parts = []
        for part in hand_overs:
            messages = [
                Message(part.ticket, entry_id, part.fence, bodies.get(entry_id), lease, attempts.get(entry_id, NEVER))
                for entry_id in part.ids
                if entry_id in fresh
            ]
            if messages:
                if len(part.ids) > 1:
                    messages.sort(key=lambda message: rank(message.stream_id))
                parts.append((part.ticket, messages))
        self._keeper.add(parts)
        self.messages += len(wanted)
        return len(wanted)

    def _bodies(self, wanted: list[bytes]) -> tuple[dict[bytes, list[bytes] | None], dict[bytes, Attempts]]:
        """Bodies by id (one that is missing, or None, has lost its body), and what is known of attempts under former owners."""
        reads = plan_reads(wanted, self._keeper.held_ids, self._highest)
        commands = [read_own_command(self._keys, self._incarnation, read.after, read.most) for read in reads]
        commands.append(("HMGET", self._keys.attempts, *wanted))
        if self._untrimmed:
            commands.append(trim_inbox_command(self._inbox, after(self._last_record)))
        bodies: dict[bytes, list[bytes] | None] = {}
        *read_replies, charged = self._link.pipeline(commands)[: len(reads) + 1]
        for reply in (*read_replies, charged):
            if isinstance(reply, Exception):
                raise reply
        for reply in read_replies:
            bodies.update(parse_own(reply))
        attempts = {entry_id: decode(value) for entry_id, value in zip(wanted, charged, strict=True) if value is not None}
        self._read_on(wanted, bodies)
        self._look_in_the_stream(wanted, bodies)
        self._untrimmed = False
        self._highest = max(self._highest, max(map(rank, wanted)))
        return bodies, attempts

    def _read_on(self, wanted: list[bytes], bodies: dict[bytes, list[bytes] | None]) -> None:
        """Find what the planned reads did not bring. Entries of records that we have not read yet are in the pending list too, and may
        lie between those wanted; only at the end of the list an id is really gone."""
        missing = sorted(rank(entry_id) for entry_id in wanted if entry_id not in bodies)
        if not missing:
            return
        cursor, highest = from_rank(missing[0] - 1), missing[-1]
        while rank(cursor) < highest:
            page = parse_own(self._link.call(*read_own_command(self._keys, self._incarnation, cursor, _PAGE)))
            if not page:
                return
            bodies.update(page)
            cursor = page[-1].id

    def _look_in_the_stream(self, wanted: list[bytes], bodies: dict[bytes, list[bytes] | None]) -> None:
        """The last resort for what the inbox names and the pending list does not have: the group was lost and is being made again. The
        lease and the index still say that it is ours; only what the stream does not have either is gone."""
        missing = [entry_id for entry_id in wanted if bodies.get(entry_id) is None]
        for reply in self._link.pipeline([range_command(self._keys.stream, entry_id) for entry_id in missing]):
            if isinstance(reply, Exception):
                raise reply
            bodies.update(reply)

    def interrupt(self) -> None:
        self._link.interrupt()

    def close(self) -> None:
        self._link.close()
