"""The outbox under measurement: rows from their commit to the stream, and to the handler. Used by ``python -m
benchmarks outbox``."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rig.system import Rig
from usher.common.outbox.store import LogRecord, OutboxStore, open_engine, write_all_to_outbox, write_to_outbox
from usher.common.protocol.keys import LogKeys
from usher.common.runtime.own_command import usher_command
from usher.common.sql.alchemy import sa
from usher.deploy.bench import rig as machine
from usher.deploy.bench.handlers import FOLDER_VARIABLE, read_waits
from usher.deploy.bench.rig import GROUP, STREAM, BenchFailed

_PATIENCE_S = 300.0
_BATCH = 1000
#: A streamers' lease without a holder: the streamer stands by until it is deleted, so that it is there when the clock
#: starts.
_HOLD = "1 bench nobody"


def rows_per_second(rows: int, payload: int, sql_url: str, durable: bool, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run once: the same messages through a bare pipeline, then committed rows through the streamer.

    The clock runs from the release of the streamer until the last row's entry is in the stream and its row is gone.
    """
    with _rig(sql_url, durable, environ) as (rig, outbox, url):
        data = {"body": "x" * payload}
        records = [LogRecord(f"T{at % 1000}", "create", "row", data) for at in range(rows)]
        floor_s = _floor_seconds(rig, records, payload)
        rig.link.call("FLUSHALL")
        _stage(url, records)
        keys = LogKeys(STREAM)
        rig.link.call("SET", keys.leader, f"{_HOLD}:{outbox.identity}")
        with running_streamer(rig, url) as streamer:
            before = _cpu(rig, streamer)
            rig.link.call("DEL", keys.leader)
            until(lambda: rig.link.call("XLEN", STREAM) > 0, streamer)
            began = time.monotonic()
            first = rig.link.call("XLEN", STREAM)
            until(lambda: rig.link.call("XLEN", STREAM) >= rows and outbox.waiting()[0] == 0, streamer)
            seconds = (time.monotonic() - began) * rows / max(1, rows - first)
            after = _cpu(rig, streamer)
        if rig.link.call("XLEN", STREAM) != rows:
            raise BenchFailed(f"{rig.link.call('XLEN', STREAM):,} entries of {rows:,} rows")
        return {
            "rows": rows,
            "payload_bytes": payload,
            "database": outbox.dialect,
            "batch": _BATCH,
            "appendonly": durable,
            "messages_per_second": round(rows / seconds, 1),
            "floor_per_second": round(rows / floor_s, 1),
            "ratio": round(floor_s / seconds, 4),
            "seconds": round(seconds, 3),
            "cpu_seconds": {name: round(after[name] - before[name], 2) for name in after},
            "redis": rig.redis_version(),
        }


def latency(
    rate: float, seconds: float, payload: int, sql_url: str, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once: rows committed one by one on an open-loop schedule; the wait counts from a commit's due time to the
    start of the handler."""
    count = int(rate * seconds)
    with _rig(sql_url, durable, environ) as (rig, outbox, url):
        waits_folder = rig.folder / "waits"
        waits_folder.mkdir()
        rig.stream.create_group(b"0-0")
        rig.start_programs(1, "benchmarks.programs.handlers:timed_row", {FOLDER_VARIABLE: str(waits_folder)})
        rig.release()
        with running_streamer(rig, url) as streamer:
            _commit_on_schedule(url, int(rate), rate, payload)  # a second to warm up
            before = _cpu(rig, streamer)
            began = time.monotonic()
            _commit_on_schedule(url, count, rate, payload)
            until(lambda: outbox.waiting()[0] == 0, streamer)
            rig.wait_until_done(bytes(rig.link.call("XREVRANGE", STREAM, "+", "-", "COUNT", 1)[0][0]), 60.0)
            took = time.monotonic() - began
            after = _cpu(rig, streamer)
            rig.end_programs()
        waits = sorted(read_waits(waits_folder))
        if len(waits) < count * 0.9:
            raise BenchFailed(f"only {len(waits)} of {count} rows were timed")
        return {
            "rows": count,
            "rate": rate,
            "payload_bytes": payload,
            "database": outbox.dialect,
            "appendonly": durable,
            "timed": len(waits),
            "p50_ms": round(waits[len(waits) // 2] / 1e6, 3),
            "p99_ms": round(waits[int(len(waits) * 0.99)] / 1e6, 3),
            "max_ms": round(waits[-1] / 1e6, 3),
            "seconds": round(took, 2),
            "cpu_seconds": {name: round(after[name] - before[name], 2) for name in after},
            "redis": rig.redis_version(),
        }


def _floor_seconds(rig: Rig, records: Sequence[LogRecord], payload: int) -> float:
    """Return the seconds of a bare pipeline of the same messages, 1000 XADDs at a time, made before the clock starts;
    no SQL, no order."""
    body = b'{"body":"' + b"x" * payload + b'"}'
    batches = [
        [
            (
                "XADD",
                STREAM,
                "*",
                "ticket_id",
                str(one.ticket_id),
                "uid",
                f"{at + n:032x}",
                "action",
                one.action,
                "object",
                one.object,
                "data",
                body,
            )
            for n, one in enumerate(records[at : at + _BATCH])
        ]
        for at in range(0, len(records), _BATCH)
    ]
    began = time.monotonic()
    for batch in batches:
        for reply in rig.link.pipeline(batch):
            if isinstance(reply, Exception):
                raise reply
    return time.monotonic() - began


def _stage(url: str, records: Sequence[LogRecord]) -> None:
    engine = open_engine(url, "--sql")
    for at in range(0, len(records), 10_000):
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(sa.text("SET LOCAL usher.outbox_lock = 'off'"))
            write_all_to_outbox(connection, records[at : at + 10_000])
    engine.dispose()


def _commit_on_schedule(url: str, count: int, rate: float, payload: int) -> None:
    """Commit row i at i / rate, however slow the system is."""
    engine = open_engine(url, "--sql")
    began_ns = time.time_ns()
    with engine.connect() as connection:
        for at in range(count):
            due_ns = began_ns + int(at / rate * 1e9)
            time.sleep(max(0.0, (due_ns - time.time_ns()) / 1e9))
            write_to_outbox(
                connection,
                ticket_id=f"T{at % 1000}",
                action="create",
                object="row",
                data={"due_ns": due_ns, "body": "x" * payload},
            )
            connection.commit()
    engine.dispose()


@contextlib.contextmanager
def _rig(sql_url: str, durable: bool, environ: Mapping[str, str]) -> Iterator[tuple[Rig, OutboxStore, str]]:
    with tempfile.TemporaryDirectory(prefix="usher-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        url = sql_url or f"sqlite:///{folder / 'outbox.db'}"
        outbox = OutboxStore(url, "--sql")
        try:
            outbox.migrate()
            if outbox.waiting()[0]:
                raise BenchFailed("--sql: this outbox has rows; give an empty database")
            if outbox.dialect == "sqlite":
                _write_ahead(url)
            with Rig(durable, environ) as rig:
                yield rig, outbox, url
        finally:
            outbox.close()


def _write_ahead(url: str) -> None:
    """Set SQLite up as an application would: readers and the writer do not wait for each other."""
    engine = open_engine(url, "--sql")
    with engine.connect() as connection:
        connection.execute(sa.text("PRAGMA journal_mode = WAL"))
    engine.dispose()


@contextlib.contextmanager
def running_streamer(rig: Rig, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a streamer meanwhile."""
    environ = rig.environ | {
        "USHER_REDIS_URL": rig.url,
        "USHER_TICKET_STREAM": STREAM,
        "USHER_GROUP": GROUP,
        "USHER_LOG_LEVEL": "warning",
    }
    environ["USHER_OUTBOX_URL"] = url
    program = subprocess.Popen(usher_command("streamer"), env=environ, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    try:
        until(lambda: b"streamer:elect" in bytes(rig.link.call("CLIENT", "LIST")), program)
        yield program
    finally:
        program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(15)
        if program.poll() is None:
            program.kill()
            program.wait()


def _cpu(rig: Rig, streamer: subprocess.Popen[bytes]) -> dict[str, float]:
    return {**rig.cpu(), "streamer": machine.cpu_seconds(streamer.pid)}


def until(done: Any, program: subprocess.Popen[bytes]) -> None:
    """Wait until ``done`` returns True. Raises BenchFailed when the program ends, or after minutes."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not done():
        if program.poll() is not None:
            raise BenchFailed(f"the streamer ended with exit code {program.returncode}")
        if time.monotonic() > deadline_s:
            raise BenchFailed(f"not done after {_PATIENCE_S:.0f} s")
        time.sleep(0.005)
