"""Live rules for tenants on the board: rate, concurrency, weight, pause; one sentence each."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.test_ruled_board import follow
from tests.unit.test_turns import Feed, _board
from usher.common.protocol.marks import Mark
from usher.master.policy.board.board import Board
from usher.master.policy.rules import Rule, RuleAction, Target, parse, rule_id


def _limit(tenant: str = "a", rate: float | None = None, **limits: int) -> Rule:
    return Rule(Target.TENANT, tenant, RuleAction.SLOW, rate, id=rule_id(Target.TENANT, tenant), **limits)  # type: ignore[arg-type]


def _running(board: Board, tenant: bytes) -> list[bytes]:
    return [ticket.name for ticket in board.tickets.values() if ticket.running and ticket.tenant == tenant]


def _end(feed: Feed, name: bytes) -> None:
    ticket = feed.board.tickets[name]
    assert ticket.owner is not None
    feed.board.free(ticket.owner.incarnation, [(name, [*ticket.running])], feed.now_s)


def test_no_more_tickets_than_its_concurrency_are_in_processing_over_all_consumers() -> None:
    feed = Feed(_board(capacity=50))
    feed.board.join("d:1", "d", 4, 50, True)
    follow(feed.board, _limit(concurrency=4))
    for _ in range(20):
        feed.send(b"a")
        feed.send(b"b")
    feed.plan()
    assert (len(_running(feed.board, b"a")), len(_running(feed.board, b"b"))) == (4, 20)
    assert (feed.plan(), feed.board.next_due_s()) == ([], None)
    _end(feed, _running(feed.board, b"a")[0])
    assert len(feed.plan()) == 1
    assert len(_running(feed.board, b"a")) == 4


def test_its_rate_holds_for_all_of_its_tickets_together_and_for_nobody_else() -> None:
    feed = Feed(_board(capacity=10_000))
    follow(feed.board, _limit(rate=50.0))
    for _ in range(1000):
        feed.send(b"a")
    done: Counter[bytes] = Counter()
    for _ in range(100):  # ten seconds
        feed.send(b"b")
        for name in feed.plan():
            done[feed.tenant_of[name]] += 1
            _end(feed, name)
        feed.now_s += 0.1
    assert abs(done[b"a"] - 500) <= 10
    assert done[b"b"] == 100
    due_s = feed.board.next_due_s()
    assert due_s is not None
    assert due_s <= feed.now_s + 0.1


def test_a_long_ticket_is_not_handed_more_than_its_tenants_rate_allows() -> None:
    feed = Feed(_board(capacity=10_000))
    follow(feed.board, _limit(rate=5.0))
    for _ in range(100):
        feed.send(b"a", b"T")
    feed.plan()
    feed.now_s += 1
    feed.plan()
    assert len(feed.board.tickets[b"T"].running) <= 6


def test_its_weight_holds_while_the_rule_does() -> None:
    feed = Feed(_board())
    for _ in range(1000):
        feed.send(b"a")
        feed.send(b"b")
    follow(feed.board, _limit("b", weight=3))
    shares = feed.shares(400)
    assert shares[b"b"] / shares[b"a"] == pytest.approx(3.0, rel=0.1)
    follow(feed.board)
    shares = feed.shares(400)
    assert shares[b"b"] / shares[b"a"] == pytest.approx(1.0, rel=0.1)


def test_it_is_told_why_a_ticket_does_not_have_its_turn() -> None:
    feed = Feed(_board(capacity=100))
    follow(feed.board, _limit(concurrency=2))
    names = [feed.send(b"a")[0] for _ in range(3)]
    feed.plan()
    [left] = set(names) - set(_running(feed.board, b"a"))
    facts = feed.board.glance(left, feed.now_s, 1000)
    assert facts is not None
    assert (facts.turn, facts.tenant, facts.due_ms) == ("tenant a has its 2 of 2", b"a", 0)
    follow(feed.board, _limit(rate=2.0))
    feed.plan()
    feed.plan()
    names = [name for name in names if feed.board.tickets[name].parked] or [feed.send(b"a")[0]]
    feed.plan()
    facts = feed.board.glance(names[-1], feed.now_s, 1000)
    assert facts is not None
    assert facts.turn.startswith("tenant a is slowed to 2/s by somebody")
    assert 1000 < facts.due_ms <= 1600


def test_it_is_told_that_more_urgent_tickets_are_before_it() -> None:
    feed = Feed(_board(capacity=1))
    feed.send(b"")
    feed.plan()
    waiting, _ = feed.send(b"")
    urgent, _ = feed.send(b"", priority=9)
    told = {name: feed.board.glance(name, 0.0, 0) for name in (waiting, urgent)}
    assert [facts.turn if facts else None for facts in told.values()] == ["behind more urgent tickets", ""]


@pytest.mark.parametrize("text", [b'"concurrency": 0', b'"concurrency": "4"', b'"weight": 1.5', b'"x": 1'])
def test_one_that_cannot_be_read_pauses_everything(text: bytes) -> None:
    stored = b'{"target": "tenant", "value": "a", "action": "slow", "rate_per_second": null, "reason": "", "who": "", '
    assert parse(b"r", b"0 0 " + stored + text + b"}").action is RuleAction.PAUSE


def test_what_a_record_says_is_in_processing_counts_also_when_it_is_read_again() -> None:
    feed = Feed(_board(capacity=100))
    follow(feed.board, _limit(concurrency=1))
    first, _ = feed.send(b"a")
    feed.board.doubt([first])
    second, _ = feed.send(b"a")
    assert feed.plan() == [second]
    feed.board.set_record(first, b"c:1", 7, [b"0-9"], feed.now_s)
    third, _ = feed.send(b"a")
    _end(feed, second)
    assert feed.plan() == []
    _end(feed, first)
    assert set(feed.plan()) & {first, third}


def test_a_tenant_that_never_had_a_token_is_explained() -> None:
    feed = Feed(_board(capacity=100))
    follow(feed.board, _limit(rate=5.0, concurrency=1))
    feed.board.set_record(b"T1", b"c:1", 7, [b"1-0"], feed.now_s)
    feed.board.learn([Mark(b"1-0", b"T1", b"a", 0)])
    feed._number = 1
    name, _ = feed.send(b"a")
    assert feed.plan() == []
    _end(feed, b"T1")
    seen = feed.board.glance(name, feed.now_s, 1000)
    assert seen is not None
    assert seen.due_ms == 1000
    assert feed.board.next_due_s() == feed.now_s
    assert feed.plan() == [name]
