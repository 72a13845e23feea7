"""Tell the tickets whose executions may break a rule from those whose executions surely do not: by the one before each,
in the order of a ticket. That takes numbers only; what is known of all before an execution (``carry``) takes ten times
as long, and is asked of the tickets in doubt. Where executions may have run beside one another, each is compared with
all that come before it (``overlaps``): that takes several sorts more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from usher.master.audit.checks.carry import CALL, ROW, of_former_owners, with_order
from usher.master.audit.checks.findings import DONE
from usher.master.audit.engine import F, Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_TICKET = ("stream", "ticket")
#: What ``overlaps`` finds.
OVERLAPS = ("overlap", "owners_overlap", "fence_fell")
_OF_FIRST = ("fence", "start_us", "ms", "seq", "consumer")
_OF_FORMER = (*_OF_FIRST, "ended", "outcome")


def doubtful(runs: DataFrame, carried: DataFrame | None = None, hot: DataFrame | None = None) -> DataFrame:
    """Return (stream, ticket): all tickets that may have a flag of ``run_proof``, or a message that ran under two
    fencing tokens, and some more. ``runs`` are by Redis' clock (``clocks``). ``carried``: rows of what former runs know
    of the tickets by earlier records, not necessarily one per ticket; ``hot``: tickets that are too large to look at,
    so in doubt."""
    keyed = with_order(runs)
    if hot is not None:
        keyed = keyed.join(F.broadcast(hot.select(*_TICKET)), [*_TICKET], "left_anti")
    before = _before(*_TICKET)
    former = {f"former_{name}": F.lag(name).over(_row(*_TICKET)) for name in _OF_FORMER}
    so_far = {"latest_end": F.max("end_least").over(before), "latest_record": F.max("record_ms").over(before)}
    told = keyed.withColumns(former | so_far).withColumn("is_first", F.col("former_fence").isNull())
    told = told.withColumn("former_record", of_former_owners("latest_record", F.col("former_fence"), *_TICKET))
    doubts = told.filter(~_follows()).select(*_TICKET)
    if carried is not None:
        doubts = doubts.unionByName(_against(_beginnings(told), carried))
    if hot is not None:
        doubts = doubts.unionByName(hot.select(*_TICKET))
    return doubts.distinct()


def _follows() -> Any:
    """Return whether an execution surely breaks no rule, if those before it in its ticket do not.

    Then the one before it is of the latest message so far, and ended last; and what ended surely also started surely.
    """
    same = F.col("fence") == F.col("former_fence")
    is_behind = _is_later("former_ms", "former_seq")
    again = (F.col("ms") == F.col("former_ms")) & (F.col("seq") == F.col("former_seq"))
    one_call = same & (F.col("start_us") == F.col("former_start_us")) & (F.col("ended") == F.col("former_ended"))
    in_turn = (F.col("start_us") >= F.col("former_ended")) & (F.col("latest_end") <= F.col("start_most"))
    follows = (
        (~same | (F.col("consumer") == F.col("former_consumer")))
        & (is_behind | (same & again & (F.col("former_outcome") != DONE)))
        & (in_turn | one_call)
        & F.coalesce(F.col("former_record") <= F.col("record_ms"), F.lit(True))
    )
    return (F.col("is_first") | follows) & ((F.col("end_us") == 0) | (F.col("end_us") >= F.col("start_us")))


def _beginnings(told: DataFrame) -> DataFrame:
    """Return a row per ticket: its first execution, and the earliest moment by which one had started."""
    firsts = [F.max(F.when(F.col("is_first"), F.col(name))).alias(name) for name in _OF_FIRST]
    return told.groupBy(*_TICKET).agg(*firsts, F.min("start_most").alias("start_most"))


def _against(beginnings: DataFrame, carried: DataFrame) -> DataFrame:
    """Return the tickets that surely break no rule by themselves, and maybe one by what is ``carried`` of them. That
    was recorded before them."""
    fence, last = F.col("fence"), F.col("last")
    follows = (
        ((fence > last["fence"]) | ((fence == last["fence"]) & (F.col("consumer") == last["consumer"])))
        & (F.col("latest_end") <= F.col("start_us"))
        & (F.col("surely_ended") <= F.col("start_most"))
        & ((F.col("started.fence") < fence) | ~_is_later_than("started"))
        & _is_later("done.ms", "done.seq")  # null, so no doubt, where nothing is done
    )
    joined = beginnings.join(carried, [*_TICKET])
    return joined.filter(~follows).select(*_TICKET)


def _is_later(ms: str, seq: str) -> Any:
    return (F.col("ms") > F.col(ms)) | ((F.col("ms") == F.col(ms)) & (F.col("seq") > F.col(seq)))


def _is_later_than(message: str) -> Any:
    """Return whether ``message`` is later than this one."""
    ms, seq = F.col(f"{message}.ms"), F.col(f"{message}.seq")
    return (ms > F.col("ms")) | ((ms == F.col("ms")) & (seq > F.col("seq")))


def overlaps(runs: DataFrame) -> DataFrame:
    """Return executions with flags (``OVERLAPS``) and those that are the reason: ``beside``, of the same owner;
    ``surely_ended`` and ``surely_started`` of a former one. ``runs``: whole tickets (``carry.with_order``), by Redis'
    clock (``clocks``)."""
    call, own = (*_TICKET, *CALL), (*_TICKET, "consumer")
    told = runs.withColumns(
        {
            "place": F.row_number().over(_row(*call)),
            "former_fence": F.lag("fence").over(_row(*_TICKET)),
            "own_fence": F.lag("fence").over(_row(*own)),
            "own": F.max(F.struct("ended", "id")).over(_before(*_TICKET, "fence")),
            "own_ended": F.max(F.struct("ended", "id")).over(_before(*own)),
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
    return F.struct("end_least", "fence", "consumer", "id", "ended")


def _started() -> Any:
    return F.struct("start_least", "fence", "consumer", "id", "start_us")


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
