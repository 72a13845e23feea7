from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.audit.seeding import Killed, kill_at
from usher.common.base.errors import StartRefused
from usher.master.audit.archive import Commit, DataSet, locked

_DAY_MS = 86_400_000
_TICKETS = "ba"


def test_a_commit_names_its_files_and_is_the_last_one(tmp_path: Path) -> None:
    """Files that are not named are left over; those with other names are somebody else's."""
    data = DataSet(tmp_path)
    assert data.recover() is None
    wanted = Commit(1, "0-0", "5-1", 2)
    for part in ("date=1", "date=2"):
        pq.write_table(pa.table({"part": [part]}), data.place(wanted, part))
    made = data.commit(wanted)
    assert [*made.files] == ["date=1/00000001-part-0.parquet", "date=2/00000001-part-0.parquet"]
    data.place(replace(wanted, number=2), "date=2").write_text("killed")
    (tmp_path / "copy.parquet").write_text("of others")
    assert DataSet(tmp_path).recover() == made
    assert len([*tmp_path.rglob("*.parquet")]) == 3


def test_rows_without_a_file_are_never_committed_and_refused_where_they_were(tmp_path: Path) -> None:
    data = DataSet(tmp_path)
    with pytest.raises(StartRefused, match="of 2 rows 0 were written"):
        data.commit(Commit(1, "0-0", "5-1", 2))
    assert data.recover() is None


def test_an_archive_has_one_writer(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StartRefused, match="another process writes"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_an_archive_whose_log_cannot_be_read_is_not_complete(tmp_path: Path) -> None:
    """It was summed as if it were whole."""
    data = DataSet(tmp_path)
    made = []
    for number in (1, 2, 3):
        wanted = Commit(number, f"{number - 1}-0", f"{number}-0", 1)
        pq.write_table(pa.table({"n": [number]}), data.place(wanted, "date=1"))
        made.append(data.commit(wanted))
    assert data.complete() == ([data.place(one, "date=1") for one in made], 3)
    log = tmp_path / "_commits.json"
    log.write_bytes(log.read_bytes()[:-9])
    with pytest.raises(StartRefused, match="_commits.json cannot be read"):
        data.complete()


def days(data: DataSet, first: int, last: int, gap_at: int = 0) -> None:
    """Three commits on each of these days, with an execution of tickets b and a in each."""
    for number in range(3 * first + 1, 3 * last + 1):
        ms = (number - 1) // 3 * _DAY_MS + number
        former = data.last()
        gap = "lost" if number == gap_at else ""
        made = Commit(number, former.last if former else "0-0", f"{ms}-0", 2, gap)
        times: dict[str, Any] = {name: [number, number] for name in ("nth", "fence", "start_us", "end_us")}
        rows = {"ticket": [*_TICKETS], "id": [f"{number}-{one}" for one in _TICKETS], "outcome": ["done", "done"]}
        pq.write_table(pa.table(rows | times), data.place(made, f"date={ms // _DAY_MS}"))
        data.commit(made)


def names(data: DataSet) -> list[str]:
    """Names of the commits, without the zeros before numbers."""
    return ["-".join(str(int(number)) for number in one.name.split("-")) for one in data.chain()]


def rows_of(folder: Path) -> list[str]:
    import duckdb

    files = [*folder.glob("date=*/*.parquet")]
    found = duckdb.sql(f"SELECT id FROM read_parquet({[*map(str, files)]})").fetchall() if files else []
    return sorted(row[0] for row in found)


def test_days_that_are_over_become_one_commit_with_one_file(tmp_path: Path) -> None:
    """But for a gap, which stays where it is, and what is not proven yet. `test_archive` kills it at each step."""
    data = DataSet(tmp_path)
    days(data, 0, 4, gap_at=5)
    data.fold("runs", 8, None)
    assert rows_of(tmp_path) == sorted(f"{number}-{one}" for number in range(1, 13) for one in _TICKETS)
    assert names(data) == ["1-3", "4", "5-6", "7-8", "9", "10", "11", "12"]
    assert data.complete()[1] == 24
    assert [(one.number, one.gap) for one in data.chain() if one.gap] == [(6, "lost")]
    [file] = (tmp_path / "date=0").iterdir()
    assert pq.read_table(file, partitioning=None)["ticket"].to_pylist() == ["a"] * 3 + ["b"] * 3


def test_of_days_that_are_not_kept_what_later_ones_are_compared_with_stays(tmp_path: Path) -> None:
    data = DataSet(tmp_path)
    days(data, 0, 4, gap_at=5)
    for kept, expected in ((2, ["0-6", "7-9", "10", "11", "12"]), (4, ["0-12", "13-15", "16", "17", "18"])):
        data.fold("runs", None, kept)
        assert names(data) == expected
        first = int(expected[1].partition("-")[0])
        assert rows_of(tmp_path) == sorted(f"{number}-{one}" for number in range(first, first + 6) for one in _TICKETS)
        assert [one.name for one in (tmp_path / "_carried").iterdir()] == [f"00000000-{first - 1:08d}-part-0.parquet"]
        assert data.complete()[1] == 2 + 12
        assert data.chain()[0].facts["kept_ms"] == (kept - 1) * _DAY_MS + first - 1
        told = f"runs up to {(kept - 1) * _DAY_MS + first - 1}-0 are not kept (--keep-days)"
        assert [(one.after, one.gap) for one in data.chain() if one.gap] == [("0-0", told)]
        days(data, 4, 6)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_step_what_is_not_kept_goes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    for step in range(stride, 1000, stride):
        data = DataSet(tmp_path / str(step))
        days(data, 0, 4)
        with monkeypatch.context() as patched:
            kill_at(patched, step)
            try:
                data.fold("runs", None, 2)
            except Killed:
                killed = True
            else:
                killed = False
        data.recover()
        data.fold("runs", None, 2)
        assert names(data) == ["0-6", "7-9", "10", "11", "12"], step
        assert rows_of(data.folder) == sorted(f"{number}-{one}" for number in range(7, 13) for one in _TICKETS), step
        assert data.complete()[1] == 2 + 12, step
        if not killed:
            break
    assert step > 20, "so many steps it has"
