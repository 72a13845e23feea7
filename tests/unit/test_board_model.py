"""Anything may happen in any order, and the board keeps its promises: checked after every step against a model of what
Redis does."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.boards import may_plan, seeds
from tests.leader_model import Leader
from tests.redis_model import HALTED, MASTER, STRANGER, RedisModel
from usher.common.protocol.registration import name_of
from usher.common.protocol.stream_id import rank
from usher.common.protocol.ticket_states import is_waiting
from usher.master.membership.registry import RegisteredConsumer
from usher.master.policy.board.board import Board
from usher.master.policy.board.tickets import BoardTicket, ConsumerLoad, RunQueue, Standing

TICKETS = [b"T1", b"T2", b"T3"]
NAMES = ["c1", "c2", "c3"]
REPORTED = ["at once", "late", "never"]

#: Chooses one of what is there.
some = st.integers(0, 60)
FEW = st.lists(st.sampled_from(TICKETS), min_size=1, max_size=6)
LIMITS = st.sampled_from([1, 2, 5, 1000])

Facts = list[tuple[object, ...]]


class BoardMachine(RuleBasedStateMachine):
    """The rules are what can happen to a leader."""

    redis_class: type[RedisModel] = RedisModel
    leader_class: type[Leader] = Leader

    def __init__(self) -> None:
        super().__init__()
        self.window = 1
        self.redis = self.redis_class()
        self.leader = self.leader_class(self.redis, self.window)
        self.last_id = 0
        self.generation = 0
        self.reports: list[tuple[str, bytes, list[bytes]]] = []
        self.rosters: list[dict[str, RegisteredConsumer]] = []

    @property
    def board(self) -> Board:
        return self.leader.board

    @initialize(window=st.sampled_from([1, 2, 3, 100]), capacities=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def begin(self, window: int, capacities: Sequence[int]) -> None:
        self.window = window
        self.leader = self.leader_class(self.redis, window)
        for name, capacity in zip(NAMES, capacities, strict=False):
            self._register(name, capacity)
        self.leader.look_at(self.redis.roster())

    def _register(self, name: str, capacity: int) -> None:
        self.generation += 1
        self.redis.register(f"{name}:{self.generation}", capacity)

    def _new_id(self) -> bytes:
        self.last_id += 1
        return b"%d-0" % self.last_id

    # ---- entries -------------------------------------------------------------------------------------------------------------

    @rule(tickets=FEW)
    def new_entries_arrive(self, tickets: Sequence[bytes]) -> None:
        for ticket in tickets:
            self.leader.arrive(self._new_id(), ticket)

    @rule(ticket=st.sampled_from(TICKETS))
    def a_stranger_takes_a_new_entry(self, ticket: bytes) -> None:
        """And all that the leader has not taken."""
        self.redis.add(self._new_id(), ticket)
        self.redis.read_by(STRANGER)

    def _add(self, tickets: Sequence[bytes]) -> None:
        for ticket in tickets:
            self.redis.add(self._new_id(), ticket)

    @rule(tickets=FEW, limit=LIMITS, caught_up=st.booleans())
    def news_are_planned_and_taken(self, tickets: Sequence[bytes], limit: int, caught_up: bool) -> None:
        """``caught_up``: what was there before has gone, and is done."""
        for _ in range(8 if caught_up else 0):
            self._all_is_acknowledged()
            self.leader.hand_over()
        self._add(tickets)
        self.leader.read(limit)

    @rule(tickets=FEW, limit=LIMITS)
    def news_are_planned_and_not_taken(self, tickets: Sequence[bytes], limit: int) -> None:
        """Redis refuses the call for the moment, and they come again."""
        self._add(tickets)
        before = self._facts()
        self.leader.see(limit)[2]()
        assert self._facts() == before

    @rule(tickets=FEW, limit=LIMITS, some=some)
    def news_are_deleted_before_they_are_taken(self, tickets: Sequence[bytes], limit: int, some: int) -> None:
        self._add(tickets)
        self.leader.read(limit, lambda: self.redis.delete(list(self.redis.ahead)[some % len(self.redis.ahead)]))

    def _ownerless(self) -> list[bytes]:
        """But for what is above all that was taken: it is there once the leader has read on."""
        known = {MASTER, HALTED, *self.redis.leases}
        found = (entry_id for entry_id, owner in self.redis.pending.items() if owner not in known)
        return sorted((one for one in found if rank(one) <= rank(self.redis.dealt)), key=rank)

    @precondition(lambda self: self._ownerless())
    @rule(some=some, most=st.integers(1, 3))
    def the_sweep_finds_strays(self, some: int, most: int) -> None:
        """Also what a dead consumer holds, before anybody has noticed its death or while it is being recovered."""
        ownerless = self._ownerless()
        first = some % len(ownerless)
        self.leader.take_in(self.redis.sweep(ownerless[first : first + most]))

    def _left_by_the_dead(self) -> list[bytes]:
        return [
            entry_id
            for entry_id in self._ownerless()
            if entry_id in self.redis.recorded(self.redis.ticket_of[entry_id])
        ]

    @precondition(lambda self: self._left_by_the_dead())
    @rule(some=some)
    def an_operator_brings_an_entry_of_the_dead_to_master(self, some: int) -> None:
        """The leader hears of it at the end of the recovery, from the record."""
        there = self._left_by_the_dead()
        self.redis.claim_by_hand(there[some % len(there)])

    @precondition(lambda self: self.redis.pending or self.redis.unread)
    @rule(some=some, dropped=st.booleans())
    def a_body_is_deleted(self, some: int, dropped: bool) -> None:
        """Redis >= 7 drops such an entry from the pending list when somebody claims it, or only looks for idle ones."""
        there = sorted([*self.redis.pending, *self.redis.ahead, *self.redis.unread], key=rank)
        entry_id = there[some % len(there)]
        self.redis.delete(entry_id)
        if dropped:
            self.redis.finish(entry_id)

    # ---- plans ---------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: may_plan(self.board))
    @rule(limit=LIMITS)
    def hand_over(self, limit: int) -> None:
        self.leader.hand_over(limit)

    @precondition(lambda self: may_plan(self.board))
    @rule(limit=LIMITS)
    def redis_refuses_a_plan_for_the_moment(self, limit: int) -> None:
        before = self._facts()
        plan = self.board.plan(limit, self.leader.now_s)
        if plan is not None:
            self.board.withdraw(plan)
        assert self._facts() == before

    def _facts(self) -> Facts:
        """Tickets that are due by now may go on, whether the leader has looked or not."""
        self.board._wake_due(self.leader.now_s)
        return [
            (t.name, list(t.running), list(t.parked), t.owner, t.believed, t.standing)
            for t in self.board.tickets.values()
        ]

    @rule()
    def a_whole_turn(self) -> None:
        self.leader.turn()

    @precondition(lambda self: self.leader.board.unsure)
    @rule()
    def read_what_is_unsure(self) -> None:
        self.leader.read_records(list(self.leader.board.unsure))

    @precondition(lambda self: self.board.in_flight)
    @rule(quiet_s=st.sampled_from([0.0, 3.0]))
    def compare_quiet_tickets_with_the_index(self, quiet_s: float) -> None:
        self.leader.reconcile(quiet_s)

    # ---- owners --------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.redis.index)
    @rule(some=some, count=st.integers(1, 4), reported=st.sampled_from(REPORTED))
    def an_owner_acknowledges(self, some: int, count: int, reported: str) -> None:
        names = sorted(self.redis.index)
        ticket = names[some % len(names)]
        owner = self.redis.index[ticket].owner
        ids = self.redis.ack(owner, self.redis.unfinished(ticket)[:count])
        if ids and reported == "at once":
            (self._report if some % 2 else self._report_quietly)(owner, ticket, ids)
        elif ids and reported == "late":
            self.reports.append((owner, ticket, ids))

    def _report(self, incarnation: str, ticket: bytes, ids: Sequence[bytes]) -> list[str]:
        answers = self.board.acknowledged(incarnation, ticket, ids, 0.0)
        assert len(answers) == len(ids)
        return answers

    def _report_quietly(self, owner: str, ticket: bytes, ids: Sequence[bytes]) -> None:
        """With others that say nothing: of a ticket that nobody knows, and the same once more."""
        self.board.free(owner, [(b"T-unknown", ids), (ticket, ids), (ticket, ids)], 0.0)

    @precondition(lambda self: self.reports)
    @rule(some=some, again=st.booleans())
    def a_report_comes_late_and_perhaps_twice(self, some: int, again: bool) -> None:
        place = some % len(self.reports)
        self._report(*self.reports[place])
        if not again:
            del self.reports[place]

    @precondition(lambda self: self.board.in_flight)
    @rule(some=some, who=st.sampled_from(["c1:0", "c9:9", ""]))
    def a_report_of_somebody_else_changes_nothing(self, some: int, who: str) -> None:
        before = self._facts()
        names = sorted(ticket.name for ticket in self.board.tickets.values() if ticket.running)
        ticket = self.board.tickets[names[some % len(names)]]
        assert set(self._report(who, ticket.name, list(ticket.running))) == {"stale"}
        assert self._facts() == before

    # ---- dead letters --------------------------------------------------------------------------------------------------------

    def _owned(self) -> list[tuple[str, bytes]]:
        return [
            (record.owner, ticket)
            for ticket, record in sorted(self.redis.index.items())
            if self.redis.lives(record.owner) and self.redis.unfinished(ticket)
        ]

    @precondition(lambda self: self._owned())
    @rule(some=some)
    def an_owner_parks_a_message(self, some: int) -> None:
        owned = self._owned()
        self.redis.park(*owned[some % len(owned)])

    # ---- recalls ---------------------------------------------------------------------------------------------------------------

    @rule()
    def the_leader_recalls(self) -> None:
        self.leader.recall()

    @precondition(lambda self: self.redis.recalled)
    @rule(some=some, again=st.booleans())
    def an_owner_answers_a_recall(self, some: int, again: bool) -> None:
        """In any order, or twice: what was recalled may be acknowledged, lost, or handed over anew by then."""
        place = some % len(self.redis.recalled)
        self.redis.answer_recall(*self.redis.recalled[place])
        if not again:
            del self.redis.recalled[place]

    @precondition(lambda self: self._owned())
    @rule(some=some, after_ms=st.sampled_from([0, 1, 3000, 20_000]))
    def an_owner_puts_a_ticket_off(self, some: int, after_ms: int) -> None:
        owned = self._owned()
        self.redis.put_off(*owned[some % len(owned)], after_ms)

    def _put_off(self) -> list[bytes]:
        return sorted(ticket for ticket, record in self.redis.index.items() if is_waiting(record.owner.encode()))

    @precondition(lambda self: self._put_off())
    @rule(some=some)
    def an_operator_ends_a_wait(self, some: int) -> None:
        put_off = self._put_off()
        self.redis.retry(put_off[some % len(put_off)])

    def _waiting(self) -> list[bytes]:
        return sorted(ticket for ticket, record in self.redis.index.items() if record.owner == HALTED)

    @precondition(lambda self: self._waiting())
    @rule(some=some, dropped=st.booleans())
    def an_operator_ends_a_halt(self, some: int, dropped: bool) -> None:
        waiting = self._waiting()
        ticket = waiting[some % len(waiting)]
        if dropped or self.redis.index[ticket].ids[0] in self.redis.bodiless:
            self.redis.drop(ticket)
        else:
            self.redis.redrive(ticket)

    @precondition(lambda self: self.leader.has_news)
    @rule()
    def the_leader_hears_of_it(self) -> None:
        self.leader.hear()

    # ---- consumers come and go -----------------------------------------------------------------------------------------------

    def _free_names(self) -> list[str]:
        return sorted(set(NAMES) - {name_of(incarnation) for incarnation in self.redis.leases})

    @precondition(lambda self: self._free_names())
    @rule(some=some, capacity=st.integers(1, 5))
    def a_consumer_starts(self, some: int, capacity: int) -> None:
        names = self._free_names()
        self._register(names[some % len(names)], capacity)

    @precondition(lambda self: self.redis.leases)
    @rule(some=some, state=st.sampled_from(["", "draining", "revoked"]))
    def a_lease_ends_or_changes(self, some: int, state: str) -> None:
        living = sorted(self.redis.leases)
        incarnation = living[some % len(living)]
        if state:
            self.redis.leases[incarnation] = state
        else:
            del self.redis.leases[incarnation]

    def _draining(self) -> list[tuple[str, bytes]]:
        held = [
            (one.owner, ticket) for ticket, one in sorted(self.redis.index.items()) if self.redis.unfinished(ticket)
        ]
        return [(owner, ticket) for owner, ticket in held if self.redis.leases.get(owner) == "draining"]

    @precondition(lambda self: self._draining())
    @rule(some=some)
    def a_ticket_is_given_back(self, some: int) -> None:
        draining = self._draining()
        self.redis.give_back(*draining[some % len(draining)])

    @rule()
    def the_roster_is_read(self) -> None:
        self.rosters.append(self.redis.roster())

    @precondition(lambda self: self.rosters)
    @rule()
    def a_roster_is_looked_at(self) -> None:
        """It may be older than what the leader knows already."""
        self.leader.look_at(self.rosters.pop(0))

    @precondition(lambda self: self.leader.recovers)
    @rule()
    def a_page_is_recovered(self) -> None:
        self.leader.recover()

    @rule()
    def another_leader_takes_over(self) -> None:
        self.leader = self.leader_class.adopt(self.redis, self.window)

    # ---- what is always so ---------------------------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        assert not self.redis.broken, self.redis.broken
        self._the_sums_are_right()
        self._no_limit_is_exceeded()
        self._parked_is_what_master_has()
        self._nothing_is_stuck()
        self.leader.now_s += 0.25
        self.redis.tick(250)

    def _the_sums_are_right(self) -> None:
        board = self.board
        assert board.parked == sum(len(ticket.parked) for ticket in board.tickets.values())
        assert board.in_flight == sum(len(ticket.running) for ticket in board.tickets.values())
        for consumer in board.consumers.values():
            mine = [ticket for ticket in board.tickets.values() if ticket.owner is consumer]
            assert set(consumer.tickets) == {ticket.name for ticket in mine}
            assert consumer.in_flight == sum(len(ticket.running) for ticket in mine)
        for ticket in board.tickets.values():
            assert ticket.owner is None or board.consumers.get(ticket.owner.incarnation) is ticket.owner
            assert not ticket.running or ticket.owner is not None
            if ticket.owner is not None and ticket.standing is Standing.OPEN and not ticket.running:
                # It is bound to nobody who lives and takes nothing: it would wait until that one is gone.
                assert ticket.owner.accepts or not self.redis.lives(ticket.owner.incarnation)

    def _no_limit_is_exceeded(self) -> None:
        assert all(len(handed.ids) <= self.window for handed in self.redis.handed_over)
        assert all(len(ticket.running) <= self.window for ticket in self.board.tickets.values())
        assert all(consumer.room >= 0 for consumer in self.board.consumers.values() if consumer.capacity)

    def _parked_is_what_master_has(self) -> None:
        """Nothing that is pending under ``master`` is forgotten, and nothing is parked that somebody else has."""
        held = set(self.redis.held_by(MASTER))
        parked: set[bytes] = set()
        elsewhere: set[bytes] = set()  # as far as memory knows; or in a record that is to be read
        for ticket in self.board.tickets.values():
            assert list(ticket.parked) == sorted(set(ticket.parked), key=rank)
            parked.update(ticket.parked)
            elsewhere.update(ticket.running, {ticket.waits_for} - {b""})
            if ticket.standing is Standing.UNSURE:
                assert ticket.name in self.leader.board.unsure
                elsewhere.update(self.redis.recorded(ticket.name) - parked)
        assert parked <= held | self.redis.done
        assert held <= parked | elsewhere
        assert not parked & elsewhere

    def _nothing_is_stuck(self) -> None:
        """Whatever may be handed over is handed over by planning again and again, and nothing else is."""
        board = copy.deepcopy(self.board)
        if type(board._queue) is RunQueue:
            board._queue._append = board._queue._runnable.append  # a method of a deque is not copied
        board._queue.retry(board.asked_back.release(math.inf))  # what was asked back is held for a moment
        while (plan := board.plan(1000, 0.0)) is not None:
            for target in plan.targets:
                assert board.consumers[target.incarnation].accepts
                for part in target.parts:
                    ticket = self.board.tickets[part.ticket]
                    assert ticket.standing in (Standing.OPEN, Standing.WAITING)
                    assert ticket.owner is None or ticket.owner.incarnation == target.incarnation
        # Of two incarnations of a name the later one is chosen; the former is dead, and nobody has noticed.
        by_generation = sorted(
            board.consumers.values(), key=lambda consumer: int(consumer.incarnation.rpartition(":")[2])
        )
        chosen = {consumer.name: consumer for consumer in by_generation if consumer.accepts}
        there_is_room = any(consumer.room > 0 for consumer in chosen.values())
        stuck = [ticket.name for ticket in board.tickets.values() if self._could_go(ticket, chosen)]
        assert not stuck, f"forgotten: {stuck}"
        assert all(consumer.room >= 0 for consumer in board.consumers.values() if consumer.capacity)
        assert self._room_is_told(there_is_room, board.room), "there is room, and nothing more would be read"

    def _room_is_told(self, there_is_room: bool, room: int) -> bool:
        return room > 0 or not there_is_room

    def _could_go(self, ticket: BoardTicket, chosen: dict[str, ConsumerLoad]) -> bool:
        """``chosen``: the consumers that may be chosen, by name."""
        if ticket.standing is not Standing.OPEN or not ticket.parked or len(ticket.running) > self.window // 2:
            return False
        if ticket.owner is not None:
            return ticket.owner.accepts and ticket.owner.room > 0
        return any(consumer.room > 0 for consumer in chosen.values())

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """When nothing goes wrong any more, everything that ever arrived is done."""
        for incarnation in [name for name, state in self.redis.leases.items() if state != "live"]:
            del self.redis.leases[incarnation]
        if not self.redis.leases:
            self._register("c1", 1)
        for ticket in self._waiting():
            (self.redis.drop if self.redis.index[ticket].ids[0] in self.redis.bodiless else self.redis.redrive)(ticket)
        for ticket in self._put_off()[:: 2 if self.redis.time_goes_on else 1]:  # the others wait for their times
            self.redis.retry(ticket)
        for _ in range(30 + 2 * self.last_id):
            if not (
                self.redis.pending or self.redis.ahead or self.redis.unread or self.redis.index or self.board.tickets
            ):
                break
            self.leader.take_in(self.redis.sweep(self._ownerless()))
            self._quiet_turn()
            self.all_is_well()
        assert not self.redis.pending
        assert not self.redis.index
        assert not self.board.tickets
        assert (self.board.in_flight, self.board.parked) == (0, 0)
        assert self.redis.done == {b"%d-0" % number for number in range(1, self.last_id + 1)}

    def _quiet_turn(self) -> None:
        self.leader.turn()
        self._all_is_acknowledged()
        self.leader.now_s += 10.0
        self.redis.tick(10_000)
        self.leader.reconcile(5.0)

    def _all_is_acknowledged(self) -> None:
        for ticket, record in list(self.redis.index.items()):
            if self.redis.lives(record.owner):
                self._report(record.owner, ticket, self.redis.ack(record.owner, self.redis.unfinished(ticket)))


TestBoard = BoardMachine.TestCase
TestBoard.settings = settings(
    max_examples=2 * settings.default.max_examples // 5, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class Walk:
    """A long walk through the same rules, with the weights that bring a leader into trouble soonest."""

    machine_class: type[BoardMachine] = BoardMachine

    def __init__(self, seed: int, redis: RedisModel | None = None) -> None:
        self.rng = random.Random(seed)
        self.machine = self.machine_class()
        self.machine.redis = redis or self.machine.redis

    def go(self, steps: int) -> None:
        rng, machine = self.rng, self.machine
        machine.begin(rng.choice([1, 2, 3, 100]), [rng.randint(1, 5) for _ in range(rng.randint(1, 3))])
        moves = self._moves()
        weights = [weight for weight, _, _ in moves]
        for _ in range(steps):
            _, possible, move = rng.choices(moves, weights)[0]
            if possible():
                move()
                machine.all_is_well()
        machine.teardown()

    def _moves(self) -> list[tuple[int, Callable[[], object], Callable[[], None]]]:
        machine, rng = self.machine, self.rng

        def some() -> int:
            return rng.randrange(60)

        def limit() -> int:
            return rng.choice([1, 2, 5, 1000])

        def few() -> list[bytes]:
            return rng.choices(TICKETS, k=rng.randint(1, 4))

        def always() -> bool:
            return True

        def runnable() -> bool:
            return may_plan(machine.board)

        return [
            (2, always, lambda: machine.new_entries_arrive(few())),
            (1, always, lambda: machine.a_stranger_takes_a_new_entry(rng.choice(TICKETS))),
            (12, always, lambda: machine.news_are_planned_and_taken(few(), limit(), rng.random() < 0.5)),
            (3, always, lambda: machine.news_are_planned_and_not_taken(few(), limit())),
            (1, always, lambda: machine.news_are_deleted_before_they_are_taken(few(), limit(), some())),
            (2, machine._ownerless, lambda: machine.the_sweep_finds_strays(some(), rng.randint(1, 3))),
            (1, machine._left_by_the_dead, lambda: machine.an_operator_brings_an_entry_of_the_dead_to_master(some())),
            (
                1,
                lambda: machine.redis.pending or machine.redis.unread,
                lambda: machine.a_body_is_deleted(some(), rng.random() < 0.5),
            ),
            (10, runnable, lambda: machine.hand_over(limit())),
            (1, runnable, lambda: machine.redis_refuses_a_plan_for_the_moment(limit())),
            (3, lambda: machine.leader.board.unsure, machine.read_what_is_unsure),
            (
                1,
                lambda: machine.board.in_flight,
                lambda: machine.compare_quiet_tickets_with_the_index(rng.choice([0.0, 3.0])),
            ),
            (
                10,
                lambda: machine.redis.index,
                lambda: machine.an_owner_acknowledges(some(), rng.randint(1, 4), rng.choice(REPORTED)),
            ),
            (
                3,
                lambda: machine.reports,
                lambda: machine.a_report_comes_late_and_perhaps_twice(some(), rng.random() < 0.3),
            ),
            (
                1,
                lambda: machine.board.in_flight,
                lambda: machine.a_report_of_somebody_else_changes_nothing(some(), "c1:0"),
            ),
            (2, machine._owned, lambda: machine.an_owner_parks_a_message(some())),
            (4, always, machine.the_leader_recalls),
            (6, lambda: machine.redis.recalled, lambda: machine.an_owner_answers_a_recall(some(), rng.random() < 0.2)),
            (2, machine._owned, lambda: machine.an_owner_puts_a_ticket_off(some(), rng.choice([0, 1, 3000, 20_000]))),
            (1, machine._put_off, lambda: machine.an_operator_ends_a_wait(some())),
            (3, machine._waiting, lambda: machine.an_operator_ends_a_halt(some(), rng.random() < 0.3)),
            (3, lambda: machine.leader.has_news, machine.the_leader_hears_of_it),
            (2, machine._free_names, lambda: machine.a_consumer_starts(some(), rng.randint(1, 5))),
            (
                2,
                lambda: machine.redis.leases,
                lambda: machine.a_lease_ends_or_changes(some(), rng.choice(["", "", "draining", "revoked"])),
            ),
            (4, machine._draining, lambda: machine.a_ticket_is_given_back(some())),
            (3, always, machine.the_roster_is_read),
            (3, lambda: machine.rosters, machine.a_roster_is_looked_at),
            (1, always, machine.a_whole_turn),
            (4, lambda: machine.leader.recovers, machine.a_page_is_recovered),
            (0 if rng.random() < 0.7 else 1, always, machine.another_leader_takes_over),
        ]


@pytest.mark.parametrize("seed", seeds(40, 10))
def test_a_long_walk_ends_with_everything_done(seed: int) -> None:
    Walk(seed).go(400)
