"""Run everything on this machine: plan what to run, check it, run supervisord as a child process, start its programs in
order, wait until all is well, and leave nothing behind; and ``usher up``, which does so in the foreground.

supervisord gets a session of its own and its programs stay in that session, each in a process group of its own. So a
Ctrl-C at the terminal reaches only us, and whatever happens to supervisord, "all processes of that session" is the
exact list of processes left to end. On Linux the kernel tells supervisord to stop when we are killed outright.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import warnings
import xmlrpc.client
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import psutil
from pydantic import Field
from supervisor.supervisord import main as supervisord_main
from supervisor.xmlrpc import SupervisorTransport

from usher.common.base.clock import wall_ms
from usher.common.base.durations import option
from usher.common.base.errors import SettingsError, StartRefused, UsherError
from usher.common.base.log import redacted
from usher.common.base.text import escape_control, pluralize
from usher.common.cli.masters import is_well, living_consumers, somebody_leads
from usher.common.http.serve import check_address
from usher.common.redis.client import Link, check_reachable
from usher.common.redis.embedded import free_port, prepare
from usher.common.redis.locate import LocalInstance, announce_instance, find_local_instance
from usher.common.runtime.fork_guard import end_with_parent
from usher.common.runtime.own_command import usher_command
from usher.common.runtime.settings import CommonSettings, load, name_of, options
from usher.common.runtime.settings import environment as changed_settings
from usher.common.runtime.signals import StopAsked, StopRequest

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


def environment(
    base: Mapping[str, str], settings: LocalSettings, state_folder: Path, redis_port: int | None = None
) -> dict[str, str]:
    """Return what ``deploy/supervisord.conf`` asks for (see its header), on top of ``base``. ``redis_port`` None: no
    embedded Redis."""
    return {
        **base,
        "USHER_CONSUMERS_TOKEN": base.get("USHER_API_TOKEN", ""),
        "USHER_COMMAND": shlex.join(usher_command()),
        "USHER_STATE_DIR": str(state_folder),
        "USHER_CONSUMERS": str(settings.consumers),
        "USHER_MASTERS": str(settings.masters),
        "USHER_PORT": str(settings.port),
        "USHER_MASTER_URLS": ",".join(settings.urls),
        "USHER_STOP_SECONDS": str(settings.stop_seconds),
        "USHER_CONTROL_SOCKET": str(state_folder / "supervisor.sock"),
        "USHER_AUTOSTART": "false",
        "USHER_STREAMER": "false",
        "USHER_EMBEDDED_REDIS": "false",  # started by Supervision.start_group, so that it is first and alone
        "USHER_REDIS_PORT": str(redis_port or 0),
    }


class Supervision:
    """supervisord and its programs, between ``start`` and ``stop``. ``redis_port`` None: Redis is not ours."""

    def __init__(
        self,
        settings: LocalSettings,
        environ: Mapping[str, str],
        check: Callable[[], None] = lambda: None,
        locks: Sequence[int] = (),
    ) -> None:
        """Check everything that can be wrong. Raises StartRefused or SettingsError naming the setting; nothing runs
        yet, and nothing can be wrong any more, unless another program takes a port meanwhile.

        ``check`` is called while it takes long, and may raise. ``locks``: descriptors that supervisord holds too, for
        as long as it lives.
        """
        self.settings, self._locks = settings, locks
        self.folder = folder = settings.state_folder.absolute()
        if len(os.fsencode(folder)) > _LONGEST_FOLDER:
            raise StartRefused(
                f"USHER_STATE_DIR: {folder} is too long for the sockets in it; set one of at most {_LONGEST_FOLDER}"
                " bytes"
            )
        if odd := sorted(_NOT_IN_A_FOLDER & set(str(folder))):
            raise StartRefused(
                f"USHER_STATE_DIR: supervisord cannot use a folder with {' '.join(odd)} in its name ({folder}); set"
                " another one"
            )
        for index in range(settings.masters):
            check_address(f"127.0.0.1:{settings.port + index}", "USHER_PORT")
        self.redis_url, self.redis_port = settings.redis_url, None
        if settings.redis_url:
            check_reachable(settings.redis_url)
        else:
            self.redis_port = _redis_port(settings, folder)
            prepared = prepare(folder, self.redis_port, server=settings.redis_server)
            os.close(prepared.lock_fd)  # only a check: the server takes the lock itself
            self.redis_url = prepared.url
        base = {**_of_programs(environ), **changed_settings(settings), "USHER_HANDLER": settings.handler}
        self.environ = environment(base, settings, folder, self.redis_port)
        check_programs(self.environ, check)
        self._socket = Path(self.environ["USHER_CONTROL_SOCKET"])
        self._process: subprocess.Popen[bytes] | None = None
        self._redis_pid = 0
        self.logs = Relay(folder / "logs")

    def start(self) -> None:
        """Start supervisord and wait until it answers. Raises StartRefused."""
        said = self.logs.folder / "supervisord.out"
        with said.open("wb") as output:
            self._process = subprocess.Popen(
                usher_command("supervisord", str(os.getpid())),
                env=self.environ,
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
                words = said.read_text(errors="replace").splitlines()
                lines = [line for line in words if line.strip() and not line.startswith("For help, use ")]
                told = "\n".join(lines[-_LAST_LINES:])[-_LONGEST_WORDS:] or "it said nothing"
                raise StartRefused(f"supervisord did not start: {told}")
            time.sleep(_POLL_S / 2)

    def start_all(self, check: Callable[[], None], told: Callable[[str], None]) -> None:
        """Start Redis, masters, consumers and, for an outbox, the streamer, each when the one before is well; return
        when all are.

        ``check`` is called all the time and may raise; ``told`` gets a text on what is being waited for. Raises
        StartRefused when a program cannot start.
        """
        settings = self.settings
        names = [f"consumer-{index + 1}" for index in range(settings.consumers)]
        up = LocalInstance(self.redis_url, ",".join(settings.urls), os.getpid(), ",".join(names), wall_ms())
        announce_instance(self.folder, up)
        groups: list[tuple[str, str, Callable[[], str]]] = [
            ("master", pluralize(settings.masters, "master"), lambda: _first_trouble(settings)),
            ("consumer", pluralize(settings.consumers, "consumer"), lambda: _missing(set(names), settings)),
        ]
        if self.redis_port is not None:
            groups.insert(0, ("redis", "Redis", lambda: _unreachable(self.redis_url)))
        if self.environ.get("USHER_OUTBOX_URL"):
            groups.append(("streamer", "the streamer", lambda: self._not_running("streamer")))
        for group, words, trouble in groups:
            told(f"starting {words}")
            self.start_group(group)
            self._wait(group, check, trouble, 60.0 + settings.lease_seconds)
        announce_instance(self.folder, replace(up, starting_since_ms=0))

    def _not_running(self, group: str) -> str:
        states = [one["statename"] for one in self.states(group)]
        return "" if all(state == "RUNNING" for state in states) else f"{group}: {', '.join(states)}"

    def _wait(self, group: str, check: Callable[[], None], trouble: Callable[[], str], within_s: float) -> None:
        """Wait until ``trouble`` is empty. Raises StartRefused when a program of the group ended at once (all was
        checked before, so trying again would only hide why), or when time is over."""
        deadline_s = time.monotonic() + within_s
        while problem := trouble():
            check()
            states = self.states(group)
            stuck = [one for one in states if one["statename"] in ("BACKOFF", "FATAL")]  # it may be tried again
            if stuck or time.monotonic() > deadline_s:
                names = [one["name"] for one in stuck or states if one["statename"] != "RUNNING"] or [group]
                late = f"{group} is not well after {within_s:.0f} s ({problem})"
                told = f"{names[0]} did not start" if stuck else late
                raise StartRefused(
                    f"{told}; the last lines of its log ({self.logs.folder}):\n{self.logs.last_words(names[0])}"
                )
            time.sleep(_POLL_S)

    def watch(self) -> None:
        try:
            states = self.states("redis")
        except SupervisionHangs:
            return  # supervisord is not needed at this moment
        if self.redis_port is not None and any(one["statename"] == "FATAL" for one in states):
            raise SupervisionLost(f"Redis does not start any more; its last words:\n{self.logs.last_words('redis')}")

    def start_group(self, group: str) -> None:
        """Start the programs of a group (redis, master or consumer) without waiting for them. Raises
        SupervisionLost."""
        with self._rpc() as supervisor:
            supervisor.startProcessGroup(group, False)

    def drain_group(self, group: str) -> None:
        """Let the programs of a group end in order; supervisord starts each again. Raises SupervisionLost."""
        with self._rpc() as supervisor:
            supervisor.signalProcessGroup(group, "TERM")

    def states(self, group: str = "") -> list[dict[str, Any]]:
        """Return what supervisord tells of the programs of a group ("": all): name, statename, pid ... Raises
        SupervisionLost when it is gone, SupervisionHangs when it takes too long."""
        with self._rpc() as supervisor:
            told: list[dict[str, Any]] = supervisor.getAllProcessInfo()
        self._redis_pid = next((one["pid"] for one in told if one["group"] == "redis"), self._redis_pid)
        return [one for one in told if group in ("", one["group"])]

    def pids(self) -> dict[str, int]:
        return {one["name"]: one["pid"] for one in self.states() if one["pid"]}

    @contextlib.contextmanager
    def _rpc(self) -> Iterator[Any]:
        transport = SupervisorTransport(serverurl=f"unix://{self._socket}")
        socket.setdefaulttimeout(_ANSWERS_IN_S)  # else it waits as long as supervisord hangs, and Ctrl-C with it
        try:
            with xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport) as proxy:
                yield proxy.supervisor
        except (OSError, xmlrpc.client.Error) as trouble:
            if self._process is None or self._process.poll() is not None:
                told = f"supervisord has ended unexpectedly; its last words are in {self.logs.folder}"
                raise SupervisionLost(told) from trouble
            # BlockingIOError: too many calls wait for it already.
            kind = SupervisionHangs if isinstance(trouble, (TimeoutError, BlockingIOError)) else SupervisionLost
            raise kind("supervisord lives but does not answer") from trouble
        finally:
            socket.setdefaulttimeout(None)

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
        deadline_s = time.monotonic() + self.settings.stop_seconds + _OTHERS_STOP_S
        while process.poll() is None and time.monotonic() < deadline_s and not hurry():
            self._knock()
            time.sleep(_POLL_S)
        self._end_leftovers(process.pid, hurry)
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            self._socket.unlink()
        (self.logs.folder.parent / "supervisord.pid").unlink(missing_ok=True)

    def _knock(self) -> None:
        """Wake supervisord, which looks once a second whether a program has ended, or when called: the next group then
        need not wait for that second."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)  # it may hang
            caller.connect(str(self._socket))

    def _end_leftovers(self, session: int, hurry: Callable[[], bool]) -> None:
        for keep, wait_s in ((self._redis_pid, self.settings.stop_seconds), (0, _TERM_WAIT_S)):
            _signal(set(_members(session)) - {keep, session}, signal.SIGTERM)
            deadline_s = time.monotonic() + wait_s
            while set(_members(session)) - {keep, session} and time.monotonic() < deadline_s and not hurry():
                time.sleep(_POLL_S)
        _signal(_members(session), signal.SIGKILL)


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


#: Seconds that programs need around the drain, in addition to it; more than ``usher.common.http.serve`` takes (8 s).
AROUND_DRAIN_S = 12
EXAMPLE_HANDLER = "usher.deploy.demo.handlers:show"
#: Characters with a meaning in a command line or a value of supervisord, wherever they come from.
_NOT_IN_A_FOLDER = frozenset('%"\\\n')
#: A socket's path has 108 bytes on Linux and 104 elsewhere; supervisord binds a temporary name with ".<pid>" after it.
_LONGEST_FOLDER = 80
#: Stand-ins for settings that are only known at each program's start, or checked below.
_ANY = {"handler": "any:handler"}


class LocalSettings(CommonSettings):
    """The settings of `usher up`; every other setting of the programs is taken from the environment."""

    consumers: int = Field(2, ge=1, le=64, description="Number of consumers.")
    masters: int = Field(2, ge=1, le=8, description="Number of masters: one leads, the others stand by.")
    port: int = Field(
        8700, ge=1, le=65_527, description="Port of the first master; the others take the ports after it."
    )
    redis_port: int = Field(
        0,
        ge=0,
        le=65_535,
        description="Port of the embedded Redis. 0: a free one, the same as last time if it is still free.",
    )
    handler: str = Field(EXAMPLE_HANDLER, description="The function that handles messages, as module:function.")
    drain_seconds: float = Field(20.0, ge=0, le=3600, description="At a stop: time for running handlers to finish.")

    @property
    def stop_seconds(self) -> int:
        return int(self.drain_seconds) + AROUND_DRAIN_S

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self.port + index}" for index in range(self.masters)]


@contextlib.contextmanager
def claimed(state_folder: Path) -> Iterator[int]:
    """Hold the folder; yield the descriptor of its lock, which supervisord is to hold too: its programs drain after
    `usher up` was killed."""
    try:
        state_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state_folder / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise StartRefused(f"USHER_STATE_DIR: {state_folder} cannot be used: {problem}") from problem
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        other = find_local_instance(state_folder)
        running = f"`usher up` already runs with {state_folder}" + (
            f" (process {other.pid}, masters {other.master_urls}); stop it" if other else "; wait"
        )
        drains = f"{state_folder}: the run before was killed, and its programs still drain; wait"
        told = running if other or not (state_folder / "up.json").exists() else drains
        raise StartRefused(f"USHER_STATE_DIR: {told}, or set another folder and --port") from None
    try:
        yield descriptor
    finally:
        (state_folder / "up.json").unlink(missing_ok=True)
        os.close(descriptor)


def local_settings(environ: Mapping[str, str], flags: Mapping[str, Any]) -> LocalSettings:
    """Return the settings of ``usher up``. Raises SettingsError naming what is wrong with them and with those of its
    programs, in one message.

    When its own settings are right, those of the programs are checked by ``Supervision``.
    """
    try:
        return load(LocalSettings, environ, flags)
    except SettingsError as wrong:
        raise SettingsError([*dict.fromkeys((*wrong.problems, *problems_of_programs(_of_programs(environ))))]) from None


def _of_programs(environ: Mapping[str, str]) -> dict[str, str]:
    own = {name_of(field) for field in LocalSettings.model_fields} | {"USHER_BIND"}
    return {name: value for name, value in environ.items() if name not in own}


@contextlib.contextmanager
def trial(
    folder: Path, stop: StopRequest, told: Callable[[str], None], environ: Mapping[str, str], **asked: Any
) -> Iterator[tuple[Supervision, Link]]:
    """Run Redis, masters and consumers in ``folder`` until the block ends; no other setting of the environment is used.
    Raises StopAsked, and what ``Supervision`` raises."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("USHER_")}
    asked |= {"state_dir": folder, "port": free_port(asked["masters"])}
    running = Supervision(load(LocalSettings, {}, asked), {**clean, **environ})
    try:
        stop.check()
        running.start()
        running.start_all(stop.check, told)
        with Link(running.redis_url, "usher:trial") as link:
            yield running, link
    finally:
        told("stopping")
        running.stop(lambda: stop.insists)


def can_prove() -> bool:
    return all(find_spec(name) for name in ("pyarrow", "duckdb"))


def _redis_port(settings: LocalSettings, folder: Path) -> int:
    """Return the port that was asked for, else the one of the last time if it is free, else a free one (and remember
    it)."""
    masters = range(settings.port, settings.port + settings.masters)
    if settings.redis_port in masters:
        raise StartRefused(
            f"USHER_REDIS_PORT: {settings.redis_port} is a port of the masters too (USHER_PORT and those after it);"
            " choose another"
        )
    if settings.redis_port:
        check_address(f"127.0.0.1:{settings.redis_port}", "USHER_REDIS_PORT")
        return settings.redis_port
    memory = folder / "redis.port"
    with contextlib.suppress(OSError, ValueError, StartRefused):
        port = int(memory.read_text("ascii"))
        check_address(f"127.0.0.1:{port}", "USHER_REDIS_PORT")
        if port not in masters:
            return port
    port = next(port for port in iter(free_port, 0) if port not in masters)
    memory.write_text(f"{port}\n", "ascii")
    return port


def _unreachable(url: str) -> str:
    try:
        check_reachable(url)
    except StartRefused as trouble:
        return str(trouble)
    return ""


def _first_trouble(settings: LocalSettings) -> str:
    urls, token = settings.urls, settings.api_token
    for url in urls:
        well, reason = is_well(url, token)
        if not well:
            return f"{url}: {reason}"
    return "" if somebody_leads(urls, token) else "no master leads"


def _missing(names: set[str], settings: LocalSettings) -> str:
    missing = sorted(names - living_consumers(settings.urls, settings.api_token))
    return f"not registered: {', '.join(missing)}" if missing else ""


def problems_of_programs(environ: Mapping[str, str]) -> list[str]:
    from usher.consumer.settings import ConsumerSettings
    from usher.master.settings import MasterSettings, StreamerSettings

    problems: list[str] = []
    for cls in (MasterSettings, StreamerSettings, ConsumerSettings):
        try:
            load(cls, environ, _ANY if "consumer_name" in cls.model_fields else None)
        except SettingsError as wrong:
            problems += wrong.problems
    return [*dict.fromkeys(problems)]


def check_programs(environ: Mapping[str, str], check: Callable[[], None] = lambda: None) -> None:
    """Raise SettingsError or HandlerUnusable unless master, consumer and handler can be used with these settings.
    ``check`` is called all the time and may raise, which ends the check."""
    from usher.consumer.__main__ import check_handler

    if problems := problems_of_programs(environ):
        raise SettingsError(problems)
    if handler := environ.get("USHER_HANDLER", ""):
        check_handler(handler, check, environ)


@click.command()
def preflight() -> None:
    check_programs(os.environ)


#: Words of those lines of supervisord's own log that a person wants to see while it runs well.
_NEWS = (" exited: ", "gave up: ", "killing ", "spawnerr", "FATAL")
_WIDTH = 12
#: Bytes read per file and turn; the rest waits for the next turn, so that one noisy program does not hide the others.
_TURN_BYTES = 256 * 1024


class Relay:
    """The programs' logs from now on; of one that is rotated, its rest too. Who does not read them holds nothing up,
    not even a stop: the rest waits in the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        #: Inode of each log, and how far it is read; and as it was before this run.
        self._read = {path.stem: ((facts := path.stat()).st_ino, facts.st_size) for path in folder.glob("*.log")}
        self._before = dict(self._read)
        self._rest = memoryview(b"")

    def go_on(self, more: str = "") -> None:
        """Show what the programs have logged, and ``more``, as far as there is room. Raises OSError when nobody can
        read it any more; a full disk under it stops nothing."""
        if more or not self._rest:
            text = "".join(line + "\n" for line in (*self.lines(), *([more] if more else [])))
            self._rest = memoryview(bytes(self._rest) + text.encode(sys.stdout.encoding, "backslashreplace"))
        room = select.poll()
        room.register(sys.stdout, select.POLLOUT)
        while self._rest and room.poll(1000 * _RELAY_EVERY_S):
            try:
                self._rest = self._rest[os.write(sys.stdout.fileno(), self._rest[: select.PIPE_BUF]) :]
            except OSError as problem:
                if problem.errno != errno.ENOSPC:
                    raise
                self._rest = self._rest[:0]

    def lines(self) -> list[str]:
        return [
            f"{path.stem:<{_WIDTH}} | {escape_control(line, kept=chr(9))}"  # logs may hold text from the network
            for path in sorted(self.folder.glob("*.log"))
            for line in self._news(path)
            if path.stem != "supervisord" or any(word in line for word in _NEWS)
        ]

    def _news(self, path: Path) -> list[str]:
        news: list[str] = []
        for file in (path.with_name(f"{path.name}.1"), path):
            with contextlib.suppress(OSError), file.open("rb") as opened:  # rotated now: the next turn finds it
                known, offset = self._read.get(path.stem, (0, 0))
                inode = os.fstat(opened.fileno()).st_ino
                if inode != known and file != path:
                    continue
                offset = opened.seek(offset if inode == known else 0)
                grown = opened.read(_TURN_BYTES)
                whole = grown[: grown.rfind(b"\n") + 1 or (len(grown) == _TURN_BYTES and _TURN_BYTES)]
                self._read[path.stem] = inode, offset + len(whole)
                news += [line.decode(errors="replace") for line in whole.removesuffix(b"\n").split(b"\n") if whole]
        return news

    def last_words(self, name: str) -> str:
        try:
            inode, size = self._before.get(name, (0, 0))
            with (self.folder / f"{name}.log").open("rb") as file:
                if os.fstat(file.fileno()).st_ino == inode:  # else it was rotated meanwhile
                    file.seek(size)
                text = file.read().decode(errors="replace")
        except OSError:
            return "it logged nothing"
        return "\n".join(text.splitlines()[-_LAST_LINES:]) or "it logged nothing"


#: Most files that are looked at, each second.
_MOST_FILES = 5_000


def _sources(folder: Path) -> set[tuple[str, int]]:
    """Return the ``.py`` files in a folder and those below it, with their times; virtual environments and hidden
    folders are left out."""
    found: set[tuple[str, int]] = set()
    for at, folders, files in os.walk(folder):
        left_out = [*folders] if "pyvenv.cfg" in files else [name for name in folders if name.startswith((".", "__"))]
        folders[:] = [name for name in folders if name not in left_out and name != "node_modules"]
        for path in (Path(at, name) for name in files if name.endswith(".py") and len(found) < _MOST_FILES):
            with contextlib.suppress(OSError):  # an editor's file that went meanwhile
                found.add((os.path.relpath(path, folder), path.stat().st_mtime_ns))
    return found


_RELAY_EVERY_S = 0.2
_WATCH_EVERY_S = 1.0


@click.command()
@option("--reload", "Restart consumers when a .py file here, or below, has changed.", is_flag=True)
@click.option(
    "--proof/--no-proof",
    default=True,
    help="Prove history every five minutes (usher audit prove), where the extra audit is installed [default: proof].",
)
@options(LocalSettings)
def up(flags: dict[str, Any], reload: bool, proof: bool) -> None:
    """Run everything on this machine: an embedded Redis (unless USHER_REDIS_URL is set), masters and consumers. Ctrl-C
    drains and stops everything (exit code 130), SIGTERM too (0); asked again, they kill what still runs. Masters and
    consumers take their settings from the environment: USHER_MAX_ATTEMPTS=3 usher up."""
    settings = local_settings(os.environ, flags)
    if settings.tls_cert is not None:
        raise StartRefused(
            "USHER_TLS_CERT: `usher up` speaks plain HTTP on loopback; unset it, or run `usher master` and `usher"
            " consumer` yourself"
        )
    with StopRequest() as stop, claimed(settings.state_folder.absolute()) as lock:
        click.echo("usher: checking settings, ports and handler", err=True)
        try:
            running = Supervision(settings, os.environ, stop.check, (lock,))
        except (StartRefused, StopAsked):
            if stop.asked:  # the checks ended early because of it
                sys.exit(_asked_code(stop))
            raise
        sys.exit(_run(running, stop, reload, proof and can_prove()))


def _run(running: Supervision, stop: StopRequest, reload: bool, proves: bool) -> int:
    """Run everything until asked to stop (``_asked_code``) or until a program is gone for good (1)."""
    shown = running.logs
    code = 0
    try:
        stop.check()
        running.start()
        running.start_all(stop.check, lambda what: click.echo(f"usher: {what}", err=True))
        if proves:
            running.start_group("proof")
        shown.go_on(_summary(running))
        _watch_until_asked(running, shown, stop, reload)
    except StopAsked:
        pass
    except SupervisionLost as lost:
        click.echo(f"usher: {lost}", err=True)
        code = 1
    finally:
        _stop(running, shown, stop)
    return code if code and not stop.insists else _asked_code(stop)


def _asked_code(stop: StopRequest) -> int:
    """Return the exit code of a requested stop. Ctrl-C: 130 (cli.py), whenever it comes; Python ends with it too before
    it is noticed here. SIGTERM and a closed terminal, the usual end under a supervisor: 0, unless it was asked again
    and all was killed."""
    return stop.exit_code if stop.insists or stop.signal == signal.SIGINT else 0


def _watch_until_asked(running: Supervision, shown: Relay, stop: StopRequest, reload: bool) -> None:
    here = Path.cwd()
    watched_s, seen = time.monotonic(), _sources(here) if reload else set()
    while not stop.wait(_RELAY_EVERY_S):
        shown.go_on()
        if time.monotonic() - watched_s >= _WATCH_EVERY_S:
            running.watch()
            before, seen = seen, _sources(here) if reload else seen
            if changed := sorted({path for path, _ in before ^ seen}):
                shown.go_on(f"usher: {', '.join(changed[:3])} changed: consumers drain, and start anew")
                running.drain_group("consumer")
            watched_s = time.monotonic()


def _stop(running: Supervision, shown: Relay, stop: StopRequest) -> None:
    """Drain and end everything while the logs go on, where they still can be seen; asked once more, end it at once."""

    def hurry() -> bool:
        with contextlib.suppress(OSError):
            shown.go_on()
        return stop.insists

    with contextlib.suppress(OSError):
        click.echo("usher: stopping; running handlers may finish (Ctrl-C again to kill)", err=True)
    running.stop(hurry)
    hurry()
    with contextlib.suppress(OSError):
        click.echo("usher: everything has stopped", err=True)


def _summary(running: Supervision) -> str:
    settings, folder = running.settings, running.folder
    embedded = f"  (embedded; data in {folder / 'redis'})" if running.redis_port is not None else ""
    is_example = settings.handler == EXAMPLE_HANDLER
    built_in = "  (built in, logs each message; choose yours with --handler)" if is_example else ""
    rows = [
        ("Redis", redacted(running.redis_url) + embedded),
        ("page", f"{settings.urls[0]}/"),
        ("masters", "  ".join(settings.urls)),
        ("consumers", " ".join(f"consumer-{index + 1}" for index in range(settings.consumers))),
        ("handler", settings.handler + built_in),
        ("logs", str(folder / "logs")),
    ]
    if not (settings.sources or settings.ticket_stream != "ticket_stream" or settings.ticket_field != "ticket_id"):
        rows.append(("try", "usher send --ticket 42 text=hello"))
    lines = [f"  {name:<10} {text}" for name, text in rows]
    return "\n".join(["", "Usher is up.", *lines, "Ctrl-C drains and stops everything.", ""])
