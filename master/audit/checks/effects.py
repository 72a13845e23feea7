"""Check effects in a SQL sink (``usher.consumer.sinks.sql``) against the run log: every success has its effect stored.

The table holds a row per ticket and uid, so no effect can be there twice; the possible fault is a missing one. Every
handler of the streams must use the sink: one that does not has no rows. A message's uid is in its entry, so trimmed
entries are not judged; nor are those older than the oldest row, which the sink may have pruned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlalchemy as sa

from usher.common.base.errors import StartRefused
from usher.master.audit.checks.findings import DONE
from usher.master.audit.checks.pending_proof import collect, suspect
from usher.master.audit.checks.run_proof import at
from usher.master.audit.checks.suspects import Suspects
from usher.master.audit.engine import F, register
from usher.master.audit.engine.formats import Format, FormatReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SCHEMA = pa.schema([pa.field("key_ticket", pa.string()), pa.field("key_uid", pa.string())])
_PAGE = 10_000
#: The form in which the sink stores other values than plain short texts (consumer/sinks/sql.py).
_LONGEST_TEXT, _DIGEST = 256, "sha256:"
#: A message's uid (common/protocol/message.py, consumer/handlers/message.py); an empty one counts as none. usher_from:
#: source id, a number, source.
_UID = "coalesce(nullif(fields['uid'], ''), id)"
_SOURCE_ID, _SOURCE = "^([^ ]*)", "(?s)^[^ ]* [^ ]* (.*)"
_UIDS = sa.table("usher_uids", sa.column("sink"), sa.column("ticket"), sa.column("uid"), sa.column("at_s"))


class _EffectsReader(FormatReader):
    def __init__(self, options: dict[str, str]) -> None:
        self._url, self._sink = options["url"], options["sink"]

    def read(self, part: None) -> Iterator[pa.RecordBatch]:
        engine = sa.create_engine(self._url)
        try:
            with engine.connect().execution_options(stream_results=True) as connection:
                for rows in connection.execute(
                    sa.select(_UIDS.c.ticket, _UIDS.c.uid).where(_UIDS.c.sink == self._sink)
                ).partitions(_PAGE):
                    yield pa.RecordBatch.from_arrays(
                        [pa.array(column, pa.string()) for column in zip(*rows, strict=True)], schema=_SCHEMA
                    )
        finally:
            engine.dispose()


#: The ticket and uid of each effect that a sink has stored. Options: ``url`` (SQLAlchemy), ``sink`` (its name).
_EFFECTS = Format("sql_effects", _SCHEMA, "key_ticket string, key_uid string", _EffectsReader)


def oldest_s(url: str, sink: str) -> int | None:
    """Return the time of the oldest row in seconds since the epoch; None without any. Raises StartRefused."""
    try:
        engine = sa.create_engine(url)
    except (sa.exc.ArgumentError, ModuleNotFoundError) as wrong:
        raise StartRefused(f"USHER_AUDIT_SINK_URL cannot be used: {wrong}") from wrong
    try:
        with engine.connect() as connection:
            found = connection.scalar(sa.select(sa.func.min(_UIDS.c.at_s)).where(_UIDS.c.sink == sink))
    except sa.exc.SQLAlchemyError as failed:
        raise StartRefused(f"USHER_AUDIT_SINK_URL: {str(failed).splitlines()[0]}") from failed
    finally:
        engine.dispose()
    return None if found is None else int(found)


def check_stored(
    runs: DataFrame,
    entries: DataFrame,
    url: str,
    sink: str,
    tolerance_ms: int,
    suspects: Suspects,
    *,
    gathered: Sequence[str] = (),
) -> str:
    """Find suspects: done, and no effect. Returns what cannot be said, as a sentence, or "". ``gathered``: the streams
    that are work streams. Raises StartRefused."""
    if oldest_s(url, sink) is None:
        return (
            f"the sink {sink} has stored nothing, so nothing can be said of effects (USHER_AUDIT_SINK_URL,"
            " USHER_AUDIT_SINK_NAME)"
        )
    spark = runs.sparkSession
    register(spark, _EFFECTS)
    stored = spark.read.format(_EFFECTS.name).options(url=url, sink=sink).load()
    done = (
        runs.filter(F.col("outcome") == DONE)
        .groupBy("stream", "id", "ms", "seq", "ticket")
        .agg(F.min("record_ms").alias("noted"))
    )
    came_from = F.col("fields")["usher_from"]
    own = F.coalesce(F.expr("nullif(fields['uid'], '')"), F.regexp_extract(came_from, _SOURCE_ID, 1))
    gathered_uid = F.concat(F.regexp_extract(came_from, _SOURCE, 1), F.lit("/"), own)
    uid = F.when(F.col("stream").isin(*gathered), gathered_uid).otherwise(F.expr(_UID)).alias("uid")
    told = done.join(entries.select("stream", "id", uid), ["stream", "id"])
    told = told.filter(~F.concat("ticket", "uid").contains("\ufffd"))  # not UTF-8: the original bytes are lost
    told = told.withColumns({"key_ticket": _stored_as("ticket"), "key_uid": _stored_as("uid")})
    missing = told.join(stored, ["key_ticket", "key_uid"], "left_anti").persist()
    try:
        missing.count()
        kept_from_s = oldest_s(url, sink)  # after the reading: rows may have been pruned meanwhile
        floor_ms = 1 << 62 if kept_from_s is None else (kept_from_s + 1) * 1000 + tolerance_ms
        judged = missing.filter(F.col("noted") > floor_ms)
        detail = F.format_string(
            "done, as was noted at %s (UTC); the sink has no effect of its uid %s",
            at(F.col("noted") * 1000),
            F.col("uid"),
        )
        collect([suspect("effect_missing", judged, detail)], suspects)
    finally:
        missing.unpersist()
    return ""


def _stored_as(column: str) -> Any:
    text = F.col(column)
    is_plain = (F.octet_length(text) <= _LONGEST_TEXT) & ~text.contains("\0") & ~text.startswith(_DIGEST)
    return F.when(is_plain, text).otherwise(F.concat(F.lit(_DIGEST), F.sha2(text.cast("binary"), 256)))
