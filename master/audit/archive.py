"""The archive: entries and run log of a ticket stream as Parquet, by day, added to incrementally and exactly once.

After a commit the last id goes to Redis, that of the entries also to the stream's own key: the floor that ``usher trim
--archived-only`` may not pass. Nothing is missing between two runs as long as the last archived entry is still in the
stream: the archive looks for it after the reading, and ``usher trim`` keeps it.

``<table>/_commits.json`` has all commits, with the digests of their files (``date=2026-11-21/<n>-part-0.parquet``): a
run that is killed before that is in place changes nothing. Commits of days that are over become one (``fold``), a
proof's each time that it writes a whole carry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from usher.common.base.errors import GroupMissing, StartRefused
from usher.common.base.text import pluralize
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.stream_id import ZERO, after, milliseconds, rank
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketStream, facts_of, first_of, redis_ms
from usher.master.audit import batches
from usher.master.audit.batches import BulkReader
from usher.master.audit.engine import Engine, few, held, local_engine, quoted, refusing, store_of
from usher.master.audit.settings import where

_SAID, _LONGEST = 20, 300  # so many sentences are stored in Redis, of so many characters
_HELP = "put it back from a copy, or begin a new archive in another folder (USHER_AUDIT_DIR)"
_KNOWN_BY = frozenset({b"uid", b"usher_from"})  # all that an archive without bodies has of messages
_TOP = b"18446744073709551615-18446744073709551615"
_DAY_MS, _LAST_DAY = 86_400_000, 2_932_896  # of the year 9999: a hostile id may lie beyond the calendar
_PLACES = Decimal("1e-9")  # of a running total
_FOLD_MIB, _FOLDED = 512, 5_000_000  # memory of what sorts the rows of a day, and how many it sorts at once
_SORTED = "SELECT * FROM r WHERE hash(ticket) % {parts} = {at} ORDER BY ticket, nth"
#: Of each ticket all executions of the messages that have what later ones are compared with (tables/carry.sql).
_COMPARED = """\
SELECT r.* FROM r SEMI JOIN (
  SELECT ticket, unnest([max_by(id, nth) FILTER (WHERE outcome = 'done'), max_by(id, nth), max_by(id, fence),
                         max_by(id, greatest(start_us, end_us))]) AS id
    FROM r WHERE id IS NOT NULL GROUP BY ticket) k ON k.ticket = r.ticket AND k.id = r.id"""


@dataclass(frozen=True)
class Commit:
    """An addition to a table: rows above ``after`` up to ``last``. ``files``: name -> digest; ``gap``: what may lack;
    ``first``: from that number on it takes the place of commits, None: of none, 0: of all, without all rows."""

    number: int
    after: str
    last: str
    rows: int
    gap: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    first: int | None = None

    @property
    def name(self) -> str:
        return f"{self.number:08d}" if self.first is None else f"{self.first:08d}-{self.number:08d}"

    @property
    def day(self) -> int:
        return milliseconds(self.last.encode()) // _DAY_MS


class DataSet:
    """A table of the archive, for the holder of the archive's lock. Of one in an object store ``folder`` has copies,
    and other machines' runs are not known: each commit is a log of its own, ``_commits-<n>.json``, put where none is,
    and files have names that only one run gives."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log, self._at = folder, f"{where(folder)}/_commits.json", -1
        self._store, self._root = store_of(where(folder))

    def _names(self) -> list[str]:
        if self._store is None:
            return [str(one.relative_to(self.folder)) for one in self.folder.rglob("*.parquet")]
        self._store.invalidate_cache()
        return sorted(one.removeprefix(f"{self._root}/") for one in self._store.find(self._root))

    def _read(self) -> bytes:
        if self._store is None:
            return Path(self._log).read_bytes()
        *_, log = ["", *(one for one in self._names() if one.startswith("_commits-"))]
        self._at = int(log[9:-5] or 0) if self._at < 0 else self._at  # a commit stands on what this run has read first
        return bytes(self._store.cat_file(f"{self._root}/{log}"))

    def _write(self, commits: Sequence[Commit]) -> None:
        octets = json.dumps([asdict(one) for one in commits]).encode()
        if self._store is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            written = Path(f"{self._log}.new")
            written.write_bytes(octets)
            _sync(written)
            written.replace(self._log)
            _sync(self.folder)
            return
        self._at += 1
        log = f"{self._root}/_commits-{self._at:08d}.json"
        with contextlib.suppress(FileExistsError):  # put by another run, or by this one, whose answer was lost
            self._store.pipe_file(log, octets, mode="create")
        *old, last = [f"{self._root}/{one}" for one in self._names() if one.startswith("_commits-")]
        if last != log or self._store.cat_file(log) != octets:  # behind later ones there may be room again
            raise StartRefused(f"another run has written to the archive {where(self.folder)} meanwhile; run it again")
        for one in old[:-1]:  # which somebody may be reading
            self._store.rm_file(one)

    def _keep(self, files: Sequence[Path]) -> list[Path]:
        """Return written files, once they stay whatever becomes of this machine."""
        if self._store is None:
            for place in (*files, *{file.parent for file in files}):
                _sync(place)
            return [*files]
        kept = [file.rename(file.with_stem(f"{file.stem}-{secrets.token_hex(8)}")) for file in files]
        for file in kept:
            self._store.put_file(str(file), f"{self._root}/{file.relative_to(self.folder)}")
        return kept

    def _remove(self, names: Iterable[str], since: timedelta = timedelta()) -> None:
        """Remove files, of a store those that are there for so long."""
        for name in names:
            if self._store is None:
                (self.folder / name).unlink(missing_ok=True)
            elif datetime.now(UTC) - self._store.modified(f"{self._root}/{name}") >= since:
                self._store.rm_file(f"{self._root}/{name}")

    def chain(self) -> list[Commit]:
        """Return the commits, in order. Raises StartRefused."""
        try:
            return [Commit(**one) for one in json.loads(self._read())]
        except FileNotFoundError as lost:
            if self._names():
                raise StartRefused(f"the archive's {self._log} is gone, and its files are there; {_HELP}") from lost
            return []
        except (OSError, ValueError, TypeError) as unreadable:
            raise StartRefused(f"the archive's {self._log} cannot be read ({unreadable}); {_HELP}") from unreadable

    def last(self) -> Commit | None:
        return next(reversed(self.chain()), None)

    def recover(self) -> Commit | None:
        """Remove what a killed run left. Returns the last commit, None before the first."""
        chain = self.chain()
        ours = {one for one in self._names() if Path(one).match("[0-9]*-part-*.parquet")}
        self._remove(ours.difference(*(one.files for one in chain)), timedelta(days=1))  # another run may be at work
        return chain[-1] if chain else None

    def files(self, commits: Iterable[Commit], under: str = "") -> list[Path]:
        """Raises StartRefused when one is missing, or is not as it was written. ``under``: how their names begin."""
        named = {self.folder / name: digest for one in commits for name, digest in one.files.items()}
        found = [file for file in named if str(file.relative_to(self.folder)).startswith(under)]
        if self._store is not None:
            far = {f"{self._root}/{one.relative_to(self.folder)}": str(one) for one in found if not one.exists()}
            with contextlib.suppress(FileNotFoundError):
                self._store.get([*far], [*far.values()])
        for file in found:
            if not file.exists():
                raise StartRefused(f"the archive lacks {where(file)}: {_HELP}")
            if _digest(file) != named[file]:
                raise StartRefused(f"{where(file)} is not as it was written: {_HELP}")
        return found

    def complete(self, bodies_from: bytes | None = None) -> tuple[list[Path], int]:
        """Return the files of all commits, and how many rows they have. ``bodies_from``: bodies from that id on."""
        commits = self.chain()
        lacking = [one for one in commits if one.rows and not one.facts.get("bodies")]
        if bodies_from is not None and lacking and rank(lacking[-1].last.encode()) >= rank(bodies_from):
            raise StartRefused(
                f"{where(self.folder)} has not what is in the messages up to {lacking[-1].last}, ids and facts only: it"
                " is archived with --bodies (usher audit archive, prove)"
            )
        return self.files(commits), sum(commit.rows for commit in commits)

    def rows(self, names: str, wanted: str, bodies_from: bytes | None = None) -> Iterator[tuple[Any, ...]]:
        """Yield columns of the rows where an SQL condition holds, file by file: all may not fit into memory."""
        if self.last() is None:
            raise StartRefused(f"there is no archive in {where(self.folder)} (usher audit archive)")
        files, _ = self.complete(bodies_from)
        with local_engine(self.folder / "_spill", _FOLD_MIB) as engine:
            for file in files:
                engine.files("r", [file], pq.read_schema(file))
                yield from engine.rows(f"SELECT {names} FROM r WHERE {wanted}")

    def place(self, commit: Commit, part: str, at: int = 0) -> Path:
        """Return where the rows of this part (a folder) of a commit are to be written; ``at``: in which file."""
        try:
            self._read()
        except FileNotFoundError:  # where it is gone later, there are files that it had named
            self._write([])
        folder = self.folder / part
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{commit.name}-part-{at}.parquet"

    def written(self, commit: Commit) -> list[Path]:
        return sorted(self.folder.rglob(f"{commit.name}-part-*.parquet"))

    def commit(self, wanted: Commit, stays: str = "") -> Commit:
        """Make the written files part of the table. ``stays``: how names of former files begin that stay."""
        files = self.written(wanted)
        there = sum(pq.read_metadata(file).num_rows for file in files if wanted.rows)
        if there != wanted.rows:
            raise StartRefused(f"of {wanted.rows:,} rows {there:,} were written in {self.folder}: nothing was changed")
        files, before = self._keep(files), self.chain()
        made = replace(wanted, files={str(file.relative_to(self.folder)): _digest(file) for file in files})
        first = made.number if made.first is None else made.first
        former = [
            replace(one, files={name: digest for name, digest in one.files.items() if name.startswith(stays)})
            for one in before
            if not first <= one.number <= made.number
        ]
        chain = sorted([made, *former], key=lambda one: one.number)
        self._write(chain)
        self._remove({name for one in before for name in one.files}.difference(*(one.files for one in chain)))
        return made

    def fold(self, table: str, upto: int | None, kept_day: int | None) -> None:
        """Make one commit of all before ``kept_day`` (None: all are kept), and one of each day that is over; of those
        up to number ``upto`` (None: of all). A gap stays where it is. Raises StartRefused."""

        def free() -> list[Commit]:
            return [one for one in self.chain() if upto is None or one.number <= upto]

        old = [one for one in free() if kept_day is not None and one.day < kept_day]
        if len(old) > 1 or (old and old[0].first != 0):
            gap = f"{table} up to {old[-1].last} are not kept (--keep-days)"
            self._fold(old, gap, _COMPARED if table == "runs" else "")
        today, parts = self.chain()[-1].day, list[list[Commit]]()
        for one in [one for one in free() if one.first is None and one.day < today]:
            last = parts[-1][-1] if parts else None
            if last and not one.gap and (one.day, one.number - 1) == (last.day, last.number):
                parts[-1].append(one)
            else:
                parts.append([one])
        for part in [one for one in parts if len(one) > 1]:
            self._fold(part)

    def _fold(self, part: Sequence[Commit], cut: str = "", kept: str = "") -> None:
        """Let one commit take the place of these. ``cut``: why not all rows stay; ``kept``: which ones of ``r`` do."""
        first, last, files = part[0], part[-1], self.files(part)
        rows, told = sum(one.rows for one in part), dict[str, Any](bodies=all(one.facts.get("bodies") for one in part))
        told |= {"kept_ms": milliseconds(last.last.encode())} if cut else {}
        parts = 1 + rows // _FOLDED
        made = Commit(last.number, first.after, last.last, rows, cut or first.gap, {}, told, 0 if cut else first.number)
        with local_engine(self.folder / "_spill", _FOLD_MIB) as engine:
            for place in sorted({"_carried" if cut else file.parent.name for file in files if kept or not cut}):
                engine.files("r", [one for one in files if cut or one.parent.name == place], pq.read_schema(files[0]))
                for at in range(1 if cut else parts):
                    engine.write(kept or _SORTED.format(parts=parts, at=at), self.place(made, place, at))
        if cut:
            made = replace(made, rows=sum(pq.read_metadata(file).num_rows for file in self.written(made)))
        self.commit(made)


def data_sets(folder: Path, keys: Keys) -> tuple[DataSet, DataSet, DataSet]:
    place = folder / f"stream-{urllib.parse.quote(keys.stream, safe='')}"
    group = f"group={urllib.parse.quote(keys.group, safe='')}"
    return DataSet(place / "entries"), DataSet(place / "runs" / group), DataSet(place / "proof" / group)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an archive; of an object store's on this machine alone. Raises StartRefused."""
    with refusing(f"the archive {where(folder)} cannot be used"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = held(folder / "_lock")
        if lock is None:
            raise StartRefused(f"another process writes to the archive {where(folder)}; wait for it")
        with lock:
            _forget_copies(folder)
            try:
                yield
            finally:
                _forget_copies(folder)


def _forget_copies(folder: Path) -> None:
    for copies in folder.glob("stream-*") if "://" in where(folder) else ():
        shutil.rmtree(copies)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def add(
    url: str, keys: Keys, field: bytes, folder: Path, keep_days: int | None = None, bodies: bool = False
) -> dict[str, Commit]:
    """Archive what is new in one stream, for the holder of the lock of ``folder``. Raises StartRefused."""
    entries, runs, proofs = data_sets(folder, keys)
    made: dict[str, Commit] = {}
    with refusing("the archive was not finished; run it again"), BulkReader(url) as link:
        # The run log first: once both are archived, every archived execution has its entry there too.
        for table, data, key in (("runs", runs, keys.runs), ("entries", entries, keys.stream)):
            before, proven = data.recover(), proofs.last()
            if before is not None:
                days = [before.day - keep_days] if keep_days is not None else []
                if days and proven and proven.facts["open_ms"] is not None:  # it is still asked for
                    days.append(proven.facts["open_ms"] // _DAY_MS)
                data.fold(table, proven.facts[table][0] if proven else None, min(days, default=None))
            number, floor = (before.number + 1, before.last.encode()) if before else (1, ZERO)
            facts = facts_of(link, key)
            last = facts.get(b"last-generated-id", ZERO)
            if rank(last) < rank(floor):
                raise StartRefused(
                    f"{keys.stream}: its {table} went back: the archive ends at {floor.decode()}, the stream at"
                    f" {last.decode()}. It was deleted, or restored from an older copy: archive it into another folder"
                    " (USHER_AUDIT_DIR)"
                )
            one = Commit(number, floor.decode(), last.decode(), 0, facts={"bodies": bodies})
            if last != floor:
                stream, span = keys.stream, (after(floor), last)
                if table == "runs":
                    rows, moment = batches.runs(link, stream, key, span), "record_ms"
                else:
                    what = (True, None) if bodies else (False, _KNOWN_BY)
                    rows, moment = batches.stream(link, stream, key, field, span, *what), "ms"
                one = replace(one, rows=write_days(rows, moment, data, one))
                # After the reading: the floor may have been cut meanwhile.
                floor_is_there = floor != ZERO and bool(link.call("XRANGE", key, floor, floor))
                one = data.commit(replace(one, gap=_gap(table, floor, facts, facts_of(link, key), floor_is_there)))
            # Only after the commit, because trimming relies on it; and the stream's own floor, whatever the group.
            if last != ZERO:
                link.call("HSET", keys.archived, table, last)
                if table == "entries":
                    link.call("SET", LogKeys(keys.stream).archived, last)
            made[table] = one
    return made


def write_days(rows: Iterator[pa.RecordBatch], moment: str, data: DataSet, made: Commit) -> int:
    """Write rows into a file for each day of the column ``moment``, and return how many there were."""
    writers, given = dict[int, pq.ParquetWriter](), 0
    with contextlib.ExitStack() as opened:
        for batch in rows:
            given += len(batch)
            days = pc.min_element_wise(pc.divide(batch[moment], _DAY_MS), _LAST_DAY)
            for day in pc.unique(days).to_pylist():
                if day not in writers:
                    place = data.place(made, time.strftime("date=%Y-%m-%d", time.gmtime(day * 86_400)))
                    writer = pq.ParquetWriter(place, batch.schema, compression="zstd")
                    writers[day] = opened.enter_context(writer)
                writers[day].write_batch(batch.filter(pc.equal(days, day)))
    return given


def _gap(table: str, floor: bytes, before: dict[bytes, Any], now: dict[bytes, Any], floor_is_there: bool) -> str:
    first, was = (first_of(one) or after(one.get(b"last-generated-id", _TOP)) for one in (now, before))
    deleted = now.get(b"max-deleted-entry-id")
    since = f"{table} from {after(floor).decode()}"
    if floor != ZERO and not floor_is_there:
        return (
            f"{since} to before {first.decode()} may be missing: the last one that was archived is gone, and maybe what"
            " followed it"
        )
    if deleted is not None and rank(deleted) > rank(floor):
        return f"{since} to {deleted.decode()} were deleted, maybe before they were archived"
    # Before Redis 7.0 Redis does not count lost entries: then only those that go while we read can be seen.
    lost = now[b"entries-added"] > now[b"length"] if b"entries-added" in now else first != was
    is_missing = floor == ZERO and lost
    return f"{table} before {first.decode()} are missing: they were cut before they were archived" if is_missing else ""


def totals_of_archive(
    engine: Engine, entries: DataSet, value: str, kind: str, key: str, states: Sequence[tuple[str, str, dict[str, Any]]]
) -> list[tuple[Any, ...]]:
    """Return (name, total, last id, the total that it has, whether they agree, why nothing can be said) of these log
    consumers (name, last id, state, where ``key`` is the total that it has). The total is the sum of ``value`` (a
    field, or ``data.name`` for a number inside the JSON of field ``data``) over messages up to its last id, each uid
    once. ``kind``: only messages whose field ``object`` is this; "" takes all. Raises StartRefused."""
    files, number = entries.complete(ZERO)
    field, _, inside = value.partition(".")
    text = f"fields[{quoted([field])}]"
    raw, bad = text, "false"
    if inside:
        raw = f"get_json_object({text}, {quoted(['$.' + inside])})"
        bad = f"NOT (ltrim({text}) LIKE '{{%' AND get_json_object({text}, '$') IS NOT NULL)"
    where = f"WHERE fields['object'] = {quoted([kind])}" if kind else ""
    amounts = f"""SELECT id, nth, amount, try_cast(amount AS DECIMAL(38, 9)) AS number, is_bad FROM (
        SELECT id, nth, {raw} AS amount, {text} IS NOT NULL AND {bad} AS is_bad,
               row_number() OVER (PARTITION BY coalesce(nullif(fields['uid'], ''), id) ORDER BY ms, seq) AS place
          FROM messages {where}) m WHERE place = 1"""
    unread = """SELECT count(*), min_by(id, nth) FROM amounts WHERE nth <= (SELECT max(nth) FROM states)
        AND (is_bad OR (amount IS NOT NULL AND number IS NULL))"""
    with refusing(f"the archive {entries.folder} cannot be read"):
        engine.files("messages", files, batches.STREAM, number)
        rows = [{"name": name, "nth": batches.nth(last_id.encode())} for name, last_id, _ in states]
        engine.arrow("states", few(batches.schema_of("name", "nth"), rows))
        engine.view("amounts", amounts)
        [(wrong, first)] = engine.rows(unread)
        if wrong:  # they would count as 0
            raise StartRefused(
                f"--value: {value} is no number in {pluralize(wrong, 'message')}, the first of them {first}: choose the"
                " right ones with --object"
            )
        summed = "SELECT s.name, sum(a.number) FROM amounts a JOIN states s ON a.nth <= s.nth GROUP BY s.name"
        sums = dict(engine.rows(summed))
    chain, found = entries.chain(), []
    for name, last_id, state in states:
        has = None
        with contextlib.suppress(InvalidOperation):  # its state has no such number
            has = Decimal(str(state.get(key))).quantize(_PLACES)
        upto = rank(last_id.encode())
        why = [f"the archive has a gap: {one.gap}" for one in chain if one.gap and rank(one.after.encode()) < upto]
        if rank(chain[-1].last.encode()) < upto:
            why.append(f"the archive ends at {chain[-1].last}, before its checkpoint")
        total = Decimal(sums.get(name) or 0).quantize(_PLACES)
        told = None if why else float(total), last_id, None if has is None else float(has)
        found.append((name, *told, not why and has == total, next(iter(why), "")))
    return found


def seen(link: Link, keys: Keys) -> list[Any]:
    group = TicketStream(link, keys).group_facts()
    lasts = [link.call("XREVRANGE", key, "+", "-", "COUNT", 1) for key in (keys.stream, keys.runs, keys.dead)]
    ids = [last[0][0].decode() if last else "" for last in lasts]
    return [*ids, group[b"last-delivered-id"].decode(), group[b"pending"]]


def nothing_new(folder: Path, link: Link, keys: Keys) -> bool:
    """Return True when nothing has happened since the last run, and note that it is proven until now."""
    *_, proofs = data_sets(folder, keys)
    last = proofs.last()
    with contextlib.suppress(GroupMissing):
        if last is not None and last.facts["seen"] == seen(link, keys):
            note(link, keys, redis_ms(link))
            return True
    return False


def note(link: Link, keys: Keys, until_ms: int, *more: str | int | bytes) -> None:
    """Note in Redis what is proven, for metrics and the doctor; only after the commit."""
    former = link.call("HGET", keys.archived, "proven_until_ms")
    every = () if former is None else ("proven_every_ms", max(0, until_ms - int(former)))
    link.call("HSET", keys.archived, "proven_until_ms", until_ms, *every, *more)


def said(sentences: Sequence[str]) -> list[str]:
    return [one[:_LONGEST] for one in sentences[:_SAID]]
