"""The price of a bell: commits per second of many writers to an outbox whose trigger does not notify, notifies at each
commit, or only while the streamer sleeps. Used by ``python -m benchmarks notify``."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from benchmarks.measure.outbox import running_streamer, until
from usher.common.outbox.database import open_engine
from usher.common.outbox.sql_files import schema
from usher.common.outbox.store import OutboxStore
from usher.common.protocol.stream_id import milliseconds
from usher.common.sql.alchemy import sa
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import STREAM, BenchFailed, Rig

#: Variants of the one trigger; each turn has an order of its own.
_VARIANTS = ("bare", "former", "new")
_FORMER = """FUNCTION usher_outbox_news() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('usher_outbox', '');
    RETURN NULL;
END $$;"""
_NEWS = re.compile(r"^CREATE (FUNCTION usher_outbox_news\(\).*?^END \$\$;)", re.DOTALL | re.MULTILINE)
#: Parts at a fixed rate are so many times longer: else the highest percentile is of one commit.
_LONGER = 5
#: A row that says when it was written.
_WRITE = """\\set ticket random(1, 1000000)
INSERT INTO staged_log_records (ticket_id, action, object, data)
VALUES ('T' || :ticket, 'create', 'row', json_build_object('at', extract(epoch FROM clock_timestamp())));
"""
_TPS = re.compile(r"^tps = ([\d.]+)", re.MULTILINE)


def notify(
    writers: int,
    seconds: float,
    turns: int,
    rates: tuple[float, ...],
    sql_url: str,
    durable: bool,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """Measure once, the streamer running: each variant at full speed, by turns, and the time from the INSERT to the
    stream at fixed rates. A ratio is the geometric mean of those of the turns: what the disk does from one second to
    the next changes a turn by a third, in both directions."""
    told: dict[str, list[float]] = {variant: [] for variant in _VARIANTS}
    run: dict[str, Any] = {"writers": writers, "seconds": seconds, "turns": turns, "appendonly": durable}
    with tempfile.TemporaryDirectory(prefix="usher-bench-") as name, Rig(Path(name), durable, environ) as rig:
        run["redis"] = rig.redis_version()
        script = rig.folder / "write.sql"
        script.write_text(_WRITE)
        with _outbox(sql_url) as (url, outbox, owner), running_streamer(rig, url) as program:

            def sent(variant: str, rate: float = 0) -> float:
                """Have the writers write under a variant, and all be sent; return the commits per second."""
                _choose(owner, variant)
                rig.link.call("DEL", STREAM)
                long = _LONGER if rate else 1
                per_second = _commits(rig, url, script, writers, long * seconds, rate)
                until(lambda: outbox.waiting()[0] == 0, program)
                return per_second

            for _ in range(turns):
                for variant in random.sample(_VARIANTS, len(_VARIANTS)):  # what one leaves behind slows the next
                    told[variant].append(sent(variant))
            for rate in rates:
                for variant in random.sample(_VARIANTS, len(_VARIANTS)):
                    sent(variant, rate)
                    waits = _waits(rig)
                    run[f"{variant}_p99_ms_at_{rate:g}"] = round(waits[int(len(waits) * 0.99)], 1)
            run["streamer_cpu_seconds"] = round(machine.cpu_seconds(program.pid), 2)
    run |= {f"{variant}_per_second": round(statistics.geometric_mean(told[variant]), 1) for variant in _VARIANTS}
    run |= {f"{name}_ratio": round(run[f"{name}_per_second"] / run["bare_per_second"], 3) for name in _VARIANTS[1:]}
    return run | {"turns_per_second": told}


@contextlib.contextmanager
def _outbox(sql_url: str) -> Iterator[tuple[str, OutboxStore, sa.Engine]]:
    """Make an outbox in the schema ``usher_bench``; yield its URL, the outbox, and an engine. What a former run that
    was killed has left there goes."""
    engine = open_engine(sql_url, "--sql")
    if engine.dialect.name != "postgresql":
        raise BenchFailed("--sql: only PostgreSQL notifies")
    url = engine.url.update_query_dict({"options": "-csearch_path=usher_bench"}).render_as_string(hide_password=False)
    drop = sa.text("DROP SCHEMA IF EXISTS usher_bench CASCADE")
    with engine.begin() as connection:
        connection.execute(drop)
        connection.execute(sa.text("CREATE SCHEMA usher_bench"))
    outbox, owner = OutboxStore(url, "--sql"), open_engine(url, "--sql")
    try:
        outbox.migrate()
        yield url, outbox, owner
    finally:
        outbox.close()
        owner.dispose()
        with engine.begin() as connection:
            connection.execute(drop)
        engine.dispose()


def _choose(owner: sa.Engine, variant: str) -> None:
    """Have commits notify as a variant does."""
    [new] = _NEWS.findall(schema("postgresql"))
    state = "DISABLE" if variant == "bare" else "ENABLE"
    with owner.execution_options(no_parameters=True).begin() as connection:
        connection.exec_driver_sql(f"CREATE OR REPLACE {_FORMER if variant == 'former' else new}")
        connection.exec_driver_sql(f"ALTER TABLE staged_log_records {state} TRIGGER usher_outbox_news")


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
