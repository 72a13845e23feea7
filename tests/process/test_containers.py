"""A master and a consumer of deploy/container/compose.yaml, with its settings, each as process 1 of a namespace of its own: they
get ready, work, and drain on SIGTERM, as in a container without an init."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.process.machine import USHER, until
from tests.unit.test_containers import compose
from usher import Producer
from usher.common.redis.embedded import EmbeddedRedis, free_port

pytestmark = pytest.mark.process
_ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def _begin(name: str, hosts: dict[str, str], state: Path) -> tuple[subprocess.Popen[bytes], Path]:
    service = compose()["services"][name]
    environ = {"PATH": os.environ["PATH"], "USHER_STATE_DIR": str(state / name), "USHER_LOG_FORMAT": "json"}
    for setting, value in service["environment"].items():
        for there, here in hosts.items():
            value = value.replace(there, here)
        environ[setting] = value
    (state / name).mkdir()
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
    ports = {"master-1": free_port(), "consumer-1": free_port()}
    with EmbeddedRedis(folder / "redis", port=0, durable=False) as server:
        hosts = {
            "redis://redis:6379/0": server.url,
            ",http://master-2:8700": "",
            "consumer-1,consumer-2,consumer-3": "127.0.0.1",
            "master-1:8700": f"127.0.0.1:{ports['master-1']}",
            "consumer-1:8721": f"127.0.0.1:{ports['consumer-1']}",
            "0.0.0.0:8700": f"0.0.0.0:{ports['master-1']}",
            "0.0.0.0:8721": f"0.0.0.0:{ports['consumer-1']}",
        }
        begun = {name: _begin(name, hosts, folder) for name in ports}
        try:
            for name, port in ports.items():
                until(lambda port=port: _is_ready(port), 60, f"{name} is ready")  # type: ignore[misc]
            producer = Producer(server.url)
            producer.send("42", {"text": "hello"})
            producer.close()
            until(lambda: "message_shown" in begun["consumer-1"][1].read_text(), 30, "the message is handled")
            for name in ("consumer-1", "master-1"):
                process = begun[name][0]
                inner = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
                assert "NSpid:\t" + f"{inner}\t1\n" in Path(f"/proc/{inner}/status").read_text()
                os.kill(inner, signal.SIGTERM)
                assert process.wait(60) == 0
            assert "consumer_drained" in begun["consumer-1"][1].read_text()
        finally:
            for process, _ in begun.values():
                process.kill()
                process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
