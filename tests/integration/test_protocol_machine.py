"""Anything may happen in any order, on a real Redis, and the promise is kept: checked after every step.

Masters and consumers are the real objects of both programs, without threads (see actors.py). What an example does between two of its steps
cannot be interrupted, so the rules that give a master a turn also say what others do between the calls of that turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from common.errors import GiveUp, OwnershipLost, RedisTrouble
from common.keys import MASTER
from common.redis_client import Link
from common.registration import NO_LOCK
from master.dispatcher import Report
from master.membership import NameInUse
from tests.integration.actors import ConsumerActor, MasterActor, Run, Stage, Trouble, TroubledLink
from tests.integration.factories import FIELD, LEASE_MS
from tests.integration.ledger import Ledger

TICKETS = [b"T1", b"T2", b"T3"]
NAMES = ["a", "b", "c"]
MASTERS = ["m1", "m2"]
STRANGER = b"stranger"
_SOME = st.integers(0, 30)
_TROUBLE = st.sampled_from(Trouble)
_LEADER_STEPS = st.sampled_from(["fetch", "hand_over", "take_back", "free_tickets", "read_parked", "sweep", "reject", "HMGET"])
#: What others do between two calls of a master.
_MEANWHILE = ["flush", "lease_ends", "renew", "begin_drain", "give_back", "leave", "register", "end_lead", "elect_other", "late", "report", "work"]
_MOVES = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(_MEANWHILE), _SOME), max_size=3)


class ProtocolMachine(RuleBasedStateMachine):
    """Rules are what can happen; ``some`` draws numbers that choose among what is there."""

    def __init__(self, url: str) -> None:
        super().__init__()
        link = Link(url, "test:flush")
        link.call("CONFIG", "SET", "maxmemory", 0)
        link.call("FLUSHALL")
        link.close()
        self.stage = Stage(url)
        self.ledger = Ledger(self.stage)
        self.masters: dict[str, MasterActor] = {}
        self.living: list[ConsumerActor] = []  # processes; their lease may have ended
        self.orphans: list[ConsumerActor] = []  # dead processes whose lease goes on
        self.reports: list[Report] = []
        self.limits: dict[str, Any] = {}
        self.capacity = 100

    @initialize(
        batch=st.sampled_from([1, 3, 100]),
        window=st.sampled_from([1, 2, 100]),
        reconcile_s=st.sampled_from([0.0, 1e9]),
        capacity=st.sampled_from([1, 3, 100]),
    )
    def begin(self, batch: int, window: int, reconcile_s: float, capacity: int) -> None:
        self.limits = {"batch": batch, "window": window, "reconcile_s": reconcile_s}
        self.capacity = capacity
        for name in MASTERS:
            self.masters[name] = self.stage.master(name, **self.limits)
        self.register(0)
        self.masters["m1"].elect()
        self.send([b"T1", b"T2"])
        self.masters["m1"].turn()

    # ---- producers -----------------------------------------------------------------------------------------------------------

    @rule(tickets=st.lists(st.sampled_from(TICKETS), min_size=1, max_size=5))
    def send(self, tickets: list[bytes]) -> None:
        for ticket in tickets:
            with contextlib.suppress(RedisTrouble):
                [entry_id] = self.stage.send(ticket)
                self.ledger.sent(entry_id, ticket)

    @rule(fields=st.sampled_from([("text", "no ticket"), (FIELD, ""), (FIELD, b"\xff\xfe")]))
    def send_what_nobody_can_be_given(self, fields: tuple[Any, ...]) -> None:
        with contextlib.suppress(RedisTrouble):
            self.ledger.sent(self.stage.world.add(b"%d-1" % self.stage.world._next_ms, *fields), None)

    # ---- masters -------------------------------------------------------------------------------------------------------------

    def _master(self, some: int) -> MasterActor:
        return self.masters[MASTERS[some % len(MASTERS)]]

    @rule(some=_SOME, moves=_MOVES, looks=st.booleans())
    def turn(self, some: int, moves: list[tuple[int, str, int]], looks: bool) -> None:
        master = self._master(some)
        if looks:
            master.look()
        with self._meanwhile(master.link, moves):
            master.turn()

    @rule(some=_SOME)
    def several_turns(self, some: int) -> None:
        self._master(some).settle(turns=3)

    @rule(some=_SOME, step=_LEADER_STEPS, trouble=_TROUBLE, moves=_MOVES)
    def turn_with_trouble(self, some: int, step: str, trouble: Trouble, moves: list[tuple[int, str, int]]) -> None:
        master = self._master(some)
        master.look()
        master.link.troubles = {step: trouble}
        with self._meanwhile(master.link, moves):
            master.turn()
            master.turn()
        master.link.troubles = {}

    @contextlib.contextmanager
    def _meanwhile(self, link: TroubledLink, moves: list[tuple[int, str, int]]) -> Iterator[None]:
        """Let others move before the n-th call on a master's link."""
        calls = 0

        def before(step: str) -> None:
            nonlocal calls
            now = [(name, some) for at, name, some in moves if at == calls]
            calls += 1
            for name, some in now:
                with contextlib.suppress(RedisTrouble, OwnershipLost):
                    self._moves()[name](some)

        link.before = before
        try:
            yield
        finally:
            link.before = lambda step: None

    def _moves(self) -> dict[str, Callable[[int], Any]]:
        return {
            "flush": self.flush,
            "lease_ends": self.lease_ends,
            "renew": self.renew,
            "begin_drain": self.begin_drain,
            "give_back": self.give_back,
            "leave": self.leave,
            "register": self.register,
            "end_lead": lambda some: self.end_lead(),
            "elect_other": self.elect,
            "late": lambda some: self.late_commands_arrive(),
            "report": lambda some: self.report(some, "now"),
            "work": self.work,
        }

    @rule(some=_SOME)
    def elect(self, some: int) -> None:
        with contextlib.suppress(RedisTrouble):
            self._master(some).elect()

    @rule(some=_SOME, trouble=_TROUBLE)
    def elect_with_trouble(self, some: int, trouble: Trouble) -> None:
        master = self._master(some)
        master.elect_link.troubles = {"elect": trouble}
        self.elect(some)
        master.elect_link.troubles = {}

    @rule()
    def end_lead(self) -> None:
        self.stage.end_lead()

    @rule(some=_SOME)
    def a_master_crashes(self, some: int) -> None:
        name = MASTERS[some % len(MASTERS)]
        self.masters[name].crash()
        self.masters[name] = self.stage.master(name, **self.limits)

    @rule(some=_SOME)
    def sweep(self, some: int) -> None:
        self._master(some).sweep()

    @rule(some=_SOME)
    def reap(self, some: int) -> None:
        with contextlib.suppress(RedisTrouble):
            self._master(some).reap()

    @rule(some=_SOME, who=_SOME)
    def revoke(self, some: int, who: int) -> None:
        steps = self._master(some).dispatcher._steps
        if steps is not None and self.living:
            with contextlib.suppress(Exception):
                steps.revoke(self.living[who % len(self.living)].incarnation)

    @rule()
    def late_commands_arrive(self) -> None:
        links = [link for master in self.masters.values() for link in (master.link, master.elect_link)]
        for link in (*links, *(consumer.link for consumer in self.living), *self.ledger.dead_links):
            link.arrive(self.stage.link)

    # ---- consumers -----------------------------------------------------------------------------------------------------------

    def _consumer(self, some: int) -> ConsumerActor | None:
        return self.living[some % len(self.living)] if self.living else None

    @rule(some=_SOME)
    def register(self, some: int) -> None:
        name = NAMES[some % len(NAMES)]
        holder = self.ledger.holder(name)
        orphan = next((orphan for orphan in self.orphans if orphan.incarnation == holder), None)
        lock = f"boot:{name}" if orphan is not None and some % 2 else NO_LOCK
        if orphan is not None and lock != NO_LOCK:
            # A local restart holds the lock file of the dead process, and with it the proof.
            self.stage.link.call("HSET", self.stage.keys.consumers, name, self.ledger.with_lock(orphan, lock))
        try:
            consumer = self.stage.consumer(name, capacity=self.capacity, lock=lock)
        except NameInUse:
            assert holder, f"{name} is refused, and nobody holds it"
            return
        except RedisTrouble:
            return  # full memory
        assert not holder or lock != NO_LOCK, f"{name} was given away while {holder} holds it"
        self.orphans = [other for other in self.orphans if other is not orphan or lock == NO_LOCK]
        self.living.append(consumer)
        self.ledger.registered(consumer)

    @precondition(lambda self: self.living)
    @rule(some=_SOME)
    def register_again(self, some: int) -> None:
        consumer = self.living[some % len(self.living)]
        asked = consumer.registration.with_generation(0)
        if self.ledger.holder(asked.name) == consumer.incarnation:
            with contextlib.suppress(RedisTrouble):
                again = self.stage.members.register(asked)
                assert not again.created
                assert again.registration.incarnation == consumer.incarnation

    @precondition(lambda self: self.living)
    @rule(some=_SOME)
    def renew(self, some: int) -> None:
        consumer = self._consumer(some)
        if consumer is not None:
            lived = self.ledger.lease(consumer.incarnation)
            assert consumer.steps.renew(LEASE_MS).state == lived.decode()

    @precondition(lambda self: self.living)
    @rule(some=_SOME, trouble=st.sampled_from([None, None, "XREAD", "PIPELINE"]))
    def read(self, some: int, trouble: str | None) -> None:
        consumer = self.living[some % len(self.living)]
        consumer.read_link.troubles = {trouble: Trouble.REPLY_LOST} if trouble else {}
        with contextlib.suppress(RedisTrouble):
            consumer.read()
        consumer.read_link.troubles = {}

    @precondition(lambda self: self.living)
    @rule(some=_SOME, count=st.integers(1, 3))
    def start(self, some: int, count: int) -> None:
        consumer = self.living[some % len(self.living)]
        for _ in range(count):
            run = consumer.start()
            if run is not None:
                self.ledger.started(run, consumer)

    def _runs(self) -> list[Run]:
        return [run for consumer in self.living for run in consumer.runs]

    @precondition(lambda self: self._runs())
    @rule(some=_SOME, outcome=st.sampled_from(["ok", "ok", "ok", "fails", "gives up"]))
    def end(self, some: int, outcome: str) -> None:
        runs = self._runs()
        run = runs[some % len(runs)]
        if outcome == "ok":
            self.ledger.succeeds(run)
            run.succeed()
        else:
            self.ledger.may_die.add(run.message.stream_id)
            run.fail(GiveUp("never") if outcome == "gives up" else ValueError("not now"))

    @precondition(lambda self: self.living)
    @rule(some=_SOME)
    def work(self, some: int) -> None:
        """All that a consumer can do now."""
        consumer = self._consumer(some)
        if consumer is None:
            return
        with contextlib.suppress(RedisTrouble):
            consumer.read()
        while (run := consumer.start()) is not None:
            self.ledger.started(run, consumer)
            self.ledger.succeeds(run)
            run.succeed()
        self.flush(some)

    @precondition(lambda self: self.living)
    @rule(some=_SOME)
    def flush(self, some: int) -> None:
        consumer = self._consumer(some)
        if consumer is not None and not consumer.acker.is_flushed:
            with contextlib.suppress(RedisTrouble):
                consumer.flush()
            self.reports += consumer.reports()

    @precondition(lambda self: self.living)
    @rule(some=_SOME, step=st.sampled_from(["ack", "dead_letter"]), trouble=_TROUBLE)
    def flush_with_trouble(self, some: int, step: str, trouble: Trouble) -> None:
        consumer = self.living[some % len(self.living)]
        consumer.link.troubles = {step: trouble}
        self.flush(some)
        consumer.link.troubles = {}

    @precondition(lambda self: self.reports)
    @rule(some=_SOME, how=st.sampled_from(["now", "now", "twice", "late", "never", "to both"]))
    def report(self, some: int, how: str) -> None:
        if not self.reports:
            return
        at = some % len(self.reports)
        report = self.reports[at]
        if how != "late":
            del self.reports[at]
        if how != "never":
            targets = self.masters.values() if how == "to both" else [self._master(some)]
            for master in targets:
                for _ in range(2 if how == "twice" else 1):
                    master.dispatcher.post(Report(report.incarnation, report.items))

    # ---- ends of consumers ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.living)
    @rule(some=_SOME)
    def lease_ends(self, some: int) -> None:
        """A pause: it starts nothing more, but what runs may end, and what ended may be written, late."""
        consumer = self._consumer(some)
        if consumer is not None:
            consumer.stop_starting()
            self.stage.end_lease(consumer)

    @precondition(lambda self: self.living)
    @rule(some=_SOME, lease_goes_on=st.booleans())
    def a_consumer_crashes(self, some: int, lease_goes_on: bool) -> None:
        consumer = self.living.pop(some % len(self.living))
        self.ledger.dead_links.append(consumer.link)
        consumer.crash()
        if lease_goes_on and self.ledger.lease(consumer.incarnation):
            self.orphans.append(consumer)
        else:
            self.stage.end_lease(consumer)

    @precondition(lambda self: self.orphans)
    @rule(some=_SOME)
    def the_lease_of_a_dead_process_ends(self, some: int) -> None:
        self.stage.end_lease(self.orphans.pop(some % len(self.orphans)))

    @precondition(lambda self: self.living)
    @rule(some=_SOME)
    def begin_drain(self, some: int) -> None:
        consumer = self._consumer(some)
        if consumer is not None and not consumer.keeper.paused:
            with contextlib.suppress(RedisTrouble, OwnershipLost):
                consumer.begin_drain()

    def _draining(self, some: int) -> ConsumerActor | None:
        draining = [consumer for consumer in self.living if consumer.drains]
        return draining[some % len(draining)] if draining else None

    @precondition(lambda self: self._draining(0))
    @rule(some=_SOME)
    def give_back(self, some: int) -> None:
        consumer = self._draining(some)
        if consumer is not None:
            with contextlib.suppress(RedisTrouble, OwnershipLost):
                consumer.give_back()

    @precondition(lambda self: self._draining(0))
    @rule(some=_SOME)
    def leave(self, some: int) -> None:
        consumer = self._draining(some)
        if consumer is not None and not consumer.runs and consumer.acker.is_flushed:
            with contextlib.suppress(RedisTrouble, OwnershipLost):
                if consumer.deregister():
                    self.living.remove(consumer)
                    consumer.crash()

    # ---- behind everybody's back ---------------------------------------------------------------------------------------------

    @rule(some=_SOME)
    def a_body_is_deleted(self, some: int) -> None:
        pending = [row[0] for row in self.stage.world.pending_rows()]
        if pending:
            entry_id = pending[some % len(pending)]
            self.stage.link.call("XDEL", self.stage.keys.stream, entry_id)
            self.ledger.bodiless.add(entry_id)

    @rule()
    def nobody_has_touched_anything_for_a_while(self) -> None:
        for owner, ids in self.stage.world.pending().items():
            self.stage.world.make_idle_if_there(owner.decode(), 10 * LEASE_MS, *ids)

    @rule(some=_SOME)
    def a_stranger_takes_what_is_parked(self, some: int) -> None:
        parked = self.stage.world.pending().get(MASTER, [])
        if parked:
            entry_id = parked[some % len(parked)]
            self.stage.world.make_idle_if_there(STRANGER.decode(), 10 * LEASE_MS, entry_id)
            self.ledger.strange.add(self.ledger.ticket_of.get(entry_id))

    @rule()
    def scripts_are_flushed(self) -> None:
        self.stage.link.call("SCRIPT", "FLUSH")

    @rule(full=st.booleans())
    def memory(self, full: bool) -> None:
        self.stage.link.call("CONFIG", "SET", "maxmemory", 1 if full else 0)

    # ---- what is always so ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_promise_is_kept(self) -> None:
        self.ledger.check()

    def teardown(self) -> None:
        """When nothing goes wrong any more, everything that was ever sent is done or a dead letter."""
        try:
            if self.masters:
                self._finish()
        finally:
            self.stage.link.call("CONFIG", "SET", "maxmemory", 0)
            for actor in (*self.masters.values(), *self.living):
                actor.close()
            self.stage.__exit__()

    def _finish(self) -> None:
        stage = self.stage
        stage.link.call("CONFIG", "SET", "maxmemory", 0)
        self.late_commands_arrive()
        for consumer in (*self.living, *self.orphans):
            consumer.crash()
            stage.end_lease(consumer)
        self.nobody_has_touched_anything_for_a_while()
        stage.end_lead()
        last, worker = stage.leader("m3", reconcile_s=0.0), stage.consumer("z")
        self.ledger.registered(worker)
        for _ in range(60):
            last.settle(turns=1)
            worker.read()
            while (run := worker.start()) is not None:
                self.ledger.started(run, worker)
                self.ledger.succeeds(run)
                run.succeed()
            worker.flush()
            last.turn(*worker.reports())
            self.ledger.check()
            if self.ledger.is_over():
                break
            last.sweep()
        self.ledger.check_the_end(last)


@pytest.mark.timeout(900)
def test_the_promise_is_kept_whatever_happens(redis_url: str) -> None:
    is_long = settings.get_current_profile_name() == "long"
    examples, steps = (2000, 60) if is_long else (25, 40)
    run_state_machine_as_test(
        lambda: ProtocolMachine(redis_url),
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)),
    )
