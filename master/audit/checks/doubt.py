"""Find the executions that may break a rule, and those that may be the reason, among all of a history. That takes
numbers only and one sort; what is known of all before an execution (``carry``) takes ten times as long, and is asked of
these few. Where executions may have run beside one another, each is compared with all that come before it
(``overlaps``): that takes several sorts more."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from usher.master.audit.checks.carry import CALL, ROW, of_former_owners, with_order
from usher.master.audit.engine import F, Window, on_disk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_TICKET = ("stream", "ticket")
_PLACE = (*_TICKET, "fence", "start_us")
#: What ``overlaps`` finds.
OVERLAPS = ("overlap", "owners_overlap", "fence_fell")
#: Maxima of the executions before one, with which it is compared.
_MOST = ("ended", "end_most", "nth", "record_ms")
#: What an execution and the one behind it have in common where that one takes its place in all that is known.
_TURNS = ("fence", "consumer", "outcome")
_ASKED = (*CALL, "end_us", "start_most", "nth", "record_ms", "consumer", "outcome")
#: The ids of messages as one number: up to the year 2039, and of so many in a millisecond. Others are equal in it, so
#: they are always looked at.
_MOST_MS, _SEQS = (1 << 41) - 1, 1 << 22
#: Executions that one task sorts.
PART_RUNS = 200_000
#: Into how many slots the time of a hot ticket is cut; a range is made of some that follow one another.
_SLOTS = 4096


def doubtful(runs: DataFrame, carried: DataFrame | None = None, most: int = PART_RUNS) -> DataFrame:
    """Return the executions (``carry.with_order``) that may have a flag of ``run_proof`` or ``overlaps``, those that
    may be the reason, and some more. ``runs`` are by Redis' clock (``clocks``). ``carried``: rows of what former runs
    know of the tickets by earlier records, not necessarily one per ticket. Tickets of more than ``most`` executions are
    looked at in ranges of about so many, side by side. The caller unpersists the rows.

    A reason is the maximum, so far, of all executions, of those of one fence, of one consumer, or of those that are
    done. So the one behind it is doubtful itself, or of another fence, consumer or outcome, or takes its place.
    """
    hot = _hot_tickets(runs, most)
    place = _TICKET if hot is None else (*_TICKET, "range")
    numbered = with_order(runs).withColumn("nth", _number("ms", "seq"))
    told = numbered if hot is None else _in_ranges(numbered, hot, most)
    row = _row(*place)
    known = {f"next_{name}": F.lag(name, -1).over(row) for name in _ASKED}
    known |= {f"former_{name}": F.lag(name).over(row) for name in (*CALL, "consumer")}
    known |= {f"before_{name}": F.max(name).over(_before(*place)) for name in _MOST}
    told = told.withColumns(known)
    if hot is not None:
        told = _behind_ranges(told)
    is_wrong = _breaks("", "former_", {name: F.col(f"before_{name}") for name in _MOST})
    is_reason = _breaks("next_", "", {name: F.greatest(f"before_{name}", name) for name in _MOST})
    turns = _any(*(F.col(f"next_{name}") != F.col(name) for name in _TURNS))
    if hot is not None:  # the ends of two ranges are not compared here
        is_end = F.col("former_fence").isNull() | F.col("next_fence").isNull()
        is_wrong |= F.col("range").isNotNull() & is_end
    if carried is not None:
        behind = _against(numbered, carried).withColumn("is_behind", F.lit(True))
        told = told.join(behind, [*_TICKET], "left")
        is_wrong |= F.coalesce("is_behind", F.lit(False))
    found = told.select(*_PLACE, is_wrong.alias("is_wrong"), (is_wrong | is_reason | turns).alias("is_kept"))
    found = found.filter("is_kept").persist()
    try:
        tickets = found.filter("is_wrong").select(*_TICKET).distinct()
        calls = found.join(tickets, [*_TICKET], "left_semi").select(*_PLACE).distinct()
        kept = on_disk(with_order(runs).join(calls, [*_PLACE], "left_semi"))
        kept.count()
        return kept
    finally:
        found.unpersist()


def _number(ms: str, seq: str) -> Any:
    known = F.col(ms) * _SEQS + F.least(seq, F.lit(_SEQS - 1))
    return F.when(F.col(ms) >= _MOST_MS, F.lit(_MOST_MS * _SEQS)).otherwise(known)


def _breaks(this: str, former: str, before: Mapping[str, Any]) -> Any:
    """Return whether an execution may break a rule; the names of its columns begin with ``this``, those of the one
    before it with ``former``."""
    fence, start, ended, consumer = (F.col(f"{this}{name}") for name in ("fence", "start_us", "end_us", "consumer"))
    one_call = F.struct(*(F.col(f"{this}{name}").alias(name) for name in CALL)) == F.struct(
        *(F.col(f"{former}{name}").alias(name) for name in CALL)
    )
    at_once = (start < before["ended"]) | (F.col(f"{this}start_most") < before["end_most"])
    return _any(
        at_once & ~F.coalesce(one_call, F.lit(False)),
        F.col(f"{this}nth") <= before["nth"],
        F.col(f"{this}record_ms") < before["record_ms"],
        (ended != 0) & (ended < start),
        (F.col(f"{former}fence") == fence) & (F.col(f"{former}consumer") != consumer),
    )


def _any(*rules: Any) -> Any:
    """Return whether one of these is so; what is not known is not."""
    return functools.reduce(operator.or_, (F.coalesce(one, F.lit(False)) for one in rules))


def _hot_tickets(runs: DataFrame, most: int) -> DataFrame | None:
    """Return the tickets that have more executions than one task should sort, each with the ``slot_us`` by which their
    time is cut; None without any."""
    took = F.max("start_us") - F.min("start_us")
    counted = with_order(runs).groupBy(*_TICKET).agg(F.count("id").alias("count"), took.alias("took"))
    rows = [(one.stream, one.ticket, one.took // _SLOTS + 1) for one in counted.filter(F.col("count") > most).collect()]
    return runs.sparkSession.createDataFrame(rows, "stream string, ticket string, slot_us bigint") if rows else None


def _in_ranges(runs: DataFrame, hot: DataFrame, most: int) -> DataFrame:
    """Return executions with the ``range`` of their ticket in which they are: one, or, of ``hot`` tickets, several of
    about ``most``, each behind the one before. Calls are whole in a range."""
    slot = F.floor(F.col("start_us") / F.col("slot_us")).cast("bigint")
    slotted = with_order(runs).join(F.broadcast(hot), [*_TICKET], "left").withColumn("slot", slot)
    place = (*_TICKET, "fence", "slot")
    counts = slotted.filter("slot IS NOT NULL").groupBy(*place).count()
    before = Window.partitionBy(*_TICKET).orderBy("fence", "slot").rowsBetween(Window.unboundedPreceding, -1)
    number = F.floor(F.coalesce(F.sum("count").over(before), F.lit(0)) / most).cast("bigint")
    ranges = counts.select(*place, number.alias("range"))
    return slotted.join(ranges, [*place], "left").drop("slot", "slot_us")


def _behind_ranges(told: DataFrame) -> DataFrame:
    """Add the maxima of the ranges before to those of executions before one in its range."""
    of_hot = told.filter(F.col("range").isNotNull())
    ranges = of_hot.groupBy(*_TICKET, "range").agg(*(F.max(name).alias(name) for name in _MOST))
    before = Window.partitionBy(*_TICKET).orderBy("range").rowsBetween(Window.unboundedPreceding, -1)
    known = ranges.select(*_TICKET, "range", *(F.max(name).over(before).alias(f"range_{name}") for name in _MOST))
    told = told.join(F.broadcast(known), [*_TICKET, "range"], "left")
    return told.withColumns({f"before_{name}": F.greatest(f"before_{name}", f"range_{name}") for name in _MOST})


def _against(runs: DataFrame, carried: DataFrame) -> DataFrame:
    """Return the tickets of which an execution may break a rule by what is ``carried`` of them: what was recorded
    before."""
    least = [F.min(name).alias(name) for name in ("fence", "start_us", "start_most", "nth")]
    first = runs.groupBy(*_TICKET).agg(*least, F.min_by("consumer", "fence").alias("consumer"))
    fence, nth, last = F.col("fence"), F.col("nth"), F.col("last")
    follows = (
        ((fence > last["fence"]) | ((fence == last["fence"]) & (F.col("consumer") == last["consumer"])))
        & (F.col("latest_end") <= F.col("start_us"))
        & (F.col("surely_ended") <= F.col("start_most"))
        & ((F.col("started.fence") < fence) | (nth > _number("started.ms", "started.seq")))
        & (F.col("done").isNull() | (nth > _number("done.ms", "done.seq")))
    )
    return first.join(carried, [*_TICKET]).filter(~follows).select(*_TICKET).distinct()


def overlaps(runs: DataFrame) -> DataFrame:
    """Return executions with flags (``OVERLAPS``) and those that are the reason: ``beside``, of the same owner;
    ``surely_ended`` and ``surely_started`` of a former one. ``runs``: what is ``doubtful`` of whole tickets."""
    call, own = (*_TICKET, *CALL), (*_TICKET, "consumer")
    told = runs.withColumns(
        {
            "place": F.row_number().over(_row(*call)),
            "former_fence": F.lag("fence").over(_row(*_TICKET)),
            "own_fence": F.lag("fence").over(_row(*own)),
            "own": F.max(F.struct("ended", "ms", "seq", "id")).over(_before(*_TICKET, "fence")),
            "own_ended": F.max(F.struct("ended", "ms", "seq", "id")).over(_before(*own)),
            "last_ended": F.max(_ended()).over(_before(*_TICKET)),
            "last_started": F.max(_started()).over(_before(*_TICKET)),
        }
    )
    # The latest end of each consumer but one is that of the latest of all, or of the latest one that was not that.
    passed = F.when(F.col("consumer") != F.col("last_ended.consumer"), F.least(_ended(), "last_ended"))
    told = told.withColumn("passed", passed).withColumn("last_passed", F.max("passed").over(_before(*_TICKET)))
    former = F.col("former_fence")
    told = told.withColumns(
        {
            # Not what runs in the same call: a batch handler was given several messages of the ticket.
            "own": F.max(F.when(F.col("place") == 1, F.col("own"))).over(Window.partitionBy(*call)),
            "former_own": of_former_owners("own_ended", F.col("own_fence"), *own),
            "surely_started": of_former_owners("last_started", former, *_TICKET),
            "latest": of_former_owners("last_ended", former, *_TICKET),
            "second": of_former_owners("last_passed", former, *_TICKET),
        }
    )
    is_other = F.col("latest.consumer") != F.col("consumer")
    return _with_overlaps(told.withColumn("surely_ended", F.when(is_other, F.col("latest")).otherwise(F.col("second"))))


def _ended() -> Any:
    return F.struct("end_least", "fence", "consumer", "ms", "seq", "id", "ended")


def _started() -> Any:
    return F.struct("start_least", "fence", "consumer", "ms", "seq", "id", "start_us")


def _row(*place: str) -> Any:
    return Window.partitionBy(*place).orderBy(*ROW)


def _before(*place: str) -> Any:
    return _row(*place).rowsBetween(Window.unboundedPreceding, -1)


def _with_overlaps(told: DataFrame) -> DataFrame:
    at_once = F.coalesce(F.col("own.ended") > F.col("start_us"), F.lit(False))
    at_home = F.col("former_own.ended") > F.col("start_us")  # one incarnation has one clock
    fell = F.coalesce(F.col("surely_started.start_least") > F.col("start_most"), F.lit(False))
    beside = (F.when(at_once, F.col(f"own.{name}")).otherwise(F.col(f"former_own.{name}")) for name in ("id", "ended"))
    flags = {
        "overlap": at_once | F.coalesce(at_home, F.lit(False)),
        "owners_overlap": F.coalesce(F.col("surely_ended.end_least") > F.col("start_most"), F.lit(False)) & ~fell,
        "fence_fell": fell,
    }
    return told.withColumns(
        flags | {"beside": F.struct(*(one.alias(n) for one, n in zip(beside, ("id", "ended"), strict=True)))}
    )
