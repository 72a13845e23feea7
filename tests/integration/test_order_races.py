"""Orders about a ticket's first message that cross what its owner is about to write; on a real Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.actors import MasterActor, Stage
from tests.integration.test_charge import attempts
from tests.integration.test_ticket_orders import GIVE_UP, RETRY, Desk, started
from usher.common.base.errors import RetryLater
from usher.common.protocol.owner_words import is_waiting

T = b"T"


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


@pytest.fixture
def desk(stage: Stage) -> Iterator[Desk]:
    made = Desk(stage)
    yield made
    made.link.close()


@pytest.fixture
def leader(stage: Stage) -> MasterActor:
    return stage.leader()


def test_what_is_given_up_while_its_failure_is_on_its_way_stays_so(
    stage: Stage, leader: MasterActor, desk: Desk
) -> None:
    """The failure is written after the order, and the ticket was given back until a time when the order is read."""
    a = stage.consumer()
    leader.settle()
    first, second = stage.send(T, b"1-1", b"2-1")
    leader.settle()
    a.read()
    started(a).fail(RetryLater(after_s=300))
    assert desk.give(GIVE_UP).outcome == "asked"
    a.flush()
    a.read()
    record = stage.world.record(T)
    assert record is not None
    assert is_waiting(record.owner)
    assert attempts(stage.world)[first].is_given_up
    assert desk.give(RETRY).outcome == "done"
    stage.finish(leader, [a])
    assert stage.world.state().letters() == [(first, T, b"operator")]
    assert stage.history.ids(T) == [first, second]


def test_an_order_about_a_ticket_that_is_not_here_any_more_finds_nothing_to_do(
    stage: Stage, leader: MasterActor, desk: Desk
) -> None:
    """It waited for a retry when its last acknowledgement was refused: another owner had it. Its lane is empty."""
    a = stage.consumer()
    leader.settle()
    stage.send(T, b"1-1")
    leader.settle()
    a.read()
    run = started(a)
    fence = run.message.fence
    run.fail(RetryLater(after_s=1.0))
    assert desk.give(RETRY).outcome == "asked"
    with a.lanes.locked() as board:
        board.forget(T, fence)
    a.read()
    assert a.start() is None
