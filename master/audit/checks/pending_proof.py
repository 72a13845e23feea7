"""Check pending list, index and attempts, in Spark. Names and rules: ``findings``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from usher.common.protocol.stream_id import rank
from usher.master.audit.checks.facts import AuditedStream
from usher.master.audit.checks.findings import FENCES_PER_MS, RESERVED, AuditThresholds, Example
from usher.master.audit.checks.suspects import LOOKED_AT, Suspects
from usher.master.audit.engine import F, Observation, Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: Upper ends of the age classes of a plot, in milliseconds; the last class is open.
AGES_MS = (1_000, 10_000, 60_000, 600_000, 3_600_000, 86_400_000)
_TOP_TICKETS = 20
#: How far fences may be ahead: as far as Redis' clock may have been set back.
_FUTURE_MS = 3_600_000
_DEAD_LISTED = 1000
_MOST = 2**63 - 1
_BUCKETS = 4096


@dataclass
class PendingFigures:
    """Sums for report and plots."""

    pending: int = 0
    settled: int = 0
    oldest_age_ms: int = 0
    ages: list[int] = field(default_factory=lambda: [0] * (len(AGES_MS) + 1))
    owners: list[tuple[str, str, int]] = field(default_factory=list)  # (stream, owner, entries)
    tickets: int = 0
    top_tickets: list[tuple[str, str, int]] = field(default_factory=list)  # (stream, ticket, entries)
    longest_parked_ms: int = 0
    first_pending: dict[str, int] = field(default_factory=dict)  # stream -> ms of the lowest id


def is_incarnation(owner: Any) -> Any:
    return owner.contains(":")


def count_pending(pending: DataFrame) -> PendingFigures:
    """Count by owner and age. The first action on ``pending``: it is read from Redis here."""
    age = F.lit(len(AGES_MS))
    for number, end in reversed(list(enumerate(AGES_MS))):
        age = F.when(F.col("age_ms") < end, number).otherwise(age)
    rows = (
        pending.groupBy("stream", "consumer", age.alias("age"))
        .agg(
            F.count("*").alias("entries"),
            F.max("age_ms").alias("oldest"),
            F.max("idle_ms").alias("idle"),
            F.min("ms").alias("first"),
        )
        .collect()
    )
    figures = PendingFigures()
    owners: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.consumer is None:
            figures.settled += row.entries
            continue
        figures.pending += row.entries
        figures.ages[row.age] += row.entries
        figures.oldest_age_ms = max(figures.oldest_age_ms, row.oldest or 0)
        if row.consumer == "master":
            figures.longest_parked_ms = max(figures.longest_parked_ms, row.idle)
        owners[row.stream, row.consumer] = owners.get((row.stream, row.consumer), 0) + row.entries
        figures.first_pending[row.stream] = min(row.first, figures.first_pending.get(row.stream, row.first))
    figures.owners = sorted(
        ((stream, owner, count) for (stream, owner), count in owners.items()), key=lambda one: -one[2]
    )
    return figures


def check_index(pending: DataFrame, index: DataFrame, strangers: Sequence[str] = ()) -> DataFrame | None:
    """Find suspects: entries of which pending list and index differ; None when they agree as a whole. Entries of
    ``strangers`` have a finding of their own.

    Both sides are first added up in buckets of ids (exclusive or of hashes, and a count), which moves no rows; only
    buckets that differ are joined, entry by entry.
    """
    owned = pending.filter(F.col("consumer").isNotNull() & ~F.col("consumer").isin(*strangers)).select(
        "stream", "id", "ms", "seq", "consumer", "idle_ms", "deliveries", "ticket", "in_stream"
    )
    # A message without a ticket id is a ticket of its own, under a name that is not text.
    owned = owned.withColumn("own", F.coalesce("ticket", F.concat(F.lit("\ufffd"), "id")))
    # An unreadable record has no id, so it is joined with nothing.
    recorded = index.select("stream", "id", F.col("ticket").alias("indexed"), "owner")
    left = _sums(owned.filter(is_incarnation(F.col("consumer"))), "consumer", "own")
    right = _sums(recorded, "owner", "indexed")
    buckets = [bucket for bucket in left.keys() | right.keys() if left.get(bucket) != right.get(bucket)]
    if not buckets:
        return None
    if len(buckets) < _BUCKETS // 2:
        chosen = F.broadcast(index.sparkSession.createDataFrame([(bucket,) for bucket in buckets], "bucket int"))
        owned = owned.withColumn("bucket", _bucket()).join(chosen, "bucket", "left_semi")
        recorded = recorded.withColumn("bucket", _bucket()).join(chosen, "bucket", "left_semi")
    joined = owned.join(recorded.select("stream", "id", "indexed", "owner"), ["stream", "id"], "full_outer")
    owner, record = F.col("consumer"), F.col("owner")
    agrees = (
        F.when(record.isin("returned", "tail") | record.startswith("waits@"), owner == "master")
        .when(record == "halted", owner.isin(*RESERVED))
        .otherwise(owner == record)
    )
    rules = {
        "pending_without_index": is_incarnation(owner)
        & (record.isNull() | (F.col("indexed") != F.col("own")))
        & F.col("in_stream"),
        "index_without_pending": owner.isNull() & record.isNotNull(),
        "index_unreadable": F.col("id").isNull(),
        "owners_differ": owner.isNotNull() & record.isNotNull() & ~agrees,
    }
    return _by_rules(
        joined.withColumn("ticket", F.coalesce("ticket", "indexed")), rules, F.concat(F.lit("index says "), record)
    )


def check_records(index: DataFrame, facts: Sequence[AuditedStream]) -> list[DataFrame]:
    """Return suspects that the index alone shows. A record may be read twice while the index grows."""
    latest = F.lit(None).cast("bigint")
    for one in facts:
        latest = F.when(F.col("stream") == one.stream, (one.time_ms + _FUTURE_MS) * FENCES_PER_MS).otherwise(latest)
    known = index.filter(F.col("id").isNotNull())
    ahead = known.filter(F.col("fence") > latest)
    claims = known.groupBy("stream", "id").agg(
        F.min("ticket").alias("ticket"), F.max("ticket").alias("other"), F.min("owner").alias("owner")
    )
    twice = claims.filter(F.col("ticket") != F.col("other"))
    mixed = known.filter(is_incarnation(F.col("owner")) & ~F.col("in_order"))
    mixed = mixed.groupBy("stream", "ticket").agg(F.min("id").alias("id"), F.min("owner").alias("owner"))
    return [
        suspect("index_unordered", mixed, "its ids are not in order, each once", F.col("owner")),
        suspect("fence_future", ahead, F.format_string("fencing token %d", "fence"), F.col("owner")),
        suspect("indexed_twice", twice, F.format_string("also in the record of %s", "other"), F.col("owner")),
    ]


def check_inboxes(inboxes: DataFrame, index: DataFrame, facts: Sequence[AuditedStream]) -> list[DataFrame]:
    """Return suspects: owned and never told, told and not owned. ``index``: as it was before the inboxes were read;
    ``facts``: as they were after."""
    since = inboxes.groupBy("stream", "owner").agg(F.max("since").alias("since"))
    told = inboxes.filter(F.col("id").isNotNull()).select("stream", "owner", "ticket", "id", "fence")
    owned = index.join(since, ["stream", "owner"]).filter(F.col("fence") > F.col("since"))
    untold = owned.join(told.select("stream", "owner", "id"), ["stream", "owner", "id"], "left_anti")
    now = index.groupBy("stream", "ticket").agg(F.max("fence").alias("has"), F.max("owner").alias("whose"))
    other = told.join(now, ["stream", "ticket"]).filter(
        (F.col("whose") != F.col("owner")) & (F.col("has") < F.col("fence"))
    )
    under = F.format_string("told under fencing token %d; its ticket's is %d", "fence", "has")
    return [
        suspect("never_told", untold, F.format_string("handed over under fencing token %d", "fence"), F.col("owner")),
        suspect("inbox_differs", other, under, F.col("owner"), F.col("fence")),
        suspect("inbox_differs", told.filter(is_unread(facts)), "told, and the group has not read it", F.col("owner")),
    ]


def is_unread(facts: Sequence[AuditedStream]) -> Any:
    """Return whether the group has not read the entry ``id``, by what was read when ``facts`` were."""
    unread, parts = F.lit(False), F.split("id", "-")
    ms, seq = (F.coalesce(F.get(parts, at).try_cast("bigint"), F.lit(_MOST)) for at in (0, 1))
    for one in facts:
        least = [min(part, _MOST) for part in divmod(rank(one.delivered), 1 << 64)]
        is_above = (ms > least[0]) | ((ms == least[0]) & (seq > least[1]))
        unread = unread | ((F.col("stream") == one.stream) & is_above)
    return unread


def _bucket() -> Any:
    return F.pmod(F.xxhash64("stream", "id"), F.lit(_BUCKETS)).cast("int")


def _sums(rows: DataFrame, owner: str, ticket: str) -> dict[int, tuple[int, int]]:
    """Return bucket -> (number of rows, exclusive or of their hashes)."""
    summed = rows.groupBy(_bucket().alias("bucket")).agg(
        F.count("*").alias("rows"), F.bit_xor(F.xxhash64("stream", "id", owner, ticket)).alias("hash")
    )
    return {row.bucket: (row.rows, row.hash) for row in summed.collect()}


def check_entries(pending: DataFrame, dead: Sequence[tuple[str, str]], limits: AuditThresholds) -> DataFrame:
    """Find suspects that an entry alone shows. ``dead``: (stream, owner) that have findings of their own."""
    owner = F.col("consumer")
    rules = {
        "idle_too_long": is_incarnation(owner)
        & (F.col("idle_ms") > limits.owner_idle_ms)
        & ~owner.isin(*[name for _, name in dead[:_DEAD_LISTED]]),
        "body_gone": owner.isNotNull() & ~F.col("in_stream"),
        "delivered_often": F.col("deliveries") > limits.deliveries,
    }
    wrong = F.lit(False)
    for rule in rules.values():
        wrong = wrong | F.coalesce(rule, F.lit(False))
    return _by_rules(pending.filter(wrong), rules, F.lit(None).cast("string"))


def _by_rules(rows: DataFrame, rules: Mapping[str, Any], more: Any) -> DataFrame:
    """Return a suspect for each rule that a row breaks."""
    said = F.format_string(
        "pending for %s, idle %d ms, deliveries %d", F.col("consumer"), F.col("idle_ms"), F.col("deliveries")
    )
    return rows.select(
        F.explode(F.array_compact(F.array(*(F.when(rule, name) for name, rule in rules.items())))).alias("check"),
        "stream",
        F.coalesce("id", F.lit("")).alias("id"),
        F.coalesce("ms", F.lit(0)).alias("ms"),
        F.coalesce("seq", F.lit(0)).alias("seq"),
        F.coalesce("ticket", F.lit("")).alias("ticket"),
        F.coalesce("consumer", F.lit("")).alias("owner"),
        F.concat_ws(", ", F.when(F.col("consumer").isNotNull(), said), more).alias("detail"),
        F.lit(0).cast("bigint").alias("fence"),
    )


def check_parked(pending: DataFrame, index: DataFrame, limits: AuditThresholds) -> DataFrame:
    """Find suspects: entries under ``master`` for long, with nothing of their ticket in processing."""
    old = pending.filter((F.col("consumer") == "master") & (F.col("idle_ms") > limits.parked_ms) & F.col("in_stream"))
    waiting = old.join(index.select("stream", "ticket").distinct(), ["stream", "ticket"], "left_anti")
    said = F.format_string("waiting for %d ms", F.col("idle_ms"))
    return suspect("parked_too_long", waiting, said, owner=F.col("consumer"))


def check_tickets(pending: DataFrame, figures: PendingFigures, suspects: Suspects) -> None:
    """Find tickets with two owners; and the tickets with most entries pending."""
    owned = pending.filter(F.col("consumer").isNotNull() & F.col("ticket").isNotNull())
    # Numbers only: texts as minimum and maximum would make Spark sort all rows instead of adding them up in a table.
    runner = F.when(is_incarnation(F.col("consumer")), F.xxhash64("consumer"))
    by_ticket = owned.groupBy("stream", "ticket").agg(
        F.count("*").alias("entries"), F.min(runner).alias("one"), F.max(runner).alias("other")
    )
    told = by_ticket.select(
        "stream", "ticket", "entries", F.coalesce(F.col("one") != F.col("other"), F.lit(False)).alias("twice")
    )
    seen = Observation()
    observed = told.observe(seen, F.count("*").alias("tickets"), F.sum(F.col("twice").cast("int")).alias("twice"))
    rows = observed.orderBy(F.desc("twice"), F.desc("entries")).limit(LOOKED_AT).collect()
    figures.tickets = seen.get["tickets"]
    figures.top_tickets = sorted(((row.stream, row.ticket, row.entries) for row in rows), key=lambda one: -one[2])[
        :_TOP_TICKETS
    ]
    twice = [(row.stream, row.ticket) for row in rows if row.twice]
    if twice:
        chosen = F.broadcast(pending.sparkSession.createDataFrame(twice, "stream string, ticket string"))
        whose = owned.filter(is_incarnation(F.col("consumer"))).join(chosen, ["stream", "ticket"])
        first = (
            whose.groupBy("stream", "ticket", "consumer")
            .agg(F.min(F.struct("ms", "seq", "id")).alias("first"))
            .orderBy("stream", "ticket", "consumer")
        )
        of: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for row in first.collect():
            of.setdefault((row.stream, row.ticket), []).append((row.consumer, row.first.id))
        for (stream, ticket), [(one, entry_id), (other, other_id), *_] in of.items():
            detail = f"{other_id} of the same ticket is pending for {other}"
            suspects.add("ticket_owned_twice", stream, 1, [Example(stream, entry_id, ticket, one, detail, other_id)])


def check_attempts(attempts: DataFrame, pending: DataFrame, limits: AuditThresholds) -> DataFrame:
    """Find suspects: counted starts that are too many, or of entries that are over."""
    held = pending.filter(F.col("consumer").isNotNull()).select("stream", "id", "ms", "seq", "ticket", "consumer")
    joined = attempts.join(held, ["stream", "id"], "left")
    name = F.when(F.col("consumer").isNull(), "attempts_leaked").when(
        F.col("failures") > limits.attempts, "attempts_many"
    )
    said = F.format_string("%d attempts, of which %d count", F.col("attempts"), F.col("failures"))
    return suspect(name, joined.filter(name.isNotNull()), said, owner=F.col("consumer"))


def suspect(check: Any, rows: DataFrame, detail: Any, owner: Any = None, fence: Any = None) -> DataFrame:
    """Return rows (stream, id, ms, seq, ticket) in the form of suspects."""
    known = set(rows.columns)
    number = {name: F.coalesce(name, F.lit(0)) if name in known else F.lit(0) for name in ("ms", "seq")}
    ticket = F.coalesce("ticket", F.lit("")) if "ticket" in known else F.lit("")
    return rows.select(
        (F.lit(check) if isinstance(check, str) else check).alias("check"),
        "stream",
        "id",
        number["ms"].cast("bigint").alias("ms"),
        number["seq"].cast("bigint").alias("seq"),
        ticket.alias("ticket"),
        (F.lit("") if owner is None else F.coalesce(owner, F.lit(""))).alias("owner"),
        (F.lit(detail) if isinstance(detail, str) else detail).alias("detail"),
        (F.lit(0) if fence is None else fence).cast("bigint").alias("fence"),
    )


def collect(frames: Sequence[DataFrame], suspects: Suspects) -> None:
    """Count suspects per check and stream, and fetch the first ones of each."""
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame)
    kept = whole.persist()
    try:
        counts = {(row["check"], row.stream): row["count"] for row in kept.groupBy("check", "stream").count().collect()}
        if not counts:
            return
        order = Window.partitionBy("check", "stream").orderBy("ms", "seq", "id", "detail")
        named: dict[tuple[str, str], list[Example]] = {}
        for row in kept.withColumn("place", F.row_number().over(order)).filter(F.col("place") <= LOOKED_AT).collect():
            named.setdefault((row["check"], row.stream), []).append(
                Example(row.stream, row.id, row.ticket, row.owner, row.detail or "", fence=row.fence)
            )
        for (check, stream), count in sorted(counts.items()):
            suspects.add(check, stream, count, named[check, stream])
    finally:
        kept.unpersist()
