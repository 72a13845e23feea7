"""Tickets that were given back until a time (owner word ``waits@<ms>``): no script hands one over, or takes one for an
incarnation's, before Redis' clock says so."""

from __future__ import annotations

import pytest

from tests.integration.factories import FIELD, World, hand_over
from usher.common.redis.replies import redis_ms
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.policy.board.board import Board
from usher.master.policy.group_loss import Memory
from usher.master.recovery.repairs import Takeover

HOUR_MS = 3_600_000


def put_off(world: World, leader: LeaderScripts, ticket: bytes, due_ms: int, *ids: bytes) -> bytes:
    """A ticket that waits until then; the head of its record."""
    sent = world.parked(leader, ticket, *ids)
    world.spoil(ticket, b"waits@%d 5 %s" % (due_ms, b" ".join(sent)))
    return world.head(ticket)


def adopted(world: World, leader: LeaderScripts) -> Takeover:
    return Takeover(world.link, world.keys, world.stream, leader, Board(512), lambda: None).run(Memory())


class TestTakeover:
    @pytest.mark.parametrize("after_ms", [-1, HOUR_MS])
    def test_a_new_leader_plans_at_once_what_is_due_and_nothing_before(self, world: World, after_ms: int) -> None:
        leader, a = world.elect(), world.join()
        due_ms = redis_ms(world.link) + after_ms
        put_off(world, leader, b"T", due_ms, b"1-1", b"2-1")
        found = adopted(world, leader)
        board, now_s = found.board, due_ms / 1000
        assert (found.taken_back, board.in_flight, board.parked) == (0, 0, 2)
        assert set(board.consumers) == {a.incarnation}, "no incarnation of that name is to be recovered"
        board.learn_time(redis_ms(world.link), now_s)
        planned = board.plan(100, now_s)
        assert (planned is None) == (after_ms > 0)
        assert (board.next_due_s() is None) == (after_ms < 0)
        if planned is not None:
            assert hand_over(leader, planned) > 5
            assert world.pending() == {a.name: [b"1-1", b"2-1"]}

    def test_of_what_was_given_back_nothing_is_planned_that_becomes_a_dead_letter(self, world: World) -> None:
        """Masters were restarted with another limit."""
        leader, a = world.elect(), world.join()
        put_off(world, leader, b"T", 1, b"1-1", b"2-1")
        small = LeaderScripts(world.scripts, world.keys, leader.epoch, FIELD, longest_message=1)
        board = adopted(world, small).board
        assert (board.parked, board.plan(100, 1e9)) == (0, None)
        assert [reason for _, _, reason in world.state().letters()] == [b"too_large"] * 2
        world.apart_because = f"{a.name!r} gets nothing, and the record names what is over"
