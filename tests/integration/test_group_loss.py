"""Costs of a lost group, with the real objects of both programs: all consumers begin anew, nothing is lost, and repeats
come in order and as they were told."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.hands import rank
from tests.integration.actors import Stage
from tests.integration.factories import fetch
from tests.integration.group_loss import T, U, destroy_group, half_done, leader, note_position, settle
from usher.common.protocol.keys import HALTED
from usher.master.leader.leader_scripts import LeaderScripts


def test_nothing_is_handed_over_before_all_leases_have_ended_and_all_repeats_in_order(stage: Stage) -> None:
    m = leader(stage)
    a, ids = half_done(stage, m)
    destroy_group(stage)
    later = stage.send(T)
    settle(m)
    assert not stage.link.call("EXISTS", stage.keys.lease(a.incarnation))
    assert {name for name in stage.world.pending() if name != b"master"} == set()
    for run in list(a.runs):
        run.succeed()
    a.flush()
    assert a.lost, "what it has done since counts for nothing"
    a.crash()
    b = stage.consumer("b")
    stage.finish(m, [b])
    runs = [run for run in stage.history.starts if run.ticket == T]
    assert [run.id for run in runs][-len([*ids, *later]) :] == [*ids, *later]
    assert all(rank(one.id) < rank(next_one.id) or one.fence < next_one.fence for one, next_one in pairwise(runs))
    assert not stage.world.state().pending
    assert stage.link.call("HLEN", stage.keys.tickets) == 0


def test_who_comes_while_the_leader_waits_is_not_ended(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    m, a = leader(stage), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    destroy_group(stage)
    came = []
    revoke = LeaderScripts.revoke

    def revoked(steps: LeaderScripts, incarnation: str) -> bool:
        if not came:
            came.append(stage.consumer("b"))
        return revoke(steps, incarnation)

    monkeypatch.setattr(LeaderScripts, "revoke", revoked)
    settle(m)
    assert stage.link.call("GET", stage.keys.lease(came[0].incarnation)) == b"live"
    assert not stage.link.call("EXISTS", stage.keys.lease(a.incarnation))
    a.crash()
    stage.finish(m, came)
    stage.check_done(T, ids)


def test_the_first_group_ends_nobody(stage: Stage) -> None:
    destroy_group(stage)
    a = stage.consumer("a")
    m = stage.leader()
    assert stage.link.call("GET", stage.keys.lease(a.incarnation)) == b"live"
    ids = stage.send(T)
    stage.finish(m, [a])
    stage.check_done(T, ids)


def test_what_a_halted_ticket_waits_for_goes_back_to_its_place(stage: Stage) -> None:
    world, m, a = stage.world, leader(stage), stage.consumer("a")
    first, second = [*stage.send(T), *stage.send(T)]
    m.settle()
    a.read()
    world.give_up(a, T, "halt")  # type: ignore[arg-type]
    m.settle()
    destroy_group(stage)
    settle(m)
    stage.finish(m, [stage.consumer("b")])
    assert world.pending() == {HALTED: [first], b"master": [second]}
    record = world.record(T)
    assert record is not None
    assert (record.owner, record.ids) == (HALTED, [first, second])
    assert not stage.history.starts


def test_what_was_not_read_of_a_stream_that_is_gone_is_told_as_lost(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    m, _ = leader(stage), stage.consumer("a")
    stage.send(T)
    m.settle()
    note_position(m)
    stage.send(T)
    stage.link.call("DEL", stage.keys.stream)
    settle(m)
    [told] = [vars(record)["facts"] for record in caplog.records if record.message == "group_lost"]
    assert told["unread"] == "unread messages are gone with the stream"


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
    one, _ = leader(stage, "m1"), stage.consumer("a")
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
    stage.finish(one, [stage.consumer("b")])
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
    assert new.board.who_has(T, first) == a.incarnation, "its lease lives"
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


def test_a_returned_ticket_whose_entries_are_gone_does_not_make_everything_repeat(stage: Stage) -> None:
    """The stream was deleted and its producers went on: that record is below all that there is."""
    m, a = leader(stage), stage.consumer("a")
    stage.send(T)
    m.settle()
    a.begin_drain()
    assert a.give_back() == 1
    assert a.deregister()
    note_position(m)
    stage.link.call("DEL", stage.keys.stream)
    others = [entry_id for n in range(20) for entry_id in stage.send(b"O%d" % n)]
    settle(m)
    b = stage.consumer("b")
    stage.finish(m, [b])
    note_position(m)
    assert b.history.by(b.incarnation) == others
    assert stage.world.record(T) is None
    stage.end_lead()
    destroy_group(stage)
    stage.finish(stage.leader("m2"), [stage.consumer("c")])
    assert len(stage.history.starts) == len(others), "nothing of it comes again"
