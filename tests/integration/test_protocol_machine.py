"""Anything may happen in any order, on a real Redis, and the promise is kept: checked after every step.

Masters and consumers are the real objects of both programs, without threads (see actors.py). What an example does
between two of its steps cannot be interrupted, so a master's turn also says what others do between the calls of that
turn. No rule has a precondition: what can be drawn must not depend on what a server did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.integration.actors import ConsumerActor, MasterActor, Run, Stage, Trouble, TroubledLink
from tests.integration.factories import FIELD, LEASE_MS
from tests.integration.ledger import Ledger
from tests.integration.strangers import Strangers
from usher.common.base.clock import moment_ns
from usher.common.base.errors import Fenced, GiveUp, OwnershipLost, RedisTrouble, RetryLater
from usher.common.protocol.registration import NO_LOCK
from usher.common.redis.client import Link
from usher.common.redis.replies import pack_entry, pack_part, pack_parts, pairs, parse_record
from usher.consumer.execution import executor
from usher.master.dispatch.events import Report
from usher.master.membership.registry import NameInUse

TICKETS = [b"T1", b"T2", b"T3"]
NAMES = ["a", "b", "c"]
MASTERS = ["m1", "m2"]
UNUSABLE = [("text", "no ticket"), (FIELD, ""), (FIELD, b"\xff\xfe")]
#: Steps of a leader whose replies may be lost.
LEADER_STEPS = [
    "read", "hand_over", "hand_over", "take_back", "sweep", "reject", "HMGET",
]  # fmt: skip
_SOME = st.integers(0, 30)  # chooses among what is there
_TICKETS = st.lists(st.sampled_from(TICKETS), max_size=5)
#: Usually something goes on when something goes wrong.
_BUSY = st.one_of(st.just([]), *[st.lists(st.sampled_from(TICKETS), min_size=1, max_size=4)] * 3)
_TROUBLE = st.sampled_from(Trouble)
_MEANWHILE = [
    "flush", "lease_ends", "renew", "begin_drain", "give_back", "leave", "register", "end_lead", "elect",
    "late_commands_arrive", "report", "work", "stranger_reads", "delete_unread", "send_one", "listen",
]  # fmt: skip
#: (before which call of the turn, what, some).
_MOVES = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(_MEANWHILE), _SOME), max_size=3)
_LIFE = [
    "register", "register", "register_again", "renew", "lease_ends", "crash", "crash_and_lease_ends",
    "lease_of_the_dead_ends", "revoke",
]  # fmt: skip
_LEAD = ["elect", "end_lead", "master_crashes", "leader_crashes", "late_commands_arrive", "several_turns"]
_BEHIND = [
    *("sweep", "reap", "long_silence", "stranger_takes_parked", "stranger_reads", "delete_body", "delete_unread"),
    *("flush_scripts", "full_memory", "send_unusable"),
]

Moves = list[tuple[int, str, int]]


class ProtocolMachine(Strangers, RuleBasedStateMachine):
    """Rules say what happens; the actions below them, all of one argument, do it."""

    def __init__(self, url: str) -> None:
        super().__init__()
        link = Link(url, "test:flush")
        link.call("CONFIG", "SET", "maxmemory", 0)
        link.call("FLUSHALL")
        link.call("SCRIPT", "FLUSH")  # what must be sent again is part of an example
        link.close()
        self.stage = Stage(url)
        self.ledger = Ledger(self.stage)
        self.masters: dict[str, MasterActor] = {}
        self.living: list[ConsumerActor] = []  # processes; their lease may have ended
        self.orphans: list[ConsumerActor] = []  # dead processes whose lease goes on
        self.reports: list[Report] = []
        self.limits: dict[str, Any] = {}
        self.capacity = 100

    # ---- rules ---------------------------------------------------------------------------------------------------------------

    @initialize(
        batch=st.sampled_from([1, 3, 100]),
        window=st.sampled_from([1, 2, 100]),
        reconcile_s=st.sampled_from([0.0, 1e9]),
        capacity=st.sampled_from([1, 3, 100]),
        consumers=st.integers(1, 3),
    )
    def begin(self, batch: int, window: int, reconcile_s: float, capacity: int, consumers: int) -> None:
        self.limits = {"batch": batch, "window": window, "reconcile_s": reconcile_s}
        self.capacity = capacity
        for name in MASTERS:
            self.masters[name] = self.stage.master(name, **self.limits)
        for number in range(consumers):
            self.register(number)
        self.elect(0)

    @rule(tickets=_TICKETS, some=_SOME, moves=_MOVES, looks=st.booleans(), listens=st.booleans())
    def messages_come_and_a_master_turns(
        self, tickets: list[bytes], some: int, moves: Moves, looks: bool, listens: bool
    ) -> None:
        self._send(tickets)
        master = self._master(some)
        if listens:
            master.listen()
        if looks:
            master.look()
        with self._meanwhile(master.link, moves):
            master.turn()
            master.turn()

    @rule(
        tickets=_TICKETS,
        some=_SOME,
        step=st.sampled_from(LEADER_STEPS),
        trouble=_TROUBLE,
        moves=_MOVES,
        listens=st.booleans(),
    )
    def a_master_turns_and_loses_a_reply(
        self, tickets: list[bytes], some: int, step: str, trouble: Trouble, moves: Moves, listens: bool
    ) -> None:
        self._send(tickets)
        master = self._master(some)
        if listens:
            master.listen()
        master.look()
        master.link.troubles = {step: trouble}
        with self._meanwhile(master.link, moves):
            master.turn()
            master.turn()
        master.link.troubles = {}

    @rule(
        some=_SOME,
        count=st.integers(0, 4),
        trouble=st.sampled_from([None, None, None, "XREAD", "PIPELINE"]),
        meanwhile=st.sampled_from(["", "", "several_turns", "lease_ends", "usurp"]),
    )
    def a_consumer_reads_and_starts(self, some: int, count: int, trouble: str | None, meanwhile: str) -> None:
        consumer = self._consumer(some)
        if consumer is None:
            return
        consumer.read_link.troubles = {trouble: Trouble.REPLY_LOST} if trouble else {}
        with (
            contextlib.suppress(RedisTrouble),
            self._meanwhile(consumer.read_link, [(1, meanwhile, some)] if meanwhile else []),
        ):
            consumer.read()
        consumer.read_link.troubles = {}
        for _ in range(count):
            run = consumer.start()
            if run is not None:
                self.ledger.started(run, consumer)

    @rule(
        ends=st.lists(st.tuples(_SOME, st.sampled_from(["ok", "ok", "ok", "fails", "waits", "gives up"])), max_size=4)
    )
    def handlers_end(self, ends: list[tuple[int, str]]) -> None:
        for some, outcome in ends:
            runs: list[Run] = [run for consumer in self.living for run in consumer.runs]
            if not runs:
                return
            run = runs[some % len(runs)]
            if outcome == "ok":
                self.ledger.succeeds(run)
                run.succeed()
            elif outcome == "waits":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(executor, "PUT_OFF_S", 0.0)  # the ticket leaves, and is due at once
                    run.fail(RetryLater(0.0))
            else:
                self.ledger.may_die.add(run.message.stream_id)
                run.fail(GiveUp("never") if outcome == "gives up" else ValueError("not now"))

    @rule(
        some=_SOME,
        step=st.sampled_from(["ack", "dead_letter", "give_back", "give_back"]),
        trouble=st.sampled_from([None, None, *Trouble]),
    )
    def a_consumer_writes(self, some: int, step: str, trouble: Trouble | None) -> None:
        consumer = self._consumer(some)
        if consumer is not None:
            consumer.link.troubles = {step: trouble} if trouble else {}
            self.flush(some)
            consumer.link.troubles = {}

    @rule(some=_SOME, busy=_BUSY, is_old=st.booleans(), trouble=st.sampled_from([None, None, *Trouble]), reads=_SOME)
    def a_ticket_is_recalled(
        self, some: int, busy: list[bytes], is_old: bool, trouble: Trouble | None, reads: int
    ) -> None:
        """Whoever asked, and whatever has become of the ticket since."""
        self._keep_busy(busy)
        owned = {consumer.name: consumer for consumer in self.living if self.ledger.lease(consumer.incarnation)}
        index = pairs(self.stage.link.call("HGETALL", self.stage.keys.tickets))
        mine = [
            (owned[record.owner], ticket, record)
            for ticket, value in sorted(index.items())
            if (record := parse_record(value)).owner in owned
        ]
        if not mine:
            return
        consumer, ticket, record = mine[some % len(mine)]
        part = pack_part(ticket, b"%d" % (record.fence - is_old), [pack_entry((one,)) for one in record.ids])
        self.stage.link.call("XADD", self.stage.keys.inbox(consumer.incarnation), "*", "recall", pack_parts([part]))
        if reads % 3:
            with contextlib.suppress(RedisTrouble):
                consumer.read()
        if reads % 2:
            consumer.link.troubles = {"give_back": trouble} if trouble else {}
            self.flush(self.living.index(consumer))
            consumer.link.troubles = {}

    @rule(some=_SOME, how=st.sampled_from(["now", "now", "twice", "late", "never", "to both"]))
    def a_report_comes(self, some: int, how: str) -> None:
        if self.reports:
            report = self.reports[some % len(self.reports)]
            if how != "late":
                self.reports.remove(report)
            targets = (
                [] if how == "never" else list(self.masters.values()) if how == "to both" else [self._master(some)]
            )
            for master in targets * (2 if how == "twice" else 1):
                master.dispatcher.post(Report(report.incarnation, report.items, wants_answers=how == "twice"))

    @rule(what=st.sampled_from(_LIFE), some=_SOME, busy=_BUSY)
    def consumers_come_and_go(self, what: str, some: int, busy: list[bytes]) -> None:
        self._keep_busy(busy)
        self._do(what, some)

    @rule(what=st.sampled_from(["begin_drain", "give_back", "give_back", "leave"]), some=_SOME, busy=_BUSY)
    def a_consumer_drains(self, what: str, some: int, busy: list[bytes]) -> None:
        self._keep_busy(busy)
        self._do(what, some)

    @rule(what=st.sampled_from(_LEAD), some=_SOME, trouble=st.sampled_from([None, None, *Trouble]))
    def the_lead_changes(self, what: str, some: int, trouble: Trouble | None) -> None:
        for master in self.masters.values():
            master.elect_link.troubles = {"elect": trouble} if trouble else {}
        self._do(what, some)
        for master in self.masters.values():
            master.elect_link.troubles = {}

    @rule(what=st.sampled_from(_BEHIND), some=_SOME, busy=_BUSY)
    def something_else_happens(self, what: str, some: int, busy: list[bytes]) -> None:
        self._keep_busy(busy)
        self._do(what, some)

    @invariant()
    def the_promise_is_kept(self) -> None:
        self.ledger.check()

    # ---- choosing ------------------------------------------------------------------------------------------------------------

    def _do(self, what: str, some: int) -> None:
        action: Callable[[int], None] = getattr(self, what)
        with contextlib.suppress(RedisTrouble, OwnershipLost, Fenced):
            action(some)

    def _master(self, some: int) -> MasterActor:
        """Mostly the one that believes that it leads."""
        leads = [master for master in self.masters.values() if master.lead.epoch is not None]
        return leads[-1] if leads and some % 4 else self.masters[MASTERS[some % len(MASTERS)]]

    def _consumer(self, some: int) -> ConsumerActor | None:
        return self.living[some % len(self.living)] if self.living else None

    def _busy(self, some: int) -> ConsumerActor | None:
        """One whose handlers run, if there is one."""
        busy = [consumer for consumer in self.living if consumer.runs]
        return busy[some % len(busy)] if busy else self._consumer(some)

    def _draining(self, some: int) -> ConsumerActor | None:
        draining = [consumer for consumer in self.living if consumer.drains]
        return draining[some % len(draining)] if draining else None

    @contextlib.contextmanager
    def _meanwhile(self, link: TroubledLink, moves: Moves) -> Iterator[None]:
        """Let others move before the n-th call on a master's link."""
        calls = 0

        def before(step: str) -> None:
            nonlocal calls
            now = [(name, some) for at, name, some in moves if at == calls]
            calls += 1
            for name, some in now:
                self._do(name, some)

        link.before = before
        try:
            yield
        finally:
            link.before = lambda step: None

    # ---- actions: producers, masters -----------------------------------------------------------------------------------------

    def _send(self, tickets: list[bytes]) -> None:
        for ticket in tickets:
            with contextlib.suppress(RedisTrouble):
                [entry_id] = self.stage.send(ticket)
                self.ledger.sent(entry_id, ticket)

    def send_unusable(self, some: int) -> None:
        self.ledger.sent(self.stage.world.add(self.ledger.next_id(), *UNUSABLE[some % len(UNUSABLE)]), None)

    def _keep_busy(self, tickets: list[bytes]) -> None:
        """Messages come, are handed over, and start; so that what goes wrong goes wrong in the middle of something."""
        if tickets:
            if not any(self.ledger.lease(consumer.incarnation) == b"live" for consumer in self.living):
                self._do("register", len(tickets))
            self._send(tickets)
            self._do("several_turns", 1)
            for consumer in self.living:
                with contextlib.suppress(RedisTrouble):
                    consumer.read()
                if (run := consumer.start()) is not None:
                    self.ledger.started(run, consumer)

    def listen(self, some: int) -> None:
        self._master(some).listen()

    def several_turns(self, some: int) -> None:
        self._master(some).settle(turns=3)

    def elect(self, some: int) -> None:
        self._master(some).elect()

    def end_lead(self, some: int) -> None:
        self.stage.end_lead()

    def master_crashes(self, some: int) -> None:
        name = MASTERS[some % len(MASTERS)]
        crashed = self.masters[name]
        self.ledger.dead_links += [crashed.link, crashed.elect_link]
        crashed.crash()
        self.masters[name] = self.stage.master(name, **self.limits)

    def leader_crashes(self, some: int) -> None:
        self.master_crashes(some)
        self.stage.end_lead()
        self.elect(some)

    def usurp(self, some: int) -> None:
        """The lead passes to another master, and it begins at once."""
        self.stage.end_lead()
        usurper = self.masters[MASTERS[some % len(MASTERS)]]
        if usurper.lead.epoch is None:
            usurper.look()
            usurper.turn()

    def sweep(self, some: int) -> None:
        self._master(some).sweep()

    def reap(self, some: int) -> None:
        self._master(some).reap()

    def late_commands_arrive(self, some: int) -> None:
        links = [link for master in self.masters.values() for link in (master.link, master.elect_link)]
        for link in (*links, *(consumer.link for consumer in self.living), *self.ledger.dead_links):
            link.arrive(self.stage.link)

    def revoke(self, some: int) -> None:
        steps, consumer = self._master(some).dispatcher._steps, self._consumer(some)
        if steps is not None and consumer is not None:
            steps.revoke(consumer.incarnation)

    # ---- actions: consumers --------------------------------------------------------------------------------------------------

    def register(self, some: int) -> None:
        name = NAMES[some % len(NAMES)]
        holder = self.ledger.holder(name)
        dead = next((orphan for orphan in self.orphans if orphan.incarnation == holder), None)
        is_local = some % 2 > 0 and (
            dead is not None or not holder
        )  # the lock file of the name is free, and this process takes it
        try:
            consumer = self.stage.consumer(
                name, capacity=self.capacity, lock=f"boot:1:1{some % len(NAMES)}:{moment_ns()}" if is_local else NO_LOCK
            )
        except NameInUse:
            assert holder, f"{name} is refused, and nobody holds it"
            return
        assert not holder or is_local, f"{name} was given away while {holder} holds it"
        self.orphans = [other for other in self.orphans if other is not dead]
        self.living.append(consumer)
        self.ledger.registered(consumer)

    def register_again(self, some: int) -> None:
        consumer = self._consumer(some)
        if consumer is None or self.ledger.holder(consumer.registration.name) != consumer.incarnation:
            return
        if self.ledger.lease(consumer.incarnation) == b"live":
            again = self.stage.members.register(replace(consumer.registration, generation=0))
            assert not again.created, "the same process got a second generation"
            assert again.registration.incarnation == consumer.incarnation

    def renew(self, some: int) -> None:
        consumer = self._consumer(some)
        if consumer is not None:
            lived = self.ledger.lease(consumer.incarnation)
            assert consumer.steps.renew(LEASE_MS)[0] == lived.decode()

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

    def flush(self, some: int) -> None:
        consumer = self._consumer(some)
        if consumer is not None and not consumer.acker.is_flushed:
            with contextlib.suppress(RedisTrouble):
                consumer.flush()
            self.reports += consumer.reports()

    def report(self, some: int) -> None:
        if self.reports:
            self._master(some).dispatcher.post(self.reports.pop(some % len(self.reports)))

    def lease_ends(self, some: int) -> None:
        """A pause: it starts nothing more, but what runs may end, and what ended may be written, late."""
        consumer = self._busy(some)
        if consumer is not None:
            consumer.stop_starting()
            self.stage.end_lease(consumer)

    def crash(self, some: int) -> ConsumerActor | None:
        consumer = self._busy(some)
        if consumer is not None:
            self.living.remove(consumer)
            self.ledger.dead_links.append(consumer.link)
            consumer.crash()
            if self.ledger.lease(consumer.incarnation):
                self.orphans.append(consumer)
        return consumer

    def crash_and_lease_ends(self, some: int) -> None:
        crashed = self.crash(some)
        if crashed is not None:
            self.stage.end_lease(crashed)
            self.orphans = [orphan for orphan in self.orphans if orphan is not crashed]

    def lease_of_the_dead_ends(self, some: int) -> None:
        if self.orphans:
            self.stage.end_lease(self.orphans.pop(some % len(self.orphans)))

    def begin_drain(self, some: int) -> None:
        consumer = self._busy(some)
        if consumer is not None and not consumer.drains:
            consumer.begin_drain()

    def give_back(self, some: int) -> None:
        consumer = self._draining(some)
        if consumer is not None:
            consumer.give_back()

    def leave(self, some: int) -> None:
        consumer = self._draining(some)
        if consumer is not None and not consumer.runs and consumer.acker.is_flushed and consumer.deregister():
            self.living.remove(consumer)
            consumer.crash()

    # ---- actions: behind everybody's back ------------------------------------------------------------------------------------

    def send_one(self, some: int) -> None:
        self._send([TICKETS[some % len(TICKETS)]])

    def flush_scripts(self, some: int) -> None:
        self.stage.link.call("SCRIPT", "FLUSH")

    def full_memory(self, some: int) -> None:
        """Who is done must be able to say so; nothing new is begun."""
        self._send(TICKETS)
        self.stage.link.call("CONFIG", "SET", "maxmemory", 1)
        self.several_turns(some)
        for number in range(len(self.living)):
            for what in ("work", "renew", "give_back", "leave"):
                self._do(what, number)
        for what in ("register", "reap", "elect", "sweep"):
            self._do(what, some)
        self.stage.link.call("CONFIG", "SET", "maxmemory", 0)

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """When nothing goes wrong any more, everything that was ever sent is done or a dead letter."""
        try:
            self.stage.link.call("CONFIG", "SET", "maxmemory", 0)
            if self.masters:
                self._finish()
        finally:
            self.stage.__exit__()

    def _finish(self) -> None:
        stage = self.stage
        self.late_commands_arrive(0)
        for consumer in (*self.living, *self.orphans):
            consumer.crash()
            stage.end_lease(consumer)
        self.long_silence(0)
        stage.end_lead()
        last, worker = stage.leader("m3", reconcile_s=0.0), stage.consumer("z")
        self.ledger.registered(worker)
        self.living = [worker]
        for _ in range(60):
            last.settle(turns=1)
            self.work(0)
            last.turn(*self.reports)
            self.reports.clear()
            self.ledger.check()
            if self.ledger.is_over():
                break
            last.sweep()
        last.settle(turns=2)
        last.reap()  # what was noted of messages that lost their bodies goes with the janitor
        self.ledger.check_the_end(last)


@pytest.mark.timeout(7200)
def test_the_promise_is_kept_whatever_happens(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "usher.master.dispatch.stream_cursor._SAVE_POSITION_S", 0.0
    )  # a turn must not depend on the clock: examples are run again
    is_long = settings.get_current_profile_name() == "long"  # registered in tests/conftest.py
    size = settings.default if is_long else settings(max_examples=25, stateful_step_count=40)
    run_state_machine_as_test(
        lambda: ProtocolMachine(redis_url),
        settings=settings(size, deadline=None, suppress_health_check=list(HealthCheck)),
    )


def test_every_move_is_there() -> None:
    """A turn goes on after whatever fails in it, so that one which is missing would not be noticed."""
    assert [name for name in [*_MEANWHILE, *_LIFE, *_LEAD, *_BEHIND] if not hasattr(ProtocolMachine, name)] == []
