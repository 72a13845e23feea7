"""Check the run log, in Spark: overlaps, order, fences, losses. Names and rules: ``findings``.

One sort per ticket carries them all: executions in the order of (fence, start). Fences come from one clock, Redis';
starts and ends come from the clocks of consumers and are compared strictly under one fence only, where there is one
consumer; between owners by what is known of their clocks (``clocks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from usher.common.protocol.stream_id import rank
from usher.master.audit.checks.carry import (
    CALL,
    ORDER,
    ROW,
    of_former_owners,
    prefix,
)
from usher.master.audit.checks.clocks import on_redis_clock
from usher.master.audit.checks.doubt import OVERLAPS, doubtful, overlaps
from usher.master.audit.checks.facts import AuditedStream
from usher.master.audit.checks.findings import CRASHED, DONE, ENDED, FENCES_PER_MS, GAVE_UP
from usher.master.audit.checks.letters import DeadLetterFrames, not_added_again
from usher.master.audit.checks.links import check_links
from usher.master.audit.checks.pending_proof import collect, suspect
from usher.master.audit.checks.suspects import Suspects
from usher.master.audit.engine import F, Observation, Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: Upper ends of the classes of recovery times, in milliseconds; the last class is open.
RECOVERIES_MS = (100, 500, 1_000, 5_000, 10_000, 30_000, 60_000)
_MOST = 2**63 - 1  # in a column
_LAST_US = 253_402_300_799_999_999  # of the year 9999
_FLAGS = ("fence_shared", "times_impossible")
_LOOKED_AT = ("at_once", "late", "again", "after")  # flags of executions to look at
#: Flags after which a ticket is looked at as a whole.
FLAGS = (*_FLAGS, *_LOOKED_AT, "behind")


@dataclass
class RunFigures:
    """Sums for report and plots. Times in milliseconds; p50 and p99 are of the executions' own time, None without
    any."""

    executions: int = 0
    unsuccessful: int = 0
    crashed: int = 0
    repeated: int = 0
    succeeded_again: int = 0
    unkeyed: int = 0  # executions of messages without a ticket id
    p50_ms: float | None = None
    p99_ms: float | None = None
    recoveries: list[int] = field(default_factory=lambda: [0] * (len(RECOVERIES_MS) + 1))
    slowest_recovery_ms: float = 0.0
    first_known: dict[str, int] = field(default_factory=dict)  # stream -> ms of the lowest handled id
    skipped_order: dict[str, int] = field(default_factory=dict)
    before_known: dict[str, int] = field(default_factory=dict)
    #: stream -> entries of which nothing is known, from before the last drop of letters
    maybe_dropped: dict[str, int] = field(default_factory=dict)
    #: stream -> when the last record that cannot be read was made; and entries that may be in one
    damaged_ms: dict[str, int] = field(default_factory=dict)
    maybe_damaged: dict[str, int] = field(default_factory=dict)
    #: stream -> the most by which an execution was recorded before the time of its entry's id
    ahead_ms: dict[str, int] = field(default_factory=dict)

    def add(self, part: RunFigures) -> None:
        """Add what the proof of a history in parts needs of a part."""
        self.executions += part.executions
        for stream, ms in part.first_known.items():
            self.first_known[stream] = min(ms, self.first_known.get(stream, ms))
        for stream, ms in part.ahead_ms.items():
            self.ahead_ms[stream] = max(ms, self.ahead_ms.get(stream, ms))
        for stream, ms in part.damaged_ms.items():
            self.damaged_ms[stream] = max(ms, self.damaged_ms.get(stream, ms))
        for stream, count in part.skipped_order.items():
            self.skipped_order[stream] = count + self.skipped_order.get(stream, 0)


def count_runs(runs: DataFrame, suspects: Suspects) -> RunFigures:
    """Count per stream. The first action on ``runs``: it is read from Redis here."""
    took = (F.col("end_us") - F.col("start_us")) / 1000
    rows = (
        runs.groupBy("stream")
        .agg(
            F.count("id").alias("executions"),
            F.sum((F.col("outcome") != "done").cast("int")).alias("unsuccessful"),
            F.sum((F.col("outcome") == CRASHED).cast("int")).alias("crashed"),
            F.percentile_approx(F.when(F.col("end_us") > 0, took), [0.5, 0.99], 1000).alias("times"),
            F.min("ms").alias("first"),
            F.sum(F.col("id").isNull().cast("int")).alias("unreadable"),
            F.sum((F.col("ticket") == "").cast("int")).alias("unkeyed"),
            F.max(F.col("ms") - F.col("record_ms")).alias("ahead"),
            F.max(F.when(F.col("id").isNull(), F.col("record_ms"))).alias("damaged"),
        )
        .collect()
    )
    figures = RunFigures()
    figures.damaged_ms = {row.stream: row.damaged for row in rows if row.damaged is not None}
    for row in rows:
        figures.executions += row.executions
        figures.unsuccessful += row.unsuccessful or 0
        figures.crashed += row.crashed or 0
        figures.unkeyed += row.unkeyed or 0
        if row.times:
            figures.p50_ms = max(figures.p50_ms or 0.0, row.times[0])
            figures.p99_ms = max(figures.p99_ms or 0.0, row.times[1])
        if row.first is not None:
            figures.first_known[row.stream] = row.first
            figures.ahead_ms[row.stream] = max(0, row.ahead)
    if any(row.unreadable for row in rows):
        bad = runs.filter(F.col("id").isNull()).select(
            "stream", F.col("record").alias("id"), F.col("record_ms").alias("ms")
        )
        collect([suspect("run_unreadable", bad, "the record cannot be read")], suspects)
    return figures


def check_runs(
    runs: DataFrame,
    dead: DataFrame | None,
    facts: Sequence[AuditedStream],
    clocks: DataFrame,
    figures: RunFigures,
    suspects: Suspects,
) -> None:
    """Check overlaps, order and fences per ticket; what has no ticket id has no order. ``dead``: dead letters."""
    in_doubt = doubts(runs, clocks)
    told = _since_losses(follow(in_doubt), runs)
    seen = Observation()
    sums = [F.sum(F.col(name).cast("int")).alias(name) for name in (*_FLAGS, *_LOOKED_AT)]
    recovered = F.col("recovered_ms")
    classes = [0, *RECOVERIES_MS, 1 << 62]
    for number in range(len(classes) - 1):
        sums.append(
            F.sum(((recovered >= classes[number]) & (recovered < classes[number + 1])).cast("int")).alias(
                f"class{number}"
            )
        )
    observed = told.observe(seen, *sums, F.count(recovered).alias("repeated"), F.max(recovered).alias("slowest"))
    flagged = observed.filter(F.greatest(*_FLAGS, *_LOOKED_AT)).persist()
    try:
        flagged.count()
        got = seen.get
        figures.recoveries = [got[f"class{number}"] or 0 for number in range(len(classes) - 1)]
        figures.repeated, figures.slowest_recovery_ms = got["repeated"] or 0, got["slowest"] or 0.0
        seen_flags = [name for name in _FLAGS if got[name]]
        if seen_flags:
            collect([_describe_runs(flagged.filter(F.col(name)), name) for name in seen_flags], suspects)
        if got["at_once"]:
            _check_overlaps(in_doubt, flagged.filter("at_once"), suspects)
        if got["late"]:
            _check_order(runs, dead, flagged.filter(F.col("late")), facts, figures, suspects)
        if got["again"] or figures.unkeyed:
            again = flagged.filter(F.col("again") & (F.col("outcome") == DONE))
            _check_effects(runs, again, facts, figures, suspects)
        if got["again"] or got["after"] or figures.unkeyed:
            _check_stale(runs, flagged, suspects)
    finally:
        flagged.unpersist()
        in_doubt.unpersist()


def _check_overlaps(in_doubt: DataFrame, at_once: DataFrame, suspects: Suspects) -> None:
    """Compare executions of tickets in which some may have run at once."""
    tickets = at_once.select("stream", "ticket").distinct()
    found = overlaps(in_doubt.join(tickets, ["stream", "ticket"], "left_semi"))
    found = found.filter(F.greatest(*OVERLAPS)).persist()
    try:
        collect([_describe_runs(found.filter(F.col(name)), name) for name in OVERLAPS], suspects)
    finally:
        found.unpersist()


def doubts(runs: DataFrame, clocks: DataFrame, carried: DataFrame | None = None) -> DataFrame:
    """Return the executions to ``follow`` (``doubt``), by Redis' clock; no other one has a flag, but for one that
    shares a fence with a ``carried`` one beside another that is returned. ``clocks``: the offset of each consumer's
    (``clocks``); ``carried``: rows of what former runs know of the tickets. The caller unpersists the rows."""
    return doubtful(on_redis_clock(runs, clocks), carried)


def follow(told: DataFrame, carried: DataFrame | None = None) -> DataFrame:
    """Return executions (``doubts``) with what is known of those before them in their tickets, and flags that follow
    from that. ``carried``: what former runs know of the tickets, a row each (``carry``)."""
    place = ["stream", "ticket"]
    row = Window.partitionBy(*place).orderBy(*ROW)
    before = row.rowsBetween(Window.unboundedPreceding, -1)
    for name, value in prefix().items():
        told = told.withColumn(f"before_{name}", F.max(value).over(before))
    # One owner's records may come by turns: what a success has passed is asked of its former owners only.
    told = told.withColumn("former_fence", F.lag("fence").over(row))
    told = told.withColumn("before_noted_last", of_former_owners("before_noted_last", F.col("former_fence"), *place))
    if carried is None:
        told = told.withColumn("behind", F.lit(False)).withColumnsRenamed({f"before_{name}": name for name in prefix()})
    else:
        told = told.join(carried, place, "left")
        behind = F.struct(*ORDER) < F.struct(*(F.col(f"last.{name}").alias(name) for name in ORDER))
        # In a call that a former run saw a part of, that part hides what came before the call.
        split = F.struct(*CALL) == F.struct(*(F.col(f"last.{name}").alias(name) for name in CALL))
        split &= F.col("latest_end") > F.col("start_us")
        told = told.withColumn("behind", F.col("last").isNotNull() & (behind | split))
        told = told.withColumns({name: F.greatest(name, f"before_{name}") for name in prefix()})
    return _flagged(told)


def _flagged(told: DataFrame) -> DataFrame:
    """Add what follows from an execution and those before it."""
    fence, start = F.col("fence"), F.col("start_us")
    under, done, last = (F.col(name) for name in ("under_fence", "done", "last"))
    # Under a former fence only successes count: an acknowledgement records them with all successes before them. A crash
    # or failure is recorded by itself, without the successes before it if their owner died before it acknowledged them;
    # so they come again.
    known = ("ms", "seq", "id", "start_us", "consumer")
    own = F.when(F.col("started.fence") == fence, F.struct(*(F.col(f"started.{name}").alias(name) for name in known)))
    told = told.withColumn("highest", F.greatest(own, done))
    highest, place = F.col("highest"), F.struct("ms", "seq")
    # A batch handler was given several messages of the ticket: what is true of the first one is looked at.
    one_call = F.struct(*(last[name].alias(name) for name in CALL)) == F.struct(*CALL)
    beside_own = (under["fence"] == fence) & (under["ended"] > start)
    # Only that is known here of former executions: which of them it was, and whether it counts, tells ``overlaps``.
    # When a clock was set, less is known of it than former runs took for known.
    former = (F.col("latest_end") > start) & (F.col("was_set") | (F.col("maybe_ended") > F.col("start_most")))
    flags: dict[str, Any] = {
        "at_once": (beside_own | former | (F.col("surely_ended") > F.col("start_most"))) & ~one_call,
        "fence_shared": (last["fence"] == fence) & (last["consumer"] != F.col("consumer")),
        "times_impossible": (F.col("end_us") != 0) & (F.col("end_us") < start),
        "late": place < F.struct(highest["ms"].alias("ms"), highest["seq"].alias("seq")),
        # Whenever it was done before, not only in that case; these few are looked at more closely later.
        "again": place <= F.struct(done["ms"].alias("ms"), done["seq"].alias("seq")),
        "after": F.col("noted_last") > F.col("record_ms"),
    }
    for name, rule in flags.items():
        told = told.withColumn(name, F.coalesce(rule, F.lit(False)))
    repeated = (last["id"] == F.col("id")) & (last["fence"] < fence)
    return told.withColumn("recovered_ms", F.when(repeated, (start - last["start_us"]) / 1000))


def _since_losses(told: DataFrame, runs: DataFrame) -> DataFrame:
    """Count recoveries from the last sign of life of the owner that was lost: what it recorded last before the message
    started again, if it recorded nothing later; else the start that was interrupted. Crashes are recorded by others."""
    by_itself = runs.filter(F.col("outcome") != CRASHED)
    alive = by_itself.groupBy("stream", F.col("consumer").alias("lost")).agg(F.max("record_ms").alias("alive_ms"))
    lost = told.withColumn("lost", F.when(F.col("recovered_ms").isNotNull(), F.col("last.consumer")))
    alive_us = F.col("alive_ms") * 1000
    began_us = F.greatest("last.start_us", F.when(alive_us < F.col("start_us"), alive_us))
    recovered_ms = F.when(F.col("lost").isNotNull(), (F.col("start_us") - began_us) / 1000)
    return lost.join(F.broadcast(alive), ["stream", "lost"], "left").withColumn("recovered_ms", recovered_ms)


def _describe_runs(rows: DataFrame, check: str) -> DataFrame:
    """Return rows for ``collect``: the execution, and the other one that makes it a finding."""
    ended = F.when(F.col("end_us") == 0, "the end of its process").otherwise(at(F.col("end_us")))
    ran = F.format_string(
        "%s ran it from %s to %s (UTC) under fencing token %d",
        F.col("consumer"),
        at(F.col("start_us")),
        ended,
        F.col("fence"),
    )
    others = {
        "overlap": F.format_string("; %s ran until %s", F.col("beside.id"), at(F.col("beside.ended"))),
        "owners_overlap": F.format_string(
            "; %s ran %s until %s under fencing token %d",
            F.col("surely_ended.consumer"),
            F.col("surely_ended.id"),
            at(F.col("surely_ended.ended")),
            F.col("surely_ended.fence"),
        ),
        "fence_fell": F.format_string(
            "; %s started %s at %s under fencing token %d",
            F.col("surely_started.consumer"),
            F.col("surely_started.id"),
            at(F.col("surely_started.start_us")),
            F.col("surely_started.fence"),
        ),
        "fence_shared": F.format_string(
            "; %s ran %s under it before, from %s on",
            F.col("last.consumer"),
            F.col("last.id"),
            at(F.col("last.start_us")),
        ),
        "out_of_order": F.format_string(
            "; %s had started %s at %s, before it",
            F.col("highest.consumer"),
            F.col("highest.id"),
            at(F.col("highest.start_us")),
        ),
        "effect_twice": F.format_string(
            "; %s had done it from %s to %s under fencing token %d, as the run log noted at %s",
            F.col("first.consumer"),
            at(F.col("first.start_us")),
            at(F.col("first.end_us")),
            F.col("first.fence"),
            at(F.col("noted") * 1000),
        ),
        "stale_counted": F.format_string(
            "; it was noted as done at %s, when %s had the ticket: under fencing token %d it ran %s from %s on",
            at(F.col("record_ms") * 1000),
            F.col("owner.consumer"),
            F.col("owner.fence"),
            F.col("owner.id"),
            at(F.col("owner.start_us")),
        ),
    }
    others["repeat_declared"] = others["effect_twice"]
    detail = F.concat(ran, others[check]) if check in others else ran
    return suspect(check, rows, detail, owner=F.col("consumer"))


def at(us: Any) -> Any:
    """Return a moment for people, in UTC whatever the time zone of the session; a number beyond the calendar stays a
    number."""
    shown = F.date_format(
        F.to_utc_timestamp(F.timestamp_micros(us), F.current_timezone()), "yyyy-MM-dd HH:mm:ss.SSSSSS"
    )
    return F.when(us.between(0, _LAST_US), shown).otherwise(us.cast("string"))


def _check_order(
    runs: DataFrame,
    dead: DataFrame | None,
    late: DataFrame,
    facts: Sequence[AuditedStream],
    figures: RunFigures,
    suspects: Suspects,
) -> None:
    """Find, among executions behind a later message, the first of each message that had not ended before. The others
    are repeats, which are allowed."""
    ids = late.select("stream", "ticket", "id").distinct()
    ends = runs.filter(F.col("outcome").isin(*ENDED)).select("stream", "ticket", "id", "fence", "start_us")
    ends = ends.join(ids, ["stream", "ticket", "id"])
    if dead is not None:  # under a later fence it comes again: the group was set back
        fence = (F.least(F.split("letter", "-")[0].try_cast("bigint"), F.lit(1 << 52)) + 1) * FENCES_PER_MS
        letters = dead.select("stream", "id", fence.alias("fence"), F.lit(0).cast("bigint").alias("start_us"))
        ends = ends.unionByName(letters.join(ids, ["stream", "id"]))
    firsts = ends.groupBy("stream", "ticket", "id").agg(F.min(F.struct("fence", "start_us")).alias("first"))
    unended = late.join(firsts, ["stream", "ticket", "id"], "left").filter(
        F.col("first").isNull() | (F.struct("fence", "start_us") <= F.col("first"))
    )
    row = Window.partitionBy("stream", "ticket", "id").orderBy(*ROW)
    first = unended.withColumn("place", F.row_number().over(row)).filter(F.col("place") == 1)
    known = first.withColumn("provable", F.col("ms") > _per_stream({one.stream: one.floor_ms for one in facts}))
    for row in known.filter(~F.col("provable")).groupBy("stream").count().collect():
        figures.skipped_order[row.stream] = row["count"]
    judged = (
        known.filter(F.col("provable"))
        .join(_set_back(runs, first), ["stream", "id"], "left")
        .fillna(False, ["set_back"])
    )
    clock = F.format_string(
        "it began before %s by its consumer's clock, and was noted before that one", F.col("highest.id")
    )
    by_clock = judged.filter(F.col("set_back"))
    collect(
        [
            _describe_runs(judged.filter(~F.col("set_back")), "out_of_order"),
            suspect(
                "times_impossible", by_clock, F.concat(F.col("consumer"), F.lit(": "), clock), owner=F.col("consumer")
            ),
        ],
        suspects,
    )


def _set_back(runs: DataFrame, late: DataFrame) -> DataFrame:
    """Return (stream, id, set_back): True when only the clock of its consumer says that an execution was late.

    An owner records its executions in the order in which it finishes them. So where both succeeded, one after the other
    by that clock, and the first one by the clock was recorded later, by Redis' clock, it was the second one.
    """
    names = ("fence", "ms", "seq", "start_us", "end_us", "record_ms", "outcome")
    other = runs.select("stream", "ticket", *(F.col(name).alias(f"other_{name}") for name in names))
    row = late.select("stream", "ticket", "id", *names)
    behind = F.struct("ms", "seq") < F.struct("other_ms", "other_seq")
    own = (F.col("other_fence") == F.col("fence")) & (F.col("other_start_us") <= F.col("start_us"))
    former = (F.col("other_fence") < F.col("fence")) & (F.col("other_outcome") == DONE)
    in_turn = (F.col("other_end_us") <= F.col("start_us")) & (F.col("other_record_ms") > F.col("record_ms"))
    is_clock = own & (F.col("outcome") == DONE) & (F.col("other_outcome") == DONE) & in_turn
    ahead = row.join(other, ["stream", "ticket"]).filter(behind & (own | former))
    return ahead.groupBy("stream", "id").agg(F.every(is_clock).alias("set_back"))


def _declared_repeats(facts: Sequence[AuditedStream]) -> Any:
    """Return the condition that masters declared that the message may run again, before a success was recorded
    (``record_ms``), and after all those before it were recorded or at least handed over (``begun``, as a fence): one
    may have ended when the group was made again, and before that gave it anew. What was taken out of the pending list
    (taken_out) had not succeeded."""
    is_declared, at = F.lit(False), F.struct("ms", "seq")
    for one in facts:
        for loss in one.declared:
            if loss.repeats is not None and loss.kind != "taken_out":
                first, last = (
                    F.struct(
                        F.lit(min(place >> 64, _MOST)).alias("ms"), F.lit(min(place % (1 << 64), _MOST)).alias("seq")
                    )
                    for place in map(rank, loss.repeats)
                )
                was_begun = F.col("begun") <= loss.ms * FENCES_PER_MS
                is_after = (F.col("stream") == one.stream) & (F.col("record_ms") >= loss.ms)
                is_declared |= is_after & was_begun & at.between(first, last)
    return is_declared


def _check_effects(
    runs: DataFrame, again: DataFrame, facts: Sequence[AuditedStream], figures: RunFigures, suspects: Suspects
) -> None:
    """Find messages that succeeded more than once, and tell those that masters had declared to come again.

    A success leaves the pending list in the step that records it in the run log; so no other success of the message is
    recorded later. The exception is that of a former owner, when the ticket has no owner any more: it is recorded with
    what that owner may acknowledge, behind its successor's.
    """
    done = runs.filter(F.col("outcome") == DONE)
    alone = done.filter(F.col("ticket") == "")  # messages without a ticket id have no order
    message = ("stream", "ticket", "id")  # under another ticket it is none of this one's (``ticket_differs``)
    ids = again.select(*message).union(alone.select(*message)).distinct()
    told = done.join(ids, [*message], "left_semi")
    place, former_place = ("fence", "start_us", "record_ms"), ("former", "former_us", "former_ms")
    others = (_named("end_us", "former_end_us"), _named("consumer", "former_consumer"))
    formers = told.select(*message, *map(_named, place, former_place), *others)
    is_before = F.struct(*former_place) < F.struct(*map(_named, place, former_place))
    pairs = told.join(formers, [*message]).filter(is_before)
    begun = F.least(F.least("former_ms", F.lit(_MOST // FENCES_PER_MS)) * FENCES_PER_MS, "former")
    wrong = pairs.filter((F.col("former") == F.col("fence")) | (F.col("former_ms") < F.col("record_ms")))
    first = ("former_ms", "former", "former_us", "former_end_us", "former_consumer")
    names = ("record_ms", "fence", "start_us", "end_us", "consumer")
    whole = wrong.groupBy(*message, "ms", "seq", *names, "record").agg(
        F.min(F.struct(*map(_named, first, names))).alias("first"), F.max(begun).alias("begun")
    )
    twice = whole.withColumn("noted", F.col("first.record_ms")).persist()
    try:
        figures.succeeded_again = pairs.select(*message, *place, "record").distinct().count() - twice.count()
        declared = _declared_repeats(facts)
        found = {"effect_twice": twice.filter(~declared), "repeat_declared": twice.filter(declared)}
        collect([_describe_runs(rows, check) for check, rows in found.items()], suspects)
    finally:
        twice.unpersist()


def _named(name: str, to: str) -> Any:
    return F.col(name).alias(to)


def _check_stale(runs: DataFrame, flagged: DataFrame, suspects: Suspects) -> None:
    """Find successes of former owners that counted.

    Before such a success was recorded its ticket was handed over under a higher fence: an execution under that was
    recorded before, or is of this very message: a message that is done is not handed over. Messages that are done under
    a higher fence too are left to ``_check_effects``.
    """
    done = runs.filter(F.col("outcome") == DONE)
    message = ["stream", "ticket", "id"]
    owner = F.struct("fence", "record_ms", "start_us", "consumer", "id").alias("owner")
    # Messages without a ticket id have no order.
    alone = runs.filter((F.col("ticket") == "") & (F.col("outcome") != DONE)).select(*message, owner)
    of_it = flagged.filter(F.col("again") & (F.col("outcome") != DONE)).select(*message, owner).union(alone)
    handed_ms, noted_ms = (F.col("owner.fence") / FENCES_PER_MS).cast("bigint"), F.col("record_ms")
    of_ticket = flagged.filter("after").select("stream", "ticket", owner)
    wrong = done.join(of_it, message).filter(handed_ms < noted_ms)
    wrong = wrong.unionByName(done.join(of_ticket, ["stream", "ticket"]).filter(F.col("owner.record_ms") < noted_ms))
    wrong = wrong.filter(F.col("owner.fence") > F.col("fence"))
    wrong = wrong.join(done.groupBy(*message).agg(F.max("fence").alias("highest")), message).filter("fence = highest")
    row = Window.partitionBy(*message).orderBy("owner", "fence", "start_us", "record_ms", "record")
    collect(
        [_describe_runs(wrong.withColumn("place", F.row_number().over(row)).filter("place = 1"), "stale_counted")],
        suspects,
    )


def check_losses(
    pending: DataFrame,
    runs: DataFrame,
    letters: DeadLetterFrames,
    facts: Sequence[AuditedStream],
    figures: RunFigures,
    suspects: Suspects,
    ahead: DataFrame | None = None,
) -> None:
    """Find entries that were read and are over without a record, and entries that are pending behind a later message
    that is done. Nothing is claimed of entries that were over before ``figures.first_known``, nor of those whose letter
    may be dropped. ``ahead``: the last message of each ticket that is done (``carry.done_ahead``), else as in
    ``runs``."""
    floors = _per_stream({one.stream: one.floor_ms for one in facts})
    entries = pending.filter(F.col("in_stream") & (F.col("ms") > floors)).select(
        "stream", "id", "ms", "seq", "ticket", "consumer"
    )
    settled = entries.filter(F.col("consumer").isNull()).withColumn("passed", F.lit(None).cast("string"))
    done = runs.filter(F.col("outcome").isin(*ENDED)).select("stream", "id")
    held = entries.filter(F.col("consumer").isNotNull())
    if ahead is None:
        is_done, at_id = (F.col("outcome") == DONE) & (F.col("ticket") != ""), F.struct("ms", "seq", "id")
        ahead = runs.filter(is_done).groupBy("stream", "ticket").agg(F.max(at_id).alias("ahead"))
    missing = settled.unionByName(_overtaken(held, ahead)).join(done, ["stream", "id"], "left_anti")
    missing = missing.unionByName(_given_up(settled, runs))
    found = check_links(runs, pending, letters.there, facts)
    if (dead := letters.there) is not None:
        missing = missing.join(dead.select("stream", "id"), ["stream", "id"], "left_anti")
        both = dead.join(
            runs.filter(F.col("outcome") == "done").select("stream", "id", "ms", "seq", "consumer", "end_us"),
            ["stream", "id"],
        )
        shown = [F.col("consumer"), at(F.col("end_us")), F.col("letter"), F.col("reason")]
        detail = F.format_string("done by %s at %s (UTC); dead letter %s, reason %s", *shown)
        found.append(suspect("dead_and_done", both, detail, owner=F.col("consumer")))
    kept = missing.persist()
    try:
        # Not those of the same millisecond either. A stream without any handled entry has no lowest id: all are
        # "before".
        known, is_over = F.col("ms") > _per_stream(figures.first_known), F.col("consumer").isNull()
        for row in kept.filter(~known & is_over).groupBy("stream").count().collect():
            figures.before_known[row.stream] = row["count"]
        unsaid = kept.filter(known | ~is_over)
        if not unsaid.isEmpty():
            unsaid = _no_former_letters(unsaid, letters, figures)
        detail = F.concat(
            F.lit("pending for "), F.col("consumer"), F.lit(", and "), F.col("passed"), F.lit(" of its ticket is done")
        )
        found.append(suspect("overtaken", unsaid.filter(~is_over), detail, owner=F.col("consumer")))
        found.append(
            suspect("letter_missing", unsaid.filter(is_over & (F.col("passed") == GAVE_UP)), "given up, and no letter")
        )
        gone = _in_no_record(unsaid.filter(is_over & F.col("passed").isNull()), figures)
        collect([suspect("lost", gone, "not pending, and in no record"), *found], suspects)
    finally:
        kept.unpersist()


def _in_no_record(gone: DataFrame, figures: RunFigures) -> DataFrame:
    """Return the rows without those that may be in a record that cannot be read."""
    if not figures.damaged_ms:
        return gone
    may_be = F.col("ms") <= _per_stream(figures.damaged_ms, -1)
    for row in gone.filter(may_be).groupBy("stream").count().collect():
        figures.maybe_damaged[row.stream] = row["count"]
    return gone.filter(~may_be)


def _given_up(settled: DataFrame, runs: DataFrame) -> DataFrame:
    """Return the settled entries that were given up, and not done after all."""
    ids = runs.filter(F.col("outcome") == GAVE_UP).select("stream", "id")
    done = runs.filter(F.col("outcome") == DONE).select("stream", "id")
    given = settled.join(ids, ["stream", "id"], "left_semi").join(done, ["stream", "id"], "left_anti")
    return given.withColumn("passed", F.lit(GAVE_UP))


def _no_former_letters(unsaid: DataFrame, letters: DeadLetterFrames, figures: RunFigures) -> DataFrame:
    """Return the rows without those whose letter was redriven, or may have been dropped. Such an entry is pending again
    when the group was set back."""
    unsaid = not_added_again(unsaid, letters.entries())
    was_dropped = F.col("ms") <= _per_stream(letters.last_drops_ms(), -1)
    for row in unsaid.filter(was_dropped).groupBy("stream").count().collect():
        figures.maybe_dropped[row.stream] = row["count"]
    return unsaid.filter(~was_dropped)


def _overtaken(held: DataFrame, ahead: DataFrame) -> DataFrame:
    """Return the pending entries ``held`` that are behind a later message of their ticket which is done (``passed``:
    the last of these).

    Done only: a success is recorded with all that was done before it, in one step; a failure by itself, maybe after
    successes that will never be recorded because their owner died. So an entry that is pending before a failure may
    have succeeded, and one that is pending before a success has not.
    """
    joined = held.join(ahead, ["stream", "ticket"]).filter(F.struct("ms", "seq") < F.struct("ahead.ms", "ahead.seq"))
    joined = joined.filter(~F.col("ticket").contains("\ufffd"))  # not UTF-8: two tickets may read the same
    return joined.select("stream", "id", "ms", "seq", "ticket", "consumer", F.col("ahead.id").alias("passed"))


def _per_stream(values: dict[str, int], otherwise: int = 1 << 62) -> Any:
    chosen = F.lit(otherwise)
    for stream, value in values.items():
        chosen = F.when(F.col("stream") == stream, F.lit(value)).otherwise(chosen)
    return chosen.cast("bigint")
