"""note_crash.lua: the successor tells what its predecessor's journal says; counts are kept, and nothing is counted
twice."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.integration.factories import Owner, World, hand_over, plan
from tests.integration.test_charge import attempts
from usher.common.base.errors import RedisTrouble
from usher.common.protocol.attempts import Attempts, encode
from usher.common.protocol.run_log import CRASHED, decode
from usher.common.redis.replies import pairs
from usher.consumer.lifecycle.journal import Former
from usher.consumer.lifecycle.process_ending import note_crash, report_crash
from usher.consumer.policy.quarantine import Left
from usher.master.leader.leader_scripts import LeaderScripts


def left(entry_id: bytes, before: Attempts, ticket: bytes = b"T", *, is_blamed: bool = False) -> Left:
    return Left(ticket, entry_id, 5, before, 1_700_000_000_000_000, is_blamed)


def tell(
    world: World, incarnation: str, *these: Left, is_explained: bool = False, run_log_length: int = 0
) -> list[bytes]:
    noted = note_crash(world.scripts, world.keys, Former(incarnation, is_explained, list(these)), run_log_length)
    return [one.stream_id for one, _ in noted]


@pytest.fixture
def leader(world: World) -> LeaderScripts:
    return world.elect()


@pytest.fixture
def dead(world: World, leader: LeaderScripts) -> Owner:
    """It has 1-1, 2-1 and 3-1, each of a ticket of its own."""
    owner = world.join("a")
    for number in range(1, 4):
        world.owned(leader, owner, b"T%d" % number, b"%d-1" % number)
    return owner


def test_of_several_each_is_noted_as_a_suspect(world: World, dead: Owner) -> None:
    assert tell(world, dead.incarnation, left(b"1-1", Attempts(1)), left(b"2-1", Attempts(3, 2))) == [b"1-1", b"2-1"]
    assert attempts(world) == {b"1-1": Attempts(1, 0, 1), b"2-1": Attempts(3, 2, 1)}


def test_what_redis_knows_already_changes_nothing_however_often_it_is_told(world: World, dead: Owner) -> None:
    story = (left(b"1-1", Attempts(1)), left(b"2-1", Attempts(3, 2)))
    tell(world, dead.incarnation, *story)
    with world.unchanged():
        assert tell(world, dead.incarnation, *story) == []


def test_failures_that_only_the_journal_knows_and_losses_that_only_redis_knows_are_kept(
    world: World, dead: Owner
) -> None:
    world.link.call("HSET", world.keys.attempts, "1-1", encode(Attempts(1, 1, 0, 2)))
    tell(world, dead.incarnation, left(b"1-1", Attempts(4, 3)), left(b"2-1", Attempts(1)))
    assert attempts(world)[b"1-1"] == Attempts(4, 3, 1, 2)


def test_an_end_from_outside_counts_as_a_loss_once(world: World, dead: Owner, leader: LeaderScripts) -> None:
    """Also for take_back, which would count one for whoever leaves no journal."""
    world.link.call("HSET", world.keys.attempts, "1-1", encode(Attempts(1, 1, 0, 1)))
    former = Former(dead.incarnation, False, [left(b"1-1", Attempts(2, 1, 0, 1)), left(b"2-1", Attempts(1))], True)
    for expected in (2, 0):
        assert len(note_crash(world.scripts, world.keys, former, 0)) == expected
    world.end_lease(dead)
    leader.take_back(dead.incarnation, 10)
    assert attempts(world) == {b"1-1": Attempts(2, 1, 0, 2), b"2-1": Attempts(1, losses=1)}


def test_of_an_explained_end_those_are_suspects_who_are_blamed(world: World, dead: Owner) -> None:
    told = tell(
        world,
        dead.incarnation,
        left(b"1-1", Attempts(2, 1), is_blamed=True),
        left(b"2-1", Attempts(1)),
        is_explained=True,
    )
    assert told == [b"1-1"]
    assert attempts(world) == {b"1-1": Attempts(2, 1, 1)}


def test_what_was_cut_off_is_in_the_run_log(world: World, dead: Owner) -> None:
    these = left(b"1-1", Attempts(1), b"T1"), left(b"2-1", Attempts(3, 2), b"T2")
    tell(world, dead.incarnation, *these, run_log_length=100)
    assert b"crashed" in world.link.call("HGET", world.keys.errors, "h1-1")
    [(_, fields)] = world.link.call("XRANGE", world.keys.runs, "-", "+")
    runs = list(decode(pairs(fields)[b"batch"]))
    assert [(run.consumer, run.ticket, run.id, run.attempt, run.end_us, run.outcome) for run in runs] == [
        (dead.incarnation, "T1", "1-1", 1, 0, CRASHED),
        (dead.incarnation, "T2", "2-1", 3, 0, CRASHED),
    ]


# ---- losses: what take_back must guess ----


def take_all(world: World, leader: LeaderScripts, owner: Owner, count: int) -> None:
    world.end_lease(owner)
    while leader.take_back(owner.incarnation, count).last:
        pass


@pytest.mark.parametrize("count", [1, 2, 100])
def test_without_a_word_the_first_of_each_ticket_counts_as_lost_on_whatever_page_it_is(
    world: World, leader: LeaderScripts, count: int
) -> None:
    owner = world.join("a")
    world.owned(leader, owner, b"T", b"1-1")
    world.owned(leader, owner, b"U", b"2-1", b"3-1")
    world.owned(leader, owner, b"T", b"4-1", b"5-1")
    world.owned(leader, owner, b"V", b"6-1")
    owner.steps.charge({b"1-1": Attempts(2, 2), b"4-1": Attempts(1, 1)})
    take_all(world, leader, owner, count)
    assert attempts(world) == {
        b"1-1": Attempts(2, 2, 0, 1),
        b"2-1": Attempts(losses=1),
        b"4-1": Attempts(1, 1),
        b"6-1": Attempts(losses=1),
    }
    assert world.link.call("EXISTS", world.keys.noted(owner.incarnation)) == 0


@pytest.mark.parametrize("count", [1, 100])
def test_where_the_journal_has_spoken_nothing_is_guessed(
    world: World, leader: LeaderScripts, dead: Owner, count: int
) -> None:
    tell(world, dead.incarnation, left(b"1-1", Attempts(1)), left(b"2-1", Attempts(1)))
    take_all(world, leader, dead, count)
    assert attempts(world) == {b"1-1": Attempts(1, 0, 1), b"2-1": Attempts(1, 0, 1)}
    assert world.link.call("EXISTS", world.keys.noted(dead.incarnation)) == 0, "it goes with the last page"


def test_what_was_noted_goes_with_its_incarnation_when_no_leader_saw_the_last_page(
    world: World, leader: LeaderScripts, dead: Owner
) -> None:
    """The reply of the page that took back everything was lost: the next leader finds nothing to take back."""
    tell(world, dead.incarnation, left(b"1-1", Attempts(1)))
    world.end_lease(dead)
    leader.take_back(dead.incarnation, 100)
    assert world.link.call("EXISTS", world.keys.noted(dead.incarnation)) == 1
    known = attempts(world)
    successor = world.elect(succeed=str(leader.epoch))
    assert successor.reap(dead.incarnation, dead.registration.name, dead.registration.dump())
    assert world.link.call("EXISTS", world.keys.noted(dead.incarnation)) == 0
    assert attempts(world) == known, "of the messages nothing is forgotten"


def test_losses_add_up_from_owner_to_owner(world: World, leader: LeaderScripts) -> None:
    [entry_id] = world.parked(leader, b"T")
    for number in range(1, 4):
        owner = world.join(f"a{number}")
        hand_over(leader, plan(owner, {b"T": [entry_id]}))
        assert leader.take_back(owner.incarnation, 10) is None, "nothing happens while it lives"
        take_all(world, leader, owner, 10)
        assert attempts(world) == {entry_id: Attempts(losses=number)}


def test_attempts_of_what_lost_its_body_go_with_it(world: World, leader: LeaderScripts, dead: Owner) -> None:
    dead.steps.charge({b"1-1": Attempts(1, 1)})
    world.delete(b"1-1")
    take_all(world, leader, dead, 10)
    assert attempts(world) == {b"2-1": Attempts(losses=1), b"3-1": Attempts(losses=1)}
    world.apart_because = "the recovery has not ended yet"


_tallies = st.tuples(st.integers(0, 5), st.integers(0, 3)).map(lambda n: Attempts(max(n), min(n)))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stories=st.lists(st.tuples(_tallies, st.booleans()), min_size=1, max_size=6), times=st.integers(1, 3))
def test_counts_are_conserved(world: World, stories: list[tuple[Attempts, bool]], times: int) -> None:
    """Whatever was known, and however often it is told: starts and failures never fall, and nobody is charged."""
    world.link.call("FLUSHALL")
    world.make_group()
    owner, leader = world.join("a"), world.elect()
    ids = [b"%d-1" % number for number in range(1, len(stories) + 1)]
    for entry_id in ids:
        world.owned(leader, owner, b"T" + entry_id, entry_id)
    owner.steps.charge({entry_id: known for entry_id, (known, _) in zip(ids, stories, strict=True)})
    running = [
        left(entry_id, known._replace(starts=known.starts + 1))
        for entry_id, (known, runs) in zip(ids, stories, strict=True)
        if runs
    ]
    for _ in range(times):
        tell(world, owner.incarnation, *running)
    after = attempts(world)
    told = {one.stream_id for one in running}
    for entry_id, (known, _) in zip(ids, stories, strict=True):
        if entry_id not in told:
            assert after[entry_id] == known
        else:
            assert after[entry_id] == Attempts(known.starts + 1, known.failures, 1)


# ---- the predecessor, as the registrar tells of it ----


def test_it_is_told_once_with_a_line_for_each_that_redis_did_not_know(
    world: World, dead: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    former = Former(dead.incarnation, False, [left(b"1-1", Attempts(1)), left(b"99-1", Attempts(1))])
    report_crash(world.link.url, world.keys, former, 100)
    assert world.link.call("XLEN", world.keys.runs) == 1
    report_crash(world.link.url, world.keys, former, 100)
    assert attempts(world) == {b"1-1": Attempts(1, 0, 1)}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    [record] = [record for record in caplog.records if record.getMessage() == "handler_interrupted"]
    expected = {"ticket": "T", "id": "1-1", "fence": 5, "attempt": 1, "failures": 0, "crashes": 1, "losses": 0}
    assert record.facts == expected  # type: ignore[attr-defined]


def test_while_redis_cannot_be_told_it_is_not_told(world: World, dead: Owner) -> None:
    former = Former(dead.incarnation, False, [left(b"1-1", Attempts(1))])
    with pytest.raises(RedisTrouble):
        report_crash("redis://127.0.0.1:1", world.keys, former, 100)


def test_a_redis_that_refuses_the_note_does_not_keep_anybody_from_work(
    world: World, dead: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    world.link.call("RPUSH", world.keys.attempts, "somebody else's")
    former = Former(dead.incarnation, False, [left(b"1-1", Attempts(1))])
    with world.unchanged():
        report_crash(world.link.url, world.keys, former, 100)
    assert "attempts_not_recorded" in [record.getMessage() for record in caplog.records]
