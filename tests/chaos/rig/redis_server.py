"""A redis-server of the run's own: durable, on loopback, and made to be killed, stopped, emptied and set back in
time."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.chaos.rig.clock import SteppedClock
from tests.chaos.rig.wire import Refused, Unknown, Wire
from tests.hands import find_redis_server, free_port, server_of
from tests.postgres import ending_with_us

_READY_S = 20.0


class RedisServer:
    """``with RedisServer(folder, fsync="everysec") as server``; ``server.port``. ``clock``: one that can be set."""

    def __init__(self, folder: Path, fsync: str, clock: SteppedClock | None = None, is_shipped: bool = False) -> None:
        self._folder = folder / "redis"
        self._copy = folder / "redis-copy"
        self._fsync = fsync
        self._server = str((server_of() if is_shipped else None) or find_redis_server())
        self.clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.starts = 0

    def __enter__(self) -> RedisServer:
        self._folder.mkdir()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start on the data that are there, and wait until it serves."""
        options = f"--port {self.port} --bind 127.0.0.1 --appendonly yes --appendfsync {self._fsync}"
        options += " --auto-aof-rewrite-percentage 0 --maxmemory-policy noeviction"
        command = [self._server, *options.split(), "--dir", str(self._folder), "--save", ""]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **(self.clock.environ if self.clock else {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=ending_with_us(signal.SIGKILL),
            )
        self.starts += 1
        wire, deadline_s = Wire(self.port, 1.0), time.monotonic() + _READY_S
        try:
            while time.monotonic() < deadline_s:
                with contextlib.suppress(Refused, Unknown):
                    wire.call("PING")
                    return
                time.sleep(0.005)
        finally:
            wire.close()
        raise RuntimeError(f"redis-server did not start; its log is in {self._folder}")

    def kill(self) -> None:
        """kill -9: what it had written is with the kernel, and stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def copy_data(self) -> None:
        """What the disk has at this moment, in the power-loss model."""
        shutil.rmtree(self._copy, ignore_errors=True)
        self._copy.mkdir()
        for path in self._folder.iterdir():
            if path.name.startswith("appendonly"):
                (shutil.copytree if path.is_dir() else shutil.copy)(path, self._copy / path.name)

    def lose_power(self) -> None:
        """Kill it and put the copy back: whatever was written after ``copy_data`` is gone."""
        self.kill()
        for path in self._copy.iterdir():
            target = self._folder / path.name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
            shutil.move(path, target)
