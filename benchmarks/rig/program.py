"""A process of a benchmark with a log of its own, which ends together with all that it has started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from usher.deploy.bench.rig import BenchFailed

_LAST_LINES = 3


class BenchProcess:
    """A process, as a context: started at once, in a session of its own, killed at the exit."""

    def __init__(self, name: str, words: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def __enter__(self) -> BenchProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def tell(self, line: str = "") -> None:
        """Write a line to its standard input. Raises BenchFailed when it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failure() from None

    def answer(self, within_s: float) -> str:
        """Return the next line of its standard output. Raises BenchFailed when it ends without one, or none comes in
        time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            raise BenchFailed(f"{self.name} did not answer in {within_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self.failure()
        return line.decode(errors="replace").strip()

    def check(self) -> None:
        """Raise BenchFailed when it has ended."""
        if self._process.poll() is not None:
            raise self.failure()

    def failure(self) -> BenchFailed:
        """Return the error to raise when it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        said = " / ".join(line.strip() for line in self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        return BenchFailed(f"{self.name} ended with exit code {self._process.returncode}: {said or 'it said nothing'}")
