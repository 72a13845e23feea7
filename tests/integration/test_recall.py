"""An incarnation is asked to give tickets back, by a record in its inbox that names what it may have started."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.factories import FIELD, NASTY_TICKETS, Owner, World
from usher.common.base.errors import Fenced, ReplyUnknown
from usher.common.redis.client import Link
from usher.common.redis.replies import HandOver
from usher.master.leader.leader_scripts import LeaderScripts


def _held(world: World, *tickets: bytes) -> list[tuple[bytes, bytes, list[bytes]]]:
    records = [(ticket, world.record(ticket)) for ticket in tickets]
    return [(ticket, b"%d" % record.fence, record.ids) for ticket, record in records if record is not None]


def _asked(world: World) -> tuple[LeaderScripts, Owner]:
    leader, a = world.elect(), world.join()
    world.owned(leader, a, b"T", b"1-1", b"2-1")
    return leader, a


def test_the_record_names_each_ticket_whatever_it_is_called_with_its_fence_and_ids(world: World) -> None:
    leader, a = _asked(world)
    for number, ticket in enumerate(NASTY_TICKETS, 3):
        world.owned(leader, a, ticket, b"%d-1" % number)
    asked, before = _held(world, b"T", *NASTY_TICKETS), world.state()
    assert leader.recall(a.incarnation, asked)
    assert world.inbox_records(a.incarnation)[-1].recalled == [
        HandOver(ticket, int(fence), ids) for ticket, fence, ids in asked
    ]
    assert world.state() == before, "asking changes nothing"


def test_when_others_have_changed_something_nobody_is_asked(world: World) -> None:
    leader, a = _asked(world)
    asked = _held(world, b"T")
    world.link.call("XADD", world.keys.changed, "*", "ticket", b"T")
    before = world.inbox_records(a.incarnation)
    assert (leader.recall(a.incarnation, asked), leader.changed) == (False, {(b"ticket", b"T")})
    assert not leader.recall(a.incarnation, asked), "as long as nobody has followed"
    assert world.inbox_records(a.incarnation) == before


def test_a_dead_inbox_stays_dead(world: World) -> None:
    leader, a = _asked(world)
    asked = _held(world, b"T")
    world.refuse(leader, a, "LOST")
    while leader.take_back(a.incarnation, 10).last:
        pass
    with world.unchanged():
        leader.recall(a.incarnation, asked)
    assert not world.link.call("EXISTS", world.keys.inbox(a.incarnation))


def test_a_former_leader_asks_for_nothing(world: World) -> None:
    late, a = _asked(world)
    asked = _held(world, b"T")
    world.link.call("DEL", world.keys.leader)
    with Link(world.link.url, "test:two") as link:
        LeaderScripts(link, world.keys, world.elect("http://two").epoch, FIELD).begin()
        with world.unchanged(), pytest.raises(Fenced):
            late.recall(a.incarnation, asked)


def test_after_a_lost_reply_the_same_question_comes_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, a = _asked(world)
    asked, pipeline = _held(world, b"T"), world.link.pipeline

    def lost(*sent: Any) -> None:
        pipeline(*sent)
        raise ReplyUnknown

    with monkeypatch.context() as link, pytest.raises(ReplyUnknown):
        link.setattr(world.link, "pipeline", lost)
        leader.recall(a.incarnation, asked)
    assert leader.recall(a.incarnation, asked), "as the next epoch does"
    assert len({str(one.recalled) for one in world.inbox_records(a.incarnation)[-2:]}) == 1
