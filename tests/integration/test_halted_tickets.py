"""Tickets that wait for an operator, played by the real master and consumers step by step: order holds, nothing is
lost, nobody else waits."""

from __future__ import annotations

import pytest

from tests.integration.actors import ConsumerActor, MasterActor, Stage, Trouble
from usher.common.base.errors import GiveUp, GroupMissing, ReplyUnknown
from usher.master.operations.shelves import DeadLetters

T, U = b"T", b"U"


@pytest.fixture
def letters(stage: Stage) -> DeadLetters:
    return DeadLetters(stage.link, stage.keys)


def _fails(consumer: ConsumerActor) -> bytes:
    """The next message of a consumer is given up; its id."""
    consumer.read()
    run = consumer.start()
    assert run is not None
    run.fail(GiveUp("it cannot be done"))
    return run.message.stream_id


def _stands_still(stage: Stage, m: MasterActor, *consumers: ConsumerActor) -> None:
    """Whatever is tried, nothing more of any ticket starts."""
    before = len(stage.history.starts)
    stage.finish(m, consumers, rounds=3)
    assert len(stage.history.starts) == before


@pytest.mark.parametrize("heard", [True, False])
def test_a_redriven_message_runs_first_and_then_all_that_came_after_it(
    stage: Stage, letters: DeadLetters, heard: bool
) -> None:
    """Also by a leader that has not heard of it: then it compares memory with the index."""
    m, a, b = stage.leader(reconcile_s=0.0), stage.consumer("a", policy="halt"), stage.consumer("b", policy="halt")
    if not heard:
        m.changes._tell = lambda tickets: None
    ids = [*stage.send(T), *stage.send(T), *stage.send(T)]
    m.settle()
    owner = next(actor for actor in (a, b) if actor.read())
    assert _fails(owner) == ids[0]
    ids += stage.send(T)
    m.turn()
    owner.flush()
    ids += stage.send(T)
    others = [*stage.send(U), *stage.send(U)]
    stage.finish(m, [a, b])
    assert (stage.history.ids(T), stage.history.ids(U)) == (ids[:1], others), "the others go on"
    assert stage.world.pending() == {b"halted": ids[:1], b"master": ids[1:]}
    assert m.board.parked == len(ids) - 1, "memory has what waits"
    letters.redrive(stage.world.letter_ids())
    stage.finish(m, [a, b])
    stage.check_done(T, [ids[0], *ids])
    assert not m.board.tickets
    assert not m.failures


def test_a_dropped_message_is_skipped(stage: Stage, letters: DeadLetters) -> None:
    m, a = stage.leader(), stage.consumer("a", policy="halt")
    ids = [*stage.send(T), *stage.send(T)]
    m.settle()
    _fails(a)
    a.flush()
    ids += stage.send(T)
    _stands_still(stage, m, a)
    letters.drop(stage.world.letter_ids())
    stage.finish(m, [a])
    stage.check_done(T, ids)


def test_a_ticket_of_which_nothing_else_is_there_is_forgotten_when_its_message_is_dropped(
    stage: Stage, letters: DeadLetters
) -> None:
    m, a = stage.leader(), stage.consumer("a", policy="halt")
    stage.send(T)
    m.settle()
    _fails(a)
    a.flush()
    m.settle()
    assert T in m.board.tickets
    letters.drop(stage.world.letter_ids())
    m.settle()
    assert not m.board.tickets
    assert stage.world.state() == ({}, {}, [])


def test_what_the_inbox_still_names_is_not_run_after_its_ticket_was_parked(stage: Stage, letters: DeadLetters) -> None:
    """Handed over and not read yet when the ticket halts: under that fence nothing of it is this consumer's any
    more."""
    m, a = stage.leader(), stage.consumer("a", policy="halt")
    ids = stage.send(T)
    m.settle()
    _fails(a)
    ids += stage.send(T)
    m.settle()
    assert stage.world.pending()[a.name] == ids, "the second one is in its inbox, unread"
    a.flush()
    assert a.read() == 0 or a.start() is None
    assert stage.history.ids(T) == ids[:1]
    a.read()
    assert not a.lanes.closed_fences(), "and that is forgotten once the inbox has been read"
    _stands_still(stage, m, a)
    letters.redrive(stage.world.letter_ids())
    stage.finish(m, [a])
    stage.check_done(T, [ids[0], *ids])


@pytest.mark.parametrize("trouble", [Trouble.REPLY_LOST, Trouble.NEVER_SENT])
def test_it_comes_back_to_the_same_consumer_before_that_has_seen_the_answer(
    stage: Stage, letters: DeadLetters, trouble: Trouble
) -> None:
    m, a = stage.leader(), stage.consumer("a", policy="halt")
    ids = [*stage.send(T), *stage.send(T)]
    m.settle()
    _fails(a)
    a.link.troubles["dead_letter"] = trouble
    with pytest.raises(ReplyUnknown):
        a.flush()
    m.settle()
    if trouble is Trouble.REPLY_LOST:
        letters.redrive(stage.world.letter_ids())
        m.settle()
        assert stage.world.pending() == {a.name: ids}, "handed over again, under a new fence"
        a.read()
        assert a.start() is None, "not before Redis has answered"
    a.flush()
    if trouble is Trouble.NEVER_SENT:
        _stands_still(stage, m, a)
        letters.redrive(stage.world.letter_ids())
    stage.finish(m, [a])
    stage.check_done(T, [ids[0], *ids])
    assert not stage.history.disorder()


def test_its_owner_dies_and_the_leader_changes_and_it_still_waits(stage: Stage, letters: DeadLetters) -> None:
    m, a = stage.leader(), stage.consumer("a", policy="halt")
    ids = [*stage.send(T), *stage.send(T), *stage.send(T)]
    m.settle()
    _fails(a)
    a.flush()
    stage.end_lease(a)
    a.crash()
    stage.end_lead()
    m.crash()
    other, b = stage.leader("m2"), stage.consumer("b", policy="halt")
    ids += stage.send(T)
    _stands_still(stage, other, b)
    other.reap()
    other.sweep()
    assert stage.world.pending() == {b"halted": ids[:1], b"master": ids[1:]}
    letters.redrive(stage.world.letter_ids())
    stage.finish(other, [b])
    stage.check_done(T, [ids[0], *ids])


def test_redriven_and_given_up_again_it_waits_again(stage: Stage, letters: DeadLetters) -> None:
    m, a = stage.leader(), stage.consumer("a", policy="halt", max_attempts=2)
    ids = [*stage.send(T), *stage.send(T)]
    m.settle()
    a.read()
    for _ in range(3):
        for _ in range(2):  # attempts begin anew
            a.flush()
            run = a.start()
            assert run is not None
            assert run.message.stream_id == ids[0]
            run.fail(ValueError("again"))
        assert a.start() is None
        a.flush()
        [letter] = stage.world.dead()
        assert (letter[b"usher-attempts"], letter[b"usher-error-type"]) == (b"2", b"ValueError")
        assert b"ValueError: again" in letter[b"usher-traceback"]
        letters.redrive(stage.world.letter_ids())
        m.settle()
        a.read()
    stage.finish(m, [a])
    assert stage.history.ids(T) == [ids[0]] * 7 + ids[1:]


def test_a_halted_ticket_costs_no_room_however_much_comes_for_it(stage: Stage, letters: DeadLetters) -> None:
    m, a = stage.leader(window=50), stage.consumer("a", policy="halt")
    stage.send(T)
    m.settle()
    first = _fails(a)
    a.flush()
    m.settle()
    many = stage.world.send_many([T] * 1200)
    others = stage.send(U)
    for _ in range(40):
        m.settle(turns=1)
    assert (m.board.parked, m.board.in_flight) == (1200, 1)
    stage.finish(m, [a], rounds=2)
    assert stage.history.ids(U) == others
    letters.redrive(stage.world.letter_ids())
    for _ in range(200):
        m.settle(turns=1)
        a.work()
        m.turn(*a.reports())
        if not stage.world.pending():
            break
    assert stage.history.ids(T) == [first, first, *many]
    stage.finish(m, [a], rounds=1)
    assert not m.board.tickets


def test_while_the_group_is_missing_no_letter_is_written(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer(policy="halt")
    m.settle()
    stage.send(T)
    stage.send(T)
    m.settle()
    _fails(a)
    stage.link.call("XGROUP", "DESTROY", stage.keys.stream, stage.keys.group)
    for _ in range(3):
        with pytest.raises(GroupMissing):
            a.flush()
    assert not stage.world.dead()
    stage.world.make_group()


def test_while_the_group_is_missing_nothing_is_redriven(stage: Stage, letters: DeadLetters) -> None:
    m, a = stage.leader(), stage.consumer(policy="halt")
    m.settle()
    stage.send(T)
    stage.send(T)
    m.settle()
    _fails(a)
    a.flush()
    m.settle()
    before = stage.link.call("HGETALL", stage.keys.tickets)
    stage.link.call("XGROUP", "DESTROY", stage.keys.stream, stage.keys.group)
    with pytest.raises(GroupMissing):
        letters.redrive(stage.world.letter_ids())
    assert (stage.link.call("HGETALL", stage.keys.tickets), len(stage.world.dead())) == (before, 1)
    m.settle()  # makes it again; all that it was given comes anew
    letters.redrive(stage.world.letter_ids())
    stage.finish(m, [stage.consumer("b")])
    assert (len(stage.history.starts), stage.world.dead()) == (3, [])


def test_a_takeover_counts_once_what_a_dead_name_has_of_a_halted_ticket(stage: Stage) -> None:
    a, m = stage.consumer("a", policy="halt"), stage.leader()
    stage.send(T)
    m.settle()
    _fails(a)
    a.flush()
    m.settle()
    for _ in range(4):
        stage.send(T)
    read = ("XREADGROUP", "GROUP", stage.keys.group, "old:1", "COUNT", 4, "STREAMS", stage.keys.stream, ">")
    stage.link.call(*read)
    stage.end_lead()
    assert stage.leader("m2").board.tickets[T].unfinished == 5
