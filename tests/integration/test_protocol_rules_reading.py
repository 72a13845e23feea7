"""Reading: what was read is in nobody's list, and the hand-over takes it, or nothing of it.

Every story runs as the system is, and then once without the rule: then one of its assertions must fail.
"""

from __future__ import annotations

from tests.chaos.mutants.catalogue import NO_WATCH
from tests.chaos.mutants.edits import LuaEdit, Replace, mutant
from tests.chaos.mutants.rules import rule
from tests.integration.actors import Stage, Trouble
from tests.integration.test_protocol_rules import T
from usher.common.base.errors import NotNow


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
        LuaEdit("hand_over", "if has_news or redis.call('GET', KEYS[6]) ~= noted then", "if false then"),
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
