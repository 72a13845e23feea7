"""The board's promises hold while operators set and lift rules, whatever else happens; and the rules do what they say.

The machine of ``test_board_model`` with two more things that can happen: rules change, the leader hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import precondition, rule

from tests.boards import seeds, wait_once
from tests.leader_model import Leader
from tests.redis_model import RedisModel
from tests.unit.test_board_model import TICKETS, BoardMachine, Walk
from usher.master.leader.entries import NO_NEW_ENTRIES, NewEntries
from usher.master.policy.board.plans import HandOverPlan
from usher.master.policy.board.tickets import BoardTicket, ConsumerLoad
from usher.master.policy.rules import Rule, RuleAction, Rulebook, Target, rule_id

_TARGETS = [(Target.TICKET, name.decode()) for name in TICKETS] + [(Target.PATTERN, "T[12]"), (Target.EVERYTHING, "")]


#: A limit holds nothing back.
_HOLDING = (RuleAction.PAUSE, RuleAction.SLOW)


def made_rule(target: Target, value: str, action: RuleAction) -> Rule:
    rate = 2.0 if action is RuleAction.SLOW else None
    return Rule(target, value, action, rate, id=rule_id(target, value))


class RuledRedis(RedisModel):
    """Rules with a version: their change is noted, so that a turn by former ones does not happen."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        self.rules: dict[str, Rule] = {}
        self.version = 0
        self.known = 0  # the version that the leader who calls knows

    def change(self, target: Target, value: str, action: RuleAction | None) -> None:
        """change_rules.lua."""
        self.version += 1
        if action is None:
            self.rules.pop(rule_id(target, value), None)
        else:
            made = made_rule(target, value, action)
            self.rules[made.id] = replace(made, version=self.version)

    @property
    def book(self) -> Rulebook:
        return Rulebook(self.rules.values(), b"%d" % self.version)

    def hand_over(
        self,
        plan: HandOverPlan,
        news: NewEntries = NO_NEW_ENTRIES,
        heard: int | None = None,
        index: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> int | None:
        if self.known != self.version:
            return None
        for target in plan.targets:
            for part in target.parts:
                held = self.book.of(part.ticket)
                if held is not None and held.action is not RuleAction.SLOW:
                    self.broken.append(f"{part} goes out although it is {held.told()}")
        return super().hand_over(plan, news, heard, index)


class RuledLeader(Leader):
    """A leader that reads the rules when it begins, when it hears of them, and when it is refused for them."""

    redis: RuledRedis

    def __init__(self, redis: RedisModel, window: int) -> None:
        super().__init__(redis, window)
        self.follow()

    def follow(self) -> None:
        self.redis.known = self.redis.version
        self.board.follow(self.redis.book)

    def hand_over(self, limit: int = 1000) -> HandOverPlan | None:
        plan = super().hand_over(limit)
        self.follow()
        return plan


class RuledMachine(BoardMachine):
    redis_class = RuledRedis
    leader_class = RuledLeader
    redis: RuledRedis
    leader: RuledLeader

    @rule(whom=st.sampled_from(_TARGETS), action=st.sampled_from([*_HOLDING, None]))
    def an_operator_changes_the_rules(self, whom: tuple[Target, str], action: RuleAction | None) -> None:
        self.redis.change(*whom, action)

    @precondition(lambda self: self.redis.known != self.redis.version)
    @rule()
    def the_leader_hears_of_the_rules(self) -> None:
        self.leader.follow()

    def _could_go(self, ticket: BoardTicket, chosen: dict[str, ConsumerLoad]) -> bool:
        return self.board.rules.of(ticket.name) is None and super()._could_go(ticket, chosen)

    def _room_is_told(self, there_is_room: bool, room: int) -> bool:
        return self.board.rules.pauses_all or super()._room_is_told(there_is_room, room)

    def all_is_well(self) -> None:
        super().all_is_well()
        wait_once(self.board)

    def teardown(self) -> None:
        for whom in _TARGETS:
            self.redis.change(*whom, None)
        self.leader.follow()
        super().teardown()


TestRuled = RuledMachine.TestCase
TestRuled.settings = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])


class RuledWalk(Walk):
    machine_class = RuledMachine
    machine: RuledMachine

    def _moves(self) -> list[tuple[int, Callable[[], object], Callable[[], None]]]:
        machine, rng = self.machine, self.rng

        def change() -> None:
            for whom in _TARGETS:  # else everything is paused before long
                self.machine.redis.change(*whom, None)
            machine.an_operator_changes_the_rules(rng.choice(_TARGETS), rng.choice(_HOLDING))

        return [
            *super()._moves(),
            (4, lambda: True, change),
            (8, lambda: machine.redis.known != machine.redis.version, machine.the_leader_hears_of_the_rules),
        ]


@pytest.mark.parametrize("seed", seeds(20, 6))
def test_a_long_walk_with_rules_ends_with_everything_done(seed: int) -> None:
    RuledWalk(seed).go(400)
