"""Rig: the system under measurement where a benchmark starts, holds up and kills its programs itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from usher.common.cli.masters import living_consumers
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis, free_port
from usher.common.runtime.own_command import usher_command
from usher.deploy.bench.rig import GROUP, STREAM, BenchFailed, System, family


class Rig(System):
    """The system under measurement, as a context: its methods start processes, the exit ends them."""

    def __init__(self, durable: bool, environ: Mapping[str, str], streams: str = STREAM) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="usher-bench-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self.environ = {name: value for name, value in environ.items() if not name.startswith("USHER_")}
        self._redis = EmbeddedRedis(self.folder, durable=durable)
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._urls: list[str] = []
        self._streams = streams
        self.keys = Keys(SourceSelection.parse(streams).work_stream(GROUP), GROUP)

    def __enter__(self) -> Rig:
        self._redis.start()
        self.url = self._redis.url
        super().__init__(Link(self.url, "bench", timeout_s=60.0), self.keys, self._with_redis, self._check)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_programs()
        self.link.close()
        self._redis.stop()
        self._temporary.cleanup()

    # ---- programs --------------------------------------------------------------------------------

    def start_programs(self, consumers: int, handler: str, environ: dict[str, str]) -> list[str]:
        """Start a master and the consumers, and wait until all are registered; no master leads before ``release``.
        Returns the master's URL."""
        self.hold()
        urls = self.begin(1, consumers, handler, environ, pause_s=0.5)
        self.wait_until_registered()
        return urls

    def wait_until_registered(self) -> None:
        names = {name for name in self._programs if name.startswith("consumer")}
        self.wait(lambda: "" if living_consumers(self._urls) >= names else "not all consumers registered", 0.05)

    def begin(
        self, masters: int, consumers: int, handler: str, environ: dict[str, str], pause_s: float = 0.0
    ) -> list[str]:
        """Start programs, and wait for none; with a pause no consumer asks a master that does not listen yet. Returns
        the masters' URLs."""
        binds = [f"127.0.0.1:{free_port()}" for _ in range(masters)]
        self._urls = [f"http://{bind}" for bind in binds]
        for number, bind in enumerate(binds, 1):
            self.start("master" if number == 1 else f"master-{number}", ["master", "--bind", bind], environ)
        time.sleep(pause_s)
        self.begin_consumers(consumers, handler, environ)
        return self._urls

    def begin_consumers(self, consumers: int, handler: str, environ: dict[str, str], first: int = 1) -> None:
        for number in range(first, first + consumers):
            self.start(
                f"consumer-{number}",
                ["consumer", "--consumer-name", f"consumer-{number}", "--handler", handler],
                environ,
            )

    def end_programs(self) -> None:
        consumers = [program for name, program in self._programs.items() if not name.startswith("master")]
        for group in (consumers, list(self._programs.values())):
            for program in group:
                program.terminate()
            for program in group:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(15)
                if program.poll() is None:
                    program.kill()
                    program.wait()
        self._programs.clear()

    def start(self, name: str, words: list[str], environ: dict[str, str]) -> None:
        base = self.environ | {"USHER_REDIS_URL": self.url, "USHER_STATE_DIR": str(self.folder)}
        base |= {"USHER_TICKET_STREAM": self._streams, "USHER_GROUP": GROUP, "USHER_LOG_LEVEL": "warning"}
        environ = base | {"USHER_MASTER_URLS": ",".join(self._urls), **environ}
        self._programs[name] = subprocess.Popen(
            usher_command(*words), env=environ, stdout=subprocess.DEVNULL, stderr=sys.stderr
        )

    def _with_redis(self) -> dict[str, int]:
        own = {name: pid for name, pid in self.pids_of_programs().items() if name != "sender"}
        return {"redis": self._redis.pid, **own}

    def pids_of_programs(self) -> dict[str, int]:
        return {name: program.pid for name, program in self._programs.items()}

    def _check(self) -> None:
        for name, program in self._programs.items():
            if program.poll() is not None:
                raise BenchFailed(f"{name} ended with exit code {program.returncode}")


@contextlib.contextmanager
def leaving_no_program() -> Iterator[None]:
    """End what was started, also when a signal ends us: it comes at any line, perhaps before somebody has written down
    what was just started, or within a destructor, where its exception is lost: then the run fails for want of its
    programs."""

    def kill() -> None:
        for program in family(os.getpid())[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                program.kill()

    def end(number: int, frame: object) -> None:
        kill()
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        kill()
        for number, handler in before.items():
            signal.signal(number, handler)
