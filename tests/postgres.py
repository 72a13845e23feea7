"""A real PostgreSQL for tests: the server of the ``pgserver`` wheel (extra ``test``), else one that the system has.

It listens on a unix socket in a folder of its own and nowhere else, so no port can be taken; it does not wait for the
disk, because no test cuts its power. PostgreSQL refuses to run as root: then it runs as ``nobody``, on a copy if that
user cannot reach the wheel's files.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import pytest

#: Where distributions keep the server's programs, which are not on everybody's PATH.
_SYSTEM = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "usr/local/pgsql/bin", "opt/homebrew/opt/postgresql*/bin")
_NEEDED = ("postgres", "initdb")
_NOT_HERE = (
    "no PostgreSQL: the extra `test` brings one (Linux x86-64, Python up to 3.12); else install your system's"
    " postgresql package"
)
_PR_SET_PDEATHSIG = 1
_PATIENCE_S = 60.0


def find_binaries() -> Path | None:
    """The folder with ``postgres`` and ``initdb``; None when this machine has none."""
    # Importing pgserver makes lock files and, as root, a system user: only its files are wanted.
    wheel = importlib.util.find_spec("pgserver")
    places = [Path(wheel.origin).parent / "pginstall" / "bin"] if wheel and wheel.origin else []
    on_path = shutil.which("postgres")
    places += [Path(on_path).resolve().parent] if on_path else []
    places += [place for pattern in _SYSTEM for place in sorted(Path("/").glob(pattern), reverse=True)]
    return next((place for place in places if all((place / name).is_file() for name in _NEEDED)), None)


class Postgres:
    """One server with an empty cluster in ``folder`` (a short path: a unix socket lies in it). ``with`` ends it,
    however the test went."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries = binaries
        self._folder = folder
        self._data = folder / "data"
        self._log = folder / "log"
        self._user = somebody_else() if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        """For SQLAlchemy's create_engine."""
        return f"postgresql+psycopg://postgres@/{database}?host={self._folder}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Postgres:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            os.chown(self._folder, self._user, -1)
            self._make_reachable()
        try:
            self._run(
                "initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"
            )
            settings = {
                "listen_addresses": "",
                "unix_socket_directories": self._folder,
                "fsync": "off",
                "max_connections": "60",
            }
            words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [self._binaries / "postgres", "-D", self._data, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    user=self._user,
                    cwd=self._folder,
                    start_new_session=True,
                    preexec_fn=ending_with_us(),
                )
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):  # fast, immediate, now
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
                return

    def _wait(self) -> None:
        """Until it takes connections: that is the last line of its lock file."""
        lock, until_s = self._data / "postmaster.pid", time.monotonic() + _PATIENCE_S
        while not (lock.exists() and lock.read_text().rstrip().endswith("ready")):
            assert self._process is not None
            assert self._process.poll() is None, f"postgres ended:\n{self._log.read_text()}"
            assert time.monotonic() < until_s, f"postgres did not start:\n{self._log.read_text()}"
            time.sleep(0.05)

    def _make_reachable(self) -> None:
        """A virtual environment below a folder that only root may enter is of no use to anybody else."""
        try:
            self._run("postgres", "--version")
            self._run("initdb", "--version")
        except (PermissionError, AssertionError):
            installed, package = self._binaries.parent, self._folder / "copy" / "pgserver"
            for part in ("bin", "lib", "share"):
                shutil.copytree(installed / part, package / installed.name / part, symlinks=True)
            libraries = (
                installed.parents[1] / "pgserver.libs"
            )  # beside the package, where the wheel's programs look for it
            if libraries.is_dir():
                shutil.copytree(libraries, package.parent / libraries.name)
            self._binaries = package / installed.name / "bin"

    def _run(self, program: str, *words: str | Path) -> None:
        command = [self._binaries / program, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, user=self._user, cwd=self._folder, check=False, timeout=120
        )
        assert done.returncode == 0, f"{program} failed:\n{done.stdout}{done.stderr}"


def somebody_else() -> int:
    """A user id that is not root's and has a name, which initdb asks for."""
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("nobody").pw_uid
    return next(entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid)


def ending_with_us(number: int = signal.SIGINT) -> Callable[[], None]:
    """For ``preexec_fn``: the child gets that signal when the thread that started it is gone, however the test ended."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # loaded before the fork

    def ask() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)

    return ask


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The one PostgreSQL of this test run, started by the first test that asks for it."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip(_NOT_HERE)
    with tempfile.TemporaryDirectory(prefix="usher-pg-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        with Postgres(binaries, Path(folder) / "s") as server:
            yield server


@pytest.fixture
def postgres_url(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL, for SQLAlchemy, of an empty database of that server: one per test, dropped after it."""
    import psycopg

    name = f"test_{os.urandom(6).hex()}"
    plain = postgres.url().replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(plain, autocommit=True) as admin:
        admin.execute(f'CREATE DATABASE "{name}"')  # type: ignore[arg-type]
        try:
            yield postgres.url(name)
        finally:
            admin.execute(f'DROP DATABASE "{name}" WITH (FORCE)')  # type: ignore[arg-type]
