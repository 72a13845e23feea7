"""The leader follows the live rules whatever comes in between, and what left its memory comes back to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from master.actions import By
from master.live_rules import LiveRules
from master.policy.rules import Action, Rule, Target
from tests.integration.actors import Stage

_ALICE = By("alice", "cli")


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


def test_messages_without_a_ticket_id_that_left_memory_come_back(stage: Stage) -> None:
    m, a = stage.leader(spread=True), stage.consumer()
    m.settle()
    m.dispatcher._rung = False
    ids = [stage.world.add(b"%d-0" % number, "text", "no ticket") for number in (1, 2, 3)]
    rules = LiveRules(stage.link, stage.keys)
    changed = rules.set(Rule(Target.EVERYTHING, "", Action.PAUSE), _ALICE)
    m.dispatcher.ring()
    m.turn()  # they are read before the rule is known, and its hand-over is refused
    m.turn()
    assert m.board.parked == 3
    m.board.unload()
    assert m.board.parked == 0
    assert changed.rule is not None
    rules.lift(changed.rule.id, _ALICE)
    stage.finish(m, [a])
    assert sorted(run.id for run in stage.history.starts) == ids
    assert not stage.world.state().pending
