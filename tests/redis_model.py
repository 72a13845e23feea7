"""A world without Redis: what the scripts do to the stream's group, the pending list and the index.

``RedisModel`` follows ``common/lua/*.lua`` step by step and notes every hand-over that breaks the promise. The leader
that goes with it is in ``leader_model.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import Registration, name_of
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.protocol.ticket_states import is_waiting
from usher.master.leader.entries import NO_MARKS, NO_NEW_ENTRIES, NewEntries, PeekedEntry
from usher.master.leader.leader_scripts import LossBook, Page
from usher.master.membership.registry import RegisteredConsumer
from usher.master.policy.board.plans import HandOverPlan, TicketPlan

MASTER = "master"
HALTED = "halted"
#: Somebody who took entries without being asked to, until the sweep finds them.
STRANGER = "stranger"
PAGE = 2


@dataclass
class Record:
    """A ticket's record in the index."""

    owner: str
    fence: int
    ids: list[bytes]

    @property
    def head(self) -> bytes:
        return b"%s %d" % (self.owner.encode(), self.fence)


@dataclass(frozen=True)
class HandedOver:
    """A hand-over of one ticket that happened."""

    ticket: bytes
    target: str
    fence: int
    ids: tuple[bytes, ...]


class RedisModel:
    """The stream's group, its pending list, index and leases.

    From version 7 on Redis drops an entry whose body is gone from the pending list when somebody claims it.
    """

    marks = NO_MARKS
    time_goes_on = True
    losses = LossBook(None, Keys("stream", "group"))  # type: ignore[arg-type]  # there are none

    def __init__(self, claiming_drops_the_bodiless: bool = True) -> None:
        self._drops_bodiless = claiming_drops_the_bodiless
        self.delivered = ZERO  # the last id that the group was given
        self.unread: dict[bytes, None] = {}  # what is above it
        self.dealt = ZERO  # all up to here was taken by a leader
        self.ahead: dict[bytes, None] = {}  # what a leader has read above it
        self.pending: dict[bytes, str] = {}
        self.ticket_of: dict[bytes, bytes] = {}
        self.index: dict[bytes, Record] = {}
        self.leases: dict[str, str] = {}  # live, draining or revoked
        self.registered: dict[str, Registration] = {}
        self.bodiless: set[bytes] = set()
        self.done: set[bytes] = set()  # acknowledged, or a dead letter
        self.fence = 0
        self.handed_over: list[HandedOver] = []
        self.broken: list[str] = []
        self.clock_ms = 0
        self.recalled: list[tuple[str, bytes, int]] = []  # questions that their owners have not read
        self.changed: list[bytes] = []  # tickets whose records others than the leader changed

    # ---- others --------------------------------------------------------------------------------------------------------------

    def register(self, incarnation: str, capacity: int) -> None:
        """A new incarnation; its name's former one, if it is dead, has no registration any more."""
        for other in [other for other in self.registered if name_of(other) == name_of(incarnation)]:
            del self.registered[other]
        self.registered[incarnation] = Registration(name_of(incarnation), "uuid", "", 1, capacity)
        self.leases[incarnation] = "live"

    def roster(self) -> dict[str, RegisteredConsumer]:
        """Who is registered at this moment."""
        return {
            name: RegisteredConsumer(registration, self.leases.get(name, ""))
            for name, registration in self.registered.items()
        }

    def add(self, entry_id: bytes, ticket: bytes) -> None:
        """An entry enters the stream."""
        self.unread[entry_id] = None
        self.ticket_of[entry_id] = ticket

    def read_by(self, stranger: str) -> None:
        """Somebody reads all that no leader has read."""
        self.pending.update(dict.fromkeys(self.unread, stranger))
        self.delivered = max(self.delivered, *self.unread, key=rank)
        self.unread.clear()

    def delete(self, entry_id: bytes) -> None:
        """The body goes; with it an entry that is new, which nobody will read then."""
        self.bodiless.add(entry_id)
        if entry_id in self.unread:
            del self.unread[entry_id]
            self.done.add(entry_id)

    def held_by(self, name: str) -> list[bytes]:
        """What is pending for a name, in id order."""
        return sorted((entry_id for entry_id, owner in self.pending.items() if owner == name), key=rank)

    def recorded(self, ticket: bytes) -> set[bytes]:
        """The ids in a ticket's record."""
        record = self.index.get(ticket)
        return set(record.ids) if record is not None else set()

    def lives(self, incarnation: str) -> bool:
        return incarnation in self.leases

    def unfinished(self, ticket: bytes) -> list[bytes]:
        """Return the messages that the owner in a ticket's record has of it."""
        record = self.index[ticket]
        return [entry_id for entry_id in record.ids if self.pending.get(entry_id) == record.owner]

    def ack(self, incarnation: str, ids: Sequence[bytes]) -> list[bytes]:
        """ack.lua: the ids that may be reported; none if the lease has ended."""
        if not self.lives(incarnation):
            return []
        for entry_id in ids:
            self.finish(entry_id)
        return list(ids)

    def give_back(self, incarnation: str, ticket: bytes) -> None:
        """give_back.lua for one whole ticket."""
        record = self.index[ticket]
        assert self.leases.get(incarnation) == "draining"
        assert record.owner == incarnation
        record.owner = "returned"
        record.ids = [entry_id for entry_id in record.ids if self._claim(entry_id, MASTER)]
        if not record.ids:
            del self.index[ticket]
        self.changed.append(ticket)

    def tick(self, ms: int) -> None:
        """Time has passed on Redis' clock."""
        self.clock_ms += ms

    def answer_recall(self, incarnation: str, ticket: bytes, fence: int) -> None:
        """give_back.lua for one whole ticket, of which its owner has started nothing and has closed the fence."""
        record = self.index.get(ticket)
        if self.lives(incarnation) and record is not None and (record.owner, record.fence) == (incarnation, fence):
            ids = [entry_id for entry_id in sorted(record.ids, key=rank) if self._claim(entry_id, MASTER)]
            self._write(ticket, Record("returned", fence, ids))
            self.changed.append(ticket)

    def put_off(self, incarnation: str, ticket: bytes, after_ms: int) -> None:
        """give_back.lua for one whole ticket that is to wait."""
        record = self._its_own(incarnation, ticket)
        ids = [entry_id for entry_id in sorted(record.ids, key=rank) if self._claim(entry_id, MASTER)]
        self._write(ticket, Record(f"waits@{self.clock_ms + after_ms}", record.fence, ids))
        self.changed.append(ticket)

    def retry(self, ticket: bytes) -> None:
        """An operator ends a wait."""
        record = self.index[ticket]
        assert is_waiting(record.owner.encode())
        record.owner = "returned"
        self.changed.append(ticket)

    def park(self, incarnation: str, ticket: bytes) -> None:
        """dead_letter.lua with policy halt, for the first message of a ticket."""
        record = self._its_own(incarnation, ticket)
        first, *rest = self.unfinished(ticket)
        is_gone = first in self.bodiless
        if is_gone:
            self.finish(first)
        else:
            self.pending[first] = HALTED
        left = [entry_id for entry_id in rest if self._claim(entry_id, MASTER)]
        self._write(
            ticket, Record("returned" if is_gone else HALTED, record.fence, left if is_gone else [first, *left])
        )
        self.changed.append(ticket)

    def redrive(self, ticket: bytes) -> None:
        """redrive.lua for what a halted ticket waits for; its body is there."""
        record = self.index[ticket]
        assert record.owner == HALTED
        self.pending[record.ids[0]] = MASTER
        self._write(ticket, Record("returned", record.fence, list(record.ids)))
        self.changed.append(ticket)

    def drop(self, ticket: bytes) -> None:
        """redrive.lua for what a halted ticket waits for."""
        record = self.index[ticket]
        assert record.owner == HALTED
        self.finish(record.ids[0])
        self._write(ticket, Record("returned", record.fence, record.ids[1:]))
        self.changed.append(ticket)

    def _its_own(self, incarnation: str, ticket: bytes) -> Record:
        record = self.index[ticket]
        assert self.lives(incarnation)
        assert record.owner == incarnation
        return record

    def _write(self, ticket: bytes, record: Record) -> None:
        if record.ids:
            self.index[ticket] = record
        else:
            del self.index[ticket]

    def sweep(self, ids: Iterable[bytes]) -> list[PeekedEntry]:
        """sweep.lua, when just these are idle for long enough: what comes to ``master``."""
        strays = []
        for entry_id in sorted(ids, key=rank):
            owner = self.pending[entry_id]
            if owner not in (MASTER, HALTED) and not self.lives(owner) and self._bring(entry_id):
                strays.append(PeekedEntry(entry_id, self.ticket_of[entry_id]))
        return strays

    def claim_by_hand(self, entry_id: bytes) -> None:
        """Somebody else than the leader brings an entry to ``master``."""
        self._claim(entry_id, MASTER)

    def _claim(self, entry_id: bytes, name: str, is_new: bool = False) -> bool:
        """XCLAIM; of what is new with FORCE."""
        if entry_id in self.bodiless and (self._drops_bodiless or is_new):
            self.finish(entry_id)
        if entry_id not in self.pending:
            return False
        self.pending[entry_id] = name
        return True

    def _bring(self, entry_id: bytes) -> bool:
        """To ``master``, by a script that looks at the body: without one the entry becomes a dead letter."""
        if entry_id in self.bodiless:
            self.finish(entry_id)
            return False
        return self._claim(entry_id, MASTER)

    def finish(self, entry_id: bytes) -> None:
        """XACK, or what Redis does with an entry whose body is gone."""
        self.pending.pop(entry_id, None)
        self.done.add(entry_id)

    # ---- the leader's steps --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """begin.lua."""
        of_strangers = [one for one in self.pending if rank(one) > rank(self.dealt)]
        again = {*self.ahead, *of_strangers}
        gone = (again & self.bodiless) - self.pending.keys()  # nobody reads these
        self.done |= gone
        self.unread = dict.fromkeys(sorted((again | self.unread.keys()) - gone, key=rank))
        self.ahead = {}
        self.delivered = self.dealt = min(self.delivered, self.dealt, key=rank)

    def read(self, count: int) -> NewEntries:
        """Return what was read and not taken; if there is nothing, read as a turn does (XREADGROUP)."""
        seen = [] if self.ahead else list(self.unread)[:count]
        self.dealt = self.dealt if self.ahead else self.delivered
        for entry_id in seen:
            del self.unread[entry_id]
            self.ahead[entry_id], self.delivered = None, entry_id
        return NewEntries(self.dealt, [(one, self.ticket_of[one]) for one in self.ahead], len(seen) < count)

    def hand_over(
        self,
        plan: HandOverPlan,
        news: NewEntries = NO_NEW_ENTRIES,
        heard: int | None = None,
        index: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> int | None:
        """A turn. Nothing happens if others have changed something since so many changes were ``heard``. ``index``:
        records that are not up to date."""
        if heard is not None and heard < len(self.changed):
            return None
        planned = {part.ticket for target in plan.targets for part in target.parts}
        for ticket, told in index.items():
            if ticket not in planned:
                self._bring_up_to_date_in_index(ticket, told)
        new = {entry[0] for entry in news.found}
        self.pending.update(dict.fromkeys(new, MASTER))  # they are nobody's, and may be given as if they were parked
        has_fence = any(part.changes_owner for target in plan.targets for part in target.parts)
        self.fence += has_fence
        for target in plan.targets:
            for part in target.parts:
                self._grant(target.incarnation, part, new)
        for entry_id in new:
            self.ahead.pop(entry_id, None)
            if self.pending.get(entry_id) == MASTER:
                self._claim(entry_id, MASTER, is_new=True)
        self.dealt = news.found[-1][0] if news.found else self.dealt
        return self.fence if has_fence else 0

    def _bring_up_to_date_in_index(self, ticket: bytes, told: bytes) -> None:
        there = self.unfinished(ticket) if ticket in self.index else []
        record = self.index.pop(ticket, None)
        head, ids = b" ".join(told.split()[:2]), told.split()[2:]
        if record is not None and (
            (":" not in record.owner and told) or not set(there) <= set(ids) or (told and head != record.head)
        ):
            self.broken.append(f"{told!r} in place of {record} of {ticket!r}, of which {there} are not over")
        if told and record is not None:
            self.index[ticket] = Record(record.owner, record.fence, ids)

    def _grant(self, incarnation: str, part: TicketPlan, new: set[bytes]) -> None:
        """Hand over one ticket's part. What has no body is not pending then, and its owner finds out."""
        record = self.index.get(part.ticket)
        fence = self.fence if part.changes_owner else int(part.believed.split()[1])
        is_its = record is not None and record.head == part.believed
        before = [] if part.changes_owner else list(part.held)
        held = [] if record is None or not is_its or part.changes_owner else self.unfinished(part.ticket)
        if not set(held) <= set(before):
            self.broken.append(f"{part} forgets some of {held}")
        if self.lives(incarnation):  # else it starts nothing any more, and all that it has is taken back
            self._look(incarnation, part, fence)
        is_over = record is not None and ":" in record.owner and not self.unfinished(part.ticket)
        if record is not None and not is_its and not is_over and (":" not in record.owner or self.lives(record.owner)):
            self.broken.append(f"{part} overwrites {record}")
        for entry_id in part.ids:
            if entry_id not in self.bodiless:
                if entry_id in self.done:
                    self.broken.append(f"{part} brings {entry_id!r} back, which is over")
                self.pending.setdefault(entry_id, MASTER)
            self._claim(entry_id, incarnation, entry_id in new)
        self.index[part.ticket] = Record(incarnation, fence, [*before, *part.ids])
        self.handed_over.append(HandedOver(part.ticket, incarnation, fence, tuple(part.ids)))

    def _look(self, incarnation: str, part: TicketPlan, fence: int) -> None:
        """Note what this hand-over breaks."""
        if list(part.ids) != sorted(part.ids, key=rank):
            self.broken.append(f"{part} is not in id order")
        for entry_id, owner in self.pending.items():
            if self.ticket_of[entry_id] != part.ticket or owner == STRANGER or entry_id in part.ids:
                continue
            if owner not in (MASTER, incarnation):
                self.broken.append(f"{part} goes to {incarnation} while {owner} has {entry_id!r}")
            if owner == MASTER and rank(entry_id) < rank(part.ids[-1]):
                self.broken.append(f"{part} overtakes {entry_id!r}")
        last = [handed.fence for handed in self.handed_over if handed.ticket == part.ticket][-1:]
        if last and fence < last[0]:
            self.broken.append(f"{part}: fence {fence} after {last[0]}")

    def recall(self, incarnation: str, tickets: Sequence[tuple[bytes, bytes, Sequence[bytes]]]) -> bool:
        self.recalled += [(incarnation, ticket, int(fence)) for ticket, fence, _ in tickets]
        return True

    def take_back(self, incarnation: str, count: int) -> Page | None:
        """take_back.lua: one page."""
        if self.lives(incarnation):
            return None
        page = self.held_by(incarnation)[: min(count, PAGE)]
        found = [PeekedEntry(entry_id, self.ticket_of[entry_id]) for entry_id in page if self._bring(entry_id)]
        return Page(page[-1] if page else None, found, [one for one in page if one not in self.pending])

    def left_behind(self, incarnation: str, held: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[tuple[bytes, bytes]]:
        """Return those of these that are under ``master``."""
        assert not self.lives(incarnation)
        assert not self.held_by(incarnation)
        return [(one, ticket) for ticket, ids in held for one in ids if self.pending.get(one) == MASTER]

    def read_parked(self) -> list[tuple[bytes, bytes]]:
        """take_back.lua, all pages at once."""
        return [(entry_id, self.ticket_of[entry_id]) for entry_id in self.held_by(MASTER) if self._bring(entry_id)]
