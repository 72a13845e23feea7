"""deploy/container/compose.yaml, piece by piece: its Redis, a master, a consumer and the producer, with the commands and
settings that stand there. Ours are process 1 of a namespace each: they get ready, as their own health checks find, work, and
drain on SIGTERM, as in a container without an init."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hands import find_redis_server, free_port
from tests.nightly import more
from tests.process.machine import ROOT, USHER, until
from tests.unit.test_containers import compose
from usher import Link

pytestmark = pytest.mark.process
_ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def _environ(service: dict[str, Any], hosts: dict[str, str], state: Path) -> dict[str, str]:
    environ = {"PATH": os.environ["PATH"], "USHER_STATE_DIR": str(state), "USHER_LOG_FORMAT": "json"}
    for setting, value in service["environment"].items():
        for there, here in hosts.items():
            value = value.replace(there, here)
        environ[setting] = value
    return environ


def _told_by_producer(text: str) -> tuple[int, int]:
    """Return how many messages were accepted, and how many of which it does not know, as it says at its end."""
    said = re.search(r"(\d+) messages were certainly accepted(?:; the last batch of (\d+) may or may not)?", text)
    assert said, text
    return int(said[1]), int(said[2] or 0)


def _begin(name: str, hosts: dict[str, str], state: Path) -> tuple[subprocess.Popen[bytes], Path]:
    service = compose()["services"][name]
    (state / name).mkdir()
    environ = _environ(service, hosts, state / name)
    log = state / f"{name}.log"
    with log.open("wb") as output:
        words = [*_ALONE, *USHER, *service["command"]]
        return subprocess.Popen(words, env=environ, stdout=output, stderr=subprocess.STDOUT), log


def test_programs_are_process_1_by_themselves(folder: Path) -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run([*_ALONE, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no namespace can be made here")
    ports = {"redis": free_port(), "master-1": free_port(), "consumer-1": free_port()}
    hosts = {
        "redis://redis:6379": f"redis://127.0.0.1:{ports['redis']}",
        ",http://master-2:8700": "",
        "consumer-1,consumer-2,consumer-3": "127.0.0.1",
        "master-1:8700": f"127.0.0.1:{ports['master-1']}",
        "consumer-1:8721": f"127.0.0.1:{ports['consumer-1']}",
        "0.0.0.0:8700": f"127.0.0.1:{ports['master-1']}",
        "0.0.0.0:8721": f"127.0.0.1:{ports['consumer-1']}",
    }
    with _redis(ports["redis"], folder) as url:
        assert not any(_is_healthy(name, port) for name, port in ports.items() if name != "redis")
        begun = {name: _begin(name, hosts, folder) for name in ("master-1", "consumer-1")}
        try:
            for name in begun:
                until(lambda name=name: _is_healthy(name, ports[name]), 60, f"{name} is ready")  # type: ignore[misc]
            begun["producer"] = producer, sent = _begin("producer", hosts, folder)
            shown = begun["consumer-1"][1]
            until(lambda: _shown(shown) >= 20, 30, "what the producer sends is handled")
            os.kill(_process_1(producer), signal.SIGTERM)
            assert producer.wait(30) == 130
            link = Link(url, "test")
            count = link.call("XLEN", "ticket_stream")
            certain, unsure = _told_by_producer(sent.read_text())
            assert certain <= count <= certain + unsure
            until(lambda: _shown(shown) == count, 30, "all that was sent is handled")
            assert link.call("CONFIG", "GET", "appendfsync")[1] == b"always"
            link.close()
            for name in ("consumer-1", "master-1"):
                process = begun[name][0]
                inner = _process_1(process)
                assert "NSpid:\t" + f"{inner}\t1\n" in Path(f"/proc/{inner}/status").read_text()
                os.kill(inner, signal.SIGTERM)
                assert process.wait(60) == 0
            assert "consumer_drained" in begun["consumer-1"][1].read_text()
        finally:
            for process, _ in begun.values():
                process.kill()
                process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, *more(signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)])
def test_process_1_is_ended_in_its_first_moments_too(folder: Path, number: int) -> None:
    """It had no handler while it imported; a signal then did nothing, and it was killed in the middle of its work."""
    if subprocess.run([*_ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace can be made here")
    environ = {"PATH": os.environ["PATH"], "USHER_STATE_DIR": str(folder), "USHER_REDIS_URL": "redis://127.0.0.1:1"}
    with subprocess.Popen([*_ALONE, *USHER, "master", "--bind", "127.0.0.1:0"], env=environ) as begun:
        inner = until(lambda: _process_1_at_its_imports(begun), 20, "it imports")
        os.kill(inner, number)
        assert begun.wait(10) == 128 + number


def _process_1_at_its_imports(namespace: subprocess.Popen[bytes]) -> int | None:
    with contextlib.suppress(OSError, IndexError):
        inner = _process_1(namespace)
        caught = re.search(r"SigCgt:\t(\w+)", Path(f"/proc/{inner}/status").read_text())
        return inner if caught and int(caught[1], 16) & 1 << signal.SIGTERM - 1 else None
    return None


def _shown(log: Path) -> int:
    return log.read_text().count('"event":"message_shown"')


def _process_1(namespace: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{namespace.pid}/task/{namespace.pid}/children").read_text().split()[0])


def _is_healthy(name: str, port: int) -> bool:
    """Run the container's own health check."""
    word, python, *words = compose()["services"][name]["healthcheck"]["test"]
    assert (word, python) == ("CMD", "python")
    command = [sys.executable, *(re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", one) for one in words)]
    return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0


@contextlib.contextmanager
def _redis(port: int, folder: Path) -> Iterator[str]:
    """Run the command of the container of Redis, on loopback."""
    (folder / "data").mkdir()
    here = {
        "valkey-server": str(find_redis_server()),
        "/etc/redis.conf": str(ROOT / "deploy" / "redis.conf"),
        "/data": str(folder / "data"),
        "0.0.0.0": "127.0.0.1",
    }
    words = [here.get(word, word) for word in compose()["services"]["redis"]["command"]]
    with (folder / "redis.log").open("wb") as output:
        server = subprocess.Popen([*words, "--port", str(port)], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()
