"""The leader follows the live rules whatever comes in between, and what left its memory comes back to it."""

from __future__ import annotations

from tests.integration.actors import MasterActor, Stage
from usher.common.base.errors import NotNow
from usher.common.redis.client import Link
from usher.master.membership.registry import read_registry
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.policy.rules import Rule, RuleAction, Target

_ALICE = By("alice", "cli")


def pause_all(stage: Stage, m: MasterActor) -> tuple[LiveRules, str]:
    """The leader knows the rule, whose id is returned."""
    rules = LiveRules(stage.link, stage.keys)
    changed = rules.set(Rule(Target.EVERYTHING, "", RuleAction.PAUSE), _ALICE)
    m.settle()
    assert m.board.rules.pauses_all
    assert changed.rule is not None
    return rules, changed.rule.id


def test_what_is_read_before_the_rule_is_known_waits_under_master(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer()
    m.settle()
    ids = stage.send(b"T") + stage.send(b"U")
    m.dispatcher.run_once()  # reads them
    rules = LiveRules(stage.link, stage.keys)
    changed = rules.set(Rule(Target.EVERYTHING, "", RuleAction.PAUSE), _ALICE)
    m.turn()
    m.turn()
    assert (m.board.parked, stage.world.pending()) == (2, {b"master": ids})
    assert changed.rule is not None
    rules.lift(changed.rule.id, _ALICE)
    stage.finish(m, [a])
    assert sorted(run.id for run in stage.history.starts) == ids


def test_news_of_the_rules_that_could_not_be_read_at_once_are_not_forgotten(stage: Stage) -> None:
    m = stage.leader()
    rules, chosen = pause_all(stage, m)

    def busy(step: str) -> None:
        if step == "PIPELINE":
            m.link.before = lambda step: None
            raise NotNow("BUSY", "a script runs")

    rules.lift(chosen, _ALICE)
    m.link.before = busy
    m.hear()
    m.turn()
    assert [type(failure) for failure in m.failures] == [NotNow]
    m.turn()
    assert not m.board.rules.pauses_all


def test_rules_whose_news_got_lost_are_read_when_memory_is_compared(stage: Stage) -> None:
    m = stage.leader(reconcile_s=0.0)
    rules, chosen = pause_all(stage, m)
    rules.lift(chosen, _ALICE)
    for _ in range(2):
        m.turn()  # it has heard of nothing
    assert not m.board.rules.pauses_all


def test_a_drain_is_followed_also_by_a_leader_whose_roster_was_read_before_the_consumer_came(stage: Stage) -> None:
    old = read_registry(stage.link, stage.keys)
    a, m = stage.consumer(), stage.leader()
    m.turn()
    m.dispatcher.post(old)
    m.turn()
    rules = LiveRules(Link(stage.url, "operator"), stage.keys)
    changed = rules.set(Rule(Target.CONSUMER, a.registration.name, RuleAction.PAUSE), _ALICE, "drain")
    stage.send(b"X")
    for _ in range(3):
        m.turn()
    assert changed.handed_over == a.link.call("XLEN", stage.keys.inbox(a.incarnation)) == 0, (
        "handed over after the drain was answered"
    )
    assert not m.board.consumers[a.incarnation].accepts
