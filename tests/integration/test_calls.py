"""ack.lua, progress.lua, and the scripts that write dead letters: who called is told once, and by the owner alone."""

from __future__ import annotations

import pytest

from tests.integration.factories import World, bury, fetch, hand_over, pairs, plan
from usher.common.base.errors import OwnershipLost
from usher.common.protocol.keys import LogKeys
from usher.consumer.lifecycle.owner_scripts import Letter
from usher.master.leader.entries import Rejected

_KEY = LogKeys("ticket_stream").replies("a" * 32).encode()
_ADDRESS = _KEY + b" 7"


def _told(world: World) -> list[dict[bytes, bytes]]:
    return [pairs(fields) for _, fields in world.link.call("XRANGE", _KEY, "-", "+")]


def test_an_answer_is_written_by_the_acknowledgement_that_counts_and_by_no_other(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second, third = world.owned(leader, a, b"T", b"1-1", b"2-1", b"3-1")
    answer = (_KEY, first, b"7", b"json", b"{}")
    assert a.steps.ack([first, second], b"ran", 100, answers=[answer]) == ""
    assert a.steps.ack([first, second], b"ran", 100, is_again=True, answers=[answer]) == "", "its reply was lost"
    assert (_told(world), world.pending()) == ([{b"call": b"7", b"json": b"{}"}], {a.name: [third]})
    assert 590_000 < world.link.call("PTTL", _KEY) <= 600_000
    world.end_lease(a)
    with world.unchanged(), pytest.raises(OwnershipLost):
        a.steps.ack([third], answers=[(_KEY, third, b"8", b"json", b"1")])
    with world.unchanged(), pytest.raises(OwnershipLost):
        a.steps.progress([(_KEY, b"8", 5, 1, 1, b"json", b"1")])


def test_an_address_that_cannot_be_written_to_holds_nothing_up_and_is_told(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.link.call("SET", b"x", b"no stream")
    answers = [(b"x", ids[0], b"7", b"json", b"1"), (_KEY, ids[1], b"8", b"json", b"2")]
    assert "WRONGTYPE" in a.steps.ack(ids, answers=answers)
    assert (world.pending(), _told(world)) == ({}, [{b"call": b"8", b"json": b"2"}])
    parts = [(b"x", b"7", 5, 1, 1, b"json", b"1"), (_KEY, b"8", 5, 1, 2, b"bytes", b"\xff")]
    assert "WRONGTYPE" in a.steps.progress(parts)
    assert _told(world)[1:] == [{b"call": b"8", b"fence": b"5", b"attempt": b"1", b"part": b"2", b"bytes": b"\xff"}]


@pytest.mark.parametrize("policy", ["skip", "halt"])
def test_a_dead_letter_answers_once(world: World, policy: str) -> None:
    leader, a = world.elect(), world.join("a")
    world.add(b"1-1", "usher_reply", _ADDRESS, "ticket_id", "T")
    fetch(leader, 10)
    hand_over(leader, plan(a, {b"T": [b"1-1"]}, {b"T": world.head(b"T")}))
    fence = int(world.head(b"T").split()[1])
    letter = Letter(b"T", b"1-1", "gave_up", "GiveUp: no", 1, 1, 2, fence, "GiveUp", "", policy)
    bury(a.steps, letter)
    bury(a.steps, letter)
    assert _told(world) == [{b"call": b"7", b"failed": b"gave_up", b"error": b"GiveUp: no", b"id": b"1-1"}]


@pytest.mark.parametrize("address", [b"", b"x", b"ticket_stream 7", _KEY, _ADDRESS + b"0" * 16, _KEY + b"g 7"])
def test_who_gives_an_address_that_is_none_is_not_answered(world: World, address: bytes) -> None:
    leader = world.elect()
    world.add(b"1-1", "usher_reply", address, "ticket_id", "")
    world.add(b"2-1", "usher_reply", _ADDRESS, "ticket_id", "")
    fetch(leader, 10)
    assert leader.reject([Rejected(one, b"", "empty_ticket_id") for one in (b"1-1", b"2-1")]) == 2
    assert [told[b"id"] for told in _told(world)] == [b"2-1"]
    assert world.link.call("XLEN", "ticket_stream") == 2
