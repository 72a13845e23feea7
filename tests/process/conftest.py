"""What tests with real programs share: a folder whose processes are gone afterwards, and a Redis in it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hands import EmbeddedRedis
from tests.process.machine import kill_all_of, processes_of
from usher import Link


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Working directory and TMPDIR of the programs, with the module's ``FILES`` (name -> text) in it. At the end no
    process of it lives, and what a command made for itself is gone."""
    with tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name:
        made = Path(name)
        for file, text in getattr(request.module, "FILES", {}).items():
            (made / file).write_text(text)
        yield made
        until_s = time.monotonic() + 10  # a worker whose arbiter was killed ends within seconds (server.py)
        while (left := processes_of(made)) and time.monotonic() < until_s:
            time.sleep(0.1)
        kill_all_of(made)
        assert not left
        assert not list(made.glob("usher-demo-*")) + list(made.glob("usher-rides-*"))


@pytest.fixture
def redis_url(folder: Path) -> Iterator[str]:
    """A redis-server of the test's own."""
    with EmbeddedRedis(folder / "redis", port=None, durable=False) as server:
        yield server.url


@pytest.fixture
def link(redis_url: str) -> Iterator[Link]:
    made = Link(redis_url, "test")
    yield made
    made.close()
