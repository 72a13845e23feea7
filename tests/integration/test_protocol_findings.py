"""Counter-examples that the protocol machine found, small enough to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.integration.actors import ConsumerActor, MasterActor, Stage
from tests.integration.factories import LEASE_MS

T = b"T"


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


def _swept(stage: Stage, m: MasterActor, a: ConsumerActor) -> None:
    m.sweep()


def _renewed(stage: Stage, m: MasterActor, a: ConsumerActor) -> None:
    a.steps.renew(LEASE_MS)


@pytest.mark.parametrize("touch", [_swept, _renewed], ids=["sweep", "renew"])
def test_a_message_whose_body_is_deleted_has_a_letter_also_when_its_owner_dies_before_it_looks(
    stage: Stage, touch: Callable[[Stage, MasterActor, ConsumerActor], None]
) -> None:
    """Redis >= 7 drops it from the pending list as soon as anybody claims around it; then only the index knows of it."""
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
