"""`usher report` against a plain count of the same executions."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from tests.audit.seeding import Seeder
from tests.commands import usher
from usher.common.protocol.marks import MarkFields
from usher.common.protocol.run_log import encode
from usher.common.redis.client import Link
from usher.consumer.policy.outcome import Finished

GROUP = "concurrency_stream_group"
_DAY_US = 86_400_000_000
_HOSTILE = "<script>alert(1)</script>"
Run = tuple[str, str, str, Finished, str]  # consumer, handler, tenant, and how it went


def executions(days: int, seed: int) -> list[list[Run]]:
    """Records of some executions on each of the last days."""
    rng, today = random.Random(seed), time.time_ns() // 1000 // _DAY_US * _DAY_US
    records = []
    for day in range(days):
        for part in range(3):
            consumer, handler, rows = f"c{part}:{day + 1}", ("shop:pay", "shop:mail")[part % 2], []
            for n in range(40):
                added = today - day * _DAY_US + rng.randrange(_DAY_US // 2)
                tenant, ticket = rng.choice((_HOSTILE, "acme", "zoo")), f"t{rng.randrange(5)}"
                began = added // 1000 * 1000 + rng.randrange(1, 3_000_000)
                place = f"{added // 1000}-{1000 * part + n}".encode()
                ended, attempt = began + rng.randrange(1, 500_000), rng.choice((1, 1, 1, 2))
                run = Finished(ticket.encode(), place, 5, attempt, began, ended, flat=(b"customer", tenant.encode()))
                rows.append((consumer, handler, tenant, run, rng.choice(("done", "done", "failed"))))
            records.append(rows)
    return records


def write(link: Link, seeder: Seeder, records: Iterable[list[Run]]) -> None:
    for rows in records:
        consumer, handler, *_ = rows[0]
        told = encode(consumer, [row[3] for row in rows], [row[4] for row in rows], handler, MarkFields("customer"))
        link.call("XADD", seeder.keys.runs, "*", "batch", told)


def check(told: list[dict[str, Any]], of: dict[str, list[Run]]) -> None:
    assert {one["name"] for one in told} == set(of)
    for one in told:
        runs = of[one["name"]]
        assert one["executions"] == len(runs)
        assert one["failed"] == sum(row[4] == "failed" for row in runs)
        assert one["retries"] == sum(row[3].attempt > 1 for row in runs)
        took = [(row[3].end_us - row[3].start_us) / 1000 for row in runs]
        waits = [row[3].start_us / 1000 - int(row[3].stream_id.split(b"-")[0]) for row in runs if row[3].attempt == 1]
        assert one["worker_s"] == pytest.approx(sum(took) / 1000)
        for name, values in (("run", took), ("wait", waits)):
            for what, part in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
                exact = sorted(values)[max(0, math.ceil(part * len(values)) - 1)]
                assert one[f"{name}_{what}_ms"] == pytest.approx(exact, rel=0.025)


@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.slow)])
def test_it_counts_what_was_executed(
    engine: str,
    settings: dict[str, str],
    link: Link,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tests.audit.seeding.GROUP", GROUP)
    seeder, records = Seeder(link, "ticket_stream"), executions(5, 1)
    assert usher("report", "--engine", engine) == 0
    assert "nothing was executed" in capsys.readouterr().out
    seeder.live("c1:9")
    write(link, seeder, records[:7])
    assert usher("audit", "archive") == 0
    write(link, seeder, records[7:])
    runs = [row for rows in records for row in rows]
    given_up = runs[50]
    seeder.letter(given_up[3].stream_id.decode(), given_up[3].ticket.decode())
    capsys.readouterr()
    assert usher("report", "--engine", engine, "--days", "4", "--json") == 0
    document = orjson.loads(capsys.readouterr().out)
    (stream,) = document["streams"]
    cut = time.time_ns() // 1000 // _DAY_US * _DAY_US - 3 * _DAY_US
    kept = [row for row in runs if row[3].start_us >= cut]
    assert len(kept) < len(runs)

    def by(key: Any) -> dict[str, list[Run]]:
        found: dict[str, list[Run]] = {}
        for row in kept:
            found.setdefault(key(row), []).append(row)
        return found

    check([stream["total"] | {"name": ""}], {"": kept})
    check(stream["top"]["tenant"], by(lambda row: row[2]))
    check(stream["top"]["handler"], by(lambda row: row[1]))
    check(stream["top"]["ticket"], by(lambda row: row[3].ticket.decode()))
    check(stream["top"]["consumer"], by(lambda row: row[0].partition(":")[0]))
    days = by(lambda row: time.strftime("%Y-%m-%d", time.gmtime(row[3].start_us // 1_000_000)))
    check([one | {"name": one["day"]} for one in stream["days"]], days)
    assert stream["slots"] == 1
    letters = {one["name"]: one["letters"] for one in stream["top"]["tenant"]}
    assert letters == {tenant: int(tenant == given_up[2]) for tenant in (_HOSTILE, "acme", "zoo")}
    assert "<script" not in (page := Path(document["page"]).read_text())
    assert "&lt;script" in page
    table = pq.read_table(Path(document["tables"]) / "days.parquet").to_pylist()
    assert sum(row["executions"] for row in table if row["dim"] == "tenant" and row["day"]) == len(kept)
    hours = pq.read_table(Path(document["tables"]) / "hours.parquet")
    assert sum(hours["busy"].to_pylist()) * 3600 == pytest.approx(stream["total"]["worker_s"])
