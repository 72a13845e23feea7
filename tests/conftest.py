"""Fixtures that every test may use.

A test gets Redis through ``redis_url`` or ``link`` only: both belong to a redis-server that this test run started for
itself, so emptying it can never hurt anybody.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.oldest import oldest_server
from usher.common.base import log
from usher.common.base.log import in_hand
from usher.common.redis.client import Link
from usher.common.redis.embedded import SERVER_VARIABLE, EmbeddedRedis

pytest_plugins = (
    "tests.postgres",
    "tests.mysql",
    "tests.sinks",
    "tests.outboxes",
    "tests.valkey",
    "tests.commands",
    "tests.doors",
    "tests.sharing_out",
)
#: ``pytest --hypothesis-profile=long tests/integration/test_protocol_machine.py``: an hour instead of seconds.
hypothesis.settings.register_profile("long", max_examples=5000, stateful_step_count=60)


#: A shell that starts us in the background may have Ctrl-C ignored, which all programs that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: The server that all tests are to run on. If none was set, those in these folders, of whole programs, run on the one
#: that people get with Usher, and all others on the oldest that Usher works with: it can do least.
_WANTED = os.environ.get(SERVER_VARIABLE, "")
_ON_SHIPPED = ("audit", "browser", "process")
_MARKED = ("contract.toml", "nightly.toml")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is collected out of the search for garbage: it stays until the end, and each worker would search its
    thousands of tests again and again, while it collects and while it runs them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the contract, of which `contract.toml` names the files, and the tests that `nightly.toml` names."""
    root = Path(__file__).parent
    doors, nightly = (tomllib.loads((root / name).read_text(encoding="utf-8")) for name in _MARKED)
    files = {root.parent / file for of_door in doors.values() for file in of_door}
    for item in items:
        if item.path in files:
            item.add_marker("contract")
        names = nightly.get(item.path.relative_to(root.parent).as_posix(), ()) if item.path.is_relative_to(root) else ()
        if item.name in names or item.name.partition("[")[0] in names:
            item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures of whatever scope."""
    is_shipped = item.path.parent.name in _ON_SHIPPED
    os.environ[SERVER_VARIABLE] = _WANTED or ("" if is_shipped else str(oldest_server() or ""))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the person who runs the tests must not change them."""
    for name in [name for name in os.environ if name.startswith("USHER_") and name != SERVER_VARIABLE]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that is tried in this process sets up the log for all of it."""
    root = logging.getLogger()
    handlers, level, ours = root.handlers[:], root.level, log._ours
    yield
    log._ours = ours
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _no_message_in_hand() -> None:
    """A test that plays a runner on this thread leaves its last message in the context, and log lines of later tests
    would name it."""
    in_hand.set(None)


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """A temporary folder whose path is short enough for unix sockets; pytest's own folders may be too deep."""
    with tempfile.TemporaryDirectory(prefix="usher-", dir="/tmp" if Path("/tmp").is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path_short(short_tmp: Path) -> Path:
    """A new folder with a short path, for the one test."""
    return Path(tempfile.mkdtemp(dir=short_tmp))


@pytest.fixture(scope="session")
def redis_server(short_tmp: Path) -> Iterator[EmbeddedRedis]:
    """The one redis-server of this test run: unix socket, nothing on disk."""
    with EmbeddedRedis(
        short_tmp / "session", port=None, durable=False, server=_WANTED or str(oldest_server() or "")
    ) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """URL of an empty Redis."""
    with Link(redis_server.url, "test:flush") as link:
        link.call("FLUSHALL")
    return redis_server.url


@pytest.fixture
def link(redis_url: str) -> Iterator[Link]:
    """A connection to an empty Redis."""
    with Link(redis_url, "test") as connection:
        yield connection
