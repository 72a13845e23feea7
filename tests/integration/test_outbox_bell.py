"""Commits ring for a streamer that sleeps, and for no other: NOTIFY makes all commits of the server wait for each
other. No commit is missed for longer than its transaction was open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.outboxes import Hand, Outbox, uids, until
from usher.common.outbox.store import CommitNotifier, OutboxStore
from usher.common.outbox.writer import LogRecord, write_to_outbox
from usher.common.redis.client import Link
from usher.master.streamer.streamer import Pace

#: A wait in which nothing is to come.
_SILENCE_S = 0.2
_PATIENCE_S = 20.0


@pytest.fixture
def bell(postgres_outbox: Outbox) -> Iterator[CommitNotifier]:
    """Connected."""
    made = postgres_outbox.store.bell()
    assert made is not None
    assert made.rings(0.0)
    yield made
    made.close()


def test_commits_ring_from_when_it_is_asked_for_until_rows_are_read(
    postgres_outbox: Outbox, bell: CommitNotifier
) -> None:
    store = postgres_outbox.store
    postgres_outbox.stage_many(1)
    assert not bell.rings(_SILENCE_S), "the streamer looks by itself"
    assert store.batch(10), "and so nothing is asked for"
    assert store.ring()
    postgres_outbox.stage_many(1)
    assert bell.rings(_PATIENCE_S)
    assert store.batch(10)
    postgres_outbox.stage_many(1)
    assert not bell.rings(_SILENCE_S), "it has woken up"
    assert store.ring()
    store.hush()
    postgres_outbox.stage_many(1)
    assert not bell.rings(_SILENCE_S), "it leads no more"


def test_where_nobody_would_hear_nothing_rings(outbox: Outbox) -> None:
    """A pooler in between, SQLite, another driver: a lock would stay on a connection that is another client's next."""
    outbox.store.bell()
    assert not outbox.store.ring()


def test_of_two_that_sleep_one_has_commits_ring_and_its_end_is_the_end_of_it(
    postgres_outbox: Outbox, bell: CommitNotifier
) -> None:
    other = OutboxStore(postgres_outbox.url)
    second = other.bell()
    assert second is not None
    assert second.rings(0.0)
    assert other.ring()
    assert not postgres_outbox.store.ring(), "another one has asked already"
    postgres_outbox.stage_many(1)
    assert bell.rings(_PATIENCE_S), "for all who listen"
    second.close()
    other.close()
    until(postgres_outbox.store.ring, "as with a streamer that is killed")


def test_a_lost_connection_asks_again(postgres_outbox: Outbox, bell: CommitNotifier) -> None:
    store = postgres_outbox.store
    assert store.ring()
    store.interrupt()
    with pytest.raises(Exception, match="reading the outbox"):
        store.batch(1)
    store.batch(1)
    assert store.ring()
    postgres_outbox.stage_many(1)
    assert bell.rings(_PATIENCE_S)


def test_what_is_committed_too_late_for_the_last_look_and_rings_for_nobody_is_found_by_the_next(
    postgres_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    hand = hands(postgres_outbox, pace=Pace(poll_s=30.0))
    bell = hand.store.bell()
    assert bell is not None
    assert bell.rings(0.0)
    turn = hand.streamer.run_once
    with postgres_outbox.engine.connect() as slow:
        write_to_outbox(slow, ticket_id="T", action="a", object="o", uid="late")
        assert [turn() for _ in range(20)] == [0.005] * 20, "awake, nothing rings"
        assert [turn(), turn()] == [0.0, 0.005], "it asks for the bell, and looks again at once"
        slow.commit()
    assert not bell.rings(_SILENCE_S), "it was written before the bell was asked for"
    assert turn() == 0.0
    assert uids(link) == ["late"]
    assert [turn() for _ in range(23)] == [*[0.005] * 20, 0.0, 0.005, 0.01], "awake again, and asleep"
    assert [turn() for _ in range(13)][-3:] == [20.48, 30.0, 30.0]
    postgres_outbox.stage(LogRecord("T", "a", "o", uid="in time"))
    assert bell.rings(_PATIENCE_S)
    bell.close()


def test_a_standby_lets_commits_be_silent(postgres_outbox: Outbox, hands: Callable[..., Hand]) -> None:
    hand = hands(postgres_outbox)
    bell = hand.store.bell()
    assert bell is not None
    assert bell.rings(0.0)
    hand.turn(4)
    epoch = hand.lead.epoch
    assert epoch is not None
    hand.lead.lost(epoch)
    hand.turn()
    postgres_outbox.stage_many(1)
    assert not bell.rings(_SILENCE_S)
    bell.close()
