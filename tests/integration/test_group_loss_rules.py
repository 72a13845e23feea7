"""What a lost group may cost, with the real objects of both programs: nothing is lost, and what repeats does so in
order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from tests.hands import rank
from tests.integration.actors import MasterActor, Stage, Trouble
from tests.integration.factories import fetch
from tests.integration.group_loss import T, U, destroy_group, end_all, half_done, leader, repeats_until, settle


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


# ---- repeats ----


def _at_once(stage: Stage, m: MasterActor) -> MasterActor:
    settle(m)
    return m


def _after_a_lost_page(stage: Stage, m: MasterActor) -> MasterActor:
    m.turn()  # there is no group
    m.link.troubles["read"] = Trouble.REPLY_LOST
    settle(m)
    assert not m.link.troubles
    return m


def _by_another_master(stage: Stage, m: MasterActor) -> MasterActor:
    m.turn()
    m.link.troubles["rejoin"] = Trouble.NEVER_SENT
    m.turn()
    assert not m.link.troubles
    stage.end_lead()
    successor = leader(stage, "m2", batch=2)
    successor.settle()
    return successor


@pytest.mark.parametrize("batch", [1, 2, 100])
@pytest.mark.parametrize("again", [_at_once, _after_a_lost_page, _by_another_master])
def test_what_was_done_of_a_ticket_in_processing_does_not_run_behind_its_later_messages(
    stage: Stage, batch: int, again: Callable[[Stage, MasterActor], MasterActor]
) -> None:
    m = leader(stage, batch=batch)
    a, ids = half_done(stage, m)
    destroy_group(stage)
    m = again(stage, m)
    later = stage.send(T)
    m.settle()
    a.read()
    end_all(a)
    stage.finish(m, [a])
    stage.check_done(T, [*ids, *later])
    assert repeats_until(stage) is None, "from here on nothing is taken for a repeat"


@pytest.mark.parametrize("batch", [2, 100])
def test_a_ticket_that_nobody_had_repeats_from_there_on_in_order_and_under_a_new_fence(
    stage: Stage, batch: int
) -> None:
    m = leader(stage, batch=batch)
    a, ids = half_done(stage, m)
    blocker, third = a.runs
    third.succeed()
    for _ in range(2):
        run = a.start()
        assert run is not None
        run.succeed()
    a.flush()
    m.turn(*a.reports())
    destroy_group(stage)
    m.settle()
    blocker.succeed()
    stage.finish(m, [a])
    runs = [run for run in stage.history.starts if run.ticket == T]
    assert [run.id for run in runs] == [*ids, *ids]
    assert all(rank(one.id) < rank(next_one.id) or one.fence < next_one.fence for one, next_one in pairwise(runs))
    assert not stage.world.state().pending


def test_a_message_that_came_after_the_loss_waits_for_the_repeats_of_its_ticket_that_are_seen_with_it(
    stage: Stage,
) -> None:
    m = leader(stage)
    a, [first] = stage.consumer("a"), stage.send(T)
    m.settle()
    a.work()
    m.turn(*a.reports())
    destroy_group(stage)
    [second] = stage.send(T)
    settle(m)
    stage.finish(m, [a])
    assert stage.history.ids(T) == [first, first, second]


def test_a_stray_that_comes_after_the_repeats_is_run_whatever_is_above_it(stage: Stage) -> None:
    """Only what the group is given again counts as done before; what an operator did in peace does not."""
    m = leader(stage)
    a, _ = half_done(stage, m)
    destroy_group(stage)
    m.settle()
    assert repeats_until(stage) is None
    [stray] = stage.send(T)
    stage.link.call("XREADGROUP", "GROUP", stage.keys.group, "stranger", "STREAMS", stage.keys.stream, ">")
    later = stage.send(T)
    m.settle()
    stage.world.make_idle("stranger", 1_000_000, stray)
    m.sweep()
    a.read()
    end_all(a)
    stage.finish(m, [a])
    assert {stray, *later} <= stage.history.succeeded


def test_a_message_that_its_owner_gets_again_before_it_knows_that_redis_has_it_as_done_runs_again(stage: Stage) -> None:
    """Passed over as one that it holds, it would be pending for it for ever."""
    m, a = leader(stage), stage.consumer("a")
    [first] = stage.send(T)
    m.settle()
    a.read()
    run = a.start()
    assert run is not None
    run.succeed()

    def group_is_lost(step: str) -> None:
        if step == "ack":
            a.link.after = lambda _step: None
            destroy_group(stage)
            m.settle()
            assert stage.world.pending() == {a.name: [first]}, "handed over anew"
            assert a.read() == 0

    a.link.after = group_is_lost
    a.flush()
    stage.finish(m, [a])
    assert stage.history.ids(T) == [first, first]
    assert (stage.world.state().pending, stage.world.state().index) == ({}, {})
    assert not a.lanes.load()[1]


# ---- where it begins again ----


def test_what_another_master_handed_over_while_it_led_for_a_moment_is_not_lost(stage: Stage) -> None:
    """The lead goes from one to two and back within the second between two notes of the position; then the group is
    lost, and the owner dies."""
    one, a = leader(stage, "m1"), stage.consumer("a")
    stage.end_lead()
    two = leader(stage, "m2")
    [first] = stage.send(T)
    two.settle()
    stage.end_lead()
    one.turn()  # fenced
    settle(one)
    [second] = stage.send(U)
    one.settle()
    assert stage.world.pending() == {a.name: [first, second]}
    destroy_group(stage)
    settle(one)
    stage.end_lease(a)
    a.crash()
    stage.finish(one, [stage.consumer("b")])
    stage.check_done(T, [first])
    stage.check_done(U, [second])


def test_what_was_read_while_another_master_led_is_not_lost_though_the_index_does_not_know_of_it(stage: Stage) -> None:
    one, a = leader(stage, "m1"), stage.consumer("a")
    stage.end_lead()
    leader(stage, "m2")
    [first] = stage.send(T)
    stage.link.call("XREADGROUP", "GROUP", stage.keys.group, "stranger", "STREAMS", stage.keys.stream, ">")
    stage.end_lead()
    one.turn()  # fenced
    settle(one)
    [second] = stage.send(U)
    one.settle()
    destroy_group(stage)
    settle(one)
    stage.finish(one, [a])
    stage.check_done(T, [first])
    stage.check_done(U, [second])


@pytest.mark.parametrize("read_before", [0, 2, 3])
def test_a_ticket_that_was_given_back_is_parked_once(stage: Stage, read_before: int) -> None:
    """Its record names what the group, made again, has not been given yet. That comes as new, and must not be parked
    before."""
    m, a = leader(stage), stage.consumer("a")
    ids = [entry_id for _ in range(6) for entry_id in stage.send(T)]
    m.settle()
    a.begin_drain()
    assert a.give_back() == 1
    assert a.deregister()
    stage.end_lead()
    destroy_group(stage)
    stage.world.make_group()
    if read_before:
        fetch(stage.world.elect(), read_before)
        stage.end_lead()
    b = stage.consumer("b")
    new = leader(stage, "m2", window=2)
    for _ in range(4):
        new.turn()
        assert new.board.parked <= len(ids)
        parked = [entry_id for ticket in new.board.tickets.values() for entry_id in ticket.parked]
        assert len(parked) == len(set(parked)), "parked twice"
    stage.finish(new, [b])
    stage.check_done(T, ids)


# ---- an incarnation that lives without a registration ----


def test_a_consumer_whose_registration_was_deleted_keeps_what_it_has_until_its_lease_ends(stage: Stage) -> None:
    old, a = stage.leader("m1"), stage.consumer("a")
    [first] = stage.send(T)
    old.settle()
    a.read()
    run = a.start()
    assert run is not None
    stage.link.call("DEL", stage.keys.consumers)
    stage.end_lead()
    new, b = stage.leader("m2"), stage.consumer("b")
    assert new.board.runs(T, first), "its lease lives"
    [second] = stage.send(T)
    new.settle()
    assert stage.world.pending() == {a.name: [first], b"master": [second]}, (
        "it gets no more, and nobody else gets the ticket"
    )
    run.succeed()
    a.flush()
    new.turn(*a.reports())
    stage.finish(new, [b])
    stage.check_done(T, [first, second])


def test_when_the_lease_of_a_consumer_without_a_registration_ends_its_tickets_go_on_elsewhere(stage: Stage) -> None:
    old, a = stage.leader("m1"), stage.consumer("a")
    ids = [*stage.send(T), *stage.send(T)]
    old.settle()
    stage.link.call("DEL", stage.keys.consumers)
    stage.end_lead()
    new, b = stage.leader("m2"), stage.consumer("b")
    new.settle()
    stage.end_lease(a)
    a.crash()
    stage.finish(new, [b])
    stage.check_done(T, ids)
    assert stage.history.by(b.incarnation) == ids
