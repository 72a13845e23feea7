"""Check that run log, stream and dead letters speak of the same messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from usher.common.protocol.run_log import CRASHED, FAILED, RETRY_LATER
from usher.common.protocol.stream_id import rank
from usher.master.audit.checks.facts import AuditedStream
from usher.master.audit.checks.findings import ENDED, FENCES_PER_MS, HALTED_NAME, MASTER_NAME
from usher.master.audit.checks.pending_proof import is_incarnation, is_unread, suspect
from usher.master.audit.engine import F, Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_MOST = 2**63 - 1
#: Outcomes of starts that were counted before the next one could begin.
_COUNTED = (FAILED, CRASHED, RETRY_LATER)


def check_links(
    runs: DataFrame, entries: DataFrame, dead: DataFrame | None, facts: Sequence[AuditedStream]
) -> list[DataFrame]:
    """Return suspects. ``entries``: with their owners, null for what is over."""
    of = entries.filter(F.col("in_stream")).select("stream", "id", F.col("ticket").alias("own"))
    differ = runs.join(of, ["stream", "id"]).filter((F.col("ticket") != F.col("own")) & ~_is_lossy("ticket", "own"))
    owner, ran = F.col("consumer"), F.format_string("%s ran it as %s", "consumer", "outcome")
    other = F.format_string("%s ran it for this ticket; it is of %s", owner, "own")
    found = [
        suspect("ticket_differs", differ, other, owner),
        suspect("unread_and_run", runs.filter(F.col("id").isNotNull() & is_unread(facts)), ran, owner),
    ]
    if dead is not None:
        again = dead.groupBy("stream", "id").agg(F.count("*").alias("letters"), F.min("ticket").alias("ticket"))
        twice = again.filter(F.col("letters") > 1)
        found.append(suspect("letters_twice", _numbered(twice), F.format_string("%d dead letters", "letters")))
        held = entries.filter(owner.isNotNull() & (owner != HALTED_NAME)).select("stream", "id", "ms", "seq", owner)
        both = dead.join(held, ["stream", "id"])
        found.append(suspect("dead_and_pending", both, F.format_string("pending for %s", owner), owner))
    return found


def check_ids(runs: DataFrame, entries: DataFrame, facts: Sequence[AuditedStream]) -> list[DataFrame]:
    """Return suspects: executions of ids between entries of the stream, where none was ever trimmed or deleted; and of
    one id under two tickets. ``entries``: all that the group has read."""
    inside = F.lit(False)
    for one in facts:
        if one.first is not None and one.max_deleted is not None:
            first, last = max(one.first, one.max_deleted, key=rank), one.last_delivered
            least, most = ([min(part, _MOST) for part in divmod(rank(end), 1 << 64)] for end in (first, last))
            is_above = (F.col("ms") > least[0]) | ((F.col("ms") == least[0]) & (F.col("seq") > least[1]))
            is_below = (F.col("ms") < most[0]) | ((F.col("ms") == most[0]) & (F.col("seq") < most[1]))
            inside = inside | ((F.col("stream") == one.stream) & is_above & is_below)
    never = runs.filter(inside).join(entries.select("stream", "id"), ["stream", "id"], "left_anti")
    ran = F.format_string("%s ran it as %s; there is no such entry", "consumer", "outcome")
    # Of an entry that is cut, its executions alone can tell.
    names = [F.min("ticket").alias("ticket"), F.max("ticket").alias("other")]
    of = runs.filter(F.col("id").isNotNull()).groupBy("stream", "id", "ms", "seq").agg(*names)
    differ = of.filter((F.col("ticket") != F.col("other")) & ~_is_lossy("ticket", "other"))
    cut = differ.join(entries.filter("in_stream").select("stream", "id"), ["stream", "id"], "left_anti")
    return [
        suspect("unread_and_run", never, ran, F.col("consumer")),
        suspect("ticket_differs", cut, F.format_string("it ran for %s, too", "other")),
    ]


def check_fences(runs: DataFrame, index: DataFrame) -> list[DataFrame]:
    """Return suspects: tickets whose record has a fencing token below one that has run. ``index``: as it was before the
    run log was read."""
    highest = runs.filter(F.col("ticket") != "").groupBy("stream", "ticket").agg(F.max("fence").alias("highest"))
    names = [F.min(name).alias(name) for name in ("id", "owner", "fence")]
    record = (
        index.filter(F.col("id").isNotNull() & is_incarnation(F.col("owner"))).groupBy("stream", "ticket").agg(*names)
    )
    low = record.join(highest, ["stream", "ticket"]).filter((F.col("fence") < F.col("highest")) & ~_is_lossy("ticket"))
    said = F.format_string("fencing token %d; it ran under %d", "fence", "highest")
    return [suspect("fence_low", low, said, F.col("owner"), F.col("highest"))]


def check_told(
    runs: DataFrame, inboxes: DataFrame, pending: DataFrame, index: DataFrame, facts: Sequence[AuditedStream]
) -> DataFrame:
    """Return suspects: handed over before this audit began, never started, and waiting under `master` while its ticket
    has no record, as what was given back has."""
    since, known = F.lit(0).cast("bigint"), F.lit(False)
    for one in facts:
        is_of = F.col("stream") == one.stream
        since = F.when(is_of, one.time_ms * FENCES_PER_MS).otherwise(since)
        known = known | (is_of & (F.col("ms") > one.floor_ms))
    waiting = pending.filter((F.col("consumer") == MASTER_NAME) & known).select("stream", "id", "ms", "seq")
    told = inboxes.filter(F.col("fence") < since).join(waiting, ["stream", "id"])
    told = told.join(index.select("stream", "ticket").distinct(), ["stream", "ticket"], "left_anti")
    told = told.join(runs.select("stream", "id"), ["stream", "id"], "left_anti")
    said = F.format_string("told under fencing token %d; it waits, and its ticket has no record", "fence")
    return suspect("inbox_differs", told, said, F.col("owner"), F.col("fence"))


def check_starts(
    runs: DataFrame, facts: Sequence[AuditedStream], damaged_ms: Mapping[str, int], most: int
) -> list[DataFrame]:
    """Return suspects: starts of a message that were not counted one by one, and messages that failed more than
    ``most`` times. What ends a message ends its count; a start that nobody could note is not counted, and one may be
    noted twice. A new owner may begin anew at 1 behind a start that ended badly: so a parked message comes back when
    its letter is redriven, and nothing is left of the letter. ``damaged_ms``: stream -> when its last unreadable record
    was made, which may tell of starts."""
    names = ("stream", "ticket", "id", "ms", "seq", "fence", "start_us", "attempt", "consumer")
    starts = runs.filter(F.col("id").isNotNull()).groupBy(*names)
    starts = starts.agg(F.max("outcome").alias("outcome"), F.min("record_ms").alias("record_ms"))
    row = Window.partitionBy("stream", "id").orderBy("fence", "start_us", "attempt")
    ended_badly = F.lag("outcome").over(row).isin(FAILED, CRASHED) & (F.lag("fence").over(row) < F.col("fence"))
    starts = starts.withColumn("anew", F.coalesce((F.col("attempt") == 1) & ended_badly, F.lit(False)).cast("int"))
    before = row.rowsBetween(Window.unboundedPreceding, -1)
    starts = starts.withColumn("life", F.col("anew") + F.coalesce(F.sum("anew").over(before), F.lit(0)))
    row = Window.partitionBy("stream", "id", "life").orderBy("fence", "start_us", "attempt")
    before = row.rowsBetween(Window.unboundedPreceding, -1)
    counted = F.when(F.col("outcome").isin(*_COUNTED), F.struct("attempt", "fence", "record_ms"))
    told = starts.withColumns(
        {
            "last": F.lag("attempt").over(row),
            "ended": F.coalesce(F.max(F.col("outcome").isin(*ENDED).cast("int")).over(before), F.lit(0)),
            "noted": F.max(counted).over(before),
        }
    )
    running = told.filter(F.col("ended") == 0)
    noted, given_ms = F.col("noted"), (F.col("fence") / FENCES_PER_MS).cast("bigint")
    was_known = (noted["fence"] == F.col("fence")) | (noted["record_ms"] < given_ms)
    again = (F.col("attempt") <= noted["attempt"]) & was_known
    known = F.lit(False)
    for one in facts:
        floor_ms = max(one.floor_ms, damaged_ms.get(one.stream, -1))
        known = known | ((F.col("stream") == one.stream) & (F.col("ms") > floor_ms))
    skips = F.col("attempt") > F.coalesce(noted["attempt"], F.lit(0)) + 1
    wrong = running.filter(again | (skips & known))
    said = F.format_string("%s started it as attempt %d, after %d", "consumer", "attempt", F.coalesce("last", F.lit(0)))
    failed = running.filter(F.col("outcome") == FAILED).groupBy("stream", "ticket", "id", "ms", "seq", "life")
    often = failed.agg(F.count("*").alias("failed")).filter(F.col("failed") > most)
    often = often.groupBy("stream", "ticket", "id", "ms", "seq").agg(F.max("failed").alias("failed"))
    return [
        suspect("attempts_wrong", wrong, said, F.col("consumer")),
        suspect("failed_often", often, F.format_string("failed %d times", "failed")),
    ]


def _is_lossy(*columns: str) -> Any:
    """Return whether text in them was no UTF-8: two tickets may read the same, or differently."""
    return F.concat(*columns).contains("\ufffd")


def _numbered(rows: DataFrame) -> DataFrame:
    parts = F.split("id", "-")
    return rows.withColumns({"ms": parts[0].try_cast("bigint"), "seq": F.get(parts, 1).try_cast("bigint")})
