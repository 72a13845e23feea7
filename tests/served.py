"""Programs under ``usher.common.http.serve``, as processes of their own that tests can ask, signal and kill."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import requests

_ROOT = Path(__file__).resolve().parent.parent
#: No step takes longer, also on a busy machine.
PATIENCE_S = 20.0


class Running:
    """A running child. ``code`` is what it runs; it gets ``how`` as its argument, and logs as JSON."""

    def __init__(self, folder: Path, how: dict[str, Any], code: str) -> None:
        self._log = folder / f"child-{time.monotonic_ns()}.log"
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(how)],
                cwd=_ROOT,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._family = [psutil.Process(self.process.pid)]

    def records(self, action: str) -> list[dict[str, Any]]:
        lines = self._log.read_text().rpartition("\n")[0].splitlines()  # the last one may be half written
        told = (json.loads(line) for line in lines if line.startswith("{"))
        return [
            found | {"time_ms": datetime.fromisoformat(found["timestamp"]).timestamp() * 1000}
            for found in told
            if found.get("event") == action
        ]

    def wait_for(self, action: str, count: int = 1) -> dict[str, Any]:
        until(lambda: len(self.records(action)) >= count, f"{count} x {action}", self)
        return self.records(action)[count - 1]

    def wait_until_up(self, count: int = 1) -> Running:
        worker = self.wait_for("listening", count)
        with contextlib.suppress(psutil.NoSuchProcess):  # it has left already
            self._family.append(psutil.Process(worker["pid"]))
        return self

    @property
    def port(self) -> int:
        return int(self.records("listening")[0]["url"].rpartition(":")[2])

    @property
    def worker(self) -> int:
        return int(self.records("listening")[-1]["pid"])

    def get(self, path: str = "/", **more: Any) -> requests.Response:
        return requests.get(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S, **more)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def signal(self, number: int) -> float:
        self.process.send_signal(number)
        return time.time()

    def ended(self) -> int:
        """Its exit code, once it and all its workers are gone."""
        code = self.process.wait(PATIENCE_S)
        until(lambda: not any(process.is_running() for process in self._family), "the end of the workers", self)
        return code

    def text(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        family = [
            *self._family,
            *(found for process in self._family if process.is_running() for found in process.children(recursive=True)),
        ]
        for process in family:
            if process.is_running():
                process.kill()
        self.process.wait(PATIENCE_S)


def until(true: Callable[[], bool], what: str, running: Running) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends, f"waited in vain for {what}; the log:\n{running.text()}"
        time.sleep(0.02)
