"""The archive: entries and run log of a ticket stream as Parquet, by day, added to incrementally and exactly once
(``commits``).

Batch, not Structured Streaming: a stream id is already the offset, and one commit file with its range of ids records
both the content of the archive and the id up to which the stream may be trimmed; a streaming checkpoint beside a sink's
own log would record it twice.

``entries``: stream, id, ms, seq, ticket, fields, raw (names and values exactly); ``runs/group=...``: one row per
execution, for each group has a run log of its own. After a commit the last id goes to Redis, that of the entries also
to the stream's own key: the floor that ``usher trim --archived-only`` may not pass.

Nothing is missing between two runs as long as the last archived entry is still in the stream: entries that are trimmed,
or lost with Redis' memory, go with everything before them. The archive looks for it after the reading, and ``usher
trim`` keeps it.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.stream_id import ZERO, after, rank
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import pairs
from usher.master.audit.archive.commits import Commit, DataSet, spark_place, table_folder
from usher.master.audit.engine import EngineFailed, F, use

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TOP = b"18446744073709551615-18446744073709551615"


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
    """The archive of one stream: ``Archive(spark, url, keys, ticket_field, folder).add()``; the caller holds the lock
    of ``folder``."""

    def __init__(self, spark: SparkSession, url: str, keys: Keys, ticket_field: str, folder: Path) -> None:
        self._spark = spark
        self._options = {"url": url, "stream": keys.stream, "group": keys.group, "ticket_field": ticket_field}
        self._keys = keys
        self._folder = folder / f"stream-{urllib.parse.quote(keys.stream, safe='')}"
        self._link = Link(url, "usher:archive", timeout_s=30.0)

    def add(self, progress: Callable[[str], None] = lambda _: None) -> list[Added]:
        """Add new rows to both tables. Raises StartRefused; rows committed until then stay."""
        try:
            # The run log first: once both are archived, every archived execution has its entry there too.
            with use(self._spark):
                return [
                    self._add(table, key, progress)
                    for table, key in (("runs", self._keys.runs), ("entries", self._keys.stream))
                ]
        except (RedisTrouble, CommandRefused, EngineFailed) as trouble:
            raise StartRefused(f"the archive was not finished; run it again: {trouble}") from trouble
        finally:
            self._link.close()

    def _add(self, table: str, key: str, progress: Callable[[str], None]) -> Added:
        progress(f"archiving {table}")
        data = DataSet(table_folder(self._folder, table, self._keys.group))
        before = data.recover()
        floor = before.last.encode() if before else ZERO
        facts = self._stream(key)
        last = facts.get(b"last-generated-id", ZERO)
        _refuse_other(table, before, last, self._keys)
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
        options = {**self._options, "first": first.decode(), "last": last.decode(), "raw": "true"}
        rows = self._spark.read.format("redis_stream" if table == "entries" else "redis_runs").options(**options).load()
        moment = F.col("ms") if table == "entries" else F.col("record_ms")
        # A hostile id may lie beyond the calendar.
        day = F.when(moment < 253_402_300_800_000, F.date_format(F.timestamp_millis(moment), "yyyy-MM-dd")).otherwise(
            F.lit("9999-12-31")
        )
        rows.withColumn("date", day).write.partitionBy("date").parquet(spark_place(staging))
        return sum(pq.read_metadata(file).num_rows for file in staging.rglob("*.parquet"))

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


def _refuse_other(table: str, before: Commit | None, last: bytes, keys: Keys) -> None:
    """Raise StartRefused when the stream is not the one that this archive is of."""
    if before is not None and rank(last) < rank(before.last.encode()):
        raise StartRefused(
            f"{keys.stream}: its {table} went back: the archive ends at {before.last}, the stream at {last.decode()}."
            " It was deleted, or restored from an older copy: archive it into another folder (--to)"
        )


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
