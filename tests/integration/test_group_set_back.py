"""Somebody sets the group back by hand (XGROUP SETID), while entries wait: they come again, and go to their places;
nothing is counted twice."""

from __future__ import annotations

import pytest

from tests.integration.actors import ConsumerActor, MasterActor, Stage
from tests.integration.test_protocol_rules import T
from usher.common.base.errors import GiveUp
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.board.board import Board
from usher.master.policy.rules import Rule, RuleAction, Target

ANN = By("ann", "cli")
DONE = [b"1-1", b"2-1"]
WAITING = [b"3-1", b"4-1", b"5-1", b"6-1"]


def _set_back(stage: Stage, master: MasterActor, position: bytes = b"0-0") -> None:
    stage.link.call("XGROUP", "SETID", stage.keys.stream, stage.keys.group, position)
    master.dispatcher._cursor._may_have_more = True  # as after IDLE_READ_S, or with the next message


def _check_books(board: Board) -> None:
    for consumer in board.consumers.values():
        assert consumer.in_flight == sum(len(board.tickets[name].running) for name in consumer.tickets)
    assert board.in_flight == sum(consumer.in_flight for consumer in board.consumers.values())
    assert board.parked == sum(len(ticket.parked) for ticket in board.tickets.values())


def _begin(stage: Stage) -> tuple[ConsumerActor, MasterActor, str]:
    """Two messages of a ticket are done, and four wait because of a rule; its id."""
    a, m = stage.consumer("a"), stage.leader()
    stage.send(T, *DONE)
    stage.finish(m, [a])
    chosen = (
        LiveRules(stage.link, stage.keys).set(Rule(Target.TICKET, T.decode(), RuleAction.PAUSE, None, "", ""), ANN).rule
    )
    assert chosen is not None
    stage.send(T, *WAITING)
    m.settle()
    return a, m, chosen.id


def _lift(stage: Stage, rule_id: str) -> None:
    LiveRules(stage.link, stage.keys).lift(rule_id, ANN)


@pytest.mark.parametrize("position", [b"0-0", b"2-1", b"4-1"])
def test_what_waits_is_known_once_and_all_that_comes_again_is_run_in_order(stage: Stage, position: bytes) -> None:
    a, m, rule_id = _begin(stage)
    _set_back(stage, m, position)
    m.settle()
    expected = [one for one in DONE if position == b"0-0"] + WAITING
    assert list(m.board.tickets[T].parked) == expected
    _lift(stage, rule_id)
    stage.finish(m, [a])
    assert stage.history.ids(T) == DONE + expected
    _check_books(m.board)
    assert m.board.in_flight == 0


def test_what_waited_when_the_group_was_made_anew_above_it_is_handed_over_all_the_same(stage: Stage) -> None:
    """Memory knows of it, and nobody else does."""
    a, m, rule_id = _begin(stage)
    stage.link.call("XGROUP", "DESTROY", stage.keys.stream, stage.keys.group)
    stage.link.call("XGROUP", "CREATE", stage.keys.stream, stage.keys.group, "$")
    _lift(stage, rule_id)
    stage.finish(m, [a])
    assert stage.history.ids(T) == DONE + WAITING


def test_a_new_epoch_knows_what_comes_again_from_the_pending_list(stage: Stage) -> None:
    a, m, rule_id = _begin(stage)
    _set_back(stage, m)
    m.dispatcher._in_doubt(m.lead.epoch or 0, "test")
    m.settle()
    assert list(m.board.tickets[T].parked) == DONE + WAITING
    _lift(stage, rule_id)
    stage.finish(m, [a])
    assert stage.history.ids(T) == DONE + DONE + WAITING
    _check_books(m.board)


def test_what_was_not_taken_stays_known(stage: Stage) -> None:
    """The rules change between read and hand-over: what waits under ``master`` must not be forgotten with what was
    read."""
    a, m, rule_id = _begin(stage)
    _set_back(stage, m)

    def change(step: str) -> None:
        if step == "hand_over":
            m.link.before = lambda step: None
            LiveRules(stage.link, stage.keys).set(Rule(Target.TICKET, "other", RuleAction.PAUSE, None, "", ""), ANN)
            stage.link.call("XGROUP", "SETID", stage.keys.stream, stage.keys.group, WAITING[-1])

    m.link.before = change
    m.turn()
    assert list(m.board.tickets[T].parked) == WAITING
    _lift(stage, rule_id)
    stage.finish(m, [a])
    assert stage.history.ids(T) == DONE + DONE + WAITING, "what was read comes again, wherever the group is set then"


def test_what_comes_again_of_a_halted_ticket(stage: Stage) -> None:
    """The message that it waits for stays halted; all else waits behind it in order."""
    a, m = stage.consumer("a", policy="halt"), stage.leader()
    stage.send(T, *DONE)
    stage.finish(m, [a])
    stage.send(T, *WAITING)
    m.settle()
    a.read()
    head = a.start()
    assert head is not None
    head.fail(GiveUp())
    a.flush()
    m.settle()
    _set_back(stage, m)
    m.settle()
    assert stage.world.pending() == {b"halted": WAITING[:1], b"master": DONE + WAITING[1:]}
    DeadLetters(stage.link, stage.keys).redrive(stage.world.letter_ids())
    stage.finish(m, [a])
    assert stage.history.ids(T) == [*DONE, WAITING[0], *DONE, *WAITING]
    _check_books(m.board)
    assert not stage.world.pending()
