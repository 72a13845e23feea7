"""The archive: every entry once, whatever was killed when; and the totals that are computed from it."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow.dataset as ds
import pytest

from tests.audit.seeding import GROUP, Killed, Seeder, die, kill_at
from tests.commands import usher
from usher.common.base.errors import StartRefused
from usher.common.outbox.store import OutboxStore
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Link
from usher.master.audit.archive import Commit, add, data_sets, locked

_DAY_MS = 86_400_000


def archived(url: str, folder: Path, stream: str = "s", group: str = GROUP) -> dict[str, Commit]:
    with locked(folder):
        return add(url, Keys(stream, group), b"ticket_id", folder)


def ids_of(folder: Path, table: str = "entries") -> list[str]:
    """The ids of the files that the commits name, but what is carried alone."""
    entries, runs, _ = data_sets(folder, Keys("s", GROUP))
    found, _ = (entries if table == "entries" else runs).complete()
    files = [str(one) for one in found if one.parent.name != "_carried"]
    return sorted(ds.dataset(files).to_table(columns=["id"])["id"].to_pylist()) if files else []


def committed(log: Path) -> list[str]:
    return [name for one in orjson.loads(log.read_bytes()) for name in one["files"]]


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["tmp_path", "stored"])
def test_killed_at_any_step_there_is_no_gap_and_no_double(
    link: Link, redis_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, stride: int, kind: str
) -> None:
    """The second run of each day is killed, which makes one commit of yesterday's, in a file for each row or so."""
    place: Path = request.getfixturevalue(kind) / str(stride)
    store, stride = (request.getfixturevalue("bucket"), 2 * stride) if kind == "stored" else (None, stride)
    monkeypatch.setattr("usher.master.audit.archive._FOLDED", 1)
    seeder, added = Seeder(link, "s"), []

    def add(number: int) -> None:
        added.append(f"{day * _DAY_MS}-{number}")
        seeder.add((added[-1], "a"))
        seeder.ran("c1:1", (added[-1], "a", 5, 1, 2), record=added[-1])

    for day in range(1, 1000):
        add(1)
        archived(redis_url, place)
        add(2)
        with monkeypatch.context() as patched:
            kill_at(patched, day * stride, store)
            killed = True
            with contextlib.suppress(Killed):
                archived(redis_url, place)
                killed = False
        floor = rank(link.call("GET", LogKeys("s").archived))
        for table in ("entries", "runs"):
            seen = ids_of(place, table)
            assert len({*seen}) == len(seen), f"step {day * stride}: {table} are there twice"
        add(3)
        archived(redis_url, place)
        for table in ("entries", "runs"):
            assert ids_of(place, table) == sorted(added), f"step {day * stride}: {table}"
        assert floor <= rank(link.call("GET", LogKeys("s").archived)) == rank(added[-1].encode())
        if not killed:
            break
    assert day * stride > 40, "so many steps does a run have"
    assert len(data_sets(place, Keys("s", GROUP))[0].chain()) <= day + 3


def test_it_is_incremental_by_day_and_moves_the_floor(link: Link, redis_url: str, tmp_path: Path) -> None:
    seeder = Seeder(link, "s")
    seeder.add(("1700000000000-1", "a"), ("1700086400000-1", "a"))
    seeder.ran("c1:1", ("1700000000000-1", "a", 5, 1, 2), ("1700086400000-1", "a", 5, 2, 3), record="1700000000005-1")
    first = archived(redis_url, tmp_path)
    assert (first["entries"].rows, first["runs"].rows, first["entries"].gap) == (2, 2, "")
    again = archived(redis_url, tmp_path)
    assert (again["entries"].rows, again["entries"].last) == (0, "1700086400000-1")
    days = sorted(place.name for place in (tmp_path / "stream-s" / "entries").glob("date=*"))
    assert days == ["date=2023-11-14", "date=2023-11-15"]
    assert link.call("HGETALL", seeder.keys.archived) == [b"runs", b"1700000000005-1", b"entries", b"1700086400000-1"]


def test_any_reader_of_parquet_sees_the_same_rows(
    link: Link, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the document says it; what a killed run has left is no part of it."""
    import duckdb
    import pandas

    seeder = Seeder(link, "s")
    for n in (1, 2):
        seeder.add((f"{n}700000000000-1", "a"), (f"{n}700086400000-1", "it's"))
        archived(redis_url, tmp_path)
    seeder.add(("3700000000000-1", "a"))
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("usher.master.audit.archive.DataSet.commit", die)
        archived(redis_url, tmp_path)
    folder = tmp_path / "stream-s" / "entries"
    files = [str(folder / name) for name in committed(folder / "_commits.json")]
    assert len([*folder.rglob("*.parquet")]) > len(files)
    expected = {
        ("1700000000000-1", "a"),
        ("1700086400000-1", "it's"),
        ("2700000000000-1", "a"),
        ("2700086400000-1", "it's"),
    }
    rows = duckdb.sql(f"SELECT id, ticket FROM read_parquet({files})").fetchall()
    frame = pandas.read_parquet(files)
    assert set(rows) == set(zip(frame["id"], frame["ticket"], strict=True)) == expected
    assert len(rows) == len(frame) == 4


def test_a_stream_that_begins_anew_is_refused_and_the_archive_stays(link: Link, redis_url: str, tmp_path: Path) -> None:
    Seeder(link, "s").add(("5-1", "a"))
    archived(redis_url, tmp_path)
    link.call("DEL", "s")
    Seeder(link, "s").add(("4-1", "a"))
    with pytest.raises(StartRefused, match="its entries went back: the archive ends at 5-1, the stream at 4-1"):
        archived(redis_url, tmp_path)
    assert ids_of(tmp_path) == ["5-1"]


def test_what_was_gone_before_it_could_be_archived_is_told(link: Link, redis_url: str, tmp_path: Path) -> None:
    """A stream that was deleted and goes on with higher ids, and a run log that was capped."""
    seeder = Seeder(link, "s")
    seeder.add(*((f"{n}-1", "a") for n in range(1, 6)))
    seeder.ran("c1:1", ("1-1", "a", 5, 1, 2), record="5-1")
    assert not any(one.gap for one in archived(redis_url, tmp_path).values())
    seeder.add(("6-1", "a"))
    link.call("DEL", "s")
    seeder.add(("7-1", "a"))
    for n in (6, 7):
        link.call("XADD", seeder.keys.runs, "MAXLEN", 1, f"{n}-1", "x", "y")
    told = {table: one.gap for table, one in archived(redis_url, tmp_path).items()}
    assert told["entries"].startswith("entries from 5-2 to before 7-1 may be missing")
    assert told["runs"].startswith("runs from 5-2 to before 7-1 may be missing")


def test_where_an_archive_begins_is_told_by_servers_that_count(valkey_url: str, tmp_path: Path) -> None:
    link = Link(valkey_url, "test")
    seeder = Seeder(link, "s")
    seeder.add(*((f"{n}-1", "a") for n in range(1, 4)))
    for n in (1, 2):
        link.call("XADD", seeder.keys.runs, "MAXLEN", 1, f"{n}-1", "x", "y")
    link.call("XTRIM", "s", "MINID", "2-1")
    told = {table: one.gap for table, one in archived(valkey_url, tmp_path).items()}
    assert told == {
        table: f"{table} before 2-1 are missing: they were cut before they were archived"
        for table in ("entries", "runs")
    }
    seeder.add(("4-1", "a"))
    assert not any(one.gap for one in archived(valkey_url, tmp_path).values()), (
        "it was told, and nothing is missing since"
    )
    link.close()


def test_any_name_of_a_stream_and_a_folder_will_do(link: Link, redis_url: str, tmp_path: Path) -> None:
    Seeder(link, "tickets:1 %{t}").add(("1-1", "a"), ("2-1", "a"))
    import pyarrow.parquet as pq

    folder = tmp_path / "ä folder%20"
    entries = archived(redis_url, folder, "tickets:1 %{t}")["entries"]
    [written] = folder.glob("stream-tickets*")
    assert entries.rows == len(pq.ParquetDataset(written / "entries").read()) == 2


def test_each_group_has_a_run_log_of_its_own(
    link: Link, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group, records in ((GROUP, ("2-1", "4-1")), ("other %", ("1-1", "3-1"))):
        monkeypatch.setattr("tests.audit.seeding.GROUP", group)
        seeder = Seeder(link, "s")
        for record in records:
            seeder.ran("c1:1", (record, "a", 5, 1, 2), record=record)
        runs = archived(redis_url, tmp_path, group=group)["runs"]
        assert (runs.rows, runs.last) == (2, records[-1])
    rows = ds.dataset(tmp_path / "stream-s" / "runs", partitioning="hive").to_table(["group", "id"]).to_pylist()
    found = {(row["group"], row["id"]) for row in rows}
    assert found == {(GROUP, "2-1"), (GROUP, "4-1"), ("other %", "1-1"), ("other %", "3-1")}


def states_of(path: Path, *consumers: tuple[str, str, str]) -> str:
    """The outbox' tables with these (name, last id, state); without a state there is no row of it."""
    url = f"sqlite:///{path}"
    store = OutboxStore(url)
    store.migrate()
    store.close()
    with sqlite3.connect(path) as sql:
        for name, last_id, state in consumers:
            sql.execute("INSERT INTO checkpoints (name, stream, last_id) VALUES (?, 's', ?)", (name, last_id))
            if state:
                sql.execute("INSERT INTO consumer_states VALUES (?, 's', ?)", (name, state))
    sql.close()
    return url


@pytest.fixture
def rides(link: Link) -> None:
    """Rides of 10, 20.5 and twice 15; the second one was sent twice, the last ones have an empty uid, which is none."""
    Seeder(link, "s")
    rides = ("1-1", "r1", 10), ("2-1", "r2", 20.5), ("2-2", "r2", 20.5), ("3-0", "", 15), ("3-1", "", 15)
    for entry_id, uid, distance in rides:
        fields = {"ticket_id": "a", "uid": uid, "object": "ride", "data": orjson.dumps({"distance": distance})}
        link.call("XADD", "s", entry_id, *(part for field in fields.items() for part in field))
    link.call("XADD", "s", "4-1", "ticket_id", "a", "uid", "x", "object", "other", "data", b'{"distance": 99}')


@pytest.fixture
def reconcile(
    settings: dict[str, str],
    rides: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, dict[str, dict[str, object]]]]:
    """``usher audit reconcile`` on an archive of the rides: exit code, and its consumers by name."""
    monkeypatch.setenv("USHER_TICKET_STREAM", "s")
    monkeypatch.setenv("USHER_GROUP", GROUP)

    def call(*words: str) -> tuple[int, dict[str, dict[str, object]]]:
        assert usher("audit", "archive", "--bodies", "--json") == 0
        capsys.readouterr()
        code = usher("audit", "reconcile", "--json", *words)
        return code, {row["name"]: row for row in orjson.loads(capsys.readouterr().out)["consumers"]}

    return call


def test_totals_are_recomputed_up_to_each_checkpoint(
    reconcile: Callable[..., tuple[int, dict[str, dict[str, object]]]], tmp_path: Path
) -> None:
    states = [
        ("right", "3-1", '{"total": 60.5}'),
        ("behind", "2-1", '{"total": 30.5}'),
        ("wrong", "4-1", '{"total": 81, "n": 4}'),
    ]
    states.append(("without", "1-1", ""))
    url = states_of(tmp_path / "s.db", *states)
    words = ("--states-url", url, "--value", "data.distance", "--object", "ride")
    code, found = reconcile(*words)
    assert code == 1
    assert {name: (row["total"], row["last_id"], row["agrees"]) for name, row in found.items()} == {
        "right": (60.5, "3-1", True),
        "behind": (30.5, "2-1", True),
        "wrong": (60.5, "4-1", False),
        "without": (10, "1-1", False),
    }


def test_an_archive_without_bodies_has_none_and_who_needs_them_is_refused(
    settings: dict[str, str],
    rides: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("USHER_TICKET_STREAM", "s")
    monkeypatch.setenv("USHER_GROUP", GROUP)
    assert usher("audit", "archive", "--json") == 0
    folder = Path(settings["USHER_AUDIT_DIR"]) / "archive"
    rows = ds.dataset(folder / "stream-s" / "entries", format="parquet").to_table().to_pylist()
    assert {name for row in rows for name, _ in row["fields"]} == {"uid"}
    assert [row["raw"] for row in rows] == [None] * len(rows)
    url = states_of(tmp_path / "s.db", ("right", "3-1", '{"total": 60.5}'))
    assert usher("audit", "reconcile", "--states-url", url, "--value", "data.distance") == 2
    assert "archived with --bodies" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(StartRefused, match="it is archived with --bodies"):
        list(data_sets(folder, Keys("s", GROUP))[0].rows("id, raw", "ms < 9", b"0-0"))


def test_no_total_is_computed_from_an_archive_with_a_gap_below_the_checkpoint(
    reconcile: Callable[..., tuple[int, dict[str, dict[str, object]]]],
    tmp_path: Path,
    link: Link,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = states_of(tmp_path / "s.db", ("before", "4-1", '{"total": 1}'), ("behind", "6-1", '{"total": 60.5}'))
    words = ["--states-url", url, "--value", "data.distance", "--object", "ride"]
    reconcile(*words)
    link.call("XADD", "s", "5-1", "ticket_id", "a", "uid", "r5", "object", "ride", "data", b'{"distance": 7}')
    link.call("XADD", "s", "6-1", "ticket_id", "a", "object", "other")
    link.call("XTRIM", "s", "MINID", "6-1")
    assert usher("audit", "archive", "--bodies", "--json") == 1
    link.call("XADD", "s", "7-1", "ticket_id", "a", "object", "other")
    assert usher("audit", "archive", "--bodies", "--json") == 0, "the last commit has none"
    capsys.readouterr()
    code, found = reconcile(*words)
    assert (code, found["before"]["total"], found["behind"]["total"]) == (1, 60.5, None)
    assert "the archive has a gap: entries from 4-2 to before 6-1 may be missing" in str(found["behind"]["why"])


@pytest.mark.parametrize("data", [b'{"distance": "twelve"}', b"no JSON", b'{"distance": true}'])
def test_no_total_is_computed_from_a_number_that_cannot_be_read(
    reconcile: Callable[..., tuple[int, dict[str, dict[str, object]]]],
    tmp_path: Path,
    link: Link,
    capsys: pytest.CaptureFixture[str],
    data: bytes,
) -> None:
    """It counted as 0."""
    url = states_of(tmp_path / "s.db", ("reads", "9-1", '{"total": 60.5}'))
    words = ["--states-url", url, "--value", "data.distance", "--object", "ride"]
    link.call("XADD", "s", "5-1", "ticket_id", "a", "uid", "w", "object", "ride", "data", data)
    link.call("XADD", "s", "6-1", "ticket_id", "a", "uid", "x", "object", "ride", "data", b'{"other": 1}')
    link.call("XADD", "s", "9-1", "ticket_id", "a", "uid", "y", "object", "ride")
    assert usher("audit", "archive", "--bodies", "--json") == 0
    capsys.readouterr()
    assert usher("audit", "reconcile", "--json", *words) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "data.distance is no number in 1 message, the first of them 5-1" in told
    assert reconcile("--states-url", url, "--value", "data.distance", "--object", "other")[0] == 1, "others are fine"


def _copied(file: Path) -> None:
    shutil.copy(file, file.with_name(f"copy-of-{file.name}"))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("damage", "code", "told"),
    [
        (Path.unlink, 2, "the archive lacks"),
        (_cut, 2, "is not as it was written"),
        (_copied, 0, ""),
        (lambda file: (file.parents[1] / "_commits.json").unlink(), 2, "is gone, and its files are there"),
    ],
    ids=["a file is gone", "a file is cut", "a file is there twice", "the log is gone"],
)
def test_no_total_is_computed_from_an_archive_that_is_not_as_it_was_written(
    reconcile: Callable[..., tuple[int, dict[str, dict[str, object]]]],
    settings: dict[str, str],
    tmp_path: Path,
    link: Link,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    code: int,
    told: str,
) -> None:
    url = states_of(tmp_path / "s.db", ("there", "6-1", '{"total": 12}'))
    words = ["--states-url", url, "--value", "number"]
    link.call("XADD", "s", "5-1", "ticket_id", "a", "number", "6")
    reconcile(*words)
    link.call("XADD", "s", "6-1", "ticket_id", "a", "number", "6")
    assert usher("audit", "archive", "--bodies", "--json") == 0
    entries = Path(settings["USHER_AUDIT_DIR"]) / "archive" / "stream-s" / "entries"
    [first, *others] = sorted(entries.rglob("date=*/*.parquet"))
    assert others, "the last commit is looked at by everybody"
    damage(first)
    capsys.readouterr()
    assert usher("audit", "reconcile", "--json", *words) == code
    assert told in " ".join(capsys.readouterr().err.split())


def test_an_archive_that_is_not_there_where_the_checks_run_is_refused(local: Any, tmp_path: Path) -> None:
    from usher.master.audit.batches import schema_of
    from usher.master.audit.engine import refusing

    local.write("SELECT '1-1' AS id", tmp_path / "some.parquet")
    for file, told in (
        ("some", "has 2 rows of odd, and where the checks run it has 1: is its folder shared"),
        ("gone", "No files"),
    ):
        with pytest.raises(StartRefused, match=told), refusing(""):
            local.files("odd", [tmp_path / f"{file}.parquet"], schema_of("id"), 2)


def test_without_an_archive_the_way_out_is_named(
    settings: dict[str, str], link: Link, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = states_of(tmp_path / "s.db")
    assert usher("audit", "reconcile", "--states-url", url, "--value", "data.distance") == 2
    assert "run `usher audit archive` first" in capsys.readouterr().err
