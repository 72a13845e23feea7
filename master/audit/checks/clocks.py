"""Bound the clock of each consumer by Redis' own: an execution starts after its fence was given and is recorded after
its end, and both moments are Redis' time.

An incarnation's offset (its clock minus Redis') lies below each ``start - fence`` and above each ``end - record``: with
many executions within milliseconds. Where that says nothing, clocks are taken to be right within the tolerance; where
it cannot be true at once, the clock was set in between, and may have been off by as much and half the tolerance, or it
drifted, if that is little: then by as much and as much again. Bounds are minima and maxima: those of a whole history
are the tightest of its parts'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from usher.master.audit.checks.findings import FENCES_PER_MS
from usher.master.audit.checks.pending_proof import suspect
from usher.master.audit.engine import F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_WHO = ("stream", "consumer")
_UNKNOWN_US = 1 << 61
_MS = 1000
#: A clock that moved by less than this part of half the tolerance drifted; nobody set it.
_FEW = 10


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
    """Return (stream, consumer, least_us, most_us, is_wrong, was_set): the offset lies between the two."""
    half, step_us = tolerance_us // 2, max(tolerance_us // 2, _MS)
    above = F.coalesce(_whole("above_us", _MS), F.lit(-_UNKNOWN_US))
    below = F.coalesce(_whole("below_us", _MS, up=True), F.lit(_UNKNOWN_US))
    was_set = above > below  # while it ran: what it is off between the two moments is not known
    ahead, back = ~was_set & (above > half), ~was_set & (below < -half)
    moved = above - below
    drifted = was_set & (moved * _FEW < half)
    least = (
        F.when(drifted, below - moved)
        .when(was_set, _whole("below_us", step_us) - half)
        .when(back, F.greatest(above, below - tolerance_us))
        .otherwise(F.greatest(above, F.lit(-half)))
    )
    most = (
        F.when(drifted, above + moved)
        .when(was_set, _whole("above_us", step_us, up=True) + half)
        .when(ahead, F.least(below, above + tolerance_us))
        .otherwise(F.least(below, F.lit(half)))
    )
    return found.select(
        *_WHO,
        least.cast("bigint").alias("least_us"),
        most.cast("bigint").alias("most_us"),
        ((above > half) | (below < -half)).alias("is_wrong"),
        was_set.alias("was_set"),
        *("above_us", "below_us"),
    )


def _whole(name: str, step_us: int, *, up: bool = False) -> Any:
    """Return a bound in whole steps, outward: what is a little better known from run to run compares no differently."""
    return ((F.ceil if up else F.floor)(F.col(name) / step_us) * step_us).cast("bigint")


def better_known(now: DataFrame, before: DataFrame) -> DataFrame:
    """Return (stream, consumer): clocks of which more is known than ``before``, when something was. So executions that
    did not surely overlap may do so now."""
    was = before.select(*_WHO, F.col("least_us").alias("was_least"), F.col("most_us").alias("was_most"))
    is_tighter = (F.col("least_us") > F.col("was_least")) | (F.col("most_us") < F.col("was_most"))
    return now.join(was, [*_WHO]).filter(is_tighter).select(*_WHO)


def on_redis_clock(runs: DataFrame, known: DataFrame) -> DataFrame:
    """Return executions with the moments, by Redis' clock, between which they started and ended for sure."""
    told = runs.join(F.broadcast(known.select(*_WHO, "least_us", "most_us", "was_set")), [*_WHO], "left")
    least, most = (F.coalesce(name, F.lit(0)) for name in ("least_us", "most_us"))
    ended = F.greatest("end_us", "start_us")
    start = F.col("start_us")
    moments = {"start_least": start - most, "start_most": start - least}
    moments |= {"end_least": ended - most, "end_most": ended - least}
    moments["was_set"] = F.coalesce("was_set", F.lit(False))
    return told.withColumns(moments).drop("least_us", "most_us")


def wrong_clocks(known: DataFrame) -> DataFrame:
    """Return suspects: incarnations whose clock is wrong by more than half of the tolerance."""
    wrong = known.filter("is_wrong").withColumn("id", F.lit(""))
    steady = F.format_string(
        "its clock is ahead of Redis' by %.3f to %.3f s", F.col("least_us") / 1e6, F.col("most_us") / 1e6
    )
    stepped = F.format_string(
        "its clock was set while it ran: it was ahead of Redis' by at most %.3f s, and by at least %.3f s",
        F.col("below_us") / 1e6,
        F.col("above_us") / 1e6,
    )
    return suspect("clock_wrong", wrong, F.when(F.col("was_set"), stepped).otherwise(steady), owner=F.col("consumer"))
