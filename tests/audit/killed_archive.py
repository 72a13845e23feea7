"""Runs of the archive that are killed (SIGKILL) at every single step: ``python -m tests.audit.killed_archive REDIS
FOLDER``.

Each run is a process of its own, forked from this one, in which the n-th step kills; a run without a kill follows, and
then the archive is compared with the streams. n goes up until a run has no n-th step.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tests.audit.seeding import GROUP, Seeder
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Link
from usher.master.audit.archive import Archive

STREAM = "s"
_DAY_MS = 86_400_000
#: Everything that leaves a trace outside of the process.
_STEPS: tuple[tuple[Any, str], ...] = (
    *((Path, "replace"), (Path, "mkdir"), (os, "fsync"), (shutil, "rmtree"), (json, "dump")),
    *((pq.ParquetWriter, "write_batch"), (Link, "call")),
)


def kill_at(step: int) -> None:
    """From now on, the ``step``-th call of ``_STEPS`` kills this process instead. What lies between two of them leaves
    no trace."""
    passed = 0

    def deadly(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(*given: Any, **named: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*given, **named)

        return call

    for place, name in _STEPS:
        setattr(place, name, deadly(getattr(place, name)))


def run(url: str, folder: Path, step: int) -> int:
    """One run in a process of its own, killed at ``step`` (0: not at all). The signal that ended it."""
    child = os.fork()
    if not child:
        try:
            kill_at(step)
            Archive(url, Keys(STREAM, GROUP), b"ticket_id", folder).add()
        finally:
            os._exit(int(sys.exc_info()[0] is not None))
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"step {step}: the run failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def visible(folder: Path, table: str) -> list[str]:
    """Ids that a reader of the archive sees."""
    place = folder / f"stream-{STREAM}" / (table if table == "entries" else f"{table}/group={GROUP}")
    if not list(place.glob("date=*/*.parquet")):
        return []
    return sorted(
        ds.dataset(place, format="parquet").to_table(columns=["id"])["id"].to_pylist(),
        key=lambda told: rank(told.encode()),
    )


def main(url: str, folder: Path) -> int:
    """The number of steps at which a run was killed."""
    link = Link(url, "test")
    seeder = Seeder(link, STREAM)
    keys = {"entries": STREAM, "runs": seeder.keys.runs}
    step = 0
    while True:
        step += 1
        for day in (2 * step, 2 * step + 1):
            seeder.add((f"{day * _DAY_MS}-1", "a"), (f"{day * _DAY_MS}-2", "b"))
            seeder.ran("c1:1", (f"{day * _DAY_MS}-1", "a", 5, 1, 2), record=f"{day * _DAY_MS}-1")
        signalled = run(url, folder, step)
        floor = link.call("GET", LogKeys(STREAM).archived) or b"0-0"
        for table, key in keys.items():
            there, seen = (
                [entry_id.decode() for entry_id, _ in link.call("XRANGE", key, "-", "+")],
                visible(folder, table),
            )
            assert len(set(seen)) == len(seen), f"step {step}: {table} are there twice"
            if table == "entries":
                missing = [one for one in there if rank(one.encode()) <= rank(floor) and one not in seen]
                assert not missing, f"step {step}: below the floor of trimming, and not archived: {missing}"
        run(url, folder, 0)
        for table, key in keys.items():
            there = [entry_id.decode() for entry_id, _ in link.call("XRANGE", key, "-", "+")]
            assert visible(folder, table) == there, f"step {step}: {table}"
        assert link.call("GET", LogKeys(STREAM).archived).decode() == there_last(link), f"step {step}"
        if not signalled:
            return step - 1


def there_last(link: Link) -> str:
    """The stream's last id."""
    last: bytes = link.call("XREVRANGE", STREAM, "+", "-", "COUNT", 1)[0][0]
    return last.decode()


if __name__ == "__main__":
    sys.stdout.write(str(main(sys.argv[1], Path(sys.argv[2]))))
