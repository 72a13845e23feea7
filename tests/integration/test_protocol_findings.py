"""Counter-examples that the protocol machine found, small enough to be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.actors import ConsumerActor, MasterActor, Stage
from tests.integration.factories import LEASE_MS
from usher.common.base.errors import NotNow
from usher.master.membership.registry import read_registry

T = b"T"


def _swept(stage: Stage, m: MasterActor, a: ConsumerActor) -> None:
    m.sweep()


def _renewed(stage: Stage, m: MasterActor, a: ConsumerActor) -> None:
    a.steps.renew(LEASE_MS)


@pytest.mark.parametrize("touch", [_swept, _renewed], ids=["sweep", "renew"])
def test_a_message_whose_body_is_deleted_has_a_letter_also_when_its_owner_dies_before_it_looks(
    stage: Stage, touch: Callable[[Stage, MasterActor, ConsumerActor], None]
) -> None:
    """Redis >= 7 drops it from the pending list as soon as anybody claims around it; then only the index knows of
    it."""
    m, a = stage.leader(), stage.consumer("a")
    first, second = [*stage.send(T), *stage.send(T)]
    m.settle()
    stage.world.make_idle(a.name, LEASE_MS, first, second)
    stage.world.delete(first)
    touch(stage, m, a)
    stage.end_lease(a)
    a.crash()
    b = stage.consumer("b")
    m.settle()
    stage.finish(m, [b])
    stage.check_done(T, [second])
    assert [(letter[b"usher-id"], letter[b"usher-reason"]) for letter in stage.world.dead()] == [(first, b"body_gone")]


def test_who_is_lost_is_found_though_redis_was_busy_when_it_was_asked(stage: Stage) -> None:
    """The roster says that a consumer is lost, and whether its lease has ended Redis cannot tell just then."""
    m, a, b = stage.leader(), stage.consumer("a"), stage.consumer("b")
    m.settle()
    for number in range(20):
        stage.send(b"T%d" % number, b"%d-0" % (number + 1))
    stage.link.call("DEL", stage.keys.lease(a.incarnation))

    def busy(step: str) -> None:
        if step == "PIPELINE":  # whether its lease has ended
            m.link.before = lambda step: None
            raise NotNow("BUSY", "a script runs")

    m.link.before = busy
    stage.finish(m, [b])
    assert len(stage.history.starts) == 20
    assert m.link.before is not busy


def test_a_roster_that_was_read_before_a_consumer_came_loses_nobody(stage: Stage) -> None:
    """The roster is read on another thread: its news may be older than what was adopted."""
    old = read_registry(stage.link, stage.keys)
    a = stage.consumer("a")
    m = stage.leader()
    ids = stage.send(T)
    m.dispatcher.post(old)
    m.turn()
    assert m.dispatcher.counts.lost == 0
    a.work()
    assert stage.history.ids(T) == ids
    stage.end_lease(a)
    m.dispatcher.post(old)
    m.turn()
    assert m.dispatcher.counts.lost == 1


def test_a_consumer_whose_lease_cannot_be_asked_for_because_another_server_leads_is_not_lost_by_memory(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the next server says of it counts; memory is of this one."""
    a, m = stage.consumer("a"), stage.leader()
    ids = stage.send(T)
    m.turn()
    with monkeypatch.context() as moved:
        moved.setattr(m.link, "pipeline", lambda commands: [NotNow("READONLY", "a replica")] * 2)
        m.dispatcher.post({})
        m.turn()
    assert m.lead.epoch is None, "in doubt"
    assert m.dispatcher.counts.lost == 0
    stage.finish(m, [a])
    stage.check_done(T, ids)
