"""The owner's side of the rules for what is given back while its owner lives: recalled tickets, and such as wait. One
story per counter-example of a model checker (`R1`, `W4`, ...).

Every story runs as the system is, and then once without the rule: then one of its assertions must fail.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.chaos.mutants.edits import CodeEdit, LuaEdit, Replace, mutant
from tests.chaos.mutants.rules import rule
from tests.integration.actors import ConsumerActor, Run, Stage, Trouble
from tests.integration.factories import hand_over, plan
from usher.common.base.errors import RedisTrouble, ReplyUnknown, RetryLater
from usher.common.protocol.attempts import GIVEN_UP, Attempts, encode
from usher.common.redis.replies import pack_entry, pack_part, pack_parts
from usher.consumer.execution import inbox_reader
from usher.consumer.execution.acker import Acker

T, U = b"T", b"U"
_LATER = RetryLater(100.0)


def _stage_of(stage: Stage, *ids: bytes) -> tuple[Any, ConsumerActor, ConsumerActor]:
    """A leader, the owner of entries of T that it has read, and another consumer."""
    leader, a = stage.world.elect(), stage.consumer("a")
    _hand_over(stage, leader, a, *stage.world.parked(leader, T, *ids))
    a.read()
    return leader, a, stage.consumer("b")


def _hand_over(stage: Stage, leader: Any, owner: ConsumerActor, *ids: bytes) -> None:
    """Entries of T that are under ``master`` go to ``owner``."""
    hand_over(leader, plan(owner.incarnation, {T: list(ids)}, {T: stage.world.head(T)}))


def _recall(stage: Stage, owner: ConsumerActor, fence: int | None = None) -> None:
    """The leader asks for T, under the fence that it has, or this one."""
    record = stage.world.record(T)
    assert record is not None
    part = pack_part(T, b"%d" % (record.fence if fence is None else fence), [pack_entry((one,)) for one in record.ids])
    stage.link.call("XADD", stage.keys.inbox(owner.incarnation), "*", "recall", pack_parts([part]))


def _recalled(stage: Stage, owner: ConsumerActor) -> None:
    """It asks, and the owner hears of it."""
    _recall(stage, owner)
    owner.read()


def _started(consumer: ConsumerActor) -> Run:
    run = consumer.start()
    assert run is not None, "it has something to start"
    return run


def _finish(stage: Stage, *consumers: ConsumerActor) -> None:
    """Assert that all that consumers were handed is done, in order, and each message once."""
    ids = [entry_id for entry_id, _ in stage.link.call("XRANGE", stage.keys.stream, "-", "+")]
    for consumer in consumers:
        consumer.work()
    assert not stage.history.disorder()
    stage.check_done(T, ids)


@rule(
    mutant(
        "what is recalled stays queued until the answer",
        CodeEdit("usher.consumer.execution.lanes:Lanes._close", "if fences:", "if not fences:"),
    )
)
def test_a_recalled_ticket_goes_to_another_and_starts_there_only(stage: Stage) -> None:
    leader, a, b = _stage_of(stage, b"1-1", b"2-1")
    _recalled(stage, a)
    assert a.start() is None
    a.flush()
    assert stage.world.pending() == {b"master": [b"1-1", b"2-1"]}
    _hand_over(stage, leader, b, b"1-1", b"2-1")
    a.work()
    _finish(stage, b)
    assert stage.history.by(b.incarnation) == [b"1-1", b"2-1"]


@rule(mutant("a give-back has no fence", LuaEdit("give_back", " or fence ~= ARGV[at + 1]", "")))
def test_r1_a_call_that_is_sent_again_takes_nothing_that_came_back_meanwhile(stage: Stage) -> None:
    leader, a, _ = _stage_of(stage, b"1-1")
    _recalled(stage, a)
    a.link.troubles["give_back"] = Trouble.REPLY_LOST
    with pytest.raises(ReplyUnknown):
        a.flush()
    _hand_over(stage, leader, a, b"1-1")
    a.read()
    a.flush()
    assert stage.world.pending() == {a.name: [b"1-1"]}
    _finish(stage, a)


@rule(
    mutant(
        "the lane is dropped when the answer comes",
        CodeEdit("usher.consumer.execution.lanes:Lanes._close", "if fences:", "if not fences:"),
        CodeEdit(
            "usher.consumer.execution.acker:Acker._give_back",
            "lanes.confirm_closed(item.ticket, item.fence)",
            "lanes.forget(item.ticket, item.fence)",
        ),
    )
)
def test_r2_it_comes_back_under_a_later_fence_before_the_answer_is_heard(stage: Stage) -> None:
    leader, a, _ = _stage_of(stage, b"1-1")
    stage.world.parked(leader, T, b"2-1")
    _recalled(stage, a)

    def comes_back(step: str) -> None:
        if step == "give_back":
            _hand_over(stage, leader, a, b"1-1", b"2-1")
            a.read()

    a.link.after = comes_back
    a.flush()
    _finish(stage, a)


@rule(
    mutant(
        "what runs is given back",
        CodeEdit(
            "usher.consumer.execution.lanes:Lanes.close_unstarted", "in self.ready}", "in self.by_ticket.values()}"
        ),
        Replace("usher.consumer.execution.lanes:Lanes._is_ending", lambda *_: False),
    )
)
def test_r3_a_ticket_that_runs_is_not_given_back(stage: Stage) -> None:
    _, a, _ = _stage_of(stage, b"1-1", b"2-1")
    run = _started(a)
    _recalled(stage, a)
    a.flush()
    assert stage.world.pending() == {a.name: [b"1-1", b"2-1"]}
    run.succeed()
    _finish(stage, a)


@rule(
    mutant(
        "what ended and is not acknowledged is forgotten",
        CodeEdit("usher.consumer.execution.lanes:Lanes.close_unstarted", "and not self._is_ending(ticket, ids)", ""),
    )
)
def test_r3_a_ticket_whose_acknowledgement_is_not_answered_is_not_given_back(stage: Stage) -> None:
    """Neither when it was not sent, nor when it is on its way, and comes late after it was sent again."""
    _, a, _ = _stage_of(stage, b"1-1", b"2-1")
    _started(a).succeed()
    _recalled(stage, a)
    a.link.troubles["ack"] = Trouble.LATE
    with pytest.raises(ReplyUnknown):
        a.flush()
    _recalled(stage, a)
    a.flush()
    assert stage.world.pending() == {a.name: [b"2-1"]}
    a.link.arrive(stage.link)
    _finish(stage, a)


@rule(
    mutant(
        "what is recalled stays queued until the answer",
        CodeEdit("usher.consumer.execution.lanes:Lanes._close", "if fences:", "if not fences:"),
    )
)
def test_r4a_nothing_starts_here_after_a_call_whose_reply_was_lost(stage: Stage) -> None:
    leader, a, b = _stage_of(stage, b"1-1")
    _recalled(stage, a)
    a.link.troubles["give_back"] = Trouble.REPLY_LOST
    with pytest.raises(ReplyUnknown):
        a.flush()
    _hand_over(stage, leader, b, b"1-1")
    b.read()
    run = _started(b)
    assert a.start() is None
    a.flush()
    run.succeed()
    _finish(stage, a, b)


@rule(
    mutant(
        "a call without an answer counts as done",
        CodeEdit(
            "usher.consumer.execution.acker:Acker._give_back",
            "except CommandRefused as refused:\n            return refused",
            "except Exception:\n            given = items",
        ),
    )
)
def test_r4b_a_call_that_was_never_heard_is_sent_again(stage: Stage) -> None:
    leader, a, b = _stage_of(stage, b"1-1")
    _recalled(stage, a)
    a.link.troubles["give_back"] = Trouble.NEVER_SENT
    with pytest.raises(ReplyUnknown):
        a.flush()
    _hand_over(stage, leader, a, *stage.world.parked(leader, T, b"2-1"))
    a.read()
    assert a.start() is None, "what stands before it is not done"
    a.flush()
    _hand_over(stage, leader, b, b"1-1", b"2-1")
    _finish(stage, a, b)


@rule(
    mutant(
        "what comes under a fence that is closed is taken",
        CodeEdit("usher.consumer.execution.lanes:Lanes._queue", "if ticket in self._closed_fences:", "if False:"),
    )
)
def test_r5_a_hand_over_behind_the_recall_is_passed_over_and_comes_again(stage: Stage) -> None:
    leader, a, _ = _stage_of(stage, b"1-1")
    _recalled(stage, a)
    _hand_over(stage, leader, a, *stage.world.parked(leader, T, b"2-1"))
    a.flush()
    assert stage.world.pending() == {b"master": [b"1-1", b"2-1"]}
    _hand_over(stage, leader, a, b"1-1", b"2-1")
    records = inbox_reader._MOST_RECORDS
    inbox_reader._MOST_RECORDS = 1  # type: ignore[misc]
    try:
        for _ in range(4):
            a.read()
            while (run := a.start()) is not None:
                run.succeed()
    finally:
        inbox_reader._MOST_RECORDS = records  # type: ignore[misc]
    _finish(stage, a)


@rule(
    mutant(
        "a recall counts for any fence",
        CodeEdit(
            "usher.consumer.execution.lanes:Lanes.close_unstarted",
            "and {message.fence for message in (*lane.queue, *lane.early)} == {fence}",
            "",
        ),
    )
)
def test_r6_a_recall_of_a_former_fence_is_not_followed(stage: Stage) -> None:
    _, a, _ = _stage_of(stage, b"1-1")
    record = stage.world.record(T)
    assert record is not None
    _recall(stage, a, fence=record.fence - 1)
    a.read()
    _finish(stage, a)


@rule(
    mutant(
        "a recall is looked at before what stands in front of it",
        CodeEdit(
            "usher.consumer.execution.inbox_reader:InboxReader._read_inbox",
            "records = records[: next(",
            "[self.on_recall(record.recalled) for record in records]; records = records[: next(",
        ),
        CodeEdit("usher.consumer.execution.inbox_reader:InboxReader._obey", "self.on_recall(record.recalled)", "pass"),
    )
)
def test_r3_what_is_handed_over_in_front_of_the_recall_is_in_its_lane_first(stage: Stage) -> None:
    leader, a, b = stage.world.elect(), stage.consumer("a"), stage.consumer("b")
    _hand_over(stage, leader, a, *stage.world.parked(leader, T, b"1-1"))
    _recalled(stage, a)
    a.flush()
    assert stage.world.pending() == {b"master": [b"1-1"]}
    _hand_over(stage, leader, b, b"1-1")
    _finish(stage, a, b)


def _drains_meanwhile(stage: Stage, trouble: Trouble | None) -> None:
    leader, a, b = _stage_of(stage, b"1-1", b"2-1")
    _recall(stage, a)
    if trouble is not None:
        a.read()
        a.link.troubles["give_back"] = trouble
        with pytest.raises(ReplyUnknown):
            a.flush()
    a.begin_drain()
    a.give_back()
    if not a.acker.is_flushed:
        a.flush()
    assert a.deregister(), "nothing of it is left"
    _hand_over(stage, leader, b, b"1-1", b"2-1")
    _finish(stage, b)


@rule(
    mutant(
        "a drain does not wait for what is given back",
        Replace("usher.consumer.execution.acker:Acker.is_flushed", Acker.is_settled),
    )
)
def test_r7_a_drain_that_begins_before_the_answer_leaves_nothing_behind(stage: Stage) -> None:
    for trouble in (Trouble.NEVER_SENT, Trouble.REPLY_LOST):
        _drains_meanwhile(stage, trouble)
        stage = stage.again()


def test_r7_a_recall_that_a_drain_finds_changes_nothing(any_redis_url: str) -> None:
    with Stage(any_redis_url) as stage:
        _drains_meanwhile(stage, None)


# ---- waits -----------------------------------------------------------------------------------------------------------


def _due_in_s(stage: Stage) -> float:
    """For how long T still waits, by the clock of Redis."""
    seconds, micros = stage.link.call("TIME")
    record = stage.world.record(T)
    assert record is not None
    assert record.owner.startswith(b"waits@"), record.owner
    return int(record.owner[6:]) / 1000 - int(seconds) - int(micros) / 1e6


def _comes_back(stage: Stage, leader: Any, consumer: ConsumerActor) -> None:
    """Its time has come: the leader hands it over."""
    record = stage.world.record(T)
    assert record is not None
    stage.world.spoil(T, b"returned %d %b" % (record.fence, b" ".join(record.ids)))
    _hand_over(stage, leader, consumer, *record.ids)


@rule(mutant("a wait is a give-back like any other", LuaEdit("give_back", "if after == '' or", "if after or")))
def test_w1_a_message_that_is_to_wait_leaves_with_its_time_and_its_ticket(stage: Stage) -> None:
    leader, a, b = _stage_of(stage, b"1-1", b"2-1")
    _started(a).fail(_LATER)
    a.flush()
    assert a.lanes.load() == (0, 0), "neither a slot nor room is taken here"
    assert 95.0 < _due_in_s(stage) <= 100.1
    assert stage.world.pending() == {b"master": [b"1-1", b"2-1"]}
    _comes_back(stage, leader, b)
    b.read()
    run = _started(b)
    assert run.message.known.starts == 2, "its attempts went with it"
    run.succeed()
    b.work()
    assert stage.history.ids(T) == [b"1-1", b"1-1", b"2-1"]


@rule(
    mutant(
        "a ticket leaves before what ended is acknowledged",
        CodeEdit(
            "usher.consumer.execution.acker:Acker._write",
            "finished = len(self._finished)",
            "self._give_back(given_back); finished = len(self._finished)",
        ),
    )
)
def test_w4_what_ended_before_it_is_acknowledged_for_certain_before_the_ticket_leaves(stage: Stage) -> None:
    leader, a, _ = _stage_of(stage, b"1-1", b"2-1", b"3-1")
    _started(a).succeed()
    _started(a).fail(_LATER)
    a.link.troubles["ack"] = Trouble.NEVER_SENT
    with pytest.raises(ReplyUnknown):
        a.flush()
    assert stage.world.pending() == {a.name: [b"1-1", b"2-1", b"3-1"]}
    a.flush()
    assert stage.world.pending() == {b"master": [b"2-1", b"3-1"]}
    _comes_back(stage, leader, a)
    a.work()
    assert stage.history.ids(T) == [b"1-1", b"2-1", b"2-1", b"3-1"]


@rule(
    mutant(
        "a drain gives back at once what waits",
        CodeEdit("usher.consumer.execution.acker:Acker.give_all_back", "GiveBack(*one)", "GiveBack(*one[:3])"),
    )
)
def test_w6_a_drain_gives_back_what_waits_here_with_its_time(stage: Stage) -> None:
    _, a, _ = _stage_of(stage, b"1-1", b"2-1")
    a.executor.all_wait_here = True  # as one that waits for a moment only
    _started(a).fail(_LATER)
    a.flush()
    assert (stage.world.pending(), len(a.lanes.waiting)) == ({a.name: [b"1-1", b"2-1"]}, 1)
    a.begin_drain()
    assert a.give_back() == 1
    assert 95.0 < _due_in_s(stage) <= 100.1
    assert a.deregister()


@rule(
    mutant(
        "a stop forgets a message that has just asked to wait",
        Replace("usher.consumer.execution.acker:Acker.is_flushed", Acker.is_settled),
    )
)
def test_w6_a_message_that_asks_to_wait_during_a_drain_waits(stage: Stage) -> None:
    _, a, _ = _stage_of(stage, b"1-1", b"2-1")
    run = _started(a)
    a.begin_drain()
    run.fail(_LATER)
    a.link.troubles["give_back"] = Trouble.NEVER_SENT
    with pytest.raises(ReplyUnknown):
        a.flush()
    assert a.give_back() == 0
    assert not a.acker.is_flushed
    a.flush()
    assert 95.0 < _due_in_s(stage) <= 100.1
    assert a.deregister()


def test_tickets_that_are_put_off_wait_a_moment_for_more_but_others_do_not(any_redis_url: str) -> None:
    """Each note of one may stop a turn of the leader."""
    with Stage(any_redis_url) as stage:
        a, leader = stage.consumer("a"), stage.world.elect()
        a.acker._linger_s, a.reporter.enough = 1e-6, 3

        def waiting(*more: bytes) -> int:
            for ticket in more:
                parked = list(stage.world.parked(leader, ticket, ticket + b"-1"))
                hand_over(leader, plan(a.incarnation, {ticket: parked}, {ticket: stage.world.head(ticket)}))
                a.read()
                _started(a).fail(_LATER)
            a.acker.run_once()
            assert a.acker.run_once() <= (0.25 if a.acker._to_give_back else 2.0)
            return sum(value.startswith(b"waits@") for value in stage.link.call("HVALS", stage.keys.tickets))

        assert waiting(b"1") == 1, "nothing was put off before"
        assert waiting(b"2", b"3") == 1
        assert waiting(b"4") == 4, "there are many"
        assert waiting(b"5") == 4
        a.acker.go_on([(b"1", 0)])
        assert waiting() == 5, "in their order"
        assert waiting(b"6") == 5
        a.acker.hurry()
        assert waiting() == 6


@pytest.mark.parametrize("trouble", [Trouble.REPLY_LOST, Trouble.NEVER_SENT])
def test_r4_a_wait_whose_reply_was_lost_is_asked_for_again(any_redis_url: str, trouble: Trouble) -> None:
    with Stage(any_redis_url) as stage:
        leader, a, b = _stage_of(stage, b"1-1")
        _started(a).fail(_LATER)
        a.link.troubles["give_back"] = trouble
        with pytest.raises(ReplyUnknown):
            a.flush()
        assert a.start() is None
        a.flush()
        assert 95.0 < _due_in_s(stage) <= 100.1
        _comes_back(stage, leader, b)
        b.work()
        assert stage.history.ids(T) == [b"1-1", b"1-1"]


def test_a_record_of_a_form_that_is_not_known_is_passed_over_and_told(
    any_redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Stage(any_redis_url) as stage:
        leader, a = stage.world.elect(), stage.consumer("a")
        stage.link.call("XADD", stage.keys.inbox(a.incarnation), "*", "novelty", "1", "of", "the future", "and", "1-1")
        _hand_over(stage, leader, a, *stage.world.parked(leader, T, b"1-1"))
        _finish(stage, a)
        assert [record.message for record in caplog.records].count("inbox_record_unknown") == 1


@pytest.mark.parametrize("trouble", list(Trouble))
def test_an_order_behind_one_that_redis_does_not_answer_is_obeyed(stage: Stage, trouble: Trouble) -> None:
    leader, a = stage.leader(), stage.consumer("a")
    first, _ = stage.send(b"T", b"1-1", b"2-1")
    [third] = stage.send(b"U", b"3-1")
    leader.settle()
    a.read()
    inbox = stage.keys.inbox(a.incarnation)
    for what, ticket, entry in (("clear", b"T", first), ("give_up", b"U", third)):
        stage.link.call("XADD", inbox, "*", "order", what, "ticket", ticket, "id", entry)
    a.link.troubles["charge"] = trouble
    for _ in range(3):
        with contextlib.suppress(RedisTrouble):
            a.read()
    assert third in a.lanes.given_up


def test_a_drain_starts_nothing_that_it_reads(stage: Stage) -> None:
    """A runner goes on with its lane for a moment; whether it was given up before is not looked up in a drain."""
    leader, a = stage.leader(), stage.consumer("a")
    stage.send(b"T", b"1-1")
    leader.settle()
    a.read()
    lane = a.lanes.take_now()
    assert lane is not None
    message = a.executor.next_message(lane)
    assert message is not None and a.executor.admit(lane, message, 1)
    [second] = stage.send(b"T", b"2-1")
    stage.link.call("HSET", stage.keys.attempts, second, encode(Attempts(0, GIVEN_UP, 0, 0)))
    leader.settle()
    a.begin_drain()
    assert a.executor.succeeded(lane, message, 1, 2)
    # As a runner does, which looks at the queue alone.
    assert (message := a.executor.next_message(lane)) is None or not a.executor.admit(lane, message, 1)
