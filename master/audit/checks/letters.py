"""Judge dead letters that are gone. A letter that is redriven or dropped goes, and its entry stays in the stream:
neither pending nor lost.

A redriven message is added again, with its uid (common/lua/operations/redrive.lua), so the stream itself tells. Of
dropped letters only the action log knows when the last one was dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from usher.common.protocol.keys import Keys
from usher.common.protocol.message import UNREADABLE_DUE
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs
from usher.master.audit.checks.facts import is_capped
from usher.master.audit.engine import F
from usher.master.operations.action_log import KEPT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_PAGE = 500
#: The identity of a message that is added again; a gathered one is known by its place in its source.
_KNOWN_BY = "coalesce(fields['usher_from'], nullif(fields['uid'], ''), id)"


class DeadLetterFrames(NamedTuple):
    """The dead letters of an audit. ``there``: the letters in Redis, None without any; ``entries``: of the streams,
    read only where a letter may be gone; ``last_drops_ms``: stream -> ``last_drop_ms``."""

    there: DataFrame | None
    entries: Callable[[], DataFrame]
    last_drops_ms: Callable[[], dict[str, int]]


def letters_in(entries: DataFrame) -> DataFrame:
    """Return the dead letters in entries of their stream, without those of delayed messages, whose ids are others."""
    names = {"id": "usher-id", "ticket": "usher-ticket", "reason": "usher-reason"}
    told = (F.col("fields")[name].alias(to) for to, name in names.items())
    letters = entries.select("stream", F.col("id").alias("letter"), *told)
    return letters.filter(~F.col("reason").eqNullSafe(UNREADABLE_DUE))


def not_added_again(entries: DataFrame, stream: DataFrame) -> DataFrame:
    """Return the ``entries`` that are not in the stream a second time, further back."""
    known = stream.select("stream", "id", "ms", "seq", F.expr(_KNOWN_BY).alias("known_by"))
    wanted = known.join(entries.select("stream", "id"), ["stream", "id"], "left_semi").withColumn(
        "at", F.struct("ms", "seq")
    )
    later = known.select("stream", "known_by", F.struct("ms", "seq").alias("again_at"))
    again = wanted.join(later, ["stream", "known_by"]).filter(F.col("at") < F.col("again_at"))
    return entries.join(again.select("stream", "id"), ["stream", "id"], "left_anti")


def last_drop_ms(link: Link, keys: Keys) -> int:
    """Return when a letter was last dropped; if the log was cut and has no drop, when the log begins: there may have
    been one before. -1: never."""
    end, first_ms = b"+", -1
    while True:
        rows = link.call("XREVRANGE", keys.actions, end, "-", "COUNT", _PAGE)
        for line, flat in rows:
            if pairs(flat).get(b"what") == b"drop":
                return int(line.partition(b"-")[0])
            first_ms = int(line.partition(b"-")[0])
        if len(rows) < _PAGE:
            return first_ms if _was_cut(link, keys) else -1
        end = b"(" + rows[-1][0]


def _was_cut(link: Link, keys: Keys) -> bool:
    if not link.call("EXISTS", keys.actions):
        return False
    facts = pairs(link.call("XINFO", "STREAM", keys.actions))
    return is_capped(facts[b"length"], facts.get(b"entries-added"), KEPT)
