"""Live rules as values: which one holds for a ticket, what is stored, and the buckets of those that are slowed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from usher.master.policy.rules import Rule, RuleAction, Rulebook, Target, TokenBuckets, dump, parse, rule_id


def rule(target: Target, value: str, action: RuleAction = RuleAction.PAUSE, rate: float | None = None) -> Rule:
    return Rule(target, value, action, rate, "why", "alice", id=rule_id(target, value))


def said(one: Rule) -> tuple[int, float]:
    """The lower one holds, as the top of master/policy/rules.py says it: pause, then the slowest."""
    return [RuleAction.PAUSE, RuleAction.SLOW].index(one.action), one.rate_per_second or 0.0


_RULES = st.builds(
    lambda whom, what: rule(*whom, *what),
    st.sampled_from([(target, value) for target in Target for value in ("a", "ab", "a*", "?", "*", "\udcfe")]),
    st.sampled_from([(RuleAction.PAUSE, None), (RuleAction.SLOW, 5.0), (RuleAction.SLOW, 0.5)]),
)


class TestRulebook:
    @given(
        st.lists(_RULES, max_size=8, unique_by=lambda one: one.id), st.sampled_from([b"a", b"ab", b"a*", b"b", b"\xfe"])
    )
    def test_the_rule_that_holds_is_the_strongest_of_all_that_fit(self, rules: list[Rule], ticket: bytes) -> None:
        book = Rulebook(rules)
        held, fit = book.of(ticket), book.all_of(ticket)
        assert (held is None) == (not fit)
        assert held is None or (held in fit and said(held) == min(map(said, fit)))
        assert [said(one) for one in fit] == sorted(said(one) for one in fit)
        assert {one.target for one in fit} <= set(Target) - {Target.CONSUMER}

    def test_a_rule_for_a_ticket_is_for_no_other(self) -> None:
        book = Rulebook([rule(Target.TICKET, "a*"), rule(Target.TICKET, "ß")])
        assert book.of(b"ab") is None
        assert book.of(b"a*") is not None
        assert book.of("ß".encode()) is not None

    def test_rules_for_consumers_are_about_no_ticket(self) -> None:
        book = Rulebook([rule(Target.CONSUMER, "c1")])
        assert book.is_empty
        assert book.of(b"c1") is None
        assert book.of_consumers.get("c1") is not None
        assert book.of_consumers.get("c2") is None

    def test_only_a_pause_of_the_stream_or_of_everything_pauses_all(self) -> None:
        assert Rulebook([rule(Target.STREAM, "s")]).pauses_all
        assert not Rulebook([rule(Target.PATTERN, "*")]).pauses_all
        assert not Rulebook([rule(Target.EVERYTHING, "", RuleAction.SLOW, 1.0)]).pauses_all


class TestStored:
    @pytest.mark.parametrize("action", RuleAction)
    @pytest.mark.parametrize("target", Target)
    def test_what_was_stored_is_read(self, target: Target, action: RuleAction) -> None:
        made = rule(target, "two words \N{SNOWMAN}", action, 0.5 if action is RuleAction.SLOW else None)
        made = replace(made, ticket_limit=7 if action is RuleAction.LIMIT else None)
        read = parse(made.id.encode(), b"77 1234 " + dump(made))
        assert (read.version, read.set_ms) == (77, 1234)
        assert read.shown() | {"version": 0, "set_ms": 0} == made.shown()

    @given(
        st.one_of(
            st.binary(),
            st.builds(lambda text: b"1 2 " + text.encode(), st.text()),
            st.just(b'1 2 {"target": "ticket", "action": "run"}'),
        )
    )
    def test_what_cannot_be_read_pauses_everything_and_says_how_to_get_rid_of_it(self, stored: bytes) -> None:
        read = parse(b"some-id", stored)
        assert (read.target, read.action, read.version) == (Target.EVERYTHING, RuleAction.PAUSE, 0)
        assert "usher rules lift some-id" in read.told()

    @pytest.mark.parametrize(
        "odd",
        [
            *({"rate_per_second": rate} for rate in (0, -1, float("inf"), float("nan"), "x", None)),
            *({"value": 5}, {"reason": None}, {"who": ["alice"]}, {"target": "planet"}, {"action": None}),
        ],
    )
    def test_a_rule_with_one_odd_part_pauses_everything_too(self, odd: dict[str, Any]) -> None:
        stored = json.loads(dump(rule(Target.TICKET, "T", RuleAction.SLOW, 2.0)))
        assert parse(b"id", b"1 2 " + json.dumps(stored).encode()).target is Target.TICKET
        read = parse(b"id", b"1 2 " + json.dumps(stored | odd).encode())
        assert (read.target, read.action) == (Target.EVERYTHING, RuleAction.PAUSE)


class TestBuckets:
    @given(st.floats(0.01, 100), st.lists(st.floats(0, 5), min_size=1, max_size=60))
    def test_no_more_than_the_rate_is_let_go_in_any_time(self, rate: float, waits: list[float]) -> None:
        buckets, now, spent, began = TokenBuckets(), 100.0, 0, 100.0
        for wait in waits:
            now += wait
            tokens = buckets.tokens(b"T", rate, now)
            buckets.spend(b"T", tokens)
            spent += tokens
            assert spent <= 1 + rate * (now - began) + 1e-6
            assert buckets.due_s(b"T", rate) >= now - 1e-9

    def test_the_next_token_comes_when_it_is_due(self) -> None:
        buckets = TokenBuckets()
        assert buckets.tokens(b"T", 4.0, 0.0) == 1
        buckets.spend(b"T", 1)
        assert buckets.due_s(b"T", 4.0) == 0.25
        assert buckets.tokens(b"T", 4.0, 0.2) == 0
        assert buckets.due_s(b"T", 4.0) == pytest.approx(0.25), "whoever asked too early does not wait longer for it"
        assert buckets.tokens(b"T", 4.0, 0.25) == 1

    def test_the_bucket_that_was_asked_for_is_there_whoever_else_is_forgotten(self) -> None:
        buckets = TokenBuckets()
        for number in range(1001):
            ticket = b"%d" % number
            assert buckets.tokens(ticket, 1.0, 0.0) == 1
            buckets.spend(ticket, 1)
            assert buckets.due_s(ticket, 1.0) == 1.0

    def test_a_bucket_that_is_not_yet_filled_is_not_forgotten_however_long_ago_it_was_asked_for(self) -> None:
        buckets, rate, now = TokenBuckets(), 0.0001, 50_000.0
        buckets.tokens(b"T", rate, now)
        buckets.spend(b"T", 1)
        for number in range(1001):
            buckets.tokens(b"%d" % number, rate, now + 3601)
        assert buckets.tokens(b"T", rate, now + 3602) == 0

    def test_a_million_tickets_do_not_stay_in_memory(self) -> None:
        buckets = TokenBuckets()
        for number in range(20_000):
            buckets.tokens(b"%d" % number, 1.0, float(number))
        assert len(buckets._buckets) <= 2001
