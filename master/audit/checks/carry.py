"""Carry a proof of the run log over runs: what the judgement of an execution needs of those before it in its ticket.

Every column is a maximum, so the parts of a history can be judged one after another or side by side, and joined: the
carry of a whole is the maximum of the carries of its parts, in any order and however often a part is counted. An
execution that sorts before what its ticket carries (``behind``) is judged with the whole history of the ticket instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from usher.master.audit.checks.findings import DONE
from usher.master.audit.engine import F, Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: The order of executions within a ticket: fences are given by Redis, starts are of one owner's clock under each.
ORDER = ("fence", "start_us", "ended", "ms", "seq")
#: What messages that were handled in one call have in common; they follow one another in that order.
CALL = ORDER[:3]
#: Of equal ones, the same each time.
ROW = (*ORDER, "record_ms", "record")
_TICKET = ("stream", "ticket")


def prefix() -> dict[str, Any]:
    """Return what is known of executions before another one: the name and the value whose maximum it is."""
    is_done = F.col("outcome") == DONE
    return {
        "last": F.struct(*ORDER, "consumer", "id"),
        "under_fence": F.struct("fence", "ended"),
        "latest_end": F.col("ended"),
        "maybe_ended": F.col("end_most"),
        "surely_ended": F.col("end_least"),
        "started": F.struct("fence", "ms", "seq", "id", "start_us", "consumer"),
        "done": F.when(is_done, F.struct("ms", "seq", "id", "start_us", "consumer")),
        "noted_last": F.when(is_done, F.col("record_ms")),
    }


def with_order(runs: DataFrame) -> DataFrame:
    """Return executions that have a place in a ticket, with ``ended``. A message without a ticket id has no order with
    any other; an unreadable record has no id."""
    keyed = runs.filter(F.col("id").isNotNull() & (F.col("ticket") != ""))
    return keyed.withColumn("ended", F.greatest("end_us", "start_us"))


def carry_of(runs: DataFrame) -> DataFrame:
    """Return the carry of these executions (``clocks.on_redis_clock``) alone: a row per ticket."""
    maxima = [F.max(value).alias(name) for name, value in prefix().items()]
    return with_order(runs).groupBy(*_TICKET).agg(*maxima)


def merged(carries: DataFrame, tickets: DataFrame | None = None) -> DataFrame:
    """Return one row per ticket out of several; only those of ``tickets``, if given."""
    wanted = carries if tickets is None else carries.join(tickets.select(*_TICKET).distinct(), [*_TICKET], "left_semi")
    return wanted.groupBy(*_TICKET).agg(*(F.max(name).alias(name) for name in prefix()))


def of_former_owners(so_far: str, former_fence: Any, *place: str) -> Any:
    """Return a maximum of what was under lower fences, out of that of all before an execution (``so_far``): it is that
    of the first one under its fence. A window by RANGE takes ten times as long in a hot ticket."""
    is_first = F.coalesce(former_fence != F.col("fence"), F.lit(True))
    return F.max(F.when(is_first, F.col(so_far))).over(Window.partitionBy(*place, "fence"))


def done_ahead(carries: DataFrame, tickets: DataFrame) -> DataFrame:
    """Return (stream, ticket, ahead): the last message of each of ``tickets`` that is done."""
    ahead = F.struct("done.ms", "done.seq", "done.id").alias("ahead")
    return merged(carries, tickets).filter(F.col("done").isNotNull()).select(*_TICKET, ahead)
