"""The commit protocol of the archive: files on disk become part of it all at once, once, and in order; and tell what of
a stream is proven, as its archive and Redis say. No Spark.

::

    <folder>/entries/_staging/<n>/date=2026-11-21/part-....parquet    written first; readers skip _ names
    <folder>/entries/_commits/<n>.json                                the commit point: complete, or not there
    <folder>/entries/date=2026-11-21/<n>-part-....parquet             where readers find the rows

1. Commit n is written into ``_staging/n``. Killed here: the next run throws it away.
2. The files are synced; ``_commits/n.json`` (range of ids, rows, names and digests of the files) is written beside its
   place, synced, and renamed. From now on it is committed.
3. Each file is renamed from staging to its place. Killed here: the next run goes on with it. A rename is done or not,
   and its name is in the commit, so no row is there twice and none is missing once the next run has begun.

One archive has one writer: a lock on the folder. A read between 2 and 3 may lack rows of the last commit, and never has
one twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from usher.common.base.errors import GroupMissing, StartRefused
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import ZERO
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketStream

#: So many sentences are stored in Redis, of so many characters.
_SAID, _LONGEST = 20, 300
_HELP = "put it back from a copy, or begin a new archive in another folder (--to)"


@dataclass(frozen=True)
class Commit:
    """An addition to one table: the rows of ``stream`` above ``after`` up to ``last``. ``files``: name in staging ->
    digest. ``gap``: what may be missing. ``facts``: what else is committed."""

    number: int
    stream: str
    after: str
    last: str
    rows: int
    gap: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
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

    def last(self) -> Commit | None:
        numbers = self._numbers()
        return self._read(numbers[-1]) if numbers else None

    def end_of(self, number: int) -> str | None:
        return self._read(number).last if number in self._numbers() else None

    def gaps(self) -> list[tuple[str, str]]:
        """Return, in order, the ids behind which something may be missing, and what."""
        return [(one.after, one.gap) for one in map(self._read, self._numbers()) if one.gap]

    def chain(self, behind: int = 0) -> list[Commit]:
        """Return the commits behind number ``behind``, each of which begins where the one before it ends; the first one
        of all behind 0-0. Raises StartRefused when one is missing."""
        chain: list[Commit] = []
        last = ZERO.decode() if behind == 0 else self.end_of(behind) or ZERO.decode()
        for commit in map(self._read, (one for one in self._numbers() if one > behind)):
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
        missing, or is not as it was written."""
        found = []
        for commit in commits:
            for name, digest in commit.files.items():
                if name.startswith(under):
                    file = self.place(commit, name)
                    if not file.exists():
                        raise StartRefused(f"the archive lacks {file}: {_HELP}")
                    if _digest(file) != digest:
                        raise StartRefused(f"{file} is not as it was written: {_HELP}")
                    found.append(file)
        return found

    def complete(self) -> tuple[list[Path], int]:
        """Return the files of all commits, and how many rows they have: other files in the folder (a copy, say) are no
        part of the table. Raises StartRefused."""
        commits = self.chain()
        return self.files(commits), sum(commit.rows for commit in commits)

    def _numbers(self) -> range:
        """Return the numbers of the commits, one after another. Raises StartRefused when one is missing."""
        try:
            names = os.listdir(self._commits)
        except FileNotFoundError:
            return range(0)
        found = {int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()}
        numbers = range(1, max(found, default=0) + 1)
        if missing := set(numbers) - found:
            raise StartRefused(
                f"the archive lacks a commit in {self._commits}: {min(missing)}.json is not there; {_HELP}"
            )
        return numbers

    def _read(self, number: int) -> Commit:
        file = self._commits / f"{number}.json"
        try:
            commit = Commit(**json.loads(file.read_bytes()))
        except (OSError, ValueError, TypeError) as unreadable:
            raise StartRefused(f"the archive's commit {file} cannot be read ({unreadable}); {_HELP}") from unreadable
        if commit.rows and not commit.files:
            raise StartRefused(f"the archive's commit {file} has {commit.rows:,} rows but no file with them: {_HELP}")
        return commit

    def staging(self, number: int) -> Path:
        """Return where commit ``number`` is written; it does not exist yet."""
        self._staging.mkdir(parents=True, exist_ok=True)
        return self._staging / str(number)

    def commit(self, wanted: Commit) -> Commit:
        """Make the staged files part of the table. Raises StartRefused when there are rows, but no file with them."""
        staged = self.staging(wanted.number)
        files = sorted(staged.rglob("*.parquet")) if staged.is_dir() else []
        if wanted.rows and not files:
            raise StartRefused(f"{wanted.rows:,} rows were written, but there is no file with them in {staged}")
        for file in files:  # synced first: after this commit their entries may be trimmed
            _sync(file)
        made = replace(wanted, files={str(file.relative_to(staged)): _digest(file) for file in files})
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
            source, target = staged / name, self.place(commit, name)
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                source.replace(target)
                _sync(target.parent)
            elif not target.exists():
                raise StartRefused(f"the archive lacks {target}, which commit {commit.number} names: {_HELP}")
        shutil.rmtree(staged, ignore_errors=True)

    def place(self, commit: Commit, name: str) -> Path:
        staged = Path(name)
        return self.folder / staged.parent / f"{commit.number:08d}-{staged.name}"


def data_sets(folder: Path, keys: Keys) -> tuple[DataSet, DataSet, DataSet]:
    """Return entries, run log and proof of a stream in the archive's ``folder``."""
    place = folder / f"stream-{urllib.parse.quote(keys.stream, safe='')}"
    group = f"group={urllib.parse.quote(keys.group, safe='')}"
    return DataSet(place / "entries"), DataSet(place / "runs" / group), DataSet(place / "proof" / group)


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


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- what is proven --------------------------------------------------------------------------------------------------


class ProvenSpan(NamedTuple):
    """A part of history that is proven without a gap. ``before``: why it does not begin earlier, "" when it is the
    beginning of all."""

    since_ms: int
    until_ms: int
    executions: int
    before: str


def archived_rows(folder: Path, keys: Keys) -> int:
    """Return how many entries and executions are archived. Raises StartRefused."""
    return sum(commit.rows for data in data_sets(folder, keys)[:2] for commit in data.chain())


def seen(link: Link, keys: Keys) -> list[Any]:
    """Return what changes when there is anything new to prove."""
    group = TicketStream(link, keys).group_facts()
    lasts = []
    for key in (keys.stream, keys.runs, keys.dead):
        last = link.call("XREVRANGE", key, "+", "-", "COUNT", 1)
        lasts.append(last[0][0].decode() if last else "")
    return [*lasts, group[b"last-delivered-id"].decode(), group[b"pending"]]


def nothing_new(folder: Path, link: Link, keys: Keys) -> bool:
    """Return True when nothing has happened since the last run, and note that it is proven until now. Raises
    StartRefused. Without a group there is something to tell, by the proof."""
    *_, proofs = data_sets(folder, keys)
    seconds, micros = link.call("TIME")
    last = proofs.last()
    with contextlib.suppress(GroupMissing):
        if last is not None and told_until(proofs) >= last.number and last.facts["seen"] == seen(link, keys):
            note(link, keys, last.facts["since_ms"], int(seconds) * 1000 + int(micros) // 1000)
            return True
    return False


def told_until(proofs: DataSet) -> int:
    """Return the last run whose findings were told to somebody."""
    try:
        return int((proofs.folder / "_told").read_text())
    except (OSError, ValueError):
        return 0


def mark_told(folder: Path, keys: Keys) -> None:
    """Note that the findings and holes of the last run were told: those of one that is killed before are told by the
    next run. Raises StartRefused."""
    *_, proofs = data_sets(folder, keys)
    if (last := proofs.last()) is not None:
        try:
            (proofs.folder / "_told").write_text(str(last.number))
        except OSError as failed:
            raise StartRefused(f"this was told, but the next run tells the same once more: {failed}") from failed


def note(link: Link, keys: Keys, since_ms: int | None, until_ms: int) -> None:
    """Note in Redis what is proven, for metrics and the doctor; only after the commit."""
    since = () if since_ms is None else ("proven_since_ms", since_ms)
    former = link.call("HGET", keys.archived, "proven_until_ms")
    every = () if former is None else ("proven_every_ms", max(0, until_ms - int(former)))
    link.call("HSET", keys.archived, "proven_until_ms", until_ms, *since, *every)


def note_history(link: Link, keys: Keys, spans: Sequence[ProvenSpan], unproven: Sequence[str]) -> None:
    """Note in Redis what of history is proven and what is not, for pages."""
    told = {"spans": [list(one) for one in spans], "unproven": said(unproven)}
    link.call("HSET", keys.archived, "history", orjson.dumps(told))


def noted_history(link: Link, keys: Keys) -> list[ProvenSpan]:
    """Return the spans that were noted last. Raises CommandRefused or ValueError when something else is there."""
    stored = link.call("HGET", keys.archived, "history")
    try:
        return [ProvenSpan(*one) for one in orjson.loads(stored)["spans"]] if stored else []
    except (KeyError, TypeError) as odd:
        raise ValueError(f"no spans of a proof: {stored[:80]}") from odd


def said(sentences: Sequence[str]) -> list[str]:
    """Return the first sentences, each cut, as they are stored in Redis."""
    return [one[:_LONGEST] for one in sentences[:_SAID]]
