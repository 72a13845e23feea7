"""Tell what of a stream is proven, as its archive and Redis say. No Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from usher.common.base.errors import StartRefused
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketStream
from usher.master.audit.commits import DataSet, data_sets

#: So many sentences are stored in Redis, of so many characters.
_SAID, _LONGEST = 20, 300


class ProvenSpan(NamedTuple):
    """A part of history that is proven without a gap. ``before``: why it does not begin earlier, "" when it is the
    beginning of all."""

    since_ms: int
    until_ms: int
    executions: int
    before: str


def archived_rows(folder: Path, keys: Keys) -> int:
    """Return how many entries and executions are archived. Raises StartRefused."""
    return sum(commit.rows for data in data_sets(folder, keys)[:2] for commit in data.chain())


def seen(link: Link, keys: Keys) -> list[Any]:
    """Return what changes when there is anything new to prove."""
    group = TicketStream(link, keys).group_facts()
    lasts = []
    for key in (keys.stream, keys.runs, keys.dead):
        last = link.call("XREVRANGE", key, "+", "-", "COUNT", 1)
        lasts.append(last[0][0].decode() if last else "")
    return [*lasts, group[b"last-delivered-id"].decode(), group[b"pending"]]


def nothing_new(link: Link, keys: Keys, folder: Path) -> bool:
    """Return True when nothing has happened since the last run, and note that it is proven until now. Raises
    StartRefused."""
    *_, proofs = data_sets(folder, keys)
    seconds, micros = link.call("TIME")
    last = proofs.last()
    if last is None or told_until(proofs) < last.number or last.facts["seen"] != seen(link, keys):
        return False
    note(link, keys, last.facts["since_ms"], int(seconds) * 1000 + int(micros) // 1000)
    return True


def told_until(proofs: DataSet) -> int:
    """Return the last run whose findings were told to somebody."""
    try:
        return int((proofs.folder / "_told").read_text())
    except (OSError, ValueError):
        return 0


def mark_told(folder: Path, keys: Keys) -> None:
    """Note that the findings and holes of the last run were told: those of one that is killed before are told by the
    next run. Raises StartRefused."""
    *_, proofs = data_sets(folder, keys)
    if (last := proofs.last()) is not None:
        try:
            (proofs.folder / "_told").write_text(str(last.number))
        except OSError as failed:
            raise StartRefused(f"this was told, but the next run tells the same once more: {failed}") from failed


def note(link: Link, keys: Keys, since_ms: int | None, until_ms: int) -> None:
    """Note in Redis what is proven, for metrics and the doctor; only after the commit."""
    since = () if since_ms is None else ("proven_since_ms", since_ms)
    former = link.call("HGET", keys.archived, "proven_until_ms")
    every = () if former is None else ("proven_every_ms", max(0, until_ms - int(former)))
    link.call("HSET", keys.archived, "proven_until_ms", until_ms, *since, *every)


def note_duration(took_ms: int, link: Link, keys: Keys) -> None:
    """Note in Redis how long a proof took, for the doctor."""
    link.call("HSET", keys.archived, "proven_took_ms", took_ms)


def note_history(link: Link, keys: Keys, spans: Sequence[ProvenSpan], unproven: Sequence[str]) -> None:
    """Note in Redis what of history is proven and what is not, for pages."""
    told = {"spans": [list(one) for one in spans], "unproven": said(unproven)}
    link.call("HSET", keys.archived, "history", orjson.dumps(told))


def noted_history(link: Link, keys: Keys) -> list[ProvenSpan]:
    """Return the spans that were noted last. Raises CommandRefused or ValueError when something else is there."""
    stored = link.call("HGET", keys.archived, "history")
    try:
        return [ProvenSpan(*one) for one in orjson.loads(stored)["spans"]] if stored else []
    except (KeyError, TypeError) as odd:
        raise ValueError(f"no spans of a proof: {stored[:80]}") from odd


def said(sentences: Sequence[str]) -> list[str]:
    """Return the first sentences, each cut, as they are stored in Redis."""
    return [one[:_LONGEST] for one in sentences[:_SAID]]
