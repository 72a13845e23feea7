"""Reading: new entries are only looked at, and the hand-over takes them, or nothing of them.

Every story runs as the system is, and then once without the rule: then one of its assertions must fail.
"""

from __future__ import annotations

from tests.chaos.mutants.edits import LuaEdit, Replace, mutant
from tests.chaos.mutants.rules import rule
from tests.integration.actors import Stage, Trouble
from tests.integration.test_protocol_rules import T
from usher.common.base.errors import NotNow
from usher.common.protocol.message import LONGEST_TICKET
from usher.master.leader.entries import NewEntries, PeekedEntry
from usher.master.leader.leader_scripts import LeaderScripts


def _plain_read(steps: LeaderScripts, count: int) -> NewEntries:
    keys = steps._keys
    command = ("XREADGROUP", "GROUP", keys.group, "master", "COUNT", count, "STREAMS", keys.stream, ">")
    reply = steps._scripts._link.call(*command)
    return NewEntries(
        b"",
        [PeekedEntry(entry_id, fields[1][: LONGEST_TICKET + 1]) for entry_id, fields in (reply[0][1] if reply else ())],
        not reply,
    )


@rule(
    mutant(
        "the leader reads with an XREADGROUP of its own",
        Replace("usher.master.leader.leader_scripts:LeaderScripts.peek", _plain_read),
    )
)
def test_a_deposed_master_whose_read_comes_late_is_served_nothing(stage: Stage) -> None:
    old, a = stage.leader("m1"), stage.consumer("a")
    old.link.troubles = {"peek": Trouble.LATE, "XREADGROUP": Trouble.LATE}
    old.look()
    old.turn()
    stage.end_lead()
    new = stage.leader("m2")
    [first] = stage.send(T)
    old.link.arrive(stage.link)
    [second] = stage.send(T)
    stage.finish(new, [a])
    stage.check_done(T, [first, second])


@rule(
    mutant(
        "what was seen is taken although the group has moved on",
        LuaEdit(
            "hand_over",
            "if has_news and facts['last-delivered-id'] ~= position then return {'MOVED',"
            " facts['last-delivered-id']} end",
            "",
        ),
    )
)
def test_what_somebody_else_has_read_and_done_since_it_was_seen_is_not_handed_over(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    [first] = stage.send(T)

    def others_read(step: str) -> None:
        if step == "hand_over":
            m.link.before = lambda step: None
            stage.link.call("XREADGROUP", "GROUP", stage.keys.group, "stranger", "STREAMS", stage.keys.stream, ">")
            stage.link.call("XACK", stage.keys.stream, stage.keys.group, first)

    m.link.before = others_read
    m.settle()
    [second] = stage.send(T)
    stage.finish(m, [a])
    assert stage.history.ids(T) == [second]


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
