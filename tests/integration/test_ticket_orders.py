"""Orders of operators about a ticket's first message (order.lua): given by any master or command, carried out by who has
the ticket, and refused where they make no sense; on a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.integration.actors import ConsumerActor, MasterActor, Run, Stage
from tests.integration.memory import full_memory
from tests.integration.test_charge import attempts
from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import GiveUp, RetryLater
from usher.common.protocol.attempts import GIVEN_UP
from usher.common.protocol.ticket_states import RETURNED, is_waiting
from usher.common.redis.client import Link
from usher.common.redis.replies import Order
from usher.common.runtime.settings import CommonSettings
from usher.consumer.policy.outcome import RetryPolicy, TicketPace
from usher.consumer.web import describe_ticket
from usher.master.membership.consumer_http import read_answer
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.explain import OwnerTold
from usher.master.policy.rules import Rule, RuleAction, Target
from usher.master.policy.ticket_orders import TicketOrder, plan_order
from usher.master.verbs.view import OrderResult, View

T = b"T"
RETRY, GIVE_UP, CANCEL = TicketOrder.RETRY, TicketOrder.GIVE_UP, TicketOrder.CANCEL


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


class Desk:
    """An operator's desk: it explains, as masters do, by asking the owner, and gives orders."""

    def __init__(self, stage: Stage) -> None:
        self.link = Link(stage.url, "test:orders")
        self.keys = stage.keys
        self.owner: ConsumerActor | None = None
        view = View(CommonSettings(), self.link, stage.keys, ask_owner=lambda url, ticket_id: self._told(ticket_id))
        self.view = view.acting(By("alice", "cli", "why"))

    def _told(self, ticket_id: str) -> OwnerTold | None:
        if self.owner is None:
            return None
        here = self.owner
        told = describe_ticket(ticket_id.encode(), here.incarnation, here.journal, here.lanes, 3)
        return read_answer(orjson.dumps(told), wall_ms())

    def explain(self, ticket_id: str) -> dict[str, Any]:
        return self.view.explain(ticket_id)

    def give(self, order: TicketOrder, ticket_id: str = "T") -> OrderResult:
        return self.view.give(order, ticket_id)

    def preview(self, order: TicketOrder) -> OrderResult:
        return self.view.preview(order, "T")


@pytest.fixture
def desk(stage: Stage) -> Iterator[Desk]:
    made = Desk(stage)
    yield made
    made.link.close()


@pytest.fixture
def leader(stage: Stage) -> MasterActor:
    return stage.leader()


def consumer(stage: Stage, leader: MasterActor, desk: Desk, name: str = "a", **settings: Any) -> ConsumerActor:
    made = stage.consumer(name, **settings)
    made.executor.all_wait_here = True  # as one that waits for a moment only
    leader.settle()
    desk.owner = made
    return made


def started(actor: ConsumerActor) -> Run:
    for _ in range(3):
        if (run := actor.start()) is not None:
            return run
    raise AssertionError("nothing starts")


def running(stage: Stage, leader: MasterActor, desk: Desk, folder: Path) -> ConsumerActor:
    """A consumer that runs the one message of T, with a journal."""
    a = consumer(stage, leader, desk, journal=folder / "a.journal")
    stage.send(T, b"1-1")
    leader.settle()
    a.read()
    started(a)
    return a


def paused(stage: Stage) -> str:
    """The id of a rule that pauses T."""
    rule = Rule(Target.TICKET, "T", RuleAction.PAUSE)
    changed = LiveRules(stage.link, stage.keys).set(rule, By("alice", "cli"))
    assert changed.rule is not None
    return changed.rule.id


def waiting(stage: Stage, leader: MasterActor, actor: ConsumerActor, after_s: float = 300.0) -> list[bytes]:
    """Two messages of T, the first of which has asked to be called again much later."""
    ids = stage.send(T, b"1-1", b"2-1")
    leader.settle()
    actor.read()
    started(actor).fail(RetryLater(after_s=after_s))
    actor.flush()
    assert actor.start() is None
    return ids


def test_what_is_asked_twice_is_done_once(stage: Stage, leader: MasterActor, desk: Desk) -> None:
    """As after a lost reply; 3,000 a second of an impatient producer stopped all hand-overs of that consumer."""
    a = consumer(stage, leader, desk)
    obeyed, obey = list[Order](), a.reader.on_order
    a.reader.on_order = lambda order: (obeyed.append(order), obey(order))[1]
    waiting(stage, leader, a)
    assert [desk.give(RETRY).outcome for _ in range(2)] == ["asked", "asked"]
    a.read()
    assert len(obeyed) == 1
    run = started(a)
    a.read()
    assert a.start() is None, "one of a ticket at a time"
    run.succeed()
    started(a).succeed()


@pytest.mark.parametrize("problem", [RetryLater(after_s=300), ValueError("x")], ids=["later", "error"])
def test_what_runs_is_given_up_only_when_its_run_has_failed(
    stage: Stage, leader: MasterActor, desk: Desk, problem: Exception
) -> None:
    a = consumer(stage, leader, desk, policy="halt")
    first, second = stage.send(T, b"1-1", b"2-1")
    leader.settle()
    a.read()
    run = started(a)
    assert "if the run that is under way on a fails" in desk.give(GIVE_UP).note
    a.read()
    a.flush()
    assert stage.world.dead() == []
    assert a.start() is None
    run.fail(problem)
    a.flush()
    assert stage.world.state().letters() == [(first, T, b"operator")]
    assert started(a).message.stream_id == second


def test_a_run_that_succeeds_is_a_success(stage: Stage, leader: MasterActor, desk: Desk) -> None:
    a = consumer(stage, leader, desk)
    stage.send(T, b"1-1")
    leader.settle()
    a.read()
    run = started(a)
    desk.give(GIVE_UP)
    a.read()
    run.succeed()
    a.flush()
    assert (stage.world.dead(), stage.world.pending(), attempts(stage.world)) == ([], {}, {})


def test_what_nobody_has_is_given_up_by_who_gets_it(stage: Stage, leader: MasterActor, desk: Desk) -> None:
    """A paused ticket, which the leader has read."""
    a = consumer(stage, leader, desk)
    rule = paused(stage)
    leader.settle()
    first, second = stage.send(T, b"1-1", b"2-1")
    leader.settle()
    given = desk.give(GIVE_UP)
    assert (given.outcome, given.message_id, given.consumer) == ("done", "1-1", None)
    assert stage.world.dead() == []
    LiveRules(stage.link, stage.keys).lift(rule, By("alice", "cli"))
    leader.settle()
    a.read()
    assert a.start() is None
    a.flush()
    assert stage.world.state().letters() == [(first, T, b"operator")]
    run = started(a)
    assert run.message.stream_id == second
    run.succeed()


def test_what_was_given_up_stays_so_when_its_owner_is_lost(stage: Stage, leader: MasterActor, desk: Desk) -> None:
    a = consumer(stage, leader, desk)
    first, second = waiting(stage, leader, a)
    assert desk.give(GIVE_UP).outcome == "asked"
    a.crash()  # it never read the order
    stage.end_lease(a)
    leader.settle()
    b = consumer(stage, leader, desk, "b")
    b.read()
    assert b.start() is None
    b.flush()
    assert stage.world.state().letters() == [(first, T, b"operator")]
    assert started(b).message.stream_id == second


@pytest.mark.parametrize("order", [RETRY, GIVE_UP])
def test_a_ticket_that_waits_in_redis_goes_on_at_once(
    stage: Stage, leader: MasterActor, desk: Desk, order: TicketOrder
) -> None:
    a = consumer(stage, leader, desk)
    a.executor.all_wait_here = False
    waiting(stage, leader, a)
    leader.settle()
    record = stage.world.record(T)
    assert record is not None
    assert is_waiting(record.owner)
    assert [desk.preview(one).outcome for one in TicketOrder] == ["planned"] * 2 + ["refused"] * 3
    assert desk.give(order).outcome == "done"
    stage.finish(leader, [a])
    ran = [b"1-1"] if order is RETRY else []
    assert stage.history.ids(T) == [b"1-1", *ran, b"2-1"]
    assert len(stage.world.dead()) == (order is GIVE_UP)
    assert (stage.world.pending(), attempts(stage.world)) == ({}, {})


def test_orders_that_make_no_sense_are_refused_and_change_nothing(
    stage: Stage, leader: MasterActor, desk: Desk
) -> None:
    assert desk.give(GIVE_UP).note.startswith("nothing of it can be given up: the ticket has nothing unread")
    a = consumer(stage, leader, desk)
    stage.send(T, b"1-1")
    leader.settle()
    a.read()
    with stage.world.unchanged():
        assert desk.give(CANCEL).note.startswith("nothing of it runs: ")
        assert desk.give(RETRY).note.startswith("nothing of it waits for its next attempt: ")
    run = started(a)
    with stage.world.unchanged():
        assert desk.give(RETRY).outcome == "refused"
    run.succeed()


def test_a_ticket_that_has_moved_since_is_left_alone(stage: Stage, leader: MasterActor, desk: Desk) -> None:
    """The losing side: another owner has it by now, or its first message has ended."""
    a = consumer(stage, leader, desk)
    waiting(stage, leader, a)
    planned = plan_order(RETRY, desk.view._in_processing("T"), desk.explain("T"))
    stage.link.call("HSET", stage.keys.tickets, T, "b:7 99 1-1 2-1")
    with stage.world.unchanged():
        assert desk.view._run(RETRY, "T", planned) == "MOVED"
    stage.link.call("HSET", stage.keys.tickets, T, planned.believed + b" 2-1")
    with stage.world.unchanged():
        assert desk.view._run(RETRY, "T", planned) == "MOVED"
    stage.link.call("HSET", stage.keys.tickets, T, planned.believed + b" 1-1 2-1")
    stage.end_lease(a)
    with stage.world.unchanged():
        assert desk.view._run(GIVE_UP, "T", planned) == "LOST", "no inbox is made for who is dead"
    assert desk.give(RETRY).note.startswith("the ticket moves")


def test_a_message_is_given_up_when_memory_is_full(stage: Stage, leader: MasterActor, desk: Desk) -> None:
    consumer(stage, leader, desk)
    paused(stage)
    leader.settle()
    stage.send(T, b"1-1")
    leader.settle()
    with full_memory(stage.world.link):
        assert desk.give(GIVE_UP).outcome == "done"
    assert attempts(stage.world)[b"1-1"].failures == GIVEN_UP


def test_messages_of_a_ticket_start_at_the_handlers_pace_while_others_go_on(
    stage: Stage, leader: MasterActor, desk: Desk
) -> None:
    a = consumer(stage, leader, desk)
    a.executor.pace = TicketPace(0.01)
    stage.send(T, b"1-1", b"2-1")
    stage.send(b"U", b"3-1")
    leader.settle()
    a.read()
    for entry_id in (b"1-1", b"3-1"):
        run = started(a)
        assert run.message.stream_id == entry_id
        run.succeed()
    assert (a.start(), a.start()) == (None, None)
    a.flush()
    told = desk.explain("T")
    assert told["reasons"][0]["code"] == "handler_rate"
    assert 90_000 < told["until_ms"] - wall_ms() <= 100_000
    assert stage.world.pending() == {a.name: [b"2-1"]}


def test_a_backoff_is_cut_short_too(stage: Stage, leader: MasterActor, desk: Desk) -> None:
    a = consumer(stage, leader, desk)
    a.executor.policy = RetryPolicy(3, 600.0, 600.0)
    stage.send(T, b"1-1")
    leader.settle()
    a.read()
    started(a).fail(ValueError("x"))
    a.flush()
    due_s = a.lanes.next_due_s()
    assert due_s is not None
    assert due_s > now_s()
    desk.give(RETRY)
    a.read()
    started(a).succeed()


def test_what_is_given_up_while_its_failure_is_on_its_way_stays_so(
    stage: Stage, leader: MasterActor, desk: Desk
) -> None:
    """The order crosses what its owner is about to write: the failure is written after the order, and the ticket was given back until a time when the order is read."""
    a = stage.consumer()
    leader.settle()
    first, second = stage.send(T, b"1-1", b"2-1")
    leader.settle()
    a.read()
    started(a).fail(RetryLater(after_s=300))
    assert desk.give(GIVE_UP).outcome == "asked"
    a.flush()
    a.read()
    record = stage.world.record(T)
    assert record is not None
    assert record.owner == RETURNED, "it does not wait for a handler that will not be called"
    assert attempts(stage.world)[first].is_given_up
    stage.finish(leader, [a])
    assert stage.world.state().letters() == [(first, T, b"operator")]
    assert stage.history.ids(T) == [first, second]


def test_a_suspect_that_is_given_up_while_its_child_process_starts_is_not_called(
    stage: Stage, leader: MasterActor, desk: Desk
) -> None:
    a = consumer(stage, leader, desk)
    stage.send(T, b"1-1")
    leader.settle()
    a.read()
    lane = a.lanes.next_lane(1.0)
    assert lane is not None
    message = a.executor.next_message(lane)
    assert message is not None
    assert desk.give(GIVE_UP).outcome == "asked"
    a.read()
    assert not a.executor.admit_apart(lane, message)
    stage.finish(leader, [a])
    assert stage.world.state().letters() == [(b"1-1", T, b"operator")]


def test_an_order_about_a_ticket_that_is_not_here_any_more_finds_nothing_to_do(
    stage: Stage, leader: MasterActor, desk: Desk
) -> None:
    """It waited for a retry when its last acknowledgement was refused: another owner had it. Its lane is empty."""
    a = stage.consumer()
    leader.settle()
    stage.send(T, b"1-1")
    leader.settle()
    a.read()
    run = started(a)
    fence = run.message.fence
    run.fail(RetryLater(after_s=1.0))
    assert desk.give(RETRY).outcome == "asked"
    with a.lanes.lock:
        a.lanes.forget(T, fence)
    a.read()
    assert a.start() is None


def test_a_halted_message_that_an_operator_gave_up_is_an_ordinary_one_when_it_is_redriven(
    stage: Stage, leader: MasterActor, desk: Desk
) -> None:
    """The order came while its letter was on its way. A redriven message keeps its id: the order is over."""
    a = consumer(stage, leader, desk, policy="halt")
    stage.send(T, b"1-1")
    leader.settle()
    a.read()
    started(a).fail(GiveUp("it cannot be done"))
    desk.give(GIVE_UP)
    a.read()
    a.flush()
    assert [reason for _, _, reason in stage.world.state().letters()] == [b"gave_up"]
    DeadLetters(stage.link, stage.keys).redrive(stage.world.letter_ids())
    leader.settle()
    a.read()
    started(a).fail(ValueError("x"))
    a.flush()
    assert stage.world.dead() == []
    started(a).succeed()


def test_a_halted_ticket_goes_on_by_a_retry_where_somebody_has_deleted_its_letter(
    stage: Stage, leader: MasterActor, desk: Desk
) -> None:
    a = consumer(stage, leader, desk, policy="halt")
    ids = stage.send(T, b"1-1", b"2-1")
    leader.settle()
    a.read()
    started(a).fail(GiveUp("it cannot be done"))
    a.flush()
    leader.settle()
    assert desk.give(RETRY).outcome == "refused", "its letter is there: redrive it"
    stage.link.call("DEL", stage.keys.letters)
    assert desk.give(RETRY).outcome == "refused", "the index does not have all letters"
    stage.link.call("XDEL", stage.keys.dead, *stage.world.letter_ids())
    assert desk.give(RETRY).outcome == "done"
    leader.settle()
    a.read()
    for entry_id in ids:
        run = started(a)
        assert run.message.stream_id == entry_id
        run.succeed()


def test_a_run_is_cancelled_while_its_consumer_drains(
    stage: Stage, leader: MasterActor, desk: Desk, tmp_path: Path
) -> None:
    """Nothing else ends the drain before the grace time is over."""
    a = running(stage, leader, desk, tmp_path)
    a.lanes.pause()
    assert a.drain._take_no_more() and a.drain._end_reader() and not a.drain._leave()
    assert desk.give(CANCEL).outcome == "asked"
    assert not a.drain._leave()
    assert a.lost == ["an operator cancelled a run"]


def test_a_cancel_that_came_too_late_does_not_end_the_next_run(
    stage: Stage, leader: MasterActor, desk: Desk, tmp_path: Path
) -> None:
    a = running(stage, leader, desk, tmp_path)
    desk.give(CANCEL)
    a.read()
    a.crash()
    stage.end_lease(a)
    leader.settle()
    b = consumer(stage, leader, desk, "b")
    b.read()
    b.executor.cancelled.add(b"1-1")  # of a run that ended when the reader had seen it
    run = started(b)
    assert (run.is_apart, b.executor.cancelled) == (True, set())
