"""A redis-server of the run's own: durable, on loopback, and made to be killed, stopped, emptied, set back in time and
replaced by its replica."""

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
        self._replica: RedisServer | None = None
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
        if self._replica is not None:
            self._replica.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *more: str) -> None:
        """Start on the data that are there, and wait until it serves. ``more``: settings."""
        options = f"--port {self.port} --bind 127.0.0.1 --appendonly yes --appendfsync {self._fsync}"
        options += " --auto-aof-rewrite-percentage 0 --maxmemory-policy noeviction"
        command = [self._server, *options.split(), *more, "--dir", str(self._folder), "--save", ""]
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
        _until(self.port, "", "PING")

    def kill(self) -> None:
        """kill -9: what it had written is with the kernel, and stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def replicate(self) -> None:
        """Have a replica, in step."""
        if self._replica is None:
            self._replica = RedisServer(self._folder / "replica", self._fsync, None, True)
            self._replica._folder.mkdir(parents=True)
        self._replica.start("--replicaof", f"127.0.0.1 {self.port}")
        _until(self._replica.port, "master_link_status:up", "INFO", "replication")

    def hand_over(self) -> None:
        """Let the replica be the master, which then has all that was accepted."""
        assert self._replica is not None
        _until(self.port, "OK", "FAILOVER", "TO", "127.0.0.1", self._replica.port)
        _until(self._replica.port, "role:master", "INFO", "replication")

    def promote(self) -> None:
        """The replica takes the place and the address of the one that was killed."""
        assert self._replica is not None
        other = self._replica
        _until(other.port, "OK", "REPLICAOF", "NO", "ONE")
        _until(other.port, "OK", "CONFIG", "SET", "port", self.port)
        self._folder, other._folder = other._folder, self._folder
        self._process, other._process = other._process, None
        self.starts += 1

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


def _until(port: int, said: str, *command: str | int) -> None:
    """Until the server has answered the command so."""
    wire, deadline_s = Wire(port, 1.0), time.monotonic() + _READY_S
    try:
        while time.monotonic() < deadline_s:
            with contextlib.suppress(Refused, Unknown):
                if said.encode() in wire.call(*command):
                    return
            time.sleep(0.005)
    finally:
        wire.close()
    raise RuntimeError(f"redis-server did not say {said!r} to {command}")
