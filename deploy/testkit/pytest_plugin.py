"""The pytest fixture ``usher_kit`` for users' own tests::

    def test_paid_orders_are_booked(usher_kit):
        kit = usher_kit(handle, max_attempts=3)
        kit.send("42", kind="paid")
        kit.run()
        assert len(kit.acknowledged) == 1

pytest finds it by itself where Usher is installed (``-p no:usher_kit`` turns it off). Nothing of Usher is imported
before it is used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def usher_redis() -> Iterator[str]:
    """Start an embedded redis-server for this test run: a unix socket, and nothing on disk. Yield its URL."""
    from usher.common.redis.embedded import EmbeddedRedis

    with (
        tempfile.TemporaryDirectory(prefix="usher-") as folder,
        EmbeddedRedis(Path(folder), port=None, durable=False) as server,
    ):
        yield server.url


@pytest.fixture
def usher_kit(usher_redis: str) -> Iterator[Callable[..., Any]]:
    """Return ``usher_kit(handler, **settings)``, which gives a ``usher.testing.Kit`` on an empty Redis. One at a
    time."""
    from usher.common.redis.client import Link
    from usher.deploy.testkit.kit import Kit

    made: list[Kit] = []

    def make(handler: Callable[..., Any] | str, **settings: Any) -> Kit:
        link = Link(usher_redis, "kit:flush")
        link.call("FLUSHALL")
        link.close()
        made.append(Kit(usher_redis, handler, **settings))
        return made[-1]

    yield make
    for kit in made:
        kit.close()
