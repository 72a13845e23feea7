"""Turns of tenants and of urgent tickets: who is planned next, one sentence each."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.boards import ids, planned
from usher.common.protocol.marks import MOST_URGENT, Mark
from usher.master.policy.board.board import Board
from usher.master.policy.board.turns import AGE_S


def _board(weights: dict[bytes, float] | None = None, slots: int = 4, capacity: int = 8) -> Board:
    board = Board(512, math.inf, weights or {})
    board.join("c:1", "c", slots, capacity, True)
    return board


class Feed:
    """Messages with marks that come to a board, and what is planned of them, message by message."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.now_s = 100.0
        self._number = 0
        self.tenant_of: dict[bytes, bytes] = {}

    def send(self, tenant: bytes, ticket: bytes = b"", priority: int = 0) -> tuple[bytes, bytes]:
        """One message of a tenant; without a ticket, of one of its own."""
        self._number += 1
        [entry_id] = ids(self._number)
        name = ticket or b"%s-%d" % (tenant, self._number)
        assert not self.board.arrive([(entry_id, name)])
        self.board.learn([Mark(entry_id, name, tenant, priority)])
        self.tenant_of[name] = tenant
        return name, entry_id

    def plan(self, limit: int = 1000, is_granted: bool = True) -> list[bytes]:
        """Plan once; the tickets, in their order."""
        plan = self.board.plan(limit, self.now_s)
        if plan is None:
            return []
        if is_granted:
            self.board.confirm(plan, 7)
        else:
            self.board.withdraw(plan)
        return [part.ticket for target in plan.targets for part in target.parts]

    def run(self, messages: int) -> list[bytes]:
        """So many messages, each done before the next is planned; their tickets."""
        done: list[bytes] = []
        while len(done) < messages and (plan := self.board.plan(1, self.now_s)) is not None:
            self.board.confirm(plan, 7)
            for (incarnation, ticket), entry_ids in planned(plan).items():
                self.board.free(incarnation, [(ticket, entry_ids)], self.now_s)
                done += [ticket] * len(entry_ids)
        return done

    def shares(self, messages: int) -> Counter[bytes]:
        return Counter(self.tenant_of[ticket] for ticket in self.run(messages))


@pytest.mark.parametrize(("weights", "ratio"), [({}, 1.0), ({b"b": 3.0}, 3.0), ({b"a": 10.0, b"b": 1.0}, 0.1)])
def test_two_floods_are_served_by_their_weights(weights: dict[bytes, float], ratio: float) -> None:
    feed = Feed(_board(weights))
    for tenant in (b"a", b"b"):
        for _ in range(1200):
            feed.send(tenant)
    shares = feed.shares(1200)
    assert shares[b"b"] / shares[b"a"] == pytest.approx(ratio, rel=0.1)


def test_long_tickets_count_by_their_messages() -> None:
    feed = Feed(_board({b"b": 3.0}, capacity=100))
    for number in range(2000):
        feed.send(b"a", b"a%d" % (number % 5))  # a few long ones
        feed.send(b"b")  # many of one message
    done: Counter[bytes] = Counter()
    for _ in range(40):
        plan = feed.board.plan(1000, feed.now_s)
        assert plan is not None
        feed.board.confirm(plan, 7)
        for (incarnation, ticket), entry_ids in planned(plan).items():
            done[feed.tenant_of[ticket]] += len(entry_ids)
            feed.board.free(incarnation, [(ticket, entry_ids)], feed.now_s)
    assert done[b"b"] / done[b"a"] == pytest.approx(3.0, rel=0.1) or done[b"b"] == 2000


def test_who_was_quiet_is_next_and_has_saved_nothing_up() -> None:
    feed = Feed(_board())
    for _ in range(500):
        feed.send(b"flood")
    feed.run(300)
    first, _ = feed.send(b"quiet")
    assert feed.run(1) == [first] or feed.run(1) == [first]
    for _ in range(100):
        feed.send(b"quiet")
    assert abs(feed.shares(100)[b"quiet"] - 50) <= 2


def test_who_always_has_one_message_waiting_gets_no_more_than_its_share() -> None:
    """It must not begin anew with every message."""
    feed = Feed(_board())
    for _ in range(500):
        feed.send(b"flood")
    done: Counter[bytes] = Counter()
    feed.send(b"sly")
    for _ in range(200):
        [ticket] = feed.run(1)
        done[feed.tenant_of[ticket]] += 1
        if feed.tenant_of[ticket] == b"sly":
            feed.send(b"sly")
    assert abs(done[b"sly"] - 100) <= 2


def test_a_full_consumer_is_asked_for_one_ticket_and_not_for_each_that_waits() -> None:
    feed = Feed(_board(capacity=2))
    for _ in range(1000):
        feed.send(b"a")
    assert len(feed.plan()) == 2
    before = feed.board._queue._unassigned
    assert (len(before), feed.plan(), len(before)) == (1, [], 1)
    assert feed.board.room > 0, "it is read on all the same"


class TestPriority:
    def test_the_most_urgent_is_next_and_equals_in_their_order(self) -> None:
        feed = Feed(_board())
        sent = [feed.send(b"", priority=priority)[0] for priority in (0, 3, 9, 3, 0, 9)]
        assert feed.run(6) == [sent[n] for n in (2, 5, 1, 3, 0, 4)]

    def test_a_ticket_is_as_urgent_as_its_most_urgent_message_and_stays_in_order(self) -> None:
        feed = Feed(_board(capacity=100))
        for _ in range(10):
            feed.send(b"")
        mine = [feed.send(b"", b"T")[1] for _ in range(20)]
        mine.append(feed.send(b"", b"T", priority=9)[1])
        plan = feed.board.plan(1000, feed.now_s)
        assert plan is not None
        first = plan.targets[0].parts[0]
        assert (first.ticket, first.ids) == (b"T", mine)

    def test_it_is_not_urgent_any_more_when_that_message_is_handed_over(self) -> None:
        feed = Feed(_board(capacity=100))
        feed.send(b"", b"T", priority=9)
        ticket = feed.board.tickets[b"T"]
        assert ticket.priority == 9
        feed.plan()
        feed.send(b"", b"T")
        assert ticket.priority == 0

    def test_nothing_waits_behind_what_came_more_than_the_bound_later(self) -> None:
        feed = Feed(_board(capacity=1))
        running = feed.send(b"")[0]
        feed.plan()
        old, _ = feed.send(b"")
        feed.plan()
        feed.now_s += MOST_URGENT * AGE_S - 1
        feed.plan()
        sooner, _ = feed.send(b"", priority=MOST_URGENT)
        feed.now_s += 2
        feed.plan()
        later, _ = feed.send(b"", priority=MOST_URGENT)
        order, done = [], running
        for _ in range(3):
            feed.board.free("c:1", [(done, [*feed.board.tickets[done].running])], feed.now_s)
            [done] = feed.plan()
            order.append(done)
        assert order == [sooner, old, later]

    def test_urgency_is_within_a_tenant(self) -> None:
        feed = Feed(_board())
        for _ in range(100):
            feed.send(b"loud", priority=9)
            feed.send(b"calm")
        assert abs(feed.shares(50)[b"calm"] - 25) <= 2

    def test_invented_tenants_share_what_is_beyond_two_thousand(self) -> None:
        feed = Feed(_board({b"known": 1.0}))
        for number in range(4000):
            feed.send(b"invented-%d" % number)
        feed.send(b"known", b"mine")
        assert len(feed.board.tenants()) == 2002  # and who has a weight
        assert b"mine" in feed.run(2300)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), tenants=st.integers(1, 5), capacity=st.integers(1, 30))
def test_whatever_comes_and_goes_all_is_done_in_order(seed: int, tenants: int, capacity: int) -> None:
    chance = random.Random(seed)
    feed = Feed(_board({b"t0": 3.0}, slots=2, capacity=capacity))
    sent: dict[bytes, list[bytes]] = {}
    done: dict[bytes, list[bytes]] = {}
    left = 300
    while left or any(len(done.get(name, [])) < len(entry_ids) for name, entry_ids in sent.items()):
        feed.now_s += chance.random()
        for _ in range(chance.randrange(20) if left else 0):
            tenant = b"t%d" % chance.randrange(tenants)
            name, entry_id = feed.send(tenant, b"T%d" % chance.randrange(12), chance.choice([0, 0, 0, 5, 9]))
            sent.setdefault(name, []).append(entry_id)
            left = max(0, left - 1)
        feed.plan(chance.randrange(1, 50), is_granted=chance.random() > 0.2)
        for ticket in list(feed.board.tickets.values()):
            if ticket.running and chance.random() < 0.6:
                [*running] = ticket.running
                some = running[: chance.randrange(1, len(running) + 1)]
                done.setdefault(ticket.name, []).extend(some)
                feed.board.free("c:1", [(ticket.name, some)], feed.now_s)
        queue = feed.board._queue
        queued = [*queue.waiting(), *feed.board.consumers["c:1"].waiting]
        assert len({id(ticket) for ticket in queued}) == len(queued)
        assert {one.name for one in queued} == {one.name for one in feed.board.tickets.values() if one.queued}
        assert sum(one.waiting for one in queue._all()) == len([*queue.waiting()]) - len(queue._unassigned)  # type: ignore[attr-defined]
    assert done == sent
    assert (feed.board.parked, feed.board.in_flight, feed.board.tickets) == (0, 0, {})


def test_all_that_stands_before_an_urgent_message_is_handed_over_with_it() -> None:
    """At once: else its consumer, which has enough, does not know how urgent what it has is."""
    feed = Feed(Board(512, 1.0, {}))
    feed.board.join("c:1", "c", 4, 100, True)
    for _ in range(8):
        feed.send(b"")
    assert len(feed.plan()) == 8, "all that the pace allows at first"
    feed.send(b"")
    assert feed.plan() == []
    mine = [feed.send(b"", b"T")[1] for _ in range(20)]
    assert feed.plan() == []
    mine.append(feed.send(b"", b"T", priority=9)[1])
    plan = feed.board.plan(1000, feed.now_s)
    assert plan is not None
    assert planned(plan) == {("c:1", b"T"): mine}
