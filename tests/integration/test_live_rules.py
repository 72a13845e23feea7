"""change_rules.lua: once a rule is set, nothing is handed over by the former
rules.

Also what hand_over.lua says to a leader that knows the former ones; the action log; and find_entries.lua, by which
explain looks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from click.testing import CliRunner

from tests.doors import environ_of
from tests.integration.factories import FIELD, World, hand_over, plan
from tests.integration.memory import full_memory
from usher.common.protocol.marks import MarkFields
from usher.common.redis.client import CommandRefused
from usher.master.cli.commands import consumers, slow
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.leader.elector import Lead
from usher.master.leader.limits import LeaderLimits
from usher.master.operations.action_log import ActionLog, By
from usher.master.operations.action_log import OperatorAction as Done
from usher.master.operations.live_rules import LiveRules, RuleSetChange, TooManyRules
from usher.master.policy.rules import Rule, RuleAction, Target, rule_id

_ALICE = By("alice", "cli", "why \N{SNOWMAN}")


@pytest.fixture
def rules(world: World) -> LiveRules:
    return LiveRules(world.link, world.keys)


def pause(rules: LiveRules, ticket: bytes = b"T", target: Target = Target.TICKET) -> RuleSetChange:
    return rules.set(Rule(target, ticket.decode(), RuleAction.PAUSE, None, "why", "alice"), _ALICE)


class TestChange:
    def test_a_rule_its_version_its_news_and_its_line_in_the_log_are_there_at_once(
        self, world: World, rules: LiveRules
    ) -> None:
        changed = pause(rules)
        book = rules.read()
        assert (changed.outcome, changed.former, book.version) == ("set", None, b"%d" % changed.version)
        [rule] = book.rules
        assert rule == changed.rule
        assert (rule.id, rule.version) == (rule_id(Target.TICKET, "T"), changed.version)
        assert (rule.who, rule.reason) == ("alice", "why")
        assert abs(rule.set_ms - changed.version // 1024) < 60_000
        assert world.link.call("XRANGE", world.keys.changed, "-", "+")[-1][1] == [b"rules", b"%d" % changed.version]
        [line], cursor = ActionLog(world.link, world.keys).page(None, 10)
        del line["id"], line["time_ms"]
        expected = {
            "who": "alice",
            "via": "cli",
            "what": "pause",
            "on": "ticket T",
            "why": "why \N{SNOWMAN}",
            "outcome": "set",
        }
        assert (line, cursor) == (expected | {"version": changed.version}, None)

    def test_a_rule_is_lifted_once(self, world: World, rules: LiveRules) -> None:
        set_by = pause(rules)
        assert set_by.rule is not None
        lifted = rules.lift(set_by.rule.id, _ALICE)
        assert lifted is not None
        assert (lifted.outcome, lifted.former, rules.read().rules) == ("lifted", set_by.rule, [])
        assert lifted.version > set_by.version
        with world.unchanged():
            assert rules.lift(set_by.rule.id, _ALICE) is None

    def test_a_rule_that_was_set_anew_meanwhile_is_not_lifted_in_place_of_the_former(
        self, world: World, rules: LiveRules
    ) -> None:
        former, now = pause(rules).rule, pause(rules).rule
        assert former is not None
        assert now is not None
        with world.unchanged():
            assert rules.lift(now.id, _ALICE, version=former.version) is None
        assert rules.lift(now.id, _ALICE, version=now.version) is not None
        assert rules.read().rules == []

    def test_there_are_not_too_many(self, world: World, rules: LiveRules, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("usher.master.operations.live_rules.MOST_RULES", 2)
        pause(rules, b"A")
        pause(rules, b"B")
        with world.unchanged(), pytest.raises(TooManyRules):
            pause(rules, b"C")
        world.join("a")
        environ = environ_of(world)
        told = CliRunner().invoke(consumers, ["drain", "a"], env=environ)
        assert (told.exit_code, "lift some" in told.output) == (1, True)
        assert pause(rules, b"B").outcome == "replaced"

    def test_it_tells_how_many_messages_go_on_to_their_end(self, world: World, rules: LiveRules) -> None:
        leader, a = world.elect(), world.join("a")
        world.owned(leader, a, b"T1", b"1-1", b"1-2")
        world.owned(leader, a, b"T2", b"2-1")
        world.owned(leader, a, b"U", b"3-1")
        world.parked(leader, b"T1", b"4-1")
        assert pause(rules, b"T1").handed_over == 2
        assert pause(rules, b"nobody").handed_over == 0
        assert pause(rules, b"T*", Target.PATTERN).handed_over == 3
        assert pause(rules, b"", Target.EVERYTHING).handed_over == 4
        told = pause(rules, b"a", Target.CONSUMER)
        assert told.told == "drain consumer a: set; 4 already handed over will finish"
        assert pause(rules, b"T\x1b").told == "pause ticket T\\x1b: set; nothing of it is in processing"

    @pytest.mark.parametrize(("field", "is_told"), [("", True), ("customer", False)])
    def test_a_rule_of_a_tenant_where_there_are_none_says_so(self, world: World, field: str, is_told: bool) -> None:
        environ = environ_of(world) | {"USHER_TENANT_FIELD": field}
        told = CliRunner().invoke(slow, ["--tenant", "acme", "--rate", "5"], env=environ)
        assert (told.exit_code, "USHER_TENANT_FIELD is empty" in told.output) == (0, is_told)

    def test_it_tells_what_it_ends(self, rules: LiveRules) -> None:
        """`usher slow` let a ticket go on that was paused, and said "replaced"."""
        pause(rules)
        slowed = rules.set(Rule(Target.TICKET, "T", RuleAction.SLOW, 5.0), _ALICE)
        assert "it is no longer paused by alice: why (rule " in slowed.told
        assert "it is no longer slowed to 5/s" in pause(rules).told and "no longer" not in pause(rules).told

    @pytest.mark.parametrize("spoilt", ["rules", "counters", "changed", "actions"])
    def test_a_key_of_the_wrong_type_stops_it_before_anything_has_changed(
        self, world: World, rules: LiveRules, spoilt: str
    ) -> None:
        key = getattr(world.keys, spoilt)
        world.link.call("DEL", key)
        world.link.call("RPUSH", key, "somebody else's")
        with world.unchanged(), pytest.raises(CommandRefused):
            pause(rules)


class TestTheLeader:
    def test_a_hand_over_by_the_former_rules_does_not_happen(self, world: World, rules: LiveRules) -> None:
        """The race that a pause must win: the plan was made, and is on its way, when the rule is set."""
        leader, a = world.elect(), world.join("a")
        ids = world.parked(leader, b"T")
        planned = plan(a, {b"T": ids})
        pause(rules, b"somebody else")
        with world.unchanged():
            assert leader.turn(planned) is None
        assert {kind for kind, _ in leader.changed} == {b"rules"}
        hand_over(leader, planned)
        assert world.pending() == {a.name: ids}


class TestTicketEntries:
    def look(self, world: World, ticket: bytes, start: bytes = b"-", count: int = 10, group: str = "") -> Any:
        args = ("XRANGE", start, "+", count, FIELD, ticket, "", group, "master" if group else "")
        return world.scripts.run("find_entries", (world.keys.stream,), args)

    def test_it_finds_what_is_in_the_stream_page_by_page(self, world: World) -> None:
        world.send(b"T", b"1-1", b"2-1")
        world.send(b"U", b"3-1")
        world.send(b"T", b"4-1")
        world.add(b"5-1", "other", "T")
        assert self.look(world, b"T") == [5, b"5-1", [b"1-1", b"2-1", b"4-1"], 1]
        assert self.look(world, b"T", count=3) == [3, b"3-1", [b"1-1", b"2-1"], 0]
        assert self.look(world, b"T", b"(3-1", 3) == [2, b"5-1", [b"4-1"], 1]

    def test_it_finds_what_is_parked_and_nothing_that_is_owned_or_gone(self, world: World) -> None:
        leader, a = world.elect(), world.join("a")
        world.owned(leader, a, b"T", b"1-1")
        world.parked(leader, b"T", b"2-1", b"3-1")
        world.parked(leader, b"U", b"4-1")
        world.delete(b"2-1")
        with world.unchanged():
            assert self.look(world, b"T", group=world.keys.group) == [3, b"4-1", [b"3-1"], 1]


class TestActionLog:
    def test_pages_go_back_in_time(self, world: World) -> None:
        log = ActionLog(world.link, world.keys)
        for number in range(5):
            log.note(Done(_ALICE, "redrive", f"{number}"), "added 1")
        first, cursor = log.page(None, 2)
        assert cursor is not None
        second, cursor = log.page(cursor.encode(), 3)
        assert cursor is not None
        assert [line["on"] for line in (*first, *second)] == ["4", "3", "2", "1", "0"]
        assert log.page(cursor.encode(), 3) == ([], None)

    def test_an_action_that_was_done_is_no_failure_because_it_could_not_be_logged(self, world: World) -> None:
        with full_memory(world.link):
            ActionLog(world.link, world.keys).note(Done(_ALICE, "redrive", "x"), "added 1")
        assert ActionLog(world.link, world.keys).page(None, 10) == ([], None)
        world.link.call("RPUSH", world.keys.actions, "somebody else's")
        ActionLog(world.link, world.keys).note(Done(_ALICE, "redrive", "x"), "added 1")


@pytest.mark.parametrize("has_tenants", [False, True])
def test_a_rule_for_a_tenant_says_so_where_there_are_no_tenants(
    world: World, rules: LiveRules, caplog: pytest.LogCaptureFixture, has_tenants: bool
) -> None:
    rules.set(Rule(Target.TENANT, "a", RuleAction.PAUSE, None), _ALICE)
    marks = MarkFields("tenant" if has_tenants else "")
    limits = LeaderLimits(10, 8, math.inf, 100, 1e9, 1e9, 1000, FIELD, marks=marks)
    Dispatcher(world.link, world.keys, Lead(), limits)._follow_rules()
    said = [line.getMessage() for line in caplog.records if "rule_without_effect" in line.getMessage()]
    assert bool(said) != has_tenants
