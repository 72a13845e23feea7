"""What is known of a group that was lost: by the index, by notes that are older or late, and by the inbox of an
owner."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.hands import RedisTrouble, rank
from tests.integration.actors import ConsumerActor, MasterActor, Stage, Trouble
from tests.integration.group_loss import (
    T,
    U,
    destroy_group,
    end_all,
    half_done,
    leader,
    note_position,
    repeats_until,
    settle,
)


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


# ---- what repeats ----


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize(("read_before", "by_hand"), [(False, False), (True, False), (False, True)])
def test_a_master_that_remembers_nothing_knows_from_the_index_what_was_handed_over_since_the_position_was_saved(
    stage: Stage, read_before: bool, by_hand: bool, dies: bool
) -> None:
    """Leader and group are gone in the same second, and the position is older than what repeats. ``by_hand``: somebody
    makes the group again before a master does. ``dies``: so does the first one that has read again what repeats."""
    one = leader(stage)
    if read_before:
        before = stage.consumer("before")
        stage.send(b"X")
        one.settle()
        before.work()
        one.turn(*before.reports())
        note_position(one)
        stage.end_lease(before)
        before.crash()
        one.settle()
    a, ids = half_done(stage, one)
    stage.end_lead()
    destroy_group(stage)
    if by_hand:
        stage.world.make_group()
    two = stage.master("m2")
    if dies:
        two.link.troubles["rejoin"] = Trouble.NEVER_SENT
        two.turn()
        assert not two.link.troubles, "it has read what repeats, and no more"
        stage.end_lead()
        two = stage.master("m3")
    two.settle()
    a.read()
    end_all(a)
    stage.finish(two, [a])
    stage.check_done(T, ids)


def test_a_group_that_is_lost_again_while_it_repeats_has_not_forgotten_what_repeats(stage: Stage) -> None:
    m = leader(stage, batch=1)
    a, ids = half_done(stage, m)
    note_position(m)
    destroy_group(stage)
    m.dispatcher._position_saver._saved_s = 0.0
    settle(m, turns=2)
    m.dispatcher._position_saver._saved_s = 1e18
    assert rank(stage.world.stream.last_delivered()) < rank(ids[0]), "it has begun to repeat"
    assert repeats_until(stage) == ids[-1]
    destroy_group(stage)
    settle(m, turns=2)
    assert repeats_until(stage) == ids[-1]
    for _ in range(3):
        settle(m)
    a.read()
    end_all(a)
    stage.finish(m, [a])
    stage.check_done(T, ids)
    assert repeats_until(stage) is None


def test_a_note_that_its_writer_sent_late_changes_nothing_of_its_successors(stage: Stage) -> None:
    one = leader(stage, "m1")
    a, ids = half_done(stage, one)
    note_position(one)
    destroy_group(stage)
    one.turn()
    one.link.before = lambda step: (
        one.link.troubles.update({step: Trouble.LATE}) if step == "note_repeats" and repeats_until(stage) else None
    )
    settle(one, turns=3)
    assert one.link.late, "that it is past it"
    stage.end_lead()
    two = leader(stage, "m2", batch=1)
    two.settle()
    destroy_group(stage)
    settle(two, turns=3)
    noted = repeats_until(stage)
    assert noted == ids[-1]
    one.link.arrive(stage.link)
    assert repeats_until(stage) == noted
    stage.end_lead()
    three = leader(stage, "m3", batch=1)
    settle(three)
    settle(three)
    a.read()
    end_all(a)
    stage.finish(three, [a])
    stage.check_done(T, ids)


# ---- records that are older than the stream ----


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
    assert told["unread"] == "what was not read yet is gone with the stream"


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
    b = stage.consumer("b")
    others = [entry_id for n in range(20) for entry_id in stage.send(b"O%d" % n)]
    settle(m)
    stage.finish(m, [b])
    note_position(m)
    assert b.history.by(b.incarnation) == others
    assert stage.world.record(T) is None
    stage.end_lead()
    destroy_group(stage)
    stage.finish(stage.leader("m2"), [b])
    assert len(stage.history.starts) == len(others), "nothing of it comes again"


def test_a_stale_record_does_not_make_done_what_a_new_stream_has_below_it(stage: Stage) -> None:
    """A stream that was deleted came back with lower ids while its last message ran, and then the group is lost."""
    m, a = leader(stage, window=1), stage.consumer("a")
    stage.send(T, b"500-0")
    m.settle()
    a.read()
    run = a.start()
    assert run is not None
    note_position(m)
    stage.link.call("DEL", stage.keys.stream)
    ids = stage.send(T, b"10-0", b"20-0")
    settle(m)
    note_position(m)
    destroy_group(stage)
    settle(m)
    run.succeed()
    a.flush()
    m.turn(*a.reports())
    stage.finish(m, [a])
    stage.check_done(T, [b"500-0", *ids])


# ---- an inbox that is older than the index ----


def test_what_was_acknowledged_by_an_acknowledgement_sent_again_does_not_run_beside_its_tickets_next_owner(
    stage: Stage,
) -> None:
    """Its reply and the group are lost, the message is handed over anew, and only then the acknowledgement is sent
    again: it ends that one."""
    m, owner = leader(stage), stage.consumer("a", capacity=2)
    [first] = stage.send(T)
    m.settle()
    owner.read()
    run = owner.start()
    assert run is not None
    run.succeed()
    owner.link.troubles["ack"] = Trouble.REPLY_LOST
    with pytest.raises(RedisTrouble):
        owner.flush()
    destroy_group(stage)
    settle(m)
    assert stage.world.pending() == {owner.name: [first]}, "handed over anew"
    owner.flush()
    m.turn(*owner.reports())
    busy = [*stage.send(U), *stage.send(b"V")]
    m.settle()
    other = stage.consumer("b")
    [second] = stage.send(T)
    m.settle()
    assert stage.world.pending() == {owner.name: busy, other.name: [second]}
    other.read()
    assert other.start() is not None
    assert owner.read() == 2
    assert owner.start() is not None
    assert owner.start() is not None
    assert owner.start() is None
    assert stage.history.ids(T) == [first, second]
    assert not stage.history.overlaps


# ---- a message that is named anew while it ends ----


def _held_up(stage: Stage) -> tuple[MasterActor, ConsumerActor, list[bytes]]:
    """A consumer that runs a message which is handed over to it anew, because the index had lost it too, with another
    ticket behind that."""
    m, a = leader(stage), stage.consumer("a")
    [first] = stage.send(T)
    m.settle()
    a.read()
    assert a.start() is not None
    stage.link.call("HDEL", stage.keys.tickets, T)
    destroy_group(stage)
    settle(m)
    [other] = stage.send(U)
    m.settle()
    assert stage.world.pending() == {a.name: [first, other]}
    return m, a, [first, other]


def test_what_holds_up_the_reader_is_logged_once_and_is_its_trouble(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    m, a, ids = _held_up(stage)
    assert a.reader.trouble is None
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert a.read() == 0
            assert a.reader.is_blocked
            assert a.reader.trouble is not None
            assert "b'T'" in a.reader.trouble
    assert [record.message for record in caplog.records].count("inbox_blocked") == 1
    a.runs[0].succeed()
    a.flush()
    a.read()
    assert a.reader.trouble is None
    stage.finish(m, [a])
    assert set(ids) <= stage.history.succeeded
    assert not stage.world.state().pending


def test_a_drain_gives_back_the_rest_while_one_message_holds_up_the_reader(stage: Stage) -> None:
    m, a, [first, other] = _held_up(stage)
    a.begin_drain()
    assert a.give_back() == 1
    assert stage.world.pending() == {a.name: [first], b"master": [other]}
    a.runs[0].succeed()
    a.flush()
    a.give_back()
    assert a.deregister(), "the acknowledgement counted for the new hand-over"
    stage.finish(m, [stage.consumer("b")])
    stage.check_done(U, [other])
    assert not stage.world.state().pending
