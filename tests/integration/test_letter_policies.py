"""Dead letter policies of live rules: which one a consumer takes when it writes a dead letter; on a real Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.actors import Stage
from usher.common.base.errors import GiveUp
from usher.common.redis.replies import pairs
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.policy.rules import Rule, RuleAction, Target

T = b"T"


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


def rule(stage: Stage, target: Target, value: str, to: str, action: RuleAction = RuleAction.LETTER_POLICY) -> None:
    LiveRules(stage.link, stage.keys).set(Rule(target, value, action, to=to), By("alice", "cli"))


def stored(stage: Stage, policy: str) -> bytes:
    """The policy of the dead letter of T's first message, at a consumer of this policy."""
    leader = stage.leader()
    a = stage.consumer("a", policy=policy)
    leader.settle()
    stage.send(T, b"1-1", b"2-1")
    leader.settle()
    a.read()
    run = a.start()
    assert run is not None
    run.fail(GiveUp("poison"))
    a.flush()
    (_, letter), *_ = stage.link.call("XRANGE", stage.keys.dead, "-", "+")
    return bytes(pairs(letter)[b"usher-policy"])


@pytest.mark.parametrize(("to", "word"), [("halt", b"park"), ("tail", b"tail")])
def test_a_rule_stands_above_the_policy_of_the_consumer(stage: Stage, to: str, word: bytes) -> None:
    rule(stage, Target.PATTERN, "T*", to)
    assert stored(stage, "skip") == word


def test_the_rule_of_a_ticket_stands_above_that_of_a_pattern_and_of_everything(stage: Stage) -> None:
    rule(stage, Target.TICKET, "T", "skip")
    rule(stage, Target.PATTERN, "T*", "halt")
    rule(stage, Target.EVERYTHING, "", "tail")
    assert stored(stage, "park") == b"skip"


def test_rules_for_others_and_other_rules_for_it_say_nothing(stage: Stage) -> None:
    rule(stage, Target.PATTERN, "U*", "skip")
    rule(stage, Target.TICKET, "T", "a", RuleAction.ROUTE)
    assert stored(stage, "park") == b"park"


def test_a_rule_stands_beside_the_others_for_the_same_target(stage: Stage) -> None:
    rule(stage, Target.TICKET, "T", "halt")
    rule(stage, Target.TICKET, "T", "", RuleAction.PAUSE)
    rule(stage, Target.TICKET, "T", "a", RuleAction.ROUTE)
    book = LiveRules(stage.link, stage.keys).read()
    assert book.all_of(T)[0].action is RuleAction.PAUSE
    assert len(book.rules) == 3
