"""Explain: rules that hold nothing back."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.test_explain import PAUSE, RUNS, A, C, owned, ticket
from usher.master.policy.board.views import BoardFacts
from usher.master.policy.explain.explain import explain
from usher.master.policy.rules import RuleAction

BESIDE = (
    replace(PAUSE, action=RuleAction.ROUTE, to="c3"),
    replace(PAUSE, action=RuleAction.LETTER_POLICY, to="halt"),
)


def test_a_route_and_a_policy_are_told_where_nothing_is_in_the_way() -> None:
    told = explain(ticket(parked=(A,), rules=BESIDE))
    assert [reason.code for reason in told.reasons] == ["about_to_move", "parked", "rule_too"]
    assert told.reasons[0].text.endswith(" http://m1")


def test_they_do_not_hide_what_is_in_the_way() -> None:
    full = BoardFacts("open", 1, True, window_is_full=True)
    reasons = {
        reason.text: reason.code for reason in explain(owned(RUNS, parked=(C,), board=full, rules=BESIDE)).reasons
    }
    assert [*reasons.values()][-3:] == ["window_full", "rule_too", "rule_too"]
    assert {text.partition(" by ")[0] for text, code in reasons.items() if code == "rule_too"} == {
        "a rule holds too: the ticket is routed to c3",
        "a rule holds too: the ticket is under the policy halt",
    }
