"""The price of a bell: commits per second of many writers to an outbox whose trigger does not notify, notifies at each
commit (as up to schema version 1), or only while the streamer sleeps. Used by ``python -m benchmarks notify``."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from benchmarks.measure.outbox import running_streamer, until
from usher.common.outbox.database import open_engine
from usher.common.outbox.sql_files import versions
from usher.common.outbox.store import OutboxStore
from usher.common.protocol.stream_id import milliseconds
from usher.common.sql.alchemy import sa
from usher.deploy.bench import machine
from usher.deploy.bench.rig import STREAM, BenchFailed, Rig

#: Variants; each turn has an order of its own.
_VARIANTS = ("bare", "former", "new")
_FUNCTIONS = re.compile(r"^CREATE FUNCTION .*?^END \$\$;", re.DOTALL | re.MULTILINE)
#: A row that says when it was written.
_WRITE = """\\set ticket random(1, 1000000)
INSERT INTO staged_log_records (ticket_id, action, object, data)
VALUES ('T' || :ticket, 'create', 'row', json_build_object('at', extract(epoch FROM clock_timestamp())));
"""
_TPS = re.compile(r"^tps = ([\d.]+)", re.MULTILINE)


def notify(
    writers: int, seconds: float, rates: tuple[float, ...], sql_url: str, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Measure each variant once, the streamer running: at full speed, and the time from the INSERT to the stream at
    fixed rates."""
    run: dict[str, Any] = {"writers": writers, "seconds": seconds, "appendonly": durable, "cpu_seconds": {}}
    for variant in random.sample(_VARIANTS, len(_VARIANTS)):  # what one leaves behind slows the next
        with tempfile.TemporaryDirectory(prefix="usher-bench-") as name, Rig(Path(name), durable, environ) as rig:
            run["redis"] = rig.redis_version()
            url, engine = _made(sql_url, variant)
            outbox = OutboxStore(url, "--sql")
            try:
                told, run["cpu_seconds"][variant] = _of_variant(rig, outbox, url, writers, seconds, rates)
                run |= {f"{variant}_{what}": value for what, value in told.items()}
            finally:
                outbox.close()
                with engine.begin() as connection:
                    connection.execute(sa.text("DROP SCHEMA usher_bench CASCADE"))
                engine.dispose()
    run |= {f"{name}_ratio": round(run[f"{name}_per_second"] / run["bare_per_second"], 3) for name in _VARIANTS[1:]}
    return run


def _of_variant(
    rig: Rig, outbox: OutboxStore, url: str, writers: int, seconds: float, rates: tuple[float, ...]
) -> tuple[dict[str, float], float]:
    """Return the figures of one variant, and the CPU seconds of the streamer at full speed."""
    script = rig.folder / "write.sql"
    script.write_text(_WRITE)
    with running_streamer(rig, url, poll_s=0.5) as program:
        before = machine.cpu_seconds(program.pid)
        told = {"per_second": _commits(rig, url, script, writers, seconds)}
        until(lambda: outbox.waiting()[0] == 0, program)
        spent = round(machine.cpu_seconds(program.pid) - before, 2)
        for rate in rates:
            rig.link.call("DEL", STREAM)
            _commits(rig, url, script, writers, seconds, rate)
            until(lambda: outbox.waiting()[0] == 0, program)
            waits = _waits(rig)
            told[f"p99_ms_at_{rate:g}"] = round(waits[int(len(waits) * 0.99)], 1)
    return told, spent


def _made(sql_url: str, variant: str) -> tuple[str, sa.Engine]:
    """Make an outbox in a schema of its own; return its URL, and an engine of the database."""
    engine = open_engine(sql_url, "--sql")
    if engine.dialect.name != "postgresql":
        raise BenchFailed("--sql: only PostgreSQL notifies")
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA usher_bench"))
    url = engine.url.update_query_dict({"options": "-csearch_path=usher_bench"}).render_as_string(hide_password=False)
    outbox = OutboxStore(url, "--sql")
    outbox.migrate()
    outbox.close()
    own = open_engine(url, "--sql")
    with own.execution_options(no_parameters=True).begin() as connection:
        if variant != "new":
            for function in _FUNCTIONS.findall(versions("postgresql")[1]):
                connection.exec_driver_sql(function.replace("CREATE", "CREATE OR REPLACE", 1))
        if variant == "bare":
            connection.exec_driver_sql("DROP TRIGGER usher_outbox_news ON staged_log_records")
    own.dispose()
    return url, engine


def _commits(rig: Rig, url: str, script: Path, writers: int, seconds: float, rate: float = 0) -> float:
    """Have pgbench write, and return the commits per second."""
    program = shutil.which("pgbench")
    if program is None:
        raise BenchFailed("pgbench, which comes with PostgreSQL, is not on the PATH")
    at = sa.engine.make_url(url)
    where = at.set(drivername="postgresql", password=None).render_as_string()
    words = [program, "-n", "-M", "prepared", "-c", str(writers), "-j", "2", "-T", f"{seconds:.0f}", "-f", str(script)]
    done = subprocess.run(
        [*words, *(["-R", f"{rate:g}"] if rate else []), where],
        env=rig.environ | ({"PGPASSWORD": str(at.password)} if at.password else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    found = _TPS.search(done.stdout)
    if done.returncode or found is None:
        raise BenchFailed(f"pgbench: {done.stderr.strip() or done.stdout.strip()}")
    return round(float(found[1]), 1)


def _waits(rig: Rig) -> list[float]:
    """Return the ms from each row's INSERT to its entry, sorted."""
    waits: list[float] = []
    start = "-"
    while page := rig.link.call("XRANGE", STREAM, start, "+", "COUNT", 1000):
        for entry_id, flat in page:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            waits.append(milliseconds(entry_id) - orjson.loads(fields[b"data"])["at"] * 1000)
        start = f"({page[-1][0].decode()}"
    if not waits:
        raise BenchFailed("no row came to the stream")
    return sorted(waits)
