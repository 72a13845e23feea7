"""A simulated history, step by step, as ``usher audit archive`` would have archived it. Redis only knows where it
ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import ZERO
from usher.common.redis.client import Link
from usher.master.audit import batches
from usher.master.audit.archive import Commit, DataSet, data_sets
from usher.master.policy.explain import FENCES_PER_MS

STEP_MS = 300_000
_OWNERS, _PER_RECORD = 8, 100
_LAG_US = 2_000


@dataclass
class History:
    """A history: ``executions`` of each step are of ``tickets``, the share ``hot`` of them of one; every ``faults``-th
    step loses an entry, and the one after it runs another one twice. ``seeded``: (check, id) of these so far."""

    keys: Keys
    folder: Path
    executions: int
    tickets: int
    hot: float
    faults: int
    first_ms: int
    seeded: set[tuple[str, str]] = field(default_factory=set)
    _twice: dict[str, Any] | None = None

    def add(self, link: Link, step: int) -> int:
        """Archive the entries and executions of a step. Returns how many executions it has."""
        entries, runs = self._rows(step)
        archived = data_sets(self.folder, self.keys)
        for data, rows, key in zip(archived, (entries, runs), (self.keys.stream, self.keys.runs), strict=False):
            last = (rows["id"] if key == self.keys.stream else rows["record"])[-1].as_py()
            _commit(data, rows, last, self._begin_ms(step))
            link.call("XSETID", key, last)
            if key == self.keys.stream:
                link.call("XGROUP", "SETID", key, self.keys.group, last)
        return len(runs)

    def _begin_ms(self, step: int) -> int:
        return self.first_ms + step * STEP_MS

    def _rows(self, step: int) -> tuple[pa.Table, pa.Table]:
        dice, count = np.random.default_rng(step), self.executions
        offset_us = np.arange(count, dtype=np.int64) * (STEP_MS * 1000 - 1_000_000) // count
        ms = self._begin_ms(step) + offset_us // 1000
        seq = np.arange(count) - np.searchsorted(ms, ms)
        number = dice.integers(1, self.tickets, count)
        number[dice.random(count) < self.hot] = 0
        ids = _joined(ms, "-", seq)
        ticket = _joined("t", number)
        stream = pa.repeat(self.keys.stream, count)
        name, other, body = (pa.repeat(text, count) for text in ("ticket_id", "body", "simulated"))
        pairs, fours = (np.arange(0, each * count + 1, each, dtype=np.int32) for each in (2, 4))
        fields = pa.MapArray.from_arrays(pairs, _woven(name, other), _woven(ticket, body))
        raw = pa.ListArray.from_arrays(fours, _woven(name, ticket, other, body).cast(pa.binary()))
        at = {"stream": stream, "id": ids, "ms": ms, "seq": seq, "nth": (ms << 21) + seq, "ticket": ticket}
        entries = pa.table(at | {"fields": fields, "raw": raw}).select(batches.STREAM.names).cast(batches.STREAM)
        start_us = self._begin_ms(step) * 1000 + offset_us + _LAG_US
        end_us = start_us + STEP_MS * 500 // count
        record = np.arange(count) // _PER_RECORD
        record_ms = end_us[np.minimum((record + 1) * _PER_RECORD, count) - 1] // 1000 + 1
        runs = pa.table(
            at
            | {
                "record": _joined(record_ms, "-", record),
                "record_ms": record_ms,
                "rec": (record_ms << 21) + record,
                "n": np.arange(count) % _PER_RECORD,
                "consumer": _joined("c", number % _OWNERS, ":1"),
                "fence": np.full(count, self._begin_ms(step) * FENCES_PER_MS),
                "attempt": np.ones(count, np.int64),
                "start_us": start_us,
                "end_us": end_us,
                "outcome": pa.repeat("done", count),
                "handler": pa.repeat("bench:handle", count),
                "tenant": _joined("tenant", number % 50),
                "priority": np.zeros(count, np.int64),
            }
        )
        runs = runs.select(batches.RUNS.names).cast(batches.RUNS)
        return entries, self._with_faults(step, runs)

    def _with_faults(self, step: int, runs: pa.Table) -> pa.Table:
        """Return the executions without the one that is lost, and with the one that comes twice."""
        if self._twice is not None:
            last = runs.slice(len(runs) - 1).to_pylist()[0]
            again = {name: self._twice[name] for name in ("stream", "consumer", "id", "ms", "seq", "nth", "ticket")}
            runs = pa.concat_tables([runs, pa.Table.from_pylist([last | again], batches.RUNS)])
            self.seeded.add(("effect_twice", self._twice["id"]))
            self._twice = None
        if self.faults and step % self.faults == 1:
            at = len(runs) // 3
            self.seeded.add(("lost", runs["id"][at].as_py()))
            self._twice = runs.slice(len(runs) // 4, 1).to_pylist()[0]
            runs = pa.concat_tables([runs.slice(0, at), runs.slice(at + 1)])
        return runs


def begun(link: Link, keys: Keys) -> None:
    """Let Redis have a stream and a run log."""
    link.call("XGROUP", "CREATE", keys.stream, keys.group, "0", "MKSTREAM")
    link.call("XADD", keys.runs, "0-1", "batch", "{}")


def _commit(data: DataSet, rows: pa.Table, last: str, begin_ms: int) -> None:
    before = data.last()
    number, after = (before.number + 1, before.last) if before else (1, ZERO.decode())
    made = Commit(number, after, last, len(rows))
    pq.write_table(rows, data.place(made, time.strftime("date=%Y-%m-%d", time.gmtime(begin_ms / 1000))))
    data.commit(made)


def _joined(*parts: Any) -> pa.Array:
    """Return texts made of texts and numbers, side by side."""
    texts = [part if isinstance(part, str) else pa.array(part).cast(pa.string()) for part in parts]
    return pc.binary_join_element_wise(*texts, "")


def _woven(*parts: pa.Array) -> pa.Array:
    """Return the first value of each part, then the second one of each, and so on."""
    count = len(parts[0])
    order = np.arange(len(parts) * count).reshape(len(parts), count).T.ravel()
    return pa.concat_arrays(parts).take(pa.array(order))
