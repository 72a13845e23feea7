"""USHER_UNKEYED=spread: a message without a ticket id is a ticket of its own, through everything that may happen to a
ticket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.integration.actors import MasterActor, Stage
from tests.integration.factories import FIELD, World, fetch, plan
from tests.sinks import Mark, accounts, add
from usher.common.base.errors import GiveUp
from usher.common.protocol.message import unkeyed_ticket
from usher.consumer.handlers.message import Message
from usher.consumer.lifecycle.owner_scripts import Buried, Letter
from usher.consumer.sinks.sql import SqlSink
from usher.master.insight.status import StatusReader
from usher.master.leader.leader_scripts import LeaderScripts, Rejected
from usher.master.leader.peeked import PeekedEntry
from usher.master.leader.validation import partition_entries
from usher.master.web.api import read_report


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


def send(stage: Stage, count: int = 1) -> list[bytes]:
    """Messages without a ticket id."""
    return [stage.world.add(b"%d-0" % (stage.world._next_ms + 1), "text", "no ticket") for _ in range(count)]


def nothing_is_left(stage: Stage, m: MasterActor) -> None:
    state = stage.world.state()
    assert (state.pending, state.index) == ({}, {})
    assert (m.board.in_flight, m.board.parked, m.board.tickets) == (0, 0, {})


def started_once(stage: Stage, ids: list[bytes]) -> None:
    assert sorted(run.id for run in stage.history.starts) == sorted(ids)


def test_only_a_missing_ticket_id_makes_a_message_its_own_ticket() -> None:
    found = [
        PeekedEntry(b"1-0", None),
        PeekedEntry(b"2-0", b""),
        PeekedEntry(b"3-0", b"\xff3-0"),
        PeekedEntry(b"4-0", b"T"),
    ]
    usable, rejected = partition_entries(found, spread=True)
    assert usable == [(b"1-0", b"\xff1-0"), (b"4-0", b"T")]
    assert [(entry.id, entry.reason) for entry in rejected] == [
        (b"2-0", "empty_ticket_id"),
        (b"3-0", "ticket_id_not_utf8"),
    ]


def test_rejected_by_default(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer()
    [entry_id] = send(stage)
    stage.finish(m, [a])
    assert stage.world.state().letters() == [(entry_id, b"", b"no_ticket_id")]
    assert not stage.history.starts


def test_any_consumer_runs_them_at_the_same_time_and_a_report_frees_each(stage: Stage) -> None:
    m, consumers = stage.leader(spread=True), [stage.consumer("a"), stage.consumer("b")]
    m.settle()
    ids = send(stage, 40)
    m.settle()
    runs = []
    for consumer in consumers:
        consumer.read()
        while (run := consumer.start()) is not None:
            runs.append(run)
    assert sorted(run.message.stream_id for run in runs) == sorted(ids), "all run at once: none waits for another"
    assert {run.execution.who for run in runs} == {consumer.incarnation for consumer in consumers}
    assert {(run.message.ticket_id, run.message.fields["text"]) for run in runs} == {("", "no ticket")}
    assert m.board.in_flight == 40
    for run in runs:
        run.succeed()
    for consumer in consumers:
        consumer.flush()
        m.turn(*consumer.reports())
    nothing_is_left(stage, m)


def test_they_neither_wait_for_tickets_nor_make_them_wait(stage: Stage) -> None:
    m, a = stage.leader(spread=True, window=1), stage.consumer()
    m.settle()
    tickets = stage.send(b"T", b"1-0", b"2-0", b"3-0")
    ids = send(stage, 5)
    m.settle()
    a.read()
    runs = []
    while (run := a.start()) is not None:
        runs.append(run)
    assert [run.message.stream_id for run in runs] == [tickets[0], *ids], (
        "the window is of a ticket, and each of these is one"
    )
    for run in runs:
        run.succeed()
    stage.finish(m, [a])
    nothing_is_left(stage, m)


def test_a_failed_one_is_tried_again_and_given_up_alone(stage: Stage) -> None:
    m, a = stage.leader(spread=True), stage.consumer(max_attempts=2)
    m.settle()
    first, second, third = send(stage, 3)
    m.settle()
    a.read()
    runs = {run.message.stream_id: run for run in (a.start(), a.start(), a.start()) if run is not None}
    runs[first].fail(GiveUp("never"))
    runs[second].fail(ValueError("not yet"))
    runs[third].succeed()
    again = a.start()
    assert again is not None
    assert (again.message.stream_id, again.message.attempt) == (second, 2)
    again.fail(ValueError("still not"))
    a.flush()
    assert stage.world.state().letters() == [(first, b"", b"gave_up"), (second, b"", b"attempts_exhausted")]
    stage.finish(m, [a])
    nothing_is_left(stage, m)


def test_what_a_dead_consumer_had_goes_to_another_under_a_new_fence(stage: Stage) -> None:
    m, a = stage.leader(spread=True), stage.consumer("a")
    m.settle()
    ids = send(stage, 3)
    m.settle()
    a.read()
    run = a.start()
    assert run is not None
    stage.end_lease(a)
    a.crash()
    b = stage.consumer("b")
    stage.finish(m, [b])
    assert sorted(stage.history.by(b.incarnation)) == sorted(ids)
    assert {begun.fence > run.execution.fence for begun in stage.history.starts if begun.who == b.incarnation} == {True}
    nothing_is_left(stage, m)


@pytest.mark.parametrize("owner_lives", [True, False])
def test_a_new_leader_finds_them_in_processing_and_parked(stage: Stage, owner_lives: bool) -> None:
    old, a = stage.leader("m1", spread=True), stage.consumer("a", capacity=2)
    old.settle()
    ids = send(stage, 4)
    old.settle()
    assert old.dispatcher._steps is not None
    fetch(old.dispatcher._steps, 1)  # one is read, and the leader is gone
    stage.end_lead()
    if not owner_lives:
        stage.end_lease(a)
        a.crash()
    new = stage.leader("m2", spread=True)
    consumers = [a] if owner_lives else [stage.consumer("b", capacity=2)]
    stage.finish(new, consumers, rounds=8)
    started_once(stage, ids)
    nothing_is_left(stage, new)


def test_the_status_shows_it_without_a_ticket(stage: Stage) -> None:
    m, a = stage.leader(spread=True), stage.consumer()
    m.settle()
    [entry_id] = send(stage)
    m.settle()
    [row] = StatusReader(stage.link, stage.keys).tickets("0", 100)["tickets"]
    assert (row["ticket_id"], row["owner"], row["message_ids"]) == ("", a.incarnation, [entry_id.decode()])
    a.work()
    m.turn(*a.reports())


def test_the_report_of_one_travels_without_a_ticket(stage: Stage) -> None:
    a = stage.consumer()
    item = (unkeyed_ticket(b"5-1"), 7, [b"5-1"])
    report = read_report(a.reporter._body([item]))
    assert report.items == [(unkeyed_ticket(b"5-1"), [b"5-1"])]


def test_a_sink_stores_each_once_in_whatever_order_they_end(stage: Stage, engine: sa.Engine, sink: SqlSink) -> None:
    """They have no ticket whose fences could be compared: the second one's is higher, and the first one is no
    zombie."""
    m, a = stage.leader(spread=True), stage.consumer()
    m.settle()
    send(stage)
    m.settle()
    send(stage)
    m.settle()
    a.read()
    first, second = a.start(), a.start()
    assert first is not None
    assert second is not None
    assert first.message.fence < second.message.fence

    def add_one(message: Message, session: Session) -> None:
        add(Mark("all", message.uid, message.fence), session)

    for run in (second, first, second, first):
        sink.exactly_once(add_one)(run.message)
    assert accounts(engine) == {"all": 2}


def test_a_drain_gives_them_back(stage: Stage) -> None:
    m, a = stage.leader(spread=True), stage.consumer("a")
    m.settle()
    ids = send(stage, 3)
    m.settle()
    a.begin_drain()
    assert a.give_back() == 3
    assert a.deregister()
    stage.finish(m, [stage.consumer("b")])
    started_once(stage, ids)
    nothing_is_left(stage, m)


def test_the_sweep_finds_what_a_stranger_took(stage: Stage) -> None:
    m, a = stage.leader(spread=True), stage.consumer()
    m.settle()
    [entry_id] = send(stage)
    stage.link.call("XREADGROUP", "GROUP", stage.keys.group, "stranger", "STREAMS", stage.keys.stream, ">")
    stage.world.make_idle("stranger", 10**9, entry_id)
    m.sweep()
    stage.finish(m, [a])
    started_once(stage, [entry_id])
    nothing_is_left(stage, m)


def test_after_a_change_back_to_reject_what_a_dead_consumer_had_is_rejected_and_what_lives_ends_well(
    stage: Stage,
) -> None:
    old, a, b = stage.leader("m1", spread=True), stage.consumer("a"), stage.consumer("b")
    old.settle()
    send(stage, 20)
    old.settle()
    had = {consumer.name: stage.world.pending()[consumer.name] for consumer in (a, b)}
    stage.end_lead()
    stage.end_lease(a)
    a.crash()
    new = stage.leader("m2")
    stage.finish(new, [b])
    assert [entry_id for entry_id, _, _ in stage.world.state().letters()] == had[a.name]
    started_once(stage, had[b.name])
    nothing_is_left(stage, new)


class TestScripts:
    """take_back.lua and the letters of all scripts know the name of a message without a ticket."""

    def test_index_and_pending_list_change_together_page_by_page(self, world: World) -> None:
        leader, a = world.elect(), world.join("a")
        ids = [world.add(entry_id, "x", "y") for entry_id in (b"1-1", b"2-1", b"3-1")]
        fetch(leader, 10)
        leader.hand_over(plan(a, {unkeyed_ticket(entry_id): [entry_id] for entry_id in ids}))
        world.end_lease(a)
        while (page := leader.take_back(a.incarnation, 1)).size:
            assert page.found[0].ticket is None
            assert world.broken() == []
        assert world.state() == ({b"master": ids}, {}, [])

    def test_a_real_ticket_of_a_name_like_that_cannot_be_meant(self, world: World) -> None:
        """What is no UTF-8 is rejected, whatever it looks like; its letter shows what it was."""
        leader = world.elect()
        world.add(b"1-1", FIELD, b"\xff2-1")
        usable, rejected = partition_entries(
            fetch(LeaderScripts(world.scripts, world.keys, leader.epoch, FIELD, spread=True), 10), spread=True
        )
        assert (usable, rejected) == ([], [Rejected(b"1-1", b"\xff2-1", "ticket_id_not_utf8")])
        leader.reject(rejected)
        assert world.state().letters() == [(b"1-1", b"\xff2-1", b"ticket_id_not_utf8")]

    def test_a_letter_has_no_ticket(self, world: World) -> None:
        leader, a = world.elect(), world.join("a")
        world.add(b"1-1", "x", "y")
        fetch(leader, 10)
        leader.hand_over(plan(a, {b"\xff1-1": [b"1-1"]}))
        assert a.steps.dead_letter(Letter(b"\xff1-1", b"1-1", "gave_up", "", 1, 2, 3)) is Buried.OK
        assert world.state() == ({}, {}, world.dead())
        assert world.state().letters() == [(b"1-1", b"", b"gave_up")]
