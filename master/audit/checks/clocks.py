"""Bound the clock of each consumer by Redis' own: an execution starts after its fence was given and is recorded after
its end, and both moments are Redis' time.

An incarnation's offset (its clock minus Redis') lies below each ``start - fence`` and above each ``end - record``: with
many executions within milliseconds. Where that says nothing, clocks are taken to be right within the tolerance. Bounds
are minima and maxima: those of a whole history are the tightest of its parts'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from usher.master.audit.checks.findings import FENCES_PER_MS
from usher.master.audit.checks.pending_proof import suspect
from usher.master.audit.engine import F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_WHO = ("stream", "consumer")
_UNKNOWN_US = 1 << 61


def bounds(runs: DataFrame) -> DataFrame:
    """Return (stream, consumer, above_us, below_us): the offset is more than the one and less than the other."""
    given_ms = (F.col("fence") / FENCES_PER_MS).cast("bigint")
    # A fence is ahead of the clock when the clock was set back; then an execution may be recorded before it.
    below = F.when(given_ms <= F.col("record_ms"), F.col("start_us") - given_ms * 1000)
    above = F.when(F.col("end_us") > 0, F.col("end_us") - (F.col("record_ms") + 1) * 1000)
    known = runs.filter(F.col("id").isNotNull())
    return tightest(known.select(*_WHO, above.alias("above_us"), below.alias("below_us")))


def tightest(parts: DataFrame) -> DataFrame:
    """Return the bounds that hold for all parts."""
    return parts.groupBy(*_WHO).agg(F.max("above_us").alias("above_us"), F.min("below_us").alias("below_us"))


def offsets(found: DataFrame, tolerance_us: int) -> DataFrame:
    """Return (stream, consumer, least_us, most_us, is_wrong): the offset lies between the two."""
    half = tolerance_us // 2
    above = F.coalesce("above_us", F.lit(-_UNKNOWN_US))
    below = F.coalesce("below_us", F.lit(_UNKNOWN_US))
    stepped = above > below  # while it ran
    ahead, back = ~stepped & (above > half), ~stepped & (below < -half)
    least = (
        F.when(stepped, below - half)
        .when(back, F.greatest(above, below - tolerance_us))
        .otherwise(F.greatest(above, F.lit(-half)))
    )
    most = (
        F.when(stepped, above + half)
        .when(ahead, F.least(below, above + tolerance_us))
        .otherwise(F.least(below, F.lit(half)))
    )
    return found.select(
        *_WHO,
        least.cast("bigint").alias("least_us"),
        most.cast("bigint").alias("most_us"),
        (ahead | back).alias("is_wrong"),
    )


def on_redis_clock(runs: DataFrame, known: DataFrame) -> DataFrame:
    """Return executions with the moments, by Redis' clock, between which they started and ended for sure."""
    told = runs.join(F.broadcast(known.drop("is_wrong")), [*_WHO], "left")
    least, most = (F.coalesce(name, F.lit(0)) for name in ("least_us", "most_us"))
    ended = F.greatest("end_us", "start_us")
    return told.withColumns(
        {"start_least": F.col("start_us") - most, "start_most": F.col("start_us") - least, "end_least": ended - most}
    ).drop("least_us", "most_us")


def wrong_clocks(known: DataFrame) -> DataFrame:
    """Return suspects: incarnations whose clock is wrong by more than half of the tolerance."""
    wrong = known.filter("is_wrong").withColumn("id", F.lit(""))
    detail = F.format_string(
        "its clock is ahead of Redis' by %.3f to %.3f s", F.col("least_us") / 1e6, F.col("most_us") / 1e6
    )
    return suspect("clock_wrong", wrong, detail, owner=F.col("consumer"))
