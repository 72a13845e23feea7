"""A handler that gives up on everything: the letters of many messages are not one round trip each, and none is lost or
held up by another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.actors import ConsumerActor, Stage, Trouble
from usher.common.base.errors import GiveUp, ReplyUnknown
from usher.common.redis.client import CommandRefused, ScriptMissing
from usher.consumer.execution.acker import SKIP
from usher.master.operations.shelves import DeadLetters

#: No more than a consumer of the rig takes.
_MANY = 90


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


def _all_fail(stage: Stage, policy: str = SKIP) -> ConsumerActor:
    """A consumer that has many messages, a ticket each, and whose handler gives up on all."""
    m, a = stage.leader(batch=_MANY), stage.consumer("a", policy=policy)
    stage.world.send_many([b"T%d" % number for number in range(_MANY)])
    m.settle()
    a.read()
    while (run := a.start()) is not None:
        run.fail(GiveUp())
    return a


def _rung(a: ConsumerActor) -> list[bytes]:
    """The tickets for whose letters the bell rings."""
    rung: list[bytes] = []
    a.acker.on_dead_letter = lambda letter: rung.append(letter.ticket)
    return rung


def _tickets(stage: Stage) -> list[bytes]:
    return sorted(letter[b"usher-ticket"] for letter in stage.world.dead())


def test_they_take_a_few_round_trips_and_the_thread_says_that_it_makes_progress(stage: Stage) -> None:
    """20 ms away, one each were 50 letters a second: nothing was acknowledged meanwhile, and health called the thread
    stalled after ten seconds."""
    a = _all_fail(stage)
    trips: list[str] = []
    a.link.before = trips.append
    a.flush()
    assert len(_tickets(stage)) == _MANY
    assert len(trips) < 12
    assert a.acker.last_turn_s is not None
    assert a.acker.is_flushed
    assert not stage.world.state().index


def test_large_messages_are_not_copied_at_a_stretch(stage: Stage) -> None:
    """Fifty of 4 MB: Redis answered nobody else for 0.4 s, and what a replica may lag behind was soon full."""
    m, a = stage.leader(batch=20), stage.consumer("a")
    for number in range(20):
        stage.link.call("XADD", stage.keys.stream, "*", "ticket_id", b"T%d" % number, "body", b"x" * 1_000_000)
    m.settle()
    a.read()
    while (run := a.start()) is not None:
        run.fail(GiveUp())
    trips: list[str] = []
    a.link.before = trips.append
    a.flush()
    assert len(stage.world.dead()) == 20
    assert trips.count("PIPELINE") == 5, "four at a time"


def test_what_redis_refuses_is_kept_and_written_later(stage: Stage) -> None:
    a = _all_fail(stage)
    stage.link.call("SET", stage.keys.dead, "x")
    with pytest.raises(CommandRefused):
        a.flush()
    assert not a.acker.is_flushed
    stage.link.call("DEL", stage.keys.dead)
    a.flush()
    assert len(_tickets(stage)) == len(set(_tickets(stage))) == _MANY
    assert a.acker.is_flushed


@pytest.mark.parametrize("trouble", list(Trouble))
def test_letters_whose_answers_are_lost_are_written_once(stage: Stage, trouble: Trouble) -> None:
    a = _all_fail(stage)
    a.link.troubles["PIPELINE"] = trouble
    with pytest.raises(ReplyUnknown):
        a.flush()
    assert not a.acker.is_flushed
    a.flush()
    assert len(_tickets(stage)) == len(set(_tickets(stage))) == _MANY
    assert a.acker.is_flushed
    assert not stage.world.state().index


def test_a_script_that_redis_forgets_on_the_way_is_sent_again(stage: Stage) -> None:
    a = _all_fail(stage)
    a.link.before = lambda step: stage.link.call("SCRIPT", "FLUSH") if step == "PIPELINE" else None
    for _ in range(_MANY):
        try:
            a.flush()
        except ScriptMissing:  # what did not happen is done in the next turn
            continue
        break
    a.link.before = lambda step: None
    a.flush()
    assert len(_tickets(stage)) == len(set(_tickets(stage))) == _MANY


@pytest.mark.parametrize("policy", ["skip", "halt"])
@pytest.mark.parametrize("step", ["dead_letter", "PIPELINE"])
@pytest.mark.parametrize("trouble", [Trouble.REPLY_LOST, Trouble.NEVER_SENT])
def test_the_bell_rings_once_for_each_though_answers_are_lost(
    stage: Stage, policy: str, step: str, trouble: Trouble
) -> None:
    a = _all_fail(stage, policy)
    rung = _rung(a)
    a.link.troubles[step] = trouble
    with pytest.raises(ReplyUnknown):
        a.flush()
    a.flush()
    assert sorted(rung) == _tickets(stage)
    assert len(rung) == _MANY


def test_the_bell_rings_though_the_ticket_went_on_before_it_was_asked_again(stage: Stage) -> None:
    a = _all_fail(stage)
    rung = _rung(a)
    a.link.troubles["PIPELINE"] = Trouble.REPLY_LOST
    with pytest.raises(ReplyUnknown):
        a.flush()
    stage.consumer("b")
    stage.end_lead()
    m = stage.leader("m2")
    m.settle()
    stage.world.send_many([b"T%d" % number for number in range(_MANY)])
    m.settle()
    a.flush()
    assert len(rung) == _MANY
    assert sorted(rung) == sorted(set(_tickets(stage)))


def test_the_bell_rings_for_letters_that_were_written_before_the_lease_ended(stage: Stage) -> None:
    a = _all_fail(stage)
    rung = _rung(a)
    a.link.before = lambda step: stage.link.call("DEL", stage.keys.lease(a.incarnation)) if step == "PIPELINE" else None
    a.acker.run_once()
    assert len(rung) == len(_tickets(stage)) == 1


def test_what_was_acknowledged_by_hand_since_it_was_refused_rings_no_bell(stage: Stage) -> None:
    a = _all_fail(stage)
    rung = _rung(a)
    stage.link.call("SET", stage.keys.dead, "x")
    with pytest.raises(CommandRefused):
        a.flush()
    stage.link.call("DEL", stage.keys.dead, stage.keys.tickets)
    a.flush()
    assert a.acker.is_flushed
    assert not rung


def test_letters_that_were_not_sent_because_the_answer_of_the_first_got_lost_are_in_no_doubt(stage: Stage) -> None:
    """What somebody acknowledged by hand before they were sent has no letter."""
    a = _all_fail(stage)
    rung = _rung(a)
    a.link.troubles["dead_letter"] = Trouble.REPLY_LOST
    with pytest.raises(ReplyUnknown):
        a.flush()
    assert len(_tickets(stage)) == 1
    stage.link.call("DEL", stage.keys.tickets)
    a.flush()
    assert a.acker.is_flushed
    assert rung == _tickets(stage)


def test_a_redrive_says_how_many_tickets_have_gone_on(stage: Stage) -> None:
    ids = stage.world.send_many([b"T", b"U", b"V", b"T", b"W", b"V"])
    letters = DeadLetters(stage.link, stage.keys, "ticket_id")
    first = dict(zip((b"T", b"U", b"V"), ids, strict=False))
    assert letters.overtaken(first, 5.0) == (2, True)
    assert letters.overtaken({b"T": ids[3]}, 5.0) == (0, True)
    assert letters.overtaken({}, 5.0) == (0, True)
