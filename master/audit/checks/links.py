"""Check that run log, stream and dead letters speak of the same messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from usher.common.protocol.stream_id import rank
from usher.master.audit.checks.facts import AuditedStream
from usher.master.audit.checks.findings import HALTED_NAME
from usher.master.audit.checks.pending_proof import suspect
from usher.master.audit.engine import F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_MOST = 2**63 - 1


def check_links(
    runs: DataFrame, entries: DataFrame, dead: DataFrame | None, facts: Sequence[AuditedStream]
) -> list[DataFrame]:
    """Return suspects. ``entries``: with their owners, null for what is over."""
    of = entries.filter(F.col("in_stream")).select("stream", "id", F.col("ticket").alias("own"))
    differ = runs.join(of, ["stream", "id"]).filter((F.col("ticket") != F.col("own")) & ~_is_lossy("ticket", "own"))
    unread = F.lit(False)
    for one in facts:
        ms, seq = (min(part, _MOST) for part in divmod(rank(one.delivered), 1 << 64))
        is_above = (F.col("ms") > ms) | ((F.col("ms") == ms) & (F.col("seq") > seq))
        unread = unread | ((F.col("stream") == one.stream) & is_above)
    owner, ran = F.col("consumer"), F.format_string("%s ran it as %s", "consumer", "outcome")
    other = F.format_string("%s ran it for this ticket; it is of %s", owner, "own")
    found = [
        suspect("ticket_differs", differ, other, owner),
        suspect("unread_and_run", runs.filter(F.col("id").isNotNull() & unread), ran, owner),
    ]
    if dead is not None:
        again = dead.groupBy("stream", "id").agg(F.count("*").alias("letters"), F.min("ticket").alias("ticket"))
        twice = again.filter(F.col("letters") > 1)
        found.append(suspect("letters_twice", _numbered(twice), F.format_string("%d dead letters", "letters")))
        held = entries.filter(owner.isNotNull() & (owner != HALTED_NAME)).select("stream", "id", "ms", "seq", owner)
        both = dead.join(held, ["stream", "id"])
        found.append(suspect("dead_and_pending", both, F.format_string("pending for %s", owner), owner))
    return found


def _is_lossy(*columns: str) -> Any:
    """Return whether text in them was no UTF-8: two tickets may read the same, or differently."""
    return F.concat(*columns).contains("\ufffd")


def _numbered(rows: DataFrame) -> DataFrame:
    parts = F.split("id", "-")
    return rows.withColumns({"ms": parts[0].cast("bigint"), "seq": parts[1].cast("bigint")})
