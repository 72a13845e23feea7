"""A ticket tends to come back to the same consumer; joins and leaves move little; nobody gets more than a share."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from usher.master.policy.board import placement as choice
from usher.master.policy.board.placement import Affinity, OpenConsumers

TICKETS = [b"ticket-%d" % number for number in range(4000)]


def homes(*names: str) -> dict[bytes, str]:
    """The best ranked consumer of every ticket."""
    known = Affinity(names)
    return {ticket: known.ranking(ticket)[0] for ticket in TICKETS}


def test_the_ranking_depends_on_the_names_only_not_on_their_order_or_on_the_process() -> None:
    assert homes("c1", "c2", "c3") == homes("c3", "c1", "c2", "c1")
    # Two masters must agree, also of different versions of Python: hash() would differ from process to process.
    assert Affinity(["c1", "c2", "c3"]).ranking(b"42") == ["c3", "c2", "c1"]


def test_a_consumer_that_joins_takes_its_share_and_moves_nothing_else() -> None:
    before, after = homes("c1", "c2", "c3"), homes("c1", "c2", "c3", "c4")
    moved = {ticket for ticket in TICKETS if before[ticket] != after[ticket]}
    assert {after[ticket] for ticket in moved} == {"c4"}
    assert 0.15 < len(moved) / len(TICKETS) < 0.35


def test_a_consumer_that_leaves_moves_only_its_own_tickets_to_the_next_in_their_ranking() -> None:
    before, after = Affinity(["c1", "c2", "c3", "c4"]), Affinity(["c1", "c2", "c3"])
    for ticket in TICKETS:
        left = [name for name in before.ranking(ticket) if name != "c4"]
        assert list(after.ranking(ticket)) == left


@given(st.integers(0, 10**7), st.integers(1, 1000))
def test_the_bounds_leave_room_and_none_is_more_than_a_quarter_above_the_mean(in_flight: int, consumers: int) -> None:
    (open_ones := OpenConsumers(()))._by_name = dict.fromkeys(range(consumers))  # type: ignore[arg-type]
    bound = open_ones.bound(in_flight)
    assert in_flight < bound * consumers and bound <= 1.25 * (in_flight + 1) / consumers + 1


MANY = [f"c{number}" for number in range(200)]


def test_of_very_many_only_those_next_on_a_ring_are_ranked_and_all_masters_agree() -> None:
    assert homes(*MANY) == homes(*reversed(MANY))
    counted = Counter(homes(*MANY).values())
    assert len(counted) > 0.95 * len(MANY)
    assert max(counted.values()) < 4 * len(TICKETS) / len(MANY)


def test_the_cost_of_a_ranking_does_not_grow_with_the_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[str] = []
    score = choice._score
    monkeypatch.setattr(choice, "_score", lambda slot, name: scored.append(name) or score(slot, name))
    Affinity(MANY).ranking(b"42")
    Affinity(f"c{number}" for number in range(2000)).ranking(b"42")
    assert len(scored) == 2 * choice._LOOKED_AT
