"""Run supervisord as a child process: start it, start its programs in order, ask for their states, and leave nothing
behind.

supervisord gets a session of its own and its programs stay in that session, each in a process group of its own. So a
Ctrl-C at the terminal reaches only us, and whatever happens to supervisord, "all processes of that session" is the
exact list of processes left to end. On Linux the kernel tells supervisord to stop when we are killed outright.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import warnings
import xmlrpc.client
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil
from supervisor.supervisord import main as supervisord_main
from supervisor.xmlrpc import SupervisorTransport

from usher.common.base.errors import StartRefused, UsherError
from usher.common.runtime.fork_guard import end_with_parent
from usher.common.runtime.own_command import usher_command

CONFIGURATION = Path(__file__).resolve().parents[1] / "supervisord.conf"
_POLL_S, _READY_S = 0.1, 20.0
_ANSWERS_IN_S = 5.0
#: Seconds after the consumers' own time to stop: masters and Redis have 20 s each, and supervisord some.
_OTHERS_STOP_S = 2 * 20 + 5
_TERM_WAIT_S = 5.0
#: Amount that is shown of supervisord's output when it did not start.
_LAST_LINES, _LONGEST_WORDS = 5, 2000


class SupervisionLost(UsherError):
    """supervisord is gone, or a program without which nothing works."""


class SupervisionHangs(SupervisionLost):
    """supervisord lives and does not answer in time; its programs may work all the same."""


class ProgramState(NamedTuple):
    """A program as supervisord sees it. ``state`` is one of STOPPED STARTING RUNNING BACKOFF STOPPING EXITED FATAL
    UNKNOWN."""

    name: str
    group: str
    state: str
    pid: int


def environment(
    base: Mapping[str, str],
    state_folder: Path,
    *,
    consumers: int,
    masters: int,
    port: int,
    redis_port: int | None,
    stop_seconds: int,
) -> dict[str, str]:
    """Return what ``deploy/supervisord.conf`` asks for (see its header), on top of ``base``. ``redis_port`` None: no
    embedded Redis."""
    return {
        **base,
        "USHER_CONSUMERS_TOKEN": base.get("USHER_API_TOKEN", ""),
        "USHER_COMMAND": shlex.join(usher_command()),
        "USHER_STATE_DIR": str(state_folder),
        "USHER_CONSUMERS": str(consumers),
        "USHER_MASTERS": str(masters),
        "USHER_PORT": str(port),
        "USHER_MASTER_URLS": master_urls(port, masters),
        "USHER_STOP_SECONDS": str(stop_seconds),
        "USHER_CONTROL_SOCKET": str(state_folder / "supervisor.sock"),
        "USHER_AUTOSTART": "false",
        "USHER_STREAMER": "false",
        "USHER_EMBEDDED_REDIS": "false",  # started by Supervision.start_group, so that it is first and alone
        "USHER_REDIS_PORT": str(redis_port or 0),
    }


def master_urls(port: int, masters: int) -> str:
    return ",".join(f"http://127.0.0.1:{port + index}" for index in range(masters))


class Supervision:
    """supervisord and its programs, between ``start`` and ``stop``."""

    def __init__(
        self, state_folder: Path, environ: Mapping[str, str], stop_seconds: float, locks: Sequence[int] = ()
    ) -> None:
        """``locks``: descriptors that supervisord holds too, for as long as it lives."""
        self._environ = dict(environ)
        self._stop_seconds, self._locks = stop_seconds, locks
        self._socket = Path(environ["USHER_CONTROL_SOCKET"])
        self._process: subprocess.Popen[bytes] | None = None
        self._redis_pid = 0
        self._logs_before: dict[str, tuple[int, int]] = {}  # inode and size of each log when this run began
        self.logs = state_folder / "logs"

    def start(self) -> None:
        """Start supervisord and wait until it answers. Raises StartRefused."""
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._logs_before = {
            path.name: ((file := path.stat()).st_ino, file.st_size) for path in self.logs.glob("*.log")
        }
        with (self.logs / "supervisord.out").open("wb") as output:
            self._process = subprocess.Popen(
                usher_command("supervisord", str(os.getpid())),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self._locks,
            )
        deadline_s = time.monotonic() + _READY_S
        while True:
            with contextlib.suppress(SupervisionLost):
                self.states()
                return
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                said = (self.logs / "supervisord.out").read_text(errors="replace").splitlines()
                lines = [line for line in said if line.strip() and not line.startswith("For help, use ")]
                told = "\n".join(lines[-_LAST_LINES:])[-_LONGEST_WORDS:] or "it said nothing"
                raise StartRefused(f"supervisord did not start: {told}")
            time.sleep(_POLL_S / 2)

    def start_group(self, group: str) -> None:
        """Start the programs of a group (redis, master or consumer) without waiting for them. Raises
        SupervisionLost."""
        with self._rpc() as supervisor:
            supervisor.startProcessGroup(group, False)

    def drain_group(self, group: str) -> None:
        """Let the programs of a group end in order; supervisord starts each again. Raises SupervisionLost."""
        with self._rpc() as supervisor:
            supervisor.signalProcessGroup(group, "TERM")

    def states(self) -> list[ProgramState]:
        """Return the states of all programs. Raises SupervisionLost when supervisord is gone, SupervisionHangs when it
        takes too long."""
        with self._rpc() as supervisor:
            told: Any = supervisor.getAllProcessInfo()
        states = [ProgramState(one["name"], one["group"], one["statename"], one["pid"]) for one in told]
        self._redis_pid = next((state.pid for state in states if state.group == "redis"), self._redis_pid)
        return states

    @contextlib.contextmanager
    def _rpc(self) -> Iterator[Any]:
        try:
            with xmlrpc.client.ServerProxy("http://127.0.0.1", transport=_Transport(self._socket)) as proxy:
                yield proxy.supervisor
        except (OSError, xmlrpc.client.Error) as trouble:
            if self._process is None or self._process.poll() is not None:
                told = f"supervisord has ended unexpectedly; its last words are in {self.logs}"
                raise SupervisionLost(told) from trouble
            # BlockingIOError: too many calls wait for it already.
            kind = SupervisionHangs if isinstance(trouble, (TimeoutError, BlockingIOError)) else SupervisionLost
            raise kind("supervisord lives but does not answer") from trouble

    def last_words(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        try:
            inode, size = self._logs_before.get(path.name, (0, 0))
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino == inode:  # else it was rotated meanwhile
                    file.seek(size)
                text = file.read().decode(errors="replace")
        except OSError:
            return "it logged nothing"
        return "\n".join(text.splitlines()[-_LAST_LINES:]) or "it logged nothing"

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Drain and end everything: consumers first, then masters, then Redis. May be called twice.

        ``hurry`` is called again and again; once it returns True, the rest is killed at once.
        """
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
        # Each of the three groups has its own time to stop; supervisord kills a program that exceeds it.
        deadline_s = time.monotonic() + self._stop_seconds + _OTHERS_STOP_S
        while process.poll() is None and time.monotonic() < deadline_s and not hurry():
            self._knock()
            time.sleep(_POLL_S)
        self._end_leftovers(process.pid, hurry)
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            self._socket.unlink()
        (self.logs.parent / "supervisord.pid").unlink(missing_ok=True)

    def _knock(self) -> None:
        """Wake supervisord, which looks once a second whether a program has ended, or when called: the next group then
        need not wait for that second."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)  # it may hang
            caller.connect(str(self._socket))

    def _end_leftovers(self, session: int, hurry: Callable[[], bool]) -> None:
        for keep, wait_s in ((self._redis_pid, self._stop_seconds), (0, _TERM_WAIT_S)):
            _signal(set(_members(session)) - {keep, session}, signal.SIGTERM)
            deadline_s = time.monotonic() + wait_s
            while set(_members(session)) - {keep, session} and time.monotonic() < deadline_s and not hurry():
                time.sleep(_POLL_S)
        _signal(_members(session), signal.SIGKILL)


class _Transport(SupervisorTransport):
    """supervisor's own, with a time limit: without one it waits as long as supervisord hangs, and Ctrl-C with it."""

    def __init__(self, path: Path) -> None:
        super().__init__(serverurl=f"unix://{path}")
        self._path = str(path)
        self._get_connection = self._connected

    def _connected(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(_ANSWERS_IN_S)
        connection.sock.connect(self._path)
        return connection


@click.command()
@click.argument("parent", type=int)
def supervisord(parent: int) -> None:
    """Become supervisord; on Linux it gets a SIGTERM when the process ``parent``, which started it, is gone, however
    that ended."""
    if sys.platform == "linux":
        end_with_parent(signal.SIGTERM)
        if os.getppid() != parent:  # gone before we asked
            sys.exit(1)
    warnings.simplefilter("ignore")  # PYTHONWARNINGS=error is for the handlers; supervisord would stop answering
    supervisord_main(["--silent", "-c", str(CONFIGURATION)])


def _members(session: int) -> list[int]:
    """Return the process ids of a session. Its leader's id is not used again while any member lives, so these are
    certainly ours."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            # A zombie has ended; its parent has not collected it yet.
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                members.append(pid)
    return members


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
