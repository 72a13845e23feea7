"""`usher report`: waits, run times, retries, dead letters and worker seconds of what was executed, by day and ticket,
tenant, handler and consumer, from the archive and the run log; as one page with plots, and as Parquet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, MutableMapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import click
import jinja2
import pyarrow.parquet as pq

from usher.common.base.text import escape_control, span
from usher.common.protocol.stream_id import after
from usher.master.audit import batches, findings
from usher.master.audit.archive import data_sets, locked
from usher.master.audit.cli import session, with_link
from usher.master.audit.engine import Engine, refusing
from usher.master.audit.job import read_redis, readers_of
from usher.master.audit.settings import AuditChoices
from usher.master.cli.shared import print_json
from usher.master.membership.registry import read_registry

#: Dimensions, in the order in which people ask for them, and the tables that Parquet files are made of.
DIMENSIONS = ("tenant", "handler", "ticket", "consumer")
_FILES = ("days", "hours")
_DAY_US = 86_400_000_000
#: Days from which a trend is told, and days beyond which a forecast says nothing.
_LEAST_DAYS, _FAR_DAYS = 3, 730


def forecast(busiest: Mapping[str, float], slots: int, today: date) -> tuple[str, date | None]:
    """Return, by least squares, how the busiest hour of a day grows, in words, and when it fills all slots (None: not
    within two years, or nobody knows). ``busiest``: day -> handlers that ran on average in its busiest hour. Days
    without executions count as none.

    >>> forecast({"2026-01-01": 1.0, "2026-01-02": 2.0, "2026-01-03": 3.0}, 8, date(2026, 1, 3))[1]
    datetime.date(2026, 1, 8)
    >>> forecast({"2026-01-01": 9.0, "2026-01-02": 9.0, "2026-01-03": 9.0}, 8, date(2026, 1, 3))[1]
    datetime.date(2026, 1, 3)
    """
    days = sorted(map(date.fromisoformat, busiest))
    if not days or (count := (days[-1] - days[0]).days + 1) < _LEAST_DAYS:
        return f"No forecast yet: it takes {_LEAST_DAYS} days, and there are {len(days)}.", None
    levels = [busiest.get(str(days[0] + timedelta(n)), 0.0) for n in range(count)]
    growth, level = statistics.linear_regression(range(count), levels)
    a_day = growth / (statistics.fmean(levels) or 1.0)
    moved = f"grew by {a_day:.1%}" if a_day >= 0 else f"shrank by {-a_day:.1%}"
    trend = f"Over {count} days the busiest hour {moved} a day."
    if not slots:
        return f"{trend} No consumer lives, so how much they could do is not known.", None
    now = level + growth * (today - days[0]).days
    left = 0.0 if now >= slots else (slots - now) / growth if growth > 0 else float(_FAR_DAYS + 1)
    full_on = today + timedelta(days=round(left)) if left <= _FAR_DAYS else None
    when = "last for two years" if full_on is None else f"are all busy by {full_on}"
    return f"{trend} At this rate the {slots} slots of the consumers that live now {when}.", full_on


def measure(engine: Engine, settings: AuditChoices, archive: Path, folder: Path, since_us: int) -> None:
    """Make the tables ``days`` and ``hours`` of what was executed since then: of the archive in ``archive``, and of the
    run log behind it. ``folder`` is for what is read. Raises StartRefused."""
    files: list[Path] = []
    rows, floors = 0, {}
    first_day = str(date.fromtimestamp(0) + timedelta(microseconds=since_us))
    for stream in settings.streams:
        _, runs, _ = data_sets(archive, settings.keys(stream))
        if (last := runs.recover()) is None:
            continue
        floors[stream] = last.last.encode()
        found = [one for one in runs.complete()[0] if one.parent.name >= f"date={first_day}"]
        files, rows = files + found, rows + sum(pq.read_metadata(one).num_rows for one in found)
    engine.files("archived", files, batches.RUNS, rows if files else None)

    def read(reader: Any, keys: Any) -> Any:
        since = after(floors[keys.stream]) if keys.stream in floors else b"-"
        return batches.runs(reader, keys.stream, keys.runs, (since, b"+"))

    with readers_of(settings) as readers:
        read_redis(engine, readers, folder / "logged.parquet", batches.RUNS, read)
        read_redis(engine, readers, folder / "letters.parquet", batches.LETTERS, batches.letters)
    engine.view("runs", "SELECT * FROM archived UNION ALL SELECT * FROM logged")
    engine.view("events", findings.text("tables/events").replace("{since_us}", str(since_us)))
    engine.view("worked", findings.text("tables/worked"))
    for name in ("measured", "spread", *_FILES):
        engine.keep(name, findings.text(f"tables/{name}"))


_ROW = ("stream", "dim", "name", "day", "executions", "done", "failed", "retries", "letters", "worker_s")
_TIMES = ("wait_p50_ms", "wait_p95_ms", "wait_p99_ms", "run_p50_ms", "run_p95_ms", "run_p99_ms")


def document(engine: Engine, slots: Mapping[str, int], top: int, today: date) -> dict[str, Any]:
    """Return what page and --json tell, of the tables of ``measure``: for each stream the totals, days, and the first
    ``top`` names of each dimension by worker seconds."""
    names = (*_ROW, *_TIMES, "busiest")
    wanted = f"""SELECT d.{", d.".join(names[:-1])}, coalesce(h.busiest, 0) FROM (
        SELECT *, row_number() OVER (PARTITION BY stream, day, dim ORDER BY worker_s DESC, executions DESC, name) AS nth
          FROM days) d LEFT JOIN (SELECT stream, substr(hour, 1, 10) AS day, max(busy) AS busiest FROM hours
                                   GROUP BY stream, substr(hour, 1, 10)) h ON h.stream = d.stream AND h.day = d.day
         WHERE dim = 'all' OR (d.day = '' AND nth <= {top}) ORDER BY d.stream, dim, d.day, nth"""
    rows, told = [dict(zip(names, row, strict=True)) for row in engine.rows(wanted)], []
    for stream in slots:
        of = {
            dim: [one for one in rows if (one["stream"], one["dim"]) == (stream, dim)] for dim in ("all", *DIMENSIONS)
        }
        whole, days = ([one for one in of["all"] if bool(one["day"]) is is_day] for is_day in (False, True))
        busiest = {one["day"]: one["busiest"] for one in days if one["executions"]}
        expected, full_on = forecast(busiest, slots[stream], today)
        found = {"stream": stream, "total": next(iter(whole), None), "days": days, "slots": slots[stream]}
        named = {dim: [one for one in of[dim] if one["name"]] for dim in DIMENSIONS}
        told.append(found | {"top": named, "forecast": expected, "full_on": full_on})
    return {"streams": told}


def run(
    settings: AuditChoices, environ: MutableMapping[str, str], place: Path, days: int, top: int, as_json: bool
) -> None:
    """Make page and tables of the last days, and print what they tell. ``place``: the archive. Raises StartRefused."""
    now_s, page = time.time(), settings.folder / "report.html"
    since_us = (int(now_s * 1e6) // _DAY_US - days + 1) * _DAY_US
    about = f"{days} days up to {time.strftime('%Y-%m-%d %H:%M', time.gmtime(now_s))} UTC"
    done = refusing("the report was not made")
    with done, locked(place), session(settings, settings.redis_url, environ, place) as (engine, folder):
        measure(engine, settings, place, folder, since_us)
        lives = (with_link(settings, one, read_registry) for one in settings.streams)
        slots = [sum(one.registration.slots for one in found.values() if one.alive) for found in lives]
        (settings.folder / "report").mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in _FILES:
            engine.write(f"SELECT * FROM {name}", folder / name)
            (folder / name).replace(settings.folder / "report" / f"{name}.parquet")
        told = document(engine, dict(zip(settings.streams, slots, strict=True)), top, date.today())
        environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        environment.filters["ms"] = span
        template = environment.from_string((findings.FILES / "workload.html").read_text(encoding="utf-8"))
        (folder / page.name).write_text(template.render(told=told, about=about, dims=DIMENSIONS), encoding="utf-8")
        (folder / page.name).replace(page)
    if as_json:
        print_json(told | {"page": str(page), "tables": str(settings.folder / "report")})
        return
    for stream in told["streams"]:
        told_of = "nothing was executed"
        if sums := stream["total"]:
            hours = f"{sums['worker_s'] / 3600:,.1f} worker hours"
            told_of = f"{sums['executions']:,} executions, {hours}. {stream['forecast']}"
        click.echo(f"{escape_control(stream['stream'])}, {about}: {told_of}")
    click.echo(f"By tenant, handler, ticket and consumer, with plots: {page}")
