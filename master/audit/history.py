"""The history: one Parquet partition per run, so that trends are a query away.

``<folder>/history/run=<run>/findings.parquet`` has a row per check and stream that found something, and one row with
check ``""`` for the run itself with its figures. Any Parquet reader takes it as one table partitioned by ``run``::

    spark.read.parquet("history").where("check = ''").select("run", "verdict", "pending",
    "oldest_age_ms").orderBy("run").show()
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from usher.master.audit.report import AuditReport

_FIGURES = ("pending", "tickets_pending", "oldest_age_ms", "dead_letters", "executions", "unsuccessful", "repeated")
_SCHEMA = pa.schema(
    [
        pa.field("started_ms", pa.int64()),
        pa.field("seconds", pa.float64()),
        pa.field("verdict", pa.string()),
        pa.field("stream", pa.string()),
        pa.field("check", pa.string()),
        pa.field("severity", pa.string()),
        pa.field("findings", pa.int64()),
        pa.field("suspects", pa.int64()),
        *(pa.field(name, pa.int64()) for name in _FIGURES),
        pa.field("execution_p99_ms", pa.float64()),
        pa.field("slowest_recovery_ms", pa.float64()),
    ]
)
_FILE = "findings.parquet"
#: The most runs of a trend.
SHOWN_RUNS = 60


def add(folder: Path, report: AuditReport) -> Path:
    """Write a run's partition, whole or not at all, and return its folder. Raises OSError."""
    final = folder / f"run={report.run}"
    hidden = folder / f"_{report.run}.{os.getpid()}"  # readers skip names that begin with _
    hidden.mkdir(parents=True)
    try:
        pq.write_table(pa.Table.from_pylist(list(_rows(report)), schema=_SCHEMA), hidden / _FILE)
        hidden.rename(final)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return final


def _rows(report: AuditReport) -> Iterator[dict[str, Any]]:
    base = {"started_ms": report.started_ms, "seconds": report.seconds, "verdict": report.verdict}
    figures = {name: report.figures.get(name) for name in (*_FIGURES, "execution_p99_ms", "slowest_recovery_ms")}
    total = sum(one.count for one in report.found)
    yield (
        base
        | figures
        | {"stream": ",".join(report.streams), "check": "", "severity": "", "findings": total, "suspects": 0}
    )
    for one in report.found:
        yield base | {
            "stream": one.stream,
            "check": one.check.name,
            "severity": one.check.severity.value,
            "findings": one.count,
            "suspects": one.suspects,
        }


def trend(folder: Path, last: int = SHOWN_RUNS) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the row of each of the last runs, oldest first; and one sentence for each run that could not be read."""
    rows, problems = [], []
    for part in sorted(folder.glob("run=*"))[-last:] if folder.is_dir() else []:
        try:
            found = pq.read_table(part / _FILE, filters=[("check", "==", "")], partitioning=None).to_pylist()
            rows += [{"run": part.name.removeprefix("run="), **row} for row in found]
        except (OSError, pa.ArrowException, KeyError) as unreadable:
            run = part.name.removeprefix("run=")
            problems.append(
                f"the history of run {run} cannot be read, the trend is without it: {str(unreadable).splitlines()[0]}"
            )
    return rows, problems
