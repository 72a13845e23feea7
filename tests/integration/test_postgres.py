"""The PostgreSQL that other tests rest on: it is a real server, each test has a database of its own, and nothing is left of it."""

from __future__ import annotations

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


def test_a_server_that_is_over_has_left_no_process(tmp_path_short: Path) -> None:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL on this machine")
    tmp_path_short.chmod(0o755)
    tmp_path_short.parent.chmod(0o755)
    with Postgres(binaries, tmp_path_short / "s") as server:
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        assert len(processes) > 1
        assert all(process.uids().effective != 0 for process in processes)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
