"""The archive: every entry once, whatever was killed when; and the totals that are computed from it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from common.cli import run
from common.errors import StartRefused
from common.keys import LogKeys
from common.redis_client import Link
from tests.audit.seeding import GROUP, Seeder
from tests.process.machine import USHER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from master.audit.archive import Added


ROOT = Path(__file__).parents[2]


def archived(spark: SparkSession, url: str, folder: Path, stream: str = "s") -> list[Added]:
    from common.keys import Keys
    from master.audit.archive import Archive

    return Archive(spark, url, Keys(stream, GROUP), "ticket_id", folder).add()


def ids_of(spark: SparkSession, folder: Path, table: str = "entries") -> list[str]:
    return sorted(row.id for row in spark.read.parquet(str(folder / "stream-s" / table)).select("id").collect())


class Killed(Exception):
    """The process dies here."""


def die(*_: object, **__: object) -> None:
    raise Killed


#: Where a run dies -> how a test makes it die there.
DEATHS: dict[str, tuple[str, str]] = {
    "before the commit": ("master.audit.commits.DataSet", "commit"),
    "after the commit, before any file is in its place": ("master.audit.commits.DataSet", "_publish"),
    "after the files are in place, before the floor is noted": ("master.audit.archive.Archive", "_note"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_after_a_kill_there_is_no_gap_and_no_double(
    spark: SparkSession, link: Link, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    seeder = Seeder(link, "s")
    seeder.add(*((f"{n}-1", "a") for n in range(1, 6)))
    archived(spark, redis_url, tmp_path)
    seeder.add(*((f"{n}-1", "a") for n in range(6, 9)))
    target, name = DEATHS[death]
    with monkeypatch.context() as patched:
        patched.setattr(f"{target}.{name}", die)
        with pytest.raises(Killed):
            archived(spark, redis_url, tmp_path)
    seeder.add(("9-1", "b"))
    archived(spark, redis_url, tmp_path)
    assert ids_of(spark, tmp_path) == [f"{n}-1" for n in range(1, 10)]
    assert link.call("HGET", seeder.keys.archived, "entries") == link.call("GET", LogKeys("s").archived) == b"9-1"


@pytest.mark.process
@pytest.mark.timeout(600)
def test_killed_at_every_step_there_is_no_gap_and_no_double(redis_url: str, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pip install 'usher-streams[audit]'")
    words = [sys.executable, "-m", "tests.audit.killed_archive", redis_url, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 40, "so many steps does a run have"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_killed_while_spark_writes_there_is_no_gap_and_no_double(
    spark: SparkSession, link: Link, redis_url: str, settings: dict[str, str], tmp_path: Path
) -> None:
    """The real command and its Java, with kill -9, while there are files and no commit; and then once more, to the end."""
    Seeder(link, "s").add(*((f"{day * 86_400_000}-{n}", "a") for day in range(1, 60) for n in range(1, 20)))
    environ = {**os.environ, **settings, "USHER_TICKET_STREAM": "s", "USHER_GROUP": GROUP}
    words = [*USHER, "audit", "archive", "--to", str(tmp_path / "archive")]
    killed = subprocess.Popen(words, env=environ, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    entries = tmp_path / "archive" / "stream-s" / "entries"
    while not list(entries.glob("_staging/1/**/*.parquet")):
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not list(entries.glob("_commits/*.json")), "killed too late to show anything"
    subprocess.run(words, env=environ, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert ids_of(spark, tmp_path / "archive") == sorted(entry_id.decode() for entry_id, _ in link.call("XRANGE", "s", "-", "+"))
    assert link.call("GET", LogKeys("s").archived) == b"5097600000-19"


def test_it_is_incremental_by_day_and_moves_the_floor(spark: SparkSession, link: Link, redis_url: str, tmp_path: Path) -> None:
    seeder = Seeder(link, "s")
    seeder.add(("1700000000000-1", "a"), ("1700086400000-1", "a"))
    seeder.ran("c1:1", ("1700000000000-1", "a", 5, 1, 2), ("1700086400000-1", "a", 5, 2, 3), record="1700000000005-1")
    first = {one.table: one for one in archived(spark, redis_url, tmp_path)}
    assert (first["entries"].rows, first["runs"].rows, first["entries"].gap) == (2, 2, "")
    again = {one.table: one for one in archived(spark, redis_url, tmp_path)}
    assert (again["entries"].rows, again["entries"].last) == (0, "1700086400000-1")
    days = sorted(place.name for place in (tmp_path / "stream-s" / "entries").glob("date=*"))
    assert days == ["date=2023-11-14", "date=2023-11-15"]
    assert link.call("HGETALL", seeder.keys.archived) == [b"runs", b"1700000000005-1", b"entries", b"1700086400000-1"]


def test_a_stream_that_begins_anew_is_refused_and_the_archive_stays(spark: SparkSession, link: Link, redis_url: str, tmp_path: Path) -> None:
    Seeder(link, "s").add(("5-1", "a"))
    archived(spark, redis_url, tmp_path)
    link.call("DEL", "s")
    Seeder(link, "s").add(("4-1", "a"))
    with pytest.raises(StartRefused, match="its entries go back: the archive ends at 5-1, the stream at 4-1"):
        archived(spark, redis_url, tmp_path)
    assert ids_of(spark, tmp_path) == ["5-1"]


def _states(path: Path, *consumers: tuple[str, str, str]) -> str:
    """The outbox' tables with these (name, last id, state)."""
    with sqlite3.connect(path) as sql:
        sql.execute("CREATE TABLE checkpoints (name TEXT, stream TEXT, last_id TEXT, version INTEGER NOT NULL DEFAULT 0)")
        sql.execute("CREATE TABLE consumer_states (name TEXT, stream TEXT, state TEXT)")
        for name, last_id, state in consumers:
            sql.execute("INSERT INTO checkpoints (name, stream, last_id) VALUES (?, 's', ?)", (name, last_id))
            sql.execute("INSERT INTO consumer_states VALUES (?, 's', ?)", (name, state))
    sql.close()
    return f"sqlite:///{path}"


@pytest.fixture
def rides(link: Link) -> None:
    """Rides of 10, 20.5 and 30; the second one was sent twice."""
    seeder = Seeder(link, "s")
    for entry_id, uid, distance in (("1-1", "r1", 10), ("2-1", "r2", 20.5), ("2-2", "r2", 20.5), ("3-1", "r3", 30)):
        link.call("XADD", "s", entry_id, "ticket_id", "a", "uid", uid, "object", "ride", "data", orjson.dumps({"distance": distance}))
    link.call("XADD", "s", "4-1", "ticket_id", "a", "uid", "x", "object", "other", "data", b'{"distance": 99}')
    del seeder


@pytest.fixture
def reconcile(
    spark: SparkSession, settings: dict[str, str], rides: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, dict[str, object]]]]:
    """``usher audit reconcile`` on an archive of the rides: exit code, and its consumers by name."""
    monkeypatch.setenv("USHER_TICKET_STREAM", "s")
    monkeypatch.setenv("USHER_GROUP", GROUP)

    def call(*words: str) -> tuple[int, dict[str, dict[str, object]]]:
        assert _exit(["audit", "archive", "--json"]) == 0
        capsys.readouterr()
        code = _exit(["audit", "reconcile", "--json", *words])
        return code, {row["name"]: row for row in orjson.loads(capsys.readouterr().out)["consumers"]}

    return call


def _exit(words: list[str]) -> int:
    try:
        return run(words)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_totals_are_recomputed_up_to_each_checkpoint_and_written_only_when_asked(
    reconcile: Callable[..., tuple[int, dict[str, dict[str, object]]]], tmp_path: Path
) -> None:
    states = [("right", "3-1", '{"total": 60.5}'), ("behind", "2-1", '{"total": 30.5}'), ("wrong", "4-1", '{"total": 81, "n": 4}')]
    url = _states(tmp_path / "s.db", *states)
    words = ("--states-url", url, "--value", "data.distance", "--object", "ride")
    code, found = reconcile(*words)
    assert code == 1
    assert {name: (row["total"], row["last_id"], row["agrees"]) for name, row in found.items()} == {
        "right": (60.5, "3-1", True),
        "behind": (30.5, "2-1", True),
        "wrong": (60.5, "4-1", False),
    }
    assert reconcile(*words)[0] == 1, "the dry run wrote nothing"
    code, found = reconcile(*words, "--apply")
    assert (code, found["wrong"]["applied"]) == (0, True)
    code, found = reconcile(*words)
    assert (code, found["wrong"]["has"]) == (0, 60.5)
    with sqlite3.connect(tmp_path / "s.db") as sql:
        assert sql.execute("SELECT state FROM consumer_states WHERE name = 'wrong'").fetchone() == ('{"total":60.5,"n":4}',)
        assert sql.execute("SELECT version FROM checkpoints WHERE name = 'wrong'").fetchone() == (1,), "a consumer that runs reads its state again"
    sql.close()


def test_a_query_is_compared_with_consumers_that_are_at_the_end(
    reconcile: Callable[..., tuple[int, dict[str, dict[str, object]]]], tmp_path: Path
) -> None:
    url = _states(tmp_path / "s.db", ("there", "4-1", '{"total": 60.5}'), ("behind", "2-1", '{"total": 30.5}'))
    words = ("--states-url", url, "--value", "-", "--source-url", "sqlite://", "--source-query", "SELECT 60.5")
    code, found = reconcile(*words)
    assert code == 1
    assert found["there"]["agrees"]
    assert found["behind"]["why"] == "it is at 2-1, the stream at 4-1: compare when it is at the end"


def test_without_an_archive_the_way_out_is_named(settings: dict[str, str], link: Link, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = _states(tmp_path / "s.db")
    assert _exit(["audit", "reconcile", "--states-url", url, "--value", "data.distance"]) == 2
    assert "run `usher audit archive` first" in capsys.readouterr().err
