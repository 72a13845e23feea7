"""The commit protocol of the archive: files on disk become part of it all at once, once, and in order. No Spark, no
Redis.

::

    <folder>/entries/_staging/<n>/date=2026-11-21/part-....parquet    written by Spark; readers skip _ names
    <folder>/entries/_commits/<n>.json                                the commit point: complete, or not there
    <folder>/entries/date=2026-11-21/<n>-part-....parquet             where readers find the rows

1. Spark writes commit n into ``_staging/n``. Killed here: the next run throws it away.
2. The files are synced; ``_commits/n.json`` (range of ids, rows, names of the files) is written beside its place,
   synced, and renamed. From now on it is committed.
3. Each file is renamed from staging to its place. Killed here: the next run goes on with it. A rename is done or not,
   and its name is in the commit, so no row is there twice and none is missing once the next run has begun.

One archive has one writer: a lock on the folder. A read between 2 and 3 may lack rows of the last commit, and never has
one twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from usher.common.base.errors import StartRefused
from usher.common.protocol.stream_id import ZERO


@dataclass(frozen=True)
class Commit:
    """An addition to one table: the rows of ``stream`` above ``after`` up to ``last``; ``files`` as they are named in
    staging. ``gap``: what may be missing. ``facts``: what else is committed with it."""

    number: int
    stream: str
    after: str
    last: str
    rows: int
    gap: str = ""
    files: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


class DataSet:
    """A table of the archive, for the holder of the archive's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._commits = folder / "_commits"
        self._staging = folder / "_staging"

    def recover(self) -> Commit | None:
        """Finish or throw away what a killed run left. Returns the last commit, None before the first. Raises
        StartRefused when a commit cannot be read."""
        last = self.last()
        if last is not None:
            self._publish(last)
        shutil.rmtree(self._staging, ignore_errors=True)
        return last

    def set_aside(self, why: str) -> None:
        """Move the table away, beside its place, where one begins anew."""
        aside = self.folder.with_name(f"_{self.folder.name}-{why}")  # no part of what readers of Parquet see
        shutil.rmtree(aside, ignore_errors=True)
        self.folder.rename(aside)

    def last(self) -> Commit | None:
        """Return the last commit, or None."""
        count = len(self._numbers())
        return self._read(count) if count else None

    def end_of(self, number: int) -> str | None:
        """Return the last id of commit ``number``; None when there is no such commit. Raises StartRefused."""
        return self._read(number).last if number <= len(self._numbers()) else None

    def gaps(self) -> list[Commit]:
        """Return, in order, the commits before which something may be missing. Raises StartRefused when a commit cannot
        be read."""
        return [commit for commit in map(self._read, self._numbers()) if commit.gap]

    def complete(self) -> tuple[list[Path], int]:
        """Return the files of all commits, and how many rows they have: other files in the folder (a copy, say) are no
        part of the table. Raises StartRefused when a commit or a file of one is missing."""
        commits = self.chain()
        return self.files(commits), sum(commit.rows for commit in commits)

    def chain(self, behind: int = 0) -> list[Commit]:
        """Return the commits behind number ``behind``, each of which begins where the one before it ends; the first one
        of all behind 0-0. Raises StartRefused when one is missing."""
        chain, last = [], self._read(behind).last if behind else ZERO.decode()
        for commit in map(self._read, self._numbers()[behind:]):
            if commit.after != last:
                raise StartRefused(
                    f"the archive lacks a commit in {self._commits}: {commit.number} begins behind {commit.after}, not"
                    f" behind {last}"
                )
            chain.append(commit)
            last = commit.last
        return chain

    def files(self, commits: Iterable[Commit], under: str = "") -> list[Path]:
        """Return the files of ``commits``, of those whose name begins with ``under``. Raises StartRefused when one is
        missing."""
        files = [self.place(one.number, name) for one in commits for name in one.files if name.startswith(under)]
        if missing := next((file for file in files if not file.exists()), None):
            raise StartRefused(
                f"the archive lacks {missing}: put it back from a copy, or begin a new archive in another folder"
            )
        return files

    def _numbers(self) -> range:
        """Return the numbers of the commits: 1, 2, 3 and so on. Raises StartRefused when one is missing."""
        try:
            names = os.listdir(self._commits)
        except FileNotFoundError:
            return range(1, 1)
        found = [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()]
        numbers = range(1, len(found) + 1)
        if missing := set(numbers) - set(found):
            raise StartRefused(
                f"the archive lacks a commit in {self._commits}: {min(missing)}.json is not there; put it back from a"
                " copy, or begin a new archive in another folder"
            )
        return numbers

    def _read(self, number: int) -> Commit:
        file = self._commits / f"{number}.json"
        try:
            told = json.loads(file.read_bytes())
            commit = Commit(**{**told, "files": tuple(told["files"])})
        except (OSError, ValueError, TypeError, KeyError) as unreadable:
            raise StartRefused(
                f"the archive's commit {file} cannot be read ({unreadable}); put it back from a copy, or begin a new"
                " archive in another folder"
            ) from unreadable
        if commit.rows and not commit.files:
            raise StartRefused(
                f"the archive's commit {file} has {commit.rows:,} rows but no file with them: an older version lost"
                " them where a name had to be written with a %; begin a new archive in another folder"
            )
        return commit

    def staging(self, number: int) -> Path:
        """Return where Spark writes commit ``number``; it does not exist yet."""
        self._staging.mkdir(parents=True, exist_ok=True)
        return self._staging / str(number)

    def commit(self, wanted: Commit) -> Commit:
        """Make the staged files part of the table. Raises StartRefused when there are rows, but no file with them."""
        staged = self.staging(wanted.number)
        files = (
            tuple(sorted(str(file.relative_to(staged)) for file in staged.rglob("*.parquet")))
            if staged.is_dir()
            else ()
        )
        made = replace(wanted, files=files)
        if wanted.rows and not files:
            raise StartRefused(f"Spark has reported {wanted.rows:,} rows, but there is no file with them in {staged}")
        for name in files:  # synced first: after this commit their entries may be trimmed
            _sync(staged / name)
        self._commits.mkdir(parents=True, exist_ok=True)
        written = self._commits / f"{made.number}.json.new"
        with written.open("w") as out:
            json.dump(asdict(made), out)
            out.flush()
            os.fsync(out.fileno())
        written.replace(self._commits / f"{made.number}.json")
        _sync(self._commits)
        self._publish(made)
        return made

    def _publish(self, commit: Commit) -> None:
        staged = self._staging / str(commit.number)
        for name in commit.files:
            source, target = staged / name, self.place(commit.number, name)
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                source.replace(target)
                _sync(target.parent)
            elif not target.exists():
                raise StartRefused(
                    f"the archive lacks {target}, which commit {commit.number} names: files were removed by hand; begin"
                    " a new archive"
                )
        shutil.rmtree(staged, ignore_errors=True)

    def place(self, number: int, name: str) -> Path:
        """Return the final place of a staged file."""
        staged = Path(name)
        return self.folder / staged.parent / f"{number:08d}-{staged.name}"


def table_folder(folder: Path, table: str, group: str) -> Path:
    """Return the folder of one stream's table; ``runs`` and ``proof`` are of a group. Raises StartRefused when an older
    version has archived a run log there, of whatever group."""
    if table == "entries":
        return folder / table
    place = folder / table / f"group={urllib.parse.quote(group, safe='')}"
    if (folder / table / "_commits").exists():
        old, kept, new = (shlex.quote(str(one)) for one in (place.parent, f"{place.parent}.old", place))
        raise StartRefused(
            f"the run log in {place.parent} was archived by an older version, which did not tell groups apart. If only"
            f" group {group} was archived: mv {old} {kept} && mkdir {old} && mv {kept} {new}; else move it away, or"
            " give another folder (--to)"
        )
    return place


def spark_place(folder: Path) -> str:
    """Return an absolute folder for Spark, which takes a URI's path as it is written: a space in ``Path.as_uri`` would
    become a %20 on disk."""
    return f"file://{folder}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the archive's one writer. Raises StartRefused when another process is."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / "_lock").open("w")
    except OSError as unusable:
        raise StartRefused(f"the archive's folder {folder} cannot be used: {unusable}") from unusable
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as held:
            raise StartRefused(f"another process writes to the archive {folder}; wait for it") from held
        yield


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
