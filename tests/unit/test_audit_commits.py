from __future__ import annotations

from pathlib import Path

import pytest

from usher.common.base.errors import StartRefused
from usher.master.audit.archive import Commit, DataSet, locked


def stage(data: DataSet, number: int, *names: str) -> None:
    for name in names:
        file = data.staging(number) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)


def visible(folder: Path) -> list[str]:
    """What a Parquet reader sees: nothing below names that begin with _."""
    return sorted(
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*.parquet")
        if not file.relative_to(folder).parts[0].startswith("_")
    )


def test_a_commit_makes_all_files_visible_and_is_the_last_one(tmp_path: Path) -> None:
    data = DataSet(tmp_path)
    assert data.recover() is None
    stage(data, 1, "date=1/a.parquet", "date=2/a.parquet", "_SUCCESS")
    made = data.commit(Commit(1, "s", "0-0", "5-1", 2))
    assert visible(tmp_path) == ["date=1/00000001-a.parquet", "date=2/00000001-a.parquet"]
    assert DataSet(tmp_path).recover() == made


def test_what_was_committed_and_half_moved_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataSet(tmp_path)
    stage(data, 1, "date=1/a.parquet", "date=2/a.parquet")
    monkeypatch.setattr(DataSet, "_publish", lambda *_: None)
    data.commit(Commit(1, "s", "0-0", "5-1", 2))
    monkeypatch.undo()
    done = data.place(Commit(1, "s", "0-0", "5-1", 2), "date=1/a.parquet")
    done.parent.mkdir(parents=True)
    (data.staging(1) / "date=1/a.parquet").rename(done)
    data.recover()
    assert visible(tmp_path) == ["date=1/00000001-a.parquet", "date=2/00000001-a.parquet"]


def test_rows_without_a_file_are_never_committed_and_refused_where_they_were(tmp_path: Path) -> None:
    data = DataSet(tmp_path)
    with pytest.raises(StartRefused, match="2 rows were written"):
        data.commit(Commit(1, "s", "0-0", "5-1", 2))
    assert data.recover() is None
    data.commit(Commit(1, "s", "0-0", "5-1", 0))
    commit = tmp_path / "_commits" / "1.json"
    commit.write_text(commit.read_text().replace('"rows": 0', '"rows": 2'))
    with pytest.raises(StartRefused, match="2 rows but no file with them"):
        data.recover()


def test_an_archive_has_one_writer(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StartRefused, match="another process writes"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("missing", [1, 2])
def test_an_archive_that_lacks_a_commit_is_not_complete_wherever_that_was(tmp_path: Path, missing: int) -> None:
    """An archive without its first commit was summed as if it were whole, and `usher audit reconcile --apply` wrote
    these totals."""
    data = DataSet(tmp_path)
    made = []
    for number in (1, 2, 3):
        stage(data, number, "date=1/a.parquet")
        made.append(data.commit(Commit(number, "s", f"{number - 1}-0", f"{number}-0", 1)))
    assert data.complete() == ([data.place(one, "date=1/a.parquet") for one in made], 3)
    (tmp_path / "_commits" / f"{missing}.json").unlink()
    with pytest.raises(StartRefused, match=f"the archive lacks a commit in .*: {missing}.json is not there"):
        data.complete()
    later = tmp_path / "_commits" / f"{missing + 1}.json"
    later.rename(tmp_path / "_commits" / f"{missing}.json")  # as if it were the one that is gone
    with pytest.raises(StartRefused):
        data.complete()
