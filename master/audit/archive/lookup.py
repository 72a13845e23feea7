"""Look up messages of an archive, and how their last executions ended: pyarrow alone, no Spark."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds

from usher.common.base.errors import StartRefused
from usher.common.protocol.keys import Keys
from usher.common.protocol.run_log import STALE, RunRecord
from usher.common.protocol.stream_id import milliseconds
from usher.master.audit.archive.commits import DataSet
from usher.master.audit.archive.standing import data_sets


def archived_entries(
    folder: Path, keys: Keys, ticket: str | None, first: bytes, last: bytes
) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield the entries between the times of two ids as (id, names and values), of all tickets or of one; in no order.
    The caller holds the archive's lock. Raises StartRefused."""
    entries, *_ = data_sets(folder, keys)
    moment = pc.field("ms")
    fits = (moment >= milliseconds(first)) & (moment <= min(milliseconds(last), 2**63 - 1))
    if ticket is not None:
        fits &= pc.field("ticket") == ticket
    for row in _rows(entries, ("id", "raw"), fits):
        yield row["id"].encode(), row["raw"]


def last_runs(folder: Path, keys: Keys, ids: Collection[bytes]) -> dict[bytes, RunRecord]:
    """Return the last archived execution of each of these messages. The caller holds the lock. Raises StartRefused."""
    _, runs, _ = data_sets(folder, keys)
    if runs.last() is None:
        return {}
    found: dict[bytes, RunRecord] = {}
    names = ("consumer", "ticket", "id", "fence", "attempt", "start_us", "end_us", "outcome")
    wanted = pc.field("id").isin([one.decode() for one in ids]) & (pc.field("outcome") != STALE)
    for row in _rows(runs, names, wanted):
        run = RunRecord(**row)
        before = found.get(run.id.encode())
        if before is None or (before.fence, before.start_us) < (run.fence, run.start_us):
            found[run.id.encode()] = run
    return found


def _rows(data: DataSet, names: tuple[str, ...], fits: pc.Expression) -> Iterator[dict[str, Any]]:
    if data.last() is None:
        raise StartRefused(f"there is no archive in {data.folder} (usher audit archive)")
    files, _ = data.complete()
    if files:
        for batch in ds.dataset([str(file) for file in files]).to_batches(columns=list(names), filter=fits):
            yield from batch.to_pylist()
