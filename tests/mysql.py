"""A real MySQL for tests: the MariaDB or MySQL server that the system has, for there is no wheel of one.

It listens on a unix socket in a folder of its own and nowhere else, and does not wait for the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.postgres import ending_with_us, somebody_else

_NOT_HERE = "no MySQL: install your system's mariadb-server or mysql-server package, and PyMySQL"
#: Where distributions keep the server, which is not on everybody's PATH.
_FOLDERS = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/libexec:/usr/local/sbin"
_PATIENCE_S = 60.0


@contextlib.contextmanager
def mysql_server(server: str, folder: Path) -> Iterator[str]:
    """Run a server with an empty cluster in ``folder`` (a short path: a socket lies in it); yield a URL without a
    database, for SQLAlchemy."""
    user = somebody_else() if os.geteuid() == 0 else None
    folder.mkdir(parents=True)
    if user is not None:
        os.chown(folder, user, -1)
    data, socket, log = folder / "data", folder / "s", folder / "log.err"
    temporary = f"--tmpdir={folder}"  # a server that starts deletes the temporary tables that it finds there
    makes = shutil.which("mariadb-install-db", path=_FOLDERS)
    make = (
        [
            makes,
            "--no-defaults",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            temporary,
            f"--datadir={data}",
        ]
        if makes
        else [server, "--no-defaults", "--initialize-insecure", temporary, f"--datadir={data}"]
    )
    made = subprocess.run(make, check=False, capture_output=True, text=True, timeout=120, user=user, cwd=folder)
    assert made.returncode == 0, made.stdout + made.stderr
    options = {
        "datadir": data,
        "socket": socket,
        "pid-file": folder / "pid",
        "log-error": log,
        "innodb-flush-log-at-trx-commit": 0,
        "innodb-buffer-pool-size": "64M",
        "max-allowed-packet": "64M",
        "character-set-server": "latin1",  # as careless as servers are
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [server, "--no-defaults", "--skip-networking", temporary, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=user,
        cwd=folder,
        start_new_session=True,
        preexec_fn=ending_with_us(),
    )
    try:
        until_s = time.monotonic() + _PATIENCE_S
        while not socket.exists():
            assert process.poll() is None, f"it ended:\n{log.read_text()}"
            assert time.monotonic() < until_s, f"it did not start:\n{log.read_text()}"
            time.sleep(0.05)
        yield f"mysql+pymysql://root@localhost/?unix_socket={socket}"
    finally:
        process.kill()
        process.wait(20)


@pytest.fixture(scope="session")
def mysql() -> Iterator[str]:
    """The one MySQL of this test run, started by the first test that asks for it: its URL."""
    pytest.importorskip("pymysql")
    server = next(filter(None, (shutil.which(name, path=_FOLDERS) for name in ("mariadbd", "mysqld"))), None)
    if server is None:
        pytest.skip(_NOT_HERE)
    with tempfile.TemporaryDirectory(prefix="usher-my-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        with mysql_server(server, Path(folder) / "s") as url:
            yield url


@pytest.fixture
def mysql_url(mysql: str) -> str:
    """URL of an empty database of that server."""
    return new_database(mysql)


def new_database(mysql: str) -> str:
    name = f"test_{os.urandom(6).hex()}"
    engine = sa.create_engine(mysql, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    return mysql.replace("/?", f"/{name}?")
