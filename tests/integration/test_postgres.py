"""The PostgreSQL that other tests rest on: it is a real server, each test has a database of its own, and nothing is
left of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa

from tests.postgres import Postgres, find_binaries


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest, postgres_url: str) -> sa.Engine:
    return sa.create_engine(postgres_url, poolclass=sa.NullPool)


def test_every_test_begins_with_an_empty_database(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        assert sa.inspect(connection).get_table_names() == []
        assert connection.scalar(sa.text("SELECT version()")).startswith("PostgreSQL ")
        connection.execute(sa.text("CREATE TABLE left_behind (n INTEGER)"))


def opened(folder: Path) -> None:
    """So that the server's user can reach it."""
    folder.chmod(0o755)
    folder.parent.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a virtual environment that nobody else may enter")
def test_a_wheel_that_only_root_can_reach_is_copied(tmp_path: Path, tmp_path_short: Path) -> None:
    binaries = find_binaries()
    if binaries is None or "pginstall" not in binaries.parts:
        pytest.skip("no pgserver wheel on this machine")
    packages = tmp_path / "packages"
    shutil.copytree(binaries.parent, packages / "pgserver" / "pginstall")
    shutil.copytree(binaries.parents[2] / "pgserver.libs", packages / "pgserver.libs")
    packages.chmod(0o700)
    opened(tmp_path_short)
    with Postgres(packages / "pgserver" / "pginstall" / "bin", tmp_path_short / "s") as server:
        assert sa.create_engine(server.url(), poolclass=sa.NullPool).connect().close() is None


def test_a_server_that_is_over_has_left_no_process(tmp_path_short: Path) -> None:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL on this machine")
    opened(tmp_path_short)
    with Postgres(binaries, tmp_path_short / "s") as server:
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        assert len(processes) > 1
        assert all(process.uids().effective != 0 for process in processes)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
