"""The archive: entries and run log of a ticket stream as Parquet, by day, added to incrementally and exactly once
(``commits``). This process writes it, whatever executes the checks: what is counted as written is compared with the
files.

``entries``: stream, id, ms, seq, nth, ticket, fields, raw (names and values exactly); ``runs/group=...``: one row per
execution, for each group has a run log of its own. After a commit the last id goes to Redis, that of the entries also
to the stream's own key: the floor that ``usher trim --archived-only`` may not pass.

Nothing is missing between two runs as long as the last archived entry is still in the stream: entries that are trimmed,
or lost with Redis' memory, go with everything before them. The archive looks for it after the reading, and ``usher
trim`` keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.run_log import STALE, RunRecord
from usher.common.protocol.stream_id import ZERO, after, milliseconds, rank
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import pairs
from usher.master.audit import batches
from usher.master.audit.bulk import BulkReader, Interrupted
from usher.master.audit.commits import Commit, DataSet, data_sets

_TOP = b"18446744073709551615-18446744073709551615"
_DAY_MS, _LAST_DAY = 86_400_000, 2_932_896  # of the year 9999: a hostile id may lie beyond the calendar
SCHEMAS = {"entries": batches.STREAM, "runs": batches.RUNS}


@dataclass(frozen=True)
class Added:
    """An addition of one run to one table. ``gap``: what may be missing before it, as a sentence, or ""."""

    table: str
    stream: str
    after: str
    last: str
    rows: int
    gap: str


class Archive:
    """The archive of one stream: ``Archive(url, keys, ticket_field, folder).add()``; the caller holds the lock of
    ``folder``."""

    def __init__(self, url: str, keys: Keys, ticket_field: bytes, folder: Path) -> None:
        self._url, self._keys, self._field = url, keys, ticket_field
        entries, runs, _ = data_sets(folder, keys)
        self._tables = {"runs": runs, "entries": entries}
        self._link = Link(url, "usher:archive", timeout_s=30.0)

    def add(self, progress: Callable[[str], None] = lambda _: None) -> list[Added]:
        """Add new rows to both tables. Raises StartRefused; rows committed until then stay."""
        try:
            # The run log first: once both are archived, every archived execution has its entry there too.
            return [self._add("runs", self._keys.runs, progress), self._add("entries", self._keys.stream, progress)]
        except (RedisTrouble, CommandRefused, Interrupted, OSError) as trouble:
            raise StartRefused(f"the archive was not finished; run it again: {trouble}") from trouble
        finally:
            self._link.close()

    def _add(self, table: str, key: str, progress: Callable[[str], None]) -> Added:
        progress(f"archiving {table}")
        data = self._tables[table]
        before = data.recover()
        floor = before.last.encode() if before else ZERO
        facts = self._stream(key)
        last = facts.get(b"last-generated-id", ZERO)
        if before is not None and rank(last) < rank(floor):
            raise StartRefused(
                f"{self._keys.stream}: its {table} went back: the archive ends at {before.last}, the stream at"
                f" {last.decode()}. It was deleted, or restored from an older copy: archive it into another folder"
                f" (--to)"
            )
        if rank(last) <= rank(floor):
            self._note(table, floor)
            return Added(table, self._keys.stream, floor.decode(), floor.decode(), 0, "")
        number = before.number + 1 if before else 1
        rows = self._write(table, after(floor), last, data.staging(number))
        # After the reading: the floor may have been cut meanwhile.
        floor_is_there = floor != ZERO and bool(self._link.call("XRANGE", key, floor, floor))
        gap = _gap(table, floor, facts, self._stream(key), floor_is_there)
        made = data.commit(Commit(number, self._keys.stream, floor.decode(), last.decode(), rows, gap))
        self._note(table, made.last.encode())
        return Added(table, made.stream, made.after, made.last, made.rows, gap)

    def _write(self, table: str, first: bytes, last: bytes, staging: Path) -> int:
        keys = self._keys
        with BulkReader(self._url) as reader:
            if table == "runs":
                return write_days(batches.runs(reader, keys.stream, keys.runs, (first, last)), "record_ms", staging)
            rows = batches.stream(reader, keys.stream, keys.stream, self._field, (first, last), raw=True)
            return write_days(rows, "ms", staging)

    def _stream(self, key: str) -> dict[bytes, Any]:
        try:
            return pairs(self._link.call("XINFO", "STREAM", key))
        except CommandRefused as refused:
            if "no such key" in str(refused):
                return {}
            raise

    def _note(self, table: str, last: bytes) -> None:
        """Note the last archived id in Redis; only after the commit, because trimming relies on it."""
        if last != ZERO:
            self._link.call("HSET", self._keys.archived, table, last)
            if table == "entries":  # the stream's own floor, whatever the group
                self._link.call("SET", LogKeys(self._keys.stream).archived, last)


def write_days(rows: Iterator[pa.RecordBatch], moment: str, folder: Path) -> int:
    """Write rows into a file for each day of the column ``moment``, and return how many the files have. Raises
    StartRefused when these are not all that were given."""
    writers: dict[int, pq.ParquetWriter] = {}
    given = 0
    try:
        for batch in rows:
            given += len(batch)
            days = pc.min_element_wise(pc.divide(batch[moment], _DAY_MS), _LAST_DAY)
            for day in pc.unique(days).to_pylist():
                if day not in writers:
                    place = folder / f"date={_date(day)}"
                    place.mkdir(parents=True)
                    writers[day] = pq.ParquetWriter(place / "part-0.parquet", batch.schema, compression="zstd")
                writers[day].write_batch(batch.filter(pc.equal(days, day)))
    finally:
        for writer in writers.values():
            writer.close()
    there = sum(pq.read_metadata(file).num_rows for file in folder.rglob("*.parquet"))
    if there != given:
        raise StartRefused(f"of {given:,} rows that were written {there:,} are in {folder}: nothing was archived")
    return there


def _date(day: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(day * 86_400))


def _gap(table: str, floor: bytes, before: dict[bytes, Any], now: dict[bytes, Any], floor_is_there: bool) -> str:
    """Return what may be missing behind ``floor``, as a sentence, or ""."""
    first, deleted = _first(now), now.get(b"max-deleted-entry-id")
    since = f"{table} from {after(floor).decode()}"
    if floor != ZERO and not floor_is_there:
        return (
            f"{since} to before {first.decode()} may be missing: the last one that was archived is gone, and maybe what"
            " followed it"
        )
    if deleted is not None and rank(deleted) > rank(floor):
        return f"{since} to {deleted.decode()} were deleted, maybe before they were archived"
    # Before Redis 7.0 Redis does not count lost entries: then only those that go while we read can be seen.
    lost = now[b"entries-added"] > now[b"length"] if b"entries-added" in now else first != _first(before)
    return (
        f"{table} before {first.decode()} are missing: they were cut before they were archived"
        if floor == ZERO and lost
        else ""
    )


def _first(facts: dict[bytes, Any]) -> bytes:
    """Return the first entry, or where the next one will be."""
    found: bytes = (facts.get(b"first-entry") or [after(facts.get(b"last-generated-id", _TOP))])[0]
    return found


# ---- looking up ------------------------------------------------------------------------------------------------------


def archived_entries(
    folder: Path, keys: Keys, ticket: str | None, first: bytes, last: bytes
) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield the entries between the times of two ids as (id, names and values), of all tickets or of one; in no order.
    The caller holds the archive's lock. Raises StartRefused."""
    entries, *_ = data_sets(folder, keys)
    moment = pc.field("ms")
    fits = (moment >= milliseconds(first)) & (moment <= min(milliseconds(last), 2**63 - 1))
    if ticket is not None:
        fits &= pc.field("ticket") == ticket
    for row in _rows(entries, ("id", "raw"), fits):
        yield row["id"].encode(), row["raw"]


def last_runs(folder: Path, keys: Keys, ids: Collection[bytes]) -> dict[bytes, RunRecord]:
    """Return the last archived execution of each of these messages. The caller holds the lock. Raises StartRefused."""
    _, runs, _ = data_sets(folder, keys)
    if runs.last() is None:
        return {}
    found: dict[bytes, RunRecord] = {}
    names = ("consumer", "ticket", "id", "fence", "attempt", "start_us", "end_us", "outcome")
    wanted = pc.field("id").isin([one.decode() for one in ids]) & (pc.field("outcome") != STALE)
    for row in _rows(runs, names, wanted):
        run = RunRecord(**row)
        before = found.get(run.id.encode())
        if before is None or (before.fence, before.start_us) < (run.fence, run.start_us):
            found[run.id.encode()] = run
    return found


def _rows(data: DataSet, names: tuple[str, ...], fits: pc.Expression) -> Iterator[dict[str, Any]]:
    if data.last() is None:
        raise StartRefused(f"there is no archive in {data.folder} (usher audit archive)")
    files, _ = data.complete()
    if files:
        for batch in ds.dataset([str(file) for file in files]).to_batches(columns=list(names), filter=fits):
            yield from batch.to_pylist()
