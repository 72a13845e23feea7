"""What must be so at every moment, from the outside: what was sent, what handlers did, and what Redis says."""

from __future__ import annotations

from collections import Counter

from tests.integration.actors import MAX_ATTEMPTS, ConsumerActor, MasterActor, Run, Stage, TroubledLink
from usher.common.protocol.keys import HALTED, MASTER
from usher.common.protocol.stream_id import rank
from usher.common.protocol.ticket_states import is_given_back
from usher.common.redis.replies import pairs, parse_record

#: Somebody who takes entries without being asked to.
STRANGER = b"stranger"


class Ledger:
    """The promise as an observer sees it. ``check`` raises AssertionError."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.ticket_of: dict[bytes, bytes | None] = {}
        self.bodiless: set[bytes] = set()
        self.unread: set[bytes] = set()  # deleted before the group was given them: nobody need say so
        self.strange: set[bytes | None] = (
            set()
        )  # tickets of which somebody took something: their order is not ours to keep
        self.may_die: set[bytes] = set()  # whose handler failed or gave up
        self.starts: Counter[bytes] = Counter()
        self.dropped: set[bytes] = set()  # what an operator threw away
        self.dead_links: list[TroubledLink] = []
        self.committed: dict[bytes, list[bytes]] = {}
        self._opened: dict[bytes, int] = {}
        self._fences: dict[bytes, tuple[int, str]] = {}
        self._incarnations: set[str] = set()

    # ---- what is noted -------------------------------------------------------------------------------------------------------

    def sent(self, entry_id: bytes, ticket: bytes | None) -> None:
        self.ticket_of[entry_id] = ticket

    def next_id(self) -> bytes:
        """Above all that was sent."""
        return b"%d-1" % (max((int(entry_id.partition(b"-")[0]) for entry_id in self.ticket_of), default=0) + 1)

    def registered(self, consumer: ConsumerActor) -> None:
        assert consumer.incarnation not in self._incarnations, "a generation was given twice"
        self._incarnations.add(consumer.incarnation)

    def started(self, run: Run, consumer: ConsumerActor) -> None:
        """A handler begins: the sink refuses lower fences of its ticket from now on."""
        message = run.message
        self.starts[message.stream_id] += 1
        self._granted(message.ticket, message.fence, consumer.incarnation)
        for other in self._stage.history.running.values():
            if other.ticket == message.ticket and other is not run.execution:
                assert not self.lease(other.who), (
                    f"{other} still runs under a living lease while {message} is started by {consumer.incarnation}"
                )
                assert other.fence < message.fence, f"{message} runs beside {other}"
        assert message.fence >= self._opened.get(message.ticket, 0) or not self.lease(consumer.incarnation), (
            f"{message}: its fence fell"
        )
        self._opened[message.ticket] = max(message.fence, self._opened.get(message.ticket, 0))

    def succeeds(self, run: Run) -> None:
        """A handler has its effect, unless the sink has seen a higher fence."""
        message = run.message
        if message.fence == self._opened[message.ticket]:
            done = self.committed.setdefault(message.ticket, [])
            if message.stream_id not in done:
                done.append(message.stream_id)

    def _granted(self, ticket: bytes, fence: int, owner: str) -> None:
        """A fence belongs to one owner, and every later one is higher."""
        highest, holder = self._fences.get(ticket, (0, ""))
        if fence == highest:
            assert owner == holder, f"fence {fence} of {ticket!r} was given to {holder} and to {owner}"
        elif fence > highest:
            self._fences[ticket] = (fence, owner)

    # ---- what Redis says -----------------------------------------------------------------------------------------------------

    def lease(self, incarnation: str) -> bytes:
        return self._stage.link.call("GET", self._stage.keys.lease(incarnation)) or b""

    def holder(self, name: str) -> str:
        """The incarnation with a living lease that has the name; "" if there is none."""
        stored = self._stage.link.call("HGET", self._stage.keys.consumers, name)
        incarnation = f"{name}:{int(stored.split()[0])}" if stored else ""
        return incarnation if incarnation and self.lease(incarnation) else ""

    # ---- the promise ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        stage = self._stage
        state = stage.world.state()
        owner_of = {entry_id: owner for owner, ids in state.pending.items() for entry_id in ids}
        self._nothing_is_lost(owner_of, [letter[0] for letter in state.letters()])
        self._index_and_pending_list_agree(owner_of, state.index)
        self._one_owner_per_ticket(owner_of)
        self._order_is_kept()

    def _nothing_is_lost(self, owner_of: dict[bytes, bytes], letters: list[bytes]) -> None:
        """Q2: sent = undelivered + pending + acknowledged + dead."""
        assert len(letters) == len(set(letters)), f"two letters for one entry: {letters}"
        delivered = rank(self._stage.world.stream.last_delivered())
        dead = set(letters)
        for entry_id, ticket in self.ticket_of.items():
            # A parked message is pending, at its place, and has its letter.
            is_buried = entry_id in dead and owner_of.get(entry_id) != HALTED
            assert owner_of.get(entry_id) != HALTED or entry_id in dead, (
                f"{entry_id!r} waits for an operator without a letter"
            )
            is_unread = rank(entry_id) > delivered and owner_of.get(entry_id) != STRANGER
            places = is_unread + (entry_id in owner_of) + is_buried + (entry_id in self.dropped)
            assert places <= 1, f"{entry_id!r} is in more than one place"
            if not places and entry_id not in self._stage.history.succeeded and entry_id not in self.unread:
                # Redis >= 7 drops an entry without a body when it is claimed.
                assert entry_id in self.bodiless, f"{entry_id!r} of {ticket!r} is lost"
        for entry_id in dead:
            # One that was started so often, and never ended, is given up for its crashes.
            known = (
                self.starts[entry_id] >= MAX_ATTEMPTS
                or entry_id in self.may_die
                or entry_id in self.bodiless
                or self.ticket_of[entry_id] is None
            )
            assert known, f"{entry_id!r} is a dead letter without a reason"

    def _index_and_pending_list_agree(self, owner_of: dict[bytes, bytes], index: dict[bytes, bytes]) -> None:
        named: set[bytes] = set()
        for ticket, value in index.items():
            record = parse_record(value)
            assert record.ids, f"{ticket!r} has a record without ids"
            assert len(set(record.ids)) == len(record.ids), f"{ticket!r} has an id twice: {record}"
            assert not named & set(record.ids), f"an id is in two records: {record}"
            named.update(record.ids)
            is_masters = is_given_back(record.owner) or record.owner == HALTED
            if not is_masters:
                self._granted(ticket, record.fence, record.owner.decode())
            allowed = {MASTER, STRANGER} if is_masters else {record.owner}
            if not is_masters and not self.lease(record.owner.decode()):
                allowed |= {MASTER, STRANGER}  # until it is recovered, what was taken back is under master
            for entry_id in record.ids:
                assert self.ticket_of.get(entry_id) == ticket, f"{entry_id!r} is in the record of {ticket!r}"
                owner = owner_of.get(entry_id)
                if record.owner == HALTED and entry_id == record.ids[0]:
                    assert owner == HALTED, f"{ticket!r} waits for {entry_id!r}, which is pending for {owner!r}"
                    continue
                gone = owner is None and entry_id in self.bodiless
                assert owner in allowed or gone, (
                    f"{ticket!r}: {entry_id!r} is pending for {owner!r}, the index says {record.owner!r}"
                )
        for entry_id, owner in owner_of.items():
            assert entry_id in named or owner in (MASTER, HALTED, STRANGER), (
                f"{entry_id!r} is pending for {owner!r} and in no record"
            )

    def _one_owner_per_ticket(self, owner_of: dict[bytes, bytes]) -> None:
        owners: dict[bytes | None, set[bytes]] = {}
        for entry_id, owner in owner_of.items():
            if owner not in (MASTER, HALTED, STRANGER):
                owners.setdefault(self.ticket_of[entry_id], set()).add(owner)
        for ticket, names in owners.items():
            assert len(names) == 1, f"{ticket!r} has the owners {names}"

    def _order_is_kept(self) -> None:
        history = self._stage.history
        for ticket in {run.ticket for run in history.starts} - self.strange:
            first = history.first_starts(ticket)
            assert first == sorted(first, key=rank), f"{ticket!r} was started in the order {first}"
        for ticket, done in self.committed.items():
            assert ticket in self.strange or done == sorted(done, key=rank), (
                f"{ticket!r} has its effects in the order {done}"
            )

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        world = self._stage.world
        return not world.pending_rows() and rank(world.stream.last_delivered()) >= max(
            map(rank, self.ticket_of.keys() - self.unread), default=0
        )

    def check_the_end(self, leader: MasterActor) -> None:
        """Nothing goes wrong any more and there was time enough."""
        state = self._stage.world.state()
        assert self.is_over(), f"left pending: {state.pending}; the leader's failures: {leader.failures}"
        dead = {entry_id for entry_id, _, _ in state.letters()}
        done = {entry_id for ids in self.committed.values() for entry_id in ids}
        missing = [entry_id for entry_id in self.ticket_of if entry_id not in dead | done | self.dropped | self.unread]
        assert not missing, f"neither done nor dead: {missing}"
        left = {**state.index, **pairs(self._stage.link.call("HGETALL", self._stage.keys.attempts))}
        assert not left, f"left in index or attempts: {left}"
        board = leader.dispatcher.board
        assert not board.tickets, f"left in the leader's memory: {list(board.tickets)}"
        assert (board.in_flight, board.parked) == (0, 0), "the leader's sums are wrong"
