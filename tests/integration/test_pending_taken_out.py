"""restore.lua, and what calls it: somebody takes entries out of the pending list by hand (XACK, XGROUP DELCONSUMER, XNACK): they are claimed again, run in
order, and are told of. In silence they would never run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.integration.actors import ConsumerActor, MasterActor, Stage
from tests.integration.factories import World, spent
from usher.common.base.errors import Fenced, GiveUp
from usher.common.protocol.mishaps import mishaps_command, parse_mishaps
from usher.common.redis.client import CommandRefused
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.operations.dead_letters import DeadLetters

T, U = b"T", b"U"


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


def _forget_name(stage: Stage, name: str) -> None:
    stage.link.call("XGROUP", "DELCONSUMER", stage.keys.stream, stage.keys.group, name)


def _acknowledge_all(stage: Stage, name: str) -> None:
    ids = stage.world.pending()[name.encode()]
    stage.link.call("XACK", stage.keys.stream, stage.keys.group, *ids)


def _leave_without_owner(stage: Stage, name: str) -> None:
    """As XNACK does, from Redis 8.8 on: on others, a name that is empty has them."""
    ids, of_group = stage.world.pending()[name.encode()], (stage.keys.stream, stage.keys.group)
    try:
        stage.link.call("XNACK", *of_group, "FAIL", "IDS", len(ids), *ids)
    except CommandRefused:
        stage.link.call("XCLAIM", *of_group, "", 0, *ids, "JUSTID")


_HOW = pytest.mark.parametrize("take_out", [_forget_name, _acknowledge_all, _leave_without_owner])


def _restored(stage: Stage) -> int:
    return parse_mishaps(stage.link.call(*mishaps_command(stage.keys))).restored


def _look_closer(m: MasterActor) -> None:
    """The next turn saves the position, and compares."""
    m.dispatcher._position_saver._saved_s = -1e9
    m.turn()


def _backlog(stage: Stage, window: int = 2) -> tuple[MasterActor, ConsumerActor, list[bytes]]:
    """A ticket of which the consumer has two messages, and others wait under ``master``."""
    m, a = stage.leader(window=window, reconcile_s=0.0), stage.consumer("a")
    ids = [stage.send(T)[0] for _ in range(8)]
    m.settle()
    assert len(stage.world.pending()[b"master"]) > 4
    return m, a, ids


@_HOW
def test_what_waited_under_master_is_claimed_again_and_runs_in_order(
    stage: Stage, take_out: Callable[[Stage, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    m, a, ids = _backlog(stage)
    waiting = stage.world.pending()[b"master"]
    take_out(stage, "master")
    _look_closer(m)
    assert stage.world.pending()[b"master"] == waiting
    assert _restored(stage) == len(waiting)
    told = [record.__dict__["facts"] for record in caplog.records if record.getMessage() == "pending_entries_restored"]
    assert [(facts["count"], facts["ids"]) for facts in told] == [(len(waiting), b" ".join(waiting))]
    stage.finish(m, [a])
    stage.check_done(T, ids)


@_HOW
def test_what_is_taken_out_again_at_once_is_claimed_again_again(
    stage: Stage, take_out: Callable[[Stage, str], None]
) -> None:
    """No look in between saw that nothing was missing."""
    m, a, ids = _backlog(stage)
    waiting = stage.world.pending()[b"master"]
    for round_ in (1, 2, 3):
        take_out(stage, "master")
        _look_closer(m)
        assert stage.world.pending()[b"master"] == waiting
        assert _restored(stage) == round_ * len(waiting)
    stage.finish(m, [a])
    stage.check_done(T, ids)


@_HOW
def test_it_is_claimed_again_also_when_it_is_to_be_handed_over_before_the_leader_has_compared(
    stage: Stage, take_out: Callable[[Stage, str], None]
) -> None:
    m, a, ids = _backlog(stage)
    m.dispatcher._position_saver._saved_s = 1e12
    take_out(stage, "master")
    stage.finish(m, [a])
    stage.check_done(T, ids)


@_HOW
@pytest.mark.parametrize("leader_dies", [False, True])
def test_what_a_consumer_had_that_died_is_claimed_again(
    stage: Stage, take_out: Callable[[Stage, str], None], leader_dies: bool
) -> None:
    m, a, ids = _backlog(stage)
    take_out(stage, a.incarnation)
    a.crash()
    stage.end_lease(a)
    b = stage.consumer("b")
    if leader_dies:
        m.crash()
        stage.end_lead()
        m = stage.leader("m2", window=2, reconcile_s=0.0)
    stage.finish(m, [b])
    stage.check_done(T, ids)
    assert _restored(stage) == 2


@_HOW
def test_what_a_living_consumer_has_is_pending_for_it_again(
    stage: Stage, take_out: Callable[[Stage, str], None]
) -> None:
    """Its handler runs meanwhile, and nothing of it is repeated; but a trimmer goes by the pending list."""
    m, a, ids = _backlog(stage)
    a.read()
    held = stage.world.pending()[a.incarnation.encode()]
    take_out(stage, a.incarnation)
    _look_closer(m)
    m.settle()
    assert stage.world.pending()[a.incarnation.encode()] == held
    stage.finish(m, [a])
    stage.check_done(T, ids)


def _halted(stage: Stage) -> tuple[MasterActor, ConsumerActor, list[bytes]]:
    m, a = stage.leader(reconcile_s=0.0), stage.consumer("a", policy="halt")
    ids = [*stage.send(T), *stage.send(T)]
    m.settle()
    a.read()
    run = a.start()
    assert run is not None
    run.fail(GiveUp("it cannot be done"))
    a.flush()
    m.settle()
    return m, a, ids


@_HOW
def test_what_is_halted_is_pending_for_that_again_and_goes_on_when_it_is_redriven(
    stage: Stage, take_out: Callable[[Stage, str], None]
) -> None:
    m, a, ids = _halted(stage)
    take_out(stage, "halted")
    _look_closer(m)
    m.settle()
    assert stage.world.pending() == {b"halted": ids[:1], b"master": ids[1:]}
    DeadLetters(stage.link, stage.keys).redrive(stage.world.letter_ids())
    stage.finish(m, [a])
    stage.check_done(T, [ids[0], *ids])


@_HOW
def test_what_stands_behind_a_halted_message_is_claimed_again_when_that_is_redriven(
    stage: Stage, take_out: Callable[[Stage, str], None]
) -> None:
    """The index names it, and memory does not keep it."""
    m, a, ids = _halted(stage)
    take_out(stage, "master")
    DeadLetters(stage.link, stage.keys).redrive(stage.world.letter_ids())
    stage.finish(m, [a])
    stage.check_done(T, [ids[0], *ids])
    assert _restored(stage) == 1


def test_what_was_acknowledged_and_deleted_by_hand_ends_as_a_letter(stage: Stage) -> None:
    m, a, ids = _backlog(stage)
    gone = stage.world.pending()[b"master"][1]
    stage.link.call("XACK", stage.keys.stream, stage.keys.group, gone)
    stage.link.call("XDEL", stage.keys.stream, gone)
    stage.finish(m, [a])
    stage.check_done(T, [one for one in ids if one != gone])
    assert stage.world.state().letters() == [(gone, T, b"body_gone")]


def test_nothing_is_claimed_again_while_all_is_well(stage: Stage) -> None:
    m, a, ids = _backlog(stage)
    for _ in range(3):
        _look_closer(m)
        a.work()
    stage.finish(m, [a])
    stage.check_done(T, ids)
    assert _restored(stage) == 0


def test_a_deposed_leader_claims_nothing_again(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader = world.elect()
    ids = world.parked(leader, T)
    world.link.call("XACK", world.keys.stream, world.keys.group, *ids)
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.restore([(T, ids)])


def test_only_what_is_there_and_was_given_to_the_group_is_claimed_again(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, T, b"1-1", b"2-1")
    unread = world.send(T, b"3-1")
    world.link.call("XACK", world.keys.stream, world.keys.group, first, second)
    world.delete(first)
    assert leader.restore([(T, [*unread, b"9-9"])]) == [second]
    assert world.pending() == {a.name: [second]}
    with world.unchanged():
        assert leader.restore([(T, []), (U, [])]) == []
    world.apart_because = "the living owner of what has no body ends it"


def test_where_no_ticket_is_quiet_redis_is_asked_nothing(stage: Stage) -> None:
    """Consumers are believed to have more than is pending most of the time: acknowledgements come before their reports.
    So each turn of a busy leader had a call for nothing."""
    m = stage.leader()
    stage.send(T)
    m.settle()
    assert m.dispatcher._steps is not None
    m.dispatcher._pending_check.suspects = True
    look_at, steps = m.dispatcher._pending_check.look_at, m.dispatcher._steps
    asked = [spent(stage.link, partial(look_at, names, steps))["evalsha"] for names in ((), (T,))]
    assert asked == [0, 1]
