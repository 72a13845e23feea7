"""Anything may happen in any order, and the board keeps its promises; checked after every step against a model of what Redis does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.keys import MASTER as MASTER_NAME
from common.registration import name_of
from common.stream_id import rank
from master.policy.dispatch import Board
from master.policy.tickets import ConsumerLoad, Standing, Ticket
from tests.leader_model import MASTER, STRANGER, Leader, Record, RedisModel

TICKETS = [b"T1", b"T2", b"T3", b"T4"]
NAMES = ["c1", "c2", "c3"]
#: Turns in which everything must be done once nothing goes wrong any more.
ENOUGH = 200

Report = tuple[str, bytes, list[bytes]]


class BoardMachine(RuleBasedStateMachine):
    """Rules are what can happen to a leader; ``some`` draws numbers that choose among what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 1
        self.redis = RedisModel()
        self.leader = Leader(self.redis, self.window)
        self.last_id = 0
        self.generation = 0
        self.reports: list[Report] = []
        self.strange: list[bytes] = []

    @property
    def board(self) -> Board:
        return self.leader.board

    @initialize(window=st.sampled_from([1, 2, 3, 100]), capacities=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def begin(self, window: int, capacities: list[int]) -> None:
        self.window = window
        self.leader = Leader(self.redis, window)
        for name, capacity in zip(NAMES, capacities, strict=False):
            self._register(name, capacity)
        self.leader.look_at_roster()

    def _register(self, name: str, capacity: int) -> None:
        self.generation += 1
        self.redis.register(f"{name}:{self.generation}", capacity)

    def _new_id(self) -> bytes:
        self.last_id += 1
        return b"%d-0" % self.last_id

    def _living(self, state: str | None = None) -> list[str]:
        return [name for name, held in self.redis.leases.items() if state in (None, held)]

    # ---- entries -------------------------------------------------------------------------------------------------------------

    @rule(tickets=st.lists(st.sampled_from(TICKETS), min_size=1, max_size=6))
    def new_entries_arrive(self, tickets: list[bytes]) -> None:
        for ticket in tickets:
            self.leader.arrive(self._new_id(), ticket)

    @rule(ticket=st.sampled_from(TICKETS))
    def a_stranger_takes_a_new_entry(self, ticket: bytes) -> None:
        self.redis.read_new(self._new_id(), ticket, STRANGER)

    def _ownerless(self) -> list[bytes]:
        names = {MASTER, *self.redis.leases}
        return sorted((entry_id for entry_id, owner in self.redis.pending.items() if owner not in names), key=rank)

    @precondition(lambda self: self._ownerless())
    @rule(some=st.integers(0, 100), most=st.integers(1, 3))
    def the_sweep_finds_strays(self, some: int, most: int) -> None:
        """Also what a dead consumer holds, before anybody has noticed its death or while it is being recovered."""
        ownerless = self._ownerless()
        first = some % len(ownerless)
        self.leader.take_in(self.redis.sweep(ownerless[first : first + most]))

    @rule(some=st.integers(0, 100))
    def a_body_is_deleted(self, some: int) -> None:
        returned = {entry_id for record in self.redis.index.values() if record.owner == "returned" for entry_id in record.ids}
        there = sorted(set(self.redis.pending) - returned)
        if there:
            self.redis.bodiless.add(there[some % len(there)])

    # ---- plans ---------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.board.has_ready)
    @rule(limit=st.sampled_from([1, 2, 5, 1000]))
    def hand_over(self, limit: int) -> None:
        self.leader.hand_over(limit)

    @rule()
    def a_whole_turn(self) -> None:
        self.leader.turn()

    @precondition(lambda self: self.board.has_ready)
    @rule(limit=st.sampled_from([1, 2, 5, 1000]))
    def redis_refuses_a_plan_for_the_moment(self, limit: int) -> None:
        before = [(ticket.name, list(ticket.running), list(ticket.parked), ticket.owner) for ticket in self.board.tickets.values()]
        plan = self.board.plan(limit, self.leader.now_s)
        if plan is not None:
            self.board.withdraw(plan)
        assert before == [(ticket.name, list(ticket.running), list(ticket.parked), ticket.owner) for ticket in self.board.tickets.values()]

    @precondition(lambda self: self.leader.unsure)
    @rule()
    def read_what_is_unsure(self) -> None:
        self.leader.read_records(list(self.leader.unsure))

    @precondition(lambda self: self.board.in_flight)
    @rule(quiet_s=st.sampled_from([0.0, 3.0]))
    def compare_quiet_tickets_with_the_index(self, quiet_s: float) -> None:
        self.leader.reconcile(quiet_s)

    # ---- owners --------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.redis.index)
    @rule(some=st.integers(0, 100), count=st.integers(1, 4), reported=st.sampled_from(["at once", "late", "never"]))
    def an_owner_acknowledges(self, some: int, count: int, reported: str) -> None:
        names = sorted(self.redis.index)
        ticket = names[some % len(names)]
        record = self.redis.index[ticket]
        ids = self.redis.ack(record.owner, ticket, record.ids[:count])
        if ids and reported == "at once":
            self._report(record.owner, ticket, ids)
        elif ids and reported == "late":
            self.reports.append((record.owner, ticket, ids))

    def _report(self, incarnation: str, ticket: bytes, ids: Sequence[bytes]) -> list[str]:
        answers = self.board.acknowledged(incarnation, ticket, ids, self.leader.now_s)
        assert len(answers) == len(ids)
        return answers

    @precondition(lambda self: self.reports)
    @rule(some=st.integers(0, 100), again=st.booleans())
    def a_report_comes_late_and_perhaps_twice(self, some: int, again: bool) -> None:
        place = some % len(self.reports)
        self._report(*self.reports[place])
        if not again:
            del self.reports[place]

    @precondition(lambda self: self.board.tickets)
    @rule(some=st.integers(0, 100), who=st.sampled_from(["c1:0", "c9:9", ""]))
    def a_report_of_somebody_else_changes_nothing(self, some: int, who: str) -> None:
        names = sorted(self.board.tickets)
        ticket = self.board.tickets[names[some % len(names)]]
        answers = self._report(who, ticket.name, list(ticket.running))
        assert set(answers) <= {"stale"}

    # ---- consumers come and go -----------------------------------------------------------------------------------------------

    def _free_names(self) -> list[str]:
        return sorted(set(NAMES) - {name_of(incarnation) for incarnation in self.redis.leases})

    @precondition(lambda self: self._free_names())
    @rule(some=st.integers(0, 100), capacity=st.integers(1, 5))
    def a_consumer_starts(self, some: int, capacity: int) -> None:
        names = self._free_names()
        self._register(names[some % len(names)], capacity)

    @precondition(lambda self: self.redis.leases)
    @rule(some=st.integers(0, 100))
    def a_lease_ends(self, some: int) -> None:
        living = self._living()
        del self.redis.leases[living[some % len(living)]]

    @precondition(lambda self: self.redis.leases)
    @rule(some=st.integers(0, 100), state=st.sampled_from(["draining", "revoked"]))
    def a_consumer_drains_or_is_revoked(self, some: int, state: str) -> None:
        living = self._living()
        self.redis.leases[living[some % len(living)]] = state

    def _to_give_back(self) -> list[tuple[str, bytes]]:
        return [(record.owner, ticket) for ticket, record in sorted(self.redis.index.items()) if self._may_be_given_back(ticket, record)]

    @precondition(lambda self: self._to_give_back())
    @rule(some=st.integers(0, 100))
    def a_ticket_is_given_back(self, some: int) -> None:
        held = self._to_give_back()
        self.redis.give_back(*held[some % len(held)])

    def _may_be_given_back(self, ticket: bytes, record: Record) -> bool:
        if self.redis.leases.get(record.owner) != "draining":
            return False
        if self.redis.bodiless.intersection(record.ids):
            return False
        lowest = rank(record.ids[0])
        return not any(self.redis.ticket_of[i] == ticket and rank(i) < lowest for i in self.redis.pending)

    @rule()
    def the_roster_is_read(self) -> None:
        self.leader.look_at_roster()

    @precondition(lambda self: self.leader.recovers)
    @rule()
    def a_page_is_recovered(self) -> None:
        self.leader.recover()

    @rule()
    def another_leader_takes_over(self) -> None:
        self.leader = Leader.adopt(self.redis, self.window)
        self.leader.now_s = 0.0

    # ---- what is always so ---------------------------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        self.nothing_is_handed_over_out_of_order_or_to_two()
        self.the_sums_are_right()
        self.no_limit_is_exceeded()
        self.parked_is_what_master_has()
        self.nothing_is_stuck()
        self.leader.now_s += 1.0

    def nothing_is_handed_over_out_of_order_or_to_two(self) -> None:
        assert not self.redis.broken, self.redis.broken

    def the_sums_are_right(self) -> None:
        board = self.board
        assert board.parked == sum(len(ticket.parked) for ticket in board.tickets.values())
        assert board.in_flight == sum(len(ticket.running) for ticket in board.tickets.values())
        for consumer in board.consumers.values():
            mine = [ticket for ticket in board.tickets.values() if ticket.owner is consumer]
            assert consumer.tickets == {ticket.name for ticket in mine}
            assert consumer.in_flight == sum(len(ticket.running) for ticket in mine)
        for ticket in board.tickets.values():
            assert ticket.owner is None or board.consumers.get(ticket.owner.incarnation) is ticket.owner
            assert ticket.running == {} or ticket.owner is not None

    def no_limit_is_exceeded(self) -> None:
        for handed in self.redis.handed_over:
            assert len(handed.ids) <= self.window
        for ticket in self.board.tickets.values():
            assert len(ticket.running) <= self.window or ticket.standing is not Standing.OPEN
        for consumer in self.board.consumers.values():
            assert consumer.room >= 0 or not consumer.capacity

    def parked_is_what_master_has(self) -> None:
        """Nothing that is pending under ``master`` is forgotten, and nothing is parked that is elsewhere."""
        assert MASTER_NAME.decode() == MASTER
        held = {entry_id for entry_id, owner in self.redis.pending.items() if owner == MASTER}
        parked: set[bytes] = set()
        running: set[bytes] = set()
        for ticket in self.board.tickets.values():
            assert list(ticket.parked) == sorted(set(ticket.parked), key=rank)
            parked.update(ticket.parked)
            running.update(ticket.running)
        assert parked <= held
        assert held <= parked | running
        assert not parked & running

    def nothing_is_stuck(self) -> None:
        """Whatever may be handed over is handed over by planning again and again."""
        board = copy.deepcopy(self.board)
        while (plan := board.plan(1000, 0.0)) is not None:
            for target in plan.targets:
                for part in target.parts:
                    assert self.board.tickets[part.ticket].standing is Standing.OPEN
                    owner = self.board.tickets[part.ticket].owner
                    assert owner is None or owner.incarnation == target.incarnation
        accepting = [consumer for consumer in board.consumers.values() if consumer.accepts]
        with_room = [consumer for consumer in accepting if consumer.room > 0]
        stuck = [ticket.name for ticket in board.tickets.values() if self._could_go(ticket, with_room)]
        assert not stuck, f"forgotten: {stuck}"
        assert all(consumer.room >= 0 for consumer in accepting)
        assert board.room > 0 or not with_room, "there is room and nothing more would be read"

    def _could_go(self, ticket: Ticket, with_room: list[ConsumerLoad]) -> bool:
        if ticket.standing is not Standing.OPEN or not ticket.parked or len(ticket.running) >= self.window:
            return False
        return ticket.owner in with_room if ticket.owner is not None else bool(with_room)

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """When nothing goes wrong any more, everything that ever arrived is done."""
        for incarnation in self._living("draining") + self._living("revoked"):
            del self.redis.leases[incarnation]
        if not self.redis.leases:
            self._register("c1", 1)
        self.leader.take_in(self.redis.sweep([entry_id for entry_id, owner in self.redis.pending.items() if owner == STRANGER]))
        for _ in range(ENOUGH):
            if not self.redis.pending and not self.redis.index and not self.board.tickets:
                break
            self._quiet_turn()
            self.nothing_is_handed_over_out_of_order_or_to_two()
            self.the_sums_are_right()
            self.parked_is_what_master_has()
        assert not self.redis.pending
        assert not self.redis.index
        assert not self.board.tickets
        assert (self.board.in_flight, self.board.parked) == (0, 0)
        assert sorted(self.redis.done) == sorted(b"%d-0" % number for number in range(1, self.last_id + 1))

    def _quiet_turn(self) -> None:
        leader = self.leader
        leader.turn()
        for ticket, record in list(self.redis.index.items()):
            ids = self.redis.ack(record.owner, ticket, list(record.ids))
            self._report(record.owner, ticket, ids)
        leader.now_s += 10.0
        leader.reconcile(5.0)


def _check(*things: Callable[[], None]) -> None:
    for thing in things:
        thing()


TestBoard = BoardMachine.TestCase
TestBoard.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
