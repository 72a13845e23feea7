"""Reading: what was read is in nobody's list, and the hand-over takes it, or nothing of it.

Every story runs as the system is, and then once without the rule: then one of its assertions must fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.chaos.mutants.catalogue import NO_WATCH
from tests.chaos.mutants.edits import CodeEdit, LuaEdit, Replace, mutant
from tests.chaos.mutants.rules import rule
from tests.integration.actors import MasterActor, Stage, Trouble
from tests.integration.test_protocol_rules import T
from usher.common.base.errors import NotNow
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.policy.rules import Rule, RuleAction, Target


@rule(mutant("a transaction without a WATCH", NO_WATCH))
def test_a_deposed_master_whose_turn_comes_late_is_served_nothing(stage: Stage) -> None:
    old, a = stage.leader("m1"), stage.consumer("a")
    old.look()
    old.link.troubles = {"read": Trouble.LATE}
    old.turn()
    stage.end_lead()
    new = stage.leader("m2")
    new.settle()
    [first] = stage.send(T)
    old.link.arrive(stage.link)
    [second] = stage.send(T)
    stage.finish(new, [a])
    stage.check_done(T, [first, second])


@rule(
    mutant(
        "a new leader reads on where the group is",
        LuaEdit("begin", "if taken and is_above(position, taken) and ARGV[3] == '' then", "if false then"),
    )
)
def test_what_a_leader_had_read_and_not_handed_over_is_read_by_the_next(stage: Stage) -> None:
    old, a = stage.leader("m1"), stage.consumer("a")
    old.settle()
    ids = stage.send(T) + stage.send(T)
    old.dispatcher._cursor._may_have_more = True
    old.dispatcher.run_once()
    assert (stage.world.pending(), a.read()) == ({}, 0)
    stage.end_lead()
    stage.finish(stage.leader("m2"), [a])
    stage.check_done(T, ids)


@rule(
    mutant(
        "what was taken is not noted",
        CodeEdit(
            "usher.master.leader.leader_scripts:LeaderScripts._packet",
            'commands.append(("SET", keys.taken, taken))',
            "pass",
        ),
    )
)
def test_what_was_handed_over_and_done_is_not_read_again_by_the_next_leader(stage: Stage) -> None:
    old, a = stage.leader("m1"), stage.consumer("a")
    ids = stage.send(T) + stage.send(T)
    stage.finish(old, [a])
    stage.end_lead()
    ids += stage.send(T)
    stage.finish(stage.leader("m2"), [a])
    assert stage.history.ids(T) == ids


@rule(
    mutant(
        "what could not be taken is kept in memory",
        Replace("usher.master.policy.board.board:Board.forget", lambda board, entries: None),
    )
)
def test_what_was_refused_to_be_taken_is_seen_again_once(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    m.settle()
    [first] = stage.send(T)

    def full(step: str) -> None:
        if step == "hand_over":
            m.link.before = lambda step: None
            raise NotNow("OOM", "no memory")

    m.link.before = full
    m.turn()
    assert m.board.parked == 0
    [second] = stage.send(T)
    stage.finish(m, [a])
    stage.check_done(T, [first, second])
    assert stage.history.ids(T) == [first, second]


# ---- what a review found: each lost or doubled something ----


def _read_ahead(stage: Stage, master: MasterActor, ticket: bytes = T) -> list[bytes]:
    """Two messages that the leader has read and not handed over."""
    ids = stage.send(ticket) + stage.send(ticket)
    master.dispatcher._cursor._may_have_more = True
    master.dispatcher.run_once()
    assert [one[0] for one in master.dispatcher._cursor._read.found] == ids
    return ids


def test_an_answer_behind_the_transaction_that_does_not_come_leaves_no_turn_undone(stage: Stage) -> None:
    """BUSY, to the question whose epoch it is: the transaction had happened, and was taken for refused."""
    m, a = stage.leader(), stage.consumer("a")
    m.settle()
    ids, epoch, pipeline = _read_ahead(stage, m), m.lead.epoch, m.link.pipeline

    def busy(commands: Sequence[Sequence[Any]], block_s: float = 0.0) -> list[Any]:
        replies = pipeline(commands, block_s)
        if commands[0][0] == "MULTI":
            m.link.pipeline = pipeline  # type: ignore[method-assign]
            replies[-1] = NotNow("BUSY", "a script runs")
        return replies

    m.link.pipeline = busy  # type: ignore[method-assign]
    ids += stage.send(T)
    m.turn()
    stage.finish(m, [a])
    stage.check_done(T, ids)
    assert m.lead.epoch != epoch


def test_what_is_read_twice_because_the_group_was_set_back_between_is_handed_over_in_order(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    m.settle()
    ids = _read_ahead(stage, m)
    LiveRules(stage.link, stage.keys).set(Rule(Target.TICKET, "other", RuleAction.PAUSE), By("ann", "cli"))
    stage.link.call("XGROUP", "SETID", stage.keys.stream, stage.keys.group, "0-0")
    m.turn()
    stage.finish(m, [a])
    stage.check_done(T, ids)
