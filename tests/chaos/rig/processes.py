"""Programs as child processes, and the restarter that plays supervisord: what dies is started again at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.rig.records import HistoryWriter, now_ns
from tests.postgres import ending_with_us

_POLL_S = 0.01
#: A program is not started more often than this.
_PAUSE_S = 0.5
#: So much later than due: the machine is busy, which must not be held against the system.
_STALL_NS = 150_000_000


class LogPipe:
    """A pipe that takes a program's log, and a reader that writes it to the file, unless it is told to stand still.
    The pipe stays when the program is started again."""

    _SIZE = 4096  # the least that Linux gives: it is full at once

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_end, self.write_end = os.pipe()
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, self._SIZE)
        self._may_read = threading.Event()
        self._may_read.set()
        self._thread = threading.Thread(target=self._copy, name="log-pipe", daemon=True)
        self._thread.start()

    def block(self) -> None:
        """From now on nobody reads."""
        self._may_read.clear()

    def go_on(self) -> None:
        self._may_read.set()

    @property
    def is_full(self) -> bool:
        """Whether a writer of a line may have to wait."""
        held = struct.unpack("i", fcntl.ioctl(self._read_end, termios.FIONREAD, struct.pack("i", 0)))[0]
        return bool(held > self._SIZE // 2)

    def close(self) -> None:
        """When all writers are gone: read the rest."""
        self.go_on()
        os.close(self.write_end)
        self._thread.join(5)
        os.close(self._read_end)

    def _copy(self) -> None:
        with self._log.open("ab", buffering=0) as log:
            while True:
                self._may_read.wait()
                select.select([self._read_end], [], [])
                if not self._may_read.is_set():
                    continue
                if not (chunk := os.read(self._read_end, self._SIZE)):
                    return
                log.write(chunk)


@dataclass
class Program:
    """A program of the system under test. ``worker`` is the process that works: the arbiter's child, or the program
    itself."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    log: Path
    has_arbiter: bool = True
    pipe: LogPipe | None = None  # takes the log; else the file does
    wanted: bool = False
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    starts: int = 0
    worker: int = 0
    workers: set[int] = field(default_factory=set)
    seen_ns: int = 0

    @property
    def who(self) -> str:
        """How the handler in it signs."""
        return f"{self.name}/{self.worker}"

    def find_worker(self) -> int:
        """Process id of the worker, 0 if there is none at the moment."""
        if self.process is None or self.process.poll() is not None:
            return 0
        if not self.has_arbiter:
            return self.process.pid
        pid = self.process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            living = [int(child) for child in children if _state(int(child)) not in ("Z", "X")]
            return living[-1] if living else 0
        return 0


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "X"


class Restarter:
    """Starts programs, looks after them, and notes deaths of workers in the history. One thread does all of it, so that
    the children live as long as it does."""

    def __init__(self, cwd: Path, history: HistoryWriter) -> None:
        self._cwd = cwd
        self._history = history
        self.programs: dict[str, Program] = {}
        self.restarts = 0
        self._others: dict[int, tuple[str, int]] = {}  # by process id: who, and when it was last seen alive
        self._declared: set[int] = set()  # workers whose death the injector has noted itself
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="restarter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, program: Program) -> None:
        """It is started at the next look."""
        program.wanted = True
        self.programs[program.name] = program

    def watch(self, who: str) -> str:
        """Note the death of this process too: it runs handlers, and may run one for a worker, which did not fork it
        itself. Return who owns what it runs: that worker, else itself. Any thread may call it."""
        name, _, pid = who.partition("/")
        self._others[int(pid)] = (who, now_ns())
        program = self.programs[name]
        worker = program.find_worker()
        return who if not worker or int(pid) in {worker, *program.workers} else f"{name}/{worker}"

    def kill(self, pid: int, who: str = "") -> None:
        """kill -9; ``who``: the death of a worker is noted before."""
        if not pid:
            return  # it ended by itself at this moment; 0 is whoever runs the tests
        if who:
            self._declared.add(pid)
            self._history.write("die", who=who, t=now_ns())
        _signal(pid, signal.SIGKILL)

    def terminate(self, name: str, within_s: float) -> bool:
        """SIGTERM, and do not start it again. Whether it ended in time by itself; if not it is killed."""
        program = self.programs[name]
        program.wanted = False
        process = program.process
        if process is None:
            return True
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._end(program)
            return False
        return True

    def stop(self, first: Sequence[str], grace_s: float) -> bool:
        """End everything, the programs ``first`` before the others. Whether all ended by themselves."""
        for program in self.programs.values():
            program.wanted = False
        try:
            others = [name for name in self.programs if name not in first]
            clean = [self._stop_some(names, grace_s) for names in (list(first), others)]
        finally:
            for program in self.programs.values():
                self._end(program)
            self._ending.set()
            if self._thread.ident is not None:
                self._thread.join(5)
        for program in self.programs.values():
            self._note_death(program)
        self._watch_others()
        for program in self.programs.values():
            if program.pipe is not None:
                program.pipe.close()
                program.pipe = None
        return all(clean)

    def _stop_some(self, names: Sequence[str], grace_s: float) -> bool:
        """SIGTERM to these, if there is any time at all; whether they ended by themselves."""
        processes = [process for name in names if (process := self.programs[name].process) is not None]
        for process in processes if grace_s else ():
            process.terminate()
        deadline_s = time.monotonic() + grace_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
        return all(process.poll() is not None for process in processes)

    # ---- its thread ----------------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        before = now_ns()
        while not self._ending.wait(_POLL_S):
            now = now_ns()
            if now - before > _STALL_NS:
                self._history.write("stall", who="rig", t0=before, t1=now)
            before = now
            for program in list(self.programs.values()):
                if program.wanted and (program.process is None or program.process.poll() is not None):
                    self._start(program)
                self._watch_worker(program)
            self._watch_others()

    def _start(self, program: Program) -> None:
        now_s = time.monotonic()
        if program.starts and now_s - program.started_s < _PAUSE_S:
            return  # it falls at its start: not again and again
        with program.log.open("ab") as file:
            log = program.pipe.write_end if program.pipe is not None else file.fileno()
            program.process = subprocess.Popen(
                list(program.command),
                env=dict(program.environ),
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=ending_with_us(signal.SIGKILL),
            )
        program.started_s = now_s
        self.restarts += program.starts > 0
        program.starts += 1

    def _watch_worker(self, program: Program) -> None:
        found = program.find_worker()
        if found != program.worker:
            self._note_death(program)
            program.worker = found
            if found:
                program.workers.add(found)
        program.seen_ns = now_ns()

    def _watch_others(self) -> None:
        for pid, (who, seen_ns) in list(self._others.items()):
            if _state(pid) not in ("Z", "X"):
                self._others[pid] = (who, now_ns())
                continue
            del self._others[pid]
            if pid not in self._declared:
                self._declared.add(pid)
                self._history.write("die", who=who, t=seen_ns)

    def _note_death(self, program: Program) -> None:
        """When it was last seen alive is certain; when it died is not. What it did after that has its own records."""
        if program.worker and program.worker not in self._declared:
            self._declared.add(program.worker)
            self._history.write("die", who=program.who, t=program.seen_ns)

    def _end(self, program: Program) -> None:
        """Kill it with its workers, stopped ones too. The arbiter first: it would start another worker."""
        program.workers.add(program.find_worker())
        if program.process is not None:
            program.process.kill()
            program.process.wait()
        for pid in sorted(program.workers - {0}):
            if _is_ours(pid, program):
                _signal(pid, signal.SIGKILL)


def _is_ours(pid: int, program: Program) -> bool:
    """Whether the process id still belongs to a worker of the program: ids are used again."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).environ().get("CHAOS_NAME") == program.name
    return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def held_by(pid: int) -> tuple[int, int]:
    """Open files and threads of a process; (0, 0) when it is gone."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.num_fds(), process.num_threads()
    return 0, 0


def stop_process(pid: int) -> None:
    """SIGSTOP."""
    _signal(pid, signal.SIGSTOP)


def continue_process(pid: int) -> None:
    """SIGCONT."""
    _signal(pid, signal.SIGCONT)
